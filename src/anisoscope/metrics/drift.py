"""Drift in attention: where queries and keys of a block point on average, and how sharply its heads look."""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, linalg

from anisoscope.metrics.declaration import metric


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Queries and keys of one block on one window, before anything is done to them for their positions; float64."""

    queries: Float[Tensor, "h n e"]
    keys: Float[Tensor, "g n e"]
    """Fewer heads where several query heads share one: the first h/g the first, and so on."""


@dataclass(frozen=True, kw_only=True)
class AttentionRows:
    """Attention weights of one block on one window; float64."""

    weights: Float[Tensor, "h n n"]
    visible: Int[Tensor, " n"]
    """How many positions a row may look at."""


def _drift(vectors: Float[Tensor, "h n e"]) -> Float[Tensor, ""]:
    size = vectors.square().sum(-1).mean(-1).sqrt()
    return (linalg.vector_norm(vectors.mean(1), dim=-1) / size).mean()


_of_attention = partial(
    metric, family="drift", version=1, cite="godey2024anisotropy", populations=("all",), default=False
)


@_of_attention(
    needs="heads",
    invariant_to="rotation scale",
    bounds=(0.0, 1.0),
    null="exact",
    closed_form=lambda n, d: n**-0.5,
    min_points=1,
    undefined="all queries of a head are zero",
)
def query_drift(heads: Heads) -> Float[Tensor, ""]:
    """How far the queries of a block have drifted from the origin, in units of their size.

        query_drift = mean over heads of ‖E q‖ / √(E ‖q‖²)

    0 for queries around the origin, 1 for queries that are all one. Of the projections as they are, bias included,
    before rotary positions and norms of queries. At blocks, on the first windows, each window a batch. For n
    independent isotropic queries its root mean square is 1/√n, the null. Deviation from the source: √E‖q‖² for E‖q‖,
    whose mean square chance gives exactly.
    """
    return _drift(heads.queries)


@_of_attention(
    needs="heads",
    invariant_to="rotation scale",
    bounds=(0.0, 1.0),
    null="exact",
    closed_form=lambda n, d: n**-0.5,
    min_points=1,
    undefined="all keys of a head are zero",
)
def key_drift(heads: Heads) -> Float[Tensor, ""]:
    """How far the keys of a block have drifted from the origin, in units of their size.

        key_drift = mean over heads of ‖E k‖ / √(E ‖k‖²)

    As `query_drift`; keys that several query heads share count once.
    """
    return _drift(heads.keys)


@_of_attention(
    needs="heads",
    invariant_to="rotation scale",
    bounds=(-1.0, 1.0),
    null="exact",
    closed_form=lambda n, d: 0.0,
    min_points=1,
    undefined="the mean query or the mean key of a head is zero",
)
def query_key_drift(heads: Heads) -> Float[Tensor, ""]:
    """Whether queries and keys of a block have drifted together or against each other.

        query_key_drift = mean over query heads of cos(E q, E k)

    1 when both point one way, which raises all logits of the head alike; -1 when they oppose; 0 on average for means
    that know nothing of each other (the null). Before rotary positions, which turn queries and keys apart by distance.
    It says nothing of lengths: `query_drift` and `key_drift` do.
    """
    queries, keys = heads.queries.mean(1), heads.keys.mean(1)
    keys = keys.repeat_interleave(len(queries) // len(keys), 0)
    # Plain division: torch's own cosine calls that of a zero vector 0.
    lengths = linalg.vector_norm(queries, dim=-1) * linalg.vector_norm(keys, dim=-1)
    return ((queries * keys).sum(-1) / lengths).mean()


@_of_attention(
    needs="attention",
    bounds=(0.0, 1.0),
    null="none",
    reason="attention that knows nothing is uniform and reads 1, the upper bound",
    undefined="no row sees two positions",
)
def attention_entropy(rows: AttentionRows) -> Float[Tensor, ""]:
    """How evenly the heads of a block look at what they may see.

        attention_entropy = mean over heads and rows i of (-Σⱼ aᵢⱼ log aᵢⱼ) / log vᵢ

    vᵢ is the number of positions that row i may look at; rows that see one position are left out. 1 for uniform
    attention, 0 for attention to one position.
    """
    several = rows.visible > 1
    entropy = torch.special.entr(rows.weights[:, several]).sum(-1)
    return (entropy / rows.visible[several].log()).mean()
