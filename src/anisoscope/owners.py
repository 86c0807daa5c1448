"""Who owns the leading axis: the tokens and coordinates that make up the largest eigenvalue at a site.

With v the leading axis of a batch and pᵢ = (xᵢ - mean) · v, token i owns pᵢ² / Σp² of λ₁ and coordinate j owns v_j².
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from anisoscope.cloud import Cloud

LISTED = 10


@dataclass
class AxisOwners:
    """The largest owners at one site, gathered over batches."""

    tokens: list[tuple[float, int, int, int]] = field(default_factory=list)
    """(share of λ₁ in its batch, token id, position, document), the ten largest over all batches."""
    first_position: list[float] = field(default_factory=list)
    """Per batch, what the first positions of all windows own together."""
    coordinates: torch.Tensor | None = None
    weight: float = 0.0

    def add(self, cloud: Cloud) -> None:
        """Take in one batch; a cloud that does not vary has no axis and adds nothing."""
        tokens, points, axis = cloud.tokens, cloud.centred.points, cloud.moments.axis
        if tokens is None or float(cloud.moments.leading) <= 0:
            return
        shares = (points @ axis.to(points.dtype)).double().square()
        shares = shares / shares.sum()
        top = shares.topk(min(LISTED, len(shares)))
        first = float(shares[tokens.positions == 0].sum())
        self.take(top.values.tolist(), tokens.facts(top.indices.tolist()), first, float(cloud.moments.leading))
        self.weigh((axis.double().square() * cloud.moments.leading).cpu())

    def take(self, shares: list[float], facts: list[tuple[int, int, int]], first: float, leading: float) -> None:
        """The largest shares of a batch with id, position and document of their tokens; first positions' part; λ₁."""
        found = [(share, *fact) for share, fact in zip(shares, facts, strict=True)]
        self.tokens = sorted([*self.tokens, *found], reverse=True)[:LISTED]
        self.first_position.append(first)
        self.weight += leading

    def weigh(self, coordinates: torch.Tensor) -> None:
        """v_j² λ₁ of one batch, or its sum over several."""
        self.coordinates = coordinates if self.coordinates is None else self.coordinates + coordinates

    def attach(self, prefix: str, decode: Callable[[int], str], titles: Sequence[str]) -> dict[str, np.ndarray]:
        """Arrays for the unit's attachments, which `Unit.owners` reads; texts as UTF-8 JSON."""
        if self.coordinates is None:
            return {}
        top = (self.coordinates / self.weight).topk(min(LISTED, len(self.coordinates)))
        shares, ids, positions, documents = (np.array(column) for column in zip(*self.tokens, strict=True))
        texts = json.dumps([[decode(int(i)), titles[int(d)]] for i, d in zip(ids, documents, strict=True)])
        return {
            f"{prefix}.shares": shares,
            f"{prefix}.token_ids": ids,
            f"{prefix}.positions": positions,
            f"{prefix}.documents": documents,
            f"{prefix}.texts": np.frombuffer(texts.encode(), dtype=np.uint8).copy(),
            f"{prefix}.first_position_share": np.array([np.mean(self.first_position)]),
            f"{prefix}.coordinates": top.indices.numpy(),
            f"{prefix}.coordinate_shares": top.values.numpy(),
        }
