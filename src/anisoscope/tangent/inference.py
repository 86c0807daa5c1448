"""Statistics that every claim about alignment rests on: p from draws, many tests at once, ratios of sums.

Every random number comes from a seed and is drawn on the CPU, so that a device changes no null. What is made of the
draws is computed where the data are.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LEVEL = 0.95
RESAMPLES = 999
# With fewer independent units neither permutations nor a bootstrap of them keep the nominal rate.
LEAST_DOCUMENTS = 32
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
    return permutation_ps(draws.new_tensor([value]), draws[None])[0]


def permutation_ps(values: Float[Tensor, " k"], draws: Float[Tensor, "k m"]) -> list[float]:
    """Of several, each with draws of its own."""
    count = draws.shape[1]
    reached = (1 + (draws >= values[:, None]).sum(1).double()) / (count + 1)
    unknown = values.isnan() | draws.isnan().any(1) if count else torch.ones_like(values, dtype=torch.bool)
    return torch.where(unknown, math.nan, reached).tolist()


@dataclass(frozen=True, kw_only=True, eq=False)
class Permutations:
    """Some of the permutations w ↦ rings[j, (place of w in the first ring + k) mod W], for J rings and W turns k."""

    rings: Int[Tensor, "j w"]
    chosen: Int[Tensor, " m"]
    """j · W + k of each."""

    def __len__(self) -> int:
        return len(self.chosen)

    def to(self, device: torch.device) -> "Permutations":
        """The same on another device."""
        return Permutations(rings=self.rings.to(device), chosen=self.chosen.to(device))

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
    found, place = torch.unique(groups, return_inverse=True)
    sums = rows.new_zeros(len(found), rows.shape[1], dtype=torch.float64)
    return sums.index_add_(0, place.to(rows.device), rows.double())


def same_rows(table: Bool[Tensor, "s n"]) -> list[list[int]]:
    """The places of rows that are equal."""
    alike: dict[bytes, list[int]] = {}
    for place, row in enumerate(table.numpy()):
        alike.setdefault(row.tobytes(), []).append(place)
    return list(alike.values())


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
    return ratios_of_parts([torch.cat([above, below], 1)], seed=seed, resamples=resamples)[0]


def ratios_of_parts(
    parts: Sequence[Float[Tensor, "_ _k"]], *, seed: int, resamples: int = RESAMPLES
) -> list[list[Interval]]:
    """The same for several sets of groups: columns are what is above and then, as many, what is below."""
    if not parts:
        return []
    parts = [one.double() for one in parts]
    count = parts[0].shape[1] // 2
    values = _ratio(torch.stack([one.sum(0) for one in parts])).tolist()
    several = [place for place, one in enumerate(parts) if len(one) > 1]
    found = [[Interval(value=value) for value in mine] for mine in values]
    if several:
        above, below = torch.stack([_resample(parts[place], seed, resamples) for place in several], 1).chunk(2, 2)
        ends = iter(_ends((above / below).flatten(1)))
        for place in several:
            found[place] = [
                Interval(value=value, low=low, high=high)
                for value, (low, high) in zip(values[place], itertools.islice(ends, count), strict=True)
            ]
    return found


def _ratio(sums: Float[Tensor, "s _"]) -> Float[Tensor, "s k"]:
    above, below = sums.chunk(2, 1)
    return torch.where(below > 0, above / below, math.nan)


def _ends(draws: Float[Tensor, "m k"]) -> list[tuple[float, float]]:
    """Both ends of the interval of each column, of the draws that gave a number."""
    wanted = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    if draws.is_cuda:
        known = torch.where(draws.isfinite(), draws, math.nan)
        return [(low, high) for low, high in torch.nanquantile(known, draws.new_tensor(wanted), dim=0).T.tolist()]
    # By numpy, which looks for two numbers and does not sort them all.
    rows = draws.T.contiguous().numpy()
    known = np.isfinite(rows)
    if known.all():
        return list(zip(*np.quantile(rows, wanted, axis=1).tolist(), strict=True))
    found = []
    for row, some in zip(rows, known, strict=True):
        low, high = np.quantile(row[some], wanted).tolist() if some.any() else (math.nan, math.nan)
        found.append((low, high))
    return found


def jackknife_ratio(above: Float[Tensor, "w w"], below: Float[Tensor, "w w"]) -> Interval:
    """Σ above / Σ below of products between windows, with Student's interval from leaving out one window at a time.

    ‖Σ_w B_w‖² is the sum of ⟨B_w, B_v⟩ over all pairs. A bootstrap would count the squares of the windows it draws
    twice as noise, and pull the ratio towards that of noise; leaving one out does not.
    """
    return jackknife_ratios(above[None], below[None])[0]


def jackknife_ratios(above: Float[Tensor, "k w w"], below: Float[Tensor, "k w w"]) -> list[Interval]:
    """Several at once."""
    from scipy.special import stdtrit

    count = above.shape[1]
    sums = [one.double().sum((1, 2)) for one in (above, below)]
    values = torch.where(sums[1] > 0, sums[0] / sums[1], math.nan).tolist()
    if count < 3:
        return [Interval(value=value) for value in values]
    left = [
        total[:, None] - 2 * one.sum(2) + one.diagonal(dim1=1, dim2=2)
        for total, one in zip(sums, (above.double(), below.double()), strict=True)
    ]
    errors = ((count - 1) * (left[0] / left[1]).var(1, correction=0)).sqrt()
    reach = (float(stdtrit(count - 1, (1 + LEVEL) / 2)) * errors).tolist()
    return [
        Interval(value=value) if math.isnan(value) else Interval(value=value, low=value - one, high=value + one)
        for value, one in zip(values, reach, strict=True)
    ]


def jackknife_leads(
    above: Float[Tensor, "k w w"],
    below: Float[Tensor, "k w w"],
    other_above: Float[Tensor, "k w w"],
    other_below: Float[Tensor, "k w w"],
) -> list[float]:
    """One-sided p that Σ above / Σ below exceeds Σ other_above / Σ other_below; all are products between windows.

    Student's t of the difference, leaving out the same window of both at a time. NaN below three windows.
    """
    from scipy.special import stdtr

    tables = (above, below, other_above, other_below)
    count = above.shape[1]
    if count < 3:
        return [math.nan] * len(above)
    wholes = [one.double().sum((1, 2)) for one in tables]
    lefts = [
        whole[:, None] - 2 * one.double().sum(2) + one.double().diagonal(dim1=1, dim2=2)
        for whole, one in zip(wholes, tables, strict=True)
    ]
    difference, left = (one[0] / one[1] - one[2] / one[3] for one in (wholes, lefts))
    errors = ((count - 1) * left.var(1, correction=0)).sqrt()
    # Two gradients that are one and the same differ by nothing, and by nothing without any window.
    t = torch.where(errors > 0, difference / errors, torch.where(difference == 0, 0, math.nan))
    return [math.nan if math.isnan(one) else float(stdtr(count - 1, -one)) for one in t.tolist()]


def bootstrap_leads(sums: Float[Tensor, "g k 4"], *, seed: int, resamples: int = RESAMPLES) -> list[float]:
    """One-sided p that Σa / Σb exceeds Σc / Σe over documents; the last axis holds a, b, c and e of each document.

        t = D / s,   t* = (D* - D) / s*,   p = (1 + #{t* ≥ t}) / (resamples + 1)

    D is the difference of the two ratios, s² the sum of its squared linear parts over documents; starred numbers are
    those of documents drawn with replacement (Efron's bootstrap-t). A bootstrap of D alone is too narrow for some tens
    of documents, and Student's t too narrow where a few documents hold most of c. NaN below LEAST_DOCUMENTS.
    """
    count, several, _ = sums.shape
    if count < LEAST_DOCUMENTS:
        return [math.nan] * several
    each = sums.double()
    # One scale for all four: it cancels, and squares neither overflow nor vanish.
    each = each / each.abs().amax((0, 2), keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    squares = each[..., :, None] * each[..., None, :]
    table = torch.cat([each.flatten(1), squares.flatten(1)], 1)
    (difference, error), (drawn, errors) = (
        _lead(one[:, : 4 * several].unflatten(1, (several, 4)), one[:, 4 * several :].unflatten(1, (several, 4, 4)))
        for one in (table.sum(0, keepdim=True), _resample(table, seed, resamples))
    )
    reached = (drawn - difference) / errors >= difference / error - SAME
    # A draw without spread of its own says nothing against the null.
    reached |= ~(errors > 0)
    p = (1 + reached.sum(0).double()) / (resamples + 1)
    same = (difference[0] == 0) & (error[0] == 0)
    known = difference[0].isfinite() & (error[0] > 0)
    return torch.where(known, p, torch.where(same, 1.0, math.nan)).tolist()


def _lead(
    sums: Float[Tensor, "m k 4"], squares: Float[Tensor, "m k 4 4"]
) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m k"]]:
    """Σa/Σb - Σc/Σe, and its standard error from Σ (linear part)² = cᵀ(Σ u uᵀ)c with u = (a, b, c, e)."""
    a, b, c, e = sums.unbind(2)
    linear = torch.stack([1 / b, -a / b.square(), -1 / e, c / e.square()], 2)
    return a / b - c / e, ((squares @ linear[..., None])[..., 0] * linear).sum(2).clamp_min(0).sqrt()


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
    x, y = x.double().to(y.device), y.double()
    known = (x.isfinite()[:, None] & y.isfinite()).cpu()
    found: dict[int, Correlation] = {}
    for places in same_rows(known.T):
        rows = known[:, places[0]]
        pair = x[rows], y[rows][:, places]
        if ranked:
            pair = ranks(pair[0]), ranks(pair[1].T).T
        found |= dict(zip(places, _correlations(*pair, seed, resamples), strict=True))
    return [found[place] for place in range(y.shape[1])]


def _correlations(x: Float[Tensor, " v"], y: Float[Tensor, "v k"], seed: int, resamples: int) -> "list[Correlation]":
    count, several = y.shape
    nothing = Interval(value=math.nan)
    unknown = Correlation(r=nothing, slope=nothing, p=math.nan, p_two_sided=math.nan, types=count)
    varied = (y.std(0) > 0) if count >= 3 and float(x.std()) > 0 else y.new_zeros(several, dtype=torch.bool)
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
    permutations = _kept_permutations(resamples, count, seed, x.device)
    turned, still = torch.fft.rfft(x[permutations.rings]), torch.fft.rfft(y[permutations.rings[0]].T)
    sums = torch.fft.irfft(turned * still[:, None].conj(), n=count).flatten(1)[:, permutations.chosen]
    draws = sums / size[:, None]
    ends = _ends(torch.cat([product / (square_x * square_y).sqrt(), product / square_x], 1))
    every = zip(
        r.tolist(),
        slope.tolist(),
        ends[:several],
        ends[several:],
        permutation_ps(r - SAME, draws),
        permutation_ps(r.abs() - SAME, draws.abs()),
        varied.tolist(),
        strict=True,
    )
    return [
        Correlation(
            r=Interval(value=value, low=ends[0], high=ends[1]),
            slope=Interval(value=steep, low=slopes[0], high=slopes[1]),
            p=p,
            p_two_sided=p_two_sided,
            types=count,
        )
        if known
        else unknown
        for value, steep, ends, slopes, p, p_two_sided, known in every
    ]


def _resample(sums: Float[Tensor, "g k"], seed: int, resamples: int) -> Float[Tensor, "m k"]:
    """Sums over groups that a bootstrap draws."""
    if resamples * len(sums) <= KEPT_ELEMENTS:
        return _kept_weights(resamples, len(sums), seed, sums.device) @ sums
    generator = torch.Generator().manual_seed(seed)
    step = max(1, DRAWN_ELEMENTS // len(sums))
    sizes = [min(step, resamples - start) for start in range(0, resamples, step)]
    return torch.cat([_draw_weights(size, len(sums), generator).to(sums.device) @ sums for size in sizes])


# All sites of a probe have about the same types.
@lru_cache(maxsize=4)
def _kept_permutations(count: int, types: int, seed: int, device: torch.device) -> Permutations:
    return draw_permutations(count, types, seed).to(device)


# Sites, gradients and proxies of a probe have the same documents, and bins of as many types.
@lru_cache(maxsize=16)
def _kept_weights(rows: int, count: int, seed: int, device: torch.device) -> Float[Tensor, "m v"]:
    return _draw_weights(rows, count, torch.Generator().manual_seed(seed)).to(device)


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


def ranks(values: Float[Tensor, "*k v"]) -> Float[Tensor, "*k v"]:
    """Ranks from 1, equal values sharing their mean rank: Pearson's r of these is Spearman's."""
    values = values.contiguous()
    ordered = values.sort(-1).values
    first, after = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    return (first + after + 1).double() / 2
