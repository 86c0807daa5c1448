"""Pinning: how tightly the occurrences of a token type lie together, and how that goes with its frequency.

"Centroid distance" is used for two things; both are measured. Sampling noise, which depends on dispersion, would make
rare and frequent types differ by itself: every type has the same number of occurrences, and squares are debiased.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import SpecError
from anisoscope.kernels.gram import center
from anisoscope.tangent.inference import RESAMPLES, Correlation, permutation_correlation

LEAST_OCCURRENCES = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Pinning:
    """Of the types with enough occurrences, in ascending order of id; float64."""

    types: Int[Tensor, " v"]
    centroids: Float[Tensor, "v d"]
    """Means of the occurrences, around the centroid of all tokens."""
    dispersion: Float[Tensor, " v"]
    """`type_dispersion`: mean ‖h - μ_v‖ · √(m / (m - 1)) over m occurrences; exact in expectation for squares."""
    distance: Float[Tensor, " v"]
    """`centroid_distance`: √(‖μ_v - μ‖² - s²_v / m), s²_v the variance of a type; NaN where noise exceeds it."""
    occurrences: int
    note: str | None = None


def pin_types(
    states: Float[Tensor, "n d"],
    types: Int[Tensor, " n"],
    *,
    occurrences: int = LEAST_OCCURRENCES,
    seed: int = 0,
    around: str = "tokens",
) -> Pinning:
    """Dispersion and distance of every type with at least so many occurrences, of which exactly so many are drawn.

    The global centroid μ is the mean over tokens, which frequent types pull towards themselves, or over `types`.
    """
    if occurrences < 2 or around not in ("tokens", "types"):
        raise SpecError(f"at least two occurrences, around tokens or types; came {occurrences} around {around!r}")
    shuffled = torch.randperm(len(states), generator=torch.Generator().manual_seed(seed)).to(types.device)
    order = shuffled[types[shuffled].argsort(stable=True)]
    ids, counts = torch.unique(types, return_counts=True)
    first = (counts.cumsum(0) - counts)[counts >= occurrences]
    ids = ids[counts >= occurrences]
    drawn = order[first[:, None] + torch.arange(occurrences, device=order.device)]
    points = center(states)
    scale = points.scale
    groups = points.points[drawn].double() * scale
    centroids = groups.mean(1)
    if around == "types" and len(ids):
        centroids = centroids - centroids.mean(0)
    apart = groups - groups.mean(1, keepdim=True)
    variance = apart.square().sum((1, 2)) / (occurrences - 1)
    squares = centroids.square().sum(1) - variance / occurrences
    noisy = int((squares <= 0).sum())
    notes = [f"{len(counts) - len(ids)} of {len(counts)} types have fewer than {occurrences} occurrences"]
    if noisy:
        notes.append(f"{noisy} types are nearer to the centroid than sampling noise allows to say")
    return Pinning(
        types=ids,
        centroids=centroids,
        dispersion=torch.linalg.vector_norm(apart, dim=2).mean(1) * math.sqrt(occurrences / (occurrences - 1)),
        distance=torch.where(squares > 0, squares, math.nan).sqrt(),
        occurrences=occurrences,
        note="; ".join(notes),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectories:
    """How far the centroid of each type moved over checkpoints; float64."""

    variance: Float[Tensor, " v"]
    """`trajectory_variance`: Σ_τ ‖μ_v(τ) - mean_τ‖² / (T - 1)."""
    length: Float[Tensor, " v"]
    """Σ_τ ‖μ_v(τ + 1) - μ_v(τ)‖."""


def follow_centroids(centroids: Float[Tensor, "t v d"]) -> Trajectories:
    """Of the same types, measured on the same tokens at every checkpoint, so that sampling noise moves little."""
    if len(centroids) < 2:
        raise SpecError(f"a trajectory needs at least two checkpoints; came {len(centroids)}")
    exact = centroids.double()
    return Trajectories(
        variance=exact.var(0).sum(1),
        length=torch.linalg.vector_norm(exact.diff(dim=0), dim=2).sum(0),
    )


def log_trend(
    log_frequency: Float[Tensor, " v"], values: Float[Tensor, " v"], *, seed: int = 0, resamples: int = RESAMPLES
) -> Correlation:
    """Pearson's r of log f with the logarithm of a quantity, over types; zeros and NaN are left out."""
    logs = torch.where(values > 0, values.double(), math.nan).log()
    return permutation_correlation(log_frequency, logs, seed=seed, resamples=resamples)
