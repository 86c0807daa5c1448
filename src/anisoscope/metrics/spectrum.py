"""Metrics of the eigenvalues λ₁ ≥ λ₂ ≥ ... ≥ λ_d of the centred covariance (and, for partitions, of XᵀX)."""

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels.gram import GramSums, Moments, power_of_two_scale
from anisoscope.metrics.declaration import metric


@metric(
    family="anisotropy",
    needs="moments",
    version=1,
    bounds=(0.0, 1.0),
    cite="razzhigaev2024shape",
    null="isotropic",
    stacked=True,
)
def leading_variance(moments: Moments) -> Float[Tensor, "*s"]:
    """Share of the variance along the first principal axis.

        leading_variance = λ₁ / Σᵢ λᵢ

    1 when all points lie on one line; 1/d for an isotropic cloud with n ≫ d, and near (1 + √(d/n))² / d with n points
    (see `null`). A few tokens of very large norm can own it: compare the populations `all` and `typical`.
    Deviation from the source: none (`anisotropy` there).

    >>> import torch, anisoscope as an
    >>> cross = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> round(an.estimate(cross, ["leading_variance"])["leading_variance"].value, 6)
    0.9
    """
    return moments.leading / moments.total


@metric(family="isotropy", needs="gram_sums", version=1, cite="gao2017theory", null="isotropic", stacked=True)
def participation_ratio(gram_sums: GramSums) -> Float[Tensor, "*s"]:
    """How many axes the variance is spread over, by second moments.

        participation_ratio = (Σλ)² / Σλ²

    1 when all points lie on one line, d when all λ are equal. With a = leading_variance, 1/a ≤ PR ≤ 1/a². Isotropic
    clouds of n points read near d / (1 + d/n).

    >>> import torch, anisoscope as an
    >>> cross = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> round(an.estimate(cross, ["participation_ratio"])["participation_ratio"].value, 6)  # 100 / 82
    1.219512
    """
    return gram_sums.total.square() / gram_sums.squares


@metric(
    family="isotropy",
    needs="gram_sums",
    version=1,
    bounds=(0.0, 1.0),
    cite="rudman2022isoscore",
    null="isotropic",
    undefined="the points do not vary, or have one coordinate",
    stacked=True,
)
def isoscore(gram_sums: GramSums) -> Float[Tensor, "*s"]:
    """How evenly the variance uses all d axes.

        IsoScore = (PR - 1) / (d - 1),   PR = (Σλ)² / Σλ²

    0 for a line, 1 when all λ are equal. The source gives it as a distance of normalised eigenvalues from the vector of
    ones, rescaled twice; that is algebraically the expression above (the tests check both to 1e-12). Strongly biased
    for n not much larger than d: an isotropic cloud with n = d reads near .5 (see `null`).
    """
    return _isoscore_from(participation_ratio(gram_sums), gram_sums.dim)


@metric(
    family="isotropy",
    needs="gram_sums",
    version=1,
    bounds=(0.0, 1.0),
    cite="rudman2024stable",
    null="isotropic",
    settings=("isoscore_zeta",),
    undefined="the points do not vary, or have one coordinate",
    stacked=True,
)
def isoscore_star(gram_sums: GramSums, *, isoscore_zeta: float = 0.25) -> Float[Tensor, "*s"]:
    """IsoScore of a covariance shrunk towards an isotropic one.

        C* = (1 - ζ) C + ζ (tr C / d) I,   Σλ*² = (1 - ζ)² Σλ² + (1 - (1 - ζ)²) (Σλ)² / d

    ζ = 0 gives `isoscore`, ζ = 1 gives 1. Deviation from the source: it shrinks towards a covariance from a larger
    sample or towards I; towards (tr C / d) I the score keeps its invariance to scale.
    """
    kept = (1 - isoscore_zeta) ** 2
    squares = kept * gram_sums.squares + (1 - kept) * gram_sums.total.square() / gram_sums.dim
    return _isoscore_from(gram_sums.total.square() / squares, gram_sums.dim)


def _isoscore_from(ratio: Float[Tensor, "*s"], dim: int) -> Float[Tensor, "*s"]:
    return (ratio - 1) / (dim - 1) if dim > 1 else torch.full_like(ratio, torch.nan)


@metric(family="isotropy", needs="spectrum", version=1, cite="roy2007effective", null="isotropic")
def effective_rank(spectrum: Float[Tensor, " r"]) -> Float[Tensor, ""]:
    """How many axes the variance is spread over, by entropy.

        effective_rank = exp(-Σᵢ pᵢ log pᵢ),   pᵢ = λᵢ / Σλ,   0 log 0 = 0

    1 for a line, d when all λ are equal; no constant is added inside the logarithm, so it never exceeds d. Needs the
    full spectrum: on request. Deviation from the source: it takes singular values, we take shares of variance.
    """
    shares = spectrum / spectrum.sum()
    return torch.exp(-torch.special.xlogy(shares, shares).sum())


@metric(
    family="isotropy",
    needs="points",
    version=1,
    invariant_to="rotation",
    bounds=(0.0, 1.0),
    cite="mu2018all",
    null="none",
    reason="it depends on the scale of the points, and the isotropic value with it",
    undefined="the ratio is below the smallest float64: the points are too long for a partition function",
)
def partition_isotropy(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """How constant the partition function is over directions.

        I(X) = min_c Z(c) / max_c Z(c),   Z(c) = Σᵢ exp(c · xᵢ),   c over ± the unit eigenvectors of XᵀX

    1 when Z is the same in every direction. In float64 through log-sum-exp. It is neither centred nor scale invariant:
    doubling the points can take .09 to .008. Deviation from the source: both signs of every eigenvector (an
    eigenvector's sign is arbitrary, so one sign alone is not well defined); always at most the one-sign value.
    """
    partitions = log_partitions(points)
    ratio = torch.exp(partitions.min() - partitions.max())
    return torch.where(ratio > 0, ratio, torch.nan)


def log_partitions(points: Float[Tensor, "n d"]) -> Float[Tensor, " c"]:
    """Logarithm of Z(c) for both signs of every eigenvector c of XᵀX."""
    exact = points.double()
    scaled = exact / power_of_two_scale(exact)
    axes = torch.linalg.eigh(scaled.T @ scaled).eigenvectors
    projections = exact @ axes
    return torch.cat([torch.logsumexp(projections, 0), torch.logsumexp(-projections, 0)])
