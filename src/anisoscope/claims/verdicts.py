"""Every claim that a table can speak to -> verdicts, corrected for their number, in words."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from anisoscope.claims.enrichment import judge_enrichment
from anisoscope.claims.findings import Finding, Subject, counted, number
from anisoscope.claims.learning import judge_learning
from anisoscope.claims.pinned import judge_pinned
from anisoscope.claims.profiles import count_suspects, last_checkpoints, read_profiles
from anisoscope.claims.resampling import Resampling, benjamini_hochberg, holm
from anisoscope.claims.settings import one_setting
from anisoscope.claims.shapes import judge_kinds, judge_profile
from anisoscope.claims.theories import judge_theories
from anisoscope.claims.trainings import judge_trainings
from anisoscope.records import without_nan
from anisoscope.store import name_trainings

GRADIENTS = ("virtual", "activation", "linear", "embedding")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the data say of one claim about one subject."""

    claim: str
    subject: str
    """A model, a kind of model, or a training with `seed*` for its seeds."""
    metric: str
    population: str
    corpus: str
    variant: str | None
    """What else tells it from others: stack, stage, first step."""
    holds: bool | None
    """None: cannot be told."""
    effect: float
    interval: tuple[float, float]
    """Not corrected for the number of claims; p_adjusted is."""
    p: float
    """Of the claim's side of its margin; NaN where nothing was tested."""
    p_adjusted: float
    """Holm's, over all claims judged together; Benjamini and Hochberg's over those on gradients, whose p from
    permutations are never below 1/200."""
    replicates: int
    """Batches, models or seeds."""
    text: str
    details: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """For machines: NaN becomes null."""
        return {name: without_nan(value) for name, value in asdict(self).items()}


def judge(table: pa.Table, *, seed: int = 0, resamples: int = 2000, level: float = 0.95) -> list[Verdict]:
    """Every claim that the table of a run can speak to.

    `holds` is True where the interval lies on the claim's side of its margin and Holm's p over all claims judged is
    at most 1 - level; False where the interval lies on the other side.
    """
    table = name_trainings(table)
    how = Resampling(level=level, resamples=resamples, seed=seed)
    profiles = read_profiles(table)
    last = last_checkpoints(profiles)
    once = one_setting(table)
    found = [
        *(pair for profile in last for pair in judge_profile(profile, how)),
        *judge_kinds(last, how),
        *judge_trainings(profiles, how),
        *judge_theories(table, how),
    ]
    on_probe = [
        *judge_enrichment(once.table, how),
        *judge_learning(once.table, how),
        *judge_pinned(once.table, how),
    ]
    found += [(_say_passed_over(subject, once.passed_over), finding) for subject, finding in on_probe]
    adjusted, suspects = _adjust([finding for _, finding in found]), count_suspects(table)
    verdicts = [_verdict(*pair, p, suspects, level) for pair, p in zip(found, adjusted, strict=True)]
    return [_with_typical(verdict, verdicts) for verdict in verdicts]


def headlines(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """One verdict for those on gradients that say the same with other proxies and variants; others as they are."""
    groups: dict[tuple, list[Verdict]] = {}
    for one in verdicts:
        gradient = (one.variant or "").partition(",")[0]
        told = gradient if gradient in GRADIENTS else one.variant
        place = (one.claim, one.subject, one.metric, one.population, one.corpus, one.holds, told)
        groups.setdefault(place, []).append(one)
    return [_spoken_for(group) for group in groups.values()]


def _spoken_for(group: Sequence[Verdict]) -> Verdict:
    first, *others = group
    if not others:
        return first
    effects = [one.effect for one in group if not math.isnan(one.effect)]
    range_of = f", effects {number(min(effects))} to {number(max(effects))}" if effects else ""
    more = f"the same with {len(others)} more of its proxies and variants{range_of}"
    return replace(first, text=f"{first.text[:-1]}; {more}.")


def _adjust(found: Sequence[Finding]) -> list[float]:
    adjusted = holm([math.nan if finding.among else finding.p for finding in found])
    for name in {finding.among for finding in found} - {""}:
        together = benjamini_hochberg([finding.p if finding.among == name else math.nan for finding in found])
        adjusted = [new if one.among == name else old for one, new, old in zip(found, together, adjusted, strict=True)]
    return adjusted


def _say_passed_over(subject: Subject, passed_over: Counter[str]) -> Subject:
    if not (units := sum(passed_over[model] for model in subject.models)):
        return subject
    note = f"{counted(units, 'unit')} of the same checkpoints under other settings left out: judge them by themselves"
    return replace(subject, notes=(*subject.notes, note))


def _p(value: float) -> str:
    return "< .0001" if value < 1e-4 else f"= {value:.2g}"


def _verdict(subject: Subject, finding: Finding, p_adjusted: float, suspects: Counter[str], level: float) -> Verdict:
    holds, notes = finding.supported, list(subject.notes)
    if holds and p_adjusted > 1 - level:
        holds = None
        notes.append("with as many claims as were judged here that may be chance")
    left_out = sum(suspects[model] for model in subject.models)
    if left_out:
        notes.append(f"{counted(left_out, 'suspect checkpoint')} left out")
    numbers = [counted(subject.replicates, subject.unit)]
    if not math.isnan(finding.p):
        low, high = finding.interval
        numbers += [] if math.isnan(low) else [f"{100 * level:g} % interval {number(low)} to {number(high)}"]
        numbers += [f"p {_p(finding.p)}, corrected p {_p(p_adjusted)}"]
    metric, population, corpus = subject.place
    about = ", ".join(part for part in (subject.name, subject.variant) if part)
    outcome = {True: "holds", False: "does not hold", None: "cannot be told"}[holds]
    sentence = f"{about}, {metric} of `{population}` on {corpus}: {finding.says} ({'; '.join(numbers)})"
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
    )


def _with_typical(verdict: Verdict, verdicts: Iterable[Verdict]) -> Verdict:
    """A bell that typical tokens do not make is called what it is."""
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
