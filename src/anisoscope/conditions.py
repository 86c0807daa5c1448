"""Gates: `leading_variance[block.*] >= .9 for 3` -> where that is so at the last checkpoints of a run.

    METRIC [ SITE , POPULATION , WORD ... ] OPERATOR NUMBER for N

SITE may hold `*`. Where no POPULATION is named it is `all`, or those that there are where a metric is not measured on
all tokens. OPERATOR is one of > >= < <=, and N, 1 where left out, the number of last checkpoints at which it must be
so. WORDs choose among rows of one metric and site: a gradient, a proxy, a part of the variant, `bin=0`. Without them
bins of frequency, splits of a number and numbers of another kind (`of=mean`) are left out.
"""

import fnmatch
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from anisoscope.columns import SERIES_SETTINGS
from anisoscope.errors import SpecError
from anisoscope.records import POPULATIONS, Record, site_order
from anisoscope.revisions import training_order

_OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_PLACE = r"""\s* (?P<metric>\w+) \s*
    \[ \s* (?P<site>[^\[\],\s]+) \s*
    (?: , \s* (?P<population>\w+) \s* (?P<words> (?: , \s* [\w=.+-]+ \s* )* ) )? \] \s*"""
_CONDITION = re.compile(
    _PLACE
    + r"""(?P<operator>[<>]=?) \s*
    (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)
    (?: \s+ for \s+ (?P<checkpoints>\d+) )? \s*""",
    re.VERBOSE | re.IGNORECASE,
)
# Rows that differ in one of these are different series.
_SERIES = ("run", "model", "corpus", "stack", "site", "population", "gradient", "proxy", "rank", "bin", "variant")


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A bound on a metric, at sites and in a population."""

    metric: str
    site: str
    """A name, or a pattern with `*`."""
    population: str | None = None
    operator: str
    number: float
    checkpoints: int = 1
    """How many of the last checkpoints must satisfy it."""
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        lasting = f" for {self.checkpoints}" if self.checkpoints > 1 else ""
        place = ",".join([self.site, *filter(None, [self.population]), *self.words])
        return f"{self.metric}[{place}] {self.operator} {self.number:g}{lasting}"

    def holds(self, value: float) -> bool:
        """Whether one value satisfies it; NaN never does."""
        return bool(_OPERATORS[self.operator](value, self.number))

    def concerned(self, rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The rows that it is about."""
        known = [
            row
            for row in rows
            if row["metric"] == self.metric
            and fnmatch.fnmatchcase(row["site"], self.site)
            and (set(self.words) <= _words_of(row) if self.words else _is_plain(row))
        ]
        mine = [row for row in known if row["population"] == (self.population or "all")]
        return mine if mine or self.population else known

    def matches(self, table: pa.Table) -> list[Mapping[str, Any]]:
        """The last row of each series that satisfies it at its last checkpoints; a shorter series never does.

        A series is a model on a corpus at a site under one setting (tokens, window ...); its checkpoints are those
        where it was measured, in the order of training. A checkpoint measured more than once satisfies it if any of its
        values does. A table without rows that the condition is about is an error: such a gate would never close.
        """
        rows = self.concerned(table.to_pylist())
        if not rows:
            raise SpecError(self._nothing_concerned(table))
        names = [*_SERIES, *(name for name in SERIES_SETTINGS if name in table.column_names)]
        series: dict[tuple, dict[tuple, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            place = training_order(row["stage"], row["step"], row["revision"])
            series[tuple(row[name] for name in names)][place].append(row)
        found = []
        for checkpoints in series.values():
            last = [checkpoints[place] for place in sorted(checkpoints)[-self.checkpoints :]]
            so = [[row for row in rows if self.holds(row["value"])] for rows in last]
            if len(last) == self.checkpoints and all(so):
                found.append(so[-1][0])
        return sorted(found, key=lambda row: (row["model"], row["corpus"], row["stack"] or "", site_order(row["site"])))

    def _nothing_concerned(self, table: pa.Table) -> str:
        measured = {
            f"{name}s": ", ".join(sorted(set(table[name].to_pylist()), key=key)) or "none"
            for name, key in (("metric", None), ("site", site_order), ("population", None))
        }
        there = "; ".join(f"{name}: {values}" for name, values in measured.items())
        return f"no measured value is concerned by {self}; measured were {there}"


def _words_of(row: Mapping[str, Any]) -> set[str]:
    """What tells a row from others of its metric, site and population."""
    numbered = [] if row["bin"] is None else [f"bin={row['bin']}"]
    return {*numbered, *filter(None, (row["gradient"], row["proxy"], *(row["variant"] or "").split(";")))}


def _is_plain(row: Mapping[str, Any]) -> bool:
    variant = row["variant"] or ""
    return row["bin"] is None and ";" not in variant and not variant.startswith("of=")


def place_of(row: Mapping[str, Any]) -> str:
    """Where a row is, with all that tells it from others.

    >>> place_of({"site": "block.3", "gradient": "virtual", "proxy": "pca", "variant": "mean=in", "bin": None})
    'block.3 (mean=in, pca, virtual)'
    """
    words = ", ".join(sorted(_words_of(row)))
    return f"{row['site']} ({words})" if words else row["site"]


class Gate:
    """A condition on a training that is watched: for how many measured steps in a row has it held at each site?"""

    def __init__(self, condition: Condition, *, stops: bool) -> None:
        self.condition, self.stops = condition, stops
        self._held: dict[tuple, int] = {}

    def closes(self, records: Iterable[Record]) -> list[str] | None:
        """Sites where, with the records of one more step, it has held long enough; None where none is concerned."""
        mine = self.condition.concerned([vars(row) for row in records])
        for row in mine:
            place = place_of(row), row["population"], row["stack"]
            self._held[place] = self._held.get(place, 0) + 1 if self.condition.holds(row["value"]) else 0
        closed = [where for (where, *_), times in self._held.items() if times >= self.condition.checkpoints]
        return list(dict.fromkeys(closed)) if mine else None


def parse_place(text: str) -> tuple[str, str, str]:
    """Metric, site and population of `METRIC[SITE]` or `METRIC[SITE,POPULATION]`."""
    found = re.fullmatch(_PLACE, text, re.VERBOSE)
    if found is None or found["words"]:
        raise SpecError(
            f"wanted METRIC[SITE] or METRIC[SITE,POPULATION], such as 'isoscore[final_norm]'; came {text!r}"
        )
    return found["metric"], found["site"], found["population"] or "all"


def parse(text: str) -> Condition:
    """A condition from its text.

    >>> parse("twonn[block.3, types] <= 2 for 3")
    Condition(metric='twonn', site='block.3', population='types', operator='<=', number=2.0, checkpoints=3, words=())
    """
    wanted = "a condition reads METRIC[SITE] > NUMBER or METRIC[SITE,POPULATION] > NUMBER for CHECKPOINTS"
    example = "for example 'leading_variance[final_norm] > 0.9' or 'twonn[block.*,types] <= 2 for 3'"
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise SpecError(f"{wanted}, with one of > >= < <=; came {text!r}; {example}")
    condition = Condition(
        metric=found["metric"],
        site=found["site"],
        population=found["population"],
        operator=found["operator"],
        number=float(found["number"]),
        checkpoints=int(found["checkpoints"] or 1),
        words=tuple(word.strip() for word in (found["words"] or "").split(",") if word.strip()),
    )
    if condition.population not in (None, *POPULATIONS):
        raise SpecError(f"POPULATION must be one of {', '.join(POPULATIONS)}; came {text!r}; {example}")
    if condition.checkpoints < 1:
        raise SpecError(f"CHECKPOINTS must be 1 or more; came {text!r}; {example}")
    return condition
