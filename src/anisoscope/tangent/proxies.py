"""Tangent proxies: the few directions in which states vary most, as an orthonormal basis Q (d, r).

Fit them on other documents than those whose gradients are tested. Centring is the decision that matters: on states as
they are, semi-NMF and the uncentred SVD share one span, and one of its directions is the common mean.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from anisoscope.errors import SpecError, StatesError
from anisoscope.kernels.gram import center, for_products, power_of_two_scale, squared_norms, working_dtype
from anisoscope.kernels.neighbors import drop_duplicates, nearest_neighbors
from anisoscope.kernels.seminmf import semi_nmfs
from anisoscope.metrics.neighbors import twonn

METHODS = ("pca", "svd", "seminmf", "local_pca")
RANK_RULES = ("variance:SHARE", "twonn", "participation_ratio")
# The paper fits on the first part of a run's checkpoints, once and for good.
FROZEN_SHARE = 0.3
# What is left of a direction after the mean is projected out: below this it was the mean, and what is left is noise.
LEFT_WITHOUT_MEAN = 0.1
NEIGHBORS = 48
# Numbers of neighbours' coordinates held at one time.
HELD_ELEMENTS = 1 << 24
# Error at which a semi-NMF for a proxy has settled: the span is then within .985 of that at 1e-6 (mean squared cosine);
# the spans of two seeds agree to .95.
CONE_TOLERANCE = 1e-3
# A direction with less of the largest singular value does not exist.
SMALLEST = 1e-5
# Up to so many coordinates a decomposition is quicker on the CPU than on a GPU.
SMALL_DIM = 512


@dataclass(frozen=True, kw_only=True, eq=False)
class Proxy:
    """A tangent space, the same for every token."""

    basis: Float[Tensor, "d r"]
    mean: Float[Tensor, " d"]
    """Of the states it was fitted on, in float64; of several checkpoints, each divided by its spread."""
    following: Float[Tensor, "d q"]
    """The next r principal directions outside the basis (N2); fewer where the space ends."""
    last: Float[Tensor, "d l"]
    """The last r of them (N3); none where only leading directions are known."""
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
) -> Proxy:
    """One tangent space for all tokens, from the states of one checkpoint or of several.

    `pca`: leading eigenvectors of the covariance. `svd`: leading right singular vectors of the states as they are.
    `seminmf`: the span of the directions of a semi-NMF (by default of centred states) with as many `concepts` as the
    rank; where there are more, the leading singular vectors of what they make of the states.
    Several checkpoints have equal weight: each is centred by its own mean and scaled to a total variance of one.
    """
    return fit_globals(states, methods=(method,), rank=rank, centred=centred, concepts=concepts, seed=seed)[method]


def fit_globals(
    states: Float[Tensor, "n d"] | Sequence[Shaped[Tensor, "_ d"]],
    *,
    methods: Sequence[str],
    rank: int | str = 16,
    centred: bool | None = None,
    concepts: int | None = None,
    seed: int = 0,
) -> dict[str, Proxy]:
    """Proxies of the same states by several methods: their covariance and its decomposition are made once."""
    several = [states] if isinstance(states, Tensor) else list(states)
    return fit_each([several], methods=methods, ranks=[rank], centred=centred, concepts=concepts, seed=seed)[0]


def fit_each(
    places: Sequence[Sequence[Tensor]],
    *,
    methods: Sequence[str],
    ranks: Sequence[int | str],
    centred: bool | None = None,
    concepts: int | None = None,
    seed: int = 0,
) -> list[dict[str, Proxy]]:
    """The same for several places, each with its states: their semi-NMFs are made side by side."""
    found: list[dict[str, Proxy]] = [{} for _ in places]
    known: dict[bool, list[_Spread]] = {}
    for method in methods:
        if method not in ("pca", "svd", "seminmf"):
            raise SpecError(f"a tangent proxy is one of {', '.join(METHODS)}; came {method!r}")
        if (method == "pca" and centred is False) or (method == "svd" and centred):
            raise SpecError("pca is centred and svd is not: ask for the other of the two")
        around = method != "svd" if centred is None else centred
        if around not in known:
            known[around] = [_spread_of(several, around) for several in places]
        spreads = known[around]
        wanted = [
            choose_rank(rank, one.values.double(), several[-1])
            for rank, one, several in zip(ranks, spreads, places, strict=True)
        ]
        if method == "seminmf":
            bases = _cone_bases(spreads, [chosen for chosen, _ in wanted], concepts, seed)
        else:
            bases = [one.vectors[:, :chosen] for one, (chosen, _) in zip(spreads, wanted, strict=True)]
        for place, (spread, basis, (chosen, notes)) in enumerate(zip(spreads, bases, wanted, strict=True)):
            if basis.shape[1] < chosen:
                notes = (*notes, f"the semi-NMF has {basis.shape[1]} independent directions; {chosen} were asked for")
            found[place][method] = _fit(spread, basis, method, around, notes)
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class _Spread:
    points: Float[Tensor, "n d"]
    mean: Float[Tensor, " d"]
    covariance: Float[Tensor, "d d"]
    values: Float[Tensor, " d"]
    """Descending."""
    vectors: Float[Tensor, "d d"]


def _spread_of(states: Sequence[Tensor], centred: bool) -> _Spread:
    points, mean = _pool(states, centred)
    covariance = points.T @ points
    values, vectors = _eigh(covariance)
    return _Spread(points=points, mean=mean, covariance=covariance, values=values.clamp_min(0), vectors=vectors)


def _eigh(matrix: Float[Tensor, "d d"]) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
    """Eigenvalues, descending, and eigenvectors; of small matrices on the CPU, where a GPU takes longer."""
    values, vectors = torch.linalg.eigh(matrix.cpu() if len(matrix) <= SMALL_DIM else matrix)
    return values.flip(0).to(matrix), vectors.flip(1).to(matrix)


def _fit(spread: _Spread, basis: Float[Tensor, "d r"], method: str, centred: bool, notes: tuple[str, ...]) -> Proxy:
    (dim, size), covariance, others = basis.shape, spread.covariance, spread.vectors[:, basis.shape[1] :]
    if method == "seminmf":
        # The basis itself comes last, with zeros.
        others = _eigh(_project_out(covariance, basis))[1][:, : dim - size]
    return Proxy(
        basis=basis,
        mean=spread.mean,
        following=others[:, :size],
        last=others[:, max(others.shape[1] - size, 0) :],
        explained=float(((covariance @ basis) * basis).sum() / spread.values.sum()),
        method=method,
        centred=centred,
        notes=notes,
    )


def without_mean(proxy: Proxy) -> Proxy:
    """The same proxy with the direction of the states' mean projected out of it and of its controls."""
    length = float(proxy.mean.norm())
    if length == 0:
        return proxy
    mean = (proxy.mean / length).to(proxy.basis)[:, None]
    rest = (proxy.basis - mean @ (mean.T @ proxy.basis)).cpu()
    left, lengths, _ = torch.linalg.svd(rest, full_matrices=False)
    basis = left[:, lengths > LEFT_WITHOUT_MEAN].to(proxy.basis)
    away = torch.cat([basis, mean], 1)
    controls = {name: outside(getattr(proxy, name), away)[:, : basis.shape[1]] for name in ("following", "last")}
    dropped = proxy.rank - basis.shape[1]
    note = "the mean direction is projected out" + (f", and with it {dropped} of the directions" if dropped else "")
    return replace(proxy, basis=basis, **controls, explained=math.nan, notes=(*proxy.notes, note))


def choose_rank(
    rule: int | str, values: Float[Tensor, " d"], states: Float[Tensor, "n d"]
) -> tuple[int, tuple[str, ...]]:
    """The number of directions that a rule asks for, at most half of all: normal controls need as many again.

    `variance:0.9`: the fewest that hold this share of the variance; `participation_ratio`: (Σλ)²/Σλ²; `twonn`: the
    intrinsic dimension of the states (the last checkpoint's). Both are rounded.
    """
    dim = len(values)
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
        fits = semi_nmfs(
            [spreads[place].points for place in here],
            concepts or rank,
            seed=seed,
            tolerance=CONE_TOLERANCE,
            axes=[spreads[place].vectors for place in here],
        )
        for place, fit in zip(here, fits, strict=True):
            # The same singular values and right vectors as ZD: (ZᵀZ)^½ D.
            codes, directions = fit.codes.double(), fit.directions.double().cpu()
            squares, turn = torch.linalg.eigh((codes.T @ codes).cpu())
            corner = squares.clamp_min(0).sqrt()[:, None] * turn.T
            _, lengths, axes = torch.linalg.svd(corner @ directions, full_matrices=False)
            kept = lengths[:rank] > SMALLEST * lengths[0]
            found[place] = axes[:rank][kept].T.to(spreads[place].points)
    return [found[place] for place in range(len(spreads))]


def _project_out(matrix: Float[Tensor, "d d"], basis: Float[Tensor, "d r"]) -> Float[Tensor, "d d"]:
    """(I - QQᵀ) M (I - QQᵀ)."""
    half = matrix - basis @ (basis.T @ matrix)
    return half - (half @ basis) @ basis.T


def outside(vectors: Float[Tensor, "d q"], basis: Float[Tensor, "d r"]) -> Float[Tensor, "d p"]:
    """An orthonormal basis of what the vectors span outside another basis, in their order."""
    axes, corner = torch.linalg.qr((vectors - basis @ (basis.T @ vectors)).cpu())
    return axes[:, corner.diagonal().abs() > LEFT_WITHOUT_MEAN].to(vectors)
