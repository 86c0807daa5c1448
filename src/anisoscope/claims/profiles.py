"""The table of a run -> one profile for each checkpoint: a value for each batch and block."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope.claims.resampling import pool_numbers
from anisoscope.grouping import group_rows, list_matrix
from anisoscope.revisions import training_order

MIN_BLOCKS = 5

PROFILE_METRIC = "leading_variance"
PROFILE_POPULATIONS = ("all", "typical")
DIMENSION_METRIC = "twonn"
DIMENSION_POPULATIONS = ("all", "types", "matched", "typical")

_IDENTITY = ("metric", "population", "corpus", "model", "kind", "stack", "stage", "step", "revision")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One checkpoint at one place: a value for each batch and block."""

    place: tuple[str, str, str]
    model: str
    kind: str
    stack: str | None
    stage: str | None
    step: int | None
    revision: str | None
    sites: tuple[str, ...]
    depths: np.ndarray
    values: np.ndarray
    """(batches, blocks)"""

    @property
    def order(self) -> Any:
        """Where in its training it stands."""
        return training_order(self.stage, self.step, self.revision)

    @property
    def lacks(self) -> str | None:
        """Why its shape cannot be read at all."""
        if len(self.depths) < MIN_BLOCKS:
            return f"it has {len(self.depths)} blocks, and a shape needs {MIN_BLOCKS}"
        if self.sites[0] != "block.0" or self.depths[-1] < 1:
            return "the first and the last block were not both measured"
        return None if np.isfinite(self.values).all(1).any() else "no batch has a value at every block"


def read_profiles(table: pa.Table) -> list[Profile]:
    """Blocks of the checkpoints that are what they say, in an order that does not depend on the table's."""
    kept = pc.field("metric").isin([PROFILE_METRIC, DIMENSION_METRIC]) & pc.field("depth").is_valid()
    for name in ("suspect", "bin", "variant"):
        kept = kept & pc.field(name).is_null()
    rows = table.filter(kept).select([*_IDENTITY, "key", "site", "depth", "values"]).sort_by("depth")
    units = group_rows(rows, (*_IDENTITY, "key"))
    rows = rows.select(["site", "depth", "values"]).take(pa.array(units.order))
    sites, depths, values = rows["site"].to_pylist(), rows["depth"].to_numpy(), list_matrix(rows["values"])
    batches = pc.list_value_length(rows["values"]).fill_null(0).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
    # A checkpoint that was measured more than once counts once: with its most batches.
    by_batches = sorted(units.slices(), key=lambda unit: (batches[unit[1].start], unit[0][-1]))
    checkpoints = {identity[:-1]: blocks for identity, blocks in by_batches}
    ordered = sorted(checkpoints, key=lambda identity: [(part is not None, part) for part in identity])
    return [
        Profile(
            place=identity[:3],
            **dict(zip(_IDENTITY[3:], identity[3:], strict=True)),
            sites=tuple(sites[blocks]),
            depths=depths[blocks],
            values=values[blocks, : batches[blocks].max()].T,
        )
        for identity in ordered
        for blocks in [checkpoints[identity]]
    ]


def count_suspects(table: pa.Table) -> Counter[str]:
    """How many checkpoints of each model are known not to be what they say."""
    rows = table.filter(pc.field("suspect").is_valid()).select(["model", "stage", "step", "revision"]).to_pylist()
    return Counter(model for model, *_ in {tuple(row.values()) for row in rows})


def last_checkpoints(profiles: Iterable[Profile]) -> list[Profile]:
    """The leading variance of each model at the end of its training."""
    last: dict[tuple, Profile] = {}
    for profile in sorted(profiles, key=lambda item: item.order):
        if profile.place[0] == PROFILE_METRIC and profile.place[1] in PROFILE_POPULATIONS:
            last[profile.place, profile.model, profile.stack or ""] = profile
    return [last[key] for key in sorted(last)]


def finite(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The batches that have a number everywhere, and the pool of each."""
    kept = np.isfinite(values).all(1)
    return values[kept], pool_numbers(len(values))[kept]


def family_of(model: str) -> str:
    """The name of a training, whichever of its seeds a model is.

    >>> family_of("EleutherAI/pythia-70m-seed3")
    'EleutherAI/pythia-70m-seed*'
    """
    return re.sub(r"seed[-_]?\d+", "seed*", model, flags=re.IGNORECASE)
