"""Energies in a subspace, and what other subspaces of the same rank would give.

All of it depends on the gradients through one matrix, C = GᵀG:   E(Q) = ‖GQ‖² / ‖G‖² = tr(QᵀCQ) / tr C

    N1 normal      random, orthogonal to Q (the paper's); mean (1 - E) r / (d - r)
    N2 next        the r principal directions after Q: the hard one
    N3 last        the last r principal directions
    N5 haar        random; mean r / d
    N7 untrained   the proxy of the model at step 0
    N9 signs       Q with random signs of its coordinates: keeps large coordinates that states and gradients share
    N10 shuffled   Q with the gradients of targets dealt anew: what the Jacobian and the frequencies of tokens give

N6, paired windows, needs more than C: see windows.py.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import SpecError, StatesError
from anisoscope.kernels.gram import for_products, limit_on, power_of_two, working_dtype

DRAWS = 199
# The paper's number, whose p is never below 1/21.
PAPER_DRAWS = 20
# Numbers of random spaces and of what moments make of them that are held at one time.
DRAWN_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
# A random matrix that is nearly as tall as wide is nearly singular: fewer directions to spare need float64.
SPARE_NORMALS = 8
# Up to so many coordinates float64 costs next to nothing.
EXACT_DIM = 64


def second_moment(rows: Float[Tensor, "n d"]) -> Float[Tensor, "d d"]:
    """C = GᵀG, divided by its trace (zero where all rows are); float64 where torch rounds float32 products."""
    return second_moments(rows[None])[0]


def second_moments(rows: Float[Tensor, "s n d"], *, finite: bool = False) -> Float[Tensor, "s d d"]:
    """The same of several places; where they are known to be finite, nothing waits for a GPU."""
    raw = rows.to(working_dtype(rows.dtype))
    largest = raw.abs().amax((1, 2)).double()
    if not finite and not bool(largest.isfinite().all()):
        raise StatesError("gradients must be finite, and some are NaN or infinite; drop them first")
    scaled = for_products(raw / power_of_two(largest).to(raw.dtype)[:, None, None])
    moments = scaled.mT @ scaled
    total = moments.diagonal(dim1=1, dim2=2).double().sum(1)
    return moments / torch.where(total > 0, total, 1).to(moments.dtype)[:, None, None]


def energy_of(moment: Float[Tensor, "d d"], basis: Float[Tensor, "d r"]) -> float:
    """E(Q), from C."""
    return float(energies_of(moment[None], basis[None, None]))


def energies_of(moments: Float[Tensor, "s d d"], bases: Float[Tensor, "s k d r"]) -> Float[Tensor, "s k"]:
    """E(Q) of several subspaces; columns of zeros do nothing. Float64, on the CPU."""
    axes = bases.to(moments).transpose(1, 2).flatten(2)
    held = ((moments @ axes) * axes).double().sum(1).unflatten(1, (bases.shape[1], -1)).sum(2)
    total = moments.diagonal(dim1=1, dim2=2).double().sum(1, keepdim=True)
    return torch.where(total > 0, held / total, torch.nan).cpu()


@dataclass(frozen=True, kw_only=True, eq=False)
class RandomSpaces:
    """Energies of random subspaces, and what is left of C without each of the normal ones; float64."""

    haar: Float[Tensor, " m"]
    """N5."""
    normal: Float[Tensor, " m"]
    """N1."""
    normal_squares: Float[Tensor, " q"]
    """‖P C P‖²_F with P = I - NNᵀ, N the normal subspace; none where they were not asked for."""
    normal_bases: Float[Tensor, "k d r"]
    """Orthonormal, of the first k draws, as many as were asked for."""


def random_spaces(
    moment: Float[Tensor, "d d"], basis: Float[Tensor, "d r"], *, draws: int = DRAWS, seed: int = 0, keep: int = 0
) -> RandomSpaces:
    """N5 and N1 for one basis; see `random_spaces_beside`."""
    return random_spaces_beside(moment[None, None], [[basis]], draws=draws, seed=seed, keep=keep)[0][0][0]


def random_spaces_beside(
    moments: Float[Tensor, "s g d d"],
    bases: Sequence[Sequence[Tensor]],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    keep: int = 0,
    led: Sequence[Sequence[bool]] | None = None,
) -> list[list[list[RandomSpaces]]]:
    """N5 and N1 for each moment and basis of several places, without forming an orthonormal basis of each.

    With the rows of Ω an orthonormal basis of a uniform subspace, that of W = Ω(I - QQᵀ) is uniform in the complement:
    E = tr(ΩCΩᵀ) / tr C, and tr((WWᵀ)⁻¹WCWᵀ) / tr C. Only ΩC is a large product, and bases of one rank share it: what
    they differ in are products with Q. Squares and `keep` bases are made for those that are `led` (all, where that is
    not said). Where the moment is float32, energies are within 5e-6 of r / d of those in float64. Places, moments and
    bases of one rank have the same draws, and are computed side by side.
    """
    ahead = [[True] * len(mine) for mine in bases] if led is None else led
    count, dim = moments.shape[1:3]
    alike: dict[tuple[int, int, int], list[tuple[int, list[int]]]] = {}
    for at, (mine, first) in enumerate(zip(bases, ahead, strict=True)):
        for rank in dict.fromkeys(one.shape[1] for one in mine):
            if 2 * rank > dim:
                raise SpecError(
                    f"rank {rank} of {dim} coordinates leaves no normal space of the same rank: at most {dim // 2}"
                )
            places = [place for place, one in enumerate(mine) if one.shape[1] == rank]
            places.sort(key=lambda place, first=first: not first[place])
            alike.setdefault((rank, len(places), sum(first[place] for place in places)), []).append((at, places))
    found: list[list[dict[int, RandomSpaces]]] = [[{} for _ in range(count)] for _ in bases]
    for (rank, _, leading), members in alike.items():
        exact = dim - 2 * rank < SPARE_NORMALS or dim <= EXACT_DIM
        size = max(1, limit_on(DRAWN_ELEMENTS, moments) // (count * draws * rank * dim))
        for start in range(0, len(members), size):
            some = members[start : start + size]
            # Not by an index, which a GPU would have to be sent: that waits for all it has been given to do.
            against = moments if len(some) == len(moments) else torch.stack([moments[at] for at, _ in some])
            against = against.double() if exact else against
            axes = torch.stack([torch.stack([bases[at][place] for place in places]) for at, places in some])
            axes = axes.to(against)
            if exact:
                # WWᵀ is a difference: a basis orthonormal to 1e-7 would leave it indefinite where W is nearly square.
                axes = torch.linalg.qr(axes).Q
            every = _spaces_of_rank(against, axes, draws, seed, keep, leading)
            for (at, places), here in zip(some, every, strict=True):
                for known, spaces in zip(found[at], here, strict=True):
                    known |= dict(zip(places, spaces, strict=True))
    return [
        [[known[place] for place in range(len(mine))] for known in here]
        for here, mine in zip(found, bases, strict=True)
    ]


def _spaces_of_rank(
    moments: Float[Tensor, "s g d d"], bases: Float[Tensor, "s k d r"], draws: int, seed: int, keep: int, led: int
) -> list[list[list[RandomSpaces]]]:
    """Of the first `led` bases also the squares, and `keep` of the spaces."""
    several, count, dim, rank = bases.shape
    seen = _Seen(moments, bases, led)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    kept = bases.new_empty(several, led, 0, dim, rank)
    step = max(1, limit_on(DRAWN_ELEMENTS, bases) // (several * moments.shape[1] * dim * rank))
    identity = torch.eye(rank, dtype=bases.dtype, device=bases.device)
    for start in range(0, draws, step):
        omega = uniform_spaces(draws, rank, dim, seed, bases.dtype, bases.device)[start : start + step]
        along = _against(omega.flatten(0, 1) @ seen.beside, rank)
        # WWᵀ = I - (ΩQ)(ΩQ)ᵀ = LLᵀ: the rows of L⁻¹W are an orthonormal basis.
        root, failed = torch.linalg.cholesky_ex(identity - along @ along.mT)
        # NaN, and not an error, which would wait for a GPU.
        root = torch.where(failed[..., None, None] > 0, math.nan, root)
        root = torch.linalg.solve_triangular(root, identity.expand_as(root), upper=False)
        parts.append(seen.look(omega, along, root))
        if led and kept.shape[2] < keep:
            some = min(keep - kept.shape[2], len(omega))
            normal = omega[:some] - along[:, :led, :some] @ bases[:, :led].mT[:, :, None]
            kept = torch.cat([kept, (root[:, :led, :some] @ normal).mT], 2)
    haar, normal, squares = (torch.cat(one, -1).double() for one in zip(*parts, strict=True))
    # Taken apart at once: there may be hundreds, and an index for each would take longer than the draws did.
    haars, normals, squared = (iter(one.flatten(0, -2).unbind()) for one in (haar, normal, squares))
    no_squares = [squares.new_empty(0)] * (count - led)
    no_bases = [kept.new_empty(0, dim, rank)] * (count - led)
    return [
        [
            [
                RandomSpaces(haar=uniform, normal=one, normal_squares=two, normal_bases=three)
                for one, two, three in zip(
                    itertools.islice(normals, count),
                    (*itertools.islice(squared, led), *no_squares),
                    (*mine.unbind(), *no_bases),
                    strict=True,
                )
            ]
            for uniform in itertools.islice(haars, moments.shape[1])
        ]
        for mine in kept.unbind()
    ]


class _Seen:
    """What C makes of some bases, and of random spaces beside them; each C with the bases of its place."""

    def __init__(self, moments: Float[Tensor, "s g d d"], bases: Float[Tensor, "s k d r"], led: int) -> None:
        self.moments, self.led, self.rank = moments, led, bases.shape[3]
        self.totals = moments.diagonal(dim1=2, dim2=3).double().sum(2)[..., None]
        self.squares = torch.linalg.matrix_norm(moments.double()).square()[..., None, None]
        self.beside = bases.transpose(1, 2).flatten(2)
        images = moments @ self.beside[:, None]
        self.images = images[..., : led * self.rank]

        def inside(columns: Float[Tensor, "s g d q"]) -> Float[Tensor, "s g k r r"]:
            """QᵀCQ of each basis from CQ of all."""
            each = columns.unflatten(3, (-1, self.rank)).movedim(3, 2)
            return bases[:, None, : each.shape[2]].mT @ each

        self.inside, self.twice = inside(images), inside(moments @ self.images)

    def look(
        self, omega: Float[Tensor, "m r d"], along: Float[Tensor, "s k m r r"], root: Float[Tensor, "s k m r r"]
    ) -> tuple[Float[Tensor, "s g m"], Float[Tensor, "s g k m"], Float[Tensor, "s g l m"]]:
        """N5, N1 and ‖PCP‖², from X = ΩQ, Y = ΩCQ and ΩC²Q; the root is L⁻¹.

        WCWᵀ = ΩCΩᵀ - YXᵀ - XYᵀ + X(QᵀCQ)Xᵀ, so with S = (WWᵀ)⁻¹ its trace in an orthonormal basis is
        ⟨S, ΩCΩᵀ⟩ - 2⟨SX, Y⟩ + ⟨XᵀSX, QᵀCQ⟩, and with C² for C it is ‖CN‖².
        """
        flat = omega.flatten(0, 1) @ self.moments
        image = flat.unflatten(2, omega.shape[:2])
        plain, reached = omega @ image.mT, _against(flat @ self.beside[:, None], self.rank)
        inverse = root.mT @ root
        turned = inverse @ along
        within = along.mT @ turned
        haar = plain.diagonal(dim1=3, dim2=4).sum(3)
        normal = _traces(inverse, turned, within, plain, reached, self.inside)
        squares = normal[:, :, : self.led]
        if self.led:
            squared = image @ image.mT
            inverse, turned, within = inverse[:, : self.led], turned[:, : self.led], within[:, : self.led]
            images = _traces(inverse, turned, within, squared, _against(flat @ self.images, self.rank), self.twice)
            x, y = along[:, None, : self.led], reached[:, :, : self.led]
            half = (y - x @ self.inside[:, :, : self.led, None] / 2) @ x.mT
            form = root[:, None, : self.led] @ (plain[:, :, None] - half - half.mT) @ root[:, None, : self.led].mT
            # ‖PCP‖² = ‖C‖² - 2‖CN‖² + ‖NᵀCN‖²
            squares = self.squares - 2 * images + form.square().sum((4, 5))
        return haar / self.totals, normal / self.totals[..., None], squares


def _against(products: Float[Tensor, "*s mr kr"], rank: int) -> Float[Tensor, "*s k m r r"]:
    """Products of the draws with each of the bases, or with what C makes of them."""
    return products.unflatten(-1, (-1, rank)).unflatten(-3, (-1, rank)).movedim(-2, -4)


def _traces(
    inverse: Float[Tensor, "s k m r r"],
    turned: Float[Tensor, "s k m r r"],
    within: Float[Tensor, "s k m r r"],
    plain: Float[Tensor, "s g m r r"],
    reached: Float[Tensor, "s g k m r r"],
    inside: Float[Tensor, "s g k r r"],
) -> Float[Tensor, "s g k m"]:
    """⟨S, ΩCΩᵀ⟩ - 2⟨SX, Y⟩ + ⟨XᵀSX, QᵀCQ⟩."""
    first = plain.flatten(3).transpose(1, 2) @ inverse.flatten(3).permute(0, 2, 3, 1)
    second = torch.linalg.vecdot(turned[:, None].flatten(4), reached.flatten(4))
    third = within.flatten(3) @ inside.flatten(3).permute(0, 2, 3, 1)
    return first.permute(0, 2, 3, 1) - 2 * second + third.permute(0, 3, 1, 2)


# All sites of a probe are held against the same draws.
@lru_cache(maxsize=4)
def uniform_spaces(
    count: int, rank: int, dim: int, seed: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "m r d"]:
    """Orthonormal rows, drawn on the CPU whatever the device."""
    drawn = torch.randn(count, rank, dim, generator=torch.Generator().manual_seed(seed)).double()
    root = torch.linalg.cholesky(drawn @ drawn.mT)
    return torch.linalg.solve_triangular(root, drawn, upper=False).to(device, dtype)


@lru_cache(maxsize=4)
def random_signs(draws: int, dim: int, seed: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "m d"]:
    """±1 of each coordinate, drawn on the CPU whatever the device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(2, (draws, dim), generator=generator) * 2 - 1).to(device, dtype)


def sign_energies(
    moments: Float[Tensor, "s d d"], bases: Float[Tensor, "s k d r"], *, draws: int = DRAWS, seed: int = 0
) -> Float[Tensor, "s k m"]:
    """N9: E(DQ), D = diag(±1), as the quadratic form sᵀ(C ∘ QQᵀ)s of the signs; float64, on the CPU."""
    signs = random_signs(draws, moments.shape[1], seed, moments.dtype, moments.device)
    each = [
        ((signs @ (moments * (axes @ axes.mT))) * signs).double().sum(2) for axes in bases.to(moments).transpose(0, 1)
    ]
    total = moments.diagonal(dim1=1, dim2=2).double().sum(1)[:, None, None]
    return (torch.stack(each, 1) / torch.where(total > 0, total, torch.nan)).cpu()
