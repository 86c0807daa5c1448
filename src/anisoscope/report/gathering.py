"""Runs -> everything a report shows, as plain data; how it looks is the page's business."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope import __version__
from anisoscope.claims import Verdict, headlines, judge
from anisoscope.columns import TABLE_SCHEMA
from anisoscope.figures import count_label
from anisoscope.grouping import group_rows
from anisoscope.printing import format_value
from anisoscope.records import POPULATIONS, describe_text, site_order
from anisoscope.report.cautions import Caution, find_cautions
from anisoscope.report.comparing import Comparison, compare
from anisoscope.report.methods import Method, methods_of
from anisoscope.report.reading import Run, read_run
from anisoscope.revisions import training_order
from anisoscope.store import name_trainings

# Of one run; a page with more is neither read nor soon drawn.
MOST_FIGURES = 60
POPULATION_WORDS = {
    "all": "every token",
    "content": "no special tokens, no first position of a window",
    "typical": "content without tokens of unusually large norm at that site",
    "types": "one occurrence of each token id, drawn at random",
    "matched": "as many tokens as types has, drawn at random from content",
}


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What one run contributes."""

    run: Run
    cautions: tuple[Caution, ...]
    figures: tuple[Any, ...]
    """`figures.Figure`, in the order of the catalogue."""
    omitted: Mapping[str, Sequence[str]]
    """By section, the titles of figures that were not made, because the run has too many of them."""
    measured: tuple[Mapping[str, str], ...]
    """A row for each model and corpus: what was measured on what."""
    glance: tuple[Mapping[str, str], ...]
    """A row for each model, metric and population: the last checkpoint in a few numbers."""
    origins: tuple[tuple[str, str], ...]
    """Versions, devices, times ...: name and what was found."""
    units: tuple[Mapping[str, str], ...]
    """A row for each unit."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is shown of one or several runs."""

    title: str
    made: str
    """When, and by which version."""
    table: pa.Table
    """Every row of every run; `source` names the run where there are several."""
    runs: tuple[Shown, ...]
    verdicts: tuple[Verdict, ...]
    methods: tuple[Method, ...]
    populations: Mapping[str, str]
    comparisons: tuple[Comparison, ...] = ()
    state: str = field(default="", compare=False)
    """Which state of the folders this shows, for a page that watches them."""


def gather(folders: Sequence[Path], *, seed: int = 0, drawn: bool = True, state: str = "") -> Report:
    """Read the runs, judge what they say together, lay out what is to be shown; `drawn` False leaves figures out."""
    names = _names(folders)
    runs = [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    table = join_tables(runs)
    # A unit that lies in two of the folders is one unit.
    verdicts = tuple(headlines(_judge(_each_unit_once(runs), seed)))
    return Report(
        title=", ".join(names),
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by anisoscope {__version__}",
        table=table,
        runs=tuple(_shown(run, verdicts if len(runs) == 1 else (), drawn) for run in runs),
        verdicts=verdicts,
        methods=tuple(methods_of(sorted(table["metric"].unique().to_pylist()))),
        populations=_populations(table),
        comparisons=tuple(compare(runs, drawn=drawn)) if len(runs) > 1 else (),
        state=state,
    )


def join_tables(runs: Sequence[Run]) -> pa.Table:
    """The rows of all runs; with several, `source` says whose they are."""
    if len(runs) == 1:
        return runs[0].table
    return pa.concat_tables(
        [run.table.add_column(0, "source", pa.array([run.name] * run.table.num_rows, pa.string())) for run in runs]
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """Names of folders, longer where the last parts are the same."""
    paths = [folder.resolve() for folder in folders]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(path) for path in paths]


def _each_unit_once(runs: Sequence[Run]) -> pa.Table:
    seen: set[str] = set()
    parts = []
    for run in runs:
        parts.append(run.table.filter(~pc.field("key").isin(pa.array(list(seen), pa.string()))) if seen else run.table)
        seen |= run.origins.keys()
    return pa.concat_tables(parts) if parts else TABLE_SCHEMA.empty_table()


_OUTCOMES = {True: 0, False: 1, None: 2}


def _judge(table: pa.Table, seed: int) -> tuple[Verdict, ...]:
    """Verdicts: first what holds, then what does not, then what is inconclusive."""
    if not table.num_rows:
        return ()
    return tuple(sorted(judge(table, seed=seed), key=lambda one: _OUTCOMES[one.holds]))


def _populations(table: pa.Table) -> dict[str, str]:
    there = set(table["population"].unique().to_pylist())
    known = {name: POPULATION_WORDS[name] for name in POPULATIONS if name in there}
    return known | dict.fromkeys(sorted(there - known.keys()), "")


def _shown(run: Run, verdicts: Sequence[Verdict], drawn: bool) -> Shown:
    cautions = find_cautions(run)
    figures: tuple[Any, ...] = ()
    omitted: Mapping[str, Sequence[str]] = {}
    if drawn and run.table.num_rows:
        from anisoscope.figures import catalogue_within

        try:
            found = catalogue_within(run.table, MOST_FIGURES, units=tuple(run.units()), verdicts=verdicts)
            figures, omitted = tuple(found.figures), found.omitted
        except Exception as error:  # the sentences and tables of a report do not depend on its figures
            told = f"The figures could not be made: {type(error).__name__}: {error}."
            cautions.append(Caution(title="No figures", text=told))
    return Shown(
        run=run,
        cautions=tuple(cautions),
        figures=figures,
        omitted=omitted,
        measured=tuple(_measured(run)),
        glance=tuple(_glance(run.table)),
        origins=tuple(_origins(run)),
        units=tuple(_units(run)),
    )


def _measured(run: Run) -> Iterable[dict[str, str]]:
    """Models, corpora, checkpoints, tokens and populations, a row for each model on each corpus."""
    table = name_trainings(run.table)
    who = ["model", "kind", "corpus"]
    checkpoints = _together(table, who, "stage", "step", "revision")
    keys, populations, sites, widths = (
        _together(table, who, *names) for names in (["key"], ["population"], ["site"], ["site", "dim"])
    )
    for model, kind, corpus in sorted(checkpoints, key=lambda one: [part or "" for part in one]):
        one = model, kind, corpus
        specs = [run.origins[key].spec for (key,) in keys[one] if key in run.origins]
        blocks = sum((site or "").startswith("block.") for (site,) in sites[one])
        names = sorted((name for (name,) in populations[one]), key=_population_order)
        yield {
            "model": model,
            "kind": kind,
            "checkpoints": _checkpoints(set(checkpoints[one])),
            "corpus": corpus,
            "tokens": _range(spec.get("tokens") for spec in specs),
            "window": _range(spec.get("seq_len") for spec in specs),
            "width": _range(dim for site, dim in widths[one] if site != "output"),
            "sites": f"{len(sites[one])} ({blocks} blocks)",
            "populations": ", ".join(names),
        }


def _together(table: pa.Table, who: Sequence[str], *names: str) -> dict[tuple[Any, ...], list[tuple[Any, ...]]]:
    """What stands in some columns, each combination once, for each combination of `who`."""
    found: dict[tuple[Any, ...], list[tuple[Any, ...]]] = defaultdict(list)
    for row in table.group_by([*who, *names], use_threads=False).aggregate([]).to_pylist():
        values = tuple(row.values())
        found[values[: len(who)]].append(values[len(who) :])
    return found


def _population_order(name: str) -> int:
    return POPULATIONS.index(name) if name in POPULATIONS else len(POPULATIONS)


def _checkpoints(places: set[tuple[Any, Any, Any]]) -> str:
    if len(places) == 1:
        ((stage, step, revision),) = places
        return (
            ", ".join(part for part in (stage, revision or (None if step is None else f"step {step:,}")) if part)
            or "as given"
        )
    ordered = sorted(places, key=lambda place: training_order(*place))
    first, last = (
        f"step {step:,}" if step is not None else revision or "?" for _, step, revision in (ordered[0], ordered[-1])
    )
    return f"{len(places)}, {first} to {last}"


def _range(values: Iterable[Any]) -> str:
    numbers = sorted({value for value in values if value is not None})
    if not numbers:
        return "not known"
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"


def _glance(table: pa.Table) -> Iterable[dict[str, str]]:
    """The last checkpoint of each model: a metric at the embedding, over the blocks, and after the final norm."""
    table = name_trainings(table).filter(
        pc.field("bin").is_null() & pc.field("variant").is_null() & pc.field("gradient").is_null()
    )
    series = ("model", "corpus", "stack", "metric", "population")
    checkpoints = group_rows(table, (*series, "stage", "step", "revision"))
    groups: dict[tuple[Any, ...], dict[Any, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    for number, (*who, stage, step, revision) in enumerate(checkpoints.names()):
        groups[tuple(who)][training_order(stage, step, revision)].append(checkpoints.rows(number))
    last = [np.sort(np.concatenate(found[max(found)])) for found in groups.values()]
    # One selection for all: each would go through every chunk of the table.
    columns = table.select(["stage", "step", "revision", "site", "depth", "value", "spread", "null"])
    rows = columns.take(np.concatenate([np.array([], int), *last])).to_pylist()
    ends = np.cumsum([len(numbers) for numbers in last]).tolist()
    for (model, corpus, stack, metric, population), numbers, end in zip(groups, last, ends, strict=True):
        here = rows[end - len(numbers) : end]
        sites = {row["site"]: row for row in here}
        blocks = sorted((row for row in here if row["depth"] is not None), key=lambda row: site_order(row["site"]))
        known = [row for row in blocks if not math.isnan(row["value"])]
        low = min(known, key=lambda row: row["value"], default=None)
        high = max(known, key=lambda row: row["value"], default=None)
        if not blocks and not sites.keys() & {"embed", "final_norm", "output"}:
            continue
        nulls = [row["null"] for row in known if not math.isnan(row["null"])]
        yield {
            "model": model + (f" ({stack})" if stack else ""),
            "at": _checkpoints({(here[0]["stage"], here[0]["step"], here[0]["revision"])}),
            "corpus": corpus,
            "metric": metric,
            "population": population,
            "embed": _value(sites.get("embed")),
            "lowest block": _value(low, named=True),
            "highest block": _value(high, named=True),
            "last block": _value(blocks[-1] if blocks else None),
            "final norm": _value(sites.get("final_norm")),
            "output": _value(sites.get("output")),
            "null": format_value(sum(nulls) / len(nulls)) if nulls else "",
        }


def _value(row: Mapping[str, Any] | None, *, named: bool = False) -> str:
    if row is None:
        return ""
    text = format_value(row["value"])
    if not math.isnan(row["spread"]):
        text += f" ± {format_value(row['spread'])}"
    return f"{text} (block {row['site'].removeprefix('block.')})" if named else text


def _origins(run: Run) -> Iterable[tuple[str, str]]:
    """Where the numbers came from, each fact once with all the values it has."""
    specs = [origin.spec for origin in run.origins.values()]
    provenances = [origin.provenance for origin in run.origins.values()]
    if not specs:
        return
    times = sorted(str(one["time"]) for one in provenances if one.get("time"))
    seconds = [float(one.get("seconds") or 0) for one in provenances]
    yield "folder", run.name
    yield "units", f"{len(specs):,}"
    if times:
        yield "measured", times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"
    yield "time taken", f"{sum(seconds):,.1f} s in all"
    yield "device", _different(one.get("device") for one in provenances)
    for package in dict.fromkeys(name for one in provenances for name in one.get("versions") or {}):
        yield package, _different((one.get("versions") or {}).get(package) for one in provenances)
    for name, label in (("dtype", "dtype"), ("seed", "seed"), ("batch_points", "points a batch (at least)")):
        yield label, _different(spec.get(name) for spec in specs)
    for corpus in dict.fromkeys(str(spec.get("corpus")) for spec in specs):
        hashes = _different(spec.get("corpus_hash") for spec in specs if str(spec.get("corpus")) == corpus)
        yield f"SHA-256 of {corpus}", hashes
    proven = dict.fromkeys(str(check) for one in provenances for check in one.get("checks") or ())
    if proven:
        yield "proven at load", " ".join(list(proven)[:12])


def _different(values: Iterable[Any], most: int = 6) -> str:
    counts = dict.fromkeys("not known" if value is None else str(value) for value in values)
    listed = list(counts)[:most]
    return ", ".join(listed) + (f" and {len(counts) - most} more" if len(counts) > most else "")


def _units(run: Run) -> Iterable[dict[str, str]]:
    def order(item: tuple[str, Any]) -> tuple[Any, ...]:
        spec = item[1].spec
        return str(spec.get("run") or spec.get("model")), training_order(None, spec.get("step"), spec.get("revision"))

    for key, origin in sorted(run.origins.items(), key=order):
        spec, provenance = origin.spec, origin.provenance
        step = spec.get("step")
        yield {
            "model": str(spec.get("run") or spec.get("model")),
            "revision": str(spec.get("revision") or (f"step {count_label(step)}" if isinstance(step, int) else "")),
            "corpus": str(spec.get("corpus")),
            "text": describe_text(spec, provenance),
            "measured": str(provenance.get("time") or "not known"),
            "seconds": format_value(float(provenance.get("seconds") or math.nan)),
            "device": str(provenance.get("device") or "not known"),
            "weights": str(spec.get("weights") or "in memory"),
            "key": key,
        }
