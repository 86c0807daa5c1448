"""A run folder as it stands: good results are read, and files that cannot be read are named."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.columns import record_from
from anisoscope.errors import StoreError
from anisoscope.grouping import group_rows
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
        """Units that have arrays beside them, with the first of their records; the others are in the table."""
        attached = {key: origin for key, origin in self.origins.items() if origin.attached}
        store, firsts = Store(self.folder), self._first_records(attached)
        for key, origin in attached.items():
            try:
                arrays = store.attachment(key)
            except StoreError:  # it was removed or damaged since the table was read
                continue
            spec = Spec.from_dict(origin.spec)
            yield Unit(spec=spec, provenance=origin.provenance, records=firsts.get(key, ()), attachments=arrays)

    def _first_records(self, keys: Iterable[str]) -> dict[str, tuple[Record, ...]]:
        rows = self.table.filter(pc.field("key").isin(pa.array(keys, pa.string()))).drop_columns(["values"])
        groups = group_rows(rows, ["key"])
        firsts = rows.take(pa.array(groups.order[groups.ends - groups.sizes]))
        return {row["key"]: (record_from(row),) for row in firsts.to_pylist()}


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
