"""Do gradients, and their anisotropy, lie in the tangent space? By our control and by the paper's, side by side.

A statement about a model is one about more than half of its blocks at the last checkpoint. The p of its blocks become
one by the partial conjunction of Benjamini and Heller (2008): with exactly half of the blocks enriched it is not below
its level more often than it may (`resampling.most`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.catalogue import CLAIMS, PAPER
from anisoscope.claims.findings import WEIGHTS, Finding, Subject, counted, number
from anisoscope.claims.resampling import Resampling, most
from anisoscope.grouping import group_rows
from anisoscope.revisions import training_order

ENRICHED, SHARED = "tangent enrichment", "tangent share of gradient anisotropy"
_SHARE = "tangent_anisotropy_share"
# Of the ways to take a share: the paper's, and the one in which a permuted window pairing can detect a signal.
_PAPERS_WAY, _OUR_WAY = ([f"{mean};share={way}" for mean in ("mean=in", "mean=out")] for way in ("isoscore", "energy"))
# The controls of coupled gradients and of uncoupled ones; the last is a single value without a p.
_DRAWN, _SINGLE = ("permuted", "haar", "signs"), "next"
_IDENTITY = ("corpus", "population", "model", "stack", "gradient", "proxy", "variant")


Blocks = list[dict[str, Any]]


def last_blocks(table: pa.Table) -> Iterator[tuple[tuple[str, ...], Blocks, Blocks]]:
    """Blocks of the last checkpoint of each series, and of step 0 where that is another checkpoint.

    Comes with what identifies the series: the metric, then the columns of `_IDENTITY`.
    """
    kept = pc.field("depth").is_valid() & pc.field("suspect").is_null() & pc.field("bin").is_null()
    rows = table.filter(kept).sort_by([("key", "ascending")])
    groups = group_rows(rows, ("metric", *_IDENTITY, "stage", "step", "revision"))
    series: dict[tuple, dict[Any, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    # Each selection goes through every chunk of a table.
    rows = rows.combine_chunks()
    for group, (metric, *others, stage, step, revision) in enumerate(groups.names()):
        identity = (metric, *(name or "" for name in others))
        series[identity][training_order(stage, step, revision)].append(groups.rows(group))

    def blocks(numbers: list[np.ndarray]) -> Blocks:
        found = rows.take(np.sort(np.concatenate(numbers))).to_pylist()
        return list({row["site"]: row for row in found}.values())

    for identity, checkpoints in sorted(series.items()):
        first, last = blocks(checkpoints[min(checkpoints)]), blocks(checkpoints[max(checkpoints)])
        yield identity, last, first if len(checkpoints) > 1 and first[0]["step"] == 0 else []


def subject_of(identity: tuple[str, ...], blocks: Sequence[Any]) -> Subject:
    """What a finding on these blocks is about."""
    metric, corpus, population, model, stack, gradient, *others = identity
    return Subject(
        name=model,
        models=(model,),
        place=(metric, population, corpus),
        variant=", ".join(part for part in (stack, gradient, *others) if part) or None,
        question=(stack, gradient),
        replicates=len(blocks),
        unit="block",
        of=WEIGHTS,
    )


@dataclass(frozen=True, kw_only=True)
class Excess:
    """How far a block is beyond its control, and the p of that."""

    value: float
    p: float

    @classmethod
    def beyond(cls, value: float, controls: Sequence[float], p_values: Sequence[float | None]) -> "Excess":
        """Beyond the hardest of some controls; p is the largest of theirs. Unknown where one of them is."""
        known = [math.nan if p is None else p for p in p_values]
        return cls(value=value - _largest(controls, default=0.0), p=_largest(known))


def _largest(numbers: Sequence[float], default: float = math.nan) -> float:
    return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=default)


def judge_enrichment(table: pa.Table, how: Resampling) -> Iterator[tuple[Subject, Finding]]:
    """Every gradient, proxy, population and variant of every model."""
    of_share = pc.field("metric") == _SHARE
    papers = of_share & pc.field("variant").isin(_PAPERS_WAY) & (pc.field("control") == "normal")
    tests: list[tuple[str, str, pc.Expression, Callable[[dict[str, Any]], Excess]]] = [
        (
            ENRICHED,
            "the energy in the tangent proxy is {} above its control on average",
            pc.field("metric") == "tangent_excess",
            lambda row: Excess.beyond(row["value"], (), [row["p"]]),
        ),
        (
            ENRICHED + PAPER,
            "the tangent proxy has {} times the energy of random normals on average",
            pc.field("metric") == "normal_ratio",
            lambda row: Excess.beyond(row["value"], (), [row["p"]]),
        ),
        (
            SHARED + PAPER,
            "without the tangent proxy the gradients' IsoScore rises by {} more than without random normals on average",
            papers,
            lambda row: Excess.beyond(row["value"], [row["control_value"]], [row["p"]]),
        ),
    ]
    for claim, says, chosen, excess in tests:
        for identity, blocks, untrained in last_blocks(table.filter(chosen)):
            at_start = [excess(row) for row in untrained]
            yield subject_of(identity, blocks), _found(claim, says, [excess(row) for row in blocks], at_start, how)
    yield from _judge_shares(table.filter(of_share & pc.field("variant").isin(_OUR_WAY)), how)


def _judge_shares(table: pa.Table, how: Resampling) -> Iterator[tuple[Subject, Finding]]:
    """Shares of uneven energy, beyond the hardest of our controls; each control is a row of its own."""
    by_control = {
        name: {identity: found for identity, *found in last_blocks(table.filter(pc.field("control") == name))}
        for name in (*_DRAWN, _SINGLE)
    }
    says = "the tangent proxy has {} more of the gradients' uneven energy than its control on average"
    for identity in sorted({identity for name in _DRAWN for identity in by_control[name]}):
        excesses = []
        for checkpoint in (0, 1):
            drawn = {name: by_control[name][identity][checkpoint] for name in _DRAWN if identity in by_control[name]}
            single = by_control[_SINGLE].get(identity, ([], []))[checkpoint]
            blocks = next(iter(drawn.values()))
            excesses.append(_beyond_each(blocks, drawn, single))
        last, untrained = excesses
        yield subject_of(identity, last), _found(SHARED, says, last, untrained, how)


def _beyond_each(blocks: Blocks, drawn: Mapping[str, Blocks], single: Blocks) -> list[Excess]:
    """Each block beyond the hardest control: of coupled gradients the permuted one alone, as for their energy."""
    by_site = {name: {row["site"]: row for row in rows} for name, rows in drawn.items()}
    following = {} if "permuted" in drawn else {row["site"]: row for row in single}
    found = []
    for block in blocks:
        of_block = [rows[block["site"]] for rows in by_site.values() if block["site"] in rows]
        without_p = [following[block["site"]]] if block["site"] in following else []
        controls = [row["control_value"] for row in (*of_block, *without_p)]
        found.append(Excess.beyond(block["value"], controls, [row["p"] for row in of_block]))
    return found


def _model_p(claim: str, blocks: Sequence[Excess]) -> tuple[float, float, list[float]]:
    """Mean effect, p that more than half of the blocks are beyond their control, and the p of each block.

    A control that is a single value has no p: a block at or below it is not beyond chance either.
    """
    chance = _chance(claim)
    p_values = [1.0 if one.value <= chance else one.p for one in blocks]
    known = [one.value for one in blocks if math.isfinite(one.value)]
    return (float(np.mean(known)) if known else math.nan), most(p_values), p_values


def _chance(claim: str) -> float:
    """What the control itself gives: a ratio of 1, else no excess."""
    return 1.0 if claim == ENRICHED + PAPER else 0.0


def _found(claim: str, says: str, blocks: Sequence[Excess], untrained: Sequence[Excess], how: Resampling) -> Finding:
    smallest, level = CLAIMS[claim].smallest_effect, 1 - how.level
    effect, p, p_values = _model_p(claim, blocks)
    reached = sum(one <= level for one in p_values)
    at_start = None
    if untrained:
        effect_at_start, p_at_start, _ = _model_p(claim, untrained)
        at_start = p_at_start <= level and effect_at_start > smallest
    reason = "too few of its blocks have a p" if math.isnan(effect) else ""
    if not reason:
        reason = (
            f"the mean is not above {smallest:g}"
            if effect <= smallest
            else "chance or fewer than most of the blocks explain it"
        )
    return Finding(
        claim=claim,
        # A signal may be too small to be detected: nothing here can contradict the claim.
        supported=True if p <= level and effect > smallest else None,
        reason=reason,
        effect=effect,
        p=p if not all(math.isnan(one.p) for one in blocks) else math.nan,
        says=f"{says.format(number(effect))}, with p ≤ {level:.2g} in {counted(reached, 'block')} of {len(blocks)}",
        details={"blocks_beyond_chance": float(reached)},
        at_start=at_start,
    )
