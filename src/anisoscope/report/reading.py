"""A run folder as it stands: whole units are read, and what cannot be read is named instead of stopping the reader."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from anisoscope.columns import TABLE_SCHEMA, record_from
from anisoscope.errors import StoreError
from anisoscope.records import Record, Spec, Unit
from anisoscope.status import survey
from anisoscope.store import Store

# Columns that every unit has had since the first version.
_ESSENTIAL = ("key", "model", "site", "metric", "value")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a unit's file says of itself beside its rows."""

    spec: Mapping[str, Any]
    provenance: Mapping[str, Any]
    attached: bool
    """Whether arrays lie beside it."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder at one moment."""

    name: str
    folder: Path
    table: pa.Table
    """`Store.table()` of what could be read."""
    origins: Mapping[str, Origin]
    """By key of the unit."""
    failures: tuple[Mapping[str, Any], ...]
    unreadable: tuple[str, ...]
    """One sentence for each file that could not be read."""
    progress: str
    """Where it stands while units are missing; empty where it is complete."""

    def units(self) -> Iterator[Unit]:
        """The units with the first of their records, the others being in the table, and the arrays beside them."""
        store, firsts = Store(self.folder), self._first_records()
        for key, origin in self.origins.items():
            try:
                arrays = store.attachment(key) if origin.attached else {}
                spec = Spec.from_dict(origin.spec)
            except (StoreError, OSError, ValueError, TypeError):
                # Arrays are an extra, and the Spec of a later version may have other fields: the numbers are shown.
                continue
            yield Unit(spec=spec, provenance=origin.provenance, records=firsts.get(key, ()), attachments=arrays)

    def _first_records(self) -> dict[str, tuple[Record, ...]]:
        places: dict[str, int] = {}
        for place, key in enumerate(self.table["key"].to_pylist()):
            places.setdefault(key, place)
        rows = self.table.drop_columns(["values"]).take(pa.array(places.values(), pa.int64())).to_pylist()
        return {row["key"]: (record_from(row),) for row in rows}


class _Readable(Store):
    """A store that shows only the units it is told to."""

    def __init__(self, folder: Path, keys: Iterable[str]) -> None:
        super().__init__(folder)
        self._shown = frozenset(keys)

    def _parts(self) -> Iterator[Path]:
        yield from (path for path in super()._parts() if path.stem in self._shown)


def read_run(folder: Path, name: str | None = None) -> Run:
    """Whatever a folder holds now; an absent folder is a run without units."""
    origins: dict[str, Origin] = {}
    unreadable: list[str] = []
    for path in sorted(folder.glob("*.parquet")) if folder.is_dir() else ():
        if path.name.startswith("."):
            continue
        try:
            origins[path.stem] = _origin(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
            unreadable.append(f"{path.name} is no readable unit: {_short(error)}")
    table, faults = _read_table(folder, origins)
    failures, faults_of_notes = _read_failures(folder)
    return Run(
        name=name or folder.resolve().name,
        folder=folder,
        table=table,
        origins=origins,
        failures=tuple(failures),
        unreadable=(*unreadable, *faults, *faults_of_notes),
        progress=_progress(folder),
    )


def _origin(path: Path) -> Origin:
    schema = pq.read_schema(path)
    if lacking := [name for name in _ESSENTIAL if name not in schema.names]:
        raise ValueError(f"it has no column {', '.join(lacking)}")
    metadata = json.loads((schema.metadata or {})[b"anisoscope"])
    return Origin(
        spec=dict(metadata["spec"]),
        provenance=dict(metadata["provenance"]),
        attached="attachments_sha256" in metadata,
    )


def _read_table(folder: Path, origins: dict[str, Origin]) -> tuple[pa.Table, list[str]]:
    """The rows of all units; where the whole cannot be read, of those that can be read one by one."""
    try:
        return _Readable(folder, origins).table(), []
    except (StoreError, OSError, ValueError, KeyError, pa.ArrowException):
        fine, faults = [], []
        for key in list(origins):
            try:
                _Readable(folder, [key]).table()
                fine.append(key)
            except (StoreError, OSError, ValueError, KeyError, pa.ArrowException) as error:
                faults.append(f"{key}.parquet is no readable unit: {_short(error)}")
                del origins[key]
        return _Readable(folder, fine).table() if fine else TABLE_SCHEMA.empty_table(), faults


def _read_failures(folder: Path) -> tuple[list[Mapping[str, Any]], list[str]]:
    store, found, faults = Store(folder), [], []
    for path in sorted(folder.glob("*.failed.json")) if folder.is_dir() else ():
        key = path.name.removesuffix(".failed.json")
        if key in store:
            continue
        try:
            note = json.loads(path.read_text("utf-8"))
            spec = dict(note["spec"])
            about = {name: spec.get(name) for name in ("model", "revision", "step", "corpus")}
            found.append({"key": key, **about, "error": str(note["error"]), "message": str(note["message"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            faults.append(f"{path.name} is no readable note of a failure: {_short(error)}")
    return found, faults


def _progress(folder: Path) -> str:
    try:
        seen = survey(Store(folder))
    except (StoreError, OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException):
        # Half-written notes; the units themselves are read above.
        return ""
    return seen.sentence() if seen.count("running") + seen.count("waiting") else ""


def _short(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().split("\n")[0][:200]
