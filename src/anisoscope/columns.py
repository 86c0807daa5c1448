"""The columns of `Store.table()`: those of a Record, then the settings of the Spec that the row was measured with."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from typing import Any

import pyarrow as pa

from anisoscope.records import Record, Spec

_RECORD_TYPES = {
    "str": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "tuple[float, ...]": pa.list_(pa.float64()),
}
# Text is stored once for each distinct value: every row of a result repeats its settings.
_TEXT = pa.dictionary(pa.int32(), pa.string())
_SETTING_TYPES = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}

# Fields of a Spec that are columns of a Record already.
_IN_RECORDS = ("model", "revision", "step", "corpus", "run")
# Fields that choose which rows a result has; the rows name their site, population and metric themselves.
_CHOOSE_ROWS = ("sites", "populations", "metrics", "gride_scales")
# Fields whose name is a column of a Record with another meaning.
_RENAMED = {"tokens": "measured_tokens", "rank": "requested_rank", "proxy": "requested_proxy"}


def _annotation(item: Field[Any]) -> str:
    """The type of a field as text, without the None that it may hold instead."""
    name = item.type.__name__ if isinstance(item.type, type) and "[" not in str(item.type) else str(item.type)
    return name.removesuffix(" | None")


SCHEMA = pa.schema([(item.name, _RECORD_TYPES[_annotation(item)]) for item in fields(Record)])
"""One column for each field of a Record: what a result file holds."""

_FIELDS = {item.name for item in fields(Spec)}
_SETTINGS = {item.name: item for item in fields(Spec) if item.name not in (*_IN_RECORDS, *_CHOOSE_ROWS)}

SETTINGS_SCHEMA = pa.schema(
    [(_RENAMED.get(name, name), _SETTING_TYPES.get(_annotation(item), _TEXT)) for name, item in _SETTINGS.items()]
)
"""One column for each setting that can differ between two results of one model, text and checkpoint."""

TABLE_SCHEMA = pa.schema([*SCHEMA, *SETTINGS_SCHEMA])

# These differ between checkpoints of one series, or choose which rows a result has.
_OF_ONE_SERIES = ("weights", "proxy_from", "requested_proxy", "gradients", "controls")

SERIES_SETTINGS = tuple(name for name in SETTINGS_SCHEMA.names if name not in _OF_ONE_SERIES)
"""Settings in which the checkpoints of one series agree: numbers that differ in one of them are not mixed."""


def settings_row(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a Spec, given as a dict of its fields, as one row of columns; tuples are joined with commas.

    A field that the Spec does not have, because an older version wrote it, has its default. Fields of a newer version
    are named in `unknown_fields`, so that rows which differ in them are not taken for rows of one setting.

    >>> row = settings_row({"model": "m", "tokens": 8192, "controls": ["shares", "type_disjoint"]})
    >>> row["measured_tokens"], row["seq_len"], row["requested_rank"], row["controls"]
    (8192, 512, '16', 'shares,type_disjoint')
    """
    row = {}
    unknown = [f"{name}={value}" for name, value in sorted(spec.items()) if name not in _FIELDS]
    for name, item in _SETTINGS.items():
        value = unknown if name == "unknown_fields" else spec.get(name, item.default)
        column = _RENAMED.get(name, name)
        if value is not None and SETTINGS_SCHEMA.field(column).type == _TEXT:
            value = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        row[column] = value
    return row


def settings_columns(specs: Iterable[Mapping[str, Any]], result_numbers: pa.Array) -> list[pa.Array]:
    """The columns of `SETTINGS_SCHEMA` for rows of several results; each row has the place of its result in `specs`."""
    found = [settings_row(spec) for spec in specs]
    columns = []
    for column in SETTINGS_SCHEMA:
        text = pa.types.is_dictionary(column.type)
        values = pa.array([row[column.name] for row in found], pa.string() if text else column.type)
        columns.append((values.dictionary_encode() if text else values).take(result_numbers))
    return columns


def record_from(row: Mapping[str, Any]) -> Record:
    """The Record of a row of a result file or of `Store.table()`."""
    columns = {name: row[name] for name in SCHEMA.names if name in row}
    columns["values"] = tuple(math.nan if value is None else value for value in row.get("values") or ())
    return Record(**columns)
