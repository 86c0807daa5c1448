"""The leading eigenvalues and eigenvectors of symmetric matrices without negative eigenvalues, several side by side.

Notation: C (d, d) with eigenvalues λ₁ ≥ λ₂ ≥ ... ≥ 0, P = I - QQᵀ for an orthonormal basis Q (d, r).
"""

import math
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from anisoscope.kernels.gram import limit_on

# Up to so many coordinates, and up to so many times the axes that are looked for, a whole decomposition comes sooner.
# Beside a GPU it is the host that decomposes, one matrix after the other, and the GPU that searches in all at once: but
# not for the many axes that a semi-NMF starts from, which a search knows roughly and whose fit would end elsewhere.
WHOLE_DIM, WHOLE_RATIO = {"cpu": 256, "cuda": 64}, {"cpu": 3, "cuda": 4}
# Up to so many coordinates a GPU decomposes all of a stack at once; from there to HOST_DIM a CPU is faster.
BATCHED_DIM, HOST_DIM = 32, 512
# Axes that are looked for beyond those that are wanted: they make the last of these settle.
SPARE_AXES = 8
# ‖Cv - λv‖ at which an axis has settled: this share of λ, and above the rounding of λ₁.
SETTLED, ROUNDING = 1e-6, 1e-13
# How far one filter may pull λ₁ ahead of the least of the axes: twice as many digits are left in the products of axes.
GROWTH, MOST_DEGREE = 1e7, 24
# Filters before the first look, which makes a GPU wait for the host, and from one to the next: these reach further.
FILTERS, FILTERS_AGAIN, LOOKS = {"cpu": 4, "cuda": 5}, 2, 12
# Products with C before the first filter: after them the axes tell where to cut.
POWERS = 2
# Lanczos steps for a leading eigenvalue: the tests find it within 1e-8, and within 1e-6 in float32.
LANCZOS_STEPS = 48
# Steps at which the search is looked at, and the residual, relative to the eigenvalue, at which it ends: an eigenvalue
# is then as near, and the largest, where it stands out, nearer by the square.
# A GPU has made the steps to the next look in less time than the look takes.
LANCZOS_LOOKS = {"cpu": (4, 6, 8, 10, 12, 16, 20, 24, 32, 40), "cuda": (8, 16, 24, 32)}
SETTLED_LEADING = 1e-5
# How much of a start is random: far more than SETTLED_LEADING, so that nothing settles which something outgrows.
RANDOM_START = 1e-3
# Numbers that a search for leading eigenvalues holds at one time: as many as caches hold, or as a GPU is busy with.
HELD_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 28}


def leading_axes(
    matrices: Float[Tensor, "s d d"],
    count: int,
    *,
    spare: int = SPARE_AXES,
    settled: float = SETTLED,
    seed: int = 0,
) -> tuple[Float[Tensor, "s k"], Float[Tensor, "s d k"]]:
    """The `count` leading eigenvalues (float64) and eigenvectors of each, and `spare` that are about the next ones.

    Subspace iteration in float64 with Chebyshev polynomials of C, which are large above the least eigenvalue of the
    subspace and at most one below it (Zhou, Saad, Tiago and Chelikowsky 2006): products of matrices, which a GPU makes
    of many at once. Small matrices, and those that do not settle, are decomposed whole.
    """
    _, dim, _ = matrices.shape
    width = min(count + spare, dim)
    if dim <= max(limit_on(WHOLE_DIM, matrices), limit_on(WHOLE_RATIO, matrices) * width):
        return _whole(matrices, width)
    exact = matrices.double()
    axes = _random(dim, width, seed, exact.dtype, exact.device).expand(len(exact), dim, width)
    traces = exact.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    # Not zero where C is.
    floor = torch.where(traces > 0, ROUNDING * traces, 1)
    for _ in range(POWERS):
        axes = _independent(exact @ axes + floor * axes)
    # Only where to cut: nothing has settled yet, and Rayleigh quotients need no decomposition.
    values = ((exact @ axes) * axes).sum(1).sort(descending=True).values.clamp_min(0)
    rest, largest, done = exact, values[:, 0], None
    for _ in range(LOOKS):
        least = values[:, -1].clamp_min(ROUNDING * values[:, 0])
        ahead = torch.where(least > 0, 2 * largest / least - 1, 1).clamp_min(1 + ROUNDING)
        degree = int((math.log(2 * GROWTH) / torch.acosh(ahead)).clamp(1, MOST_DEGREE).min())
        # B = 2(2C / λ - I), λ the least eigenvalue in the axes: T_q(B / 2) grows above λ alone.
        stretched = rest * (4 / torch.where(least > 0, least, 1))[:, None, None]
        stretched.diagonal(dim1=1, dim2=2).sub_(2)
        for number in range(limit_on(FILTERS, exact) if done is None else FILTERS_AGAIN):
            axes = axes if number == 0 else _independent(axes)
            filtered = _filter(stretched, axes, degree)
            axes = filtered if done is None else torch.where(done[:, None], axes, filtered)
        # Twice: the second time for what rounding leaves of the first (Yamamoto et al. 2015).
        values, axes, images = _ritz(exact, _independent(_independent(axes)))
        residuals = torch.linalg.vector_norm(images - axes * values[:, None], dim=1)
        done = residuals <= settled * values + ROUNDING * values[:, :1]
        if bool(done[:, :count].all()):
            return values, axes.to(matrices)
        # A matrix that is done stays as it is: its spare axes, where it has no such rank, would hold up all others.
        done |= done[:, :count].all(1, keepdim=True)
        # What has settled is taken out of C: where it is far above the others, filters could hardly grow beside it.
        rest = exact - (axes * torch.where(done, values, 0)[:, None]) @ axes.mT
        largest = torch.where(done, least[:, None], values).amax(1)
    return _whole(matrices, width)


# All sites of a probe start from the same.
@lru_cache(maxsize=8)
def _random(dim: int, width: int, seed: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "d k"]:
    """Drawn on the CPU whatever the device."""
    drawn = torch.randn(dim, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(device, dtype)


def _whole(matrices: Float[Tensor, "s d d"], width: int) -> tuple[Float[Tensor, "s k"], Float[Tensor, "s d k"]]:
    """By a decomposition, in float64: in float32 it may fail where eigenvalues fall below its range."""
    values, axes = small_eigh(matrices.double())
    return values[:, -width:].flip(1).clamp_min(0), axes[:, :, -width:].flip(2).to(matrices)


def small_eigh(matrices: Float[Tensor, "*s k k"]) -> tuple[Float[Tensor, "*s k"], Float[Tensor, "*s k k"]]:
    """Eigenvalues, ascending, and eigenvectors, computed where that is faster."""
    on_host = BATCHED_DIM < matrices.shape[-1] <= HOST_DIM
    values, axes = torch.linalg.eigh(matrices.cpu() if on_host else matrices)
    return values.to(matrices), axes.to(matrices)


def _independent(axes: Float[Tensor, "s d k"]) -> Float[Tensor, "s d k"]:
    """Orthonormal, up to rounding that grows with the square of how dependent they were: by Cholesky."""
    axes = axes / torch.linalg.vector_norm(axes, dim=1, keepdim=True)
    products = axes.mT @ axes
    products.diagonal(dim1=1, dim2=2).add_(1e-14)
    return torch.linalg.solve_triangular(torch.linalg.cholesky_ex(products).L, axes.mT, upper=False).mT


def _ritz(matrices: Float[Tensor, "s d d"], axes: Float[Tensor, "s d k"]) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues of C inside the axes, descending, the axes turned to its eigenvectors there, and C times these."""
    images = matrices @ axes
    values, turn = (one.flip(-1) for one in small_eigh(axes.mT @ images))
    return values.clamp_min(0), axes @ turn, images @ turn


def _filter(stretched: Float[Tensor, "s d d"], axes: Float[Tensor, "s d k"], degree: int) -> Float[Tensor, "s d k"]:
    """T_q(B / 2) times the axes, T_q the Chebyshev polynomial of that degree."""
    before, now = axes, (stretched @ axes).div_(2)
    for _ in range(degree - 1):
        before, now = now, torch.baddbmm(before, stretched, now, beta=-1)
    return now


def leading_values(matrices: Float[Tensor, "s d d"]) -> Float[Tensor, " s"]:
    """The largest eigenvalue of each; float64, on the CPU."""
    if matrices.shape[1] <= limit_on(WHOLE_DIM, matrices) // 2:
        return torch.linalg.eigvalsh(matrices.double().cpu())[:, -1].clamp_min(0)
    return leading_without(matrices, matrices.new_zeros(len(matrices), 1, matrices.shape[1], 1))[:, 0]


def leading_without(
    matrices: Float[Tensor, "s d d"], bases: Float[Tensor, "s k d r"], *, near: Float[Tensor, "s d"] | None = None
) -> Float[Tensor, "s k"]:
    """The largest eigenvalue of PCP for each subspace, by Lanczos with full reorthogonalisation; float64, on the CPU.

    The subspace stands before the vectors that the search has made: one product takes both out. Columns of zeros do
    nothing. A vector that is `near` the leading eigenvectors of C makes it shorter.
    """
    _, count, dim, rank = bases.shape
    step = max(1, limit_on(HELD_ELEMENTS, bases) // (count * (rank + LANCZOS_STEPS) * dim))
    starts = _random(dim, 1, 0, matrices.dtype, matrices.device)[:, 0].expand(len(matrices), dim)
    if near is not None:
        starts = normalize(near.to(matrices)) + RANDOM_START * normalize(starts)
    parts = zip(matrices.split(step), bases.split(step), starts.split(step), strict=True)
    return torch.cat([_leading_without(*part) for part in parts])


def _leading_without(
    matrices: Float[Tensor, "s d d"], bases: Float[Tensor, "s k d r"], starts: Float[Tensor, "s d"]
) -> Float[Tensor, "s k"]:
    several, count, dim, rank = bases.shape
    steps, looks = min(LANCZOS_STEPS, dim - rank), limit_on(LANCZOS_LOOKS, matrices)
    known = matrices.new_zeros(several, count, rank + steps, dim)
    known[:, :, :rank] = bases.mT
    inside = matrices.new_zeros(several, count, steps, steps)
    starts = starts[:, None, :, None]
    vectors = (starts - bases @ (bases.mT @ starts))[..., 0]
    smallest = 64 * torch.finfo(matrices.dtype).eps * matrices.diagonal(dim1=1, dim2=2).amax(1)[:, None, None]
    largest = torch.zeros(several, count, dtype=torch.float64)
    # Which searches of each matrix still go on; where they are fewer than of another, some that have ended go along.
    here = torch.arange(count).expand(several, count)
    for step in range(steps):
        lengths = torch.linalg.vector_norm(vectors, dim=2, keepdim=True)
        # A search that has seen everything it can reach goes on with zeros.
        last = torch.where(lengths > smallest, vectors / lengths, 0)
        known[:, :, rank + step] = last
        seen = known[:, :, : rank + step + 1].flatten(0, 1)
        vectors = (last @ matrices).flatten(0, 1)[..., None]
        along = seen @ vectors
        inside[:, :, step, : step + 1] = along[:, rank:, 0].view(several, -1, step + 1)
        vectors = torch.baddbmm(vectors, seen.mT, along, alpha=-1)
        # Once is not enough in float32 where one eigenvalue is far above the others.
        vectors = torch.baddbmm(vectors, seen.mT, seen @ vectors, alpha=-1).view(several, -1, dim)
        if step + 1 in looks or step + 1 == steps:
            values, coordinates = small_eigh(inside[:, :, : step + 1, : step + 1].double())
            lengths = torch.linalg.vector_norm(vectors, dim=2) * coordinates[..., -1, -1].abs()
            found, residuals = torch.stack([values[..., -1].clamp_min(0), lengths]).cpu()
            largest.scatter_(1, here, found)
            going = residuals > SETTLED_LEADING * found
            most = int(going.sum(1).max())
            if not most:
                break
            if most < going.shape[1]:
                kept = going.logical_not().to(torch.uint8).argsort(stable=True, dim=1)[:, :most]
                here, at = here.gather(1, kept), (torch.arange(several)[:, None], kept)
                known, inside, vectors = known[at], inside[at], vectors[at]
    return largest
