"""Centring, second moments and the leading eigenvalue of a cloud of points.

Notation: X (n, d) holds the points as rows, X̄ the centred ones, C = X̄ᵀX̄ / (n - 1) with eigenvalues λ₁ ≥ λ₂ ≥ ...
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

# Relative error of λ₁ that the Lanczos iteration stops at, an order below the 1e-5 that is promised.
LEADING_TOLERANCE = 1e-6
LANCZOS_STEPS = 256
# With a Gram at hand a decomposition costs no more than this many steps.
LANCZOS_STEPS_ON_GRAM = 64
# Up to this width the product that makes the Gram costs less than the passes over the points that it saves.
GRAM_WIDTH = 1024


@dataclass(frozen=True, kw_only=True)
class Centred:
    """Points with their mean removed, divided by a power of two so that squares neither overflow nor vanish."""

    points: Float[Tensor, "n d"]
    scale: Float[Tensor, ""]
    """The power of two, in float64: `points * scale` are the centred points."""

    @cached_property
    def gram(self) -> Float[Tensor, "m m"]:
        """The smaller of X̄ᵀX̄ and X̄X̄ᵀ, whose eigenvalues other than zero are the same."""
        points = for_products(self.points)
        return points.T @ points if points.shape[1] <= points.shape[0] else points @ points.T


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Total variance Σλ and its largest part λ₁ with the axis it lies along. All float64 but the axis."""

    total: Float[Tensor, ""]
    leading: Float[Tensor, ""]
    axis: Float[Tensor, " d"]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same tokens at one site and at the next, both centred, each divided by a power of two, in float64."""

    source: Float[Tensor, "n d"]
    target: Float[Tensor, "n e"]


@dataclass(frozen=True, kw_only=True)
class GramSums:
    """Σλ and Σλ² of the covariance, in float64, and the number of dimensions."""

    total: Float[Tensor, ""]
    squares: Float[Tensor, ""]
    dim: int


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float64 stays float64; everything else is computed from float32, which holds bfloat16 and float16 exactly."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def power_of_two_scale(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """The power of two just below the largest absolute value, in float64 (1 for points that are all zero).

    Dividing by a power of two is exact, so distances and ratios are untouched.
    """
    largest = points.abs().max().double()
    return torch.where(largest > 0, torch.exp2(torch.floor(torch.log2(largest))), torch.ones_like(largest))


def product_roundoff(points: Float[Tensor, "n d"]) -> float:
    """Unit roundoff of matrix products of such points, as torch is set.

    Training scripts often allow TF32 or bfloat16 inside float32 products, and the products do not show it.
    """
    if points.dtype != torch.float32:
        return torch.finfo(points.dtype).eps / 2
    backend = torch.backends.cuda if points.is_cuda else torch.backends.mkldnn
    # Where a precision was set through one of torch's two interfaces, asking the other may raise; old ones have one.
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", "") or torch.get_float32_matmul_precision()
    return {"tf32": 2.0**-11, "high": 2.0**-11, "bf16": 2.0**-8, "medium": 2.0**-8}.get(precision, 2.0**-24)


def for_products(points: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """The points in float64 where torch is set to round float32 products further; else as they are."""
    return points if product_roundoff(points) <= 2.0**-24 else points.double()


def center(points: Float[Tensor, "n d"]) -> Centred:
    """Remove the mean, twice: the second pass takes away what rounding the first mean left behind."""
    raw = points.to(working_dtype(points.dtype))
    first = power_of_two_scale(raw)
    centred = _without_mean(raw / first.to(raw.dtype))
    # A common offset sets the first scale; the variation may be many orders below it.
    second = power_of_two_scale(centred)
    return Centred(points=_without_mean(centred / second.to(raw.dtype)), scale=first * second)


def _without_mean(points: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    low, high = points.aminmax(dim=0)
    # The mean of equal numbers may round to another number, and that residue would later be taken for variation.
    mean = torch.where(low == high, low, points.mean(0, dtype=torch.float64).to(points.dtype))
    return points - mean


def squared_norms(points: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """Row by row, then in float64: one float32 sum over millions of squares is off by 1e-4."""
    return points.square().sum(1).double()


def moments(centred: Centred) -> Moments:
    """Total variance and its leading part, without a decomposition of the covariance."""
    points = for_products(centred.points)
    n, d = points.shape
    unit = centred.scale.square() / max(n - 1, 1)
    leading, axis = leading_eigenpair(points, centred.gram if d <= min(n, GRAM_WIDTH) else None)
    total = squared_norms(points).sum()
    # On a line the two are equal, and rounding may put the part above the whole.
    return Moments(total=total * unit, leading=torch.minimum(leading, total) * unit, axis=axis)


def gram_sums(centred: Centred) -> GramSums:
    """Σλ and Σλ² from the smaller of the two Grams: ‖X̄ᵀX̄‖²_F = ‖X̄X̄ᵀ‖²_F = Σ(n-1)²λ²."""
    n, d = centred.points.shape
    unit = centred.scale.square() / max(n - 1, 1)
    total, squares = squared_norms(centred.points).sum(), squared_norms(centred.gram).sum()
    return GramSums(total=total * unit, squares=squares * unit.square(), dim=int(d))


def eigenvalues(centred: Centred) -> Float[Tensor, " r"]:
    """All eigenvalues of the covariance that n and d allow, ascending, float64, none below zero."""
    points = centred.points.double()
    n, d = points.shape
    gram = points.T @ points if d <= n else points @ points.T
    return torch.linalg.eigvalsh(gram).clamp_min(0) * centred.scale.square() / max(n - 1, 1)


def leading_eigenpair(
    points: Float[Tensor, "n d"], gram: Float[Tensor, "d d"] | None = None
) -> tuple[Float[Tensor, ""], Float[Tensor, " d"]]:
    """Largest eigenvalue of XᵀX (float64) and its unit eigenvector, by Lanczos with full reorthogonalisation.

    Where `gram` holds XᵀX already, a step costs d² instead of 2nd.

    A Ritz pair (θ, v) with residual ρ = ‖XᵀXv - θv‖ has an eigenvalue within ρ. It stops when ρ is below
    LEADING_TOLERANCE · θ. The change from step to step and ρ²/gap with the gap between Ritz values, both smaller, are
    not asked: where several eigenvalues lie close together at the top, their Ritz values are found one after the other,
    and a gap between two of them says nothing. An axis that the random start misses by more than ρ allows is not found:
    that takes two eigenvalues within 1e-3 of each other and bad luck, and then costs their difference. What has not
    converged after that many steps goes to a full float64 decomposition.
    """
    n, d = points.shape
    if min(n, d) <= 32:
        return _leading_by_decomposition(points)
    # A start of its own, the same for every cloud: the result depends on the points alone.
    start = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vector = (start / start.norm()).to(points)
    basis, diagonal, off_diagonal = [vector], [], []
    for step in range(min(LANCZOS_STEPS if gram is None else LANCZOS_STEPS_ON_GRAM, d)):
        image = points.T @ (points @ vector) if gram is None else gram @ vector
        diagonal.append(float(torch.dot(image.double(), vector.double())))
        known = torch.stack(basis, 1)
        for _ in range(2):
            image = image - known @ (known.T @ image)
        remainder = float(image.double().norm())
        # Steep spectra are done in a handful of steps; on flat ones asking at every step would cost more than stepping.
        if step < 8 or step % 8 == 0:
            ritz, coordinates = _tridiagonal_eigh(diagonal, off_diagonal)
            theta = float(ritz[-1])
            if remainder * abs(float(coordinates[-1, -1])) <= LEADING_TOLERANCE * theta:
                axis = known @ coordinates[:, -1].to(points)
                return points.new_tensor(theta, dtype=torch.float64), axis / axis.norm()
        vector = image / remainder
        basis.append(vector)
        off_diagonal.append(remainder)
    return _leading_by_decomposition(points)


def _tridiagonal_eigh(diagonal: list[float], off_diagonal: list[float]) -> tuple[Tensor, Tensor]:
    main, beside = torch.tensor(diagonal, dtype=torch.float64), torch.tensor(off_diagonal, dtype=torch.float64)
    eigen = torch.linalg.eigh(main.diag() + beside.diag(1) + beside.diag(-1))
    return eigen.eigenvalues, eigen.eigenvectors


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
