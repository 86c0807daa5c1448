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
    return random_spaces_beside(moment, [basis], draws=draws, seed=seed, keep=keep)[0]


def random_spaces_beside(
    moment: Float[Tensor, "d d"],
    bases: Sequence[Tensor],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    keep: int = 0,
    led: Sequence[bool] | None = None,
) -> list[RandomSpaces]:
    """N5 and N1 from the same normal matrices Ω for every basis, without forming an orthonormal basis of each.

    The span of Ω is uniform, and so is that of W = (I - QQᵀ)Ω in the complement:
    E = tr((ΩᵀΩ)⁻¹ΩᵀCΩ) / tr C, and the same with W. Only CΩ is a large product, and bases of one rank share it: what
    they differ in are products with Q. Squares and `keep` bases are made for those that are `led` (all, where that is
    not said). Within 1e-5 of float64, relative, where the moment is float32.
    """
    found: dict[int, RandomSpaces] = {}
    dim, ahead = len(moment), [True] * len(bases) if led is None else led
    for rank in {one.shape[1] for one in bases}:
        if 2 * rank > dim:
            raise SpecError(
                f"rank {rank} of {dim} coordinates leaves no normal space of the same rank: at most {dim // 2}"
            )
        places = [place for place, one in enumerate(bases) if one.shape[1] == rank]
        places.sort(key=lambda place: not ahead[place])
        first = sum(ahead[place] for place in places)
        exact = dim - 2 * rank < SPARE_NORMALS or dim <= EXACT_DIM
        against = moment.double() if exact else moment
        axes = torch.stack([bases[place].to(against) for place in places])
        if exact:
            # WWᵀ is a difference: a basis orthonormal to 1e-7 would leave it indefinite where W is nearly square.
            axes = torch.linalg.qr(axes).Q
        found |= dict(zip(places, _spaces_of_rank(against, axes, draws, seed, keep, first), strict=True))
    return [found[place] for place in range(len(bases))]


def _spaces_of_rank(
    moment: Float[Tensor, "d d"], bases: Float[Tensor, "k d r"], draws: int, seed: int, keep: int, led: int
) -> list[RandomSpaces]:
    """Of the first `led` bases also the squares, and `keep` of the spaces."""
    count, dim, rank = bases.shape
    total, whole = moment.diagonal().double().sum(), moment.double().square().sum()
    beside = bases.transpose(0, 1).flatten(1)
    seen = moment @ beside

    def along_each(images: Float[Tensor, "d q"]) -> Float[Tensor, "k 1 r r"]:
        """QᵀCQ of each basis from CQ of all."""
        each = images.view(dim, -1, rank).transpose(0, 1)
        return (bases[: len(each)].mT @ each).double()[:, None]

    def against(rows: Tensor, columns: Tensor) -> Float[Tensor, "k m r r"]:
        """Products of the draws with each of the bases, or with what C makes of them."""
        return (rows @ columns).view(len(rows), rank, -1, rank).permute(2, 0, 1, 3).double()

    inside, seen = along_each(seen), seen[:, : led * rank]
    twice = along_each(moment @ seen)

    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    kept = moment.new_empty(led, 0, dim, rank)
    step = max(1, DRAWN_ELEMENTS // (dim * rank))
    for start in range(0, draws, step):
        drawn = _gaussians(min(step, draws - start), rank, dim, seed, start, moment.dtype, moment.device)
        omega, root = drawn.omega, drawn.root
        image = (omega.flatten(0, 1) @ moment).view_as(omega)
        plain = (omega @ image.mT).double()
        haar = _traces(torch.cholesky_solve(plain, root))
        # ΩQ, ΩCQ and ΩC²Q, for each of the bases: with W = Ω - ΩQQᵀ as rows, WWᵀ = ΩΩᵀ - (ΩQ)(ΩQ)ᵀ,
        # WCWᵀ = ΩCΩᵀ - ΩCQ(ΩQ)ᵀ - (ΩQ)(ΩCQ)ᵀ + ΩQ(QᵀCQ)(ΩQ)ᵀ, and C² for C gives ‖CWᵀ‖².
        along = against(omega, beside)
        root = torch.linalg.cholesky(drawn.gram - along @ along.mT)
        # With LLᵀ for WWᵀ, traces of (LLᵀ)⁻¹M are those of M in an orthonormal basis of the span.
        energies = torch.cholesky_solve(plain - _crossed(along, against(image, beside), inside), root)
        normal, squares = _traces(energies) / total, haar.new_empty(0, len(omega))
        if led:
            along, root, energies = along[:led], root[:led], energies[:led]
            squared = (image @ image.mT).double()
            images = torch.cholesky_solve(squared - _crossed(along, against(image, seen), twice), root)
            # ‖PCP‖² = ‖C‖² - 2‖CN‖² + ‖NᵀCN‖²
            squares = whole - 2 * _traces(images) + (energies * energies.mT).sum((2, 3))
        parts.append((haar.expand(count, -1) / total, normal, squares))
        if led and kept.shape[1] < keep:
            some = min(keep - kept.shape[1], len(omega))
            normal = omega[:some] - along[:, :some].to(omega) @ bases[:led].mT[:, None]
            made = torch.linalg.solve_triangular(root[:, :some].to(normal), normal, upper=False)
            kept = torch.cat([kept, made.mT], 1)
    haar, normal, squares = (torch.cat(one, 1).cpu() for one in zip(*parts, strict=True))
    return [
        RandomSpaces(
            haar=haar[place],
            normal=normal[place],
            normal_squares=squares[place] if place < led else squares.new_empty(0),
            normal_bases=kept[place] if place < led else kept.new_empty(0, dim, rank),
        )
        for place in range(count)
    ]


def _crossed(along: Tensor, reached: Tensor, inside: Tensor) -> Float[Tensor, "k m r r"]:
    """What WCWᵀ lacks of ΩCΩᵀ: XYᵀ + YXᵀ - XMXᵀ."""
    one = (reached - along @ inside / 2) @ along.mT
    return one + one.mT


def _traces(matrices: Float[Tensor, "*m r r"]) -> Float[Tensor, "*m"]:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Gaussians:
    omega: Float[Tensor, "m r d"]
    gram: Float[Tensor, "m r r"]
    root: Float[Tensor, "m r r"]


# All sites of a probe are held against the same draws.
@lru_cache(maxsize=4)
def _gaussians(
    count: int, rank: int, dim: int, seed: int, start: int, dtype: torch.dtype, device: torch.device
) -> _Gaussians:
    """Ω, drawn on the CPU whatever the device, with ΩΩᵀ and its Cholesky factor in float64."""
    generator = torch.Generator().manual_seed(seed + 7919 * start)
    omega = torch.randn(count, rank, dim, generator=generator)
    gram = omega.double() @ omega.double().mT
    root = torch.linalg.cholesky(gram)
    return _Gaussians(omega=omega.to(device, dtype), gram=gram.to(device), root=root.to(device))


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
