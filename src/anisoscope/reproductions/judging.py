"""The table of a run and a paper's claims -> what was predicted, what was measured, and the verdict."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims import Verdict, judge
from anisoscope.claims.profiles import family_of
from anisoscope.records import without_nan
from anisoscope.reproductions.nouns import Claimed, Paper, Reading, View
from anisoscope.revisions import training_order
from anisoscope.store import name_trainings

REPRODUCED, FAILED, OPEN, UNTESTED = "reproduced", "not reproduced", "inconclusive", "not tested here"
PRESENT = "present before training"
_NOTHING = "nothing was measured that could test it"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result for one claim, population and view."""

    claim: str
    predicts: str
    where: str
    view: str
    population: str | None
    """None where nothing was tested."""
    verdict: str
    """`reproduced`, `present before training`, `not reproduced`, `inconclusive` or `not tested here`."""
    effect: float
    """Of the one verdict, or the median of several."""
    interval: tuple[float, float]
    """Of the one verdict; NaN where there are several."""
    p: float
    """Corrected for all claims judged; the largest of several."""
    reason: str
    evidence: tuple[Verdict, ...] = ()
    readings: tuple[str, ...] = ()
    """Further numbers, which do not enter the verdict."""

    def as_json(self) -> dict[str, Any]:
        """For machines: NaN becomes null."""
        mine = {name: without_nan(value) for name, value in asdict(self).items() if name != "evidence"}
        return mine | {"evidence": [one.as_json() for one in self.evidence]}


def judge_paper(paper: Paper, table: pa.Table, *, keys: Collection[str] | None = None, seed: int = 0) -> list[Outcome]:
    """Every claim of the paper, in its order; `keys` are the units it rests on, where the run has others too."""
    table = name_trainings(table)
    if keys is not None:
        table = table.filter(pc.field("key").isin(pa.array(list(keys), pa.string())))
    verdicts = judge(_judged(paper, table), seed=seed) if table.num_rows else []
    kinds = _kinds(table)
    return [outcome for claim in paper.claims for outcome in _outcomes(claim, verdicts, kinds, table)]


# Measured for several gradients; the one named beforehand is judged, since each more would cost power.
_OF_SEVERAL = ("tangent_energy", "tangent_gain", "tangent_excess", "normal_ratio", "tangent_anisotropy_share")
_GRADIENT = "virtual"


def _judged(paper: Paper, table: pa.Table) -> pa.Table:
    """What the paper's claims are about: its populations, one gradient and proxy, trainings of the kinds it follows."""
    columns = ["metric", "population", "gradient", "proxy", "variant", "kind", "model", "stage", "step", "revision"]
    rows = table.select(columns).to_pylist()
    last: dict[str, Any] = {}
    for row in rows:
        place = training_order(row["stage"], row["step"], row["revision"])
        last[row["model"]] = max(last.get(row["model"], place), place)

    def kept(row: dict[str, Any]) -> bool:
        place = training_order(row["stage"], row["step"], row["revision"])
        if row["kind"] not in paper.follows and place != last[row["model"]]:
            return False
        several = row["metric"] in _OF_SEVERAL
        asked = {name: values for name, values in paper.judged.items() if several or name != "variant"}
        asked |= {"gradient": (_GRADIENT,)} if several else {}
        return all(row[name] is None or row[name] in values for name, values in asked.items())

    return table.filter(pa.array([kept(row) for row in rows], pa.bool_()))


def _kinds(table: pa.Table) -> dict[str, str]:
    """Of every model and of every family of seeds."""
    pairs = table.select(["model", "kind"]).group_by(["model", "kind"]).aggregate([]).to_pylist()
    named = {row["model"]: row["kind"] for row in pairs}
    return {family_of(model): kind for model, kind in named.items()} | named


def _outcomes(claim: Claimed, verdicts: Sequence[Verdict], kinds: dict[str, str], table: pa.Table) -> list[Outcome]:
    readings = tuple(text for reading in claim.readings for text in _read(reading, table, claim.kinds))
    found, reason = [], claim.untested or _NOTHING
    for view in claim.views:
        for population in claim.populations:
            speaking = [one for one in verdicts if _speaks(one, claim, view, population, kinds)]
            if speaking:
                found.append(_outcome(claim, view, population, speaking, readings))
        if not any(one.view == view.name for one in found):
            found.append(_untested(claim, view.name, reason, readings))
    if all(one.verdict == UNTESTED for one in found):
        found = [_untested(claim, "", reason, readings)]
    return found


def _untested(claim: Claimed, view: str, reason: str, readings: tuple[str, ...]) -> Outcome:
    nothing = math.nan
    return Outcome(
        **_told(claim),
        view=view,
        population=None,
        verdict=UNTESTED,
        effect=nothing,
        interval=(nothing, nothing),
        p=nothing,
        reason=reason,
        readings=readings,
    )


def _told(claim: Claimed) -> dict[str, Any]:
    return {"claim": claim.name, "predicts": claim.predicts, "where": claim.where}


def _speaks(one: Verdict, claim: Claimed, view: View, population: str, kinds: dict[str, str]) -> bool:
    variant = one.variant or ""
    return (
        one.claim in view.tests
        and one.population == population
        and all(part in variant for part in view.has)
        and view.lacks not in variant
        and kinds.get(one.subject, claim.kinds[0]) in claim.kinds
    )


def _outcome(
    claim: Claimed, view: View, population: str, evidence: Sequence[Verdict], readings: tuple[str, ...]
) -> Outcome:
    alone = evidence[0] if len(evidence) == 1 else None
    effects = [one.effect for one in evidence if not math.isnan(one.effect)]
    p_values = [one.p_adjusted for one in evidence]
    verdict, why = _combined(claim, evidence)
    why = " ".join(part for part in (view.remark, why) if part)
    sentences = [one.text for one in evidence] if len(evidence) <= 3 else []
    return Outcome(
        **_told(claim),
        view=view.name,
        population=population,
        verdict=verdict,
        effect=float(np.median(effects)) if effects else math.nan,
        interval=alone.interval if alone else (math.nan, math.nan),
        p=max(p_values) if not any(map(math.isnan, p_values)) else math.nan,
        reason=" ".join([why, *sentences]).strip(),
        evidence=tuple(evidence),
        readings=readings,
    )


def _combined(claim: Claimed, evidence: Sequence[Verdict]) -> tuple[str, str]:
    """One verdict for many, and why."""
    answers = [one.holds for one in evidence]
    counts = {True: answers.count(True), False: answers.count(False), None: answers.count(None)}
    told = f"{counts[True]} hold, {counts[False]} do not, {counts[None]} are inconclusive." if len(answers) > 1 else ""
    holds = False if counts[False] else None if counts[None] else True
    if not claim.negated:
        early = [one.subject for one in evidence if one.before_training]
        if holds and early:
            where = "The untrained model" if len(early) == len(evidence) else f"Untrained, {', '.join(early)}"
            return PRESENT, f"{told} {where} (step 0) passes the same test: training did not bring it there.".strip()
        return {True: REPRODUCED, False: FAILED, None: OPEN}[holds], told
    if claim.existential:
        shown = "One that does not is enough." if counts[False] else "Models that do are no evidence against it."
        return REPRODUCED if counts[False] else OPEN, f"{told} {shown}".strip()
    denied = "The paper denies what is tested here: it is reproduced where that fails."
    return {True: FAILED, False: REPRODUCED, None: OPEN}[holds], f"{denied} {told}".strip()


def _read(reading: Reading, table: pa.Table, kinds: Sequence[str]) -> Iterator[str]:
    """A number of every model at the end of its training."""
    kept = (pc.field("metric") == reading.metric) & (pc.field("population") == reading.population)
    kept = kept & pc.field("kind").isin(list(kinds)) & pc.field("suspect").is_null()
    kept = kept & (pc.field("depth") == 1 if reading.site == "last" else pc.field("site") == reading.site)
    same = pc.field("variant").is_null() if reading.variant is None else pc.field("variant") == reading.variant
    # Of several gradients and proxies the same as are judged; a row with p, where there is one with and one without.
    rows = [
        row
        for row in table.filter(kept & same).to_pylist()
        if row["gradient"] in (None, _GRADIENT) and row["proxy"] in (None, "pca")
    ]
    rows.sort(key=lambda row: (training_order(row["stage"], row["step"], row["revision"]), row["p"] is not None))
    last = {(row["model"], row["corpus"]): row for row in rows}
    for (model, corpus), row in sorted(last.items()):
        step = f" at step {row['step']:,}" if row["step"] is not None else ""
        place = f"{reading.metric}[{row['site']}, {reading.population}]"
        beside = f" (control {row['control']}: {_number(row['control_value'])}, p {_number(row['p'])})"
        yield f"{model}{step}, {corpus}: {place} = {_number(row['value'])}{beside if row['control'] else ''}"


def _number(value: float | None) -> str:
    return "not known" if value is None or math.isnan(value) else f"{value:.3g}"
