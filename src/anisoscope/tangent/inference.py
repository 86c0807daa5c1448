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
KEPT_ELEMENTS = 1 << 20
# Of a correlation that is a sum in another order: permutations that give the same one must count as such.
SAME = 1e-12


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

    rings: Int[Tensor, "j w"]
    chosen: Int[Tensor, " m"]
    """j · W + k of each."""

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def orders(self) -> Int[Tensor, "m w"]:
        """Each written out."""
        windows = self.rings.shape[1]
        places = (torch.arange(windows) + (self.chosen % windows)[:, None]) % windows
        orders = torch.empty(len(self), windows, dtype=torch.long)
        orders[:, self.rings[0]] = self.rings[(self.chosen // windows)[:, None], places]
        return orders


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
    return Permutations(rings=rings, chosen=chosen)


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
    return ratios_of_sums(above[:, None], below[:, None], seed=seed, resamples=resamples)[0]


def ratios_of_sums(
    above: Float[Tensor, "g k"], below: Float[Tensor, "g k"], *, seed: int, resamples: int = RESAMPLES
) -> list[Interval]:
    """Several at once, with the same draws."""
    count, sums = above.shape[1], torch.cat([above, below], 1).double().cpu()
    values = [_ratio(pair) for pair in sums.sum(0).view(2, count).T]
    if len(sums) < 2:
        return [Interval(value=value) for value in values]
    above, below = _resample(sums, seed, resamples).split(count, 1)
    return [_interval(value, *draws) for value, draws in zip(values, _ends(above / below), strict=True)]


def _ratio(sums: Float[Tensor, " 2"]) -> float:
    return float(sums[0] / sums[1]) if float(sums[1]) > 0 else math.nan


def _ends(draws: Float[Tensor, "m k"]) -> list[tuple[float, float]]:
    """Both ends of the interval of each column, of the draws that gave a number."""
    wanted = draws.new_tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    draws = torch.where(draws.isfinite(), draws, math.nan)
    some = draws.isnan().any()
    return [tuple(pair) for pair in (draws.nanquantile if some else draws.quantile)(wanted, dim=0).T.tolist()]


def _interval(value: float, low: float, high: float) -> Interval:
    return Interval(value=value, low=low, high=high)


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

    Types with a NaN in x or y are left out. Permutations are turns of random rings (see `draw_permutations`): the sums
    of all turns of a ring are a circular correlation.
    """
    return permutation_correlations(x, y[:, None], seed=seed, resamples=resamples)[0]


def permutation_correlations(
    x: Float[Tensor, " v"], y: Float[Tensor, "v k"], *, ranked: bool = False, seed: int, resamples: int = RESAMPLES
) -> "list[Correlation]":
    """Of several quantities with the same one, with the same draws; of ranks, where Spearman's r is wanted.

    Ranks are those of the whole sample, also where types are resampled.
    """
    x, y = x.double().cpu(), y.double().cpu()
    known = x.isfinite()[:, None] & y.isfinite()
    alike: dict[bytes, list[int]] = {}
    for place, one in enumerate(known.T):
        alike.setdefault(one.numpy().tobytes(), []).append(place)
    found: dict[int, Correlation] = {}
    for places in alike.values():
        rows = known[:, places[0]]
        pair = x[rows], y[rows][:, places]
        if ranked:
            pair = ranks(pair[0]), torch.stack([ranks(one) for one in pair[1].T], 1)
        found |= dict(zip(places, _correlations(*pair, seed, resamples), strict=True))
    return [found[place] for place in range(y.shape[1])]


def _correlations(x: Float[Tensor, " v"], y: Float[Tensor, "v k"], seed: int, resamples: int) -> "list[Correlation]":
    count, several = y.shape
    nothing = Interval(value=math.nan)
    unknown = Correlation(r=nothing, slope=nothing, p=math.nan, p_two_sided=math.nan, types=count)
    varied = (y.std(0) > 0) if count >= 3 and float(x.std()) > 0 else torch.zeros(several, dtype=torch.bool)
    if not bool(varied.any()):
        return [unknown] * several
    x, y = x - x.mean(), y - y.mean(0)
    size = torch.where(varied, x.norm() * y.norm(dim=0), math.nan)
    r, slope = x @ y / size, x @ y / x.square().sum()
    sums = torch.cat([torch.stack([torch.ones_like(x), x, x.square()], 1), y, x[:, None] * y, y.square()], 1)
    total, sum_x, square_x, sum_y, product, square_y = _resample(sums, seed, resamples).split(
        [1] * 3 + [several] * 3, 1
    )
    product, square_x = product - sum_x * sum_y / total, square_x - sum_x.square() / total
    square_y = square_y - sum_y.square() / total
    permutations = _kept_permutations(resamples, count, seed)
    turned, still = torch.fft.rfft(x[permutations.rings]), torch.fft.rfft(y[permutations.rings[0]].T)
    sums = torch.fft.irfft(turned * still[:, None].conj(), n=count).flatten(1)[:, permutations.chosen]
    every = zip(
        r.tolist(),
        slope.tolist(),
        sums / size[:, None],
        _ends(product / (square_x * square_y).sqrt()),
        _ends(product / square_x),
        varied.tolist(),
        strict=True,
    )
    return [
        Correlation(
            r=_interval(value, *ends),
            slope=_interval(steep, *slopes),
            p=permutation_p(value - SAME, draws),
            p_two_sided=permutation_p(abs(value) - SAME, draws.abs()),
            types=count,
        )
        if known
        else unknown
        for value, steep, draws, ends, slopes, known in every
    ]


def _resample(sums: Float[Tensor, "g k"], seed: int, resamples: int) -> Float[Tensor, "m k"]:
    """Sums over groups that a bootstrap draws."""
    if resamples * len(sums) <= KEPT_ELEMENTS:
        return _kept_weights(resamples, len(sums), seed) @ sums
    generator = torch.Generator().manual_seed(seed)
    step = max(1, DRAWN_ELEMENTS // len(sums))
    sizes = [min(step, resamples - start) for start in range(0, resamples, step)]
    return torch.cat([_draw_weights(size, len(sums), generator) @ sums for size in sizes])


# All sites of a probe have about the same types.
_kept_permutations = lru_cache(maxsize=4)(draw_permutations)


# Sites, gradients and proxies of a probe have the same documents, and bins of as many types.
@lru_cache(maxsize=16)
def _kept_weights(rows: int, count: int, seed: int) -> Float[Tensor, "m v"]:
    return _draw_weights(rows, count, torch.Generator().manual_seed(seed))


def _draw_weights(rows: int, count: int, generator: torch.Generator) -> Float[Tensor, "m v"]:
    drawn = torch.randint(count, (rows, count), generator=generator)
    weights = torch.zeros(rows, count, dtype=torch.float64)
    return weights.scatter_add_(1, drawn, weights.new_ones(1, 1).expand(rows, count))


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
