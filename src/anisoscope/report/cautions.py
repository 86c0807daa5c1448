"""What a reader should know before trusting a number: each caution is a sentence, with the places it is about."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.findings import MIN_BATCHES, counted
from anisoscope.grouping import group_rows
from anisoscope.printing import format_value
from anisoscope.records import site_order
from anisoscope.report.reading import Run
from anisoscope.store import name_trainings

# Metrics between 0 and 1 in which a few tokens of large norm show, and the difference that is worth a word.
SINK_METRICS = ("leading_variance", "mean_cosine", "isoscore")
SINK_DIFFERENCE = 0.1
# Shares of duplicate points below this are no news.
DUPLICATE_SHARE = 0.01
# With fewer points a batch than this times the width, the value for chance is far from that of many points.
POINTS_PER_DIMENSION = 4


@dataclass(frozen=True, kw_only=True)
class Caution:
    """One thing to know."""

    title: str
    text: str
    places: tuple[str, ...] = ()
    """Where; the most telling first."""


def find_cautions(run: Run) -> list[Caution]:
    """Everything about a run that its numbers alone do not say."""
    table = name_trainings(run.table)
    return [
        *_failed(run),
        *_unreadable(run),
        *_suspects(table),
        *_sinks(table),
        *_without_numbers(table),
        *_duplicates(table),
        *_few_points(table),
        *_few_batches(table),
        *_mixed(run, table),
        *_incomplete(run),
        *_notes(run),
    ]


def where(row: Mapping[str, Any]) -> str:
    """A row's checkpoint and site, for people."""
    name = row["model"]
    if row.get("step") is not None:
        name += f", step {row['step']:,}"
    elif row.get("revision"):
        name += f"@{row['revision']}"
    stack = f"{row['stack']} " if row.get("stack") else ""
    return f"{name}, {stack}{row['site']}"


def _failed(run: Run) -> Iterable[Caution]:
    if run.failures:
        places = [
            f"{row['model']}{'@' + str(row['revision']) if row['revision'] else ''} on {row['corpus']}: "
            f"{row['error']}: {row['message']}"
            for row in run.failures
        ]
        count = counted(len(places), "unit")
        yield Caution(
            title="Failed units", text=f"{count} failed, and what they would show is missing.", places=tuple(places)
        )


def _unreadable(run: Run) -> Iterable[Caution]:
    if run.unreadable:
        count = counted(len(run.unreadable), "file")
        yield Caution(
            title="Unreadable files", text=f"{count} of this folder could not be read.", places=run.unreadable
        )


def _suspects(table: pa.Table) -> Iterable[Caution]:
    rows = table.filter(pc.field("suspect").is_valid()).select(["model", "revision", "suspect"]).to_pylist()
    places = dict.fromkeys(f"{row['model']}@{row['revision'] or '?'}: {row['suspect']}" for row in rows)
    if places:
        yield Caution(
            title="Suspicious checkpoints",
            text=f"{counted(len(places), 'checkpoint')} may not be what the name says; claims leave them out.",
            places=tuple(places),
        )


def _sinks(table: pa.Table) -> Iterable[Caution]:
    names = ["model", "revision", "step", "stack", "corpus", "site", "metric", "variant", "bin", "key"]
    wanted = pc.field("metric").isin(SINK_METRICS) & pc.field("population").isin(["all", "typical"])
    rows = table.filter(wanted).select([*names, "population", "value", "excluded", "points"]).sort_by("population")
    pairs = group_rows(rows, names)
    # `all` before `typical`; only those that differ become Python rows.
    both = pairs.ends[pairs.sizes == 2]
    every, typical = pairs.order[both - 2], pairs.order[both - 1]
    values = rows["value"].to_numpy()
    different = np.flatnonzero(np.abs(values[every] - values[typical]) > SINK_DIFFERENCE)
    found = [
        (abs(one["value"] - other["value"]), one, other)
        for one, other in zip(
            *(rows.take(pa.array(side[different])).to_pylist() for side in (every, typical)), strict=True
        )
        if one["population"] != other["population"]
    ]
    found.sort(key=lambda one: (-one[0], one[1]["model"], site_order(one[1]["site"])))
    if found:
        places = tuple(
            f"{where(every)}: {every['metric']} is {format_value(every['value'])} over all tokens and "
            f"{format_value(typical['value'])} over typical ones, which leave out {typical['excluded']:,} of "
            f"{every['points']:,} tokens"
            for _, every, typical in found
        )
        yield Caution(
            title="A few tokens decide",
            text="Between all tokens and typical ones a metric changes by more than "
            f"{SINK_DIFFERENCE:g} at {counted(len(found), 'place')}: tokens of very large norm own what is read there. "
            "Read both populations.",
            places=places,
        )


def _without_numbers(table: pa.Table) -> Iterable[Caution]:
    rows = table.filter(pc.is_nan(pc.field("value")) | pc.field("value").is_null())  # pyright: ignore[reportAttributeAccessIssue]
    noted = rows.group_by(["metric", "note"], use_threads=False).aggregate([([], "count_all")]).to_pylist()
    counts: Counter[tuple[str, str]] = Counter()
    for one in noted:
        counts[one["metric"], one["note"] or "no reason was recorded"] += one["count_all"]
    if counts:
        places = tuple(f"{metric}, {counted(count, 'place')}: {note}" for (metric, note), count in counts.most_common())
        text = f"{counted(len(rows), 'row')} of {table.num_rows:,} have no number, each with its reason."
        yield Caution(title="No number", text=text, places=places)


def _duplicates(table: pa.Table) -> Iterable[Caution]:
    names = ["model", "revision", "step", "stack", "site", "metric", "population", "dropped", "points"]
    rows = table.filter((pc.field("dropped") > 0) & pc.field("points").is_valid()).select(names)
    # Metrics that drop the same points are told together.
    groups = group_rows(rows, [name for name in names if name != "metric"])
    dropped, points = (rows[name].to_numpy() for name in ("dropped", "points"))
    places = zip(groups.keys["model"].to_pylist(), groups.keys["population"].to_pylist(), strict=True)
    largest: dict[tuple[str, str], tuple[float, int]] = {}
    for group, place in enumerate(places):
        first = groups.rows(group)[0]
        share = float(dropped[first] / (dropped[first] + points[first]))
        if share > max(DUPLICATE_SHARE, largest.get(place, (0.0, 0))[0]):
            largest[place] = share, group
    worst = [(share, rows.take(groups.rows(group)).to_pylist()) for share, group in largest.values()]
    if worst:
        places = tuple(
            f"{where(same[0])}, population {same[0]['population']}: {same[0]['dropped']:,} points ({share:.1%}) were "
            f"dropped for {_some(row['metric'] for row in same)}"
            for share, same in sorted(worst, key=lambda one: -one[0])
        )
        yield Caution(
            title="Duplicates dropped",
            text="Points that are exactly equal have no distance between them and were left out; the largest share of "
            "each model and population is listed.",
            places=places,
        )


def _some(names: Iterable[str], most: int = 3) -> str:
    listed = sorted(set(names))
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def _few_points(table: pa.Table) -> Iterable[Caution]:
    rows = table.filter((pc.field("batches") > 0) & pc.field("depth").is_valid() & (pc.field("dim") > 1))
    names = ["model", "population", "metric", "batches", "points", "dim"]
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for row in rows.select(names).group_by(names).aggregate([]).to_pylist():
        each, place = row["points"] / row["batches"], (row["model"], row["population"])
        if each < POINTS_PER_DIMENSION * row["dim"] and each < found.get(place, (float("inf"), 0))[0]:
            found[place] = (each, row["dim"])
    if found:
        yield Caution(
            title="Few points for the width",
            text=f"Batches hold fewer than {POINTS_PER_DIMENSION} points a dimension: compare with the null, which has "
            "the same number of points, and never with clouds of another size.",
            places=tuple(
                f"{model}, population {population}: {each:,.0f} points a batch in {dim:,.0f} dimensions"
                for (model, population), (each, dim) in found.items()
            ),
        )


def _few_batches(table: pa.Table) -> Iterable[Caution]:
    rows = table.filter(pc.field("depth").is_valid() & pc.field("metric").isin(["leading_variance", "twonn"]))
    fewest = pc.min(rows["batches"]).as_py()  # pyright: ignore[reportAttributeAccessIssue]
    if fewest is not None and fewest < MIN_BATCHES:
        few = counted(fewest, "batch")
        yield Caution(
            title="Few batches",
            text=f"Some numbers rest on {few}; a claim about one model needs {MIN_BATCHES} for an interval"
            + (", and one batch has no spread." if fewest == 1 else "."),
        )


_SAME = {
    "dtype": "weights were loaded in several dtypes",
    "seed": "several seeds drew the text",
    "seq_len": "windows differ in length",
    "batch_points": "batches differ in size",
    "special_tokens": "special tokens are in some units and not in others",
}


def _mixed(run: Run, table: pa.Table) -> Iterable[Caution]:
    """Settings that differ between units, so that numbers side by side differ in more than the model."""
    places = []
    for name, sentence in _SAME.items():
        values = {str(origin.spec.get(name)) for origin in run.origins.values()}
        if len(values) > 1:
            places.append(f"{sentence}: {', '.join(sorted(values))}")
    corpora: dict[str, set[str]] = defaultdict(set)
    for origin in run.origins.values():
        corpora[str(origin.spec.get("corpus"))].add(str(origin.spec.get("corpus_hash"))[:12])
    places += [
        f"{corpus} is {len(hashes)} different texts: {', '.join(sorted(hashes))}"
        for corpus, hashes in corpora.items()
        if len(hashes) > 1
    ]
    for package in ("torch", "transformers", "anisoscope"):
        versions = {str((origin.provenance.get("versions") or {}).get(package)) for origin in run.origins.values()}
        if len(versions) > 1:
            places.append(f"{package} in several versions: {', '.join(sorted(versions))}")
    metrics: dict[str, set[int]] = defaultdict(set)
    for row in (
        table.select(["metric", "metric_version"]).group_by(["metric", "metric_version"]).aggregate([]).to_pylist()
    ):
        metrics[row["metric"]].add(row["metric_version"])
    places += [f"{name} in versions {sorted(found)}" for name, found in metrics.items() if len(found) > 1]
    if places:
        text = "Units of this run differ in more than their model and step."
        yield Caution(title="Mixed settings", text=text, places=tuple(places))


def _incomplete(run: Run) -> Iterable[Caution]:
    if run.progress:
        yield Caution(title="Not finished", text=f"This run is not complete: {run.progress}.")


def _notes(run: Run) -> Iterable[Caution]:
    notes = dict.fromkeys(str(note) for origin in run.origins.values() for note in origin.provenance.get("notes") or ())
    if notes:
        yield Caution(
            title="Notes of the measuring", text="What was written down while measuring.", places=tuple(notes)
        )
