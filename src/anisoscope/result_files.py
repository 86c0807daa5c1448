"""One result file: how it is written, and the one function that reads it and decides whether it can be trusted.

    KEY.parquet              rows of the Records; in the file's metadata the Spec, the provenance and a SHA-256
    KEY.<hash>.safetensors   arrays that belong to it, where there are some; the metadata has their SHA-256

The SHA-256 is that of the whole Parquet file with zeros in its own place: a changed bit anywhere is found, in the rows,
in the Spec or in Parquet's own headers. Files of version 1 have none; they are read, and their Spec is compared with
their key. A result whose attachment was changed is damaged; where the attachment is missing its rows are read.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anisoscope.columns import SCHEMA
from anisoscope.errors import StoreError
from anisoscope.records import KEY_VERSION, Record, Spec, Unit, key_of_version_1

STORE_VERSION = 2
_METADATA = b"anisoscope"
# The place of the checksum: the last field of the metadata, so that no text of a Spec can stand behind it.
_CHECKSUM = b'"file_sha256": "'
_ZEROS = b"0" * 64
# Columns without None in their type hold a value in every row.
_NEVER_NULL = [item.name for item in fields(Record) if "None" not in str(item.type)]
_LATER_COLUMNS = ("stage", "suspect", "run", "low", "high")
"""Columns that the first result files did not have."""

Verdict = Literal["damaged", "foreign", "duplicate"]
Stamp = tuple[int, ...]
"""Size and time of modification of a file, and of its attachment."""


class UnusableFileError(StoreError):
    """A file in a run folder that is not read as a result, and why."""

    def __init__(self, name: str, verdict: Verdict, reason: str) -> None:
        if verdict == "damaged" and not re.fullmatch(r"[0-9a-f]{20}\.parquet", name):
            # No command measures what has such a name.
            verdict = "foreign"
        super().__init__(_SENTENCES[verdict].format(name=printable(name), reason=reason))
        self.name, self.verdict = name, verdict


_SENTENCES = {
    "damaged": "{name} is damaged: {reason}; the command that measured it measures it again",
    "foreign": "{name} is no result of anisoscope: {reason}; it is not read",
    "duplicate": "{name} is a copy: {reason}; it is not counted again",
}


@dataclass(frozen=True)
class ResultFile:
    """What a good result file says beside its rows."""

    name: str
    """Of the file."""
    stamp: Stamp
    key: str
    """Of its Spec, as this version computes it; the file of an older version has another name."""
    spec: str
    """As JSON, and so is the provenance: of thousands of results few are looked at."""
    provenance: str
    attachment: str | None
    """Name of the file of its arrays, which may be missing: a run can be handed on without them."""

    @property
    def has_arrays(self) -> bool:
        """Whether arrays were written with it and are there."""
        return len(self.stamp) > len(("size", "time"))

    @property
    def finished(self) -> float:
        """When it was written, in seconds."""
        return self.stamp[1] / 1e9


def write_result(unit: Unit, attachments_sha256: str | None) -> bytes:
    """A unit as the bytes of its result file."""
    metadata: dict[str, Any] = {
        "store_version": STORE_VERSION,
        "key_version": KEY_VERSION,
        "key": unit.key,
        "spec": unit.spec.as_dict(),
        "provenance": dict(unit.provenance),
    }
    if attachments_sha256 is not None:
        metadata["attachments_sha256"] = attachments_sha256
    rows = pa.Table.from_pylist([vars(record) | {"key": unit.key} for record in unit.records], schema=SCHEMA)
    if empty := _empty_columns(rows):
        raise StoreError(f"a result of {unit.spec.model} cannot be stored: rows have no {', '.join(empty)}")
    # Results are small and read by the thousand: compression would cost more than it saves.
    return write_parquet([rows], metadata, compression="none")


def write_parquet(tables: Sequence[pa.Table], metadata: dict[str, Any], *, compression: str) -> bytes:
    """Tables of one schema as the row groups of a Parquet file, with metadata and the checksum of the whole."""
    text = json.dumps(metadata | {"file_sha256": _ZEROS.decode()})
    sink = pa.BufferOutputStream()
    # With the schema of Arrow in it, a file would hold its metadata twice.
    settings = {"compression": compression, "write_statistics": False, "store_schema": False}
    with pq.ParquetWriter(sink, tables[0].schema, **settings) as writer:
        writer.add_key_value_metadata({_METADATA: text.encode()})
        for table in tables:
            writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    place = data.rindex(_CHECKSUM) + len(_CHECKSUM)
    return data[:place] + hashlib.sha256(data).hexdigest().encode() + data[place + len(_ZEROS) :]


def has_right_checksum(data: bytes) -> bool | None:
    """Whether a Parquet file is as it was written; None where it has no checksum."""
    place = data.rfind(_CHECKSUM) + len(_CHECKSUM)
    if place < len(_CHECKSUM):
        return None
    view, end = memoryview(data), place + len(_ZEROS)
    digest = hashlib.sha256(view[:place])
    digest.update(_ZEROS)
    digest.update(view[end:])
    return digest.hexdigest().encode() == data[place:end]


def metadata_of(schema: pa.Schema) -> dict[str, Any] | None:
    """What anisoscope wrote into a file's metadata; None where it wrote nothing."""
    text = (schema.metadata or {}).get(_METADATA)
    return None if text is None else json.loads(text)


def attachment_name(key: str, sha256: str) -> str:
    """Name of the file of a result's arrays."""
    return f"{key}.{sha256[:12]}.safetensors"


def read_regular_file(path: Path) -> tuple[bytes, Stamp]:
    """The content of a file with its size and time; anything but a file is refused, and no pipe is waited for."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    # By the handle, not `open(path)`: of a folder that would say a number in place of its name, and leave it open.
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise IsADirectoryError(f"it is a {'folder' if stat.S_ISDIR(status.st_mode) else 'pipe or device'}")
        with open(handle, "rb", closefd=False) as file:
            return file.read(), stamp_of(status)
    finally:
        os.close(handle)


def stamp_of(status: os.stat_result) -> Stamp:
    """What tells one content of a file from another without reading it."""
    return status.st_size, status.st_mtime_ns


def read_result(path: Path) -> tuple[ResultFile, pa.Table, bytes | None]:
    """A result file with its rows and the bytes of its attachment.

    Raises FileNotFoundError where there is no file, and UnusableFileError with the reason where it is damaged, foreign
    or a copy under another name.
    """
    name, stem = path.name, path.stem
    try:
        data, stamp = read_regular_file(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise UnusableFileError(name, "foreign", "it is a link to a file that is not there") from None
        raise
    except OSError as error:
        is_file = _is_file(path)
        raise UnusableFileError(name, "damaged" if is_file else "foreign", first_line(error)) from error
    checked = has_right_checksum(data)
    if checked is False:
        raise UnusableFileError(name, "damaged", "its content is not what was written (SHA-256)")
    try:
        rows = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
        metadata = metadata_of(rows.schema)
    except Exception as error:  # whatever a broken file makes the reader raise
        raise UnusableFileError(name, "damaged", f"it cannot be read ({first_line(error)})") from error
    if metadata is None:
        raise UnusableFileError(name, "foreign", "its metadata is not that of a result")
    try:
        _check_version(name, metadata, checked)
        rows = _with_all_columns(name, rows)
        stored_key, key = _keys(name, metadata, rows)
        spec, provenance = json.dumps(metadata["spec"]), json.dumps(metadata["provenance"])
    except UnusableFileError:
        raise
    except Exception as error:  # metadata may hold anything
        raise UnusableFileError(name, "damaged", f"{type(error).__name__}: {first_line(error)}") from error
    if stored_key != stem:
        raise UnusableFileError(name, "duplicate", f"it holds the rows of {stored_key}.parquet")
    attached, attached_stamp, attachment = _read_attachment(path, stored_key, metadata.get("attachments_sha256"))
    found = ResultFile(
        name=name, stamp=stamp + attached_stamp, key=key, spec=spec, provenance=provenance, attachment=attachment
    )
    return found, rows, attached


def _check_version(name: str, metadata: dict[str, Any], checked: bool | None) -> None:
    version = metadata["store_version"]
    if version > STORE_VERSION:
        raise UnusableFileError(name, "foreign", f"a newer version wrote it (format {version}; update anisoscope)")
    if version > 1 and checked is None:
        raise UnusableFileError(name, "damaged", "its checksum is not readable")


def _with_all_columns(name: str, rows: pa.Table) -> pa.Table:
    """The columns of a Record: those that an older version did not have are empty, others are left out."""
    rows = rows.replace_schema_metadata(None)
    there = {*rows.column_names, *_LATER_COLUMNS}
    if missing := [column for column in SCHEMA.names if column not in there]:
        raise UnusableFileError(name, "foreign", f"it has no column {', '.join(missing)}")
    if not rows.schema.equals(SCHEMA):
        for column in _LATER_COLUMNS:
            if column not in rows.column_names:
                rows = rows.append_column(column, pa.nulls(rows.num_rows, SCHEMA.field(column).type))
        rows = rows.select(SCHEMA.names).cast(SCHEMA)
    if empty := _empty_columns(rows):
        raise UnusableFileError(name, "damaged", f"rows have no {', '.join(empty)}")
    return rows


def _empty_columns(rows: pa.Table) -> list[str]:
    """Columns that must have a value in every row, and have not."""
    return [column for column in _NEVER_NULL if rows[column].null_count]


def _keys(name: str, metadata: dict[str, Any], rows: pa.Table) -> tuple[str, str]:
    """The key that a file was stored under, and that of its Spec now."""
    stored = set(rows["key"].unique().to_pylist()) or {metadata.get("key") or key_of_version_1(metadata["spec"])}
    if len(stored) > 1:
        raise UnusableFileError(name, "damaged", f"it holds rows of {len(stored)} results")
    (stored_key,), key_version = stored, metadata.get("key_version", 1)
    if key_version == 1 and stored_key != key_of_version_1(metadata["spec"]):
        raise UnusableFileError(name, "damaged", "its key is not that of its settings")
    key = stored_key if key_version == KEY_VERSION else Spec.from_dict(metadata["spec"]).key
    return stored_key, key


def _read_attachment(path: Path, key: str, sha256: str | None) -> tuple[bytes | None, Stamp, str | None]:
    if sha256 is None:
        return None, (), None
    name = attachment_name(key, sha256)
    try:
        data, stamp = read_regular_file(path.with_name(name))
    except FileNotFoundError:
        return None, (), name
    except OSError as error:
        raise UnusableFileError(path.name, "damaged", f"{name} cannot be read ({first_line(error)})") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UnusableFileError(path.name, "damaged", f"{name} is not the file that it was written with")
    return data, stamp, name


def load_arrays(file: ResultFile, data: bytes | None) -> dict[str, np.ndarray]:
    """The arrays of a result; refused where they are missing."""
    # The numpy part of safetensors needs no torch: results open on any laptop.
    from safetensors.numpy import load

    if file.attachment is None:
        return {}
    if data is None:
        raise StoreError(
            f"{file.attachment} is missing; delete {file.name} and run the command that measured it to have both again"
        )
    return load(data)


def replace_keys(text: str, current: dict[str, str]) -> str:
    """A text that names results, with the keys that they have now."""
    return re.sub(r"\b[0-9a-f]{20}\b", lambda found: current.get(found[0], found[0]), text)


def printable(name: str) -> str:
    """A file name as text that every page and terminal can show: names need not be UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return True


def first_line(error: BaseException) -> str:
    """What an error says, shortened."""
    return (str(error) or type(error).__name__).strip().split("\n")[0][:200]
