"""Rows of a table that share some columns, found by Arrow: a million rows never become a million dicts."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class Groups(NamedTuple):
    """Which rows of a table belong together."""

    keys: pa.Table
    """The columns that the rows of a group share: one row for each group, in the order in which groups first come."""
    order: np.ndarray
    """Numbers of the rows, those of a group together and in the order in which they come."""
    ends: np.ndarray
    """Where in `order` each group ends; the next one starts there."""

    @property
    def sizes(self) -> np.ndarray:
        """How many rows each group has."""
        return np.diff(self.ends, prepend=0)

    def names(self) -> list[tuple[Any, ...]]:
        """What the rows of each group share, as tuples."""
        return list(zip(*(column.to_pylist() for column in self.keys.columns), strict=True))

    def rows(self, group: int) -> np.ndarray:
        """Numbers of the rows of one group."""
        return self.order[self.ends[group - 1] if group else 0 : self.ends[group]]

    def slices(self) -> Iterator[tuple[tuple[Any, ...], slice]]:
        """The names of each group, and where in `order` its rows are."""
        ends = self.ends.tolist()
        for names, start, end in zip(self.names(), [0, *ends][: len(ends)], ends, strict=True):
            yield names, slice(start, end)


def group_rows(table: pa.Table, columns: Sequence[str]) -> Groups:
    """Find the rows that agree in these columns; a missing value agrees with a missing value.

    >>> groups = group_rows(pa.table({"model": ["a", "b", "a"], "value": [1.0, 2.0, 3.0]}), ["model"])
    >>> [(names, groups.order[rows].tolist()) for names, rows in groups.slices()]
    [(('a',), [0, 2]), (('b',), [1])]
    """
    numbered = table.select(list(columns)).append_column(" row", pa.array(np.arange(table.num_rows)))
    groups = numbered.group_by(list(columns), use_threads=False).aggregate([(" row", "list")])
    rows = groups[" row_list"]
    return Groups(
        keys=groups.select(list(columns)),
        order=pc.list_flatten(rows).to_numpy(),  # pyright: ignore[reportAttributeAccessIssue]
        ends=np.cumsum(pc.list_value_length(rows).to_numpy()),  # pyright: ignore[reportAttributeAccessIssue]
    )


def list_matrix(lists: pa.ChunkedArray) -> np.ndarray:
    """A column of lists of numbers as a matrix, a row each; NaN where a list is shorter than the longest, or missing.

    >>> list_matrix(pa.chunked_array([[[1.0, None], [2.0], None]]))
    array([[ 1., nan],
           [ 2., nan],
           [nan, nan]])
    """
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
    matrix = np.full((len(lengths), int(lengths.max(initial=0))), np.nan)
    numbers = pc.list_flatten(lists).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
    matrix[np.arange(matrix.shape[1]) < lengths[:, None]] = numbers
    return matrix
