"""Tangent proxies: the few directions in which states vary most, as an orthonormal basis Q (d, r).

Fit them on other documents than those whose gradients are tested. Centring is the decision that matters: on states as
they are, semi-NMF and the uncentred SVD share one span, and one of its directions is the common mean.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from anisoscope.errors import SpecError, StatesError
from anisoscope.kernels.gram import center, for_products, power_of_two_scale, squared_norms, working_dtype
from anisoscope.kernels.leading import SPARE_AXES, leading_axes
from anisoscope.kernels.neighbors import drop_duplicates, nearest_neighbors
from anisoscope.kernels.seminmf import BASIS_WIDTH, semi_nmfs
from anisoscope.metrics.neighbors import twonn

METHODS = ("pca", "svd", "seminmf", "local_pca")
RANK_RULES = ("variance:SHARE", "twonn", "participation_ratio")
# The paper fits on the first part of a run's checkpoints, once and for good.
FROZEN_SHARE = 0.3
NEIGHBORS = 48
# Numbers of neighbours' coordinates held at one time.
HELD_ELEMENTS = 1 << 24
# Error at which a semi-NMF for a proxy has settled: the span is then within .985 of that at 1e-6 (mean squared cosine);
# the spans of two seeds agree to .95.
CONE_TOLERANCE = 1e-3
# A direction with less of the largest singular value does not exist.
SMALLEST = 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class Proxy:
    """A tangent space, the same for every token."""

    basis: Float[Tensor, "d r"]
    mean: Float[Tensor, " d"]
    """Of the states it was fitted on, in float64; of several checkpoints, each divided by its spread."""
    following: Float[Tensor, "d q"]
    """The next r principal directions outside the basis (N2); fewer where the space ends."""
    last: Float[Tensor, "d l"]
    """The last r of them (N3); none where they were not asked for."""
    explained: float
    """Share of the variance of the fit states in the basis; of their squares where they are not centred."""
    method: str
    centred: bool
    notes: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """Number of directions."""
        return self.basis.shape[1]

    @property
    def dim(self) -> int:
        """Number of coordinates."""
        return self.basis.shape[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalProxy:
    """Tangent spaces that are made where they are asked for: all of them at once would not fit into memory."""

    states: Float[Tensor, "m d"]
    rank: int
    neighbors: int
    notes: tuple[str, ...] = ()

    @property
    def dim(self) -> int:
        """Number of coordinates."""
        return self.states.shape[1]

    def bases(self, at: Float[Tensor, "n d"]) -> Iterator[tuple[slice, Float[Tensor, "b d r"]]]:
        """The leading principal directions of the nearest fit states of each point, some points at a time.

        From the k x k products of the centred neighbours: XᵀU / σ. Directions that k neighbours do not have are zero.
        """
        known = for_products(self.states.to(working_dtype(self.states.dtype)))
        around = center(known)
        known = around.points
        points = at.to(known) / around.scale.to(known.dtype) - around.mean.to(known.dtype)
        squares = around.squares.to(known.dtype)
        size = max(1, HELD_ELEMENTS // max(self.neighbors * self.dim, len(known)))
        for start in range(0, len(points), size):
            some = points[start : start + size]
            near = (squares - 2 * some @ known.T).topk(self.neighbors, largest=False).indices
            cloud = known[near]
            cloud = cloud - cloud.mean(1, keepdim=True)
            values, vectors = torch.linalg.eigh((cloud @ cloud.mT).double())
            values, vectors = values[:, -self.rank :], vectors[:, :, -self.rank :].to(known)
            real = values > 1e-6 * values[:, -1:]
            shrink = torch.where(real, values, torch.inf).rsqrt().to(known.dtype)
            yield slice(start, start + len(some)), (cloud.mT @ vectors) * shrink[:, None]


def fit_proxy(
    states: Float[Tensor, "n d"] | Sequence[Shaped[Tensor, "_ d"]],
    *,
    method: str = "pca",
    rank: int | str = 16,
    centred: bool | None = None,
    concepts: int | None = None,
    neighbors: int = NEIGHBORS,
    seed: int = 0,
) -> Proxy | LocalProxy:
    """A tangent proxy by any of the METHODS: see `fit_global`, and `fit_local` for `local_pca`."""
    if method != "local_pca":
        return fit_global(states, method=method, rank=rank, centred=centred, concepts=concepts, seed=seed)
    if not isinstance(states, Tensor):
        raise SpecError("local tangent spaces are those of one checkpoint: neighbours of several do not mix")
    return fit_local(states, rank=rank, neighbors=neighbors)


def fit_local(states: Float[Tensor, "n d"], *, rank: int | str = 8, neighbors: int = NEIGHBORS) -> LocalProxy:
    """Keep the fit states; each token's tangent space comes from its `neighbors` nearest of them."""
    points, _ = _pool([states], True)
    values = torch.linalg.eigvalsh(points.T @ points).flip(0).clamp_min(0) if isinstance(rank, str) else points[0]
    wanted, notes = choose_rank(rank, values.double(), states)
    if not wanted < neighbors <= len(states):
        raise SpecError(
            f"local tangent spaces need rank < neighbours ≤ states; came rank {wanted}, {neighbors} neighbours and "
            f"{len(states)} states"
        )
    return LocalProxy(states=states, rank=wanted, neighbors=neighbors, notes=notes)


def fit_global(
    states: Float[Tensor, "n d"] | Sequence[Shaped[Tensor, "_ d"]],
    *,
    method: str = "pca",
    rank: int | str = 16,
    centred: bool | None = None,
    concepts: int | None = None,
    seed: int = 0,
    last: bool = False,
) -> Proxy:
    """One tangent space for all tokens, from the states of one checkpoint or of several.

    `pca`: leading eigenvectors of the covariance. `svd`: leading right singular vectors of the states as they are.
    `seminmf`: the span of the directions of a semi-NMF (by default of centred states) with as many `concepts` as the
    rank; where there are more, the leading singular vectors of what they make of the states.
    Several checkpoints have equal weight: each is centred by its own mean and scaled to a total variance of one.
    Without the `last` directions (N3) a rank that is a number needs no whole decomposition.
    """
    several = [states] if isinstance(states, Tensor) else list(states)
    settings = {"centred": centred, "concepts": concepts, "seed": seed, "last": last}
    return fit_each([several], methods=(method,), ranks=[rank], **settings)[0][method]


def fit_each(
    places: Sequence[Sequence[Tensor]],
    *,
    methods: Sequence[str],
    ranks: Sequence[int | str],
    centred: bool | None = None,
    concepts: int | None = None,
    seed: int = 0,
    last: bool = False,
) -> list[dict[str, Proxy]]:
    """The same for several places, each with its states, and by several methods: what they share is made once.

    Searches and semi-NMFs of places are made side by side.
    """
    found: list[dict[str, Proxy]] = [{} for _ in places]
    known: dict[bool, list[_Spread]] = {}
    for method in methods:
        if method not in ("pca", "svd", "seminmf"):
            raise SpecError(f"a tangent proxy is one of {', '.join(METHODS)}; came {method!r}")
        if (method == "pca" and centred is False) or (method == "svd" and centred):
            raise SpecError("pca is centred and svd is not: ask for the other of the two")
        around = method != "svd" if centred is None else centred
        if around not in known:
            whole = last or any(isinstance(rank, str) for rank in ranks)
            most = None if whole else max(int(rank) for rank in ranks)
            known[around] = _spreads_of(places, around, most)
        spreads = known[around]
        wanted = [
            choose_rank(rank, one.values, several[-1])
            for rank, one, several in zip(ranks, spreads, places, strict=True)
        ]
        if method == "seminmf":
            bases = _cone_bases(spreads, [chosen for chosen, _ in wanted], concepts, seed)
            others = _others(spreads, bases, last)
        else:
            bases = [one.axes[:, :chosen] for one, (chosen, _) in zip(spreads, wanted, strict=True)]
            others = [one.axes[:, chosen:] for one, (chosen, _) in zip(spreads, wanted, strict=True)]
        for place, (spread, basis, beside, (chosen, notes)) in enumerate(
            zip(spreads, bases, others, wanted, strict=True)
        ):
            size = basis.shape[1]
            if size < chosen:
                notes = (*notes, f"the semi-NMF has {size} independent directions; {chosen} were asked for")
            held, covariance = (spread.covariance @ basis) * basis, spread.covariance
            found[place][method] = Proxy(
                basis=basis,
                mean=spread.mean,
                following=beside[:, :size],
                last=beside[:, max(beside.shape[1] - size, 0) :] if last else beside[:, :0],
                explained=float(held.sum() / covariance.diagonal().sum()),
                method=method,
                centred=around,
                notes=notes,
            )
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class _Spread:
    points: Float[Tensor, "n d"]
    mean: Float[Tensor, " d"]
    covariance: Float[Tensor, "d d"]
    values: Float[Tensor, " k"]
    """Descending, float64."""
    axes: Float[Tensor, "d k"]
    """Eigenvectors: all, or the leading ones."""


def _spreads_of(places: Sequence[Sequence[Tensor]], centred: bool, most: int | None) -> list[_Spread]:
    """With twice the axes of the rank that is wanted at `most`, and about those that a semi-NMF starts from."""
    pooled = [_pool(states, centred) for states in places]
    covariances = [points.T @ points for points, _ in pooled]
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for here in alike(covariances):
        stack = torch.stack([covariances[place] for place in here])
        dim = stack.shape[1]
        count, spare = (dim, 0) if most is None else (2 * most, (BASIS_WIDTH - 2) * most)
        found |= dict(zip(here, zip(*leading_axes(stack, count, spare=spare), strict=True), strict=True))
    return [
        _Spread(points=points, mean=mean, covariance=covariance, values=found[place][0], axes=found[place][1])
        for place, ((points, mean), covariance) in enumerate(zip(pooled, covariances, strict=True))
    ]


def alike(matrices: Sequence[Tensor]) -> list[list[int]]:
    """The places of those that can be stacked."""
    shapes = [one.shape for one in matrices]
    return [[place for place, other in enumerate(shapes) if other == shape] for shape in dict.fromkeys(shapes)]


def _others(spreads: Sequence[_Spread], bases: Sequence[Tensor], last: bool) -> list[Float[Tensor, "d q"]]:
    """Principal directions outside each basis: all, or as many as it has."""
    found: dict[int, Tensor] = {}
    for here in alike(bases):
        dim, size = bases[here[0]].shape
        stack = torch.stack([_project_out(spreads[place].covariance, bases[place]) for place in here])
        # Of all, the basis itself comes last, with zeros.
        axes = leading_axes(stack, dim if last else min(size, dim - size), spare=0 if last else SPARE_AXES)[1]
        found |= dict(zip(here, axes[:, :, : dim - size], strict=True))
    return [found[place] for place in range(len(spreads))]


def choose_rank(
    rule: int | str, values: Float[Tensor, " k"], states: Float[Tensor, "n d"]
) -> tuple[int, tuple[str, ...]]:
    """The number of directions that a rule asks for, at most half of all: normal controls need as many again.

    `variance:0.9`: the fewest that hold this share of the variance; `participation_ratio`: (Σλ)²/Σλ²; `twonn`: the
    intrinsic dimension of the states (the last checkpoint's). Both are rounded.
    """
    dim = states.shape[1]
    if isinstance(rule, int):
        if not 1 <= rule < dim:
            raise SpecError(f"a proxy of {dim} coordinates has a rank from 1 to {dim - 1}; came {rule}")
        return rule, ()
    name, _, share = rule.partition(":")
    if name == "variance":
        try:
            asked = float(share or "0.9")
        except ValueError:
            asked = math.nan
        if not 0 < asked < 1:
            raise SpecError(f"rank by variance needs a share between 0 and 1, as variance:0.9; came {rule!r}")
        found = 1.0 + float((values.cumsum(0) < asked * values.sum()).sum())
    elif rule == "participation_ratio":
        found = float(values.sum().square() / values.square().sum())
    elif rule == "twonn":
        distinct = states[drop_duplicates(states).index]
        found = float(twonn.function(nearest_neighbors(distinct, 2))) if len(distinct) > 3 else math.nan
    else:
        raise SpecError(f"a rank is a number or one of {', '.join(RANK_RULES)}; came {rule!r}")
    if not math.isfinite(found):
        raise StatesError(f"the rank by {rule} is not known for these states: give a number")
    chosen = min(max(round(found), 1), max(dim // 2, 1))
    limited = f"; limited to {chosen}, half of the coordinates" if chosen < round(found) else ""
    return chosen, (f"rank {found:.4g} by {rule}{limited}",)


def _pool(states: Sequence[Tensor], centred: bool) -> tuple[Float[Tensor, "n d"], Float[Tensor, " d"]]:
    """Rows whose second moment is the mean over checkpoints of theirs, each of trace one; and the mean."""
    if not states or any(one.ndim != 2 or len(one) < 2 for one in states):
        raise SpecError("a proxy needs matrices of at least two states each")
    parts, means = [], []
    for one in states:
        if not bool(one.isfinite().all()):
            raise StatesError("a proxy needs finite states, and some are NaN or infinite; drop them first")
        around = center(one)
        points, scale = around.points, around.scale
        if not centred:
            raw = one.to(working_dtype(one.dtype))
            scale = power_of_two_scale(raw)
            points = raw / scale.to(raw.dtype)
        size = squared_norms(points).sum().sqrt()
        if float(size) == 0:
            raise StatesError("a proxy needs states that vary, and these are all equal")
        parts.append(for_products(points / size.to(points.dtype)))
        spread = size * scale / math.sqrt(len(one))
        means.append(around.mean * around.scale / (spread if len(states) > 1 else 1))
    return torch.cat(parts) / math.sqrt(len(parts)), torch.stack(means).mean(0)


def _cone_bases(
    spreads: Sequence[_Spread], ranks: Sequence[int], concepts: int | None, seed: int
) -> list[Float[Tensor, "d r"]]:
    """Leading right singular vectors of ZD, which span what D spans where there are no more concepts than directions.

    Not of D with each direction weighted by its own codes: codes of directions that cancel each other are the largest.
    """
    found: dict[int, Tensor] = {}
    for rank, dim in dict.fromkeys((rank, one.points.shape[1]) for rank, one in zip(ranks, spreads, strict=True)):
        if concepts is not None and concepts < rank:
            raise SpecError(f"{concepts} concepts do not span {rank} directions: ask for at least {rank}")
        here = [place for place, one in enumerate(spreads) if (ranks[place], one.points.shape[1]) == (rank, dim)]
        # A GPU hardly needs longer for many than for one; a CPU would only run out of its caches.
        size = len(here) if spreads[here[0]].points.is_cuda else 1
        for start in range(0, len(here), size):
            some = here[start : start + size]
            fits = semi_nmfs(
                [spreads[place].points for place in some],
                concepts or rank,
                seed=seed,
                tolerance=CONE_TOLERANCE,
                axes=[spreads[place].axes for place in some],
            )
            for place, fit in zip(some, fits, strict=True):
                vectors = _right_vectors(fit.codes.double(), fit.directions.double(), rank)
                found[place] = vectors.to(spreads[place].points)
    return [found[place] for place in range(len(spreads))]


def _right_vectors(codes: Float[Tensor, "n r"], directions: Float[Tensor, "r d"], rank: int) -> Float[Tensor, "d q"]:
    """The leading right singular vectors of ZD, from products of r x r numbers, which are decomposed on the CPU."""
    small, products = (codes.T @ codes).cpu(), (directions @ directions.T).cpu()
    squares, turn = torch.linalg.eigh(small)
    # (ZᵀZ)^½ D has the same singular values and right vectors.
    root = squares.clamp_min(0).sqrt()[:, None] * turn.T
    lengths, turn = (one.flip(-1)[..., :rank] for one in torch.linalg.eigh(root @ products @ root.T))
    kept = lengths > SMALLEST**2 * lengths[0]
    mixed = (turn[:, kept] / lengths[kept].sqrt()).T @ root
    return (mixed.to(directions) @ directions).T


def _project_out(matrix: Float[Tensor, "d d"], basis: Float[Tensor, "d r"]) -> Float[Tensor, "d d"]:
    """(I - QQᵀ) M (I - QQᵀ)."""
    half = matrix - basis @ (basis.T @ matrix)
    return half - (half @ basis) @ basis.T
