"""Tables as CSV and Parquet files, with all digits."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.atomic import complete_file

# A spreadsheet program takes a cell that begins with one of these for a formula, and may run it.
FORMULA_START = r"^[=+\-@\t\r]"
FORMATS = ("csv", "parquet")


def write_table(table: pa.Table, path: Path, *, to: str) -> None:
    """Write a table as `to`: `csv` or `parquet`."""
    with complete_file(path) as temporary:
        if to == "parquet":
            import pyarrow.parquet as pq

            pq.write_table(table, temporary, compression="zstd")
        else:
            import pyarrow.csv as pcsv

            pcsv.write_csv(for_csv(table), str(temporary), pcsv.WriteOptions(quoting_style="needed"))


def for_csv(table: pa.Table) -> pa.Table:
    """A table of cells: lists are the text of a JSON array, and text that could be a formula follows a `'`."""
    for place, column in enumerate(table.schema):
        if pa.types.is_list(column.type):
            table = table.set_column(place, column.name, _json_arrays(table[column.name]))
        elif pa.types.is_string(column.type):
            safe = pc.replace_substring_regex(table[column.name], f"({FORMULA_START})", r"'\1")  # pyright: ignore[reportAttributeAccessIssue]
            table = table.set_column(place, column.name, safe)
    return table


def _json_arrays(lists: pa.ChunkedArray) -> Any:
    """Lists of floats as texts that `json.loads` reads."""
    numbers = pc.list_flatten(lists)  # pyright: ignore[reportAttributeAccessIssue]
    texts = numbers.cast(pa.string()).fill_null("null")
    for text, name in (("nan", "NaN"), ("inf", "Infinity"), ("-inf", "-Infinity")):
        texts = pc.if_else(pc.equal(texts, text), name, texts)  # pyright: ignore[reportAttributeAccessIssue]
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), texts), ", ")  # pyright: ignore[reportAttributeAccessIssue]
    arrays = pc.binary_join_element_wise("[", joined, "]", "")  # pyright: ignore[reportAttributeAccessIssue]
    return pc.if_else(lists.is_null(), None, arrays)  # pyright: ignore[reportAttributeAccessIssue]
