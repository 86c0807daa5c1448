"""Several runs, number by number: what each has, and the others less the first."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from anisoscope.records import site_order
from anisoscope.report.reading import Run
from anisoscope.store import name_trainings

# What makes two numbers the same number of two runs.
_IDENTITY = (
    *("model", "revision", "stage", "step", "kind", "corpus", "stack", "site", "metric", "population"),
    *("control", "gradient", "proxy", "rank", "bin", "variant"),
)
# A run that has one of these and another run that has another one are compared all the same, and it is said.
_MAY_DIFFER = ("model", "revision", "stage", "step", "kind", "corpus")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Another run against the first."""

    first: str
    other: str
    matched: tuple[str, ...]
    """What differs between the runs as a whole: `corpus: pydoc and enwik8`."""
    rows: pa.Table
    """A row for each number that both have: identity, value and spread of both, difference, paired spread."""
    figures: tuple[Any, ...] = ()
    """`figures.Figure` of the difference, of what both have at the same blocks."""

    def summary(self) -> list[dict[str, Any]]:
        """A row for each metric and population: means over the places both have, and where they differ most."""
        groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for row in self.rows.to_pylist():
            if not math.isnan(row["difference"]):
                groups[row["metric"], row["population"]].append(row)
        summaries = []
        for (metric, population), rows in sorted(groups.items()):
            largest = max(rows, key=lambda row: abs(row["difference"]))
            summaries.append(
                {
                    "metric": metric,
                    "population": population,
                    "places": len(rows),
                    "first": _mean([row["first"] for row in rows]),
                    "other": _mean([row["other"] for row in rows]),
                    "difference": _mean([row["difference"] for row in rows]),
                    "largest": largest["difference"],
                    "spread": largest["difference_spread"],
                    "at": largest["site"],
                    "step": largest["step"],
                }
            )
        return summaries


def compare(runs: Sequence[Run], *, drawn: bool = False) -> list[Comparison]:
    """Each later run against the first; `drawn` with figures."""
    found = [_compare(runs[0], other) for other in runs[1:]]
    return [_with_figures(one, runs[0], other) for one, other in zip(found, runs[1:], strict=True)] if drawn else found


def _with_figures(found: Comparison, one: Run, other: Run) -> Comparison:
    from anisoscope.figures import contrast

    return replace(found, figures=tuple(contrast(one.table, other.table, names=(one.name, other.name))))


def _compare(one: Run, other: Run) -> Comparison:
    left, right = ([*name_trainings(run.table).to_pylist()] for run in (one, other))
    matched, loose = [], set()
    for name in _MAY_DIFFER:
        here, there = ({row[name] for row in rows} for rows in (left, right))
        if len(here) == len(there) == 1 and here != there:
            loose.add(name)
            matched.append(f"{name}: {_only(here)} and {_only(there)}")
    names = [name for name in _IDENTITY if name not in loose]
    known = {tuple(row[name] for name in names): row for row in left}
    found = []
    for row in right:
        twin = known.get(tuple(row[name] for name in names))
        if twin is not None:
            found.append(
                {**{name: row[name] for name in _IDENTITY}, **_difference(twin, row, paired="corpus" not in loose)}
            )
    found.sort(key=lambda row: (row["metric"], row["population"], row["stack"] or "", site_order(row["site"])))
    schema = pa.schema(
        [
            *((name, one.table.schema.field(name).type) for name in _IDENTITY),
            *((name, pa.float64()) for name in _NUMBERS),
        ]
    )
    return Comparison(
        first=one.name, other=other.name, matched=tuple(matched), rows=pa.Table.from_pylist(found, schema=schema)
    )


_NUMBERS = ("first", "first_spread", "other", "other_spread", "difference", "difference_spread")


def _difference(twin: dict[str, Any], row: dict[str, Any], *, paired: bool) -> dict[str, float]:
    """`difference_spread` is over batches where both saw the same batches, else NaN."""
    spread = math.nan
    before, after = twin["values"] or (), row["values"] or ()
    if paired and len(before) == len(after) > 1 and twin["points"] == row["points"]:
        changes = [y - x for x, y in zip(before, after, strict=True) if x is not None and y is not None]
        changes = [change for change in changes if not math.isnan(change)]
        if len(changes) > 1:
            middle = _mean(changes)
            spread = math.sqrt(sum((change - middle) ** 2 for change in changes) / (len(changes) - 1))
    return {
        "first": twin["value"],
        "first_spread": twin["spread"],
        "other": row["value"],
        "other_spread": row["spread"],
        "difference": row["value"] - twin["value"],
        "difference_spread": spread,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _only(values: set[Any]) -> str:
    (value,) = values
    return "none" if value is None else str(value)
