"""Exact distances to the nearest neighbours, and exact duplicates.

Squared distances from a product, ‖x‖² + ‖y‖² - 2x·y, are cheap and lose all digits for close pairs. So they only
screen: the distances that are returned are norms of differences of the points themselves, and each row carries a proof
that no point outside its candidates could be nearer. Rows without one are searched again, at last by differences.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from anisoscope.kernels.gram import Centred, center, for_products, mean_of, product_roundoff, working_dtype

# Candidates kept beyond the k wanted: room for screening to get their order wrong.
SPARE_CANDIDATES = 3
# A dot product of d terms is off by at most λ√d · u (u the unit roundoff) with probability 1 - 2exp(-λ²/2) (Higham and
# Mary 2019): at λ = 8 one bound in 10¹³ fails. The worst case d · u is four times larger at d = 1000.
ROUNDING_SIGMAS = 8.0
# Elements of one block of the distance matrix, and of one block of differences: caches hold them.
BLOCK_ELEMENTS, DIFFERENCE_ELEMENTS = 1 << 21, 1 << 18
# Up to this many points all products are kept, so that every part of the cloud can read its own from them.
KEPT_POINTS = 8192
# Rows of a symmetric product at one time, and of its mirror image.
SYMMETRIC_ROWS, MIRRORED_ROWS = 256, 64
# Distances below this, relative to the largest norm, are computed in float64: their squares vanish in float32.
TINY = 2.0**-55


@dataclass(frozen=True, kw_only=True)
class Neighbors:
    """Distances (ascending, float64) from each point to its nearest others; NaN for points that do not take part."""

    distances: Float[Tensor, "*s n k"]
    indices: Int[Tensor, "*s n k"] | None = None
    """Which points those are, where that was kept."""


@dataclass(frozen=True, kw_only=True)
class Unique:
    """The points left when exact repeats are removed (the first of each is kept)."""

    index: Int[Tensor, " m"]
    dropped: int


def drop_duplicates(points: Float[Tensor, "n d"]) -> Unique:
    """Find rows that repeat an earlier row exactly; -0.0 equals 0.0.

    Equal rows have equal norms, so only rows of one norm are compared.
    """
    rows = points.to(working_dtype(points.dtype))
    first = first_occurrences(torch.linalg.vector_norm(rows, dim=1))
    repeats = torch.nonzero(first != torch.arange(len(first), device=first.device)).flatten()
    different = repeats[(rows[repeats] != rows[first[repeats]]).any(1)]
    if len(different):
        # Several rows may share a norm: whoever differs from the first of them is compared with the others.
        others = torch.nonzero(torch.isin(first, first[different])).flatten()
        first[others] = others[first_occurrences(torch.unique(rows[others] + 0.0, dim=0, return_inverse=True)[1])]
    index = torch.nonzero(first == torch.arange(len(first), device=first.device)).flatten()
    return Unique(index=index, dropped=len(points) - len(index))


def first_occurrences(labels: Shaped[Tensor, " n"]) -> Int[Tensor, " n"]:
    """For each entry, where its label first occurs: [7, 5, 7] gives [0, 1, 0]."""
    _, group = torch.unique(labels, return_inverse=True)
    order = torch.arange(len(labels), device=labels.device)
    return torch.full_like(order, len(labels)).scatter_reduce(0, group, order, "amin")[group]


@dataclass(frozen=True, kw_only=True)
class Products:
    """All products x̄ᵢ·x̄ⱼ of centred points: they serve neighbours, Σλ², and every part of the cloud."""

    points: Float[Tensor, "n d"]
    """As `Centred` has them, in float64 where torch is set to round float32 products."""
    squares: Float[Tensor, " n"]
    scale: Float[Tensor, ""]
    matrix: Float[Tensor, "n n"] | None
    """X̄X̄ᵀ; None where it is too large to be kept."""

    @cached_property
    def row_squares(self) -> Float[Tensor, " n"]:
        """Σⱼ (x̄ᵢ·x̄ⱼ)² for each row, in float64."""
        blocks = (self.rows(slice(start, stop)) for start, stop in _blocks(len(self.points), len(self.points)))
        return torch.cat([torch.linalg.vector_norm(block, dim=1) for block in blocks]).double().square()

    def rows(self, which: slice | Tensor) -> Float[Tensor, "b n"]:
        """Some rows of X̄X̄ᵀ."""
        return self.points[which] @ self.points.T if self.matrix is None else self.matrix[which]

    def take(self, index: Int[Tensor, " m"]) -> "Products":
        """The products of some of the points, around the same centre."""
        kept = None if self.matrix is None else self.matrix[index[:, None], index[None, :]]
        return Products(points=self.points[index], squares=self.squares[index], scale=self.scale, matrix=kept)


def multiply(centred: Centred, scratch: Float[Tensor, " m"] | None = None) -> Products:
    """All products: the part of the matrix right of its diagonal is computed, the other is its mirror image.

    `scratch` is memory for them, lent for as long as they are used: fresh memory costs a fifth of the whole.
    """
    points = for_products(centred.points)
    n, matrix = len(points), None
    if n <= KEPT_POINTS:
        usable = scratch is not None and scratch.dtype == points.dtype and len(scratch) >= n * n
        matrix = scratch[: n * n].view(n, n) if scratch is not None and usable else points.new_empty(n, n)
        for start in range(0, n, SYMMETRIC_ROWS):
            stop = start + SYMMETRIC_ROWS
            torch.mm(points[start:stop], points[start:].T, out=matrix[start:stop, start:])
        for start in range(0, n, MIRRORED_ROWS):
            stop = start + MIRRORED_ROWS
            matrix[stop:, start:stop] = matrix[start:stop, stop:].T
    return Products(points=points, squares=centred.squares, scale=centred.scale, matrix=matrix)


def squares_of_part(products: Products, index: Int[Tensor, " m"]) -> Float[Tensor, ""] | None:
    """‖X̄X̄ᵀ‖²_F of some of the points around their own mean; None where rounding would spoil it.

    About the common centre it is what the part's rows have less what they have with the points left out. Moving to the
    part's own mean m, with C = X̄ᵀX̄ of its N points: ‖C - N m mᵀ‖²_F = ‖C‖²_F - 2N mᵀC m + N²‖m‖⁴.
    """
    left_out = torch.ones(len(products.points), dtype=torch.bool, device=index.device)
    left_out[index] = False
    outside = products.rows(torch.nonzero(left_out).flatten())[:, index].double().square().sum()
    points, whole = products.points[index], products.row_squares[index].sum()
    mean = mean_of(points).double()
    shift, total = len(index) * mean.square().sum(), products.squares[index].sum()
    # These are differences: where less than half is left of the larger number, digits are lost.
    if 2 * float(outside) > float(whole) or 2 * float(shift) > float(total):
        return None
    along = (points @ mean.to(points.dtype)).double().square().sum()
    return whole - outside - 2 * len(index) * along + shift.square()


def nearest_neighbors(
    points: Float[Tensor, "n d"], k: int, products: Products | None = None, without: Int[Tensor, " m"] | None = None
) -> Neighbors:
    """The k nearest other points of every point, by Euclidean distance, exactly.

    Needs n > k. Relative error of the distances at most 1e-6; exact repeats have distance exactly 0. `products` are
    those of the points around any common centre. Points `without` are neither asked about nor counted as neighbours;
    rows and indices of the answer count the others.
    """
    products = products or multiply(center(points))
    raw = points.to(working_dtype(points.dtype))
    if float(products.scale) != 1:
        raw = raw / products.scale.to(raw.dtype)
    hidden = torch.zeros(len(raw), dtype=torch.bool, device=raw.device)
    if without is not None:
        hidden[without] = True
    found = _search(raw, slice(0, len(raw)), k, products, hidden)
    doubtful = torch.nonzero(~found.proven & ~hidden).flatten()
    if len(doubtful):
        centred = center(raw.double())
        exact, unit = raw.double() / centred.scale, centred.scale
        wide = Products(points=centred.points, squares=centred.squares, scale=unit, matrix=None)
        again = _search(exact, doubtful, k, wide, hidden)
        found.distances[doubtful], found.indices[doubtful] = again.distances * unit, again.indices
        for row in doubtful[~again.proven].tolist():
            distances, found.indices[row] = _search_by_differences(exact, row, k, hidden)
            found.distances[row] = distances * unit
    distances, indices = found.distances * products.scale, found.indices
    if without is not None:
        distances, indices = distances[~hidden], (torch.cumsum(~hidden, 0) - 1)[indices[~hidden]]
    return Neighbors(distances=distances, indices=indices)


@dataclass(frozen=True, kw_only=True)
class _Found:
    distances: Tensor
    indices: Tensor
    proven: Tensor


def _search(raw: Tensor, rows: slice | Tensor, k: int, products: Products, hidden: Tensor) -> _Found:
    """Screen by products, refine by differences, and say which rows are proven; all in the units of `products`.

    A screened squared distance is off by at most γ(‖x‖ + ‖y‖)², γ from the dot product's rounding. A point with
    ‖y‖ > ‖x‖ + r is farther than r whatever its screened value, so γ(2‖x‖ + r)² bounds the error for all that matter:
    outlier points do not weaken it. The k nearest by screening give an upper bound r on the k-th distance; whoever is
    truly nearer screens below r² + γ(2‖x‖ + r)². All candidates below that limit are refined, and a row is proven when
    no point beyond its candidates is.
    """
    n, d = raw.shape
    order = torch.arange(n, device=raw.device)[rows]
    kept = min(k + SPARE_CANDIDATES, n - 1)
    # A quarter more than the bound, for r itself is only bounded: γ is far below 1e-3.
    gamma = 1.25 * (ROUNDING_SIGMAS * math.sqrt(d) + 8) * product_roundoff(products.points)
    norms = products.squares.to(products.points.dtype).masked_fill(hidden, torch.inf)
    distances, indices, proven = [], [], []
    for start, stop in _blocks(len(order), n):
        mine = order[start:stop]
        screened = torch.add(norms, products.rows(slice(start, stop) if isinstance(rows, slice) else mine), alpha=-2)
        screened[torch.arange(len(mine), device=raw.device), mine] = torch.inf
        screened, nearest = _smallest(screened, min(kept + 1, n))
        own = products.squares[mine, None]
        values = (screened.double() + own).clamp_min(0)
        size, last = 2 * own.sqrt(), values[:, k - 1 : k]
        reach = (last + gamma * (size + last.sqrt()).square()).sqrt()
        limit = reach.square() + gamma * (size + reach).square()
        proven.append((values[:, kept:] >= limit).all(1))
        exact = torch.full_like(values[:, :kept], torch.inf)
        exact[:, :k] = _distances_to(raw, mine, nearest[:, :k])
        row, column = torch.nonzero(values[:, k:kept] < limit, as_tuple=True)
        exact[row, k + column] = _distances_to(raw, mine[row], nearest[row, k + column][:, None])[:, 0]
        ascending, places = exact.sort(dim=1)
        distances.append(ascending[:, :k])
        indices.append(nearest.gather(1, places[:, :k]))
    return _Found(distances=torch.cat(distances), indices=torch.cat(indices), proven=torch.cat(proven))


def _smallest(values: Float[Tensor, "b n"], count: int) -> tuple[Float[Tensor, "b k"], Int[Tensor, "b k"]]:
    """The smallest of each row, ascending, and where they are.

    In wide rows they are looked for in as many groups of 64 as are wanted, those with the smallest minima: none can be
    outside, and a minimum is much cheaper than a selection.
    """
    rows, width = values.shape
    if width < 2048 or width % 64 or count > 8:
        found = values.topk(count, dim=1, largest=False)
        return found.values, found.indices
    grouped = values.view(rows, 64, width // 64)
    groups = grouped.amin(1).topk(count, dim=1, largest=False).indices
    members = grouped.gather(2, groups[:, None].expand(-1, 64, -1)).flatten(1)
    found = members.topk(count, dim=1, largest=False)
    return found.values, found.indices // count * (width // 64) + groups.gather(1, found.indices % count)


def _blocks(rows: int, columns: int) -> list[tuple[int, int]]:
    step = max(1, BLOCK_ELEMENTS // columns)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _distances_to(raw: Tensor, rows: Tensor, candidates: Tensor) -> Tensor:
    (count, k), d = candidates.shape, raw.shape[1]
    step = max(1, DIFFERENCE_ELEMENTS // max(1, k * d))
    distances = torch.empty(count, k, dtype=torch.float64, device=raw.device)
    for start in range(0, count, step):
        some = slice(start, start + step)
        differences = raw.index_select(0, candidates[some].flatten()).view(-1, k, d).sub_(raw[rows[some], None])
        distances[some] = torch.linalg.vector_norm(differences, dim=2)
    tiny = torch.nonzero(distances < TINY)
    if len(tiny) and raw.dtype != torch.float64:
        one, other = rows[tiny[:, 0]], candidates[tiny[:, 0], tiny[:, 1]]
        distances[tiny[:, 0], tiny[:, 1]] = (raw[one].double() - raw[other].double()).norm(dim=1)
    return distances


def _search_by_differences(raw: Tensor, row: int, k: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
    distances = (raw - raw[row]).square().sum(1).sqrt().masked_fill(hidden, torch.inf)
    distances[row] = torch.inf
    nearest = distances.topk(k, largest=False)
    return nearest.values, nearest.indices
