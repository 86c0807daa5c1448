"""What chance would give: the null of a metric at n points in d dimensions.

Isotropic nulls come from a table (data/nulls.csv) that scripts/make_nulls.py simulates: Gaussian clouds on a grid of n
and d, the mean over trials. In between, the logarithm of the value is interpolated by cubics in log n and log d, within
2 %. To this comes the noise of the simulation, spread/√trials in the table: about 1 % for twonn, twonn_mle and gride_2
from 128 points up and 4 % at 8; less for the others.
"""

import csv
import functools
import importlib.resources
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from anisoscope.metrics import Metric


@dataclass(frozen=True, kw_only=True)
class NullTable:
    """The simulated nulls of one metric at one choice of settings."""

    version: int
    """The version of the metric that was simulated."""
    n_grid: np.ndarray
    d_grid: np.ndarray
    values: np.ndarray
    """One row for each n, one column for each d; NaN where the metric has no value."""


def null_of(metric: Metric, points: float | int, dim: int, settings: Mapping[str, Any]) -> tuple[float, str | None]:
    """The null at `points` points per batch in `dim` dimensions; NaN with a sentence where there is none.

    A `control` depends on the points themselves and is measured with them.
    """
    if metric.null in ("none", "control") or points < metric.min_points(dim, settings.get("neighbors", 0)):
        return math.nan, None
    if metric.closed_form is not None:
        return metric.closed_form(round(points), dim), None
    variant, tables = variant_of(metric, settings), load_tables()
    if (metric.name, variant) not in tables:
        shipped = sorted(held for name, held in tables if name == metric.name)
        return math.nan, f"no null was simulated for {variant or 'it'} (only {', '.join(shipped) or 'none'})"
    table = tables[metric.name, variant]
    if table.version != metric.version:
        return math.nan, f"its null was simulated for version {table.version}, and this is version {metric.version}"
    n_grid, d_grid = table.n_grid, table.d_grid
    if not n_grid[0] <= points <= n_grid[-1] or not d_grid[0] <= dim <= d_grid[-1]:
        limits = f"{n_grid[0]:.0f}-{n_grid[-1]:.0f} points in {d_grid[0]:.0f}-{d_grid[-1]:.0f} dimensions"
        return math.nan, f"the null was simulated for {limits} only"
    # Only the cells around `dim` are read.
    around = _around(d_grid, dim)
    along_n = np.array([_interpolate(n_grid, column, points) for column in table.values.T[around]])
    return _interpolate(d_grid[around], along_n, dim), None


def variant_of(metric: Metric, settings: Mapping[str, Any]) -> str:
    """The settings a metric reads, as the table spells them: `discard_fraction=0.1`."""
    return ";".join(f"{name}={settings[name]:g}" for name in metric.settings)


def _interpolate(grid: np.ndarray, values: np.ndarray, at: float | int) -> float:
    """A cubic in logarithms through the four cells around `at`, three at the edges of the grid.

    Next to a cell that is 0 or NaN it is a straight line between the two nearest cells: zeros stay zeros, and a cell
    without a value takes none away from its neighbours.
    """
    right = int(np.searchsorted(grid, at))
    if grid[right] == at:
        return float(values[right])
    around = _around(grid, at)
    y = values[around].tolist()
    if not all(value > 0 for value in y):
        left = right - 1
        share = math.log(at / grid[left]) / math.log(grid[right] / grid[left])
        return float((1 - share) * values[left] + share * values[right])
    x = [math.log(point / at) for point in grid[around].tolist()]
    # Lagrange's weights at 0. In plain Python: for four numbers it is much faster than numpy.
    weights = [math.prod(other / (other - own) for other in x if other != own) for own in x]
    return math.exp(sum(weight * math.log(value) for weight, value in zip(weights, y, strict=True)))


def _around(grid: np.ndarray, at: float | int) -> slice:
    right = int(np.searchsorted(grid, at))
    return slice(max(right - 2, 0), right + 2)


@functools.cache
def load_tables() -> dict[tuple[str, str], NullTable]:
    """(metric, settings) -> its table."""
    cells: dict[tuple[str, str, int], dict[tuple[float, float], float]] = {}
    with importlib.resources.files("anisoscope").joinpath("data/nulls.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = row["metric"], row["settings"], int(row["version"])
            cells.setdefault(key, {})[float(row["n"]), float(row["d"])] = float(row["null"])
    tables = {}
    for (name, variant, version), values in cells.items():
        n_grid, d_grid = (np.unique([cell[axis] for cell in values]) for axis in (0, 1))
        grid = np.array([[values.get((n, d), math.nan) for d in d_grid] for n in n_grid])
        tables[name, variant] = NullTable(version=version, n_grid=n_grid, d_grid=d_grid, values=grid)
    return tables
