"""Tangent proxies: the few directions in which states vary most, as an orthonormal basis Q (d, r).

Fit them on other documents than those whose gradients are tested. Centring is the decision that matters: on states as
they are, semi-NMF and the uncentred SVD share one span, and one of its directions is the common mean.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from anisoscope.errors import SpecError, StatesError
from anisoscope.kernels.gram import center, for_products, working_dtype
from anisoscope.kernels.leading import SPARE_AXES, leading_axes
from anisoscope.kernels.queues import rejoin
from anisoscope.kernels.seminmf import BASIS_WIDTH
from anisoscope.tangent.clouds import center_clouds, pad_clouds
from anisoscope.tangent.cones import Cones, start_cones
from anisoscope.tangent.ranks import choose_rank
from anisoscope.validation import check_setting

# The paper fits on the first part of a run's checkpoints, once and for good.
FROZEN_SHARE = 0.3
NEIGHBORS = 48
# Numbers of neighbours' coordinates held at one time.
HELD_ELEMENTS = 1 << 24


@dataclass(frozen=True, kw_only=True, eq=False)
class Proxy:
    """A tangent space, the same for every token."""

    basis: Float[Tensor, "d r"]
    mean: Float[Tensor, " d"]
    """Of the states it was fitted on, in float64; of several checkpoints, each divided by its spread."""
    following: Float[Tensor, "d q"]
    """The next r principal directions outside the basis (N2); fewer where the space ends."""
    further: Float[Tensor, "d p"] | None = None
    """About the 2r after those, where they are known; fewer where the space ends."""
    last: Float[Tensor, "d l"]
    """The last r of them (N3); none where they were not asked for."""
    explained: float
    """Share of the variance of the fit states in the basis; of their squares where they are not centred."""
    method: str
    centred: bool
    notes: tuple[str, ...] = ()
    shares: Float[Tensor, " _"] | None = None
    """The same of each direction of the basis and of the following ones, where it is known; float64, on the CPU."""
    distance: float = math.nan
    """Root mean square distance of the fit states (the last checkpoint's) from their mean; their length, where they are
    not centred."""

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
    """A tangent proxy by any method of `validation.PROXIES`: see `fit_global`, and `fit_local` for `local_pca`."""
    if method != "local_pca":
        return fit_global(states, method=method, rank=rank, centred=centred, concepts=concepts, seed=seed)
    if not isinstance(states, Tensor):
        raise SpecError("local tangent spaces are those of one checkpoint: neighbours of several do not mix")
    return fit_local(states, rank=rank, neighbors=neighbors)


def fit_local(states: Float[Tensor, "n d"], *, rank: int | str = 8, neighbors: int = NEIGHBORS) -> LocalProxy:
    """Keep the fit states; each token's tangent space comes from its `neighbors` nearest of them."""
    values = _spread_of([[states]], True, None).values[0] if isinstance(rank, str) else states[0]
    wanted, notes = choose_rank(rank, values, states)
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

    Places of one width are fitted side by side.
    """
    for method in methods:
        check_setting("proxy", method)
        if method == "local_pca":
            raise SpecError("local_pca has a space for each token, and one for all was asked for: pca, svd or seminmf")
        if (method == "pca" and centred is False) or (method == "svd" and centred):
            raise SpecError("pca is centred and svd is not: ask for the other of the two")
    if any(not several or any(one.ndim != 2 or len(one) < 2 for one in several) for several in places):
        raise SpecError("a proxy needs matrices of at least two states each")
    found: list[dict[str, Proxy]] = [{} for _ in places]
    most = None if last or any(isinstance(rank, str) for rank in ranks) else max(int(rank) for rank in ranks)
    for here in alike([several[0][0] for several in places]):
        some, device = [places[place] for place in here], places[here[0]][0].device
        around = {method: method != "svd" if centred is None else centred for method in methods}
        plans = {
            one: _plan(some, [ranks[place] for place in here], one, most) for one in dict.fromkeys(around.values())
        }
        cones = plans[around["seminmf"]].start_cones(concepts, seed) if "seminmf" in methods else []
        for method in methods:
            plan = plans[around[method]]
            if method == "seminmf":
                rejoin(device)
                fitted = {place: basis for one in cones for place, basis in zip(one.places, one.bases(), strict=True)}
                bases = [fitted[place] for place in range(len(here))]
                others = _others(plan.spread, bases, last)
            else:
                bases, others = plan.principal()
            for place, proxy in zip(here, _proxies(method, plan, bases, others, last), strict=True):
                found[place][method] = proxy
    return found


def _proxies(
    method: str, plan: "_Plan", bases: Sequence[Tensor], others: Sequence[Tensor], last: bool
) -> Iterator[Proxy]:
    """From the basis of each place and what lies beyond it."""
    spread = plan.spread
    following = [beside[:, : basis.shape[1]] for basis, beside in zip(bases, others, strict=True)]
    # Of all places at once: a GPU would be asked for each otherwise.
    inside, beyond = (spread.shares(stack_bases([[one] for one in part])) for part in (bases, following))
    explained = inside.sum(1).tolist()
    for number, (basis, beside, (chosen, notes)) in enumerate(zip(bases, others, plan.ranks, strict=True)):
        size = basis.shape[1]
        if size < chosen:
            notes = (*notes, f"the semi-NMF has {size} independent directions; {chosen} were asked for")
        yield Proxy(
            basis=basis,
            mean=spread.mean[number],
            following=following[number],
            further=beside[:, size : 3 * size],
            last=beside[:, max(beside.shape[1] - size, 0) :] if last else beside[:, :0],
            explained=explained[number],
            shares=torch.cat([inside[number, :size], beyond[number, : following[number].shape[1]]]),
            distance=spread.distances[number],
            method=method,
            centred=spread.centred,
            notes=notes,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Spread:
    """States of several places of one width, each with squares that add up to one."""

    centred: bool
    points: Float[Tensor, "s n d"]
    """Zeros after the last of a place."""
    mean: Float[Tensor, "s d"]
    distances: list[float]
    covariance: Float[Tensor, "s d d"]
    values: Float[Tensor, "s k"]
    """Descending, float64."""
    axes: Float[Tensor, "s d k"]
    """Eigenvectors: all, or the leading ones."""

    def shares(self, bases: Float[Tensor, "s 1 d q"]) -> Float[Tensor, "s q"]:
        """Of the variance along each direction; float64, on the CPU."""
        axes = bases[:, 0]
        held = ((self.covariance @ axes) * axes).double().sum(1)
        return (held / self.covariance.diagonal(dim1=1, dim2=2).double().sum(1, keepdim=True)).cpu()


def _spread_of(places: Sequence[Sequence[Tensor]], centred: bool, most: int | None) -> _Spread:
    """With twice the axes of the rank that is wanted at `most`, and about those that a semi-NMF starts from."""
    clouds = center_clouds(*pad_clouds([one for several in places for one in several]), centred=centred)
    rows = torch.tensor([len(one) for several in places for one in several], device=clouds.size.device)
    distances = (clouds.size / rows.sqrt()).tolist()
    if not all(distances):
        raise StatesError("a proxy needs states that vary, and these are all equal")
    points, mean = clouds.points, clouds.mean
    if len(rows) > len(places):
        # The second moment of a place is the mean over its checkpoints, each of trace one.
        sizes = [len(several) for several in places]
        parts = zip(points.split(sizes), mean.split(sizes), (clouds.size / rows.sqrt()).split(sizes), strict=True)
        pooled = [
            (some.flatten(0, 1) / math.sqrt(len(some)), (means / (apart[:, None] if len(some) > 1 else 1)).mean(0))
            for some, means, apart in parts
        ]
        (points, _), mean = pad_clouds([some for some, _ in pooled]), torch.stack([one for _, one in pooled])
        distances = [distances[last - 1] for last in itertools.accumulate(sizes)]
    covariance = points.mT @ points
    dim = points.shape[2]
    count, spare = (dim, 0) if most is None else (2 * most, (BASIS_WIDTH - 2) * most)
    values, axes = leading_axes(covariance, count, spare=spare)
    return _Spread(
        centred=centred,
        points=points,
        mean=mean,
        distances=distances,
        covariance=covariance,
        values=values,
        axes=axes,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Plan:
    """States of several places, and how many directions each is to have."""

    spread: _Spread
    ranks: list[tuple[int, tuple[str, ...]]]
    """With notes."""

    def principal(self) -> tuple[list[Float[Tensor, "d r"]], list[Float[Tensor, "d _"]]]:
        """So many leading axes of each place, and those that come after them."""
        every = list(zip(self.spread.axes, self.ranks, strict=True))
        return [axes[:, :rank] for axes, (rank, _) in every], [axes[:, rank:] for axes, (rank, _) in every]

    def start_cones(self, concepts: int | None, seed: int) -> list[Cones]:
        """Semi-NMFs of all of them."""
        ranks = [rank for rank, _ in self.ranks]
        return start_cones(self.spread.points, self.spread.axes, ranks, concepts=concepts, seed=seed)


def _plan(places: Sequence[Sequence[Tensor]], ranks: Sequence[int | str], centred: bool, most: int | None) -> _Plan:
    spread = _spread_of(places, centred, most)
    every = zip(ranks, spread.values, places, strict=True)
    return _Plan(spread=spread, ranks=[choose_rank(rank, values, several[-1]) for rank, values, several in every])


def stack_bases(bases: Sequence[Sequence[Float[Tensor, "d _"]]]) -> Float[Tensor, "s k d r"]:
    """Those of several places; zeros where one has fewer directions than another, or a place fewer bases."""
    every = [one for mine in bases for one in mine]
    if len({len(mine) for mine in bases}) == 1 and len({one.shape for one in every}) == 1:
        return torch.stack(every).unflatten(0, (len(bases), -1))
    most, rank = max(len(mine) for mine in bases), max(one.shape[1] for one in every)
    stacked = every[0].new_zeros(len(bases), most, len(every[0]), rank)
    for at, mine in enumerate(bases):
        for place, one in enumerate(mine):
            stacked[at, place, :, : one.shape[1]] = one
    return stacked


def bases_of(proxies: Sequence[Sequence[Proxy]]) -> Float[Tensor, "s k d r"]:
    """The bases of several proxies of several places."""
    return stack_bases([[one.basis for one in mine] for mine in proxies])


def alike(matrices: Sequence[Tensor]) -> list[list[int]]:
    """The places of those that can be stacked."""
    shapes = [one.shape for one in matrices]
    return [[place for place, other in enumerate(shapes) if other == shape] for shape in dict.fromkeys(shapes)]


def _others(spread: _Spread, bases: Sequence[Tensor], last: bool) -> list[Float[Tensor, "d q"]]:
    """Principal directions outside each basis: all, or as many as it has and about twice as many more."""
    found: dict[int, Tensor] = {}
    for here in alike(bases):
        dim, size = bases[here[0]].shape
        covariance = spread.covariance if len(here) == len(bases) else spread.covariance[here]
        stack = _project_out(covariance, torch.stack([bases[place] for place in here]))
        # Of all, the basis itself comes last, with zeros.
        spare = 0 if last else max(2 * size, SPARE_AXES)
        axes = leading_axes(stack, dim if last else min(size, dim - size), spare=spare)[1]
        found |= dict(zip(here, axes[:, :, : dim - size], strict=True))
    return [found[place] for place in range(len(bases))]


def _project_out(matrices: Float[Tensor, "s d d"], bases: Float[Tensor, "s d r"]) -> Float[Tensor, "s d d"]:
    """(I - QQᵀ) M (I - QQᵀ), symmetric as M is: where it holds little of M, rounding alone would not leave it so."""
    half = matrices - bases @ (bases.mT @ matrices)
    found = half - (half @ bases) @ bases.mT
    return (found + found.mT) / 2
