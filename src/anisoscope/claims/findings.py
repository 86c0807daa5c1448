"""What every claim gives before it is a verdict, and what all of them ask."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from anisoscope.claims.resampling import MIN_POOLS, Bounds, Resampling, bound_peak

MIN_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A verdict before other claims are counted and its subject is named."""

    claim: str
    supported: bool | None = None
    effect: float = math.nan
    interval: tuple[float, float] = (math.nan, math.nan)
    p: float = math.nan
    says: str
    details: Mapping[str, float] = field(default_factory=dict)
    among: str = ""
    """Which findings its p is adjusted with, by their rate of false discoveries; Holm's over all others if empty."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a finding is about, and what it rests on."""

    name: str
    models: tuple[str, ...]
    place: tuple[str, str, str]
    """Metric, population, corpus."""
    variant: str | None
    replicates: int
    unit: str
    """What is repeated: a batch, a model, a seed."""
    notes: tuple[str, ...] = ()


def open_questions(pools: np.ndarray) -> tuple[str, ...]:
    """What too few batches or pools leave open."""
    if len(pools) < MIN_BATCHES:
        return (f"an interval needs {MIN_BATCHES} batches",)
    count = len(np.unique(pools))
    if count < MIN_POOLS:
        return (
            f"batches of one pool share windows, and with {counted(count, 'pool')} (of {MIN_POOLS} needed) the "
            "interval is only about sampling inside them",
        )
    return ()


def bound(grid: np.ndarray, pools: np.ndarray, how: Resampling, margin: float) -> Bounds:
    """`bound_peak` where there are batches enough, else the effect alone."""
    if len(grid) < MIN_BATCHES:
        return Bounds(effect=float(grid.mean(0).min(1).max()))
    return bound_peak(grid, pools, how, margin=margin)


def on_side(bounds: Bounds, margin: float, *, above: bool) -> bool | None:
    """Whether the interval lies on the claim's side of the margin."""
    if bounds.low > margin:
        return above
    return not above if bounds.high < margin else None


def ordered_pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Both members of every pair of different things, either way round."""
    left, right = np.nonzero(~np.eye(count, dtype=bool))
    return left, right


def number(value: float) -> str:
    """Three digits, for a sentence."""
    return "–" if math.isnan(value) else f"{value:.3g}"


def counted(count: int, noun: str) -> str:
    """`1 batch`, `2 batches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"
