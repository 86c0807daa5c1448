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
    axes = basis.to(moment)
    total = float(moment.diagonal().double().sum())
    return float(((moment @ axes) * axes).double().sum()) / total if total > 0 else float("nan")


@dataclass(frozen=True, kw_only=True, eq=False)
class RandomSpaces:
    """Energies of random subspaces, and what is left of C without each of the normal ones; float64, on the CPU."""

    haar: Float[Tensor, " m"]
    """N5."""
    normal: Float[Tensor, " m"]
    """N1."""
    normal_squares: Float[Tensor, " m"]
    """‖P C P‖²_F with P = I - NNᵀ, N the normal subspace."""
    normal_bases: Float[Tensor, "k d r"]
    """Orthonormal, of the first k draws, as many as were asked for."""


def random_spaces(
    moment: Float[Tensor, "d d"], basis: Float[Tensor, "d r"], *, draws: int = DRAWS, seed: int = 0, keep: int = 0
) -> RandomSpaces:
    """N5 and N1 from the same normal matrices Ω, without forming an orthonormal basis of each.

    The span of Ω is uniform, and so is that of W = (I - QQᵀ)Ω in the complement:
    E = tr((ΩᵀΩ)⁻¹ΩᵀCΩ) / tr C, and the same with W. Only CΩ is a large product. `keep` bases are made for those who
    need them. Within 1e-5 of float64, relative, where the moment is float32.
    """
    dim, rank = basis.shape
    if 2 * rank > dim:
        raise SpecError(f"rank {rank} of {dim} coordinates leaves no normal space of the same rank: at most {dim // 2}")
    if dim - 2 * rank < SPARE_NORMALS:
        moment = moment.double()
    axes = basis.to(moment)
    seen, total = moment @ axes, moment.diagonal().double().sum()
    whole = moment.double().square().sum()
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    bases = moment.new_empty(0, dim, rank)
    step = max(1, DRAWN_ELEMENTS // (dim * rank))
    for start in range(0, draws, step):
        omega = _gaussians(min(step, draws - start), rank, dim, seed, start).to(moment)
        image = (omega.flatten(0, 1) @ moment).view_as(omega)
        along = omega @ axes
        normal, normal_image = omega - along @ axes.T, image - along @ seen.T
        root, inside = _whiten(normal, normal_image)
        # ‖PCP‖² = ‖C‖² - 2‖CN‖² + ‖NᵀCN‖²
        images = torch.linalg.solve_triangular(root, (normal_image @ normal_image.mT).double(), upper=False)
        images = torch.linalg.solve_triangular(root, images.mT, upper=False)
        squares = whole - 2 * _traces(images) + inside.square().sum((1, 2))
        haar = _traces(_whiten(omega, image)[1])
        parts.append((haar / total, _traces(inside) / total, squares))
        if len(bases) < keep:
            some = normal[: keep - len(bases)]
            made = torch.linalg.solve_triangular(root[: len(some)].to(some), some, upper=False)
            bases = torch.cat([bases, made.mT])
    haar, normal, squares = (torch.cat(found).cpu() for found in zip(*parts, strict=True))
    return RandomSpaces(haar=haar, normal=normal, normal_squares=squares, normal_bases=bases)


def _whiten(rows: Float[Tensor, "m r d"], images: Float[Tensor, "m r d"]) -> tuple[Tensor, Tensor]:
    """L with ΩᵀΩ = LLᵀ, and L⁻¹ΩᵀCΩL⁻ᵀ: the moment in an orthonormal basis of the span. Float64."""
    root = torch.linalg.cholesky((rows @ rows.mT).double())
    half = torch.linalg.solve_triangular(root, (rows @ images.mT).double(), upper=False)
    return root, torch.linalg.solve_triangular(root, half.mT, upper=False)


def _traces(matrices: Float[Tensor, "m r r"]) -> Float[Tensor, " m"]:
    return matrices.diagonal(dim1=1, dim2=2).sum(1)


# All sites of a probe are held against the same draws.
@lru_cache(maxsize=4)
def _gaussians(count: int, rank: int, dim: int, seed: int, start: int) -> Float[Tensor, "m r d"]:
    generator = torch.Generator().manual_seed(seed + 7919 * start)
    return torch.randn(count, rank, dim, generator=generator)


def sign_energies(
    moment: Float[Tensor, "d d"], basis: Float[Tensor, "d r"], *, draws: int = DRAWS, seed: int = 0
) -> Float[Tensor, " m"]:
    """N9: E(DQ), D = diag(±1), as the quadratic form sᵀ(C ∘ QQᵀ)s of the signs; float64, on the CPU."""
    axes = basis.to(moment)
    generator = torch.Generator().manual_seed(seed)
    signs = (torch.randint(2, (draws, len(moment)), generator=generator) * 2 - 1).to(moment)
    form = moment * (axes @ axes.T)
    return (((signs @ form) * signs).double().sum(1) / moment.diagonal().double().sum()).cpu()
