"""Do gradients lie in the tangent space? One verdict under our control and one under the paper's, side by side.

A model's blocks at its last checkpoint are tested together: the p of its blocks become one by Simes' rule, which keeps
its level for tests that depend on each other as neighbouring blocks do (Benjamini and Yekutieli 2001). It speaks of
some block; a claim about the model takes more than half of its blocks beyond chance, and a mean above it.
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
    # Random normals are all that this share is held against: under the paper's control alone.
    "tangent_anisotropy_share": "tangent share of gradient anisotropy (the paper's control)",
}
# Of the ways to take a share, the paper's.
_SHARE = "mean=in;share=isoscore"
_TOLD_APART = ("corpus", "population", "model", "stack", "gradient", "proxy", "variant")


def simes(p_values: Sequence[float]) -> float:
    """One p for many: the smallest of m p₍ₖ₎ / k; NaN where there is none.

    >>> simes([0.04, 0.01, 0.5])
    0.03
    """
    known = sorted(p for p in p_values if not math.isnan(p))
    return min((len(known) * p / (k + 1) for k, p in enumerate(known)), default=math.nan)


def last_blocks(table: pa.Table) -> Iterator[tuple[tuple[str, ...], list[dict[str, Any]]]]:
    """Blocks of the last checkpoint of each series: what tells it from others, the metric first, and its rows."""
    kept = pc.field("depth").is_valid() & pc.field("suspect").is_null() & pc.field("bin").is_null()
    series: dict[tuple, dict[Any, dict[str, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for row in table.filter(kept).sort_by([("key", "ascending")]).to_pylist():
        place = training_order(row["stage"], row["step"], row["revision"])
        series[row["metric"], *(row[name] or "" for name in _TOLD_APART)][place][row["site"]] = row
    for told in sorted(series):
        checkpoints = series[told]
        yield told, list(checkpoints[max(checkpoints)].values())


def subject_of(told: tuple[str, ...], blocks: Sequence[Any]) -> Subject:
    """What a finding on these blocks is about."""
    metric, corpus, population, model, *others = told
    return Subject(
        name=model,
        models=(model,),
        place=(metric, population, corpus),
        variant=", ".join(part for part in others if part) or None,
        replicates=len(blocks),
        unit="block",
    )


def judge_enrichment(table: pa.Table, how: Resampling) -> Iterator[tuple[Subject, Finding]]:
    """Every gradient, proxy, population and variant of every model."""
    of_share = pc.field("metric") == "tangent_anisotropy_share"
    normals = (pc.field("control") == "normal") & (pc.field("variant") == _SHARE)
    for metric in CLAIMS:
        for told, blocks in last_blocks(table.filter((pc.field("metric") == metric) & (~of_share | normals))):
            yield subject_of(told, blocks), _found(metric, blocks, how)


def _found(metric: str, blocks: list[dict[str, Any]], how: Resampling) -> Finding:
    p_values = [math.nan if row["p"] is None else row["p"] for row in blocks]
    beyond = metric == "tangent_anisotropy_share"
    values = np.array([row["value"] - (row["control_value"] if beyond else 0) for row in blocks], float)
    p, known = simes(p_values), values[np.isfinite(values)]
    effect = float(known.mean()) if len(known) else math.nan
    chance = 1.0 if metric == "normal_ratio" else 0.0
    reached = sum(one <= 1 - how.level for one in p_values)
    somewhere, mostly = p <= 1 - how.level and effect > chance, 2 * reached > len(blocks)
    what = {
        "tangent_excess": f"the energy in the tangent proxy stands {number(effect)} above its control on average",
        "normal_ratio": f"it has {number(effect)} times the energy of random normals on average",
        "tangent_anisotropy_share": "without the tangent proxy the gradients' IsoScore rises by "
        f"{number(effect)} more than without random normals on average",
    }[metric]
    return Finding(
        claim=CLAIMS[metric],
        # What is not found may be too small to be found: nothing here can speak against the claim.
        supported=True if somewhere and mostly else None,
        effect=effect,
        p=p,
        says=f"{what}, and in {counted(reached, 'block')} of {len(blocks)} more than chance would"
        + (", where a claim about the model takes most of them" if somewhere and not mostly else ""),
        details={"blocks_beyond_chance": float(reached)},
        among="gradients",
    )
