"""Rogue dimensions: how much of all similarity a few coordinates own. Rotations mix coordinates, and change it."""

import functools
import math

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels.gram import row_norms
from anisoscope.metrics.declaration import Metric, metric

# With fewer points a mean cosine far from 0 is what chance gives.
LEAST_SHARED = 16


def cosine_contributions(points: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """What each coordinate adds to the mean cosine: the mean of uᵢuⱼ over pairs i ≠ j of unit vectors; in O(nd)."""
    return _contributions(_units(points))


def _units(points: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    exact = points.double()
    return exact / row_norms(exact)[:, None]


def _contributions(units: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    n = len(units)
    return (units.sum(0).square() - units.square().sum(0)) / (n * (n - 1))


@functools.cache
def _share_of_random_direction(count: int, d: int) -> float:
    """Mean share of the `count` largest of d squared coordinates of a random direction.

    The share is independent of the length of a Gaussian vector, so it is the mean of its `count` largest squares over
    d. The j-th largest exceeds x when at least j of d do, each with probability q = erfc √(x/2).
    """
    if d <= count:
        return 1.0
    x = torch.linspace(0, 2 * math.log(d) + 60, 100_001, dtype=torch.float64)
    q = torch.erfc((x / 2).sqrt())
    exactly = [math.comb(d, j) * q**j * (1 - q) ** (d - j) for j in range(count)]
    exceeds = sum(1 - torch.stack(exactly[:j]).sum(0) for j in range(1, count + 1))
    return float(torch.trapezoid(torch.as_tensor(exceeds), x)) / d


def _declare_share(name: str, count: int, words: str) -> Metric:
    @metric(
        name=name,
        family="drift",
        needs="points",
        version=1,
        invariant_to="scale",
        bounds=(0.0, math.inf),
        cite="timkey2021rogue",
        null="exact",
        closed_form=lambda n, d: _share_of_random_direction(count, d),
        min_points=LEAST_SHARED,
        undefined="some points are zero, or their mean cosine is not above 1/n: there is nothing to share",
    )
    def share(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
        parts = cosine_contributions(points)
        whole = parts.sum()
        return torch.where(whole > 1 / len(points), parts.topk(min(count, len(parts))).values.sum() / whole, torch.nan)

    share.function.__doc__ = f"""Share of the mean cosine that {words} owns.

        {name} = Σ_k C_k / Σ C,   C_k = ((Σᵢ uᵢₖ)² - Σᵢ uᵢₖ²) / (n (n - 1)),   uᵢ = xᵢ / ‖xᵢ‖,   k the {count} largest

    The C of all coordinates add up to `mean_cosine`; others may be negative, so the share can exceed 1. NaN where the
    mean cosine is not above 1/n, which chance alone can give. The null is a cloud around a random direction: the mean
    share of the largest of d squared coordinates. Deviation from the source: all pairs instead of a sample.
    """
    return share


rogue_share = _declare_share("rogue_share", 1, "the coordinate with the largest part")
rogue_share_3 = _declare_share("rogue_share_3", 3, "the group of the three coordinates with the largest parts")


def _isotropic_r2(removed: int, d: int) -> float:
    """With u' what is left of a random unit vector: r² = (E‖u'‖)⁴ d / (d - removed)."""
    if removed >= d:
        return math.nan
    left = d - removed
    length = math.lgamma((left + 1) / 2) + math.lgamma(d / 2) - math.lgamma(left / 2) - math.lgamma((d + 1) / 2)
    return math.exp(4 * length) * d / left


def _declare_r2(removed: int) -> Metric:
    @metric(
        name=f"rogue_r2_{removed}",
        family="drift",
        needs="points",
        version=1,
        invariant_to="scale",
        bounds=(0.0, 1.0),
        cite="timkey2021rogue",
        null="exact",
        closed_form=lambda n, d: _isotropic_r2(removed, d),
        min_points=3,
        undefined="some points are zero, all cosines are equal, or too few coordinates are left",
    )
    def rogue_r2(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
        whole = _units(points)
        if whole.shape[1] <= removed:
            return whole.new_tensor(torch.nan)
        left = whole.clone()
        left[:, _contributions(whole).topk(removed).indices] = 0
        return _r_squared(whole, _units(left))

    rogue_r2.function.__doc__ = f"""How well cosines without the top {removed} coordinates tell the cosines with them.

        rogue_r2_{removed} = corr²(cos(xᵢ, xⱼ), cos(x'ᵢ, x'ⱼ)) over pairs i < j,   x' without the {removed} largest C_k

    C_k as in `rogue_share`. Near 0 where a few coordinates decide who is similar to whom. Over all pairs, in O(nd²) or
    O(n²d): Σ cos cos' = ‖UᵀU'‖² needs no pair. For isotropic points it is (E‖u'‖)⁴ d / (d - {removed}), close to
    1 - {removed}/d: the null. Deviation from the source: all pairs instead of a sample.
    """
    return rogue_r2


def _r_squared(one: Float[Tensor, "n d"], two: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """r² between the products of one set of unit vectors and those of another, over all pairs of different points."""
    n, d = one.shape
    pairs = n * (n - 1)

    def mean(a: Tensor, b: Tensor) -> Tensor:
        products = (a.T @ b).square().sum() if d <= n else ((a @ a.T) * (b @ b.T)).sum()
        return (products - n) / pairs

    means = [(units.sum(0).square().sum() - n) / pairs for units in (one, two)]
    spread_one, spread_two = (
        mean(units, units) - average.square() for units, average in zip((one, two), means, strict=True)
    )
    # What is left of cosines that are all equal is rounding.
    varies = torch.minimum(spread_one, spread_two) > 1e-13
    return torch.where(varies, (mean(one, two) - means[0] * means[1]).square() / (spread_one * spread_two), torch.nan)


rogue_r2_1, rogue_r2_3, rogue_r2_5 = (_declare_r2(removed) for removed in (1, 3, 5))
