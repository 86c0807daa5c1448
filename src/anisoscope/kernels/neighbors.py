"""Exact distances to the nearest neighbours, and exact duplicates.

Squared distances from a product, ‖x‖² + ‖y‖² - 2x·y, are cheap and lose all digits for close pairs. So they only
screen: the distances that are returned are norms of differences of the points themselves, and each row carries a proof
that no point outside its candidates could be nearer. Rows without one are searched again, at last by differences.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.kernels.gram import Centred, center, power_of_two_scale, product_roundoff, squared_norms, working_dtype

# Candidates kept beyond the k wanted: room for screening to get their order wrong.
SPARE_CANDIDATES = 6
# A dot product of d terms is off by at most λ√d · u (u the unit roundoff) with probability 1 - 2exp(-λ²/2) (Higham and
# Mary 2019): at λ = 8 one bound in 10¹³ fails. The worst case d · u is four times larger at d = 1000.
ROUNDING_SIGMAS = 8.0
# Elements of one block of the distance matrix, and of one block of differences.
BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Neighbors:
    """Distances (ascending, float64) from each point to its nearest others, and which points those are."""

    distances: Float[Tensor, "n k"]
    indices: Int[Tensor, "n k"]


@dataclass(frozen=True, kw_only=True)
class Unique:
    """The points left when exact repeats are removed (the first of each is kept)."""

    index: Int[Tensor, " m"]
    dropped: int


def drop_duplicates(points: Float[Tensor, "n d"]) -> Unique:
    """Find rows that repeat an earlier row exactly.

    Rows are hashed to 64 bits and rows of one hash compared with the first, so equality is exact; -0.0 equals 0.0.
    """
    # Adding zero turns -0.0 into 0.0, whose bits differ.
    bits = (points.to(working_dtype(points.dtype)) + 0.0).contiguous()
    words = bits.view(torch.int64 if bits.dtype == torch.float64 else torch.int32).to(torch.int64)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (words.shape[1],), generator=generator).to(words.device) | 1
    # The multiplication wraps around; mixing high bits down first lets sign and exponent reach the low bits of the sum.
    hashes = ((words ^ (words >> 17)) * weights).sum(1)
    first = first_occurrences(hashes)
    if not bool((bits == bits[first]).all()):
        # Two different rows share a hash (odds of 2⁻⁶⁴ a pair): compare every row.
        first = first_occurrences(torch.unique(bits, dim=0, return_inverse=True)[1])
    index = torch.nonzero(first == torch.arange(len(first), device=first.device)).flatten()
    return Unique(index=index, dropped=len(points) - len(index))


def first_occurrences(labels: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """For each entry, where its label first occurs: [7, 5, 7] gives [0, 1, 0]."""
    _, group = torch.unique(labels, return_inverse=True)
    order = torch.arange(len(labels), device=labels.device)
    return torch.full_like(order, len(labels)).scatter_reduce(0, group, order, "amin")[group]


def nearest_neighbors(points: Float[Tensor, "n d"], k: int) -> Neighbors:
    """The k nearest other points of every point, by Euclidean distance, exactly.

    Needs n > k. Relative error of the distances at most 1e-6; exact repeats have distance exactly 0.
    """
    raw = points.to(working_dtype(points.dtype))
    scale = power_of_two_scale(raw)
    raw = raw / scale.to(raw.dtype)
    found = _search(raw, torch.arange(len(raw), device=raw.device), k, center(raw))
    doubtful = torch.nonzero(~found.proven).flatten()
    if len(doubtful):
        again = _search(raw, doubtful, k, center(raw.double()))
        found.distances[doubtful], found.indices[doubtful] = again.distances, again.indices
        for row in doubtful[~again.proven].tolist():
            found.distances[row], found.indices[row] = _search_by_differences(raw, row, k)
    return Neighbors(distances=found.distances * scale, indices=found.indices)


@dataclass(frozen=True, kw_only=True)
class _Found:
    distances: Tensor
    indices: Tensor
    proven: Tensor


def _search(raw: Tensor, rows: Tensor, k: int, centred: Centred) -> _Found:
    """Screen by products, refine by differences, and say which rows are proven.

    A screened squared distance is off by at most γ(‖x‖ + ‖y‖)², γ from the dot product's rounding. A point with
    ‖y‖ > ‖x‖ + r_k is farther than r_k whatever its screened value; for all others ‖y‖ ≤ ‖x‖ + r_k bounds the error, so
    a row is proven when its worst candidate screens above r_k² + γ(2‖x‖ + r_k)². Outlier points do not weaken it.
    """
    n, d = raw.shape
    screen, unit = centred.points, centred.scale
    kept = min(k + SPARE_CANDIDATES, n - 1)
    squares = squared_norms(screen)
    narrow = squares.to(screen.dtype)
    gamma = (ROUNDING_SIGMAS * math.sqrt(d) + 4) * product_roundoff(screen)
    distances, indices, proven = [], [], []
    for block in rows.split(max(1, BLOCK_ELEMENTS // n)):
        sums = narrow[block, None] + narrow[None, :]
        screened = sums.addmm_(screen[block], screen.T, alpha=-2)
        screened[torch.arange(len(block), device=raw.device), block] = torch.inf
        candidates = screened.topk(kept, dim=1, largest=False)
        exact, order = _distances_to(raw, block, candidates.indices).sort(dim=1)
        radius = exact[:, k - 1] / unit
        margin = radius.square() + gamma * (2 * squares[block].sqrt() + radius).square()
        proven.append((candidates.values.double().amax(1) >= margin) | (kept == n - 1))
        distances.append(exact[:, :k])
        indices.append(candidates.indices.gather(1, order)[:, :k])
    return _Found(distances=torch.cat(distances), indices=torch.cat(indices), proven=torch.cat(proven))


def _distances_to(raw: Tensor, rows: Tensor, candidates: Tensor) -> Tensor:
    at_once = max(1, BLOCK_ELEMENTS // (candidates.shape[1] * raw.shape[1]))
    pairs = zip(rows.split(at_once), candidates.split(at_once), strict=True)
    return torch.cat([(raw[some, None] - raw[theirs]).double().square().sum(-1).sqrt() for some, theirs in pairs])


def _search_by_differences(raw: Tensor, row: int, k: int) -> tuple[Tensor, Tensor]:
    distances = (raw.double() - raw[row].double()).square().sum(1).sqrt()
    distances[row] = torch.inf
    nearest = distances.topk(k, largest=False)
    return nearest.values, nearest.indices
