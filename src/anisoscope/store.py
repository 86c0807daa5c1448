"""A folder of immutable unit files, one Parquet file each; its existence is completion.

    RUN/<key>.parquet        records; the Spec and provenance in the file's metadata
    RUN/<key>.safetensors    attachments, written first; their hash stands in the Parquet metadata
    RUN/<key>.failed.json    the last error of a unit that failed; a success removes it

Every file is written under a temporary name, flushed to disk and renamed: a reader never sees half a unit, and a killed
writer leaves at most a hidden temporary file.
"""

import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anisoscope.errors import StoreError
from anisoscope.records import Record, Spec, Unit, site_order

STORE_VERSION = 1
_METADATA = b"anisoscope"

_TYPES = {
    "str": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "tuple[float, ...]": pa.list_(pa.float64()),
}


def _column_type(annotation: Any) -> pa.DataType:
    name = str(getattr(annotation, "__name__", annotation)) if annotation in (str, int, float) else str(annotation)
    return _TYPES[name.removesuffix(" | None")]


SCHEMA = pa.schema([(item.name, _column_type(item.type)) for item in fields(Record)])


class Store:
    """The units of a run."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Name a run folder; it is made when the first unit is put."""
        self.folder = Path(folder)

    def keys(self) -> set[str]:
        """Keys of the finished units."""
        return {path.stem for path in self._parts()}

    def __contains__(self, key: str) -> bool:
        return (self.folder / f"{key}.parquet").is_file()

    def put(self, unit: Unit) -> Path:
        """Write a unit; one that is already there stays as it is."""
        path = self.folder / f"{unit.key}.parquet"
        if unit.key in self:
            return path
        metadata = {"store_version": STORE_VERSION, "spec": asdict(unit.spec), "provenance": dict(unit.provenance)}
        if unit.attachments:
            # The numpy part of safetensors needs no torch: results open on any laptop.
            from safetensors.numpy import save

            arrays = {name: np.ascontiguousarray(values) for name, values in unit.attachments.items()}
            data = save(arrays)
            metadata["attachments_sha256"] = hashlib.sha256(data).hexdigest()
            self._write(f"{unit.key}.safetensors", data)
        rows = [asdict(record) for record in unit.records]
        schema = SCHEMA.with_metadata({_METADATA: json.dumps(metadata).encode()})
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink, compression="zstd")
        self._write(path.name, sink.getvalue().to_pybytes())
        (self.folder / f"{unit.key}.failed.json").unlink(missing_ok=True)
        return path

    def put_failure(self, spec: Spec, error: BaseException) -> Path:
        """Note that a unit failed, and why; a later success replaces it."""
        note = {
            "spec": asdict(spec),
            "error": type(error).__name__,
            "message": str(error),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        return self._write(f"{spec.key}.failed.json", json.dumps(note, indent=1).encode())

    def get(self, key: str) -> Unit:
        """A unit as it was put."""
        try:
            table = pq.read_table(self.folder / f"{key}.parquet")
        except (OSError, pa.ArrowInvalid) as error:
            raise StoreError(f"no readable unit {key} in {self.folder}: {error}") from error
        metadata = _metadata_of(table.schema)
        records = tuple(_record_from(row) for row in table.to_pylist())
        attachments = self.attachment(key) if "attachments_sha256" in metadata else {}
        spec = Spec.from_dict(metadata["spec"])
        return Unit(spec=spec, provenance=metadata["provenance"], records=records, attachments=attachments)

    def attachment(self, key: str) -> dict[str, np.ndarray]:
        """The arrays attached to a unit; refused when they are not those it was written with."""
        from safetensors.numpy import load

        try:
            wanted = _metadata_of(pq.read_schema(self.folder / f"{key}.parquet")).get("attachments_sha256")
            data = (self.folder / f"{key}.safetensors").read_bytes() if wanted else b""
        except (OSError, pa.ArrowInvalid) as error:
            raise StoreError(f"no readable attachment of unit {key} in {self.folder}: {error}") from error
        if not wanted:
            return {}
        if hashlib.sha256(data).hexdigest() != wanted:
            raise StoreError(f"{self.folder / key}.safetensors is not the file its unit was written with")
        return load(data)

    def table(self) -> pa.Table:
        """One row per record of every finished unit, in order of model, step, site, metric."""
        tables = [pq.read_table(path, schema=SCHEMA).replace_schema_metadata(None) for path in self._parts()]
        table = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
        sites = [site_order(name) for name in table["site"].to_pylist()]
        columns = [table[name].to_pylist() for name in ("model", "step", "stack", "metric", "population")]
        order = sorted(
            range(table.num_rows),
            key=lambda i: (
                columns[0][i],
                -1 if columns[1][i] is None else columns[1][i],
                columns[2][i] or "",
                sites[i],
                columns[3][i],
                columns[4][i],
            ),
        )
        return table.take(pa.array(order, pa.int64()))

    def failures(self) -> list[dict[str, Any]]:
        """What is known of the units that failed and have not succeeded since."""
        paths = sorted(self.folder.glob("*.failed.json")) if self.folder.is_dir() else []
        failed = (path for path in paths if path.name.removesuffix(".failed.json") not in self)
        return [
            {"key": path.name.removesuffix(".failed.json"), **json.loads(path.read_text("utf-8"))} for path in failed
        ]

    def _parts(self) -> Iterator[Path]:
        if self.folder.is_dir():
            yield from sorted(path for path in self.folder.glob("*.parquet") if not path.name.startswith("."))

    def check_writable(self) -> None:
        """Make the folder and prove that it can be written, before hours of work depend on it."""
        probe = self._write(f".probe-{secrets.token_hex(4)}", b"")
        probe.unlink(missing_ok=True)

    def _write(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        temporary = self.folder / f".tmp-{name}-{secrets.token_hex(4)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            # The rename itself is on disk only once its folder is.
            handle = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            temporary.unlink(missing_ok=True) if self.folder.is_dir() else None
            raise StoreError(f"cannot write to the run folder {self.folder}: {error}") from error
        return path


def _metadata_of(schema: pa.Schema) -> dict[str, Any]:
    return json.loads((schema.metadata or {}).get(_METADATA, b"{}"))


def _record_from(row: dict[str, Any]) -> Record:
    values = tuple(math.nan if value is None else value for value in row.pop("values") or ())
    return Record(values=values, **row)
