"""A finished run where people already look: curves by the keys of the live sinks, or rows as CSV and Parquet.

A curve is a training (or a model) on one corpus. Records of gradients, of changed norms and of frequency bins are told
apart behind the name of their metric: `geom/tangent_excess.virtual.pca.mean=in/block.03`.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from anisoscope import tables
from anisoscope.atomic import complete_file
from anisoscope.columns import record_from
from anisoscope.errors import SpecError, StoreError
from anisoscope.records import Record
from anisoscope.sinks import JsonlSink, TensorBoardSink, WandbSink, group, paint, scalars_of
from anisoscope.store import Store, name_trainings

BOARDS = ("wandb", "tensorboard", "jsonl")
FORMATS = (*BOARDS, *tables.FORMATS)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The records of one training on one corpus, step by step."""

    name: str
    corpus: str
    steps: dict[int, list[Record]]
    """In order. A model whose step is not known stands at 0."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    places: tuple[str, ...]
    """Files, folders or names of runs."""
    steps: int
    stepless: tuple[str, ...]
    """Models without a known step, shown at step 0."""


def export_run(
    store: Store, to: str, path: Path | None = None, *, all_sites: bool = False, project: str = "anisoscope"
) -> Exported:
    """Write everything a run holds: a file of rows (`csv`, `parquet`), or curves (`wandb`, `tensorboard`, `jsonl`).

    `path` is a file for rows and a folder for curves, by default in the run folder. `all_sites` shows each block as a
    curve of its own; without it blocks are shown by mean, maximum and heat map, as live. A JSONL file has all sites.
    """
    if to not in FORMATS:
        raise SpecError(f"--to is one of {', '.join(FORMATS)}; came {to!r}")
    table = store.table()
    if not table.num_rows:
        raise StoreError(f"{store.folder} holds no finished unit")
    if to in tables.FORMATS:
        target = path or store.folder / "exported" / f"{store.folder.name}.{to}"
        tables.write_table(table, target, to=to)
        return Exported(places=(str(target),), steps=0, stepless=())
    return _export_curves(table, to, path or store.folder / "exported" / to, all_sites, project)


def find_curves(table: pa.Table) -> list[Curve]:
    """The records of a table by training and corpus; of two units that measured one thing, the later key counts."""
    curves: dict[tuple[str, str], dict[int, list[Record]]] = {}
    for row in name_trainings(table).to_pylist():
        record = record_from(row)
        # Parts of a training that count their steps from zero again are curves of their own.
        name = f"{record.model}/{record.stage}" if record.stage else record.model
        curves.setdefault((name, record.corpus), {}).setdefault(record.step or 0, []).append(record)
    return [
        Curve(name=name, corpus=corpus, steps={step: _once(steps[step]) for step in sorted(steps)})
        for (name, corpus), steps in sorted(curves.items())
    ]


_PLACE = ("metric", "gradient", "proxy", "variant", "bin", "population", "stack", "site")


def _once(records: Sequence[Record]) -> list[Record]:
    by_place = {tuple(getattr(one, name) for name in _PLACE): one for one in sorted(records, key=lambda one: one.key)}
    # In the order of the table, whose first population has the plain name in every sink.
    kept = set(map(id, by_place.values()))
    return [one for one in records if id(one) in kept]


def _export_curves(table: pa.Table, to: str, folder: Path, all_sites: bool, project: str) -> Exported:
    curves = find_curves(table)
    shown = JsonlSink(folder).all_sites if to == "jsonl" else all_sites
    places, stepless = [], []
    for curve in curves:
        with _open_sink(to, curve, folder, all_sites=all_sites, project=project) as (sink, place):
            _write(curve, sink, shown)
        places.append(place)
        if any(one.step is None for records in curve.steps.values() for one in records):
            stepless.append(curve.name)
    return Exported(
        places=tuple(places), steps=sum(len(curve.steps) for curve in curves), stepless=tuple(dict.fromkeys(stepless))
    )


def _write(curve: Curve, sink: Any, all_sites: bool) -> None:
    history: dict[str, dict[int, dict[str, float]]] = {}
    for step, records in curve.steps.items():
        by_metric = group(records)
        sink.write(step, scalars_of(by_metric, all_sites=all_sites), {})
        for metric, sites in by_metric.items():
            blocks = {site: value for site, value in sites.items() if "block." in site}
            if len(blocks) > 1:
                history.setdefault(metric, {})[step] = sites
    pictures = {f"geom/{metric}/heat_map": paint(columns) for metric, columns in history.items()}
    if pictures:
        sink.write(max(curve.steps), {}, pictures)


@contextmanager
def _open_sink(to: str, curve: Curve, folder: Path, *, all_sites: bool, project: str) -> Iterator[tuple[Any, str]]:
    """A sink for one curve and the place it writes to; it replaces what an earlier export wrote there."""
    name = file_name(curve)
    if to == "jsonl":
        path = folder / f"{name}.jsonl"
        with complete_file(path) as temporary:
            yield JsonlSink(temporary), str(path)
    elif to == "tensorboard":
        for old in (folder / name).glob("events.out.tfevents.*"):
            old.unlink()
        with closing(TensorBoardSink(folder / name, all_sites=all_sites)) as sink:
            yield sink, str(folder / name)
    else:
        sink = WandbSink(all_sites=all_sites)
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        config = {"model": curve.name, "corpus": curve.corpus}
        sink.run = wandb.init(project=project, name=name, dir=str(folder), config=config)
        try:
            yield sink, f"{project}/{name}"
        finally:
            sink.run.finish()


def file_name(curve: Curve) -> str:
    """A curve's name where slashes would make folders.

    >>> file_name(Curve(name="EleutherAI/pythia-70m", corpus="enwik8", steps={}))
    'EleutherAI--pythia-70m.enwik8'
    """
    return ".".join(_safe(part) for part in (curve.name, curve.corpus))


def _safe(text: str) -> str:
    return re.sub(r"[^\w.=+-]+", "--", text.strip("/")).strip("-")
