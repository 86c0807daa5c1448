"""How much of the gradients' anisotropy lies in a tangent space: what is left of their spectrum without it.

Notation: C the second moment of the gradient rows with eigenvalues l₁ ≥ l₂ ≥ ..., P = I - QQᵀ, l̄ = tr C / d.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from anisoscope.kernels import gram
from anisoscope.kernels.gram import GramSums, center
from anisoscope.metrics.spectrum import isoscore_star
from anisoscope.tangent.controls import DRAWS, RandomSpaces, random_spaces_beside
from anisoscope.tangent.inference import permutation_p
from anisoscope.tangent.proxies import Proxy

# Normal spaces whose spectrum is looked at, and Lanczos steps for its leading eigenvalue: the tests find it within 1e-3
# of float64 on flat spectra, which are the slowest, and within 1e-6 where it stands out.
LED_DRAWS, LANCZOS_STEPS = 20, 48
# Steps at which the search is looked at, and the residual, relative to the eigenvalue, at which it ends: an eigenvalue
# is then as near, and the largest, where it stands out, nearer by the square.
LOOKS, SETTLED = (12, 16, 20, 24, 32, 40), 1e-5
# Powers of C in the search for its r leading axes, and axes beyond them.
KRYLOV_BLOCKS, SPARE_AXES = 4, 8
# Up to so many coordinates all eigenvalues of C come sooner than a search for the largest.
SMALL_DIM = 128


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
    return anisotropy_shares(moment, [proxy], draws=draws, seed=seed, zeta=zeta)[0]


def anisotropy_shares(
    moment: Float[Tensor, "d d"],
    proxies: Sequence[Proxy],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    zeta: float = 0.25,
    spaces: Sequence[RandomSpaces | None] | None = None,
) -> list[AnisotropyShare]:
    """Of one moment for several proxies, with one search for leading eigenvalues.

    `spaces` are those of `energies.spaces_beside`, with at least LED_DRAWS bases, where they are known.
    """
    total, squares = torch.stack([moment.diagonal().double().sum(), moment.double().square().sum()]).tolist()
    dim = len(moment)
    notes = [_why_not(proxy, total) for proxy in proxies]
    usable = [place for place, note in enumerate(notes) if note is None]
    if spaces is None:
        known = [proxies[place].basis for place in usable]
        found = random_spaces_beside([moment], known, draws=draws, seed=seed, keep=min(draws, LED_DRAWS))[0]
        spaces = [found[usable.index(place)] if place in usable else None for place in range(len(proxies))]
    every: dict[int, Tensor] = {}
    for place in usable:
        proxy, here = proxies[place], spaces[place]
        assert here is not None
        own = torch.stack([proxy.basis.to(moment), proxy.following[:, : proxy.rank].to(moment)])
        # Tangent first, next second, then the random ones.
        every[place] = torch.cat([own, here.normal_bases[:LED_DRAWS].to(moment)])
    if not usable:
        return [_nothing(note) for note in notes]
    leading, *without = _leading_each(moment, list(every.values()))
    values, axes = leading_axes(moment, max(proxies[place].rank for place in usable), seed)
    shares = [_nothing(note) for note in notes]
    for place, largest in zip(usable, without, strict=True):
        rank, bases, here = proxies[place].rank, every[place], spaces[place]
        assert here is not None
        images = moment @ bases[:2]
        inside = bases[:2].mT @ images
        held = inside.diagonal(dim1=1, dim2=2).double().sum(1)
        rest_squares = squares - 2 * images.double().square().sum((1, 2)) + inside.double().square().sum((1, 2))
        left = total - torch.cat([held.cpu(), here.normal * total])
        left_squares = torch.cat([rest_squares.cpu(), here.normal_squares]).clamp_min(0)
        whole_score = _isoscore(left.new_tensor(total), left.new_tensor(squares), dim, zeta)
        # ‖P(C - l̄I)P‖² = ‖PCP‖² - 2l̄ tr PCP + l̄²(d - r)
        flat = total / dim
        uneven = squares - total * flat
        rest_uneven = left_squares - 2 * flat * left + flat**2 * (dim - rank)
        along = (axes[:, :rank].T @ bases).double().square().sum(2).cpu()
        shares[place] = AnisotropyShare(
            isoscore_change=_removal(_isoscore(left, left_squares, dim - rank, zeta) - whole_score),
            leading_drop=_removal(leading / total - largest / left[: len(bases)]),
            spectral_share=_removal(along @ values[:rank] / values[:rank].sum()),
            anisotropic_energy=_removal(1 - rest_uneven / uneven if uneven > 0 else torch.full_like(left, math.nan)),
        )
    return shares


def _why_not(proxy: Proxy, total: float) -> str | None:
    if total == 0:
        return "the gradients are zero"
    if 2 * proxy.rank > proxy.dim or proxy.following.shape[1] < proxy.rank:
        return f"rank {proxy.rank} of {proxy.dim} coordinates leaves no normal space"
    return None


def _nothing(note: str | None) -> AnisotropyShare:
    unknown = Removal(tangent=math.nan, normal=math.nan, following=math.nan, p=math.nan)
    return AnisotropyShare(
        isoscore_change=unknown,
        leading_drop=unknown,
        spectral_share=unknown,
        anisotropic_energy=unknown,
        note=note,
    )


def _leading_each(moment: Float[Tensor, "d d"], groups: Sequence[Tensor]) -> list[Tensor]:
    """The largest eigenvalue of C, then those of PCP for each group of subspaces; all in one search."""
    rank = max(one.shape[2] for one in groups)
    padded = [pad(one, (0, rank - one.shape[2])) for one in groups]
    found = leading_without(moment, torch.cat([torch.zeros_like(padded[0][:1]), *padded])).cpu()
    return list(found.split([1, *(len(one) for one in groups)]))


def _isoscore(total: Float[Tensor, "*s"], squares: Float[Tensor, "*s"], dim: int, zeta: float) -> Float[Tensor, "*s"]:
    return isoscore_star.function(GramSums(total=total, squares=squares, dim=dim), isoscore_zeta=zeta)


def _removal(values: Float[Tensor, " k"]) -> Removal:
    tangent, following, *_ = values.tolist()
    normals = values[2:]
    return Removal(
        tangent=tangent, normal=float(normals.mean()), following=following, p=permutation_p(tangent, normals)
    )


def leading_value(moment: Float[Tensor, "d d"]) -> float:
    """The largest eigenvalue of C."""
    if len(moment) <= SMALL_DIM:
        return float(torch.linalg.eigvalsh(moment.double().cpu())[-1].clamp_min(0))
    return float(leading_without(moment, moment.new_zeros(1, len(moment), 1))[0])


def leading_without(moment: Float[Tensor, "d d"], bases: Float[Tensor, "k d r"]) -> Float[Tensor, " k"]:
    """The largest eigenvalue of PCP for each subspace, by Lanczos with full reorthogonalisation; float64.

    The subspace stands before the vectors that the search has made: one product takes both out. Columns of zeros do
    nothing.
    """
    count, dim, rank = bases.shape
    steps = min(LANCZOS_STEPS, dim - rank)
    known = moment.new_zeros(count, rank + steps, dim)
    known[:, :rank] = bases.mT
    inside = moment.new_zeros(count, steps, steps)
    start = torch.randn(dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(moment)
    vectors = start.expand(count, dim)[..., None]
    vectors = torch.baddbmm(vectors, bases, bases.mT @ vectors, alpha=-1)
    smallest = 1e-5 * moment.diagonal().max()
    largest = torch.zeros(count, dtype=torch.float64)
    for step in range(steps):
        lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
        # A search that has seen everything it can reach goes on with zeros.
        last = torch.where(lengths > smallest, vectors / lengths, 0)[..., 0]
        known[:, rank + step] = last
        seen = known[:, : rank + step + 1]
        vectors = (last @ moment)[..., None]
        along = seen @ vectors
        inside[:, step, : step + 1] = along[:, rank:, 0]
        vectors = torch.baddbmm(vectors, seen.mT, along, alpha=-1)
        # Once is not enough in float32 where one eigenvalue is far above the others.
        vectors = torch.baddbmm(vectors, seen.mT, seen @ vectors, alpha=-1)
        if step + 1 in LOOKS or step + 1 == steps:
            # On the CPU: a GPU takes longer for such small matrices than for the search.
            values, coordinates = torch.linalg.eigh(inside[:, : step + 1, : step + 1].double().cpu())
            largest = values[:, -1].clamp_min(0)
            residuals = torch.linalg.vector_norm(vectors, dim=(1, 2)).cpu() * coordinates[:, -1, -1].abs()
            if bool((residuals <= SETTLED * largest).all()):
                break
    return largest.to(moment.device)


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
    return values[-count:].flip(0).clamp_min(0).double().cpu(), axes[:, -count:].flip(1).to(moment)
