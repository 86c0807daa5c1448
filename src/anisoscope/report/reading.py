"""A run folder as it stands: good results are read, and files that cannot be read are named."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from anisoscope.columns import record_from
from anisoscope.errors import StoreError
from anisoscope.records import Record, Spec, Unit
from anisoscope.status import survey
from anisoscope.store import PLACE, Store


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
            except StoreError:  # it was removed or damaged since the table was read
                continue
            spec = Spec.from_dict(origin.spec)
            yield Unit(spec=spec, provenance=origin.provenance, records=firsts.get(key, ()), attachments=arrays)

    def _first_records(self) -> dict[str, tuple[Record, ...]]:
        places: dict[str, int] = {}
        for place, key in enumerate(self.table["key"].to_pylist()):
            places.setdefault(key, place)
        rows = self.table.drop_columns(["values"]).take(pa.array(places.values(), pa.int64())).to_pylist()
        return {row["key"]: (record_from(row),) for row in rows}


def read_run(folder: Path, name: str | None = None) -> Run:
    """Whatever a folder holds now; an absent folder is a run without units."""
    store = Store(folder)
    results, table = store.results(), store.table()
    failures = (row | {place: row["spec"].get(place) for place in PLACE} for row in store.failures())
    return Run(
        name=name or folder.resolve().name,
        folder=folder,
        table=table,
        origins={
            key: Origin(
                spec=json.loads(file.spec),
                provenance=json.loads(file.provenance),
                attached=file.has_arrays,
            )
            for key, file in results.items()
        },
        failures=tuple(failures),
        unreadable=tuple(store.problems()),
        progress=_progress(store),
    )


def _progress(store: Store) -> str:
    seen = survey(store)
    return seen.sentence() if seen.count("running") + seen.count("waiting") else ""
