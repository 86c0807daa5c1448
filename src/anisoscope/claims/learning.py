"""Claims about gradients over a training, each under our control and, where it applies, under the paper's.

    emerges early                 a checkpoint in the first 30 % of the steps is enriched, more than the untrained one
    persists                      at least .9 of the training steps after that one are enriched, the last among them
    grows with frequency          gradients of frequent types lie more in the tangent space
    encoders and decoders differ in enrichment     in the mean excess of their last checkpoints, over recipes
    curvature is attenuated by frequency bias      V(f) / V(uniform) is below .9

A checkpoint is enriched where more than half of its blocks are: their p become one by a partial conjunction
(`resampling.most`), and those of a training's checkpoints are adjusted together (Benjamini and Hochberg 1995). With
several seeds of a training a claim must hold in each: p is the largest of theirs. An untrained model has an excess of
its own, because state and gradient both depend on the token. Our control therefore requires more: in the same blocks E
less its control must exceed that of step 0, by the intervals of both. Each claim is tested with the proxy of the same
checkpoint and, where a sweep followed its checkpoints or a Scope watched, with that of the checkpoint before
(`fit=rolling`), which was fitted to other states than those of the gradients.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from statistics import NormalDist
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.catalogue import CLAIMS, PAPER
from anisoscope.claims.findings import TRAININGS, WEIGHTS, Finding, Subject, counted, number
from anisoscope.claims.profiles import family_of
from anisoscope.claims.resampling import Resampling, benjamini_hochberg, most, welch
from anisoscope.claims.shapes import by_recipe, kinds_subject, missing_recipes
from anisoscope.claims.trainings import EARLY, MIN_CHECKPOINTS
from anisoscope.grouping import group_rows
from anisoscope.revisions import training_order

PERSISTENT = 0.9
KINDS_DIFFER = "encoders and decoders differ in enrichment"
# Resolution of the p of a trend, which comes from 999 permutations.
_LEAST_P = 1 / 1000
_METRICS = ("tangent_excess", "tangent_energy", "normal_ratio", "tangent_frequency_trend", "frequency_attenuation")
_IDENTITY = ("corpus", "population", "stack", "gradient", "proxy")
_NORMAL = NormalDist()
# Half of a 95 % interval, in standard errors.
_REACH = _NORMAL.inv_cdf(0.975)
_NONE = "no checkpoint is enriched"
_NO_MORE = f"{_NONE} more than the untrained one"
# The fit of the proxy, by the variant of a row.
_FITS = {None: None, "mean=in": None, "mean=in;fit=rolling": "fit=rolling"}
Row = dict[str, Any]
Blocks = Mapping[str, Row]
"""A metric's rows by site."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """One training under one gradient, proxy, fit and population: for each checkpoint the rows of each metric."""

    model: str
    kind: str
    place: tuple[Any, ...]
    checkpoints: tuple[Mapping[str, Blocks], ...]
    untrained: Mapping[str, Blocks] | None
    """Step 0 under its own proxy, where it was measured."""

    @property
    def last(self) -> Mapping[str, Blocks]:
        """At the end of the training."""
        return self.checkpoints[-1]

    def steps(self) -> list[int | None]:
        """Of its checkpoints."""
        return [_step(one) for one in self.checkpoints]

    @cached_property
    def by_ours(self) -> "Enriched":
        """Which checkpoints are enriched under our control."""
        smallest = CLAIMS["emerges early"].smallest_effect
        return _enriched(self, "tangent_excess", 0.0, smallest, beyond_start=True)

    @cached_property
    def by_paper(self) -> "Enriched":
        """Which checkpoints are enriched under the paper's control."""
        smallest = CLAIMS[f"emerges early{PAPER}"].smallest_effect
        return _enriched(self, "normal_ratio", 1.0, smallest, beyond_start=False)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of one claim for one training."""

    supported: bool | None
    reason: str = ""
    effect: float = math.nan
    p: float = math.nan
    p_against: float = math.nan
    says: str
    at_start: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Enriched:
    """Which checkpoints of a training are enriched, and by how much."""

    p: np.ndarray
    """Adjusted for the number of checkpoints."""
    excess: np.ndarray
    """Mean over blocks, less that of step 0 under our control."""
    later: Callable[[int, int], float]
    """p that more than half of the blocks have more energy beyond their control at one checkpoint than at another."""


def judge_learning(table: pa.Table, how: Resampling) -> Iterator[tuple[Subject, Finding]]:
    """Every claim on gradients over trainings that the table has numbers for."""
    families: dict[tuple, list[Course]] = defaultdict(list)
    for course in read_courses(table):
        families[(*course.place, family_of(course.model))].append(course)
    tests: dict[str, tuple[str, Callable[[Course, Resampling], Answer | None]]] = {
        "emerges early": ("tangent_excess", _over_training(_when, attrgetter("by_ours"), _NO_MORE)),
        f"emerges early{PAPER}": ("normal_ratio", _over_training(_when, attrgetter("by_paper"), _NONE)),
        "persists": ("tangent_excess", _over_training(_lasts, attrgetter("by_ours"), _NO_MORE)),
        f"persists{PAPER}": ("normal_ratio", _over_training(_lasts, attrgetter("by_paper"), _NONE)),
        "grows with frequency": ("tangent_frequency_trend", _grows_with_frequency),
        "curvature is attenuated by frequency bias": ("frequency_attenuation", _attenuated),
    }
    for (*_, family), seeds in sorted(families.items(), key=lambda item: [part or "" for part in item[0]]):
        for claim, (metric, test) in tests.items():
            measured = [one for one in seeds if any(metric in rows for rows in one.checkpoints)]
            answers = [(one.model, answer) for one in measured if (answer := test(one, how)) is not None]
            if answers:
                name = family if len(seeds) > 1 else seeds[0].model
                subject = _subject(name, [model for model, _ in answers], metric, seeds[0].place)
                yield subject, _together(claim, [answer for _, answer in answers])
    yield from _kinds_differ(families, how)


def read_courses(table: pa.Table) -> list[Course]:
    """The trainings of a table, checkpoints in order: one course with their own proxies, one with those before."""
    kept = pc.field("metric").isin(list(_METRICS)) & pc.field("depth").is_valid() & pc.field("suspect").is_null()
    fits = [name for name in _FITS if name is not None]
    kept = kept & pc.field("bin").is_null() & (pc.field("variant").is_null() | pc.field("variant").isin(fits))
    chosen = table.filter(kept).sort_by([("key", "ascending")])
    groups = group_rows(chosen, (*_IDENTITY, "variant", "model", "kind", "metric", "stage", "step", "revision"))
    found_rows = chosen.select(["site", "step", "value", "p", "low", "high"]).take(groups.order).to_pylist()
    rows: dict[tuple, dict[Any, dict[str, dict[str, Row]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(dict))
    )
    kinds: dict[tuple, str] = {}
    for (*others, variant, model, kind, metric, stage, step, revision), blocks in groups.slices():
        identity = (*others, _FITS[variant], model)
        kinds[identity] = kind
        by_site = rows[identity][training_order(stage, step, revision)][metric]
        by_site.update((row["site"], row) for row in found_rows[blocks])
    courses = []
    for identity, found in sorted(rows.items(), key=lambda item: [part or "" for part in item[0]]):
        *others, _, model = identity
        own = rows.get((*others, None, model), found)
        first = own[min(own)]
        courses.append(
            Course(
                model=model,
                kind=kinds[identity],
                place=identity[:-1],
                checkpoints=tuple(found[place] for place in sorted(found)),
                untrained=first if _step(first) == 0 else None,
            )
        )
    return courses


def _step(checkpoint: Mapping[str, Blocks]) -> int | None:
    return next(iter(next(iter(checkpoint.values())).values()))["step"]


def _subject(name: str, models: Sequence[str], metric: str, place: tuple[Any, ...]) -> Subject:
    corpus, population, stack, gradient, *others = place
    return Subject(
        name=name,
        models=tuple(models),
        place=(metric, population, corpus),
        variant=", ".join(part for part in (stack, gradient, *others) if part) or None,
        question=(stack, gradient),
        replicates=len(models),
        unit="training",
        of=TRAININGS if len(models) > 1 else WEIGHTS,
    )


def _together(claim: str, answers: Sequence[Answer]) -> Finding:
    """All trainings must give the same result; the least clear one decides."""
    results = {answer.supported for answer in answers}

    def largest(p_values: Sequence[float]) -> float:
        return math.nan if any(map(math.isnan, p_values)) else max(p_values)

    least = max(answers, key=lambda one: (one.supported is not True, one.p if not math.isnan(one.p) else 2.0))
    effects = [answer.effect for answer in answers if not math.isnan(answer.effect)]
    starts = [answer.at_start for answer in answers if answer.at_start is not None]
    return Finding(
        claim=claim,
        supported=results.pop() if len(results) == 1 else None,
        reason=least.reason if len(results) <= 1 else "seeds disagree",
        effect=float(np.mean(effects)) if effects else math.nan,
        p=largest([answer.p for answer in answers]),
        p_against=largest([answer.p_against for answer in answers]),
        says=least.says if len(answers) == 1 else f"of {len(answers)} trainings the least clear: {least.says}",
        at_start=any(starts) if starts else None,
    )


def p_of_growth(block: str, then: Mapping[str, Blocks], now: Mapping[str, Blocks], metric: str) -> float:
    """p that a block has more beyond its control now than then, from the intervals of its two energies."""
    energies = [one.get("tangent_energy", {}).get(block) for one in (then, now)]
    values = [one.get(metric, {}).get(block) for one in (then, now)]
    if any(row is None for row in (*energies, *values)):
        return math.nan
    ends = [(row["low"], row["high"]) for row in energies if row is not None]
    if any(end is None for pair in ends for end in pair):
        return math.nan
    error = math.hypot(*((high - low) / (2 * _REACH) for low, high in ends))
    before, after = (row["value"] for row in values if row is not None)
    return _NORMAL.cdf((before - after) / error) if error > 0 else math.nan


def _enriched(course: Course, metric: str, chance: float, smallest: float, *, beyond_start: bool) -> Enriched:
    """Adjusted p of each checkpoint: of most of its blocks being enriched and, by our control, more than untrained."""
    untrained = course.untrained if beyond_start else None
    found, excesses = [], []
    start = [row["value"] for row in (untrained or {}).get(metric, {}).values() if not math.isnan(row["value"])]
    # A mean below chance at step 0 is no credit: what training adds is counted from chance.
    level_at_start = max(0.0, float(np.mean(start))) if start else 0.0
    for one in course.checkpoints:
        blocks = one.get(metric, {})
        values = [row["value"] for row in blocks.values() if not math.isnan(row["value"])]
        excess = float(np.mean(values)) - level_at_start if values else math.nan
        excesses.append(excess)
        if one is untrained or excess <= smallest:
            found.append(1.0)
            continue
        p_values = [_p_beyond(row, chance) for row in blocks.values()]
        if untrained is not None:
            grown = [p_of_growth(site, untrained, one, metric) for site in blocks]
            p_values = [max(p, q) if not math.isnan(q) else math.nan for p, q in zip(p_values, grown, strict=True)]
        found.append(most(p_values) if not all(map(math.isnan, p_values)) else math.nan)

    def later(first: int, second: int) -> float:
        then, now = course.checkpoints[first], course.checkpoints[second]
        return most([p_of_growth(site, then, now, metric) for site in now.get(metric, {})])

    return Enriched(p=np.array(benjamini_hochberg(found)), excess=np.array(excesses), later=later)


def _p_beyond(row: Mapping[str, Any], chance: float) -> float:
    """The p of a block; 1 for a block at or below its control, which may be a single value without a p."""
    if row["value"] <= chance:
        return 1.0
    return math.nan if row["p"] is None else row["p"]


def _unknown(says: str, reason: str = "", p: float = math.nan) -> Answer:
    return Answer(supported=None, reason=reason or says, p=p, says=says)


def _too_short(course: Course) -> Answer | None:
    steps = [step for step in course.steps() if step is not None]
    if len(steps) < max(MIN_CHECKPOINTS, len(course.checkpoints)):
        return _unknown(f"{counted(len(steps), 'checkpoint')} of known step, where {MIN_CHECKPOINTS} are needed")
    return None


def _when(course: Course, found: Enriched, how: Resampling, nothing: str) -> Answer:
    steps = np.array(course.steps(), float)
    shares = steps / steps.max()
    enriched = found.p <= 1 - how.level
    early = shares <= EARLY
    if not enriched.any():
        return _unknown(nothing, p=float(np.nanmin(found.p, initial=1.0)))
    first = int(enriched.argmax())
    p = float(np.nanmin(found.p[early])) if early.any() and not np.isnan(found.p[early]).all() else math.nan
    # Not enriched early is no evidence against: there must be reliably more at the first enriched checkpoint.
    p_against = math.nan if early[first] else max(found.later(int(one), first) for one in np.flatnonzero(early))
    supported = True if early[first] else False if p_against <= 1 - how.level else None
    return Answer(
        supported=supported,
        reason="it may have been there earlier, too weak to be detected",
        effect=float(shares[first]),
        p=p,
        p_against=p_against,
        says=f"the first enriched checkpoint is step {steps[first]:.0f}, at {number(shares[first])} of the training",
    )


def _lasts(course: Course, found: Enriched, how: Resampling, nothing: str) -> Answer:
    enriched = found.p <= 1 - how.level
    if not enriched[:-1].any():
        return _unknown(f"{nothing}{' but the last' if enriched[-1] else ''}, so nothing could last")
    first, steps = int(enriched.argmax()), np.array(course.steps(), float)
    # Between two checkpoints the share goes linearly from one to the other: dense checkpoints do not count more.
    after = enriched[first:].astype(float)
    share = float(np.diff(steps[first:]) @ (after[1:] + after[:-1]) / 2 / (steps[-1] - steps[first]))
    strongest = int(np.nanargmax(np.where(enriched, found.excess, -np.inf)))
    p_against = math.nan if enriched[-1] else found.later(len(steps) - 1, strongest)
    supported = None
    if share >= PERSISTENT and enriched[-1]:
        supported = True
    elif not enriched[-1] and p_against <= 1 - how.level:
        supported = False
    later = counted(int(enriched[first + 1 :].sum()), "checkpoint")
    return Answer(
        supported=supported,
        reason="the last checkpoint is enriched, others between are not"
        if enriched[-1]
        else "the last checkpoint is not enriched, but not reliably below the strongest",
        effect=share,
        p=float(found.p[-1]),
        p_against=p_against,
        says=f"{later} of {len(enriched) - first - 1} after step {course.steps()[first]} are enriched, {number(share)} "
        "of the training steps",
    )


def _over_training(
    test: Callable[[Course, Enriched, Resampling, str], Answer],
    control: Callable[[Course], Enriched],
    nothing: str,
) -> Callable[[Course, Resampling], Answer | None]:
    """A test of several checkpoints; None for a single one."""

    def tested(course: Course, how: Resampling) -> Answer | None:
        if len(course.checkpoints) == 1:
            return None
        if short := _too_short(course):
            return short
        found = control(course)
        at_start = bool(found.p[0] <= 1 - how.level) if course.steps()[0] == 0 else None
        return replace(test(course, found, how, nothing), at_start=at_start)

    return tested


def _grows_with_frequency(course: Course, how: Resampling) -> Answer | None:
    answer = _trend(course.last, how)
    if answer is None or course.untrained is None or course.untrained is course.last:
        return answer
    start = _trend(course.untrained, how)
    return replace(answer, at_start=start is not None and start.supported is True)


def _trend(checkpoint: Mapping[str, Blocks], how: Resampling) -> Answer | None:
    smallest, level = CLAIMS["grows with frequency"].smallest_effect, 1 - how.level
    rows = [row for row in checkpoint.get("tangent_frequency_trend", {}).values() if row["p"] is not None]
    known = [row for row in rows if not math.isnan(row["value"])]
    if not known:
        return None
    effect = float(np.mean([row["value"] for row in known]))
    # The p of the other direction: a permutation that reaches the value exactly counts in both.
    unknown = [math.nan] * (len(rows) - len(known))
    up = most([row["p"] for row in known] + unknown)
    down = most([min(1.0, 1 - row["p"] + _LEAST_P) for row in known] + unknown)
    supported = None
    if up <= level and effect > smallest:
        supported = True
    elif down <= level and effect < smallest:
        supported = False
    return Answer(
        supported=supported,
        reason=f"the mean is not above {smallest:g}"
        if effect <= smallest
        else "chance or fewer than most of the blocks explain it",
        effect=effect,
        p=up,
        p_against=down,
        says=f"Spearman's correlation of a type's frequency and its tangent energy is {number(effect)} on average",
    )


def _attenuated(course: Course, how: Resampling) -> Answer | None:
    smallest, level = CLAIMS["curvature is attenuated by frequency bias"].smallest_effect, 1 - how.level
    rows = list(course.last.get("frequency_attenuation", {}).values())
    known = [row for row in rows if not math.isnan(row["value"]) and row["low"] is not None and row["value"] > 0]
    if not rows:
        return None
    effect = float(np.mean([row["value"] for row in known])) if known else math.nan
    below, above = [math.nan] * (len(rows) - len(known)), [math.nan] * (len(rows) - len(known))
    for row in known:
        if row["low"] > 0 and math.isfinite(row["high"]):
            error = (math.log(row["high"]) - math.log(row["low"])) / (2 * _REACH)
            below.append(_NORMAL.cdf(math.log(row["value"] / smallest) / error) if error > 0 else math.nan)
            above.append(_NORMAL.cdf(-math.log(row["value"]) / error) if error > 0 else math.nan)
        else:
            below.append(math.nan)
            above.append(math.nan)
    p, p_against = (most(part) if known else math.nan for part in (below, above))
    supported = None
    if p <= level and effect < smallest:
        supported = True
    elif p_against <= level and effect > 1:
        supported = False
    where = f"in the {counted(len(known), 'block')} of {len(rows)} that can be read"
    return Answer(
        supported=supported,
        reason="fewer than most of the blocks can be read"
        if 2 * len(known) <= len(rows)
        else f"intervals of the blocks include {smallest:g}",
        effect=effect,
        p=p,
        p_against=p_against,
        says=f"V(frequency) over V(uniform) is {number(effect)} {where}",
    )


def _kinds_differ(families: Mapping[tuple, Sequence[Course]], how: Resampling) -> Iterator[tuple[Subject, Finding]]:
    """Mean excess of the last checkpoints, encoders against decoders: one number a recipe, the mean of its seeds."""
    smallest = CLAIMS[KINDS_DIFFER].smallest_effect
    places: dict[tuple, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for courses in families.values():
        for one in courses:
            values = [row["value"] for row in one.last.get("tangent_excess", {}).values()]
            values = [value for value in values if not math.isnan(value)]
            if values and one.kind in ("encoder", "decoder"):
                places[one.place][f"{one.kind}s"][one.model] = float(np.mean(values))
    for place, kinds in sorted(places.items(), key=lambda item: [part or "" for part in item[0]]):
        if len(kinds) < 2:
            continue
        decoders, encoders = (by_recipe(kinds[kind].items()) for kind in ("decoders", "encoders"))
        bounds = welch(decoders, encoders, level=how.level, margin=smallest)
        missing = missing_recipes({"encoders": len(encoders), "decoders": len(decoders)})
        corpus, population, stack, gradient, *others = place
        subject = kinds_subject(
            {"encoders": list(kinds["encoders"]), "decoders": list(kinds["decoders"])},
            place=("tangent_excess", population, corpus),
            variant=", ".join(part for part in (stack, gradient, *others) if part) or None,
            question=(stack, gradient),
        )
        apart = bounds.low > smallest or bounds.high < -smallest
        yield (
            subject,
            Finding(
                claim=KINDS_DIFFER,
                supported=True if apart and not missing else None,
                decides=not missing,
                reason=missing or f"the interval includes differences below {smallest:g}",
                effect=bounds.effect,
                interval=bounds.interval,
                p=min(1.0, min(bounds.p_above, bounds.p_below)),
                says=f"the excess of decoders is {number(bounds.effect)} above that of encoders",
            ),
        )
