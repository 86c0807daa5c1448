"""What each test returns before it becomes a verdict, and helpers that all tests use."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from anisoscope.claims.catalogue import CLAIMS, Claim
from anisoscope.claims.resampling import MIN_POOLS, Bounds, Resampling, bound_peak

MIN_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one test, before correction for the number of claims."""

    claim: str
    supported: bool | None = None
    reason: str = ""
    """Why `supported` is None."""
    effect: float = math.nan
    interval: tuple[float, float] = (math.nan, math.nan)
    p: float = math.nan
    """That the effect is on the claim's side of its smallest effect."""
    p_against: float = math.nan
    """That it is on the other side."""
    decides: bool = True
    """Whether the claim could hold at all; False where replicates are missing, and then p counts in no correction."""
    says: str
    details: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    """Training steps that the test is based on."""
    at_start: bool | None = None
    """Whether the untrained model (step 0) passes the same test; None where it was not measured or does not matter."""

    @property
    def declared(self) -> Claim:
        """The claim's own description."""
        return CLAIMS[self.claim]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a finding is about, and what it is based on."""

    name: str
    models: tuple[str, ...]
    place: tuple[str, str, str]
    """Metric, population, corpus."""
    variant: str | None
    question: tuple[str | None, ...] = ()
    """What makes it a hypothesis of its own besides claim, name and corpus: stack, stage, gradient. Populations,
    proxies and variants do not: they are further tests of the same hypothesis."""
    replicates: int
    unit: str
    """What is repeated: a batch, a block, a model, a seed."""
    of: str
    """What a verdict speaks of: `these weights on this text`."""
    notes: tuple[str, ...] = ()


WEIGHTS, TRAININGS, KINDS = "these weights on this text", "these seeds on this text", "these models on this text"


def too_few(pools: np.ndarray) -> str:
    """Why batches do not allow an interval; empty where they do."""
    if len(pools) < MIN_BATCHES:
        return f"an interval needs {MIN_BATCHES} batches"
    count = len(np.unique(pools))
    if count < MIN_POOLS:
        return (
            f"batches of one pool share windows, and with {counted(count, 'pool')} (of {MIN_POOLS} needed) the "
            "interval covers sampling inside pools only"
        )
    return ""


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


def either(*p_values: float) -> float:
    """p that at least one of several tests is right, by Bonferroni's correction; NaN where one is unknown."""
    return math.nan if any(map(math.isnan, p_values)) else min(1.0, len(p_values) * min(p_values))


def ordered_pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Both members of every pair of different things, in both orders."""
    left, right = np.nonzero(~np.eye(count, dtype=bool))
    return left, right


def number(value: float) -> str:
    """Three digits, for a sentence."""
    return "–" if math.isnan(value) else f"{value:.3g}"


def counted(count: int, noun: str) -> str:
    """`1 batch`, `2 batches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"
