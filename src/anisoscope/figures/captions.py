"""Sentences that say what a figure shows, computed from its data."""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from anisoscope.figures.drawing import is_number, name_series
from anisoscope.figures.rows import Row, mean_of

# Lines that are described one by one; of more, only the extremes are.
_TOLD = 4


def say(value: float | None) -> str:
    """A number with three digits, as in running text.

    >>> [say(value) for value in (0.41234, -0.05, 12.346, 143_000.0, 0.0, float("nan"))]
    ['.412', '-.05', '12.3', '143,000', '0', 'unknown']
    """
    if not is_number(value):
        return "unknown"
    assert value is not None
    if value and not abs(value) >= 1e-4:
        return f"{value:.1e}"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def profile_caption(data: pa.Table) -> str:
    """Where each line peaks, what its ends are, and what chance gives."""
    rows = _numbers(name_series(data.to_pylist()))
    metric = rows[0]["metric"]
    sentences = []
    lines = _lines(rows, "population", "series")
    if len(lines) > _TOLD:
        return f"{metric} at the blocks: {_extremes(lines)}{_null(rows)}."
    for (population, series), line in lines.items():
        sentences.append(f"{metric} [{population}] of {series} {_course(line)}")
    return f"{'; '.join(sentences)}{_null(rows)}."


def steps_caption(data: pa.Table) -> str:
    """How the profile of the last step differs from that of the first."""
    rows = _numbers(data.to_pylist())
    lines = list(_lines(rows, "checkpoint").values())
    first, last = lines[0], lines[-1]
    who = f"{rows[0]['metric']} [{rows[0]['population']}] of {rows[0]['model']}"
    if len(lines) == 1:
        return f"{who} {_course(first)}{_null(rows)}."
    start, end = (f"at step {line[0]['label']}" for line in (first, last))
    return f"{who} {start} {_course(first)}; {end} it {_course(last)}{_null(last)}."


def populations_caption(data: pa.Table) -> str:
    """How far the peaks of populations lie apart."""
    rows = _numbers(data.to_pylist())
    lines = _lines(rows, "population")
    told = [f"{_course(line)} on {population[0]}" for population, line in lines.items()]
    return f"{rows[0]['metric']} of {rows[0]['model']} {'; '.join(told)}{_null(rows)}."


def dynamics_caption(data: pa.Table) -> str:
    """From where to where each line goes, and where it turns."""
    rows = _numbers(name_series(data.to_pylist()))
    metric, lines = rows[0]["metric"], _lines(rows, "population", "series")
    said = [f"[{population}] of {series} {_turns(line)}" for (population, series), line in lines.items()]
    if len(said) > _TOLD:
        ends = [line[-1]["value"] for line in lines.values()]
        rises = sum(line[-1]["value"] > line[0]["value"] for line in lines.values())
        return (
            f"{metric}, averaged over the blocks, ends between {say(min(ends))} and {say(max(ends))}; {rises} of "
            f"{len(lines)} lines end higher than they began{_null(rows)}."
        )
    return f"{metric}, averaged over the blocks: {'; '.join(said)}{_null(rows)}."


def difference_caption(data: pa.Table) -> str:
    """How large the difference is, where it is largest, and where it is larger than its spread."""
    rows, said = _numbers(name_series(data.to_pylist())), []
    several = len({row["series"] for row in rows}) > 1
    for (population, series), line in _lines(rows, "population", "series").items():
        top = max(line, key=lambda row: abs(row["value"]))
        where = top["site"] if "site" in top else f"step {top['label']}"
        beyond = sum(abs(row["value"]) > row["spread"] for row in line)
        known = sum(is_number(row["spread"]) for row in line)
        than = f", beyond its spread over batches at {beyond} of {known}" if known else ""
        who = f"[{population}] of {series}" if several else f"[{population}]"
        mean = say(mean_of([row["value"] for row in line]))
        said.append(f"{who} {mean} on average, farthest from 0 at {where} ({say(top['value'])}){than}")
    more = f"; and {len(said) - _TOLD} more lines" if len(said) > _TOLD else ""
    what = f"{rows[0]['metric']} of {rows[0]['other']} less that of {rows[0]['first']}"
    points = "blocks" if "site" in rows[0] else "checkpoints that both have, means of the blocks"
    return f"{what}, {len({_place(row) for row in rows})} {points}: {'; '.join(said[:_TOLD])}{more}."


def _place(row: Row) -> Any:
    return row["site"] if "site" in row else row["label"]


def heatmap_caption(data: pa.Table) -> str:
    """Where the smallest and the largest numbers stand."""
    rows = _numbers(data.to_pylist())
    low, high = (pick(rows, key=lambda row: row["value"]) for pick in (min, max))
    return (
        f"{rows[0]['metric']} [{rows[0]['population']}] of {rows[0]['model']} is largest at {high['site']}, step "
        f"{high['label']} ({say(high['value'])}), and smallest at {low['site']}, step {low['label']} "
        f"({say(low['value'])})."
    )


def stages_caption(data: pa.Table) -> str:
    """What the whole norm does to each metric."""
    rows = _numbers(name_series(data.to_pylist()))
    said = []
    for (metric, population, series), line in _lines(rows, "metric", "population", "series").items():
        ends = {row["through"]: row["value"] for row in line}
        before, after = (say(ends.get(name)) for name in ("last block", "final norm"))
        said.append(f"{metric} [{population}] of {series} goes from {before} to {after}")
    more = f"; and {len(said) - 2 * _TOLD} more" if len(said) > 2 * _TOLD else ""
    return f"From the last block through the final norm, {'; '.join(said[: 2 * _TOLD])}{more}."


def owners_caption(data: pa.Table) -> str:
    """The largest owner of all sites, and what first positions own."""
    rows = data.to_pylist()
    tokens, coordinates, firsts = (
        [row for row in rows if row["owner"] == owner] for owner in ("token", "coordinate", "first positions")
    )
    said = []
    for name, some in (("token", tokens), ("coordinate", coordinates)):
        if some:
            top = max(some, key=lambda row: row["share"])
            what = f"“{top['label']}”" if name == "token" else top["label"]
            said.append(f"the largest {name} is {what} at {top['site']} with {say(top['share'])}")
    first = max(firsts, key=lambda row: row["share"])
    said.append(f"first positions own at most {say(first['share'])} ({first['site']})")
    return f"Of the leading axis of {rows[0]['model']}, {'; '.join(said)}."


def embeddings_caption(data: pa.Table) -> str:
    """How far the cloud of rows lies from the origin along its first axis."""
    rows = data.to_pylist()
    raw = [row["x"] for row in rows if row["variant"] == "centred=no" and is_number(row["x"])]
    side = max(sum(x > 0 for x in raw), sum(x < 0 for x in raw)) / len(raw)
    return (
        f"{side:.0%} of {len(raw)} rows of {rows[0]['site']} of {rows[0]['model']} lie on one side of the origin along "
        f"the first singular vector; centring takes their common offset away.{_with_frequency(rows)}"
    )


def _with_frequency(rows: Iterable[Row]) -> str:
    """How places along the first singular vector go with frequency, raw and centred."""
    said = []
    for variant, name in (("centred=no", "raw"), ("centred=yes", "centred")):
        known = [(row["x"], row["log_frequency"]) for row in rows if row["variant"] == variant]
        pairs = np.array([pair for pair in known if all(map(is_number, pair))])
        if len({y for _, y in pairs}) > 1:
            ranks = [np.unique(values, return_inverse=True, return_counts=True)[1:] for values in pairs.T]
            # Equal numbers share the mean of their ranks.
            places = [(counts.cumsum() - (counts - 1) / 2)[inverse] for inverse, counts in ranks]
            said.append(f"{say(np.corrcoef(np.stack(places)).flat[1])} {name}")
    if not said:
        return ""
    return f" Places along it and log frequencies of tokens have rank correlations {' and '.join(said)}."


def scales_caption(data: pa.Table) -> str:
    """How the dimension moves from the smallest scale to the largest."""
    rows = _numbers(data.to_pylist())
    low, high = min(row["scale"] for row in rows), max(row["scale"] for row in rows)
    said = []
    for (population,), line in _lines(rows, "population").items():
        start, end = (mean_of([row["value"] for row in line if row["scale"] == scale]) for scale in (low, high))
        said.append(f"[{population}] from {say(start)} at scale {low} to {say(end)} at scale {high}")
    return f"gride of {rows[0]['model']}, averaged over the blocks, goes {'; '.join(said)}{_null(rows)}."


def lengths_caption(data: pa.Table) -> str:
    """From the shortest windows to the longest."""
    rows = _numbers(name_series(data.to_pylist()))
    said = []
    for (population, series), line in _lines(rows, "population", "series").items():
        first, last = line[0], line[-1]
        start, end = (f"{say(row['value'])} in windows of {row['seq_len']}" for row in (first, last))
        said.append(f"[{population}] of {series} goes from {start} to {end}")
    return f"{rows[0]['metric']}, averaged over the blocks, {'; '.join(said[: 2 * _TOLD])}{_null(rows)}."


def alignment_caption(data: pa.Table) -> str:
    """Energy and controls at the last point of each panel."""
    rows, said = _numbers(data.to_pylist()), []
    for (gradient, proxy), panel in _lines(rows, "gradient", "proxy").items():
        last = max(row["checkpoint"] for row in panel)
        parts = []
        for (quantity,), line in _lines([row for row in panel if row["checkpoint"] == last], "quantity").items():
            tested = sum(row["significant"] or 0 for row in line if row["significant"] is not None)
            blocks = sum(row["blocks"] for row in line)
            beyond = f", exceeded in {tested} of {blocks} blocks" if any(is_number(row["p"]) for row in line) else ""
            parts.append(f"{quantity} {say(mean_of([row['value'] for row in line]))}{beyond}")
        said.append(f"{gradient} gradients, {proxy}: {', '.join(parts)}")
    return f"At the last checkpoint of {rows[0]['model']}, averaged over the blocks: {'; '.join(said)} (at p ≤ .05)."


def bins_caption(data: pa.Table) -> str:
    """Rarest against most frequent."""
    rows, said = _numbers(data.to_pylist()), []
    for (gradient, proxy), panel in _lines(rows, "gradient", "proxy").items():
        ends = [
            mean_of([row["value"] for row in panel if row["bin"] == pick(row["bin"] for row in panel)])
            for pick in (min, max)
        ]
        rare, frequent = map(say, ends)
        said.append(f"{gradient} gradients, {proxy}: {rare} for the rarest and {frequent} for the most frequent tokens")
    return f"tangent_energy of {rows[0]['model']}, averaged over the blocks: {'; '.join(said)}."


def curvature_caption(data: pa.Table) -> str:
    """How many intervals lie above zero, and what the exponents' means are."""
    rows = _numbers(data.to_pylist())
    above = sum(is_number(row["low"]) and row["low"] > 0 for row in rows)
    means = [
        f"{say(mean_of([row['value'] for row in line]))} at exponent {exponent:g}"
        for (exponent,), line in _lines(rows, "exponent").items()
    ]
    absent = len(data) - len(rows)
    rest = f" At {absent} more of the {len(data)} places and exponents it cannot be told." if absent else ""
    return f"curvature_visibility is {', '.join(means)} on average; {above} of {len(rows)} intervals lie above 0.{rest}"


def concepts_caption(data: pa.Table) -> str:
    """How many concepts live from the first checkpoint to the last, and which is the largest."""
    rows = data.to_pylist()
    first, last = min(row["step"] for row in rows), max(row["step"] for row in rows)
    lives = [{row["step"] for row in line} for line in _lines(rows, "track").values()]
    through = sum({first, last} <= steps for steps in lives)
    # Those that are drawn live longest.
    every = int((data.schema.metadata or {}).get(b"concepts", len(lives)))
    top = max(rows, key=lambda row: row["share_of_energy"] if is_number(row["share_of_energy"]) else 0.0)
    return (
        f"{through} of {every} concepts live from step {first} to step {last}; the largest share is "
        f"{say(top['share_of_energy'])} at step {top['step']} ({top['top_tokens']})."
    )


def verdicts_caption(data: pa.Table) -> str:
    """How many of each."""
    found = data["verdict"].to_pylist()
    counts = [f"{found.count(name)} {word}" for name, word in _VERDICTS.items()]
    return f"Of {len(found)} verdicts {', '.join(counts)}."


_VERDICTS = {"holds": "hold", "does not hold": "do not hold", "inconclusive": "are inconclusive"}


def _numbers(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if is_number(row["value"])]


def _lines(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row[name] for name in names), []).append(row)
    return lines


def _course(line: Sequence[Row]) -> str:
    peak, first, last = max(line, key=lambda row: row["value"]), line[0], line[-1]
    if len(line) == 1:
        return f"is {say(first['value'])} at {first['site']}"
    if len({row["value"] for row in line}) == 1:
        return f"is {say(first['value'])} at all {len(line)} blocks"
    if peak is first:
        return f"falls from {say(first['value'])} at {first['site']} to {say(last['value'])} at {last['site']}"
    if peak is last:
        return f"rises from {say(first['value'])} at {first['site']} to {say(last['value'])} at {last['site']}"
    return (
        f"peaks at {say(peak['value'])} at {peak['site']}, from {say(first['value'])}, and ends at {say(last['value'])}"
    )


def _turns(line: Sequence[Row]) -> str:
    peak, first, last = max(line, key=lambda row: row["value"]), line[0], line[-1]
    way = f"goes from {say(first['value'])} at {first['label']} to {say(last['value'])} at {last['label']}"
    return (
        way
        if peak is first or peak is last
        else f"{way}, with its largest value {say(peak['value'])} at {peak['label']}"
    )


def _extremes(lines: dict[tuple[Any, ...], list[Row]]) -> str:
    peaks = {name: max(line, key=lambda row: row["value"]) for name, line in lines.items()}
    said = []
    for population, group in groupby(sorted(peaks), key=lambda name: name[0]):
        mine = {name[1]: peaks[name] for name in group}
        low, high = (pick(mine, key=lambda name: mine[name]["value"]) for pick in (min, max))
        said.append(
            f"on {population} the largest block ranges from {say(mine[low]['value'])} ({low}) to "
            f"{say(mine[high]['value'])} ({high}, {mine[high]['site']})"
        )
    return "; ".join(said)


def _null(rows: Iterable[Row]) -> str:
    nulls = [row["null"] for row in rows if is_number(row["null"])]
    if not nulls:
        return ""
    low, high = min(nulls), max(nulls)
    return (
        f"; the null is {say(low)}"
        if math.isclose(low, high, rel_tol=0.02)
        else f"; nulls are {say(low)} to {say(high)}"
    )
