"""Rows of a run's table as a figure needs them: each number once, in order, with its place on the axes."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.errors import SpecError
from anisoscope.records import POPULATIONS, site_order
from anisoscope.revisions import training_order
from anisoscope.store import SCHEMA, name_trainings

AXES = ("step", "tokens", "checkpoint")
Row = dict[str, Any]

WHO = ("model", "revision", "stage", "step", "tokens", "checkpoint", "kind", "stack", "corpus", "population", "metric")
NUMBERS = ("value", "spread", "low", "high", "null", "batches", "suspect")
_ADDED = {
    "checkpoint": pa.int64(),  # its index in the training, counted in each model
    "block": pa.int64(),
    "blocks": pa.int64(),
    "place": pa.int64(),
    "low": pa.float64(),
    "high": pa.float64(),
    "position": pa.float64(),
    "label": pa.string(),
    "loss": pa.float64(),
    "loss_spread": pa.float64(),
    "seq_len": pa.int64(),
    "scale": pa.int64(),
    "through": pa.string(),
    "exponent": pa.float64(),
    "log10_frequency": pa.float64(),
    "quantity": pa.string(),
    "significant": pa.int64(),
    "first": pa.string(),
    "other": pa.string(),
    "first_value": pa.float64(),
    "other_value": pa.float64(),
}
# One number of a run, and what may set two of them apart.
_NUMBER = ("model", "revision", "stage", "step", "stack", "corpus", "population", "metric", "site")
_SETTINGS = ("key", "control", "gradient", "proxy", "rank", "bin", "variant")
# Columns that no figure of states shows.
_UNUSED = ("note", "seconds", "dim", "dropped", "excluded", "control_value", "p", "low", "high")
# Names an error lists before it counts the rest.
_LISTED = 8


def count_label(count: int) -> str:
    """A count of steps or tokens as a tick shows it.

    >>> [count_label(count) for count in (0, 512, 1000, 143_000, 2_097_152_000)]
    ['0', '512', '1k', '143k', '2.1B']
    """
    for scale, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        # What three digits would round up to the next letter is written with that letter.
        if count >= 0.9995 * scale:
            return f"{count / scale:.3g}{letter}"
    return str(count)


def select_rows(
    table: pa.Table,
    *,
    metric: str,
    populations: Sequence[str] | None,
    corpus: str | None,
    keys: Collection[str] | None,
    model: str | None = None,
    batches: bool = False,
) -> list[Row]:
    """What was asked for, each number once, in the order of models, training, populations and a token's way.

    `batches`: with the values of every batch, which cost more than all the rest.
    """
    unused = _UNUSED if batches else (*_UNUSED, "values")
    shown = [name for name in table.column_names if name in SCHEMA.names and name not in unused]
    table = name_trainings(table.select(shown))
    wanted = {
        "key": keys,
        "model": None if model is None else [model],
        "corpus": None if corpus is None else [corpus],
        "metric": [metric],
        "population": populations,
    }
    for column, names in wanted.items():
        if names is None:
            continue
        there = set(table[column].unique().to_pylist())
        if missing := [name for name in names if name not in there]:
            raise SpecError(f"wanted {column} {listed(missing)}; there is {listed(there)}")
        table = table.filter(pc.field(column).isin(list(names)))
    rows = table.to_pylist()
    if len(versions := {row["metric_version"] for row in rows}) > 1:
        raise SpecError(
            f"this run holds {metric} in versions {listed(versions)}, which are different numbers; choose with keys="
        )
    first: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        twin = first.setdefault(tuple(row[name] for name in _NUMBER), row)
        if twin is not row:
            raise SpecError(several_settings(twin, row))
    order = list(POPULATIONS if populations is None else populations)
    order += sorted({row["population"] for row in rows} - set(order))
    number_checkpoints(rows)
    return sorted(
        rows,
        key=lambda row: (
            *series_of(row)[:3],
            order.index(row["population"]),
            *way_of(row["stack"], row["site"]),
        ),
    )


def several_settings(one: Row, other: Row) -> str:
    """The sentence that refuses two numbers for one place."""
    differences = [f"{name} {one[name]} and {other[name]}" for name in _SETTINGS if one[name] != other[name]]
    return (
        f"this run holds several settings: {one['metric']} [{one['population']}] of {checkpoint_name(one)} on "
        f"{one['corpus']} is there at {one['site']} and again at {other['site']} ({'; '.join(differences)}). Choose "
        "units with keys=; Store.get(key).spec tells a unit's settings"
    )


def series_of(row: Row) -> tuple[str, int, str, str]:
    """What rows of one cloud share."""
    return row["model"], row["checkpoint"], row["corpus"], row["population"]


# A run has few sites and many rows.
@cache
def way_of(stack: str | None, site: str) -> tuple[int, str, tuple[int, int, str]]:
    """Sort key of a token's way: through the encoder, then the decoder, then out."""
    return {"encoder": 0, "decoder": 1}.get(stack or "", 2), stack or "", site_order(site)


def checkpoint_name(row: Row) -> str:
    """How people call it."""
    return row["model"] if row["revision"] is None else f"{row['model']}@{row['revision']}"


def number_checkpoints(rows: Iterable[Row]) -> None:
    """Tell each row which checkpoint of its model it belongs to: 0, 1, 2 ... in the order of training."""
    trainings: dict[str, set[tuple[Any, ...]]] = {}
    for row in rows:
        trainings.setdefault(row["model"], set()).add((row["stage"], row["step"], row["revision"]))
    index = {
        (model, *checkpoint): number
        for model, checkpoints in trainings.items()
        for number, checkpoint in enumerate(sorted(checkpoints, key=lambda place: training_order(*place)))
    }
    for row in rows:
        row["checkpoint"] = index[row["model"], row["stage"], row["step"], row["revision"]]


def blocks_of(rows: Sequence[Row]) -> list[Row]:
    """The rows of blocks, numbered; refused where there is none."""
    blocks = [{**row, "block": way_of(None, row["site"])[2][1]} for row in rows if row["depth"] is not None]
    if not blocks:
        raise SpecError(f"wanted blocks; {rows[0]['metric']} is there at {listed({row['site'] for row in rows})}")
    return blocks


def at_steps(rows: Sequence[Row], steps: Collection[int]) -> list[Row]:
    """The rows of these steps; refused where one is not there."""
    there = {row["step"] for row in rows} - {None}
    if missing := [step for step in steps if step not in there]:
        raise SpecError(f"wanted step {listed(missing)}; there is {listed(there)}")
    return [row for row in rows if row["step"] in set(steps)]


def at_last_checkpoint(rows: Sequence[Row]) -> list[Row]:
    """The rows of each model's last checkpoint, corpus by corpus."""
    last: dict[tuple[str, str], int] = {}
    for row in rows:
        series = row["model"], row["corpus"]
        last[series] = max(row["checkpoint"], last.get(series, 0))
    return [row for row in rows if row["checkpoint"] == last[row["model"], row["corpus"]]]


def mean_over_blocks(blocks: Sequence[Row]) -> Row:
    """Value, spread and null of the mean over blocks that have a number."""
    # A block without any number must not empty every batch.
    known = [row for row in blocks if not math.isnan(row["value"])]
    batches = np.array([row["values"] for row in known], dtype=float)
    means = batches.mean(axis=0) if known else np.array([])
    means = means[~np.isnan(means)]
    nulls = [row["null"] for row in known if not math.isnan(row["null"])]
    return {
        "value": mean_of([row["value"] for row in known]),
        "spread": float(means.std(ddof=1)) if means.size > 1 else math.nan,
        "null": mean_of(nulls),
        "blocks": len(known),
    }


def mean_of(values: Sequence[float]) -> float:
    """Their mean; NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def place_along(rows: Sequence[Row], axis: str) -> list[Row]:
    """Rows with their position and label on the axis."""
    if axis == "checkpoint":
        return [
            {**row, "position": float(row["checkpoint"]), "label": row["revision"] or str(row["checkpoint"])}
            for row in rows
        ]
    unknown = {row["model"]: checkpoint_name(row) for row in rows if row[axis] is None}
    if unknown:
        raise SpecError(
            f"wanted {axis} for the axis; not known of {listed(unknown)}, as at {next(iter(unknown.values()))}. "
            "They are never guessed: leave those rows out of the table, or use axis='checkpoint'"
        )
    position = log_position(row[axis] for row in rows)
    return [{**row, "position": position(row[axis]), "label": count_label(row[axis])} for row in rows]


def log_position(counts: Iterable[int]) -> Callable[[int], float]:
    """log10, with one place for zero in the whole figure, so that no other model's numbers stand there."""
    smallest = min((count for count in counts if count > 0), default=10)
    zero = math.log10(smallest) - 1
    return lambda count: math.log10(count) if count > 0 else zero


def spaced_checkpoints(rows: Sequence[Row], most: int) -> set[int]:
    """Checkpoints that lie nearest to even spacing."""
    checkpoints = {row["checkpoint"]: row for row in rows}
    if len(checkpoints) <= most:
        return set(checkpoints)
    numbers = sorted(checkpoints)
    places = np.arange(len(numbers), dtype=float)
    steps = [checkpoints[number]["step"] for number in numbers]
    if None not in steps and len({row["stage"] for row in checkpoints.values()}) == 1:
        places = np.array(list(map(log_position(steps), steps)))
    evenly = np.linspace(places[0], places[-1], most)
    return {numbers[int(np.abs(places - place).argmin())] for place in evenly}


def with_labels(rows: Iterable[Row]) -> list[Row]:
    """Rows with a `label`: the step in short, or the revision where there is none."""
    return [
        {**row, "label": (row["revision"] or "") if row["step"] is None else count_label(row["step"])} for row in rows
    ]


def table_of(rows: Iterable[Row], columns: Sequence[str], *, own_intervals: bool = False) -> pa.Table:
    """Rows as a table; `low` and `high` are value ∓ spread, unless rows have intervals of their own."""
    if not own_intervals:
        rows = [{**row, "low": row["value"] - row["spread"], "high": row["value"] + row["spread"]} for row in rows]
    schema = pa.schema([(name, _ADDED[name] if name in _ADDED else SCHEMA.field(name).type) for name in columns])
    return pa.Table.from_pylist(list(rows), schema=schema)


def listed(names: Iterable[Any]) -> str:
    """The first of them in order, and how many more there are."""
    found = sorted(names)
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return ", ".join(map(str, found[:_LISTED])) + more or "nothing"
