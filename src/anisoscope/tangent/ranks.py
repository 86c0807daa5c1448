"""How many directions a tangent proxy has: a number, or a rule that gives one for each cloud of states."""

import math

from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import SpecError, StatesError
from anisoscope.kernels.neighbors import drop_duplicates, nearest_neighbors
from anisoscope.metrics.neighbors import twonn
from anisoscope.validation import check_setting


def _share_of(rule: str) -> float:
    """The share of the variance that a rank is to hold, .9 where it is not said."""
    return float(rule.partition(":")[2] or "0.9")


def choose_rank(
    rule: int | str, values: Float[Tensor, " k"], states: Float[Tensor, "n d"]
) -> tuple[int, tuple[str, ...]]:
    """The number of directions that a rule asks for, at most half of all: normal controls need as many again.

    `variance:0.9`: the fewest that hold this share of the variance; `participation_ratio`: (Σλ)²/Σλ²; `twonn`: the
    intrinsic dimension of the states (the last checkpoint's). Both are rounded.
    """
    check_setting("rank", rule)
    dim = states.shape[1]
    if isinstance(rule, int):
        if rule >= dim:
            raise SpecError(f"a proxy of {dim} coordinates has a rank from 1 to {dim - 1}; came {rule}")
        return rule, ()
    if rule == "participation_ratio":
        found = float(values.sum().square() / values.square().sum())
    elif rule == "twonn":
        distinct = states[drop_duplicates(states).index]
        found = float(twonn.function(nearest_neighbors(distinct, 2))) if len(distinct) > 3 else math.nan
    else:
        found = 1.0 + float((values.cumsum(0) < _share_of(rule) * values.sum()).sum())
    if not math.isfinite(found):
        raise StatesError(f"the rank by {rule} is not known for these states: give a number")
    chosen = min(max(round(found), 1), max(dim // 2, 1))
    limited = f"; limited to {chosen}, half of the coordinates" if chosen < round(found) else ""
    return chosen, (f"rank {found:.4g} by {rule}{limited}",)


def rank_within(rule: int | str, width: int) -> int | str:
    """A number at most half of the coordinates, as the normal controls need; a rule as it is."""
    return rule if isinstance(rule, str) else min(rule, width // 2)
