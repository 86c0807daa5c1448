"""Tangent spaces over training: how far they turn, and how rows of an embedding move in them."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.tangent.controls import DRAWS
from anisoscope.tangent.energies import Alignment, uncoupled_alignment
from anisoscope.tangent.frequency import BINS, ByFrequency, energy_by_frequency
from anisoscope.tangent.proxies import Proxy


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """From one subspace to another of the same space; angles in radians, ascending, float64."""

    angles: Float[Tensor, " r"]
    overlap: float
    """‖PᵀQ‖² / r, the mean squared cosine: r/d on average for two random subspaces of rank r."""

    @property
    def grassmann(self) -> float:
        """√Σθ²: the length of the shortest way; at most √r · π/2."""
        return float(torch.linalg.vector_norm(self.angles))

    @property
    def chordal(self) -> float:
        """√Σ sin²θ."""
        return float(torch.linalg.vector_norm(self.angles.sin()))


def turn_between(one: Float[Tensor, "d r"], other: Float[Tensor, "d q"]) -> Turn:
    """Principal angles of two subspaces with orthonormal bases, as many as the smaller has directions.

    Sines for small angles and cosines for large ones (Björck and Golub 1973): near 0 a cosine knows half the digits.
    """
    first, second = (one, other) if one.shape[1] >= other.shape[1] else (other, one)
    first, second = first.double(), second.double()
    products = first.T @ second
    cosines = torch.linalg.svdvals(products).clamp(0, 1)
    sines = torch.linalg.svdvals(second - first @ products).clamp(0, 1).flip(0)
    return Turn(
        angles=torch.where(cosines > math.sqrt(0.5), sines.asin(), cosines.acos()).cpu(),
        overlap=float(products.square().sum()) / second.shape[1],
    )


@lru_cache(maxsize=64)
def random_distance(dim: int, rank: int, draws: int = 16) -> float:
    """The mean Grassmann distance of two random subspaces."""
    generator = torch.Generator().manual_seed(0)
    spaces = torch.linalg.qr(torch.randn(2 * draws, dim, rank, generator=generator, dtype=torch.float64)).Q
    return sum(turn_between(*pair).grassmann for pair in spaces.view(draws, 2, dim, rank)) / draws


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateAlignment:
    """How far rows of an embedding moved along a tangent space of the same space."""

    alignment: Alignment
    """Norm-weighted, Σ‖Qᵀu‖² / Σ‖u‖², with the controls of uncoupled gradients."""
    unweighted: float
    """Mean of a_v = ‖Qᵀu_v‖² / ‖u_v‖² over the rows that moved."""
    rows: int
    """How many did."""
    by_frequency: ByFrequency | None


def update_alignment(
    updates: Float[Tensor, "v d"],
    proxy: Proxy,
    *,
    log_frequency: Float[Tensor, " v"] | None = None,
    rows: Int[Tensor, " v"] | None = None,
    bins: int = BINS,
    draws: int = DRAWS,
    seed: int = 0,
) -> UpdateAlignment:
    """Of update rows: raw gradient, optimizer step or observed difference, decoupled weight decay removed before.

    The proxy must be one of the rows' own space: the embedding's for the input embedding, the final-normed states' for
    an untied output embedding. With `log_frequency`, one for each row, bins hold equally many rows.
    """
    lengths = torch.linalg.vector_norm(updates, dim=1)
    moved = (lengths > 0).nonzero().flatten()
    kept = updates[moved]
    shares = torch.linalg.vector_norm(kept @ proxy.basis.to(kept), dim=1).double() / lengths[moved].double()
    by_frequency = None
    if log_frequency is not None and len(moved):
        names = moved if rows is None else rows[moved]
        by_frequency = energy_by_frequency(
            kept, proxy.basis, log_frequency[moved], names, bins=bins, by="types", seed=seed
        )
    return UpdateAlignment(
        alignment=uncoupled_alignment(updates, proxy, draws=draws, seed=seed),
        unweighted=float(shares.square().mean()) if len(moved) else math.nan,
        rows=len(moved),
        by_frequency=by_frequency,
    )
