"""Intrinsic dimension from distances r₁ ≤ r₂ ≤ ... to the nearest neighbours among the distinct points."""

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels.neighbors import Neighbors
from anisoscope.metrics.declaration import DIMENSIONAL, Metric, metric

GRIDE_SCALES = (2, 4, 8, 16, 32, 64)


def _log_ratios(neighbors: Neighbors, near: int, far: int) -> Float[Tensor, "*s n"]:
    """log μ, μ = r_far / r_near, ascending; NaN, for points that take no part, last."""
    distances = neighbors.distances
    return torch.log(distances[..., far - 1] / distances[..., near - 1]).sort(-1).values


def _kept(n: int, discard_fraction: float) -> int:
    """How many of the smallest ratios a fit keeps; never the last of all, whose empirical F is 1."""
    return min(int(n * (1 - discard_fraction) + 1e-9), n - 1)


@metric(
    family="intrinsic_dimension",
    needs="neighbors",
    # 2: the population `matched` is drawn from `content`.
    version=2,
    cite="facco2017estimating",
    null="isotropic",
    populations=DIMENSIONAL,
    settings=("discard_fraction",),
    neighbors=2,
    min_points=3,
    undefined="all ratios of distances are 1, or too few are kept",
    stacked=True,
)
def twonn(neighbors: Neighbors, *, discard_fraction: float = 0.1) -> Float[Tensor, "*s"]:
    """Dimension from the ratio of the two nearest distances, by a straight line through the origin.

        d = Σ xᵢyᵢ / Σ xᵢ²,   xᵢ = log μ₍ᵢ₎,   yᵢ = -log(1 - i/N),   μ = r₂ / r₁,   i ≤ (1 - discard) N

    On a manifold of dimension d with locally constant density F(μ) = 1 - μ⁻ᵈ, hence the line. Exact repeats are removed
    and counted; the point itself is left out by index. Underestimates high dimensions (20 reads 17 at 4,096 points:
    see `null`), and repeated tokens pull it down: compare the populations `all`, `types` and `matched`.
    Deviation from the source: none. *The Shape of Learning* prints log(1 - F)/log μ = d and y = 1 - F, both without the
    needed sign and logarithm; its released code fits as we do, on the lowest 20 % (discard_fraction .8).
    """
    log_mu = _log_ratios(neighbors, 1, 2)
    n = (~log_mu.isnan()).sum(-1, keepdim=True)
    kept = torch.minimum(torch.floor(n * (1 - discard_fraction) + 1e-9), n - 1)
    rank = torch.arange(1, log_mu.shape[-1] + 1, dtype=log_mu.dtype, device=log_mu.device)
    x = torch.where(rank <= kept, log_mu, 0.0)
    y = torch.where(rank <= kept, -torch.log1p(-rank / n), 0.0)
    return torch.where(kept[..., 0] >= 2, (x * y).sum(-1) / x.square().sum(-1), torch.nan)


@metric(
    family="intrinsic_dimension",
    needs="neighbors",
    version=2,
    cite="denti2022generalized",
    null="isotropic",
    populations=DIMENSIONAL,
    settings=("discard_fraction",),
    neighbors=2,
    min_points=3,
    undefined="all ratios of distances are 1, or too few are kept",
)
def twonn_mle(neighbors: Neighbors, *, discard_fraction: float = 0.1) -> Float[Tensor, ""]:
    """Dimension from the ratio of the two nearest distances, by maximum likelihood, largest ratios censored.

        d = (k - 1) / (Σ_{i≤k} log μ₍ᵢ₎ + (N - k) log μ₍ₖ₎),   k = (1 - discard) N

    The N - k largest ratios are known only to exceed μ₍ₖ₎, so outliers cannot pull it. Standard error near d/√k.
    """
    log_mu = _log_ratios(neighbors, 1, 2)
    n = len(log_mu)
    kept = _kept(n, discard_fraction)
    if kept < 2:
        return torch.full_like(log_mu[0], torch.nan)
    return _finite((kept - 1) / (log_mu[:kept].sum() + (n - kept) * log_mu[kept - 1]))


def _finite(value: Float[Tensor, ""]) -> Float[Tensor, ""]:
    return torch.where(value.isfinite(), value, torch.nan)


def _declare_gride(scale: int) -> Metric:
    near = scale // 2

    @metric(
        name=f"gride_{scale}",
        family="intrinsic_dimension",
        needs="neighbors",
        version=2,
        cite="denti2022generalized",
        null="isotropic",
        populations=DIMENSIONAL,
        neighbors=scale,
        min_points=scale + 1,
        undefined="all ratios of distances are 1",
        default=False,
    )
    def gride(neighbors: Neighbors) -> Float[Tensor, ""]:
        return solve_gride(_log_ratios(neighbors, near, scale), near, scale)

    gride.function.__doc__ = f"""Dimension from the distances to neighbours {near} and {scale}, by maximum likelihood.

        0 = (N - 1)/d + (n₂ - n₁ - 1) Σ log μ / (1 - μ⁻ᵈ) - (n₂ - 1) Σ log μ,   μ = r_n₂ / r_n₁

    with n₁ = {near} and n₂ = {scale}.

    The larger n₂, the coarser the scale: a curve over gride_2, gride_4, ... that stays level supports a dimension, one
    that moves says at which scale it was read. gride_2 is the uncensored maximum likelihood of TwoNN, (N - 1)/Σ log μ.
    Deviation from the source: its packages leave out ratios above q50 + 20 (q95 - q50), we keep all; near-repeats pull
    it down, and `near_duplicate_rate` shows them.
    """
    return gride


def solve_gride(log_mu: Float[Tensor, " n"], near: int, far: int) -> Float[Tensor, ""]:
    """The d that solves GRIDE's score equation, by bisection on log d (the score falls in d, so the root is one)."""
    n, total = len(log_mu), log_mu.sum()
    weight = far - near - 1

    def score(d: Tensor) -> Tensor:
        exponent = d * log_mu
        # x / (1 - e⁻ˣ), which is 1 where two neighbours are at the same distance.
        ratios = torch.where(exponent > 0, exponent / -torch.expm1(-exponent), 1.0)
        return (n - 1) / d + weight * ratios.sum() / d - (far - 1) * total

    low, high = total.new_tensor(-12.0), total.new_tensor(18.0)
    for _ in range(48):
        middle = (low + high) / 2
        above = score(middle.exp()) > 0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return torch.where(total > 0, ((low + high) / 2).exp(), torch.nan)


gride_2, gride_4, gride_8, gride_16, gride_32, gride_64 = (_declare_gride(scale) for scale in GRIDE_SCALES)


@metric(
    family="intrinsic_dimension",
    needs="neighbors",
    version=2,
    cite="levina2004maximum",
    null="isotropic",
    populations=DIMENSIONAL,
    settings=("neighbors",),
    neighbors="neighbors",
    min_points=lambda d, k: k + 1,
    undefined="all neighbours of every point are at one distance",
)
def levina_bickel(nearest: Neighbors, *, neighbors: int = 20) -> Float[Tensor, ""]:
    """Dimension from the distances to the k nearest neighbours, by maximum likelihood over all points.

        1/d = mean over points of 1/(k - 1) Σ_{j<k} log(r_k / r_j)

    Inverses are averaged, not dimensions (MacKay and Ghahramani's correction: the mean of the inverses is unbiased).
    The zero term j = k is not counted. k is `neighbors` of the Spec, 20 by default.
    """
    logs = nearest.distances[:, :neighbors].log()
    return _finite(1 / (logs[:, -1:] - logs[:, :-1]).mean())


@metric(
    family="intrinsic_dimension",
    needs="neighbors",
    version=2,
    bounds=(0.0, 1.0),
    cite="facco2017estimating",
    null="isotropic",
    populations=DIMENSIONAL,
    neighbors=1,
    min_points=3,
)
def near_duplicate_rate(neighbors: Neighbors) -> Float[Tensor, ""]:
    """Share of the distinct points whose nearest neighbour is nearly on top of them.

        near_duplicate_rate = #{i : r₁(i) < 10⁻³ · median r₁} / N

    Near-repeats survive the removal of exact ones and drive any neighbour-ratio dimension towards zero: where this is
    not near 0, read the dimensions with care. Ours; the source of the estimators does not have it.
    """
    nearest = neighbors.distances[:, 0]
    return (nearest < 1e-3 * nearest.median()).double().mean()
