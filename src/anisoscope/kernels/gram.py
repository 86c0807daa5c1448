"""Centring, second moments and the leading eigenvalue of a cloud of points.

Views may have leading axes `*s`: one entry a cloud where several were measured at once (stack.py).

Notation: X (n, d) holds the points as rows, X̄ the centred ones, C = X̄ᵀX̄ / (n - 1) with eigenvalues λ₁ ≥ λ₂ ≥ ...
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Limit = TypeVar("Limit")
# Relative error of λ₁ at which the Lanczos iteration stops; 1e-5 is promised, the rest is left to rounding.
LEADING_TOLERANCE = 5e-6
LANCZOS_STEPS = 256
# Relative error that Σλ and Σλ² may have where a bound is built on them.
SUMS_ERROR = 4e-6
# Norms between which no fourth power overflows in float32 and no square of a small part vanishes: no need to scale.
SAFE_RANGE = (2.0**-25, 2.0**25)
MEAN_LEFT = 1e-5


@dataclass(frozen=True, kw_only=True)
class Centred:
    """Points with their mean removed, divided by a power of two where their squares would overflow or vanish."""

    points: Float[Tensor, "n d"]
    scale: Float[Tensor, ""]
    """The power of two, in float64: `points * scale` are the centred points."""
    squares: Float[Tensor, " n"]
    """Squared norms of the rows of `points`, in float64."""
    mean: Float[Tensor, " d"]
    """What was taken away, divided by the scale, in float64."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Total variance Σλ and its largest part λ₁ with the axis it lies along. All float64 but the axis."""

    total: Float[Tensor, "*s"]
    leading: Float[Tensor, "*s"]
    axis: Float[Tensor, "*s d"]


@dataclass(frozen=True, kw_only=True)
class Directions:
    """Σ x/‖x‖ over the points as they are, not centred, in float64, and their number; NaN where a point is zero."""

    total: Float[Tensor, "*s d"]
    count: Float[Tensor, "*s"]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same tokens at one site and at the next, both centred, each divided by a power of two, in float64."""

    source: Float[Tensor, "n d"]
    target: Float[Tensor, "n e"]


@dataclass(frozen=True, kw_only=True)
class GramSums:
    """Σλ and Σλ² of the points divided by a power of two, in float64, and the number of dimensions.

    Only ratios of the two that are free of scale are meant: (Σλ)² of points of size 1e100 is beyond float64.
    """

    total: Float[Tensor, "*s"]
    squares: Float[Tensor, "*s"]
    dim: int


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float64 stays float64; everything else is computed from float32, which holds bfloat16 and float16 exactly."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def power_of_two_scale(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """The power of two just below the largest absolute value, in float64 (1 for points that are all zero).

    Dividing by a power of two is exact, so distances and ratios are untouched.
    """
    return power_of_two(points.abs().max().double())


def power_of_two(largest: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """The power of two just below each number; 1 for zeros."""
    return torch.where(largest > 0, torch.exp2(torch.floor(torch.log2(largest))), torch.ones_like(largest))


def limit_on(limits: Mapping[str, Limit], like: Tensor) -> Limit:
    """How much may be held at one time where a tensor is, and the like: as on a GPU wherever nothing else is said."""
    return limits.get(like.device.type, limits["cuda"])


def product_roundoff(points: Float[Tensor, "*s n d"]) -> float:
    """Unit roundoff of matrix products of such points, as torch is set.

    Training scripts often allow TF32 or bfloat16 inside float32 products, and the products do not show it.
    """
    if points.dtype != torch.float32:
        return torch.finfo(points.dtype).eps / 2
    backend = torch.backends.cuda if points.is_cuda else torch.backends.mkldnn
    # Where a precision was set through one of torch's two interfaces, asking the other may raise; old ones have one.
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", "") or torch.get_float32_matmul_precision()
    return {"tf32": 2.0**-11, "high": 2.0**-11, "bf16": 2.0**-8, "medium": 2.0**-8}.get(precision, 2.0**-24)


def for_products(points: Float[Tensor, "*s n d"]) -> Float[Tensor, "*s n d"]:
    """The points in float64 where torch is set to round float32 products further; else as they are."""
    return points if product_roundoff(points) <= 2.0**-24 else points.double()


def center(points: Float[Tensor, "n d"]) -> Centred:
    """Remove the mean; once more, and after scaling, where offset or scale made the first time inexact.

    What is left of the mean is at most MEAN_LEFT times the root mean square norm: it adds its square to a variance.
    """
    raw = points.to(working_dtype(points.dtype))
    mean = _center_of(raw)
    centred = raw - mean
    squares = squared_norms(centred)
    if SAFE_RANGE[0] <= float(squares.max().sqrt()) <= SAFE_RANGE[1]:
        if float(mean_of(centred).double().norm()) > MEAN_LEFT * float(squares.mean().sqrt()):
            rest = _center_of(centred)
            centred, mean = centred - rest, mean.double() + rest
            squares = squared_norms(centred)
        return Centred(points=centred, scale=torch.ones_like(squares[0]), squares=squares, mean=mean.double())
    first = power_of_two_scale(raw)
    raw = raw / first.to(raw.dtype)
    mean = _center_of(raw)
    centred = raw - mean
    # A common offset sets the first scale; the variation may be many orders below it.
    second = power_of_two_scale(centred)
    centred = centred / second.to(raw.dtype)
    rest = _center_of(centred)
    centred = centred - rest
    mean = mean / second + rest
    return Centred(points=centred, scale=first * second, squares=squared_norms(centred), mean=mean)


def mean_of(points: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """The mean as a product, which is much faster than a sum over the first axis."""
    weights = torch.full((len(points),), 1 / len(points), dtype=points.dtype, device=points.device)
    return weights @ points


def _center_of(points: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    mean = mean_of(points)
    # The mean of equal numbers may round to another number, and that residue would later be taken for variation.
    # Few columns are constant in their first rows, so that few are looked at whole.
    low, high = points[:64].aminmax(dim=0)
    suspects = torch.nonzero(low == high).flatten()
    if len(suspects):
        low, high = points[:, suspects].aminmax(dim=0)
        mean[suspects] = torch.where(low == high, low, mean[suspects])
    return mean


def row_norms(points: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """Euclidean norms, in float64."""
    norms = torch.linalg.vector_norm(points.to(working_dtype(points.dtype)), dim=1).double()
    if _is_safe(norms):
        return norms
    # Squares overflow or vanish, perhaps in float64 too: each row by its own scale.
    exact = points.double()
    largest = exact.abs().amax(1)
    return torch.linalg.vector_norm(exact / torch.where(largest > 0, largest, 1)[:, None], dim=1) * largest


def norms_of_each(clouds: Sequence[Float[Tensor, "n d"]]) -> Float[Tensor, "s n"]:
    """`row_norms` of several, which are looked at once."""
    # A GPU copies them all in less time than the host asks for each.
    several = [torch.stack(list(clouds))] if clouds[0].is_cuda else [one[None] for one in clouds]
    norms = [torch.linalg.vector_norm(one.to(working_dtype(one.dtype)), dim=2) for one in several]
    stacked = torch.cat(norms).double()
    return stacked if _is_safe(stacked) else torch.stack([row_norms(one) for one in clouds])


def _is_safe(norms: Float[Tensor, "*s n"]) -> bool:
    low, high = (float(end) for end in norms.aminmax())
    return SAFE_RANGE[0] <= low and high <= SAFE_RANGE[1]


def sum_directions(points: Float[Tensor, "n d"], centred: Centred) -> Directions:
    """The sum of all unit vectors along the points.

    With w = 1/‖x‖, Σ w x = Σ w (x - mean) + mean Σ w: around the mean, float32 sums do not drift. Where a few huge
    points carry the mean far beyond the others, x - mean has lost their digits, and the sum is made in float64.
    """
    norms = row_norms(points)
    weights = norms.reciprocal()
    near = float(centred.mean.norm() * weights.mean()) <= 4
    if near and _is_safe(norms) and float(centred.scale) == 1:
        total = weights.to(centred.points.dtype) @ centred.points + centred.mean * weights.sum()
    else:
        total = (points.double() / norms[:, None]).sum(0)
    return Directions(total=total, count=total.new_tensor(len(points)))


def squared_norms(points: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """Row by row, then in float64: one float32 sum over millions of squares is off by 1e-4."""
    return torch.linalg.vector_norm(points, dim=1).double().square()


def moments(centred: Centred, squares: Float[Tensor, ""] | None = None) -> Moments:
    """Total variance and its leading part, without a decomposition of the covariance.

    `squares`, that of `gram_sums` where it is known, lets the search for the leading part stop earlier.
    """
    points = for_products(centred.points)
    spare = max(len(points) - 1, 1)
    unit, total = centred.scale.square() / spare, centred.squares.sum()
    leading, axis = leading_eigenpair(points, total, None if squares is None else squares * spare**2)
    # On a line the two are equal, and rounding may put the part above the whole.
    return Moments(total=total * unit, leading=torch.minimum(leading, total) * unit, axis=axis)


def gram_sums(centred: Centred, squares: Float[Tensor, ""] | None = None) -> GramSums:
    """Σλ and Σλ² from the smaller of the two Grams: ‖X̄ᵀX̄‖²_F = ‖X̄X̄ᵀ‖²_F = Σ(n-1)²λ².

    `squares` is ‖X̄X̄ᵀ‖²_F where a search for neighbours has made these products already.
    """
    n, d = centred.points.shape
    unit = 1 / max(n - 1, 1)
    if squares is None:
        points = for_products(centred.points)
        squares = squared_norms(points.T @ points if d <= n else points @ points.T).sum()
    return GramSums(total=centred.squares.sum() * unit, squares=squares * unit**2, dim=int(d))


def eigenvalues(centred: Centred) -> Float[Tensor, " r"]:
    """All eigenvalues of the covariance that n and d allow, ascending, float64, none below zero."""
    points = centred.points.double()
    n, d = points.shape
    gram = points.T @ points if d <= n else points @ points.T
    return torch.linalg.eigvalsh(gram).clamp_min(0) * centred.scale.square() / max(n - 1, 1)


def leading_eigenpair(
    points: Float[Tensor, "n d"], total: Float[Tensor, ""] | None = None, squares: Float[Tensor, ""] | None = None
) -> tuple[Float[Tensor, ""], Float[Tensor, " d"]]:
    """Largest eigenvalue of XᵀX (float64) and its unit eigenvector, by Lanczos with full reorthogonalisation.

    With T the tridiagonal matrix after k steps, θ its largest eigenvalue, and β what couples the k-th basis vector to
    the rest of the space: all eigenvalues of the rest are at most R, the smaller of Σλ - tr T and
    √(Σλ² - ‖T‖²_F - 2β²), because they are not negative and because ‖XᵀX‖²_F is the sum over all four parts. So

        θ ≤ λ₁ ≤ λ_max(T + β²/(θ - R) e_k e_kᵀ)   where R < θ,

    and it stops when the two ends meet to LEADING_TOLERANCE. Spectra too flat for such a bound (R ≥ θ) go on until the
    residual of the Ritz pair is that small: an eigenvalue is then as near; gaps between Ritz values, which would allow
    to stop sooner, say nothing where several eigenvalues lie close together at the top. What has not converged after
    LANCZOS_STEPS goes to a full float64 decomposition.
    """
    n, d = points.shape
    if min(n, d) <= 32:
        return _leading_by_decomposition(points)
    trace = float("inf") if total is None else float(total) * (1 + SUMS_ERROR)
    frobenius = float("inf") if squares is None else float(squares) * (1 + SUMS_ERROR)
    # A start of its own, the same for every cloud: the result depends on the points alone.
    start = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = points.new_empty(min(LANCZOS_STEPS, d) + 1, d)
    basis[0] = (start / start.norm()).to(points)
    diagonal, beside = np.zeros(len(basis)), np.zeros(len(basis))
    for step in range(len(basis) - 1):
        vector, known = basis[step], basis[: step + 1]
        image = (points @ vector) @ points
        diagonal[step] = float(torch.dot(image, vector))
        for _ in range(2):
            image.addmv_(known.T, known @ image, alpha=-1)
        beside[step] = float(torch.linalg.vector_norm(image))
        # Nothing is done in fewer than three steps; on flat spectra asking at every one would cost more than stepping.
        if 2 <= step < 16 or step % 8 == 0:
            size, coupling = step + 1, beside[step]
            tridiagonal = np.diag(diagonal[:size]) + np.diag(beside[:step], 1) + np.diag(beside[:step], -1)
            # By torch, whose threads are the caller's to set: numpy would wake its own for a handful of numbers.
            ritz, coordinates = torch.linalg.eigh(torch.from_numpy(tridiagonal))
            theta, error = float(ritz[-1]), coupling * abs(float(coordinates[-1, -1]))
            outside = frobenius - np.square(tridiagonal).sum() - 2 * coupling**2
            rest = min(trace - diagonal.sum(), math.sqrt(max(outside, 0.0)))
            if rest < theta and error > LEADING_TOLERANCE * theta:
                tridiagonal[-1, -1] += coupling**2 / (theta - rest)
                error = min(error, float(torch.linalg.eigvalsh(torch.from_numpy(tridiagonal))[-1]) - theta)
            if error <= LEADING_TOLERANCE * theta:
                axis = coordinates[:, -1].to(points) @ known
                return points.new_tensor(theta, dtype=torch.float64), axis / axis.norm()
        basis[step + 1] = image / beside[step]
    return _leading_by_decomposition(points)


def _leading_by_decomposition(points: Float[Tensor, "n d"]) -> tuple[Float[Tensor, ""], Float[Tensor, " d"]]:
    exact = points.double()
    n, d = exact.shape
    if d <= n:
        eigen = torch.linalg.eigh(exact.T @ exact)
        return eigen.eigenvalues[-1].clamp_min(0), eigen.eigenvectors[:, -1].to(points.dtype)
    eigen = torch.linalg.eigh(exact @ exact.T)
    axis = exact.T @ eigen.eigenvectors[:, -1]
    norm = axis.norm()
    return eigen.eigenvalues[-1].clamp_min(0), (axis / norm if norm > 0 else axis).to(points.dtype)
