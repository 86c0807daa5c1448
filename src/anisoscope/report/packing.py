"""Tables and charts as compact text for a page: gzip in base64, and data that charts share kept once."""

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

# Digits a chart can show; the data for download keep all of theirs.
_DIGITS = 6
# A column with fewer different values than this share of its rows is kept as a list of values and their numbers.
_FEW = 1 / 3


def pack(data: bytes) -> str:
    """Bytes as text that a page can hold and a browser can unpack; nothing in it can be markup."""
    # Without a time stamp the same data are the same text.
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode("ascii")


def pack_json(value: Any) -> str:
    """JSON, packed."""
    return pack(json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode())


def pack_table(table: pa.Table) -> str:
    """A table with all its digits, column by column and without its lists, packed; NaN is told from what is absent."""
    kept = [name for name in table.column_names if not pa.types.is_nested(table.schema.field(name).type)]
    columns = []
    for name in kept:
        column = table[name].combine_chunks()
        column = column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
        encoded = column.dictionary_encode(null_encoding="encode")
        different = [_exact(value) for value in encoded.dictionary.to_pylist()]
        if len(different) == 1:
            columns.append({"all": different[0]})
        elif len(different) < _FEW * table.num_rows:
            columns.append({"of": different, "at": encoded.indices.to_pylist()})
        else:
            columns.append({"each": [_exact(value) for value in table[name].to_pylist()]})
    return pack_json({"names": kept, "columns": columns, "length": table.num_rows})


def _exact(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Shelf:
    """Data of charts, each kept once whoever uses it, column by column."""

    def __init__(self) -> None:
        """An empty shelf."""
        self.datasets: dict[str, dict[str, Any]] = {}

    def take_data(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """A Vega-Lite spec without its data, which are put here, and the names they have here."""
        named: dict[str, str] = {name: self.put(rows) for name, rows in spec.get("datasets", {}).items()}

        def strip(part: Any) -> Any:
            if isinstance(part, list):
                return [strip(item) for item in part]
            if not isinstance(part, Mapping):
                return part
            data = part.get("data")
            rest = {name: strip(item) for name, item in part.items() if name != "data"}
            if isinstance(data, Mapping) and isinstance(data.get("values"), list):
                name = self.put(data["values"])
                named[name] = name
                return {**rest, "data": {"name": name}}
            if isinstance(data, Mapping) and data.get("name") in named:
                return {**rest, "data": {"name": named[data["name"]]}}
            return rest if data is None else {**rest, "data": strip(data)}

        stripped = strip({name: value for name, value in spec.items() if name not in ("datasets", "config")})
        return {"spec": stripped, "datasets": sorted(set(named.values()))}

    def put(self, rows: list[dict[str, Any]]) -> str:
        """Keep rows; the same rows have the same name."""
        names = list(dict.fromkeys(name for row in rows for name in row))
        columns = [_column([_rounded(row.get(name)) for row in rows]) for name in names]
        packed = {"names": names, "columns": columns, "length": len(rows)}
        text = json.dumps(packed, separators=(",", ":"), ensure_ascii=False)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.datasets[name] = packed
        return name

    def put_table(self, table: pa.Table) -> str:
        """Keep a table."""
        kept = [name for name in table.column_names if not pa.types.is_nested(table.schema.field(name).type)]
        return self.put(table.select(kept).to_pylist())


def _column(values: list[Any]) -> dict[str, Any]:
    """A constant as itself, few different values by number, else the values."""
    numbers: dict[Any, int] = {}
    try:
        # 1, 1.0 and True are equal and not the same.
        at = [numbers.setdefault((type(value), value), len(numbers)) for value in values]
    except TypeError:
        return {"each": values}
    different = [value for _, value in numbers]
    if len(different) == 1:
        return {"all": different[0]}
    return {"of": different, "at": at} if len(different) < _FEW * len(values) else {"each": values}


def _rounded(value: Any) -> Any:
    """No more digits than a chart can show, and null in place of what is no number."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value
