"""Statistics that every claim about alignment rests on: p from draws, many tests at once, ratios of sums.

Every random number comes from a seed and is drawn on the CPU, so that a device changes no null.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

LEVEL = 0.95
RESAMPLES = 999
# Random numbers held at one time.
DRAWN_ELEMENTS = 1 << 20
# Of a bootstrap that is kept for the next of as many.
KEPT_ELEMENTS = 1 << 19


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A number with both ends of an interval at LEVEL; NaN where there is too little to resample."""

    value: float
    low: float = math.nan
    high: float = math.nan


def permutation_p(value: float, draws: Float[Tensor, " m"]) -> float:
    """(1 + how many draws reach the value) / (m + 1): never below 1/(m + 1); NaN where either is unknown."""
    if math.isnan(value) or not len(draws) or bool(draws.isnan().any()):
        return math.nan
    return (1 + int((draws >= value).sum())) / (len(draws) + 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Permutations:
    """Some of the permutations w ↦ rings[j, (place of w in the first ring + k) mod W], for J rings and W turns k."""

    orders: Int[Tensor, "m w"]
    """Each written out."""
    rings: Int[Tensor, "j w"]
    chosen: Int[Tensor, " m"]
    """j · W + k of each."""

    def __len__(self) -> int:
        return len(self.orders)


def draw_permutations(count: int, windows: int, seed: int) -> Permutations:
    """Random permutations of the windows: all turns of a random ring, and of others with it, less as many as are spare.

    The identity (ring 0, no turn) is not among them. Whichever member of the whole were the true pairing, the others
    would have the same law, as p needs (Hemerik and Goeman 2018): the first ring makes a group, each further one a
    random coset of it. Turns of one ring are cheaper to compute together than permutations without a relation.
    """
    generator = torch.Generator().manual_seed(seed)
    number = -(-(count + 1) // windows)
    rings = torch.rand(number, windows, generator=generator, dtype=torch.float64).argsort(1)
    chosen = 1 + torch.randperm(number * windows - 1, generator=generator)[:count]
    places = (torch.arange(windows) + (chosen % windows)[:, None]) % windows
    orders = torch.empty(count, windows, dtype=torch.long)
    orders[:, rings[0]] = rings[(chosen // windows)[:, None], places]
    return Permutations(orders=orders, rings=rings, chosen=chosen)


def sum_groups(rows: Float[Tensor, "n k"], groups: Int[Tensor, " n"]) -> Float[Tensor, "g k"]:
    """Sums over the rows of each group, in float64, groups ascending."""
    _, place = torch.unique(groups, return_inverse=True)
    count = int(place.max()) + 1 if len(place) else 0
    return torch.zeros(count, rows.shape[1], dtype=torch.float64, device=rows.device).index_add_(
        0, place, rows.double()
    )


def ratio_of_sums(
    above: Float[Tensor, " g"], below: Float[Tensor, " g"], *, seed: int, resamples: int = RESAMPLES
) -> Interval:
    """Σ above / Σ below over minibatches or documents, with the interval of a bootstrap that draws them whole.

    Not the mean of ratios: that would let a minibatch with hardly any gradient count as much as another.
    """
    sums = torch.stack([above, below], 1).double().cpu()
    value = _ratio(sums.sum(0))
    if len(sums) < 2:
        return Interval(value=value)
    if resamples * len(sums) <= KEPT_ELEMENTS:
        again = _kept_weights(resamples, len(sums), seed) @ sums
    else:
        generator = torch.Generator().manual_seed(seed)
        step = max(1, DRAWN_ELEMENTS // len(sums))
        sizes = [min(step, resamples - start) for start in range(0, resamples, step)]
        again = torch.cat([_draw_weights(size, len(sums), generator) @ sums for size in sizes])
    return Interval(value=value, **_ends((again[:, 0] / again[:, 1])[again[:, 1] > 0]))


def _ratio(sums: Float[Tensor, " 2"]) -> float:
    return float(sums[0] / sums[1]) if float(sums[1]) > 0 else math.nan


def _ends(draws: Float[Tensor, " m"]) -> dict[str, float]:
    if not len(draws):
        return {}
    low, high = draws.quantile(draws.new_tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2])).tolist()
    return {"low": low, "high": high}


def jackknife_ratio(above: Float[Tensor, "w w"], below: Float[Tensor, "w w"]) -> Interval:
    """Σ above / Σ below of products between windows, with Student's interval from leaving out one window at a time.

    ‖Σ_w B_w‖² is the sum of ⟨B_w, B_v⟩ over all pairs. A bootstrap would count the squares of the windows it draws
    twice as noise, and pull the ratio towards that of noise; leaving one out does not.
    """
    from scipy.special import stdtrit

    count = len(above)
    value = _ratio(torch.stack([above.sum(), below.sum()]))
    if count < 3 or math.isnan(value):
        return Interval(value=value)
    left = [one.sum() - 2 * one.sum(1) + one.diagonal() for one in (above.double(), below.double())]
    ratios = left[0] / left[1]
    error = math.sqrt((count - 1) * float(ratios.var(correction=0)))
    reach = float(stdtrit(count - 1, (1 + LEVEL) / 2)) * error
    return Interval(value=value, low=value - reach, high=value + reach)


def permutation_correlation(
    x: Float[Tensor, " v"], y: Float[Tensor, " v"], *, seed: int, resamples: int = RESAMPLES
) -> "Correlation":
    """Pearson's r and the slope of y on x over types; intervals draw types, p permutes x over types.

    Types with a NaN in x or y are left out.
    """
    x, y = x.double().cpu(), y.double().cpu()
    known = x.isfinite() & y.isfinite()
    x, y = x[known], y[known]
    count = len(x)
    if count < 3 or float(x.std()) == 0 or float(y.std()) == 0:
        nothing = Interval(value=math.nan)
        return Correlation(r=nothing, slope=nothing, p=math.nan, p_two_sided=math.nan, types=count)
    x, y = x - x.mean(), y - y.mean()
    r, slope = float(x @ y / (x.norm() * y.norm())), float(x @ y / x.square().sum())
    sums = torch.stack([torch.ones_like(x), x, y, x * y, x.square(), y.square()], 1)
    found: list[Tensor] = []
    null: list[Tensor] = []
    step = max(1, DRAWN_ELEMENTS // count)
    for start in range(0, resamples, step):
        weights, shuffled = _drawn(min(step, resamples - start), count, seed, start)
        found.append(weights @ sums)
        null.append(x[shuffled] @ y / (x.norm() * y.norm()))
    total, sum_x, sum_y, product, square_x, square_y = torch.cat(found).T
    product, square_x = product - sum_x * sum_y / total, square_x - sum_x.square() / total
    square_y = square_y - sum_y.square() / total
    again, slopes = product / (square_x * square_y).sqrt(), product / square_x
    draws = torch.cat(null)
    return Correlation(
        r=Interval(value=r, **_ends(again[again.isfinite()])),
        slope=Interval(value=slope, **_ends(slopes[slopes.isfinite()])),
        p=permutation_p(r, draws),
        p_two_sided=permutation_p(abs(r), draws.abs()),
        types=count,
    )


# All sites of a probe have the same types.
@lru_cache(maxsize=4)
def _drawn(rows: int, count: int, seed: int, start: int) -> tuple[Float[Tensor, "m v"], Int[Tensor, "m v"]]:
    """How often a bootstrap draws each of the types, and permutations of them."""
    generator = torch.Generator().manual_seed(seed + 7919 * start)
    weights = _draw_weights(rows, count, generator)
    return weights, torch.rand(rows, count, generator=generator).argsort(1)


# Sites, gradients and proxies of a probe have the same documents, and bins of as many types.
@lru_cache(maxsize=32)
def _kept_weights(rows: int, count: int, seed: int) -> Float[Tensor, "m v"]:
    return _draw_weights(rows, count, torch.Generator().manual_seed(seed))


def _draw_weights(rows: int, count: int, generator: torch.Generator) -> Float[Tensor, "m v"]:
    drawn = torch.randint(count, (rows, count), generator=generator)
    ones = torch.ones(rows, count, dtype=torch.float64)
    return torch.zeros_like(ones).scatter_add_(1, drawn, ones)


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """How a quantity of types goes with another."""

    r: Interval
    slope: Interval
    p: float
    """That r is above what permuted types give: for growth."""
    p_two_sided: float
    types: int


def ranks(values: Float[Tensor, " v"]) -> Float[Tensor, " v"]:
    """Ranks from 1, equal values sharing their mean rank: Pearson's r of these is Spearman's."""
    _, place, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[place]
