"""Two runs number by number: the other less the first, over depth and as training goes on."""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.errors import SpecError
from anisoscope.figures import captions
from anisoscope.figures.choosing import GRIDE, among, distinct, in_chunks, in_order, one_setting, plain_states
from anisoscope.figures.drawing import (
    PALETTE,
    Chart,
    band_and_line,
    by_population,
    chart_rows,
    depth_axis,
    import_altair,
    legend,
    name_series,
    named,
    step_axis,
    subtitle,
    titled,
)
from anisoscope.figures.plans import Plan
from anisoscope.figures.rows import (
    AXES,
    NUMBERS,
    WHO,
    Row,
    blocks_of,
    listed,
    mean_of,
    place_along,
    select_rows,
    table_of,
)
from anisoscope.store import name_trainings

_RUNS = ("first", "other", "first_value", "other_value")
OVER_DEPTH = (*WHO, "site", "block", "depth", *_RUNS, *NUMBERS, "points")
OVER_TRAINING = (*WHO, "position", "label", "blocks", *_RUNS, *NUMBERS)
# Where each run has one of these and they differ, they are compared all the same, and both are named.
_MAY_DIFFER = ("model", "corpus")
# A difference of nulls that is seen beside the differences.
_SEEN = 0.02
_SERIES = ("model", "corpus", "stack", "population")


def difference_data(
    first: pa.Table,
    other: pa.Table,
    *,
    metric: str = "leading_variance",
    populations: Sequence[str] | None = None,
    axis: str = "depth",
    names: tuple[str, str] = ("first", "other"),
    corpus: str | None = None,
    keys: Collection[str] | None = None,
) -> pa.Table:
    """A metric of one run less that of another: with axis="depth" a row per block, else one per checkpoint.

    value   other - first. Over depth at the last checkpoint that both have, or where they have none in common at the
            last of each; over training of the means over the blocks, at every checkpoint that both have
    spread  standard deviation over batches of the difference in a batch, where both saw the same batches; else NaN
    null    other's null - first's: not zero where points or dimensions differ in number

    Rows are those of the same model, corpus, stack and population, at the same depths; a run's only model or corpus is
    matched to the other's only one. `names` are those of the runs.
    """
    if axis not in ("depth", *AXES):
        raise SpecError(f"axis is one of depth, {', '.join(AXES)}; came {axis!r}")
    choice: dict[str, Any] = {"metric": metric, "populations": populations, "keys": None, "batches": True}
    left, right = (blocks_of(select_rows(table, corpus=corpus, **choice)) for table in _narrowed(first, other, keys))
    versions = {row["metric_version"] for row in (*left, *right)}
    if len(versions) > 1:
        raise SpecError(f"the runs hold {metric} in versions {listed(versions)}, which are different numbers")
    rows: list[Row] = []
    for one, two in _pairs(left, right):
        both = _over_depth(one, two) if axis == "depth" else _over_training(one, two)
        rows += [{**row, "first": names[0], "other": names[1]} for row in both]
    if not rows:
        raise SpecError(f"wanted {metric} at blocks and checkpoints that both runs have; there is none")
    return table_of(rows, OVER_DEPTH) if axis == "depth" else table_of(place_along(rows, axis), OVER_TRAINING)


def _narrowed(first: pa.Table, other: pa.Table, keys: Collection[str] | None) -> Iterator[pa.Table]:
    for table in (first, other):
        yield table if keys is None else table.filter(among("key", keys))


def _pairs(left: Sequence[Row], right: Sequence[Row]) -> Iterator[tuple[list[Row], list[Row]]]:
    """Rows of both runs that belong to one series, those of the other run under the name of both where they differ."""
    loose = {}
    for name in _MAY_DIFFER:
        here, there = ({row[name] for row in rows} for rows in (left, right))
        if len(here) == len(there) == 1 and here != there:
            loose[name] = f"{next(iter(there))} less {next(iter(here))}"
    names = [name for name in _SERIES if name not in loose]
    known: dict[tuple[Any, ...], list[Row]] = {}
    for row in left:
        known.setdefault(tuple(row[name] for name in names), []).append(row)
    series: dict[tuple[Any, ...], list[Row]] = {}
    for row in right:
        series.setdefault(tuple(row[name] for name in names), []).append({**row, **loose})
    yield from ((known[who], rows) for who, rows in series.items() if who in known)


def _checkpoints(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Blocks by checkpoint, in the order of training; a step is one whatever its revision is called."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["checkpoint"], row["block"])):
        name = row["revision"] if row["step"] is None else None
        found.setdefault((row["stage"], row["step"], name), []).append(row)
    return found


def _same_depths(one: Sequence[Row], two: Sequence[Row]) -> bool:
    here, there = ([row["depth"] for row in rows] for rows in (one, two))
    return len(here) == len(there) and np.allclose(here, there)


def _over_depth(one: Sequence[Row], two: Sequence[Row]) -> Iterator[Row]:
    before, after = _checkpoints(one), _checkpoints(two)
    shared = [place for place in after if place in before]
    here, there = (places[shared[-1] if shared else list(places)[-1]] for places in (before, after))
    if _same_depths(here, there):
        yield from ({**row, **_less(twin, row)} for twin, row in zip(here, there, strict=True))


def _over_training(one: Sequence[Row], two: Sequence[Row]) -> Iterator[Row]:
    before, after = _checkpoints(one), _checkpoints(two)
    for place, there in after.items():
        here = before.get(place, ())
        if not _same_depths(here, there):
            continue
        # A block counts where both have a number.
        both = [pair for pair in zip(here, there, strict=True) if not math.isnan(pair[0]["value"] + pair[1]["value"])]
        one_mean, two_mean = (_mean_row([pair[side] for pair in both]) for side in (0, 1))
        yield {**there[0], **_less(one_mean, two_mean), "blocks": len(both)}


def _mean_row(blocks: Sequence[Row]) -> Row:
    """The means over blocks of values and nulls, and of the values of every batch."""
    counts = {len(row["values"]) for row in blocks}
    values = np.mean([row["values"] for row in blocks], axis=0, dtype=float).tolist() if len(counts) == 1 else []
    means = {name: mean_of([row[name] for row in blocks]) for name in ("value", "null")}
    points = sum(row["points"] for row in blocks)
    return {**means, "values": values, "points": points, "corpus": blocks[0]["corpus"] if blocks else None}


def _less(one: Row, two: Row) -> Row:
    """The second less the first, and how that moves from batch to batch."""
    before, after, spread = one["values"], two["values"], math.nan
    # As many points in as many batches of the same text are the same tokens.
    if len(before) == len(after) and one["points"] == two["points"] and one["corpus"] == two["corpus"]:
        changes = np.subtract(after, before, dtype=float)
        changes = changes[np.isfinite(changes)]
        spread = float(changes.std(ddof=1)) if changes.size > 1 else math.nan
    return {
        "value": two["value"] - one["value"],
        "spread": spread,
        "null": two["null"] - one["null"],
        "first_value": one["value"],
        "other_value": two["value"],
    }


def difference(first: pa.Table, other: pa.Table, *, axis: str = "depth", **choice: Any) -> Chart:
    """Draw `difference_data`, which takes the same choices: a panel for each population, a line for each model."""
    return draw_difference(difference_data(first, other, axis=axis, **choice), axis=axis)


def draw_difference(data: pa.Table, *, axis: str = "depth") -> Chart:
    """Lines with bands around a line at zero."""
    alt = import_altair()
    rows = name_series(data.to_pylist())
    where = ("site", "depth", "step", "points") if axis == "depth" else ("label", "blocks", "position")
    shown = ("series", "population", *where, "value", "spread", "first_value", "other_value")
    drawn = chart_rows(rows, (*shown, "low", "high", "null"))
    # Nulls that are nearly the same in both runs would only blur the line at zero.
    far, chance = (max((abs(row[name]) for row in drawn if row[name]), default=0.0) for name in ("value", "null"))
    moved = chance > _SEEN * far
    drawn = drawn if moved else [{**row, "null": None} for row in drawn]
    names, panels = (list(dict.fromkeys(row[name] for row in rows)) for name in ("series", "population"))
    colour = alt.Color("series:N", scale={"domain": names}, legend=legend(names) if len(names) > 1 else None)
    x = depth_axis() if axis == "depth" else step_axis(rows, axis)
    metric = rows[0]["metric"]
    tips = [name for name in shown if name != "position"]
    layers = band_and_line(drawn, x, f"difference of {metric}", colour=colour, shown=tips, zero=True)
    what = f"{metric}, {rows[0]['other']} less {rows[0]['first']}"
    how = "at the blocks" if axis == "depth" else "mean of the blocks over training"
    said = ["band: spread over batches"] if any(row["low"] is not None for row in drawn) else []
    said += ["grey dashed: difference of the nulls"] if moved else []
    title = f"{what}, {how}, {named('population', panels)}"
    return titled(by_population(layers, panels), title, subtitle(data), " · ".join(said) or None)


def difference_plans(first: pa.Table, other: pa.Table, names: tuple[str, str]) -> Iterator[Plan]:
    """Of every metric and population that both runs have at the same blocks: over depth, and over training."""
    tables = [plain_states(name_trainings(table)) for table in (first, other)]
    metrics = [[name for name in distinct(table, "metric") if not re.fullmatch(GRIDE, name)] for table in tables]
    for metric in (name for name in metrics[1] if name in metrics[0]):
        left, right = (
            one_setting(table.filter((pc.field("metric") == metric) & pc.field("depth").is_valid())).table
            for table in tables
        )
        populations = in_order(set(distinct(left, "population")) & set(distinct(right, "population")))
        for axis in ("depth", _training_axis(left, right)) if populations else ():
            choice = {"metric": metric, "populations": populations, "axis": axis, "names": names}
            try:
                data = difference_data(left, right, **choice)
            except SpecError:
                # The runs have no block in common, or no checkpoint; the report's table has what they do have.
                continue
            yield from _plans_of(data, axis)


def _plans_of(data: pa.Table, axis: str) -> Iterator[Plan]:
    """The same for all models, at most as many to a figure as there are colours."""
    if axis != "depth" and len(distinct(data, "position")) < 2:
        return
    metric, first, other = (distinct(data, name)[0] for name in ("metric", "first", "other"))
    over = "depth" if axis == "depth" else "training"
    models = distinct(data, "model")
    for number, some in enumerate(in_chunks(models, len(PALETTE))):
        part = f" ({number + 1})" if len(models) > len(PALETTE) else ""
        yield Plan(
            name=f"difference-{metric}-over-{over}{part}",
            section="difference",
            title=f"{metric} over {over}: {other} less {first}{part}",
            data=partial(data.filter, among("model", some)),
            draw=partial(draw_difference, axis=axis),
            caption=captions.difference_caption,
        )


def _training_axis(*tables: pa.Table) -> str:
    """Steps, unless some are unknown or start again in every stage."""
    stages = {name for table in tables for name in distinct(table, "stage")}
    steps = {step for table in tables for step in distinct(table, "step")}
    return "checkpoint" if None in steps or len(stages) > 1 else "step"
