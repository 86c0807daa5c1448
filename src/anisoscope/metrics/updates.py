"""How the rows of the output embedding move from one checkpoint to the next: together, and rare tokens against
frequent ones.

Cross entropy moves row v by Σₜ (yₜᵥ - pₜᵥ) hₜ. Where v is not the target that is -Σ pₜᵥ hₜ, along minus the mean final
state for every row: a common drift (Biś et al. 2021), largest in relation for rare tokens (Gao et al. 2019).
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, linalg

from anisoscope.errors import SpecError
from anisoscope.metrics.declaration import metric

# Rarest and most frequent: this part of the token types each.
PART = 0.1


@dataclass(frozen=True, kw_only=True)
class RowUpdates:
    """What each row of an output embedding did between two checkpoints; float64."""

    updates: Float[Tensor, "v d"]
    mean_state: Float[Tensor, " d"]
    """Of what the rows were multiplied with, at the earlier checkpoint."""
    counts: Int[Tensor, " v"]
    """How often each token occurs in the corpus."""

    @classmethod
    def between(
        cls,
        before: Float[Tensor, "v d"],
        after: Float[Tensor, "_ e"],
        mean_state: Float[Tensor, " d"],
        counts: Int[Tensor, " _"],
    ) -> "RowUpdates":
        """From two matrices of the same shape; frequencies of tokens that have no row must be zero."""
        if before.shape != after.shape:
            raise SpecError(f"rows of {tuple(before.shape)} cannot be compared with rows of {tuple(after.shape)}")
        if counts[len(before) :].any():
            raise SpecError(f"tokens are counted that have no row: {len(counts)} frequencies for {len(before)} rows")
        known = torch.zeros(len(before), dtype=torch.int64)
        known[: len(counts)] = counts[: len(before)]
        return cls(
            updates=after.double().cpu() - before.double().cpu(), mean_state=mean_state.double().cpu(), counts=known
        )


# Not of one checkpoint: `anisoscope sweep --drift`.
_of_updates = partial(metric, family="drift", needs="updates", version=1, populations=("rows",), default=False)


@_of_updates(
    invariant_to="rotation scale",
    bounds=(-1.0, 1.0),
    cite="bis2021too",
    null="exact",
    closed_form=lambda n, d: 0.0,
    min_points=1,
    undefined="nothing moved, or the mean state is zero",
)
def common_drift(rows: RowUpdates) -> Float[Tensor, ""]:
    """How far the rows of the output embedding, taken together, moved against the mean final state.

        common_drift = cos(ū, -h̄),   ū = mean update over rows,   h̄ = mean of the states they are multiplied with

    1 where they moved as the source says, 0 on average for a mean update that knows nothing of the states (the null).
    Between a checkpoint and the one before it: `sweep --drift`.
    """
    mean, state = rows.updates.mean(0), rows.mean_state
    return -(mean @ state) / (linalg.vector_norm(mean) * linalg.vector_norm(state))


@_of_updates(
    invariant_to="rotation scale",
    bounds=(0.0, 1.0),
    cite="bis2021too",
    null="exact",
    closed_form=lambda n, d: n**-0.5,
    min_points=1,
    undefined="nothing moved",
)
def common_drift_share(rows: RowUpdates) -> Float[Tensor, ""]:
    """How much of the rows' movement is common to all of them.

        common_drift_share = ‖ū‖ / mean ‖u_v‖,   u_v the update of row v, ū its mean over rows

    1 where all rows moved alike, about 1/√n for n rows that moved independently (the null). `sweep --drift`.
    """
    return linalg.vector_norm(rows.updates.mean(0)) / linalg.vector_norm(rows.updates, dim=1).mean()


@_of_updates(
    invariant_to="rotation scale",
    cite="gao2019representation",
    null="exact",
    closed_form=lambda n, d: 1.0,
    min_points=20,
    undefined="fewer than twenty types occur, or the frequent ones did not move",
)
def rare_drift(rows: RowUpdates) -> Float[Tensor, ""]:
    """How far rows of rare tokens moved, against those of frequent ones.

        rare_drift = mean ‖u_v‖ over the rarest tenth of the token types / the same over the most frequent tenth

    1 where frequency does not matter (the null); the source expects more. Types that never occur are left out: they may
    be padding of the matrix. `sweep --drift`.
    """
    # Stable: ties go by token id, and the answer does not depend on the sorting.
    order = rows.counts.argsort(stable=True)
    order = order[rows.counts[order] > 0]
    size = int(PART * len(order))
    if size < 2:
        return torch.tensor(torch.nan, dtype=torch.float64)
    lengths = linalg.vector_norm(rows.updates, dim=1)
    rare, frequent = lengths[order[:size]].mean(), lengths[order[-size:]].mean()
    return rare / frequent if frequent > 0 else frequent * torch.nan
