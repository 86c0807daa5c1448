"""Are frequent token types nearer to the centre of the states, as the third paper reports for decoders?

Over the blocks of a model's last checkpoint: the correlation, over types, of log frequency and the log of the distance
to the centroid, with its p by permutation. The claim is about more than half of the blocks (`resampling.most`).
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.catalogue import CLAIMS
from anisoscope.claims.enrichment import last_blocks, subject_of
from anisoscope.claims.findings import Finding, Subject, counted, number
from anisoscope.claims.resampling import Resampling, most

CLAIM = "frequent types are pinned"


def judge_pinned(table: pa.Table, how: Resampling) -> Iterator[tuple[Subject, Finding]]:
    """Every population of every model in which distances were measured."""
    # Variants are other quantities than the correlation with the distance.
    rows = table.filter((pc.field("metric") == "centroid_distance") & pc.field("variant").is_null())
    for identity, blocks, untrained in last_blocks(rows):
        yield subject_of(identity, blocks), _found(blocks, untrained, how)


def _found(blocks: list[dict[str, Any]], untrained: list[dict[str, Any]], how: Resampling) -> Finding:
    smallest, level = CLAIMS[CLAIM].smallest_effect, 1 - how.level
    effect, nearer, p_values = _model_p(blocks, -1)
    _, further, _ = _model_p(blocks, 1)
    supported = True if nearer <= level and effect < smallest else None
    if supported is None and further <= level and effect > -smallest:
        supported = False
    below = sum(p <= level for p in p_values)
    at_start = None
    if untrained:
        effect_at_start, p_at_start, _ = _model_p(untrained, -1)
        at_start = p_at_start <= level and effect_at_start < smallest
    return Finding(
        claim=CLAIM,
        supported=supported,
        reason=f"the mean is not below {smallest:g}"
        if effect >= smallest
        else "chance or fewer than most of the blocks explain it",
        effect=effect,
        p=nearer,
        p_against=further,
        says=f"log frequency and distance to the centroid have a correlation of {number(effect)} on average, negative "
        f"with p ≤ {level:.2g} in {counted(below, 'block')} of {len(blocks)}",
        details={"blocks_below_chance": float(below)},
        at_start=at_start,
    )


def _model_p(blocks: list[dict[str, Any]], sign: int) -> tuple[float, float, list[float]]:
    """Mean correlation, p that more than half of the blocks have one of this sign, and the p of each block."""
    known = [row for row in blocks if row["p"] is not None and math.isfinite(row["value"])]
    p_values = [_one_sided(row, sign) for row in known] + [math.nan] * (len(blocks) - len(known))
    effect = float(np.mean([row["value"] for row in known])) if known else math.nan
    return effect, most(p_values) if known else math.nan, p_values


def _one_sided(row: dict[str, Any], sign: int) -> float:
    """Of a correlation of this sign, from the two-sided p."""
    return row["p"] / 2 if row["value"] * sign > 0 else 1 - row["p"] / 2
