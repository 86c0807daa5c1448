"""A checkpoint whose gradients were measured under several settings counts once.

Rank, seed, tokens and versions do not stand in what tells a claim's rows apart, and blocks of several are not to be
mixed: of such units one is judged, and the others are counted.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.grouping import group_rows

# What tells numbers apart that a claim looks at beside each other, but for their site.
_NUMBER = (
    *("model", "stage", "step", "revision", "stack", "corpus", "population"),
    *("metric", "gradient", "proxy", "variant", "bin", "control"),
)
_ON_PROBE = ("centroid_distance", "frequency_attenuation")


class OneSetting(NamedTuple):
    """A table with one unit for each number, and how many units of each model were passed over."""

    table: pa.Table
    passed_over: Counter[str]


def one_setting(table: pa.Table) -> OneSetting:
    """Of gradients, types and curvature: the unit with the latest version, then most points, then the first key."""
    rows = table.filter(pc.field("gradient").is_valid() | pc.field("metric").isin(list(_ON_PROBE)))
    units = group_rows(rows, (*_NUMBER, "key"))
    numbers = group_rows(units.keys, _NUMBER)
    passed = np.zeros(len(units.ends), bool)
    keys = units.keys["key"].to_pylist()
    points, versions = (rows[name].fill_null(0).to_numpy() for name in ("points", "metric_version"))
    for number in np.flatnonzero(numbers.sizes > 1).tolist():
        found = numbers.rows(number).tolist()
        ranks = [(-versions[units.rows(unit)].max(), -points[units.rows(unit)].sum(), keys[unit]) for unit in found]
        passed[found] = True
        passed[found[ranks.index(min(ranks))]] = False
    if not passed.any():
        return OneSetting(table=rows, passed_over=Counter())
    kept = np.empty(len(rows), bool)
    kept[units.order] = ~np.repeat(passed, units.sizes)
    models = units.keys["model"].to_pylist()
    return OneSetting(
        table=rows.filter(pa.array(kept)),
        passed_over=Counter(model for model, _ in {(models[unit], keys[unit]) for unit in np.flatnonzero(passed)}),
    )
