"""Do gradients lie in the tangent space? One verdict under our control and one under the paper's, side by side.

A model's blocks at its last checkpoint are tested together: the p of its blocks become one by Simes' rule, which keeps
its level for tests that depend on each other as neighbouring blocks do (Benjamini and Yekutieli 2001).
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.findings import Finding, Subject, counted, number
from anisoscope.claims.resampling import Resampling
from anisoscope.revisions import training_order

CLAIMS = {
    "tangent_excess": "tangent enrichment",
    "normal_ratio": "tangent enrichment (the paper's control)",
}
_TOLD_APART = ("corpus", "population", "model", "stack", "gradient", "proxy", "variant")


def simes(p_values: Sequence[float]) -> float:
    """One p for many: the smallest of m p₍ₖ₎ / k; NaN where there is none.

    >>> simes([0.04, 0.01, 0.5])
    0.03
    """
    known = sorted(p for p in p_values if not math.isnan(p))
    return min((len(known) * p / (k + 1) for k, p in enumerate(known)), default=math.nan)


def judge_enrichment(table: pa.Table, how: Resampling) -> Iterator[tuple[Subject, Finding]]:
    """Every gradient, proxy, population and variant of every model."""
    kept = pc.field("metric").isin(list(CLAIMS)) & pc.field("depth").is_valid() & pc.field("suspect").is_null()
    kept = kept & pc.field("bin").is_null()
    series: dict[tuple, dict[Any, dict[str, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for row in table.filter(kept).sort_by([("key", "ascending")]).to_pylist():
        place = training_order(row["stage"], row["step"], row["revision"])
        series[row["metric"], *(row[name] or "" for name in _TOLD_APART)][place][row["site"]] = row
    ours_first = sorted(series, key=lambda place: (list(CLAIMS).index(place[0]), place))
    for metric, *parts in ours_first:
        checkpoints = series[metric, *parts]
        corpus, population, model, *others = parts
        blocks = list(checkpoints[max(checkpoints)].values())
        subject = Subject(
            name=model,
            models=(model,),
            place=(metric, population, corpus),
            variant=", ".join(part for part in others if part) or None,
            replicates=len(blocks),
            unit="block",
        )
        yield subject, _found(metric, blocks, how)


def _found(metric: str, blocks: list[dict[str, Any]], how: Resampling) -> Finding:
    p_values = [math.nan if row["p"] is None else row["p"] for row in blocks]
    values = np.array([row["value"] for row in blocks], float)
    p, known = simes(p_values), values[np.isfinite(values)]
    effect = float(known.mean()) if len(known) else math.nan
    chance = {"tangent_excess": 0.0, "normal_ratio": 1.0}[metric]
    reached = sum(one <= 1 - how.level for one in p_values)
    what = {
        "tangent_excess": f"the energy in the tangent proxy stands {number(effect)} above its control on average",
        "normal_ratio": f"it has {number(effect)} times the energy of random normals on average",
    }[metric]
    return Finding(
        claim=CLAIMS[metric],
        # What is not found may be too small to be found: nothing here can speak against the claim.
        supported=True if p <= 1 - how.level and effect > chance else None,
        effect=effect,
        p=p,
        says=f"{what}, and in {counted(reached, 'block')} of {len(blocks)} more than chance would",
        details={"blocks_beyond_chance": float(reached)},
        among="gradients",
    )
