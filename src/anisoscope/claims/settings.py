"""Of a number that was measured under several settings, one setting is judged and the others are counted.

A setting is the combination of the columns in which result files differ: tokens, window, seed, rank and whatever else
`Store.table()` names. Blocks, checkpoints and metrics of different settings are never mixed in one test.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.columns import SERIES_SETTINGS
from anisoscope.grouping import Groups, group_rows

# What identifies a number besides its site and setting: a series over checkpoints, and the checkpoint.
_SERIES = ("model", "stack", "corpus", "population", "metric", "gradient", "proxy", "variant", "bin", "control")
_CHECKPOINT = ("stage", "step", "revision")
# What a verdict names.
_SUBJECT = ("model", "corpus", "metric", "population")


@dataclass(frozen=True, kw_only=True)
class OneSetting:
    """A table with one setting for each series and one result file for each of its checkpoints."""

    table: pa.Table
    judged: Mapping[tuple[str, ...], set[tuple[tuple[str, Any], ...]]]
    """By model, corpus, metric and population: the settings that were judged, of the columns that differ."""
    left_out: Mapping[tuple[str, ...], set[str]]
    """By the same: keys of result files that were not."""

    def notes(self, models: tuple[str, ...], place: tuple[str, str, str]) -> list[str]:
        """What a verdict on these models says about settings; nothing where there was no choice."""
        metrics, population, corpus = place
        about = [(model, corpus, metric, population) for model in models for metric in metrics.split("+")]
        left_out = set.union(set(), *(self.left_out.get(one, set()) for one in about))
        judged = set.union(set(), *(self.judged.get(one, set()) for one in about))
        texts = sorted(", ".join(f"{name} {value}" for name, value in setting) for setting in judged)
        notes = []
        if left_out:
            which = f" (judged: {'; '.join(text for text in texts)})" if any(texts) else ""
            files = f"{len(left_out)} result file{'s' if len(left_out) > 1 else ''}"
            notes.append(f"{files} of the same checkpoints under other settings left out{which}")
        elif len(texts) > 1:
            notes.append(f"its models were measured under different settings: {'; '.join(texts)}")
        return notes


def one_setting(table: pa.Table) -> OneSetting:
    """For each series the setting with most checkpoints, for each checkpoint one result file of that setting.

    Settings with as many checkpoints: the one that covers more of the model's numbers on that text, then the latest
    version, most points, most batches. Result files of one checkpoint and setting: the latest version, most points,
    most batches, the first key.
    """
    names = [name for name in SERIES_SETTINGS if name in table.column_names and len(table[name].unique()) > 1]
    if not table.num_rows:
        return OneSetting(table=table, judged={}, left_out={})
    columns = {name: table[name] for name in (*_SERIES, *_CHECKPOINT, "key")}
    columns |= {name: _plain_text(table[name]) for name in names}
    units = group_rows(pa.table(columns), tuple(columns))
    left_out_units = _left_out(table, units, names)
    left_out: dict[tuple[str, ...], set[str]] = defaultdict(set)
    judged: dict[tuple[str, ...], set[tuple]] = defaultdict(set)
    for *identity, key in _rows_of(units.keys.filter(pa.array(left_out_units)), (*_SUBJECT, "key")):
        left_out[tuple(identity)].add(key)
    for row in _rows_of(units.keys.filter(pa.array(~left_out_units)), (*_SUBJECT, *names)):
        judged[row[: len(_SUBJECT)]].add(tuple(zip(names, row[len(_SUBJECT) :], strict=True)))
    if left_out_units.any():
        kept = np.empty(table.num_rows, bool)
        kept[units.order] = ~np.repeat(left_out_units, units.sizes)
        table = table.filter(pa.array(kept))
    return OneSetting(table=table, judged=judged, left_out=left_out)


def _left_out(table: pa.Table, units: Groups, names: list[str]) -> np.ndarray:
    """Of each result file of each number at each checkpoint, whether another one is judged instead."""
    dropped = np.zeros(len(units.ends), bool)
    series = group_rows(units.keys, _SERIES)
    checkpoint = _labels(group_rows(units.keys, (*_SERIES, *_CHECKPOINT)))
    setting = _labels(group_rows(units.keys, names)) if names else np.zeros(len(dropped), int)
    covering = group_rows(units.keys, ("model", "corpus", *names))
    covered = covering.sizes[_labels(covering)]
    starts = np.concatenate([[0], series.ends[:-1]])
    repeated = np.bincount(checkpoint)[checkpoint] > 1
    several = np.maximum.reduceat(setting[series.order], starts) > np.minimum.reduceat(setting[series.order], starts)
    several |= np.logical_or.reduceat(repeated[series.order], starts)
    if not several.any():
        return dropped
    points, versions = (table[name].fill_null(0).to_numpy() for name in ("points", "metric_version"))
    lengths = pc.list_value_length(table["values"])  # pyright: ignore[reportAttributeAccessIssue]
    batches = lengths.fill_null(0).to_numpy()
    keys = units.keys["key"].to_pylist()
    texts = list(zip(*(units.keys[name].to_pylist() for name in names), strict=True)) if names else [()] * len(keys)

    def rank(unit: int) -> tuple[int, int, int]:
        rows = units.rows(unit)
        return -int(versions[rows].max()), -int(points[rows].sum()), -int(batches[rows].sum())

    for group in np.flatnonzero(several).tolist():
        found = series.rows(group).tolist()
        of_setting: dict[int, list[int]] = defaultdict(list)
        for unit in found:
            of_setting[int(setting[unit])].append(unit)
        orders = {
            label: (-len(set(checkpoint[some])), -covered[some[0]], min(map(rank, some)), repr(texts[some[0]]))
            for label, some in of_setting.items()
        }
        chosen = min(orders, key=lambda label: orders[label])
        best: dict[int, int] = {}
        for unit in sorted(of_setting[chosen], key=lambda unit: (rank(unit), keys[unit])):
            best.setdefault(checkpoint[unit], unit)
        dropped[found] = True
        dropped[list(best.values())] = False
    return dropped


def _labels(groups: Groups) -> np.ndarray:
    """The number of its group for every row."""
    labels = np.empty(len(groups.order), int)
    labels[groups.order] = np.repeat(np.arange(len(groups.ends)), groups.sizes)
    return labels


def _rows_of(table: pa.Table, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """The different rows of some columns."""
    return group_rows(table, columns).names() if table.num_rows else []


def _plain_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
