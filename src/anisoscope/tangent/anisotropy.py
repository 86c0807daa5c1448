"""How much of the gradients' anisotropy lies in a tangent space: what is left of their spectrum without it.

Notation: C the second moment of the gradient rows with eigenvalues l₁ ≥ l₂ ≥ ..., P = I - QQᵀ, l̄ = tr C / d.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels import gram
from anisoscope.kernels.gram import GramSums, center
from anisoscope.metrics.spectrum import isoscore_star
from anisoscope.tangent.controls import DRAWS, random_spaces
from anisoscope.tangent.inference import permutation_p
from anisoscope.tangent.proxies import Proxy

# Normal spaces whose spectrum is looked at, and Lanczos steps for its leading eigenvalue: the tests find it within 1e-3
# of float64 on flat spectra, which are the slowest, and within 1e-6 where it stands out.
LED_DRAWS, LANCZOS_STEPS = 20, 48
# Powers of C in the search for its r leading axes, and axes beyond them.
KRYLOV_BLOCKS, SPARE_AXES = 4, 8


@dataclass(frozen=True, kw_only=True)
class Removal:
    """A quantity for the tangent space, the mean over random normal spaces (N1) and for the next directions (N2)."""

    tangent: float
    normal: float
    following: float
    p: float
    """That random normal spaces reach the tangent space."""

    @property
    def difference(self) -> float:
        """Tangent less normal: the headline."""
        return self.tangent - self.normal


@dataclass(frozen=True, kw_only=True)
class AnisotropyShare:
    """`tangent_anisotropy_share`, in four ways."""

    isoscore_change: Removal
    """(a) IsoScore* without the subspace, in the d - r coordinates that are left, less IsoScore* of C."""
    leading_drop: Removal
    """(b) l₁/Σl of C, less that of PCP. N1 has LED_DRAWS draws at most here and in (c)."""
    spectral_share: Removal
    """(c) Σ_{j≤r} l_j ‖Qᵀv_j‖² / Σ_{j≤r} l_j: how much of the r leading axes lies in the subspace."""
    anisotropic_energy: Removal
    """(d) 1 - ‖P(C - l̄I)P‖² / ‖C - l̄I‖²."""
    note: str | None = None


def gradient_leading_variance(rows: Float[Tensor, "n d"]) -> float:
    """`leading_variance` of the gradient rows: l₁/Σl of their covariance; NaN where they do not vary."""
    moments = gram.moments(center(rows))
    return float(moments.leading / moments.total) if float(moments.total) > 0 else math.nan


def anisotropy_share(
    moment: Float[Tensor, "d d"], proxy: Proxy, *, draws: int = DRAWS, seed: int = 0, zeta: float = 0.25
) -> AnisotropyShare:
    """Of C (`controls.second_moment` of the rows, centred before where that is wanted), always with N1 and N2.

    Zero-padding what is left to d coordinates would lower its IsoScore*; so it is taken in the d - r that there are.
    """
    dim, rank, following = proxy.dim, proxy.rank, proxy.following
    total, squares = float(moment.diagonal().double().sum()), float(moment.double().square().sum())
    if total == 0 or 2 * rank > dim or following.shape[1] < rank:
        nothing = Removal(tangent=math.nan, normal=math.nan, following=math.nan, p=math.nan)
        note = "the gradients are zero" if total == 0 else f"rank {rank} of {dim} coordinates leaves no normal space"
        return AnisotropyShare(
            isoscore_change=nothing,
            leading_drop=nothing,
            spectral_share=nothing,
            anisotropic_energy=nothing,
            note=note,
        )
    spaces = random_spaces(moment, proxy.basis, draws=draws, seed=seed, keep=min(draws, LED_DRAWS))
    bases = torch.stack([proxy.basis.to(moment), following.to(moment)])
    images = moment @ bases
    inside = bases.mT @ images
    held = inside.diagonal(dim1=1, dim2=2).double().sum(1)
    rest_squares = squares - 2 * images.double().square().sum((1, 2)) + inside.double().square().sum((1, 2))
    # Tangent first, next second, then the random ones.
    left = total - torch.cat([held.cpu(), spaces.normal * total])
    left_squares = torch.cat([rest_squares.cpu(), spaces.normal_squares]).clamp_min(0)
    whole_score = _isoscore(left.new_tensor(total), left.new_tensor(squares), dim, zeta)
    # ‖P(C - l̄I)P‖² = ‖PCP‖² - 2l̄ tr PCP + l̄²(d - r)
    flat = total / dim
    uneven = squares - total * flat
    rest_uneven = left_squares - 2 * flat * left + flat**2 * (dim - rank)
    every = torch.cat([bases, spaces.normal_bases])
    rests = total - torch.cat([held.cpu(), spaces.normal[: len(spaces.normal_bases)] * total])
    leading = leading_without(moment, torch.cat([every, torch.zeros_like(every[:1])])).cpu()
    drops = leading[-1] / total - leading[:-1] / rests
    return AnisotropyShare(
        isoscore_change=_removal(_isoscore(left, left_squares, dim - rank, zeta) - whole_score),
        leading_drop=_removal(drops),
        spectral_share=_removal(_spectral_shares(moment, every, seed)),
        anisotropic_energy=_removal(1 - rest_uneven / uneven if uneven > 0 else torch.full_like(left, math.nan)),
    )


def _isoscore(total: Float[Tensor, "*s"], squares: Float[Tensor, "*s"], dim: int, zeta: float) -> Float[Tensor, "*s"]:
    return isoscore_star.function(GramSums(total=total, squares=squares, dim=dim), isoscore_zeta=zeta)


def _removal(values: Float[Tensor, " k"]) -> Removal:
    tangent, following, *_ = values.tolist()
    normals = values[2:]
    return Removal(
        tangent=tangent, normal=float(normals.mean()), following=following, p=permutation_p(tangent, normals)
    )


def leading_without(moment: Float[Tensor, "d d"], bases: Float[Tensor, "k d r"]) -> Float[Tensor, " k"]:
    """The largest eigenvalue of PCP for each subspace, by Lanczos with full reorthogonalisation; float64."""
    count, dim, rank = bases.shape

    def rest(vectors: Tensor) -> Tensor:
        return vectors - (bases @ (bases.mT @ vectors[..., None]))[..., 0]

    start = torch.randn(dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(moment)
    vectors = rest(start.expand(count, dim))
    steps = min(LANCZOS_STEPS, dim - rank)
    known = moment.new_zeros(count, steps, dim)
    inside = moment.new_zeros(count, steps, steps)
    for step in range(steps):
        lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
        # A search that has seen everything it can reach goes on with zeros.
        known[:, step] = torch.where(lengths > 1e-5 * moment.diagonal().max(), vectors / lengths, 0)
        vectors = rest(known[:, step] @ moment)
        inside[:, step, : step + 1] = (known[:, : step + 1] @ vectors[..., None])[..., 0]
        for _ in range(2):
            seen = known[:, : step + 1]
            vectors = rest(vectors - (seen.mT @ (seen @ vectors[..., None]))[..., 0])
    return torch.linalg.eigvalsh(inside.double())[:, -1].clamp_min(0)


def _spectral_shares(moment: Float[Tensor, "d d"], bases: Float[Tensor, "k d r"], seed: int) -> Float[Tensor, " k"]:
    values, axes = leading_axes(moment, bases.shape[2], seed)
    inside = (axes.T @ bases).double().square().sum(2)
    return (inside @ values / values.sum()).cpu()


def leading_axes(
    moment: Float[Tensor, "d d"], count: int, seed: int = 0
) -> tuple[Float[Tensor, " k"], Float[Tensor, "d k"]]:
    """The leading eigenvalues (float64) and eigenvectors of C, by block Krylov; exactly where C is small."""
    dim, width = len(moment), count + SPARE_AXES
    if width * KRYLOV_BLOCKS >= dim:
        values, axes = torch.linalg.eigh(moment.double())
    else:
        generator = torch.Generator().manual_seed(seed)
        block = torch.randn(dim, width, generator=generator, dtype=torch.float64).to(moment)
        blocks = []
        for _ in range(KRYLOV_BLOCKS):
            block = torch.linalg.qr(moment @ block).Q
            blocks.append(block)
        basis = torch.linalg.qr(torch.cat(blocks, 1)).Q
        values, inside = torch.linalg.eigh((basis.T @ moment @ basis).double())
        axes = basis @ inside.to(basis)
    return values[-count:].flip(0).clamp_min(0).double(), axes[:, -count:].flip(1).to(moment)
