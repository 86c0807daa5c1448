"""Who owns the leading axis: the tokens and coordinates that make up the largest eigenvalue at a site.

With v the leading axis of a batch and pᵢ = (xᵢ - mean) · v, token i owns pᵢ² / Σp² of λ₁ and coordinate j owns v_j².
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        shares = (cloud.centred.points.double() @ axis).square()
        shares = shares / shares.sum()
        top = shares.topk(min(LISTED, len(shares)))
        rows = zip(top.values, tokens.ids[top.indices], tokens.positions[top.indices], tokens.documents[top.indices])
        self.tokens += [(float(share), int(i), int(p), int(d)) for share, i, p, d in rows]
        self.tokens = sorted(self.tokens, reverse=True)[:LISTED]
        self.first_position.append(float(shares[tokens.positions == 0].sum()))
        own = axis.square().cpu() * leading
        self.coordinates = own if self.coordinates is None else self.coordinates + own
        self.weight += leading

    def attach(self, prefix: str, decode: Callable[[int], str], titles: Sequence[str]) -> dict[str, np.ndarray]:
        """Arrays for the unit's attachments; texts as UTF-8 JSON."""
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


def list_owners(attachments: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """What `attach` wrote, one entry per site, for printing: also from a unit read back from a store."""
    listed = []
    for prefix in dict.fromkeys(
        name.removesuffix(".shares") for name in attachments if name.startswith("owners/") and name.endswith(".shares")
    ):
        part = {name.removeprefix(f"{prefix}."): values for name, values in attachments.items()}
        texts = json.loads(part["texts"].tobytes().decode())
        rows = zip(part["shares"], part["positions"], texts, strict=True)
        _, stack, site = prefix.split("/")
        listed.append(
            {
                "site": site,
                "stack": stack or None,
                "first_position_share": float(part["first_position_share"][0]),
                "tokens": [
                    {"share": float(share), "position": int(position), "text": text, "document": title}
                    for share, position, (text, title) in rows
                ],
                "coordinates": [
                    {"share": float(share), "coordinate": int(j)}
                    for share, j in zip(part["coordinate_shares"], part["coordinates"], strict=True)
                ],
            }
        )
    return listed
