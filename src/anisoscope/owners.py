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
        tokens, leading = cloud.tokens, float(cloud.moments.leading)
        if tokens is None or leading <= 0:
            return
        axis = cloud.moments.axis.double()
        points = cloud.centred.points
        shares = (points @ cloud.moments.axis.to(points.dtype)).double().square()
        shares = shares / shares.sum()
        top = shares.topk(min(LISTED, len(shares)))
        facts = (tokens.ids[top.indices], tokens.positions[top.indices], tokens.documents[top.indices])
        rows = zip(top.values.tolist(), *(values.tolist() for values in facts), strict=True)
        self.tokens += list(rows)
        self.tokens = sorted(self.tokens, reverse=True)[:LISTED]
        self.first_position.append(float(shares[tokens.positions == 0].sum()))
        own = axis.square().cpu() * leading
        self.coordinates = own if self.coordinates is None else self.coordinates + own
        self.weight += leading

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
