"""A unit's final norm, stage by stage: what normalising, gain and bias each change. Reads records, loads no torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from anisoscope.records import FINAL_NORM_SITES, Estimate, Record, site_order

STAGES = ("pre", "normed", "gained", "final")
"""The last block, and the sites of the final norm by their short names."""
NORM_METRICS = (
    "norm_gain",
    "norm_bias",
    "norm_bias_ratio",
    "norm_bias_ratio_effective",
    "residual_drift",
    "drift_cancellation",
)


@dataclass(frozen=True, kw_only=True)
class StageChange:
    """One metric on one population through the final norm."""

    stack: str | None
    metric: str
    population: str
    stages: dict[str, Record]
    """By short name, in the order of STAGES."""

    @property
    def changes(self) -> dict[str, Estimate]:
        """What each stage adds to the one before: over batches, which are the same tokens at every stage."""
        return {after: self._change(before, after) for before, after in pairwise(STAGES)}

    @property
    def shares(self) -> dict[str, float]:
        """Parts of the whole change, final less pre; they add up to 1. NaN where it is no larger than its spread."""
        whole = self._change("pre", "final")
        changed = whole.value != 0 and not abs(whole.value) <= whole.spread
        return {name: one.value / whole.value if changed else math.nan for name, one in self.changes.items()}

    def _change(self, before: str, after: str) -> Estimate:
        one, other = self.stages[before], self.stages[after]
        values = tuple(y - x for x, y in zip(one.values, other.values, strict=True))
        return Estimate.from_values(values, null=math.nan, points=other.points, dropped=0, dim=other.dim)


def stage_changes(records: Iterable[Record]) -> list[StageChange]:
    """Every metric and population that was measured at all four stages of a final norm, stack by stack."""
    found: dict[tuple[str | None, str, str], dict[str, Record]] = {}
    for record in sorted(records, key=lambda record: site_order(record.site)):
        if record.depth == 1:
            stage = "pre"
        elif record.site in FINAL_NORM_SITES:
            stage = STAGES[1 + FINAL_NORM_SITES.index(record.site)]
        else:
            continue
        found.setdefault((record.stack, record.metric, record.population), {})[stage] = record
    return [
        StageChange(stack=stack, metric=metric, population=population, stages=stages)
        for (stack, metric, population), stages in found.items()
        if tuple(stages) == STAGES
    ]
