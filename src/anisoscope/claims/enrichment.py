"""Do gradients, and their anisotropy, lie in the tangent space? By our control and by the paper's, side by side.

A model's blocks at its last checkpoint are tested together: the p of its blocks become one by Simes' rule, which keeps
its level for tests that depend on each other as neighbouring blocks do (Benjamini and Yekutieli 2001). It speaks of
some block; a claim about the model takes more than half of its blocks beyond chance, and a mean above it.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.findings import Finding, Subject, counted, number
from anisoscope.claims.resampling import Resampling
from anisoscope.grouping import group_rows
from anisoscope.revisions import training_order

ENRICHED, SHARED, PAPER = "tangent enrichment", "tangent share of gradient anisotropy", " (the paper's control)"
_SHARE = "tangent_anisotropy_share"
# Of the ways to take a share: the paper's, and the one in which windows paired anew let a signal be found.
_PAPERS_WAY, _OUR_WAY = ([f"{mean};share={way}" for mean in ("mean=in", "mean=out")] for way in ("isoscore", "energy"))
# What decides for coupled gradients, and for uncoupled ones, of which the last is a single value without a p.
_DRAWN, _SINGLE = ("permuted", "haar", "signs"), "next"
_TOLD_APART = ("corpus", "population", "model", "stack", "gradient", "proxy", "variant")


def simes(p_values: Sequence[float]) -> float:
    """One p for many: the smallest of m p₍ₖ₎ / k; NaN where there is none.

    >>> simes([0.04, 0.01, 0.5])
    0.03
    """
    known = sorted(p for p in p_values if not math.isnan(p))
    return min((len(known) * p / (k + 1) for k, p in enumerate(known)), default=math.nan)


def last_blocks(table: pa.Table) -> Iterator[tuple[tuple[str, ...], list[dict[str, Any]]]]:
    """Blocks of the last checkpoint of each series: what tells it from others, the metric first, and its rows."""
    kept = pc.field("depth").is_valid() & pc.field("suspect").is_null() & pc.field("bin").is_null()
    rows = table.filter(kept).sort_by([("key", "ascending")])
    groups = group_rows(rows, ("metric", *_TOLD_APART, "stage", "step", "revision"))
    series: dict[tuple, dict[Any, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    for group, (metric, *told, stage, step, revision) in enumerate(groups.names()):
        place = training_order(stage, step, revision)
        series[metric, *(name or "" for name in told)][place].append(groups.rows(group))
    for told in sorted(series):
        checkpoints = series[told]
        last = np.sort(np.concatenate(checkpoints[max(checkpoints)]))
        yield told, list({row["site"]: row for row in rows.take(last).to_pylist()}.values())


def subject_of(told: tuple[str, ...], blocks: Sequence[Any]) -> Subject:
    """What a finding on these blocks is about."""
    metric, corpus, population, model, *others = told
    return Subject(
        name=model,
        models=(model,),
        place=(metric, population, corpus),
        variant=", ".join(part for part in others if part) or None,
        replicates=len(blocks),
        unit="block",
    )


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a block shows: how far it is beyond its control, and the p of that."""

    value: float
    p: float

    @classmethod
    def of(cls, value: float, chance: Sequence[float], p_values: Sequence[float | None]) -> "Seen":
        """Beyond the hardest of some controls; p is the largest of theirs. Unknown where one of them is."""
        known = [math.nan if p is None else p for p in p_values]
        return cls(value=value - _largest(chance, default=0.0), p=_largest(known))


def _largest(numbers: Sequence[float], default: float = math.nan) -> float:
    return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=default)


def judge_enrichment(table: pa.Table, how: Resampling) -> Iterator[tuple[Subject, Finding]]:
    """Every gradient, proxy, population and variant of every model."""

    def blocks_of(chosen: pc.Expression) -> Iterator[tuple[tuple[str, ...], list[dict[str, Any]]]]:
        yield from last_blocks(table.filter(chosen))

    of_share = pc.field("metric") == _SHARE
    for told, blocks in blocks_of(pc.field("metric") == "tangent_excess"):
        seen = [Seen.of(row["value"], (), [row["p"]]) for row in blocks]
        what = "the energy in the tangent proxy stands {} above its control on average"
        yield subject_of(told, blocks), _found(ENRICHED, what, seen, how)
    for told, blocks in blocks_of(pc.field("metric") == "normal_ratio"):
        seen = [Seen.of(row["value"], (), [row["p"]]) for row in blocks]
        what = "it has {} times the energy of random normals on average"
        yield subject_of(told, blocks), _found(ENRICHED + PAPER, what, seen, how, chance=1.0)
    ours = of_share & pc.field("variant").isin(_OUR_WAY)
    by_control = {name: dict(blocks_of(ours & (pc.field("control") == name))) for name in (*_DRAWN, _SINGLE)}
    for told in sorted({told for name in _DRAWN for told in by_control[name]}):
        drawn = {name: by_control[name][told] for name in _DRAWN if told in by_control[name]}
        blocks = next(iter(drawn.values()))
        seen = _beyond_each(blocks, drawn, by_control[_SINGLE].get(told, ()))
        what = "the tangent proxy has {} more of the gradients' uneven energy than its control on average"
        yield subject_of(told, blocks), _found(SHARED, what, seen, how)
    papers = of_share & pc.field("variant").isin(_PAPERS_WAY) & (pc.field("control") == "normal")
    for told, blocks in blocks_of(papers):
        seen = [Seen.of(row["value"], [row["control_value"]], [row["p"]]) for row in blocks]
        what = (
            "without the tangent proxy the gradients' IsoScore rises by {} more than without random normals on average"
        )
        yield subject_of(told, blocks), _found(SHARED + PAPER, what, seen, how)


def _beyond_each(
    blocks: Sequence[dict[str, Any]],
    drawn: Mapping[str, Sequence[dict[str, Any]]],
    single: Sequence[dict[str, Any]],
) -> list[Seen]:
    """Each block beyond the hardest control: of coupled gradients the permuted one alone, as for their energy."""
    rows = {name: {row["site"]: row for row in mine} for name, mine in drawn.items()}
    following = {} if "permuted" in drawn else {row["site"]: row for row in single}
    found = []
    for block in blocks:
        here = [mine[block["site"]] for mine in rows.values() if block["site"] in mine]
        beside = [following[block["site"]]] if block["site"] in following else []
        chance = [row["control_value"] for row in (*here, *beside)]
        found.append(Seen.of(block["value"], chance, [row["p"] for row in here]))
    return found


def _found(claim: str, what: str, blocks: Sequence[Seen], how: Resampling, *, chance: float = 0.0) -> Finding:
    p, values = simes([one.p for one in blocks]), np.array([one.value for one in blocks], float)
    known = values[np.isfinite(values)]
    effect = float(known.mean()) if len(known) else math.nan
    # A control that is a single value has no p: a block below it is not beyond chance either.
    reached = sum(one.p <= 1 - how.level and one.value > chance for one in blocks)
    somewhere, mostly = p <= 1 - how.level and effect > chance, 2 * reached > len(blocks)
    return Finding(
        claim=claim,
        # What is not found may be too small to be found: nothing here can speak against the claim.
        supported=True if somewhere and mostly else None,
        effect=effect,
        p=p,
        says=f"{what.format(number(effect))}, and in {counted(reached, 'block')} of {len(blocks)} more than by chance"
        + (", where a claim about the model takes most of them" if somewhere and not mostly else ""),
        details={"blocks_beyond_chance": float(reached)},
        among="gradients",
    )
