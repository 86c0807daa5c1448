"""How curved the cloud of states is, how much of that a sample shows, and how sampling by frequency hides it.

Around a point the cloud is read as a surface x(u) = x₀ + Tu + ½ N II(u, u): T spans r tangent directions, N the normal
ones, II holds one symmetric matrix H per normal direction. A fit of II to noisy points reads noise as curvature. So
two fits to disjoint halves of the neighbours are multiplied: ⟨II₁, II₂⟩ has mean ‖II‖² whatever the noise, as long as
the halves err independently, and is negative as often as positive where there is nothing. docs/tangent.md derives it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import SpecError, StatesError
from anisoscope.kernels.neighbors import drop_duplicates, nearest_neighbors
from anisoscope.metrics.neighbors import solve_gride

# Neighbours per coefficient of a quadratic fit: no fit with fewer than LEAST; by default each half has LEAST.
LEAST_PER_COEFFICIENT = 3
# Points from which the neighbours are chosen, as a multiple of them.
CANDIDATES = 2
# Normal directions that are kept: all others are mostly noise.
NORMALS = 20
# Relative to features of variance near 1: it lowers II by a few parts in a thousand at most.
RIDGE = 1e-3
# A cloud that reads this many dimensions more than the fit has is no surface at that scale.
SPARE_DIMENSIONS = 2
# Fewer anchors, or types of anchors, say nothing about how anchors differ.
LEAST_ANCHORS, LEAST_TYPES = 16, 8
# A plain fit whose square holds more noise than this is worth a warning.
NOISE_SHARE = 1 / 3
# Elements of the neighbourhoods that are fitted at one time.
BLOCK_ELEMENTS = 1 << 23


@dataclass(frozen=True, kw_only=True)
class CurvatureSettings:
    """What a reading of curvature depends on."""

    rank: int = 4
    """Tangent directions: `curvature_rank` of a Spec."""
    neighbors: int | None = None
    """None: three per coefficient in each half, 90 for rank 4."""
    anchors: int = 256
    level: float = 0.95
    resamples: int = 1000
    shuffles: int = 199
    flips: int = 159
    """Draws of random signs: how far neighbourhoods overlap, and what V would be by chance."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if min(self.rank, self.anchors, self.resamples, self.shuffles) < 1 or not 0 < self.level < 1:
            raise SpecError(
                "curvature wants rank, anchors, resamples and shuffles of at least 1 and a level inside (0, 1); "
                f"came {self.rank}, {self.anchors}, {self.resamples}, {self.shuffles} and {self.level:g}"
            )
        if self.flips < 2 / (1 - self.level) - 1 - 1e-6:
            raise SpecError(f"at level {self.level} no p of {self.flips} flips is small enough; use more flips")

    @property
    def coefficients(self) -> int:
        """Of a quadratic function of r variables: 1, u and the products."""
        return (self.rank + 1) * (self.rank + 2) // 2

    @property
    def k(self) -> int:
        """Neighbours of an anchor."""
        return self.neighbors if self.neighbors is not None else 2 * LEAST_PER_COEFFICIENT * self.coefficients


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """A number with its interval."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def above_zero(self) -> bool:
        """Whether the whole interval is."""
        return self.low > 0


@dataclass(frozen=True, kw_only=True)
class LocalFits:
    """What the fits around the anchors found; one entry per anchor."""

    rank: int
    products: np.ndarray
    """⟨II₁, II₂⟩, negative where noise wills it."""
    plain: np.ndarray
    """‖II‖² of one fit to all neighbours, noise included."""
    traces: np.ndarray
    """⟨tr II₁, tr II₂⟩: the squared shift of the normal mean is t⁴/4 times this."""
    radii: np.ndarray
    """t², the tangent variance per direction."""
    types: np.ndarray
    frequencies: np.ndarray
    shuffled: np.ndarray = field(repr=False)
    """(anchors, shuffles): the products when tangent coordinates are dealt to the wrong neighbours."""
    flipped: np.ndarray = field(repr=False)
    """(anchors, flips): the products when each point's displacement has one random sign, at all anchors."""
    dimension: float = math.nan
    """Of the cloud at the scale of the neighbourhoods."""


@dataclass(frozen=True, kw_only=True)
class Curvature:
    """Curvature of a cloud; NaN with a note where the data cannot tell."""

    second_fundamental_form: Bounded = Bounded()
    """‖II‖_F, root mean square over anchors."""
    curvature_visibility: Bounded = Bounded()
    """V = Σ t⁴ ⟨II₁, II₂⟩ / (2 r Σ t²): normal variance from curvature, as a share of tangent variance."""
    mean_shift: float = math.nan
    """Root of Σ (t⁴/4) ⟨tr II₁, tr II₂⟩ over Σ r t²: how far curvature moves the mean, in tangent spreads."""
    p: float = math.nan
    """Of a V as large when the displacement of each point gets a random sign, the same at all anchors."""
    shuffled_p: float = math.nan
    """Of a mean product as large with shuffled tangent coordinates."""
    plain_form: float = math.nan
    """What fits without cross-fitting would call ‖II‖_F."""
    radius: float = math.nan
    """Root mean square of t."""
    dimension: float = math.nan
    level_above: float = 0.025
    """(1 - level)/2: what p must not exceed."""
    points: int = 0
    dropped: int = 0
    anchors: int = 0
    note: str | None = None

    @property
    def curved(self) -> bool:
        """Whether the interval of V lies above 0 and random signs agree: the bootstrap does not know that V is skewed.

        On a flat cloud this happens with probability (1 - level)/2 at most.
        """
        return self.curvature_visibility.above_zero and self.p <= self.level_above


def measure_curvature(
    points: Float[Tensor, "n d"],
    types: Int[Tensor, " m"] | None = None,
    settings: CurvatureSettings = CurvatureSettings(),  # noqa: B008
) -> Curvature:
    """Curvature of a cloud; intervals from a bootstrap over the types of the anchors (each its own without `types`)."""
    return read_curvature(points, types, None, settings)[0]


def visibility(fits: LocalFits, weights: np.ndarray | None = None) -> np.ndarray:
    """V = Σ w t⁴ q / (2 r Σ w t²) over anchors; weights (..., anchors), all 1 if not given."""
    given = np.ones(len(fits.radii)) if weights is None else weights
    return np.asarray((given @ (fits.radii**2 * fits.products)) / (2 * fits.rank * (given @ fits.radii)))


def fit_locally(
    points: Float[Tensor, "n d"],
    types: Int[Tensor, " n"],
    frequencies: Float[Tensor, " n"],
    settings: CurvatureSettings,
) -> LocalFits:
    """Fit quadratics around random anchors. Points must be distinct, and more than the neighbours wanted."""
    generator = torch.Generator().manual_seed(settings.seed)
    n, k = len(points), settings.k
    chosen = torch.randperm(n, generator=generator)[: settings.anchors].to(points.device)
    nearest = nearest_neighbors(points, min(CANDIDATES * k, n - 1))
    assert nearest.indices is not None
    candidates, logs = nearest.indices[chosen], nearest.distances[chosen].log()
    signs = torch.randint(0, 2, (n, settings.flips), generator=generator, dtype=torch.float64).to(points.device) * 2 - 1
    step = max(1, BLOCK_ELEMENTS // (candidates.shape[1] * points.shape[1]))
    parts = [
        _fit_block(points, chosen[start : start + step], candidates[start : start + step], signs, settings, generator)
        for start in range(0, len(chosen), step)
    ]
    found = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
    # GRIDE's μ = r_k / r_{k/2} is TwoNN's where the two nearest are looked for among 1 in k/2 of the points.
    dimension = solve_gride((logs[:, k - 1] - logs[:, k // 2 - 1]).sort().values, k // 2, k)
    return LocalFits(
        rank=settings.rank,
        types=types[chosen].cpu().numpy(),
        frequencies=frequencies[chosen].double().cpu().numpy(),
        dimension=float(dimension),
        **found,
    )


def _fit_block(
    points: Tensor,
    anchors: Tensor,
    candidates: Tensor,
    signs: Tensor,
    settings: CurvatureSettings,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """One block of anchors: tangent by local PCA, neighbours by tangent distance, two halves, two fits."""
    k, rank = settings.k, settings.rank
    around = points[candidates].double() - points[anchors, None].double()
    near = around[:, :k] - around[:, :k].mean(1, keepdim=True)
    tangent = leading_axes(near, rank)
    inside = around @ tangent
    # Distances in space prefer points displaced as the anchor is, the more so the farther off they are: that reads as
    # curvature, in both halves alike. Distances along the tangent do not see displacements.
    kept = inside.square().sum(-1).topk(k, largest=False).indices
    u = inside.gather(1, kept[..., None].expand(-1, -1, rank))
    outside = around.gather(1, kept[..., None].expand(-1, -1, around.shape[-1])) - u @ tangent.mT
    u, outside = u - u.mean(1, keepdim=True), outside - outside.mean(1, keepdim=True)
    radii = u.square().sum((1, 2)) / (k - 1) / rank
    normal = outside @ leading_axes(outside, NORMALS)
    features, weights = _features(u / radii.sqrt()[:, None, None])
    order = torch.rand(len(u), k, generator=generator).argsort(1).to(u.device)
    halves = [order[:, : k // 2], order[:, k // 2 : 2 * (k // 2)]]
    solvers = [_solver(features.gather(1, half[..., None].expand(-1, -1, features.shape[-1])), rank) for half in halves]
    mine = [normal.gather(1, half[..., None].expand(-1, -1, normal.shape[-1])) for half in halves]
    fits = [solver @ values for solver, values in zip(solvers, mine, strict=True)]
    scale, chosen = radii.square(), candidates.gather(1, kept)

    def multiply(displaced: Sequence[Tensor]) -> Tensor:
        one, other = (solver @ values for solver, values in zip(solvers, displaced, strict=True))
        return (one * other * weights[:, None]).sum((-1, -2)) / scale

    def shuffled() -> Tensor:
        dealt = [torch.rand(half.shape, generator=generator).argsort(1).to(u.device)[..., None] for half in halves]
        return multiply([values.gather(1, deal.expand_as(values)) for values, deal in zip(mine, dealt, strict=True)])

    def flipped(number: int) -> Tensor:
        turns = [signs[chosen.gather(1, half), number][..., None] for half in halves]
        return multiply([values * turn for values, turn in zip(mine, turns, strict=True)])

    traces = [fit[:, :rank].sum(1) for fit in fits]
    return {
        "products": multiply(mine),
        "plain": ((_solver(features, rank) @ normal).square() * weights[:, None]).sum((-1, -2)) / scale,
        "traces": (traces[0] * traces[1]).sum(-1) / scale,
        "radii": radii,
        "shuffled": torch.stack([shuffled() for _ in range(settings.shuffles)], 1),
        "flipped": torch.stack([flipped(number) for number in range(settings.flips)], 1),
    }


def leading_axes(points: Float[Tensor, "a k d"], count: int) -> Float[Tensor, "a d m"]:
    """Orthonormal axes of most variance around 0; zero where nothing is left. By the smaller of the two Grams."""
    if points.shape[2] <= points.shape[1]:
        return torch.linalg.eigh(points.mT @ points).eigenvectors[..., -count:]
    sizes, scores = torch.linalg.eigh(points @ points.mT)
    sizes, scores = sizes[:, None, -count:], scores[..., -count:]
    some = sizes > 1e-12 * sizes[..., -1:]
    return points.mT @ torch.where(some, scores / torch.where(some, sizes, 1.0).sqrt(), 0.0)


def _features(u: Float[Tensor, "a k r"]) -> tuple[Float[Tensor, "a k p"], Float[Tensor, " q"]]:
    """1, u, u²/2 and u_i u_j: their coefficients are H_ii and H_ij, which count once and twice in ‖II‖²."""
    rank = u.shape[-1]
    one, other = torch.triu_indices(rank, rank, 1, device=u.device)
    weights = torch.ones(rank + len(one), dtype=u.dtype, device=u.device)
    weights[rank:] = 2
    return torch.cat([torch.ones_like(u[..., :1]), u, u.square() / 2, u[..., one] * u[..., other]], -1), weights


def _solver(features: Float[Tensor, "a h p"], rank: int) -> Float[Tensor, "a q h"]:
    """The rows of (FᵀF + ρhI)⁻¹Fᵀ that give II: coefficients are linear in what is fitted."""
    gram = features.mT @ features
    damping = RIDGE * features.shape[1] * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve(gram + damping, features.mT)[:, 1 + rank :]


def read_curvature(
    points: Float[Tensor, "n d"],
    types: Int[Tensor, " m"] | None,
    frequencies: Float[Tensor, " m"] | None,
    settings: CurvatureSettings,
) -> tuple[Curvature, LocalFits | None]:
    """A reading and the fits behind it; no fits, and a note, where the data forbid them."""
    if not bool(points.isfinite().all()):
        raise StatesError("curvature needs finite points, and some are NaN or infinite; drop them first")
    if types is not None and len(types) != len(points):
        raise SpecError(f"curvature wants one type per point; came {len(types)} types for {len(points)} points")
    unique = drop_duplicates(points)
    empty = Curvature(points=len(unique.index), dropped=unique.dropped)
    reason = _too_little(empty.points, points.shape[1], settings)
    if reason:
        return replace(empty, note=f"cannot tell: {reason}"), None
    labels = (torch.arange(len(points)) if types is None else types).to(points.device)
    often = (torch.ones(len(points)) if frequencies is None else frequencies).to(points.device)
    fits = fit_locally(points[unique.index], labels[unique.index], often[unique.index], settings)
    found = replace(empty, anchors=len(fits.radii), dimension=fits.dimension)
    limit, kinds = settings.rank + SPARE_DIMENSIONS, len(np.unique(fits.types))
    if not fits.dimension <= limit:
        reason = f"the points read {fits.dimension:.1f} dimensions at this scale, more than {limit}"
    elif kinds < LEAST_TYPES:
        reason = f"anchors of {kinds} types, and intervals need {LEAST_TYPES}"
    if reason:
        return replace(found, note=f"cannot tell: {reason}"), None
    return _summarize(found, fits, settings), fits


def _too_little(n: int, dim: int, settings: CurvatureSettings) -> str | None:
    least, wanted = LEAST_PER_COEFFICIENT * settings.coefficients, max(settings.k + 1, LEAST_ANCHORS)
    if settings.k < least:
        return f"{settings.k} neighbours, and rank {settings.rank} needs {least}"
    if dim <= settings.rank:
        return f"no direction is normal to {settings.rank} of {dim} dimensions"
    if n < wanted or settings.anchors < LEAST_ANCHORS:
        return f"{n} distinct points and {settings.anchors} anchors; it needs {wanted} and {LEAST_ANCHORS}"
    return None


def _summarize(found: Curvature, fits: LocalFits, settings: CurvatureSettings) -> Curvature:
    dealt = resample_types(fits, np.unique(fits.types), settings)
    mean, plain = float(fits.products.mean()), float(fits.plain.mean())
    squares = bound(mean, dealt @ fits.products / dealt.sum(1), overlap(fits, 0), settings)
    # Shuffles know nothing of shared neighbours, so their spread is too small by the same factor.
    dealt_wrong = fits.shuffled.mean(0) * math.sqrt(overlap(fits, 0))
    signed = (fits.radii**2) @ fits.flipped / (2 * fits.rank * fits.radii.sum())
    note = None
    if plain > 0 and 1 - mean / plain > NOISE_SHARE:
        note = f"noise reads as curvature here: fits that are not crossed would give {math.sqrt(plain):.3g}"
    return replace(
        found,
        second_fundamental_form=Bounded(value=_root(squares.value), low=_root(squares.low), high=_root(squares.high)),
        curvature_visibility=bound(float(visibility(fits)), visibility(fits, dealt), overlap(fits, 2), settings),
        mean_shift=_root((fits.radii**2 * fits.traces).sum() / (4 * fits.rank * fits.radii.sum())),
        p=float((1 + (signed >= visibility(fits)).sum()) / (1 + signed.size)),
        shuffled_p=float((1 + (dealt_wrong >= mean).sum()) / (1 + dealt_wrong.size)),
        level_above=(1 - settings.level) / 2,
        plain_form=_root(plain),
        radius=_root(fits.radii.mean()),
        note=note,
    )


def resample_types(fits: LocalFits, types: np.ndarray, settings: CurvatureSettings) -> np.ndarray:
    """How often each anchor counts when types are drawn with repetition, (resamples, anchors)."""
    random = np.random.default_rng(settings.seed)
    counts = random.multinomial(len(types), np.full(len(types), 1 / len(types)), size=settings.resamples)
    return counts[:, np.searchsorted(types, fits.types)].astype(float)


def overlap(fits: LocalFits, power: int) -> float:
    """How much larger the variance of Σ t^(2·power) q is than a bootstrap of types takes it to be; 1 at least.

    Anchors near each other share neighbours and so their noise. Displacements with one random sign per point, the
    same at all anchors, keep that dependence and nothing else. Student's t with as many degrees of freedom as there
    are independent types stands for a spread that is itself estimated.
    """
    from scipy.special import ndtri, stdtrit

    parts = fits.flipped * fits.radii[:, None] ** power
    _, which = np.unique(fits.types, return_inverse=True)
    by_type = np.zeros((which.max() + 1, parts.shape[1]))
    np.add.at(by_type, which, parts)
    bootstrap = len(by_type) * by_type.var(0).mean()
    found = max(1.0, by_type.sum(0).var() / bootstrap) if bootstrap > 0 else 1.0
    freedom = max(len(by_type) / found - 1, 1.0)
    return found * (stdtrit(freedom, 0.975) / ndtri(0.975)) ** 2


def bound(value: float, draws: np.ndarray, excess: float, settings: CurvatureSettings) -> Bounded:
    """The quantiles of the resamples, spread about the value by the root of an overlap."""
    spread = value + math.sqrt(excess) * (draws - value)
    low, high = np.nanquantile(spread, ((1 - settings.level) / 2, (1 + settings.level) / 2))
    return Bounded(value=float(value), low=float(low), high=float(high))


def _root(square: float) -> float:
    return math.sqrt(max(square, 0.0))
