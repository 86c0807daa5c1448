"""What three older theories of anisotropy predict of a training: one number a checkpoint, tested over seeds.

rows drift together             common_drift: rows of the output embedding move against the mean state (Biś 2021)
centring restores isotropy      I(W) of the output embedding is higher when centred, at the end (Biś 2021)
rare rows drift farther         rare_drift above 1 (Gao 2019)
states move into a cone         hull_margin, less that of the states with random signs, grows (Gao 2019)
queries and keys drift          query_drift and key_drift grow (Godey 2024)
attention sharpens              attention_entropy falls (Godey 2024)
states become anisotropic       mean_cosine of the final states grows: what all of them explain
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.catalogue import CLAIMS
from anisoscope.claims.findings import Finding, Subject, number, on_side
from anisoscope.claims.resampling import Bounds, Resampling, student
from anisoscope.claims.trainings import Series, growth_of, judge_seeds_or_runs, seeds_together, step_mean


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A number about which a theory makes a prediction: that it is above the claim's smallest effect."""

    claim: str
    metrics: tuple[str, ...]
    sites: str
    """A glob."""
    population: str
    value: Callable[[dict[str, Any]], float] = lambda row: _plain(row, row["value"])
    """What a row of the table adds to the mean over rows of its checkpoint; NaN for rows that do not count."""
    read: Callable[[np.ndarray, np.ndarray], np.ndarray]
    """One number for each row of a series (rows, steps), from the series and its steps."""
    says: str

    @property
    def margin(self) -> float:
        """The smallest effect that counts."""
        return CLAIMS[self.claim].smallest_effect


def _plain(row: dict[str, Any], value: float) -> float:
    """Rows of another kind, as of a model with a changed norm, do not count."""
    return value if row["variant"] is None else np.nan


def _since_start(series: np.ndarray, steps: np.ndarray) -> np.ndarray:
    return series[:, -1] - series[:, 0]


def _last(series: np.ndarray, steps: np.ndarray) -> np.ndarray:
    return series[:, -1]


def _growth(series: np.ndarray, steps: np.ndarray) -> np.ndarray:
    return growth_of(series, steps)[0]


def _gain_by_centring(row: dict[str, Any]) -> float:
    # Two rows a checkpoint: their mean is half of what centring adds.
    return {"centred=yes": 2.0, "centred=no": -2.0}.get(row["variant"], np.nan) * row["value"]


PREDICTIONS = (
    Prediction(
        claim="rows drift together",
        metrics=("common_drift",),
        sites="unembed.weight",
        population="rows",
        value=lambda row: row["value"],
        read=step_mean,
        says="the cosine of the rows' mean update with minus the mean state is {effect} on average over training steps",
    ),
    Prediction(
        claim="centring restores isotropy",
        metrics=("partition_isotropy",),
        sites="unembed.weight",
        population="rows",
        value=_gain_by_centring,
        read=_last,
        says="centring the output embedding changes I(W) by {effect} at the end",
    ),
    Prediction(
        claim="rare rows drift farther",
        metrics=("rare_drift",),
        sites="unembed.weight",
        population="rows",
        value=lambda row: float(np.log(row["value"])),
        read=step_mean,
        says="the logarithm of how far rare rows move over frequent ones is {effect} on average over training steps",
    ),
    Prediction(
        claim="states move into a cone",
        metrics=("hull_margin",),
        sites="final_norm",
        population="all",
        value=lambda row: _plain(row, row["value"] - row["null"]),
        # Untrained states have a margin too: only what training adds speaks for the theory.
        read=_since_start,
        says="the margin of the final states, less that with random signs, grows by {effect} over the training",
    ),
    Prediction(
        claim="queries and keys drift",
        metrics=("query_drift", "key_drift"),
        sites="block.*",
        population="all",
        read=_growth,
        says="from the first checkpoint to the last quarter of the steps the drift of queries and keys grows by "
        "{effect}",
    ),
    Prediction(
        claim="attention sharpens",
        metrics=("attention_entropy",),
        sites="block.*",
        population="all",
        value=lambda row: _plain(row, -row["value"]),
        read=_growth,
        says="from the first checkpoint to the last quarter of the steps the entropy of attention falls by {effect}",
    ),
    *(
        Prediction(
            claim="states become anisotropic",
            metrics=("mean_cosine",),
            sites="final_norm",
            population=population,
            read=_growth,
            says="from the first checkpoint to the last quarter of the steps the mean cosine of the final states grows "
            "by {effect}",
        )
        for population in ("all", "typical")
    ),
)


def judge_theories(table: pa.Table, how: Resampling) -> Iterator[tuple[Subject, Finding]]:
    """Every prediction the table has numbers for; anisotropy itself only where one of the theories was tested."""
    found = [(theory, series) for theory in PREDICTIONS if (series := _read(table, theory))]
    if all(theory.metrics == ("mean_cosine",) for theory, _ in found):
        return
    for theory, series in found:
        for seeds in seeds_together(series):
            yield from judge_seeds_or_runs(seeds, _RunReader(theory), _SeedReader(theory), how)


@dataclass(frozen=True)
class _RunReader:
    """One run has no replicates: its number alone."""

    theory: Prediction

    def __call__(self, one: Series, how: Resampling) -> Finding:
        return _found(self.theory, Bounds(effect=float(self.theory.read(one.values, one.steps)[0])))


@dataclass(frozen=True)
class _SeedReader:
    theory: Prediction

    def __call__(self, seeds: Series, how: Resampling) -> Finding:
        read = self.theory.read(seeds.values, seeds.steps)
        return _found(self.theory, student(read, margin=self.theory.margin, level=how.level))


def _found(theory: Prediction, bounds: Bounds) -> Finding:
    return Finding(
        claim=theory.claim,
        supported=on_side(bounds, theory.margin, above=True),
        reason=f"the interval includes {theory.margin:g}",
        effect=bounds.effect,
        interval=bounds.interval,
        p=bounds.p_above,
        p_against=bounds.p_below,
        says=theory.says.format(effect=number(bounds.effect)),
    )


_IDENTITY = ("corpus", "model", "stack", "stage", "step")


def _read(table: pa.Table, theory: Prediction) -> list[Series]:
    """One number for each checkpoint of each run: the mean over its rows."""
    kept = pc.field("metric").isin(list(theory.metrics)) & (pc.field("population") == theory.population)
    sites = [name for name in table["site"].unique().to_pylist() if fnmatchcase(name or "", theory.sites)]
    kept = kept & pc.field("suspect").is_null() & pc.field("step").is_valid()
    kept = kept & pc.field("site").isin(pa.array(sites, pa.string()))
    columns = [*_IDENTITY, "key", "site", "metric", "variant", "value", "null"]
    checkpoints: dict[tuple, dict[tuple, float]] = defaultdict(dict)
    for row in table.filter(kept).select(columns).sort_by([("key", "ascending")]).to_pylist():
        identity, place = tuple(row[name] for name in _IDENTITY), (row["site"], row["metric"], row["variant"])
        checkpoints[identity][place] = theory.value(row)
    runs: dict[tuple, dict[int, float]] = defaultdict(dict)
    for (*run, step), values in checkpoints.items():
        mean = float(np.nanmean(list(values.values()))) if not np.isnan(list(values.values())).all() else np.nan
        if not np.isnan(mean):
            runs[tuple(run)][step] = mean
    ordered = sorted(runs, key=lambda run: [part or "" for part in run])
    return [_series(theory, run, runs[run]) for run in ordered]


def _series(theory: Prediction, run: Sequence[Any], values: dict[int, float]) -> Series:
    corpus, model, stack, stage = run
    steps = sorted(values)
    return Series(
        place=("+".join(theory.metrics), theory.population, corpus),
        model=model,
        variant=", ".join(part for part in (stack, stage) if part) or None,
        question=(stack, stage),
        steps=np.array(steps),
        values=np.array([[values[step] for step in steps]]),
        pools=np.array([], int),
        left_out=0,
    )
