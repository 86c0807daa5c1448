"""Are frequent token types pinned near the centre of the states, as the third paper has it of decoders?

Over the blocks of a model's last checkpoint: the correlation, over types, of log frequency and the log of the distance
to the centroid, with its p by permutation. One-sided p of all blocks become one by Simes' rule, for either side.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.enrichment import last_blocks, simes, subject_of
from anisoscope.claims.findings import Finding, Subject, counted, number
from anisoscope.claims.resampling import Resampling

CLAIM = "frequent types are pinned"


def judge_pinned(table: pa.Table, how: Resampling) -> Iterator[tuple[Subject, Finding]]:
    """Every population of every model in which distances were measured."""
    # Variants are other quantities than the correlation with the distance.
    rows = table.filter((pc.field("metric") == "centroid_distance") & pc.field("variant").is_null())
    for told, blocks in last_blocks(rows):
        yield subject_of(told, blocks), _found(blocks, how)


def _found(blocks: list[dict[str, Any]], how: Resampling) -> Finding:
    known = [row for row in blocks if row["p"] is not None and math.isfinite(row["value"])]
    nearer, further = (simes([_one_sided(row, sign) for row in known]) for sign in (-1, 1))
    effect = float(np.mean([row["value"] for row in known])) if known else math.nan
    supported = True if nearer <= 1 - how.level and effect < 0 else None
    if supported is None and further <= 1 - how.level and effect > 0:
        supported = False
    below = sum(_one_sided(row, -1) <= 1 - how.level for row in known)
    return Finding(
        claim=CLAIM,
        supported=supported,
        effect=effect,
        p=nearer,
        says=f"log frequency and distance to the centroid have a correlation of {number(effect)} on average, below "
        f"chance in {counted(below, 'block')} of {len(blocks)}",
        details={"blocks_below_chance": float(below)},
        among="types",
    )


def _one_sided(row: dict[str, Any], sign: int) -> float:
    """Of a correlation on this side of zero, from the p of both sides."""
    return row["p"] / 2 if row["value"] * sign > 0 else 1 - row["p"] / 2
