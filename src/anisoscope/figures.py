"""What the figures show, as tables. Each figure is two functions: one that selects and shapes rows, one that draws.

    profile_data    a metric over depth, model beside model         The Shape of Learning, figure 1
    dynamics_data   its mean over the blocks as training goes on    figure 2
    steps_data      one model's profile at several steps            figures 3 and 4
    heatmap_data    every site at every checkpoint

All take the table of `Store.table()`. `corpus` and `keys` (of units) narrow it; corpora are never mixed, and a run that
holds one number under several settings is refused until `keys` chooses: nothing is averaged that was not asked for.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.errors import SpecError
from anisoscope.records import site_order
from anisoscope.revisions import training_order
from anisoscope.store import SCHEMA, name_trainings

AXES = ("step", "tokens", "checkpoint")
Row = dict[str, Any]

_WHO = ("model", "revision", "stage", "step", "tokens", "checkpoint", "kind", "stack", "corpus", "population", "metric")
_NUMBERS = ("value", "spread", "low", "high", "null", "batches", "suspect")
_PROFILE = (*_WHO, "site", "block", "depth", *_NUMBERS, "points")
_DYNAMICS = (*_WHO, "position", "label", "blocks", *_NUMBERS, "loss", "loss_spread")
_HEATMAP = (*_WHO, "label", "site", "place", "depth", *_NUMBERS, "points")
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
}
# One number of a run, and what may set two of them apart.
_NUMBER = ("model", "revision", "stage", "step", "stack", "corpus", "population", "metric", "site")
_SETTINGS = ("key", "control", "gradient", "proxy", "rank", "bin", "variant")
# Names an error lists before it counts the rest.
_LISTED = 8


def profile_data(
    table: pa.Table,
    *,
    metric: str = "leading_variance",
    populations: Sequence[str] = ("all", "typical"),
    steps: Collection[int] | None = None,
    corpus: str | None = None,
    keys: Collection[str] | None = None,
) -> pa.Table:
    """A metric over the depth of several models: a row per block, at each model's last checkpoint or at given steps.

    `low` and `high` are value ∓ spread, NaN where there was one batch.
    """
    rows = _blocks(_select(table, metric=metric, populations=populations, corpus=corpus, keys=keys))
    if steps is not None:
        rows = _at_steps(rows, steps)
    else:
        last: dict[tuple[str, str], int] = {}
        for row in rows:
            series = row["model"], row["corpus"]
            last[series] = max(row["checkpoint"], last.get(series, 0))
        rows = [row for row in rows if row["checkpoint"] == last[row["model"], row["corpus"]]]
    return _table(rows, _PROFILE)


def dynamics_data(
    table: pa.Table,
    *,
    metric: str = "twonn",
    populations: Sequence[str] = ("all", "types"),
    axis: str = "step",
    corpus: str | None = None,
    keys: Collection[str] | None = None,
) -> pa.Table:
    """A metric averaged over the blocks, stack by stack, as training goes on: a row per checkpoint.

    value     mean over the blocks that have a number; `blocks` says how many
    spread    standard deviation over batches of the batch's mean over those blocks; the same batch is the same tokens
              at every block, so what blocks share stays in. Batches where one of them has no number are left out
    null      mean of the blocks' nulls
    loss      of the same unit, so on the same text; none where it was not measured
    position  log10 of the step or of the tokens; zero stands one decade left of the smallest positive one, the same
              place for all models. With axis="checkpoint" the index in the training, for series without steps
    label     for the tick: 0, 512, 143k, 2.1B; with axis="checkpoint" the revision
    """
    if axis not in AXES:
        raise SpecError(f"axis is one of {', '.join(AXES)}; came {axis!r}")
    losses = {
        row["key"]: {"loss": row["value"], "loss_spread": row["spread"]}
        for row in table.filter((pc.field("site") == "output") & (pc.field("metric") == "loss")).to_pylist()
    }
    rows = _blocks(_select(table, metric=metric, populations=populations, corpus=corpus, keys=keys))
    means = []
    for _, group in groupby(rows, key=lambda row: (*_series(row), row["stack"])):
        blocks = list(group)
        if len({row["key"] for row in blocks}) > 1:
            raise SpecError(_several_settings(blocks[0], next(r for r in blocks if r["key"] != blocks[0]["key"])))
        means.append({**blocks[0], **_mean_over_blocks(blocks), **losses.get(blocks[0]["key"], {})})
    return _table(_along(means, axis), _DYNAMICS)


def steps_data(
    table: pa.Table,
    *,
    model: str,
    metric: str = "leading_variance",
    population: str = "all",
    steps: Collection[int] | None = None,
    most: int = 8,
    corpus: str | None = None,
    keys: Collection[str] | None = None,
) -> pa.Table:
    """Profiles of one model at several steps: those asked, or at most `most`, evenly spaced in the logarithm.

    The first and the last are always among them. Where a training has several stages, or no steps, checkpoints are
    spaced evenly by their index; where only some steps are known, as beside a `main`, the others are left out.
    """
    rows = _blocks(_select(table, model=model, metric=metric, populations=[population], corpus=corpus, keys=keys))
    if steps is not None:
        rows = _at_steps(rows, steps)
    else:
        if most < 2:
            raise SpecError(f"the first and the last step are always shown: most is at least 2; came {most}")
        rows = [row for row in rows if row["step"] is not None] or rows
        chosen = _spaced(rows, most)
        rows = [row for row in rows if row["checkpoint"] in chosen]
    return _table(_labelled(rows), (*_PROFILE, "label"))


def heatmap_data(
    table: pa.Table,
    *,
    model: str,
    metric: str,
    population: str,
    corpus: str | None = None,
    keys: Collection[str] | None = None,
) -> pa.Table:
    """Every site at every checkpoint of one model: `place` follows a token's way, `checkpoint` the training."""
    rows = _select(table, model=model, metric=metric, populations=[population], corpus=corpus, keys=keys)
    sites = sorted({(row["stack"], row["site"]) for row in rows}, key=lambda site: _way(*site))
    places = {site: place for place, site in enumerate(sites)}
    placed = [{**row, "place": places[row["stack"], row["site"]]} for row in rows]
    return _table(_labelled(placed), _HEATMAP)


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


def _select(
    table: pa.Table,
    *,
    metric: str,
    populations: Sequence[str],
    corpus: str | None,
    keys: Collection[str] | None,
    model: str | None = None,
) -> list[Row]:
    """What was asked for, each number once, in the order of models, training, populations and a token's way."""
    table = name_trainings(table)
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
        there = set(table[column].to_pylist())
        if missing := [name for name in names if name not in there]:
            raise SpecError(f"wanted {column} {_listed(missing)}; there is {_listed(there)}")
        table = table.filter(pc.field(column).isin(list(names)))
    rows = table.to_pylist()
    if len(versions := {row["metric_version"] for row in rows}) > 1:
        raise SpecError(
            f"this run holds {metric} in versions {_listed(versions)}, which are different numbers; choose with keys="
        )
    first: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        twin = first.setdefault(tuple(row[name] for name in _NUMBER), row)
        if twin is not row:
            raise SpecError(_several_settings(twin, row))
    order = list(populations)
    _number_checkpoints(rows)
    return sorted(
        rows,
        key=lambda row: (
            *_series(row)[:3],
            order.index(row["population"]),
            *_way(row["stack"], row["site"]),
        ),
    )


def _several_settings(one: Row, other: Row) -> str:
    differences = [f"{name} {one[name]} and {other[name]}" for name in _SETTINGS if one[name] != other[name]]
    return (
        f"this run holds several settings: {one['metric']} [{one['population']}] of {_checkpoint_name(one)} on "
        f"{one['corpus']} is there at {one['site']} and again at {other['site']} ({'; '.join(differences)}). Choose "
        "units with keys=; Store.get(key).spec tells a unit's settings"
    )


def _series(row: Row) -> tuple[str, int, str, str]:
    return row["model"], row["checkpoint"], row["corpus"], row["population"]


def _way(stack: str | None, site: str) -> tuple[int, str, tuple[int, int, str]]:
    """Sort key of a token's way: through the encoder, then the decoder, then out."""
    return {"encoder": 0, "decoder": 1}.get(stack or "", 2), stack or "", site_order(site)


def _checkpoint_name(row: Row) -> str:
    return row["model"] if row["revision"] is None else f"{row['model']}@{row['revision']}"


def _number_checkpoints(rows: Iterable[Row]) -> None:
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


def _blocks(rows: Sequence[Row]) -> list[Row]:
    blocks = [{**row, "block": site_order(row["site"])[1]} for row in rows if row["depth"] is not None]
    if not blocks:
        raise SpecError(f"wanted blocks; {rows[0]['metric']} is there at {_listed({row['site'] for row in rows})}")
    return blocks


def _at_steps(rows: Sequence[Row], steps: Collection[int]) -> list[Row]:
    there = {row["step"] for row in rows} - {None}
    if missing := [step for step in steps if step not in there]:
        raise SpecError(f"wanted step {_listed(missing)}; there is {_listed(there)}")
    return [row for row in rows if row["step"] in set(steps)]


def _mean_over_blocks(blocks: Sequence[Row]) -> Row:
    # A block without any number must not empty every batch.
    known = [row for row in blocks if not math.isnan(row["value"])]
    batches = np.array([row["values"] for row in known], dtype=float)
    means = batches.mean(axis=0) if known else np.array([])
    means = means[~np.isnan(means)]
    nulls = [row["null"] for row in known if not math.isnan(row["null"])]
    return {
        "value": _mean([row["value"] for row in known]),
        "spread": float(means.std(ddof=1)) if means.size > 1 else math.nan,
        "null": _mean(nulls),
        "blocks": len(known),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _along(rows: Sequence[Row], axis: str) -> list[Row]:
    """Rows with their position and label on the axis."""
    if axis == "checkpoint":
        return [
            {**row, "position": float(row["checkpoint"]), "label": row["revision"] or str(row["checkpoint"])}
            for row in rows
        ]
    unknown = {row["model"]: _checkpoint_name(row) for row in rows if row[axis] is None}
    if unknown:
        raise SpecError(
            f"wanted {axis} for the axis; not known of {_listed(unknown)}, as at {next(iter(unknown.values()))}. "
            "They are never guessed: leave those rows out of the table, or use axis='checkpoint'"
        )
    position = _log_position(row[axis] for row in rows)
    return [{**row, "position": position(row[axis]), "label": count_label(row[axis])} for row in rows]


def _log_position(counts: Iterable[int]) -> Callable[[int], float]:
    """log10, with one place for zero in the whole figure, so that no other model's numbers stand there."""
    smallest = min((count for count in counts if count > 0), default=10)
    zero = math.log10(smallest) - 1
    return lambda count: math.log10(count) if count > 0 else zero


def _spaced(rows: Sequence[Row], most: int) -> set[int]:
    """Checkpoints that lie nearest to even spacing."""
    checkpoints = {row["checkpoint"]: row for row in rows}
    if len(checkpoints) <= most:
        return set(checkpoints)
    numbers = sorted(checkpoints)
    places = np.arange(len(numbers), dtype=float)
    steps = [checkpoints[number]["step"] for number in numbers]
    if None not in steps and len({row["stage"] for row in checkpoints.values()}) == 1:
        places = np.array(list(map(_log_position(steps), steps)))
    evenly = np.linspace(places[0], places[-1], most)
    return {numbers[int(np.abs(places - place).argmin())] for place in evenly}


def _labelled(rows: Iterable[Row]) -> list[Row]:
    return [
        {**row, "label": (row["revision"] or "") if row["step"] is None else count_label(row["step"])} for row in rows
    ]


def _table(rows: Iterable[Row], columns: Sequence[str]) -> pa.Table:
    bounded = [{**row, "low": row["value"] - row["spread"], "high": row["value"] + row["spread"]} for row in rows]
    schema = pa.schema([(name, _ADDED[name] if name in _ADDED else SCHEMA.field(name).type) for name in columns])
    return pa.Table.from_pylist(bounded, schema=schema)


def _listed(names: Iterable[Any]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return ", ".join(map(str, listed[:_LISTED])) + more or "nothing"
