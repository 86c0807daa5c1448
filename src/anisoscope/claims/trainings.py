"""Claims about a training: what its checkpoints show, and whether its seeds agree."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from anisoscope.claims.findings import (
    MIN_BATCHES,
    Finding,
    Subject,
    bound,
    counted,
    number,
    on_side,
    open_questions,
    ordered_pairs,
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
from anisoscope.claims.resampling import Bounds, Resampling, bound_rise_and_fall, rise_and_fall_elsewhere, student

GROWTH_MARGIN = 0.05
MIN_CHECKPOINTS = 5
MIN_SEEDS = 3
FIRST_PUBLISHED_STEP = 1000
# A rise and fall that is surely smaller than this share of the highest value is none.
SMALLEST_PEAK = 0.05


@dataclass(frozen=True, kw_only=True)
class Series:
    """One training at one place: the mean over blocks, for each batch and step."""

    place: tuple[str, str, str]
    model: str
    variant: str | None
    steps: np.ndarray
    values: np.ndarray
    """(batches, steps)"""
    pools: np.ndarray
    """Of each batch; none where a value is not a mean over batches."""
    left_out: int
    """Checkpoints measured with other batches or blocks than most."""

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


def judge_seeds_or_runs(
    seeds: list[Series],
    judge_run: Callable[[Series, Resampling], Finding],
    judge_seeds: Callable[[np.ndarray, Resampling], Finding],
    how: Resampling,
) -> Iterator[tuple[Subject, Finding]]:
    """One finding of the training where there are enough seeds of it, else one for each run, which cannot hold."""
    steps = sorted(set.intersection(*(set(one.steps.tolist()) for one in seeds)))
    if len(seeds) >= MIN_SEEDS and len(steps) >= MIN_CHECKPOINTS and all(len(one.values) for one in seeds):
        means = np.stack([one.values[:, np.isin(one.steps, steps)].mean(0) for one in seeds])
        yield _training(family_of(seeds[0].model), seeds, len(seeds), "seed"), judge_seeds(means, how)
        return
    short = f"a claim about training needs {MIN_SEEDS} seeds, and has {len(seeds)}"
    if len(seeds) >= MIN_SEEDS:
        short = f"its {len(seeds)} seeds have {len(steps)} steps in common, and {MIN_CHECKPOINTS} are needed"
    for one in seeds:
        left_open = open_questions(one.pools) if len(one.pools) else ()
        subject = _training(one.model, [one], len(one.values), "batch", short, *left_open)
        yield subject, replace(judge_run(one, how), supported=None)


def _training(name: str, seeds: list[Series], replicates: int, unit: str, *notes: str) -> Subject:
    left_out = sum(one.left_out for one in seeds)
    odd = [f"{counted(left_out, 'checkpoint')} with other batches or blocks left out"] if left_out else []
    return Subject(
        name=name,
        models=tuple(one.model for one in seeds),
        place=seeds[0].place,
        variant=seeds[0].variant,
        replicates=replicates,
        unit=unit,
        notes=(*notes, *odd),
    )


def _too_short(one: Series) -> str | None:
    if len(one.steps) < MIN_CHECKPOINTS:
        return f"it has {len(one.steps)} checkpoints of known step, and {MIN_CHECKPOINTS} are needed"
    if len(one.values) < MIN_BATCHES:
        return f"{counted(len(one.values), 'batch')} with a value at every step"
    return None


def growth_of(series: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Growth, and a quarter of it less each late change, of every row of a series (rows, steps).

    growth = mean of the last quarter - first;  stabilised where  growth/4 - (y_i - y_j) > 0  for all i, j of the
    last third: the largest late change is less than a quarter of the growth.
    """
    length = series.shape[1]
    growth = series[:, -math.ceil(length / 4) :].mean(1) - series[:, 0]
    late = series[:, -math.ceil(length / 3) :]
    left, right = ordered_pairs(late.shape[1])
    return growth, growth[:, None] / 4 - (late[:, left] - late[:, right])


def _run_grows(one: Series, how: Resampling) -> Finding:
    if short := _too_short(one):
        return Finding(claim="grows then stabilises", says=short)
    growth, settled = growth_of(one.values)
    # All must be true, so the weakest decides and none needs a correction.
    return _growth_found(
        bound(growth[:, None, None], one.pools, how, GROWTH_MARGIN),
        bound(settled[:, None, :], one.pools, how, 0.0),
    )


def _seeds_grow(series: np.ndarray, how: Resampling) -> Finding:
    growth, settled = growth_of(series)
    return _growth_found(
        student(growth, margin=GROWTH_MARGIN, level=how.level), student(settled.min(1), margin=0.0, level=how.level)
    )


def _growth_found(grown: Bounds, still: Bounds) -> Finding:
    sides = (on_side(grown, GROWTH_MARGIN, above=True), on_side(still, 0.0, above=True))
    change = grown.effect / 4 - still.effect
    return Finding(
        claim="grows then stabilises",
        supported=False if False in sides else None if None in sides else True,
        effect=grown.effect,
        interval=grown.interval,
        p=max(grown.p_above, still.p_above),
        says=f"from the first checkpoint to the last quarter it grows by {number(grown.effect)}, and the largest "
        f"change in the last third is {number(change)}",
        details={"growth": grown.effect, "largest_late_change": change},
    )


def _run_peaks(one: Series, how: Resampling) -> Finding:
    if short := _too_short(one):
        return Finding(claim="rises then falls", says=short)
    peak = bound_rise_and_fall(one.values, one.pools, how)
    step, first, last = (int(one.steps[place]) for place in (peak.place, *peak.place_interval))
    return Finding(
        claim="rises then falls",
        effect=peak.effect,
        interval=peak.interval,
        p=peak.p,
        says=f"it rises by {number(peak.rise)} to step {step} (between {first} and {last}) and then falls by "
        f"{number(peak.fall)}",
        details={
            "rise": peak.rise,
            "fall": peak.fall,
            "peak_step": float(step),
            "peak_step_low": float(first),
            "peak_step_high": float(last),
        },
    )


def _seeds_peak(series: np.ndarray, how: Resampling) -> Finding:
    """The smaller of rise and fall of each seed, between levels that the other seeds name, as a mean over seeds."""
    others = [np.delete(series, seed, axis=0).mean(0) for seed in range(len(series))]
    effects = [rise_and_fall_elsewhere(one, rest) for one, rest in zip(series, others, strict=True)]
    found = student(effects, margin=0.0, level=how.level, overlap=1 / (len(series) - 1))
    # A true series that never falls has an effect of zero, not below it: only smallness can speak against the claim.
    too_small = found.high < SMALLEST_PEAK * series.mean(0).max()
    return Finding(
        claim="rises then falls",
        supported=False if too_small else True if found.low > 0 else None,
        effect=found.effect,
        interval=found.interval,
        p=found.p_above,
        says=f"where the other seeds rise and fall, a seed does both by at least {number(found.effect)} on average",
        details={"lowest_seed": min(effects), "highest_seed": max(effects)},
    )
