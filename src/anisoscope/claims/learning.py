"""What is said of gradients over a training, each under our control and, where it applies, under the paper's.

    emerges early                 a checkpoint in the first 30 % of the steps is enriched, more than the untrained one
    persists                      at least .9 of the checkpoints after that one still are, the last among them
    grows with frequency          gradients of frequent types lie more in the tangent space
    encoders and decoders differ in enrichment     in the mean excess of their last checkpoints, over models
    curvature is attenuated by frequency bias      V(f) / V(uniform) is below 1

The p of a checkpoint's blocks become one by Simes' rule, those of a training's checkpoints are adjusted together
(Benjamini and Hochberg 1995). With several seeds of a training a claim must hold in each: p is the largest of theirs.
An untrained model has an excess of its own, because state and gradient both know the token. Our control therefore asks
for more than that: E less its control must stand above that of step 0, by the intervals of both. Each is judged with
the proxy of the moment and, where a sweep followed its checkpoints or a Scope watched, with that of the checkpoint
before (`fit=rolling`), which the states that the gradients belong to had no part in.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.enrichment import PAPER, simes
from anisoscope.claims.findings import Finding, Subject, counted, number
from anisoscope.claims.profiles import family_of
from anisoscope.claims.resampling import Resampling, benjamini_hochberg, welch
from anisoscope.claims.trainings import MIN_CHECKPOINTS
from anisoscope.grouping import group_rows
from anisoscope.revisions import training_order

EARLY = 0.3
PERSISTENT = 0.9
MIN_MODELS = 3
# Of a trend, whose p comes from 999 permutations.
LEAST_P = 1 / 1000
_METRICS = ("tangent_excess", "tangent_energy", "normal_ratio", "tangent_frequency_trend", "frequency_attenuation")
_TOLD_APART = ("corpus", "population", "stack", "gradient", "proxy")
_NORMAL = NormalDist()
# Half of a 95 % interval, in standard errors.
_REACH = _NORMAL.inv_cdf(0.975)
_NONE = "no checkpoint is enriched"
_NO_MORE = f"{_NONE} more than the untrained one"
# Which proxies a course is of, by the variant of its rows.
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


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one training says of a claim."""

    supported: bool | None
    effect: float
    p: float
    says: str


def judge_learning(table: pa.Table, how: Resampling) -> Iterator[tuple[Subject, Finding]]:
    """Every claim on gradients over trainings that the table can speak to."""
    families: dict[tuple, list[Course]] = defaultdict(list)
    for course in read_courses(table):
        families[(*course.place, family_of(course.model))].append(course)
    tests: dict[str, tuple[str, Callable[[Course, Resampling], Answer | None]]] = {
        "emerges early": ("tangent_excess", _over_training(_when, _by_ours, _NO_MORE)),
        f"emerges early{PAPER}": ("normal_ratio", _over_training(_when, _by_paper, _NONE)),
        "persists": ("tangent_excess", _over_training(_lasts, _by_ours, _NO_MORE)),
        f"persists{PAPER}": ("normal_ratio", _over_training(_lasts, _by_paper, _NONE)),
        "grows with frequency": ("tangent_frequency_trend", _grows_with_frequency),
        "curvature is attenuated by frequency bias": ("frequency_attenuation", _attenuated),
    }
    for (*_, family), seeds in sorted(families.items(), key=lambda item: [part or "" for part in item[0]]):
        for claim, (metric, test) in tests.items():
            measured = [one for one in seeds if any(metric in here for here in one.checkpoints)]
            answers = [(one.model, answer) for one in measured if (answer := test(one, how)) is not None]
            if answers:
                name = family if len(seeds) > 1 else seeds[0].model
                subject = _subject(name, [model for model, _ in answers], metric, seeds[0].place, "training")
                yield subject, _together(claim, [answer for _, answer in answers])
    yield from _kinds_differ(families, how)


def read_courses(table: pa.Table) -> list[Course]:
    """The trainings of a table, checkpoints in order: one course with their own proxies, one with those before."""
    kept = pc.field("metric").isin(list(_METRICS)) & pc.field("depth").is_valid() & pc.field("suspect").is_null()
    fits = [name for name in _FITS if name is not None]
    kept = kept & pc.field("bin").is_null() & (pc.field("variant").is_null() | pc.field("variant").isin(fits))
    chosen = table.filter(kept).sort_by([("key", "ascending")])
    groups = group_rows(chosen, (*_TOLD_APART, "variant", "model", "kind", "metric", "stage", "step", "revision"))
    found_rows = chosen.select(["site", "step", "value", "p", "low", "high"]).take(groups.order).to_pylist()
    rows: dict[tuple, dict[Any, dict[str, dict[str, Row]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(dict))
    )
    kinds: dict[tuple, str] = {}
    for (*told, variant, model, kind, metric, stage, step, revision), blocks in groups.slices():
        identity = (*told, _FITS[variant], model)
        kinds[identity] = kind
        by_site = rows[identity][training_order(stage, step, revision)][metric]
        by_site.update((row["site"], row) for row in found_rows[blocks])
    courses = []
    for identity, found in sorted(rows.items(), key=lambda item: [part or "" for part in item[0]]):
        *told, _, model = identity
        own = rows.get((*told, None, model), found)
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


def _subject(name: str, models: Sequence[str], metric: str, place: tuple[Any, ...], unit: str) -> Subject:
    corpus, population, *others = place
    return Subject(
        name=name,
        models=tuple(models),
        place=(metric, population, corpus),
        variant=", ".join(part for part in others if part) or None,
        replicates=len(models),
        unit=unit,
    )


def _together(claim: str, answers: Sequence[Answer]) -> Finding:
    """All trainings must say the same; the one that says it least decides."""
    said = {answer.supported for answer in answers}
    known = [answer.p for answer in answers if not math.isnan(answer.p)]
    least = max(answers, key=lambda one: (one.supported is not True, one.p if not math.isnan(one.p) else 2.0))
    return Finding(
        claim=claim,
        supported=said.pop() if len(said) == 1 else None,
        effect=float(np.nanmean([answer.effect for answer in answers]))
        if any(not math.isnan(answer.effect) for answer in answers)
        else math.nan,
        p=max(known) if len(known) == len(answers) else math.nan,
        says=least.says if len(answers) == 1 else f"of {len(answers)} trainings the least clear: {least.says}",
        among="gradients",
    )


def beyond_untrained(blocks: Blocks, before: Blocks, energies: Blocks, energies_before: Blocks) -> float:
    """p that the excess of some block grew since step 0 (Simes), from the intervals of the two energies."""
    p_values = []
    for site in blocks.keys() & before.keys() & energies.keys() & energies_before.keys():
        ends = [(one[site]["low"], one[site]["high"]) for one in (energies, energies_before)]
        if any(end is None for pair in ends for end in pair):
            continue
        error = math.hypot(*((high - low) / (2 * _REACH) for low, high in ends))
        grown = blocks[site]["value"] - before[site]["value"]
        p_values.append(_NORMAL.cdf(-grown / error) if error > 0 else math.nan)
    return simes(p_values)


def _cleared(course: Course, metric: str, chance: float, *, held_against_untrained: bool) -> np.ndarray:
    """Adjusted p of each checkpoint: of its blocks being enriched and, by our control, more than untrained."""
    untrained = course.untrained
    found = []
    for one in course.checkpoints:
        blocks = one.get(metric, {})
        p = simes([_p_beyond(row, chance) for row in blocks.values()])
        values = [row["value"] for row in blocks.values() if not math.isnan(row["value"])]
        if not values or float(np.mean(values)) <= chance:
            p = 1.0 if values else math.nan
        elif held_against_untrained and untrained is not None:
            energies = (here.get("tangent_energy", {}) for here in (one, untrained))
            grown = 1.0 if one is untrained else beyond_untrained(blocks, untrained.get(metric, {}), *energies)
            p = max(p, grown) if not math.isnan(grown) else math.nan
        found.append(p)
    return np.array(benjamini_hochberg(found))


def _p_beyond(row: Mapping[str, Any], chance: float) -> float:
    """The p of a block, which says nothing of one below a control that has none: the next directions."""
    if row["value"] <= chance:
        return 1.0
    return math.nan if row["p"] is None else row["p"]


def _untold(says: str, p: float = math.nan) -> Answer:
    return Answer(supported=None, effect=math.nan, p=p, says=says)


def _too_short(course: Course) -> Answer | None:
    steps = [step for step in course.steps() if step is not None]
    if len(steps) < max(MIN_CHECKPOINTS, len(course.checkpoints)):
        return _untold(f"{counted(len(steps), 'checkpoint')} of known step, where {MIN_CHECKPOINTS} are needed")
    return None


def _when(course: Course, p_values: np.ndarray, how: Resampling, nothing: str) -> Answer:
    steps = np.array(course.steps(), float)
    places = steps / steps.max()
    enriched = p_values <= 1 - how.level
    early = places <= EARLY
    if not enriched.any():
        return _untold(nothing, float(np.nanmin(p_values, initial=1.0)))
    first = int(enriched.argmax())
    p = float(np.nanmin(p_values[early])) if early.any() and not np.isnan(p_values[early]).all() else math.nan
    return Answer(
        supported=bool(early[first]),
        effect=float(places[first]),
        p=p,
        says=f"the first enriched checkpoint is step {steps[first]:.0f}, at {number(places[first])} of the training",
    )


def _lasts(course: Course, p_values: np.ndarray, how: Resampling, nothing: str) -> Answer:
    enriched = p_values <= 1 - how.level
    if not enriched[:-1].any():
        return _untold(f"{nothing}{' but the last' if enriched[-1] else ''}, so nothing could last")
    first = int(enriched.argmax())
    share = float(enriched[first + 1 :].mean())
    supported = None
    if share >= PERSISTENT and enriched[-1]:
        supported = True
    elif not enriched[-1]:
        supported = False
    later = counted(int(enriched[first + 1 :].sum()), "checkpoint")
    return Answer(
        supported=supported,
        effect=share,
        p=float(p_values[-1]),
        says=f"{later} of {len(enriched) - first - 1} after step {course.steps()[first]} are enriched",
    )


def _by_ours(course: Course) -> np.ndarray:
    return _cleared(course, "tangent_excess", 0.0, held_against_untrained=True)


def _by_paper(course: Course) -> np.ndarray:
    return _cleared(course, "normal_ratio", 1.0, held_against_untrained=False)


def _over_training(
    test: Callable[[Course, np.ndarray, Resampling, str], Answer],
    control: Callable[[Course], np.ndarray],
    nothing: str,
) -> Callable[[Course, Resampling], Answer | None]:
    """A test of several checkpoints; of a single one it does not speak."""

    def tested(course: Course, how: Resampling) -> Answer | None:
        if len(course.checkpoints) == 1:
            return None
        return _too_short(course) or test(course, control(course), how, nothing)

    return tested


def _grows_with_frequency(course: Course, how: Resampling) -> Answer | None:
    rows = [row for row in course.last.get("tangent_frequency_trend", {}).values() if row["p"] is not None]
    known = [row for row in rows if not math.isnan(row["value"])]
    if not known:
        return None
    effect = float(np.mean([row["value"] for row in known]))
    # The p of the other direction: what reaches a value counts in both.
    up, down = simes([row["p"] for row in known]), simes([1 - row["p"] + LEAST_P for row in known])
    supported = None
    if up <= 1 - how.level and effect > 0:
        supported = True
    elif down <= 1 - how.level and effect < 0:
        supported = False
    return Answer(
        supported=supported,
        effect=effect,
        p=up,
        says=f"Spearman's correlation of a type's frequency and its tangent energy is {number(effect)} on average",
    )


def _attenuated(course: Course, how: Resampling) -> Answer | None:
    rows = list(course.last.get("frequency_attenuation", {}).values())
    known = [row for row in rows if not math.isnan(row["value"]) and row["low"] is not None and row["value"] > 0]
    if not rows:
        return None
    effect = float(np.mean([row["value"] for row in known])) if known else math.nan
    below, above = [], []
    for row in known:
        if row["low"] > 0 and math.isfinite(row["high"]):
            error = (math.log(row["high"]) - math.log(row["low"])) / (2 * _REACH)
            z = math.log(row["value"]) / error if error > 0 else 0.0
            below.append(_NORMAL.cdf(z))
            above.append(_NORMAL.cdf(-z))
    p = simes(below)
    supported = None
    if p <= 1 - how.level and effect < 1:
        supported = True
    elif simes(above) <= 1 - how.level and effect > 1:
        supported = False
    where = f"in the {counted(len(known), 'block')} of {len(rows)} that can tell"
    return Answer(
        supported=supported, effect=effect, p=p, says=f"V(frequency) over V(uniform) is {number(effect)} {where}"
    )


def _kinds_differ(families: Mapping[tuple, Sequence[Course]], how: Resampling) -> Iterator[tuple[Subject, Finding]]:
    """Mean excess of the last checkpoints, encoders against decoders, a training each."""
    places: dict[tuple, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for courses in families.values():
        for one in courses:
            values = [row["value"] for row in one.last.get("tangent_excess", {}).values()]
            values = [value for value in values if not math.isnan(value)]
            if values and one.kind in ("encoder", "decoder"):
                places[one.place][one.kind][one.model] = float(np.mean(values))
    for place, kinds in sorted(places.items(), key=lambda item: [part or "" for part in item[0]]):
        encoders, decoders = (kinds.get(kind, {}) for kind in ("encoder", "decoder"))
        if min(len(encoders), len(decoders)) < MIN_MODELS:
            continue
        bounds = welch(list(decoders.values()), list(encoders.values()), level=how.level)
        subject = _subject("decoders and encoders", [*encoders, *decoders], "tangent_excess", place, "model")
        apart = bounds.low > 0 or bounds.high < 0
        yield (
            subject,
            Finding(
                claim="encoders and decoders differ in enrichment",
                supported=True if apart else None,
                effect=bounds.effect,
                interval=bounds.interval,
                p=min(1.0, min(bounds.p_above, bounds.p_below)),
                says=f"the excess of decoders is {number(bounds.effect)} above that of encoders",
                among="gradients",
            ),
        )
