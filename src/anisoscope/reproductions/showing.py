"""A reproduction for people: the plan with sizes, and the claims with their verdicts."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from anisoscope.listings import format_bytes
from anisoscope.printing import format_value, open_console
from anisoscope.reproductions.judging import Outcome
from anisoscope.reproductions.nouns import Paper

_STYLES = {
    "reproduced": "green",
    "not reproduced": "red",
    "present before training": "yellow",
    "inconclusive": "yellow",
    "not tested here": "dim",
}


def stand_in(size: str) -> str:
    """What the models of a size are, beside those of the paper."""
    if size == "paper":
        return "Models of the paper, as the hub has them."
    which = "small models that come with this package" if size == "pocket" else "small models trained here"
    return (
        f"These are {which}, not the paper's: a verdict is about them. What they show need not hold for larger models, "
        "and what they fail to show says little about the paper."
    )


def print_listed(paper: Paper, size: str, rows: Sequence[dict[str, Any]], corpora: Sequence[str]) -> None:
    """What would be measured, and how large it is."""
    console = open_console()
    table = Table(box=None, pad_edge=False)
    for name in ("model", "revision", "size"):
        table.add_column(name, justify="right" if name == "size" else "left", overflow="fold")
    table.add_column("", overflow="fold")
    for row in rows:
        large = "–" if row["bytes"] is None else format_bytes(row["bytes"])
        table.add_row(Text(row["model"]), Text(row["revision"]), large, Text(row["note"]))
    console.print(table)
    known = [row["bytes"] for row in rows if row["bytes"] is not None]
    told = f"{format_bytes(sum(known))} in {len(known)} of them" if known else "sizes unknown"
    console.print(Text(f"{len(rows)} entries, {told}; corpora: {', '.join(corpora)}"))
    if size == "paper" and paper.choices:
        console.print(Text(paper.choices))
    if any(corpus.startswith("hf:") for corpus in corpora):
        console.print(
            "A dataset of the hub is downloaded whole, and its size is not counted here; --corpus names another."
        )


def print_outcomes(paper: Paper, size: str, outcomes: Sequence[Outcome]) -> None:
    """One row a claim, population and view; then each claim in words."""
    console = open_console()
    console.print(Text(f"\n{paper.title}, size {size}", style="bold"))
    for sentence in (stand_in(size), paper.choices if size == "paper" else "", paper.caution):
        if sentence:
            console.print(Text(sentence))
    table = Table(box=None, pad_edge=False)
    for name in ("claim of the paper", "population", "looked at", "verdict", "effect", "interval", "corrected p"):
        table.add_column(name, justify="right" if name in ("effect", "interval", "corrected p") else "left")
    for claim, rows in groupby(outcomes, key=lambda one: one.claim):
        for place, one in enumerate(rows):
            table.add_row(
                Text("" if place else claim),
                one.population or "",
                Text(one.view),
                Text(one.verdict, style=_STYLES[one.verdict]),
                _effect(one),
                _interval(one),
                "" if one.population is None else format_value(one.p),
            )
    console.print(table)
    for claim, rows in groupby(outcomes, key=lambda one: one.claim):
        some = list(rows)
        console.print(Text(f"\n{claim}", style="bold"))
        console.print(Text(f"  predicted ({some[0].where}): {some[0].predicts}"))
        for _, same in groupby(some, key=lambda one: one.view):
            for one in _worth_words(list(same)):
                about = ", ".join(part for part in (one.population, one.view) if part)
                console.print(Text(f"  {one.verdict}{f' [{about}]' if about else ''}: {one.reason}"))
        for reading in some[0].readings:
            console.print(Text(f"  measured: {reading}"))


def _worth_words(rows: Sequence[Outcome]) -> list[Outcome]:
    """The first population, and those whose verdict is another; the numbers of all stand in the table."""
    return [rows[0], *(one for one in rows[1:] if one.verdict != rows[0].verdict)]


def _effect(one: Outcome) -> str:
    if one.population is None:
        return ""
    count = len(one.evidence)
    return format_value(one.effect) + (f" (median of {count})" if count > 1 and not math.isnan(one.effect) else "")


def _interval(one: Outcome) -> str:
    low, high = one.interval
    if one.population is None:
        return ""
    return "–" if math.isnan(low) else f"{format_value(low)} … {format_value(high)}"
