"""The merged file of a run folder: the rows of thousands of results in one Parquet file, which is read in a second.

Row groups of rows come first, in the order of `Store.table()`; each row has the number of its result in place of its
key. The last row group is the index: a row for each result with its file's name, size and time of modification, its
key, Spec and provenance. A result whose file has another size or time than the index says is read from its own file.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anisoscope.columns import SCHEMA
from anisoscope.records import KEY_VERSION
from anisoscope.result_files import ResultFile, has_right_checksum, metadata_of, write_parquet

VERSION = 2
NAME = f".merged-{VERSION}.parquet"
# Also in the metadata: a file that was written with others is not read.
_MADE_FOR = {"merged_version": VERSION, "key_version": KEY_VERSION, "columns": SCHEMA.names}
ROWS_SCHEMA = pa.schema([*(field for field in SCHEMA if field.name != "key"), pa.field("result", pa.int32())])
"""The columns of a Record, and the number of the result in place of the key."""
_INDEX_SCHEMA = pa.schema(
    [
        ("file_name", pa.string()),
        ("file_stamp", pa.list_(pa.int64())),
        ("file_key", pa.string()),
        ("file_spec", pa.string()),
        ("file_provenance", pa.string()),
        ("file_attachment", pa.string()),
    ]
)
_FIELDS = [name.removeprefix("file_") for name in _INDEX_SCHEMA.names]


@dataclass(frozen=True, kw_only=True)
class MergedFile:
    """A merged file that was read and is whole."""

    files: tuple[ResultFile, ...]
    """By number."""
    file: pq.ParquetFile

    def rows(self) -> pa.Table:
        """The rows of all results, in the order of the table."""
        groups = range(self.file.num_row_groups - 1)
        if not groups:
            return ROWS_SCHEMA.empty_table()
        return self.file.read_row_groups(list(groups), columns=ROWS_SCHEMA.names).cast(ROWS_SCHEMA)


def write_merged(files: Sequence[ResultFile], rows: pa.Table) -> bytes:
    """The merged file of results and their rows."""
    columns = [[getattr(file, name) for file in files] for name in _FIELDS]
    index = pa.table(dict(zip(_INDEX_SCHEMA.names, columns, strict=True)), schema=_INDEX_SCHEMA)
    return write_parquet([_widen(rows), _widen(index)], _MADE_FOR, compression="zstd")


def read_merged(data: bytes) -> MergedFile | None:
    """What `write_merged` wrote; None where it is damaged or of another version."""
    if not has_right_checksum(data):
        return None
    file = pq.ParquetFile(pa.BufferReader(data))
    metadata = metadata_of(file.schema_arrow) or {}
    if any(metadata.get(name) != value for name, value in _MADE_FOR.items()):
        return None
    index = file.read_row_group(file.num_row_groups - 1, columns=_INDEX_SCHEMA.names)
    columns = [index[name].to_pylist() for name in _INDEX_SCHEMA.names]
    rows = (dict(zip(_FIELDS, values, strict=True)) for values in zip(*columns, strict=True))
    return MergedFile(files=tuple(ResultFile(**row | {"stamp": tuple(row["stamp"])}) for row in rows), file=file)


def _widen(table: pa.Table) -> pa.Table:
    """The table with the columns of rows and of the index, those that it lacks empty."""
    schema = pa.schema([*ROWS_SCHEMA, *_INDEX_SCHEMA])
    columns = [
        table[field.name] if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


class RowCollector:
    """Rows of results, collected one after the other."""

    def __init__(self) -> None:
        self.files: list[ResultFile] = []
        self._tables: list[pa.Table] = []
        self._pending: list[pa.Table] = []

    def add(self, file: ResultFile, rows: pa.Table) -> None:
        """The rows of one more result."""
        numbers = pa.array(np.full(rows.num_rows, len(self.files), np.int32))
        self.files.append(file)
        self._pending.append(rows.drop_columns(["key"]).append_column("result", numbers))
        if len(self._pending) == 256:
            # Thousands of small tables would take several times the memory of their rows.
            self._tables.append(self._joined())
            self._pending = []

    def take_table(self) -> pa.Table:
        """All rows, which are not kept here any longer; `result` is the place in `files`."""
        tables, self._tables = [*self._tables, self._joined()], []
        self._pending = []
        return pa.concat_tables([ROWS_SCHEMA.empty_table(), *tables])

    def _joined(self) -> pa.Table:
        return pa.concat_tables([ROWS_SCHEMA.empty_table(), *self._pending]).combine_chunks()
