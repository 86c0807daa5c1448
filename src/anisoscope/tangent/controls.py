"""Energies in a subspace, and what other subspaces of the same rank would give.

All of it depends on the gradients through one matrix, C = GᵀG:   E(Q) = ‖GQ‖² / ‖G‖² = tr(QᵀCQ) / tr C

    N1 normal      random, orthogonal to Q (the paper's); mean (1 - E) r / (d - r)
    N2 next        the r principal directions after Q: the hard one
    N3 last        the last r principal directions
    N5 haar        random; mean r / d
    N7 untrained   the proxy of the model at step 0
    N9 signs       Q with random signs of its coordinates: keeps large coordinates that states and gradients share

N6, paired windows, needs more than C: see windows.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import SpecError, StatesError
from anisoscope.kernels.gram import for_products, power_of_two_scale, working_dtype

DRAWS = 199
# The paper's number, whose p is never below 1/21.
PAPER_DRAWS = 20
# Random numbers held at one time.
DRAWN_ELEMENTS = 1 << 24
# A random matrix that is nearly as tall as wide is nearly singular: fewer directions to spare need float64.
SPARE_NORMALS = 8
# Up to so many coordinates float64 costs next to nothing.
EXACT_DIM = 256


def second_moment(rows: Float[Tensor, "n d"]) -> Float[Tensor, "d d"]:
    """C = GᵀG, divided by its trace (zero where all rows are); float64 where torch rounds float32 products."""
    if not bool(rows.isfinite().all()):
        raise StatesError("gradients must be finite, and some are NaN or infinite; drop them first")
    raw = rows.to(working_dtype(rows.dtype))
    scaled = for_products(raw / power_of_two_scale(raw).to(raw.dtype))
    moment = scaled.T @ scaled
    total = moment.diagonal().double().sum()
    return moment / torch.where(total > 0, total, 1).to(moment.dtype)


def energy_of(moment: Float[Tensor, "d d"], basis: Float[Tensor, "d r"]) -> float:
    """E(Q), from C."""
    return energies_of(moment, [basis])[0]


def energies_of(moment: Float[Tensor, "d d"], bases: Sequence[Tensor]) -> list[float]:
    """E(Q) of several subspaces."""
    if not bases:
        return []
    axes = torch.cat([one.to(moment) for one in bases], 1)
    held = ((moment @ axes) * axes).double().sum(0)
    total = moment.diagonal().double().sum()
    sums = torch.stack([part.sum() for part in held.split([one.shape[1] for one in bases])])
    return torch.where(total > 0, sums / total, torch.nan).tolist()


@dataclass(frozen=True, kw_only=True, eq=False)
class RandomSpaces:
    """Energies of random subspaces, and what is left of C without each of the normal ones; float64, on the CPU."""

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
    return random_spaces_beside([moment], [basis], draws=draws, seed=seed, keep=keep)[0][0]


def random_spaces_beside(
    moments: Sequence[Float[Tensor, "d d"]],
    bases: Sequence[Tensor],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    keep: int = 0,
    led: Sequence[bool] | None = None,
) -> list[list[RandomSpaces]]:
    """N5 and N1 for each moment and basis, from the same random spaces, without forming an orthonormal basis of each.

    With the rows of Ω an orthonormal basis of a uniform subspace, that of W = Ω(I - QQᵀ) is uniform in the complement:
    E = tr(ΩCΩᵀ) / tr C, and tr((WWᵀ)⁻¹WCWᵀ) / tr C. Only ΩC is a large product, and bases of one rank share it: what
    they differ in are products with Q. Squares and `keep` bases are made for those that are `led` (all, where that is
    not said). Within 1e-5 of float64, relative, where the moment is float32.
    """
    found: list[dict[int, RandomSpaces]] = [{} for _ in moments]
    ahead = [True] * len(bases) if led is None else led
    for dim, rank in {tuple(one.shape) for one in bases if moments}:
        if 2 * rank > dim:
            raise SpecError(
                f"rank {rank} of {dim} coordinates leaves no normal space of the same rank: at most {dim // 2}"
            )
        places = [place for place, one in enumerate(bases) if one.shape[1] == rank]
        places.sort(key=lambda place: not ahead[place])
        first = sum(ahead[place] for place in places)
        exact = dim - 2 * rank < SPARE_NORMALS or dim <= EXACT_DIM
        against = [one.double() if exact else one for one in moments]
        axes = torch.stack([bases[place].to(against[0]) for place in places])
        if exact:
            # WWᵀ is a difference: a basis orthonormal to 1e-7 would leave it indefinite where W is nearly square.
            axes = torch.linalg.qr(axes).Q
        for known, spaces in zip(found, _spaces_of_rank(against, axes, draws, seed, keep, first), strict=True):
            known |= dict(zip(places, spaces, strict=True))
    return [[known[place] for place in range(len(bases))] for known in found]


def _spaces_of_rank(
    moments: Sequence[Float[Tensor, "d d"]],
    bases: Float[Tensor, "k d r"],
    draws: int,
    seed: int,
    keep: int,
    led: int,
) -> list[list[RandomSpaces]]:
    """Of the first `led` bases also the squares, and `keep` of the spaces."""
    count, dim, rank = bases.shape
    seen = [_Seen(moment, bases, led) for moment in moments]
    parts: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in moments]
    kept = bases.new_empty(led, 0, dim, rank)
    step = max(1, DRAWN_ELEMENTS // (dim * rank))
    for start in range(0, draws, step):
        omega = _uniform_spaces(min(step, draws - start), rank, dim, seed, start, bases.dtype, bases.device)
        along = _against(omega, bases.transpose(0, 1).flatten(1))
        # WWᵀ = I - (ΩQ)(ΩQ)ᵀ, as LLᵀ: traces of (LLᵀ)⁻¹M are those of M in an orthonormal basis of the span.
        root = torch.linalg.cholesky(torch.eye(rank, dtype=along.dtype, device=along.device) - along @ along.mT)
        for one, mine in zip(seen, parts, strict=True):
            mine.append(one.look(omega, along, root))
        if led and kept.shape[1] < keep:
            some = min(keep - kept.shape[1], len(omega))
            normal = omega[:some] - along[:led, :some].to(omega) @ bases[:led].mT[:, None]
            made = torch.linalg.solve_triangular(root[:led, :some].to(normal), normal, upper=False)
            kept = torch.cat([kept, made.mT], 1)
    found = []
    for mine in parts:
        haar, normal, squares = (torch.cat(one, -1).cpu() for one in zip(*mine, strict=True))
        found.append(
            [
                RandomSpaces(
                    haar=haar,
                    normal=normal[place],
                    normal_squares=squares[place] if place < led else squares.new_empty(0),
                    normal_bases=kept[place] if place < led else kept.new_empty(0, dim, rank),
                )
                for place in range(count)
            ]
        )
    return found


class _Seen:
    """What C makes of some bases, and of random spaces beside them."""

    def __init__(self, moment: Float[Tensor, "d d"], bases: Float[Tensor, "k d r"], led: int) -> None:
        self.moment, self.led, (_, dim, rank) = moment, led, bases.shape
        self.total, self.squares = moment.diagonal().double().sum(), moment.double().square().sum()
        self.beside = bases.transpose(0, 1).flatten(1)
        images = moment @ self.beside
        self.images = images[:, : led * rank]

        def inside(columns: Float[Tensor, "d q"]) -> Float[Tensor, "k 1 r r"]:
            """QᵀCQ of each basis from CQ of all."""
            each = columns.view(dim, -1, rank).transpose(0, 1)
            return (bases[: len(each)].mT @ each).double()[:, None]

        self.inside, self.twice = inside(images), inside(moment @ self.images)

    def look(
        self, omega: Float[Tensor, "m r d"], along: Float[Tensor, "k m r r"], root: Float[Tensor, "k m r r"]
    ) -> tuple[Float[Tensor, " m"], Float[Tensor, "k m"], Float[Tensor, "l m"]]:
        """N5, N1 and ‖PCP‖², from ΩQ, ΩCQ and ΩC²Q.

        WCWᵀ = ΩCΩᵀ - ΩCQ(ΩQ)ᵀ - (ΩQ)(ΩCQ)ᵀ + ΩQ(QᵀCQ)(ΩQ)ᵀ, and C² for C gives ‖CWᵀ‖².
        """
        image = (omega.flatten(0, 1) @ self.moment).view_as(omega)
        plain = (omega @ image.mT).double()
        energies = torch.cholesky_solve(plain - _crossed(along, _against(image, self.beside), self.inside), root)
        haar, normal, squares = _traces(plain), _traces(energies), energies.new_empty(0, len(omega))
        if self.led:
            along, root, energies = along[: self.led], root[: self.led], energies[: self.led]
            squared = (image @ image.mT).double()
            images = torch.cholesky_solve(squared - _crossed(along, _against(image, self.images), self.twice), root)
            # ‖PCP‖² = ‖C‖² - 2‖CN‖² + ‖NᵀCN‖²
            squares = self.squares - 2 * _traces(images) + (energies * energies.mT).sum((2, 3))
        return haar / self.total, normal / self.total, squares


def _against(rows: Float[Tensor, "m r d"], columns: Float[Tensor, "d q"]) -> Float[Tensor, "k m r r"]:
    """Products of the draws with each of the bases, or with what C makes of them."""
    return (rows @ columns).unflatten(2, (-1, rows.shape[1])).permute(2, 0, 1, 3).double()


def _crossed(along: Tensor, reached: Tensor, inside: Tensor) -> Float[Tensor, "k m r r"]:
    """What WCWᵀ lacks of ΩCΩᵀ: XYᵀ + YXᵀ - XMXᵀ."""
    one = (reached - along @ inside / 2) @ along.mT
    return one + one.mT


def _traces(matrices: Float[Tensor, "*m r r"]) -> Float[Tensor, "*m"]:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


# All sites of a probe are held against the same draws.
@lru_cache(maxsize=4)
def _uniform_spaces(
    count: int, rank: int, dim: int, seed: int, start: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "m r d"]:
    """Orthonormal rows, drawn on the CPU whatever the device."""
    generator = torch.Generator().manual_seed(seed + 7919 * start)
    drawn = torch.randn(count, rank, dim, generator=generator).double()
    root = torch.linalg.cholesky(drawn @ drawn.mT)
    return torch.linalg.solve_triangular(root, drawn, upper=False).to(device, dtype)


@lru_cache(maxsize=4)
def _signs(draws: int, dim: int, seed: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "m d"]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(2, (draws, dim), generator=generator) * 2 - 1).to(device, dtype)


def sign_energies(
    moment: Float[Tensor, "d d"], basis: Float[Tensor, "d r"], *, draws: int = DRAWS, seed: int = 0
) -> Float[Tensor, " m"]:
    """N9: E(DQ), D = diag(±1), as the quadratic form sᵀ(C ∘ QQᵀ)s of the signs; float64, on the CPU."""
    axes = basis.to(moment)
    signs = _signs(draws, len(moment), seed, moment.dtype, moment.device)
    form = moment * (axes @ axes.T)
    return (((signs @ form) * signs).double().sum(1) / moment.diagonal().double().sum()).cpu()
