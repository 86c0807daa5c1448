"""What chance would give: the null of a metric at n points in d dimensions.

Isotropic nulls come from a table (data/nulls.csv) that scripts/make_nulls.py simulates: Gaussian clouds on a grid of n
and d, the mean over trials. In between, the logarithm of the value is interpolated linearly in log n and log d.
"""

import csv
import functools
import importlib.resources
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from anisoscope.metrics import Metric


def null_of(metric: Metric, points: float, dim: int, settings: Mapping[str, Any]) -> tuple[float, str | None]:
    """The null at `points` points per batch in `dim` dimensions; NaN with a sentence where there is none."""
    if metric.null == "none":
        return math.nan, None
    if points < metric.min_points(dim, settings.get("neighbors", 0)):
        return math.nan, None
    if metric.closed_form is not None:
        return metric.closed_form(round(points), dim), None
    variant = ";".join(f"{name}={settings[name]:g}" for name in metric.settings)
    table = load_table()
    if (metric.name, variant) not in table:
        shipped = sorted(held for name, held in table if name == metric.name)
        return math.nan, f"no null was simulated for {variant or 'it'} (only {', '.join(shipped) or 'none'})"
    n_grid, d_grid, values = table[metric.name, variant]
    if not n_grid[0] <= points <= n_grid[-1] or not d_grid[0] <= dim <= d_grid[-1]:
        limits = f"{n_grid[0]:.0f}-{n_grid[-1]:.0f} points in {d_grid[0]:.0f}-{d_grid[-1]:.0f} dimensions"
        return math.nan, f"the null was simulated for {limits} only"
    return _interpolate(n_grid, d_grid, values, points, dim), None


def _interpolate(n_grid: np.ndarray, d_grid: np.ndarray, values: np.ndarray, n: float, d: float) -> float:
    row = np.array([np.interp(math.log(n), np.log(n_grid), column) for column in np.log(values + 1e-300).T])
    # A cell the metric cannot fill (fewer points than it needs) is NaN and must not colour its neighbours.
    with np.errstate(invalid="ignore"):
        result = float(np.exp(np.interp(math.log(d), np.log(d_grid), row)))
    return 0.0 if result < 1e-200 else result


@functools.cache
def load_table() -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(metric, settings) -> grid of n, grid of d, values (n, d)."""
    cells: dict[tuple[str, str], dict[tuple[float, float], float]] = {}
    with importlib.resources.files("anisoscope").joinpath("data/nulls.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = row["metric"], row["settings"]
            cells.setdefault(key, {})[float(row["n"]), float(row["d"])] = float(row["null"])
    table = {}
    for key, values in cells.items():
        n_grid, d_grid = (np.unique([cell[axis] for cell in values]) for axis in (0, 1))
        grid = np.array([[values.get((n, d), math.nan) for d in d_grid] for n in n_grid])
        table[key] = n_grid, d_grid, grid
    return table
