"""The statistics behind the claims: bounds from paired batches, Student's t, unimodal fits, several tests at once.

Every interval has two sides at `level`. Every p is twice the one-sided p for its side of a margin, so p ≤ 1 - level
exactly where the interval lies on that side. Random numbers are drawn afresh from `seed` in each call: what is found
for one model does not depend on which others are judged with it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

# As the text pipeline pools them (text.py, which this package does not import).
POOLED_BATCHES = 4
# With fewer pools the variance between pools cannot be estimated.
MIN_POOLS = 3
# Standard errors; a bootstrap of batches that are nearly all equal can ask for infinitely many.
_LARGEST_CRITICAL = 30.0
# Rows that are fitted together: more do not stay in the processor's cache.
_ROWS_TOGETHER = 4000


@dataclass(frozen=True, kw_only=True)
class Resampling:
    """Confidence level, number of bootstrap draws, and their seed."""

    level: float = 0.95
    resamples: int = 2000
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """An effect, its interval, and p for lying above and below the margin."""

    effect: float
    low: float = math.nan
    high: float = math.nan
    p_above: float = math.nan
    p_below: float = math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Both ends."""
        return self.low, self.high


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A unimodal fit of a series, and the test that the series is not monotone."""

    effect: float
    """The smaller of rise and fall."""
    interval: tuple[float, float] = (math.nan, math.nan)
    """NaN where it was not tested."""
    p: float = math.nan
    rise: float
    fall: float
    place: int
    """Index of the highest member of the fit."""
    place_interval: tuple[int, int] | None = None
    """None where it was not tested."""
    start: int
    """Index of the early minimum after which the rise is judged; 0 where the series does not begin with a fall."""
    early_fall: float
    """How far the fit falls from the first member to the early minimum; 0 where `start` is 0."""


def pool_numbers(batches: int, size: int = POOLED_BATCHES) -> np.ndarray:
    """The pool of each batch: max(1, n // size) runs of consecutive batches; run k starts at k·n // count."""
    count = max(1, batches // size)
    starts = np.arange(count) * batches // count
    return np.searchsorted(starts, np.arange(batches), side="right") - 1


def design_effect(centred: np.ndarray, pools: np.ndarray) -> np.ndarray:
    """How much larger the variance of a mean is than independent batches would make it, for each contrast.

    max(1, MS / S²),  MS = Σⱼ mⱼ (x̄ⱼ - x̄)² / (J - 1) between J pools of mⱼ batches,  S² over all n batches:
    batches of one pool share windows, so Var(x̄) = MS / n. 1 where there are fewer than 3 pools.

    Each contrast has its own: between blocks that pools move and blocks that they do not, an average is too small.
    """
    names, sizes = np.unique(pools, return_counts=True)
    if len(names) < MIN_POOLS:
        return np.ones(centred.shape[1:])
    means = np.stack([centred[pools == name].mean(0) for name in names])
    between = np.tensordot(sizes, means**2, 1) / (len(names) - 1)
    total = (centred**2).sum(0) / (len(centred) - 1)
    return np.maximum(1.0, np.divide(between, total, out=np.ones_like(total), where=total > 0))


def bound_peak(grid: np.ndarray, pools: np.ndarray, how: Resampling, *, margin: float) -> Bounds:
    """Bounds of  max over k of min over e of θ_ke,  from its contrasts in each batch (n, K, E).

    A bell needs the best of its blocks (k) over both ends (e); flatness the largest of all differences (one e);
    a claim with several conditions the smallest of them (one k). One bound serves them all:

        low  = max_k min_e  θ̂_ke - c_e s_ke        high = max_k min_e  θ̂_ke + c_k s_ke

    s is the standard error with its design effect. c comes from a paired bootstrap over batches of the studentised
    contrasts t = (θ* - θ̂)/s*: c_e is the quantile of max over k of t, because choosing the best k on the same data
    flatters it; but only the lowest e counts, so e needs no correction. c_k is the quantile of max over e of -t: a
    bound from above fails only if it fails at the true best k.

    s has only as many degrees of freedom as there are pools less one, and the bootstrap, which draws single batches,
    does not account for that. So c is moved to Student's t with those degrees of freedom (`_critical`), and is never
    smaller than Student's own. Tails beyond c are Student's: p = (1 - level) F̄(t) / F̄(c).
    """
    estimate = grid.mean(0)
    centred = grid - estimate
    batches, tail = len(grid), (1 - how.level) / 2
    error = np.sqrt((centred**2).sum(0) / (batches - 1) * design_effect(centred, pools) / batches)
    draws = _studentised(centred, how)
    freedom = _freedom(pools)
    critical_above = _critical(draws.max(1), batches, freedom, tail, grid.shape[1])[None, :]
    critical_below = _critical(-draws.min(2), batches, freedom, tail, grid.shape[2])[:, None]
    p_above = _p_beyond(_errors_off(estimate - margin, error), critical_above, freedom, 2 * tail)
    p_below = _p_beyond(_errors_off(margin - estimate, error), critical_below, freedom, 2 * tail)
    return Bounds(
        effect=float(estimate.min(1).max()),
        low=float((estimate - critical_above * error).min(1).max()),
        high=float((estimate + critical_below * error).min(1).max()),
        p_above=float(p_above.max(1).min()),
        p_below=float(p_below.min(1).max()),
    )


def _tail(t: Any, freedom: int | float) -> Any:
    """P(T > t) of Student's t."""
    # scipy.stats would say the same; it takes half a second to load.
    from scipy.special import stdtr

    return stdtr(freedom, -np.asarray(t))


def _beyond(tail: Any, freedom: int | float) -> Any:
    """The t with P(T > t) = tail."""
    from scipy.special import stdtrit

    return -stdtrit(freedom, tail)


def _errors_off(distance: Any, error: Any) -> Any:
    """Distance in standard errors; what is certain is infinitely far off, or not at all."""
    exact = np.where(np.asarray(distance) > 0, np.inf, 0.0)
    return np.divide(distance, error, out=exact, where=np.asarray(error) > 0)


def _p_beyond(t: Any, critical: Any, freedom: int | float, p_critical: float) -> Any:
    """p of t, where that of the critical value is known and tails are Student's."""
    return np.minimum(1.0, p_critical * _tail(t, freedom) / _tail(critical, freedom))


def _freedom(pools: np.ndarray) -> int:
    count = len(np.unique(pools))
    return (count if count >= MIN_POOLS else len(pools)) - 1


def _critical(statistic: np.ndarray, batches: int, freedom: int | float, tail: float, together: int) -> Any:
    """The quantile over resamples of the largest of some contrasts, moved to the freedom that pools leave.

    Student's quantile at n - 1 explains it as far as the number of contrasts can (Bonferroni); whatever is beyond
    comes from tails that are not Student's, and stays as a factor.
    """
    rank = math.ceil((len(statistic) - 1) * (1 - tail))
    quantile = np.minimum(np.partition(statistic, rank, axis=0)[rank], _LARGEST_CRITICAL)
    each = np.clip(_tail(quantile, batches - 1), tail / together, tail)
    return _beyond(each, freedom) * np.maximum(1.0, quantile / _beyond(each, batches - 1))


def _studentised(centred: np.ndarray, how: Resampling) -> np.ndarray:
    """(θ* - θ̂) / s* of every contrast in every resample."""
    weights = resampled_weights(len(centred), how.resamples, how.seed)
    means = np.tensordot(weights, centred, 1)
    variances = np.tensordot(weights, centred**2, 1)
    variances -= means**2
    variances /= len(centred) - 1
    # A resample of equal batches has no spread, or one of rounding only: it is as far off as can be.
    certain = variances <= 1e-12 * (centred**2).mean(0)
    if certain.any():
        means[certain] = np.sign(means[certain]) * _LARGEST_CRITICAL
        variances[certain] = 1.0
    means /= np.sqrt(variances, out=variances)
    return means


@lru_cache(maxsize=8)
def resampled_weights(count: int, resamples: int, seed: int) -> np.ndarray:
    """How often, as a share, each of `count` things is drawn in `count` draws with replacement; a row per resample."""
    counts = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
    weights = counts / count
    weights.flags.writeable = False
    return weights


def student(values: Sequence[float] | np.ndarray, *, margin: float, level: float, overlap: float = 0.0) -> Bounds:
    """Student's interval for a mean over models or seeds:  x̄ ± t s √(1/n + overlap)  with n - 1 degrees of freedom.

    `overlap` is for values that are each read where the other n - 1 said: they agree more than independent ones
    would. Nadeau and Bengio (2003) give 1/(n - 1), the share of what is read in what is chosen from.
    """
    values = np.asarray(values, float)
    if len(values) < 2:
        return Bounds(effect=float(values.mean()))
    variance = float(values.var(ddof=1)) * (1 / len(values) + overlap)
    return _interval(float(values.mean()), variance, len(values) - 1, margin, level)


def welch(first: Sequence[float], second: Sequence[float], *, level: float, margin: float = 0.0) -> Bounds:
    """Welch's interval for the difference of two means whose variances may differ.

    p_above is for a difference above `margin`, p_below for one below -`margin`.

    x̄ - ȳ ± t √(s²_x/n + s²_y/m),  t with min(n, m) - 1 degrees of freedom. Welch's own are more, and too many for
    3 models against 8: p ≤ .05 then came in 7 to 9 % of nulls.
    """
    groups = [np.asarray(values, float) for values in (first, second)]
    effect = float(groups[0].mean() - groups[1].mean())
    if min(map(len, groups)) < 2:
        return Bounds(effect=effect)
    variance = sum(float(values.var(ddof=1)) / len(values) for values in groups)
    return _interval(effect, variance, min(map(len, groups)) - 1, margin, level, other=-margin)


def _interval(
    effect: float, variance: float, freedom: int, margin: float, level: float, *, other: float | None = None
) -> Bounds:
    error = math.sqrt(variance)
    reach = error * float(_beyond((1 - level) / 2, freedom))
    lower = margin if other is None else other
    above, below = (_errors_off(distance, error) for distance in (effect - margin, lower - effect))
    return Bounds(
        effect=effect,
        low=effect - reach,
        high=effect + reach,
        p_above=min(1.0, 2 * float(_tail(above, freedom))),
        p_below=min(1.0, 2 * float(_tail(below, freedom))),
    )


def holm(p_values: Sequence[float], hypotheses: Sequence[Hashable] | None = None) -> list[float]:
    """Holm's adjusted p, where tests that repeat one hypothesis share its weight; NaN is left out.

    Weighted Holm (Holm 1979): a test that is one of n for its hypothesis has weight w = 1/n. In the order of p/w,

        adjusted_k = max over j ≤ k of  p_j / w_j · Σ of the weights from j on

    Without repeats that is the k-th smallest of m times m - k + 1. With them m counts hypotheses, so repeats of one
    do not burden another, and inside a hypothesis they cost what Bonferroni's correction costs.

    >>> holm([0.01, float("nan"), 0.04, 0.03])
    [0.03, nan, 0.06, 0.06]
    >>> holm([0.01, 0.02, 0.04], ["a", "a", "b"])
    [0.04, 0.06, 0.06]
    """
    names = list(range(len(p_values)) if hypotheses is None else hypotheses)
    tests = Counter(name for name, p in zip(names, p_values, strict=True) if not math.isnan(p))
    known = sorted((p * tests[names[place]], place) for place, p in enumerate(p_values) if not math.isnan(p))
    adjusted, largest, left = [math.nan] * len(p_values), 0.0, float(len(tests))
    for weighted, place in known:
        largest = max(largest, min(1.0, left * weighted))
        adjusted[place] = largest
        left -= 1 / tests[names[place]]
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Adjusted p: the smallest false discovery rate at which each would be rejected; NaN is left out.

    >>> benjamini_hochberg([0.01, float("nan"), 0.04, 0.03])
    [0.03, nan, 0.04, 0.04]
    """
    adjusted, smallest = [math.nan] * len(p_values), 1.0
    known = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    for rank, (p, place) in reversed(list(enumerate(known, 1))):
        smallest = min(smallest, len(known) * p / rank)
        adjusted[place] = smallest
    return adjusted


def false_discovery_rate(p_values: Sequence[float], hypotheses: Sequence[Hashable], *, level: float) -> list[float]:
    """Adjusted p of tests, several of which may repeat one hypothesis (Benjamini and Bogomolov 2014).

    The tests of one hypothesis become one p by Simes' rule, and hypotheses are adjusted by Benjamini and Hochberg: a
    hypothesis counts once, however often it was tested. With R of m hypotheses rejected at 1 - level, a single test
    is adjusted among those of its hypothesis and multiplied by m / R; it is never below its hypothesis.

    >>> false_discovery_rate([0.001, 0.001, 0.001, 0.04], ["a", "a", "a", "b"], level=0.95)
    [0.002, 0.002, 0.002, 0.04]
    """
    tests: dict[Hashable, list[int]] = defaultdict(list)
    for place, (p, name) in enumerate(zip(p_values, hypotheses, strict=True)):
        if not math.isnan(p):
            tests[name].append(place)
    whole = benjamini_hochberg([simes([p_values[place] for place in places]) for places in tests.values()])
    rejected = max(1, sum(p <= 1 - level for p in whole))
    adjusted = [math.nan] * len(p_values)
    for of_hypothesis, places in zip(whole, tests.values(), strict=True):
        inside = benjamini_hochberg([p_values[place] for place in places])
        for place, p in zip(places, inside, strict=True):
            adjusted[place] = min(1.0, max(of_hypothesis, p * len(tests) / rejected))
    return adjusted


def simes(p_values: Sequence[float]) -> float:
    """One p for the hypothesis that no test has an effect: the smallest of m p₍ₖ₎ / k; NaN where there is no test.

    >>> simes([0.04, 0.01, 0.5])
    0.03
    """
    known = sorted(p for p in p_values if not math.isnan(p))
    return min((len(known) * p / (k + 1) for k, p in enumerate(known)), default=math.nan)


def most(p_values: Sequence[float]) -> float:
    """p for the statement that more than half of the tests have an effect (Benjamini and Heller 2008).

    Partial conjunction: with n tests and u = ⌊n/2⌋ + 1, the u - 1 smallest p could belong to true effects without the
    statement being true, so only the others count, by Simes' rule:

        p = min over k ≥ u of  (n - u + 1) / (k - u + 1) · p₍ₖ₎

    A test without a p counts as one without an effect.

    >>> most([0.005, 0.005, 0.005, 0.6]), most([0.005, 0.005, 0.6, 0.6])
    (0.01, 0.6)
    """
    known = sorted(1.0 if math.isnan(p) else p for p in p_values)
    return simes(known[len(known) // 2 :]) if len(known) else math.nan


def held_out_peak(halves: Sequence[np.ndarray], candidates: np.ndarray, rivals: np.ndarray) -> float:
    """Height of the highest candidate over the higher rival, unbiased by the choice of the candidate.

    The candidate is chosen on the mean of one half and its height read from the other; the two ways are averaged.
    """
    means = [half.mean(0) for half in halves]
    heights = []
    for chosen_on, read_from in (means, means[::-1]):
        best = candidates[chosen_on[candidates].argmax()]
        heights.append(float(read_from[best] - read_from[rivals].max()))
    return sum(heights) / 2


def bound_rise_and_fall(
    values: np.ndarray, pools: np.ndarray, how: Resampling, *, last_start: int = 0, least_fall: float = 0.0
) -> Peak:
    """Does a series (batches, steps) rise and then fall? Unimodal against both monotone fits.

    With RSS the squared residuals of the mean series from its best rising, falling and unimodal fit, and s the standard
    error of a step (each batch less its own mean, with its design effect):

        t = min(√(RSS_rising - RSS_unimodal), √(RSS_falling - RSS_unimodal)) / s

    A flat series is the monotone one that looks unimodal most often. So p of each part is read from flat series, and
    the larger is taken: both monotone shapes must be refuted. (p is not doubled: there is no other side.) A flat series
    is drawn from the differences between pools, each times a normal number (a wild bootstrap), with an s of its own;
    pools move neighbouring steps together, and single batches would hide that. With fewer than 3 pools batches are
    used instead.

    With `last_start` the series may begin with a fall of at least `least_fall` that ends at that index or before; the
    fit with the smallest residuals says where, and all of the above is of the series from there on. The flat series
    choose their start in the same way, so the choice is in p.

    The effect is the smaller of the fit's rise and fall; its interval and the peak's are quantiles over series moved
    likewise, and begin at no rise or fall where p is above 1 - level.
    """
    batches, tail = len(values), 1 - how.level
    series = values.mean(0)
    paired = values - series
    paired = paired - paired.mean(1, keepdims=True)
    variance = (paired**2).sum(0) / (batches - 1) * design_effect(paired, pools)
    error = math.sqrt(variance.mean() / batches)

    freedom = _freedom(pools)
    _, units, sizes = np.unique(
        pools if freedom < batches - 1 else np.arange(batches), return_inverse=True, return_counts=True
    )
    moves = np.stack([paired[units == unit].mean(0) for unit in range(len(sizes))])
    signs = np.random.default_rng(how.seed).normal(size=(how.resamples, len(sizes)))
    moved = signs * sizes / batches @ moves
    between = (signs**2 * sizes @ moves**2 - batches * moved**2).mean(1) / freedom
    spread = np.sqrt(np.maximum(0.0, between) / batches)
    fit, flat = fit_after_fall(series[None, :], last_start, least_fall), fit_after_fall(moved, last_start, 0.0)
    p = 0.0
    for gain, flat_gains in ((fit.over_rising, flat.over_rising), (fit.over_falling, flat.over_falling)):
        draws = np.divide(np.sqrt(flat_gains), spread, out=np.zeros_like(spread), where=spread > 0)
        critical = np.maximum(np.quantile(draws, how.level, method="higher"), _beyond(tail, freedom))
        p = max(p, float(_p_beyond(_errors_off(np.sqrt(gain[0]), error), critical, freedom, tail)))

    # As far as s says, and as Student's t is wider than the normal numbers.
    scale = error / math.sqrt((moved**2).mean()) if error else 0.0
    wider = scale * float(_beyond(tail / 2, freedom) / _beyond(tail / 2, 1e9))
    again = fit_after_fall(series + wider * moved, last_start, least_fall)
    low, high = np.quantile(np.minimum(again.rise, again.fall), (tail / 2, 1 - tail / 2))
    first, last = np.quantile(again.place, (tail / 2, 1 - tail / 2), method="nearest")
    return replace(
        _peak_of(fit),
        interval=(float(low) if p <= tail else 0.0, float(high)),
        p=p,
        place_interval=(int(first), int(last)),
    )


def fit_peak(series: np.ndarray, *, last_start: int, least_fall: float) -> Peak:
    """The fit of `bound_rise_and_fall` to a series, without its test."""
    return _peak_of(fit_after_fall(series[None, :], last_start, least_fall))


def _peak_of(fit: "Unimodal") -> Peak:
    rise, fall = float(fit.rise[0]), float(fit.fall[0])
    return Peak(
        effect=min(rise, fall),
        rise=rise,
        fall=fall,
        place=int(fit.place[0]),
        start=int(fit.start[0]),
        early_fall=float(fit.early_fall[0]),
    )


@dataclass(frozen=True, kw_only=True)
class Unimodal:
    """Best unimodal fits of many series: how much better than monotone ones, where they peak, rise and fall."""

    over_rising: np.ndarray
    over_falling: np.ndarray
    place: np.ndarray
    rise: np.ndarray
    fall: np.ndarray
    first: np.ndarray
    """Fitted value at the start."""
    error: np.ndarray
    """Squared residuals."""
    start: np.ndarray
    """Index at which the unimodal part starts."""
    early_fall: np.ndarray
    """Fall before the start."""


def fit_after_fall(series: np.ndarray, last_start: int, least_fall: float) -> Unimodal:
    """Each row's best fit that may fall first, then rises, then falls; the early fall ends at `last_start` or before.

    The start is where the residuals of the falling part and of the unimodal part are smallest together. A row whose
    early fall is less than `least_fall` is fitted from its first member on.

    Residuals of rising fits have the Monge property: with R(a, b) those of members a to b - 1, and a ≤ b ≤ c ≤ d,

        R(a, c) + R(b, d) ≤ R(a, d) + R(b, c)

    So a start that is no better than an earlier one where the series rises to its end is better nowhere, and the fit
    from one start cannot be better than what it is without the last part, and without the first, leave together. Few
    starts of a row remain, and only those are fitted.
    """
    rows, length = series.shape
    nothing = np.zeros((rows, 1))
    # Backwards for the fall after the peak, negated for the early fall, both for the part that rises to the end.
    wanted = [series, series[:, ::-1], *([-series, -series[:, ::-1]] if last_start else [])]
    parts = rising_prefixes(np.vstack(wanted))
    left = [part[:rows] for part in parts]
    right = [part[rows : 2 * rows, ::-1] for part in parts]
    whole = _join(left, right, np.zeros(rows, int))
    if not last_start:
        return whole
    falling, highest = (part[2 * rows : 3 * rows, :last_start] for part in parts[:2])
    early = np.hstack([nothing, falling])
    to_end = early + parts[0][3 * rows :, ::-1][:, : last_start + 1]
    from_start = np.hstack([nothing, left[0]]) + np.hstack([right[0], nothing])
    to_peak = np.minimum.accumulate(from_start[:, ::-1], axis=1)[:, ::-1][:, : last_start + 1]
    least = to_end + to_peak - left[0][:, -1:]
    # What rounding can add, so that the best start is the one that all fits would have named.
    rounding = 1e-9 * (to_end + to_peak)
    least -= rounding
    earlier = np.minimum.accumulate(to_end, axis=1)[:, :-1]
    least[:, 1:][to_end[:, 1:] - rounding[:, 1:] > earlier] = np.inf
    # The whole row is fitted already.
    least[:, 0] = np.inf
    best = whole.error.copy()
    fits, owners = [whole], [np.arange(rows)]
    # The most promising start of each row, then all that can still be better.
    for likeliest in (True, False):
        possible = least < best[:, None]
        if likeliest:
            possible &= np.arange(last_start + 1) == least.argmin(1)[:, None]
        row, start = np.nonzero(possible)
        if len(row):
            shifted = series[row[:, None], (start[:, None] + np.arange(length)) % length]
            fit = _join(rising_prefixes(shifted), [part[row] for part in right], start)
            np.minimum.at(best, row, fit.error + early[row, start])
            least[row, start] = np.inf
            fits.append(fit)
            owners.append(row)
    found = {field.name: np.concatenate([getattr(fit, field.name) for fit in fits]) for field in fields(Unimodal)}
    owner, start = np.concatenate(owners), found["start"]
    in_order = np.lexsort((start, found["error"] + early[owner, start], owner))
    chosen = in_order[np.flatnonzero(np.diff(owner[in_order], prepend=-1))]
    start = start[chosen]
    early_fall = np.where(start > 0, -highest[np.arange(rows), start - 1] - found["first"][chosen], 0.0)
    kept = early_fall >= least_fall
    chosen = np.where(kept, chosen, np.arange(rows))
    found = {name: part[chosen] for name, part in found.items()}
    found["early_fall"] = np.where(found["start"] > 0, early_fall, 0.0)
    return Unimodal(**found)


def _join(left: Sequence[np.ndarray], right: Sequence[np.ndarray], start: np.ndarray) -> Unimodal:
    """Each row's best split from its start on into a rising part and a falling part, either of which may be empty.

    `left` is of the rising fits to the prefixes that begin at the start (those beyond the end are not read) and
    `right` of the falling fits to the suffixes: residuals, the value at the outer end, the value at the inner end.
    """
    rows, length = left[0].shape
    everyone = np.arange(rows)
    nothing = np.zeros((rows, 1))
    after = start[:, None] + np.arange(length + 1)
    right_errors = np.hstack([right[0], nothing])[everyone[:, None], np.minimum(after, length)]
    errors = np.hstack([nothing, left[0]]) + np.where(after <= length, right_errors, np.inf)
    split = errors.argmin(1)
    peak_at = start + split
    # The end of an empty part is set to -inf, so that the other part's end is the peak.
    below = np.full((rows, 1), -np.inf)
    left_top = np.hstack([below, left[2]])[everyone, split]
    right_top = np.hstack([right[2], below])[everyone, peak_at]
    peak = np.maximum(left_top, right_top)
    first = np.where(split > 0, left[1][everyone, np.maximum(split - 1, 0)], peak)
    end = np.where(peak_at < length, right[1][everyone, np.minimum(peak_at, length - 1)], peak)
    best = errors[everyone, split]
    return Unimodal(
        over_rising=np.maximum(0.0, errors[everyone, length - start] - best),
        over_falling=np.maximum(0.0, errors[:, 0] - best),
        place=np.where(left_top >= right_top, peak_at - 1, peak_at),
        rise=peak - first,
        fall=peak - end,
        first=first,
        error=best,
        start=start,
        early_fall=np.zeros(rows),
    )


def rising_prefixes(series: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the best rising fit to each prefix of each row: squared residuals, first and last fitted value.

    Pool adjacent violators, one more member at a time: the last two blocks are joined while they fall.
    """
    blocks = np.array_split(series, max(1, math.ceil(len(series) / _ROWS_TOGETHER)))
    errors, firsts, lasts = (np.concatenate(parts) for parts in zip(*map(_rising_prefixes, blocks), strict=True))
    return errors, firsts, lasts


def _rising_prefixes(series: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, length = series.shape
    # Row k of each array describes the prefix of length k: start and mean of its last block, residuals, first value.
    # The blocks before the last are those of the prefix that ends where it starts. Nothing falls below prefix 0.
    means, starts = np.full((length + 1, rows), -np.inf), np.zeros((length + 1, rows), np.int64)
    errors, firsts = np.zeros((length + 1, rows)), np.empty((length + 1, rows))
    firsts[0] = series[:, 0]
    for end in range(1, length + 1):
        means[end], starts[end] = series[:, end - 1], end - 1
        errors[end], firsts[end] = errors[end - 1], firsts[end - 1]
        row = np.flatnonzero(means[end - 1] > means[end])
        mean, start, error, below = means[end, row], starts[end, row], errors[end, row], means[end - 1, row]
        while len(row):
            before = starts.take(start * rows + row)
            one, two = start - before, end - start
            step = mean - below
            error += one * two / (one + two) * step**2
            mean, start = below + step * two / (one + two), before
            below = means.take(start * rows + row)
            falls = below > mean
            ended = ~falls
            done = row[ended]
            means[end, done], starts[end, done], errors[end, done] = mean[ended], start[ended], error[ended]
            row, mean, start, error, below = (part[falls] for part in (row, mean, start, error, below))
        np.copyto(firsts[end], means[end], where=starts[end] == 0)
    return errors[1:].T, firsts[1:].T, means[1:].T


def rise_and_fall_elsewhere(
    series: np.ndarray, others: np.ndarray, *, last_start: int = 0, least_fall: float = 0.0
) -> np.ndarray:
    """The smaller of rise and fall of each row, between the levels that the fit of its row of `others` chooses.

    Start, peak and levels are all chosen on the others, so a monotone series reads 0 or less on average, however rough.
    """
    fit = fit_after_fall(others, last_start, least_fall)
    return np.array(
        [_rise_and_fall(*found) for found in zip(series, others, fit.start.tolist(), fit.place.tolist(), strict=True)]
    )


def _rise_and_fall(series: np.ndarray, others: np.ndarray, start: int, peak: int) -> float:
    from scipy.optimize import isotonic_regression

    series, others, peak = series[start:], others[start:], peak - start
    rising = isotonic_regression(others[: peak + 1]).x
    falling = isotonic_regression(others[peak:], increasing=False).x
    first = series[: peak + 1][rising == rising[0]].mean()
    end = series[peak:][falling == falling[-1]].mean()
    top = [*np.flatnonzero(rising == rising[-1]), *(peak + np.flatnonzero(falling == falling[0]))]
    highest = series[np.unique(top)].mean()
    return float(min(highest - first, highest - end))
