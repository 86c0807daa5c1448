"""A checkpoint whose gradients were measured under several settings counts once.

Rank, seed, tokens and versions do not stand in what tells a claim's rows apart, and blocks of several are not to be
mixed: of such units one is judged, and the others are counted.
"""

from collections import Counter, defaultdict
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

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
    sums = rows.group_by([*_NUMBER, "key"]).aggregate([("points", "sum"), ("metric_version", "max")]).to_pylist()
    units: dict[tuple, list[tuple[int, int, str]]] = defaultdict(list)
    for one in sums:
        version, points = one["metric_version_max"] or 0, one["points_sum"] or 0
        units[tuple(one[name] for name in _NUMBER)].append((-version, -points, one["key"]))
    passed = {(*number, key) for number, found in units.items() for *_, key in sorted(found)[1:]}
    if not passed:
        return OneSetting(table=rows, passed_over=Counter())
    told = zip(*(rows[name].to_pylist() for name in (*_NUMBER, "key")), strict=True)
    kept = rows.filter(pa.array([one not in passed for one in told]))
    return OneSetting(table=kept, passed_over=Counter(model for model, _ in {(one[0], one[-1]) for one in passed}))
