"""Does a measure move with the loss, or with a column of your own, over the checkpoints of a training?

Two series that both drift correlate, whatever they are about: two independent random walks of 21 steps pass a test of
their levels more often than not. So each correlation is given for the levels, with an interval from moving blocks and
no p, and for the first differences, with a p from permuted blocks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.settings import one_setting
from anisoscope.conditions import parse_place
from anisoscope.errors import SpecError
from anisoscope.inputs import read_text
from anisoscope.revisions import training_order
from anisoscope.store import name_trainings

MIN_CHECKPOINTS = 8
KINDS = ("pearson", "spearman", "kendall")


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """How two series of one training move together."""

    model: str
    corpus: str
    measure: str
    against: str
    kind: str
    """`pearson`, `spearman` or `kendall`."""
    of: str
    """`levels` or `differences`."""
    value: float
    interval: tuple[float, float]
    p: float
    """Two-sided, for differences alone: for levels that drift no test keeps its level."""
    checkpoints: int
    note: str = ""
    """Which of several settings was used, where there was a choice."""

    def as_json(self) -> dict[str, Any]:
        """For machines: NaN becomes null."""
        clean = {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(self).items()
        }
        return clean | {"interval": [None if math.isnan(end) else end for end in self.interval]}


def correlate_table(
    table: pa.Table,
    measure: str,
    *,
    against: Mapping[tuple[str, int], float] | None = None,
    named: str = "loss",
    seed: int = 0,
    resamples: int = 2000,
    level: float = 0.95,
) -> list[Correlation]:
    """Correlate `METRIC[SITE,POPULATION]` with the loss, or with values by (model, step), model by model.

    Suspect checkpoints and those without a step are left out.
    """
    metric, site, population = parse_place(measure)
    known = name_trainings(table).filter(pc.field("suspect").is_null() & pc.field("step").is_valid())
    named_place = (pc.field("metric") == metric) & (pc.field("site") == site) & (pc.field("population") == population)
    once = one_setting(known.filter(named_place))
    losses = {row["key"]: row["value"] for row in known.filter(pc.field("metric") == "loss").to_pylist()}
    series: dict[tuple[str, str], list[tuple[Any, float, float]]] = {}
    for row in once.table.to_pylist():
        # Not those of a changed norm; of a matrix, the rows as they are.
        if row.get("variant") not in (None, "centred=no"):
            continue
        other = losses.get(row["key"]) if against is None else against.get((row["model"], row["step"]))
        if other is not None and math.isfinite(other) and math.isfinite(row["value"]):
            place = training_order(row["stage"], row["step"], row["revision"])
            series.setdefault((row["model"], row["corpus"]), []).append((place, row["value"], other))
    if not series:
        raise SpecError(f"no checkpoint has both {measure} and {named}")
    found = []
    for (model, corpus), points in sorted(series.items()):
        ordered = sorted(points)
        first, second = (np.array([point[column] for point in ordered]) for column in (1, 2))
        for part in correlate(first, second, seed=seed, resamples=resamples, level=level):
            note = "; ".join(once.notes((model,), (metric, population, corpus)))
            found.append(Correlation(model=model, corpus=corpus, measure=measure, against=named, note=note, **part))
    return found


def correlate(
    first: np.ndarray, second: np.ndarray, *, seed: int = 0, resamples: int = 2000, level: float = 0.95
) -> list[dict[str, Any]]:
    """Each kind of correlation of two series, for their levels and for their first differences.

        r = corr(x_s, y_s),   r_Δ = corr(x_s - x_{s-1}, y_s - y_{s-1})

    Intervals: moving blocks of ⌈n^(1/3)⌉ checkpoints, drawn with replacement, percentiles. p of r_Δ: blocks of Δy are
    permuted against Δx, (1 + #{|r*| ≥ |r|}) / (1 + resamples). NaN below eight checkpoints.
    """
    found = []
    for of, (x, y) in {"levels": (first, second), "differences": (np.diff(first), np.diff(second))}.items():
        chance = np.random.default_rng([seed, of == "levels"])
        enough = len(first) >= MIN_CHECKPOINTS
        drawn = _block_rows(len(x), resamples, chance, permute=False) if enough else None
        shuffled = _block_rows(len(x), resamples, chance, permute=True) if enough and of == "differences" else None
        for kind in KINDS:
            value = _correlation(kind, x, y)
            interval, p = (math.nan, math.nan), math.nan
            if drawn is not None and not math.isnan(value):
                again = np.array([_correlation(kind, x[rows], y[rows]) for rows in drawn])
                low, high = np.nanquantile(again, [(1 - level) / 2, (1 + level) / 2])
                interval = (float(low), float(high))
            if shuffled is not None and not math.isnan(value):
                null = np.array([_correlation(kind, x, y[rows]) for rows in shuffled])
                p = float((1 + np.sum(np.abs(null) >= abs(value) - 1e-12)) / (1 + resamples))
            found.append(
                {"kind": kind, "of": of, "value": value, "interval": interval, "p": p, "checkpoints": len(first)}
            )
    return found


def _block_rows(count: int, resamples: int, chance: np.random.Generator, *, permute: bool) -> np.ndarray:
    """Rows of resampled series: moving blocks with replacement, or the series cut into blocks that change places."""
    length = math.ceil(count ** (1 / 3))
    blocks = math.ceil(count / length)
    if not permute:
        starts = chance.integers(0, count - length + 1, (resamples, blocks))
        return (starts[:, :, None] + np.arange(length)).reshape(resamples, -1)[:, :count]
    # Where the series is cut is drawn too: else so few orders exist that p could not become small.
    rows = np.empty((resamples, count), np.int64)
    for number in range(resamples):
        turned = np.roll(np.arange(count), chance.integers(count))
        pieces = np.array_split(turned, blocks)
        rows[number] = np.concatenate([pieces[place] for place in chance.permutation(blocks)])
    return rows


def _correlation(kind: str, x: np.ndarray, y: np.ndarray) -> float:
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    if kind == "pearson":
        return float(np.corrcoef(x, y)[0, 1])
    if kind == "spearman":
        return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])
    # τ_b: pairs that agree less pairs that do not, over the pairs that are tied in neither.
    before, after = np.sign(x[:, None] - x[None, :]), np.sign(y[:, None] - y[None, :])
    return float((before * after).sum() / math.sqrt((before**2).sum() * (after**2).sum()))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Average ranks, ties sharing theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


_CSV_BYTES = 1 << 28


def read_column(path: Any, column: str | None = None) -> dict[tuple[str, int], float]:
    """Values by (model, step) from a CSV file with columns model, step and one more."""
    import csv
    import io

    try:
        rows = list(csv.DictReader(io.StringIO(read_text(Path(path), at_most=_CSV_BYTES), newline="")))
    except csv.Error as error:
        raise SpecError(f"{path} is not a CSV file: {error}") from error
    if not rows or not {"model", "step"} <= rows[0].keys():
        there = ", ".join(filter(None, rows[0])) if rows else "none"
        raise SpecError(f"{path} wants the columns model, step and a value; it has {there}")
    others: Sequence[str] = [name for name in rows[0] if name and name not in ("model", "step")]
    chosen = column or (others[0] if len(others) == 1 else None)
    if chosen not in others:
        raise SpecError(f"{path}: name one of its columns: {', '.join(others)}")
    try:
        return {(row["model"], int(row["step"])): float(row[chosen]) for row in rows}
    except (TypeError, ValueError) as error:
        raise SpecError(f"{path}: {error}") from error
