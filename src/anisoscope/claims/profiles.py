"""The table of a run -> one profile for each checkpoint: a value for each batch and block."""

import re
from collections import Counter, defaultdict
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
    """One checkpoint, metric and population: a value for each batch and block."""

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
        """Position in its training."""
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
    """Blocks of the checkpoints that are not suspect, in an order that does not depend on the table's."""
    kept = pc.field("metric").isin([PROFILE_METRIC, DIMENSION_METRIC]) & pc.field("depth").is_valid()
    for name in ("suspect", "bin", "variant"):
        kept = kept & pc.field(name).is_null()
    columns = [*_IDENTITY, "site", "depth", "values"]
    rows = table.select([*columns, "suspect", "bin", "variant"]).filter(kept).select(columns).sort_by("depth")
    # `one_setting` left one result file for each checkpoint.
    checkpoints = group_rows(rows, _IDENTITY)
    rows = rows.select(["site", "depth", "values"]).take(pa.array(checkpoints.order))
    sites, depths, values = rows["site"].to_pylist(), rows["depth"].to_numpy(), list_matrix(rows["values"])
    batches = pc.list_value_length(rows["values"]).fill_null(0).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
    ordered = sorted(checkpoints.slices(), key=lambda found: [(part is not None, part) for part in found[0]])
    return [
        Profile(
            place=identity[:3],
            **dict(zip(_IDENTITY[3:], identity[3:], strict=True)),
            sites=tuple(sites[blocks]),
            depths=depths[blocks],
            values=values[blocks, : batches[blocks].max()].T,
        )
        for identity, blocks in ordered
    ]


def count_suspects(table: pa.Table) -> Counter[str]:
    """How many checkpoints of each model are suspect: their files are not what their name says."""
    rows = table.filter(pc.field("suspect").is_valid()).select(["model", "stage", "step", "revision"]).to_pylist()
    return Counter(model for model, *_ in {tuple(row.values()) for row in rows})


def last_checkpoints(profiles: Iterable[Profile]) -> list[tuple[Profile, Profile | None]]:
    """The leading variance of each model at the end of its training, and at step 0 where that is another checkpoint."""
    trainings: dict[tuple, list[Profile]] = defaultdict(list)
    for profile in sorted(profiles, key=lambda item: item.order):
        if profile.place[0] == PROFILE_METRIC and profile.place[1] in PROFILE_POPULATIONS:
            trainings[profile.place, profile.model, profile.stack or ""].append(profile)
    return [
        (found[-1], found[0] if found[0].step == 0 and len(found) > 1 else None)
        for _, found in sorted(trainings.items())
    ]


def finite(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The batches that have a number everywhere, and the pool of each."""
    kept = np.isfinite(values).all(1)
    return values[kept], pool_numbers(len(values))[kept]


_SEED = re.compile(r"([-_.]?)seed[-_]?\d+", re.IGNORECASE)


def family_of(model: str) -> str:
    """The name of a training, whichever of its seeds a model is.

    >>> family_of("EleutherAI/pythia-70m-seed3")
    'EleutherAI/pythia-70m-seed*'
    """
    return _SEED.sub(r"\1seed*", model)


def recipe_of(model: str) -> str:
    """What seeds of one recipe have in common: the name of the model or run without its seed.

    A seed is recognised by `seed`, `seed-` or `seed_` and a number in the name, as live runs, sweeps and hubs name
    them. Everything else in the name (architecture, size, sampling exponent) makes another recipe.

    >>> recipe_of("EleutherAI/pythia-70m-seed3") == recipe_of("EleutherAI/pythia-70m")
    True
    """
    return _SEED.sub("", model)
