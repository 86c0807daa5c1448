"""Claims about a training: what its checkpoints show, and whether its seeds agree.

Everything is defined on training steps, not on the number of checkpoints: the last quarter is the last quarter of the
steps, and a series is interpolated linearly between its checkpoints. The same curve measured on evenly spaced and on
log-spaced steps gives the same answer.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from anisoscope.claims.catalogue import CLAIMS
from anisoscope.claims.findings import (
    MIN_BATCHES,
    TRAININGS,
    WEIGHTS,
    Finding,
    Subject,
    bound,
    counted,
    either,
    number,
    on_side,
    ordered_pairs,
    too_few,
)
from anisoscope.claims.profiles import (
    DIMENSION_METRIC,
    DIMENSION_POPULATIONS,
    PROFILE_METRIC,
    PROFILE_POPULATIONS,
    Profile,
    family_of,
    finite,
)
from anisoscope.claims.resampling import (
    Bounds,
    Resampling,
    bound_rise_and_fall,
    fit_after_fall,
    fit_peak,
    rise_and_fall_elsewhere,
    student,
)

GROWTH_MARGIN = CLAIMS["grows then stabilises"].smallest_effect
# A rise and fall smaller than this share of the highest value does not count, nor does such an early fall.
SMALLEST_PEAK = CLAIMS["rises then falls"].smallest_effect
MIN_CHECKPOINTS = 5
MIN_SEEDS = 3
FIRST_PUBLISHED_STEP = 1000
EARLY = 0.3
"""Share of the training steps that is called early."""
_LAST_QUARTER = np.linspace(0.75, 1, 25)
_LAST_THIRD = np.linspace(2 / 3, 1, 9)
# Longest stretch without a common checkpoint, as a share of the checkpoints measured and of the training steps.
_MOST_INSIDE, _LONGEST = 1 / 3, 1 / 2


@dataclass(frozen=True, kw_only=True)
class Series:
    """One training, metric and population: the mean over blocks, for each batch and step."""

    place: tuple[str, str, str]
    model: str
    variant: str | None
    steps: np.ndarray
    values: np.ndarray
    """(batches, steps)"""
    pools: np.ndarray
    """Of each batch; empty where a value is not a mean over batches."""
    left_out: int
    """Checkpoints measured with other batches or blocks than most."""
    question: tuple[str | None, ...] = ()
    """Stack and stage: what makes it a hypothesis of its own."""

    def from_step(self, first: int) -> "Series":
        """Without the checkpoints before one."""
        kept = self.steps >= first
        variant = ", ".join(part for part in (self.variant, f"from={first}") if part)
        return replace(self, variant=variant, steps=self.steps[kept], values=self.values[:, kept])


def judge_trainings(profiles: Sequence[Profile], how: Resampling) -> Iterator[tuple[Subject, Finding]]:
    """Does leading variance grow and stabilise, does dimension rise and fall?"""
    trainings: dict[tuple, list[Profile]] = defaultdict(list)
    for item in profiles:
        if item.step is not None:
            trainings[item.place, item.model, item.stage or "", item.stack or ""].append(item)
    series = [_series(trainings[key]) for key in sorted(trainings)]
    growing = [one for one in series if one.place[0] == PROFILE_METRIC and one.place[1] in PROFILE_POPULATIONS]
    for seeds in seeds_together(growing):
        yield from judge_seeds_or_runs(seeds, _run_grows, _seeds_grow, how)
    curved = [one for one in series if one.place[0] == DIMENSION_METRIC and one.place[1] in DIMENSION_POPULATIONS]
    for first in (0, FIRST_PUBLISHED_STEP):
        # Without early checkpoints both would be the same series, tested twice.
        some = [one.from_step(first) for one in curved if first or one.steps.min() < FIRST_PUBLISHED_STEP]
        for seeds in seeds_together(some):
            yield from judge_seeds_or_runs(seeds, _run_peaks, _seeds_peak, how)


def _series(profiles: Sequence[Profile]) -> Series:
    """Checkpoints in order of their steps; only those measured with the same batches and blocks can be paired."""
    by_step = {item.step: item for item in sorted(profiles, key=lambda item: item.order)}
    shapes = {step: (len(item.values), item.sites) for step, item in by_step.items()}
    usual = Counter(shapes.values()).most_common(1)[0][0]
    kept = [item for step, item in by_step.items() if shapes[step] == usual]
    values, pools = finite(np.stack([item.values.mean(1) for item in kept], axis=1))
    return Series(
        place=kept[0].place,
        model=kept[0].model,
        variant=", ".join(part for part in (kept[0].stack, kept[0].stage) if part) or None,
        question=(kept[0].stack, kept[0].stage),
        steps=np.array([item.step for item in kept]),
        values=values,
        pools=pools,
        left_out=len(by_step) - len(kept),
    )


def seeds_together(series: Iterable[Series]) -> list[list[Series]]:
    """Series of more than one checkpoint, those of the same training in one list."""
    families: dict[tuple, list[Series]] = defaultdict(list)
    for one in series:
        if len(one.steps) > 1:
            families[one.place, family_of(one.model), one.variant or ""].append(one)
    return [families[key] for key in sorted(families)]


def gap_in(steps: Sequence[int], measured: Sequence[int]) -> str:
    """Why some steps do not cover a training of which `measured` steps exist; empty where they do.

    They do not where a stretch without any of them contains more than a third of the measured checkpoints or, other
    than before the first of them, is longer than half of the training. The end counts: steps that stop at a tenth of
    the training do not cover it.

    >>> gap_in([0, 1, 2, 4, 8, 16], [0, 1, 2, 4, 8, 16])
    ''
    >>> gap_in([0, 1, 2, 16], [0, 1, 2, 4, 8, 16])
    'no common checkpoint between steps 2 and 16, more than half of the training'
    """
    ordered, common, count = sorted(measured), set(steps), len(set(measured))
    end = ordered[-1]
    inner = [*sorted(steps), *([end] if end > max(steps) else [])]
    for first, last in zip([-1, *inner], inner, strict=False):
        inside = bisect_left(ordered, last) - bisect_right(ordered, first) + (last not in common)
        where = f"no common checkpoint between steps {first} and {last}" if first >= 0 else f"none before step {last}"
        if first >= 0 and last - first > _LONGEST * end:
            return f"{where}, more than half of the training"
        if inside > _MOST_INSIDE * count:
            return f"{where}, where {inside} of the {count} measured checkpoints lie"
    return ""


def listed(steps: Sequence[int], most: int = 16) -> str:
    """Steps for a sentence; of many the first and the last.

    >>> listed([0, 1, 2, 4])
    '0, 1, 2, 4'
    """
    texts = [str(step) for step in steps]
    return ", ".join(texts if len(texts) <= most else [*texts[: most - 5], "…", *texts[-4:]])


def judge_seeds_or_runs(
    seeds: list[Series],
    judge_run: Callable[[Series, Resampling], Finding],
    judge_seeds: Callable[[Series, Resampling], Finding],
    how: Resampling,
) -> Iterator[tuple[Subject, Finding]]:
    """One finding of the training where there are enough seeds of it, else one for each run, which cannot hold.

    Seeds are compared at the steps that all of them measured. A `Series` of seeds has one row for each seed.
    """
    measured = sorted(set.union(*(set(one.steps.tolist()) for one in seeds)))
    steps = sorted(set.intersection(*(set(one.steps.tolist()) for one in seeds)))
    if len(seeds) >= MIN_SEEDS and len(steps) >= MIN_CHECKPOINTS and all(len(one.values) for one in seeds):
        together = replace(
            seeds[0],
            steps=np.array(steps),
            values=np.stack([one.values[:, np.isin(one.steps, steps)].mean(0) for one in seeds]),
        )
        gap = gap_in(steps, measured)
        found = judge_seeds(together, how)
        if gap:
            found = replace(found, supported=None, decides=False, reason=f"the seeds have {gap}")
        note = f"{counted(len(steps), 'common step')}: {listed(steps)}"
        if len(measured) > len(steps):
            note += f" (of {len(measured)} measured by any seed)"
        yield _training(family_of(seeds[0].model), seeds, len(seeds), "seed", note), replace(found, steps=tuple(steps))
        return
    short = f"a claim about training needs {MIN_SEEDS} seeds, and has {len(seeds)}"
    if len(seeds) >= MIN_SEEDS:
        short = f"its {len(seeds)} seeds have {counted(len(steps), 'step')} in common, and {MIN_CHECKPOINTS} are needed"
    for one in seeds:
        found = judge_run(one, how)
        reasons = [short, found.reason if found.supported is None and math.isnan(found.p) else ""]
        reasons += [too_few(one.pools) if len(one.pools) else "", gap_in(one.steps.tolist(), one.steps.tolist())]
        reason = "; ".join(dict.fromkeys(part for part in reasons if part))
        subject = _training(one.model, [one], len(one.values), "batch")
        found = replace(found, supported=None, decides=False, reason=reason)
        yield subject, replace(found, steps=tuple(one.steps.tolist()))


def _training(name: str, seeds: list[Series], replicates: int, unit: str, *notes: str) -> Subject:
    left_out = sum(one.left_out for one in seeds)
    odd = [f"{counted(left_out, 'checkpoint')} with other batches or blocks left out"] if left_out else []
    return Subject(
        name=name,
        models=tuple(one.model for one in seeds),
        place=seeds[0].place,
        variant=seeds[0].variant,
        question=seeds[0].question,
        replicates=replicates,
        unit=unit,
        of=TRAININGS if unit == "seed" else WEIGHTS,
        notes=(*notes, *odd),
    )


def _too_short(one: Series) -> str | None:
    if len(one.steps) < MIN_CHECKPOINTS:
        return f"it has {len(one.steps)} checkpoints of known step, and {MIN_CHECKPOINTS} are needed"
    if len(one.values) < MIN_BATCHES:
        return f"{counted(len(one.values), 'batch')} with a value at every step"
    return None


def interpolated(series: np.ndarray, steps: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Each row of a series (rows, steps) at shares of the training, linear between its checkpoints."""
    basis = np.stack([np.interp(at * steps[-1], steps, one) for one in np.eye(len(steps))])
    return series @ basis


def growth_of(series: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Growth, and a quarter of it less each late change, of every row of a series (rows, steps).

    growth = mean over the last quarter of the training steps - first checkpoint; stabilised where
    growth/4 - (y_i - y_j) > 0  for all i, j of nine evenly spaced steps of the last third: the largest late change is
    less than a quarter of the growth. Values between checkpoints are interpolated linearly.
    """
    growth = interpolated(series, steps, _LAST_QUARTER).mean(1) - series[:, 0]
    late = interpolated(series, steps, _LAST_THIRD)
    left, right = ordered_pairs(late.shape[1])
    return growth, growth[:, None] / 4 - (late[:, left] - late[:, right])


def step_mean(series: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Mean over training steps of numbers about intervals, each of which ends at its step and begins at the one before.

    The first interval begins at step 0.
    """
    lengths = np.diff(np.concatenate([[0], steps]))
    return series @ (lengths / lengths.sum())


def _run_grows(one: Series, how: Resampling) -> Finding:
    if short := _too_short(one):
        return Finding(claim="grows then stabilises", says="growth was not tested", reason=short)
    growth, settled = growth_of(one.values, one.steps)
    # All must be true, so the weakest decides and none needs a correction.
    return _growth_found(
        bound(growth[:, None, None], one.pools, how, GROWTH_MARGIN),
        bound(settled[:, None, :], one.pools, how, 0.0),
        one,
    )


def _seeds_grow(seeds: Series, how: Resampling) -> Finding:
    growth, settled = growth_of(seeds.values, seeds.steps)
    return _growth_found(
        student(growth, margin=GROWTH_MARGIN, level=how.level),
        student(settled.min(1), margin=0.0, level=how.level),
        seeds,
    )


def _growth_found(grown: Bounds, still: Bounds, one: Series) -> Finding:
    sides = (on_side(grown, GROWTH_MARGIN, above=True), on_side(still, 0.0, above=True))
    change = grown.effect / 4 - still.effect
    open_parts = [
        text
        for side, text in zip(
            sides, (f"the interval of the growth includes {GROWTH_MARGIN:g}", "late change is not decided"), strict=True
        )
        if side is None
    ]
    return Finding(
        claim="grows then stabilises",
        supported=False if False in sides else None if None in sides else True,
        reason=" and ".join(open_parts),
        effect=grown.effect,
        interval=grown.interval,
        p=max(grown.p_above, still.p_above),
        p_against=either(grown.p_below, still.p_below),
        says=f"from step {one.steps[0]} to the last quarter of the steps it grows by {number(grown.effect)}, and the "
        f"largest change in the last third is {number(change)}",
        details={"growth": grown.effect, "largest_late_change": change},
    )


def _early(one: Series, mean: np.ndarray) -> tuple[int, float]:
    """Where an early minimum may end, and how deep a fall before it counts; no early part from step 1,000 on."""
    if one.steps[0] >= FIRST_PUBLISHED_STEP:
        return 0, 0.0
    early = np.flatnonzero(one.steps <= EARLY * one.steps[-1])
    last = min(len(early) - 1, len(one.steps) - MIN_CHECKPOINTS)
    return max(0, last), SMALLEST_PEAK * float(np.abs(mean).max())


def _after(one: Series, start: int, fall: float) -> tuple[str, dict[str, float]]:
    if not start:
        return "", {}
    step = int(one.steps[start])
    details = {"early_minimum_step": float(step), "early_fall": fall}
    return f"after an early fall of {number(fall)} to a minimum at step {step} ", details


def _run_peaks(one: Series, how: Resampling) -> Finding:
    if short := _too_short(one):
        return Finding(claim="rises then falls", says="the course was not tested", reason=short)
    mean = one.values.mean(0)
    last_start, least_fall = _early(one, mean)
    # With too few pools its interval would cover sampling inside pools only, and one run decides nothing.
    if too_few(one.pools):
        peak = fit_peak(mean, last_start=last_start, least_fall=least_fall)
    else:
        peak = bound_rise_and_fall(one.values, one.pools, how, last_start=last_start, least_fall=least_fall)
    after, details = _after(one, peak.start, peak.early_fall)
    details = {"rise": peak.rise, "fall": peak.fall, "peak_step": float(one.steps[peak.place]), **details}
    between = ""
    if peak.place_interval is not None:
        first, last = (int(one.steps[end]) for end in peak.place_interval)
        details |= {"peak_step_low": float(first), "peak_step_high": float(last)}
        between = f"(between {first} and {last}) "
    return Finding(
        claim="rises then falls",
        effect=peak.effect,
        interval=peak.interval,
        p=peak.p,
        says=f"{after}it rises by {number(peak.rise)} to step {one.steps[peak.place]} {between}and then falls by "
        f"{number(peak.fall)}",
        details=details,
    )


def _seeds_peak(seeds: Series, how: Resampling) -> Finding:
    """The smaller of rise and fall of each seed, between levels that the other seeds choose, as a mean over seeds."""
    mean = seeds.values.mean(0)
    last_start, least_fall = _early(seeds, mean)
    others = np.stack([np.delete(seeds.values, seed, axis=0).mean(0) for seed in range(len(seeds.values))])
    effects = rise_and_fall_elsewhere(seeds.values, others, last_start=last_start, least_fall=least_fall)
    fit = fit_after_fall(mean[None, :], last_start, least_fall)
    start, overlap = int(fit.start[0]), 1 / (len(effects) - 1)
    # A true series that never falls has an effect of zero, not below it: only smallness can contradict the claim.
    smallest = SMALLEST_PEAK * float(mean[start:].max())
    found = student(effects, margin=smallest, level=how.level, overlap=overlap)
    after, details = _after(seeds, start, float(fit.early_fall[0]))
    return Finding(
        claim="rises then falls",
        supported=on_side(found, smallest, above=True),
        reason=f"the interval includes {number(smallest)}, {100 * SMALLEST_PEAK:g} % of the highest value",
        effect=found.effect,
        interval=found.interval,
        p=found.p_above,
        p_against=found.p_below,
        says=f"{after}a seed rises and falls by at least {number(found.effect)} on average, between the steps that the "
        "other seeds choose",
        details={"lowest_seed": float(effects.min()), "highest_seed": float(effects.max()), **details},
    )
