"""Which rows of a run a figure is made of: plain states, one setting a checkpoint, groups and parts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.columns import SCHEMA
from anisoscope.grouping import group_rows

# Dimensions at given scales, which have a figure of their own.
GRIDE = r"gride_\d+"


def plain_states(table: pa.Table) -> pa.Table:
    """Rows of states as they are: not of gradients, bins of tokens, variants, losses or matrices."""
    plain = pc.field("gradient").is_null() & pc.field("bin").is_null() & pc.field("variant").is_null()
    return table.filter(plain & (pc.field("site") != "output") & (pc.field("population") != "rows"))


_CHECKPOINT = ("model", "stage", "step", "revision")


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Rows of one unit a checkpoint, and how many units were passed over."""

    table: pa.Table
    others: int

    def counted(self, caption: Callable[[pa.Table], str]) -> Callable[[pa.Table], str]:
        """The caption, and a word on units that are not shown."""
        if not self.others:
            return caption
        units = f"{self.others} unit{'s' if self.others > 1 else ''}"
        return lambda data: (
            f"{caption(data)} Not shown: {units} of the same checkpoints under other settings or versions."
        )


def one_setting(rows: pa.Table) -> Chosen:
    """Of each checkpoint the unit with the latest version of the metric and most points; of equals the first key."""
    sums = rows.group_by([*_CHECKPOINT, "key"]).aggregate([("points", "sum"), ("metric_version", "max")]).to_pylist()
    latest = max((unit["metric_version_max"] for unit in sums), default=0)
    best: dict[tuple[Any, ...], tuple[int, str]] = {}
    for unit in sorted(sums, key=lambda unit: unit["key"]):
        checkpoint = tuple(unit[name] for name in _CHECKPOINT)
        if unit["metric_version_max"] == latest and unit["points_sum"] > best.get(checkpoint, (-1, ""))[0]:
            best[checkpoint] = unit["points_sum"], unit["key"]
    keys = {key for _, key in best.values()}
    others = len({unit["key"] for unit in sums} - keys)
    return Chosen(table=rows.filter(among("key", list(keys))) if others else rows, others=others)


def checkpoints_of(rows: pa.Table) -> list[dict[str, Any]]:
    """Every checkpoint of every model, once."""
    return rows.group_by(list(_CHECKPOINT)).aggregate([]).to_pylist()


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that share some columns."""

    names: dict[str, Any]
    table: pa.Table


def groups_of(rows: pa.Table, *names: str) -> Iterator[Group]:
    """Rows that share these columns, in the order in which they come."""
    groups = group_rows(rows, names)
    # One selection for all: each would go through every chunk of the table.
    ordered = rows.take(groups.order)
    for found, place in groups.slices():
        yield Group(
            names=dict(zip(names, found, strict=True)), table=ordered.slice(place.start, place.stop - place.start)
        )


def among(column: str, names: Iterable[Any]) -> Any:
    """The filter for rows whose column is one of these."""
    # Arrow would not know the type of no names.
    return pc.field(column).isin(pa.array(list(names), SCHEMA.field(column).type))


def distinct(table: pa.Table, column: str) -> list[Any]:
    """What stands in a column, each once, in the order in which it comes."""
    return table[column].unique().to_pylist()


def in_order(populations: Iterable[str]) -> list[str]:
    """Populations in the order in which figures show them."""
    places = {name: place for place, name in enumerate(("all", "typical", "types", "matched", "content"))}
    return sorted(populations, key=lambda name: (places.get(name, len(places)), name))


def in_chunks(names: Sequence[Any], size: int) -> list[list[Any]]:
    """Names in parts of at most `size`."""
    return [list(names[start : start + size]) for start in range(0, len(names), size)]
