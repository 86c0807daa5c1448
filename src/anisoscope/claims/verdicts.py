"""Every claim that a table has numbers for -> verdicts, corrected for their number, in words."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.catalogue import FAMILYWISE
from anisoscope.claims.enrichment import judge_enrichment
from anisoscope.claims.findings import Finding, Subject, counted, number
from anisoscope.claims.learning import judge_learning
from anisoscope.claims.pinned import judge_pinned
from anisoscope.claims.profiles import count_suspects, last_checkpoints, read_profiles
from anisoscope.claims.resampling import Resampling, false_discovery_rate, holm
from anisoscope.claims.settings import one_setting
from anisoscope.claims.shapes import judge_kinds, judge_profile
from anisoscope.claims.theories import judge_theories
from anisoscope.claims.trainings import judge_trainings
from anisoscope.records import without_nan
from anisoscope.store import name_trainings

OUTCOMES = {True: "holds", False: "does not hold", None: "inconclusive"}
# What the claims that do not need single batches read.
_NUMBERS = (
    *("key", "corpus", "model", "kind", "stack", "stage", "step", "revision", "site", "depth", "suspect"),
    *("metric", "population", "variant", "bin", "gradient", "proxy", "control"),
    *("value", "null", "low", "high", "p", "control_value"),
)
GRADIENTS = ("virtual", "activation", "linear", "embedding")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of one claim about one subject."""

    claim: str
    subject: str
    """A model, a kind of model, or a training with `seed*` for its seeds."""
    metric: str
    population: str
    corpus: str
    variant: str | None
    """What else identifies it: stack, stage, first step, gradient, proxy."""
    holds: bool | None
    """None: inconclusive, for the reason given."""
    effect: float
    interval: tuple[float, float]
    """Not corrected for the number of claims; p_adjusted is."""
    p: float
    """That the effect is on the claim's side of its smallest effect; NaN where nothing was tested."""
    p_adjusted: float
    """Corrected in its family of claims: Holm's for shapes and trainings, false discovery rate for gradients and types,
    whose p from permutations are never below 1/200. Tests of one hypothesis (other populations, proxies, variants)
    count as one. NaN where the claim could not hold whatever the data."""
    replicates: int
    """Batches, blocks, models or seeds."""
    text: str
    details: Mapping[str, float]
    reason: str = ""
    """Why it is inconclusive."""
    smallest_effect: float = math.nan
    """What the effect must exceed for the claim to hold."""
    p_against: float = math.nan
    """That the effect is on the other side."""
    p_against_adjusted: float = math.nan
    """Corrected in the same way; "does not hold" needs it to be at most 1 - level."""
    family: str = ""
    """Which claims it is corrected with."""
    before_training: bool | None = None
    """Whether the untrained model (step 0) passes the same test; None where that was not measured."""
    steps: tuple[int, ...] = ()
    """Training steps it is based on, where it is about a training."""

    def as_json(self) -> dict[str, Any]:
        """For machines: NaN becomes null."""
        return {name: without_nan(value) for name, value in asdict(self).items()}


def judge(table: pa.Table, *, seed: int = 0, resamples: int = 2000, level: float = 0.95) -> list[Verdict]:
    """Every claim that the table of a run has numbers for.

    `holds` is True where the effect is beyond the claim's smallest effect with a corrected p of at most 1 - level, and
    False where it is on the other side with such a p.
    """
    table = name_trainings(table)
    how = Resampling(level=level, resamples=resamples, seed=seed)
    # Without suspects nothing is filtered: a copy of a large table takes a second.
    suspicious = table["suspect"].null_count < table.num_rows
    once = one_setting(table.filter(pc.field("suspect").is_null()) if suspicious else table)
    profiles = read_profiles(once.table)
    last = last_checkpoints(profiles)
    # Batches and settings are not copied by each of the many selections that follow.
    numbers = once.table.select([name for name in once.table.column_names if name in _NUMBERS])
    found = [
        *(pair for profile, untrained in last for pair in judge_profile(profile, how, untrained)),
        *judge_kinds([profile for profile, _ in last], how),
        *judge_trainings(profiles, how),
        *judge_theories(numbers, how),
        *judge_enrichment(numbers, how),
        *judge_learning(numbers, how),
        *judge_pinned(numbers, how),
    ]
    found = [
        (replace(subject, notes=(*subject.notes, *once.notes(subject.models, subject.place))), finding)
        for subject, finding in found
    ]
    adjusted = zip(_adjusted(found, "p", level), _adjusted(found, "p_against", level), strict=True)
    suspects = count_suspects(table)
    verdicts = [_verdict(*pair, *p, suspects, level) for pair, p in zip(found, adjusted, strict=True)]
    return [_with_typical(verdict, verdicts) for verdict in verdicts]


def headlines(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """One verdict for those on gradients that agree over proxies and variants; others as they are."""
    groups: dict[tuple, list[Verdict]] = {}
    for one in verdicts:
        gradient = (one.variant or "").partition(",")[0]
        question = gradient if gradient in GRADIENTS else one.variant
        place = (one.claim, one.subject, one.metric, one.population, one.corpus, one.holds, question)
        groups.setdefault(place, []).append(one)
    return [_summary(group) for group in groups.values()]


def _summary(group: Sequence[Verdict]) -> Verdict:
    first, *others = group
    if not others:
        return first
    effects = [one.effect for one in group if not math.isnan(one.effect)]
    range_of = f", effects {number(min(effects))} to {number(max(effects))}" if effects else ""
    more = f"the same with {len(others)} more of its proxies and variants{range_of}"
    return replace(first, text=f"{first.text[:-1]}; {more}.")


def _adjusted(found: Sequence[tuple[Subject, Finding]], which: str, level: float) -> list[float]:
    """The p of every finding on one side, corrected within its family."""
    hypotheses: list[Hashable] = [
        (finding.claim, subject.name, subject.place[2], subject.question) for subject, finding in found
    ]
    adjusted = [math.nan] * len(found)
    for family in {finding.declared.family for _, finding in found}:
        p_values = [
            getattr(finding, which) if finding.declared.family == family and finding.decides else math.nan
            for _, finding in found
        ]
        if family in FAMILYWISE:
            together = holm(p_values, hypotheses)
        else:
            together = false_discovery_rate(p_values, hypotheses, level=level)
        adjusted = [old if math.isnan(new) else new for old, new in zip(adjusted, together, strict=True)]
    return adjusted


def _p(value: float) -> str:
    return "< .0001" if value < 1e-4 else f"= {value:.2g}"


def _outcome(finding: Finding, p_adjusted: float, p_against_adjusted: float, level: float) -> tuple[bool | None, str]:
    """Whether it holds after correction, and why not where that is open."""
    if finding.supported is None:
        return None, finding.reason or "the data do not decide"
    corrected = p_adjusted if finding.supported else p_against_adjusted
    if not corrected <= 1 - level:
        side = "for it" if finding.supported else "against it"
        return None, f"among as many claims as were judged, the evidence {side} may be chance"
    return finding.supported, ""


def _verdict(
    subject: Subject,
    finding: Finding,
    p_adjusted: float,
    p_against_adjusted: float,
    suspects: Counter[str],
    level: float,
) -> Verdict:
    holds, reason = _outcome(finding, p_adjusted, p_against_adjusted, level)
    smallest = finding.declared.smallest_effect
    notes = list(subject.notes)
    if left_out := sum(suspects[model] for model in subject.models):
        notes.append(f"{counted(left_out, 'suspect checkpoint')} left out")
    numbers = [counted(subject.replicates, subject.unit)]
    if not math.isnan(finding.p):
        low, high = finding.interval
        numbers += [] if math.isnan(low) else [f"{100 * level:g} % interval {number(low)} to {number(high)}"]
    numbers.append(f"smallest effect that counts {smallest:g} [{finding.declared.effect.partition(',')[0]}]")
    if not math.isnan(finding.p):
        numbers.append(f"p {_p(finding.p)}")
        numbers += [] if math.isnan(p_adjusted) else [f"corrected p {_p(p_adjusted)}"]
    if holds is False:
        numbers.append(f"corrected p against it {_p(p_against_adjusted)}")
    metric, population, corpus = subject.place
    about = ", ".join(part for part in (subject.name, subject.variant) if part)
    sentence = f"{about}, {metric} of `{population}` on {corpus}: {finding.says} ({'; '.join(numbers)})"
    outcome = f"{OUTCOMES[holds]} for {subject.of}" if holds is not None else f"is inconclusive: {reason}"
    if holds and finding.at_start:
        notes.insert(0, "present before training: the untrained model (step 0) passes the same test")
    return Verdict(
        claim=finding.claim,
        subject=subject.name,
        metric=metric,
        population=population,
        corpus=corpus,
        variant=subject.variant,
        holds=holds,
        effect=finding.effect,
        interval=finding.interval,
        p=finding.p,
        p_adjusted=p_adjusted,
        replicates=subject.replicates,
        text="; ".join([f"{sentence}: “{finding.claim}” {outcome}", *notes]) + ".",
        details=finding.details,
        reason=reason,
        smallest_effect=smallest,
        p_against=finding.p_against,
        p_against_adjusted=p_against_adjusted,
        family=finding.declared.family,
        before_training=finding.at_start,
        steps=finding.steps,
    )


def _with_typical(verdict: Verdict, verdicts: Iterable[Verdict]) -> Verdict:
    """A bell of `all` tokens says so where typical tokens show none."""
    if not (verdict.claim == "bell" and verdict.population == "all" and verdict.holds):
        return verdict

    def identity(one: Verdict) -> tuple:
        return one.claim, one.subject, one.metric, one.population, one.corpus, one.variant

    wanted = identity(replace(verdict, population="typical"))
    typical = next((one for one in verdicts if identity(one) == wanted), None)
    if typical is None or typical.holds:
        return verdict
    verb = "may be" if typical.holds is None else "is"
    remark = f"the bell {verb} made by a few tokens (sink tokens): in `typical` the peak reads {number(typical.effect)}"
    return replace(verdict, text=f"{verdict.text[:-1]}; {remark}.")
