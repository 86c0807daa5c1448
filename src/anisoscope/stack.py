"""Stack: clouds of equal shape side by side, every site and batch at once, for a GPU.

The same views as Cloud's, for all clouds and populations together; each value has one entry a cloud. What the fast
arithmetic cannot prove is named in `doubtful`, and the walk measures those clouds one by one.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anisoscope.cloud import typical_limit
from anisoscope.kernels import has_triton
from anisoscope.kernels.gram import LEADING_TOLERANCE, SAFE_RANGE, SUMS_ERROR, Directions, GramSums, Moments
from anisoscope.kernels.neighbors import Neighbors

# Fewer coordinates than this are better served by a Gram of their own; wider rows do not fit a program's registers.
WIDTHS = (256, 8192)
# Lanczos steps before the first look at the bounds, and between looks; each look waits for the GPU.
FIRST_STEPS, MORE_STEPS, MOST_STEPS = 12, 8, 60
# Rows whose products with each other are also computed exactly.
LARGEST = 64
# How exact Σλ² is here: products of float16 rows on tensor cores, which cut off instead of rounding.
SQUARES_ERROR = 5e-5
# Views that a stack has. Neighbours: two at most.
VIEWS = ("moments", "gram_sums", "directions", "neighbors")


@dataclass(frozen=True, kw_only=True)
class Surveyed:
    """Views of every cloud of a stack, by population; all tensors begin with the axis of clouds."""

    views: Mapping[str, Mapping[str, Any]]
    """View -> population -> the view."""
    points: Mapping[str, Float[Tensor, " s"]]
    """How many points each population has."""
    distinct: Mapping[str, Float[Tensor, " s"]]
    """How many are left without repeats, for populations whose neighbours were searched."""
    shares: Float[Tensor, "s n"]
    """Whose the leading axis of the first spectral population is: the share of λ₁ that each point owns."""
    doubtful: Bool[Tensor, " s"]


def fits(points: Tensor) -> bool:
    """Whether a stack can be made of such states."""
    known = points.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return points.is_cuda and known and WIDTHS[0] <= points.shape[-1] <= WIDTHS[1] and has_triton()


def survey(
    points: Float[Tensor, "s n d"],
    members: Mapping[str, Bool[Tensor, "s n"]],
    spectral: tuple[str, ...],
    dimensional: tuple[str, ...],
    typical_k: float,
    clock: Callable[[str], AbstractContextManager[None]],
) -> Surveyed:
    """Measure all clouds of a stack: one or two `spectral` populations, any `dimensional` ones.

    `members` says who belongs to the populations that depend on the tokens alone, `all` and `content` among them;
    `clock` times the parts.
    """
    from anisoscope.kernels import fused

    (s, n, d), w, device = points.shape, len(spectral), points.device
    everyone = torch.arange(s, device=device)
    squares, hashes = fused.describe_rows(points)
    norms = squares.double().sqrt()
    members = dict(members)
    if "typical" in (*spectral, *dimensional):
        members["typical"] = members["content"] & (norms <= typical_limit(norms, typical_k)[:, None])
    weights = torch.stack([members[name] for name in spectral], 1).float().contiguous()
    counts = weights.sum(-1, dtype=torch.float64)
    centre = _rough_centre(points, weights.amin(1))

    inverse = (weights / norms[:, None]).float()
    # Four sums are made at once; one population leaves two of them empty.
    four = torch.zeros(s, 4, n, device=device)
    four[:, :w], four[:, 2 : 2 + w] = weights, inverse
    sums = fused.sum_columns(points, centre, four)
    offsets, unit_sums = sums[:, :w] / counts[..., None], sums[:, 2 : 2 + w]
    unit_sums = unit_sums + centre.double()[:, None] * inverse.sum(-1, dtype=torch.float64)[..., None]
    shift = counts * offsets.square().sum(-1)

    # The search keeps the tensor cores busy, the leading axes the memory: they run side by side.
    here, beside = torch.cuda.current_stream(device), _second_stream(device)
    with clock("neighbours"):
        halves = fused.halve_rows(points, centre)
        beside.wait_stream(here)
        visible = torch.zeros(s, n, dtype=torch.int32, device=device)
        distinct = {}
        for place, name in enumerate(dimensional):
            kept = members[name] & ~_repeats(hashes, members[name])
            visible |= kept.int() << place
            distinct[name] = kept.sum(-1)
        keys, products = fused.multiply_tiles(halves, visible, len(dimensional), weights)
        found = fused.refine_rows(points, halves, visible, keys)
    totals = (weights * halves.squares[:, None]).sum(-1, dtype=torch.float64) - shift
    with torch.cuda.stream(beside), clock("spectrum"):
        still = torch.zeros_like(counts, dtype=torch.float32)
        along = fused.apply_covariance(points, everyone, centre, offsets.float(), still, weights)[1]
        correction = shift.square() - 2 * counts * along.double().square().sum(-1)
        correction += _largest_pairs(points, centre, halves, weights)
        leading, axes, converged = _leading(
            points, centre, offsets, weights, lambda: (beside.wait_stream(here), totals, products + correction)[1:]
        )
        turned = (axes * offsets).sum(-1).float()
        along = fused.apply_covariance(points, everyone, centre, axes.float().contiguous(), turned, weights)[1]
        shares = along[:, 0].double().square()
        shares = shares / shares.sum(-1, keepdim=True)
    here.wait_stream(beside)
    products = products + correction
    low, high = norms.amin(1), norms.amax(1)
    wrong = ~found.isnan() & ((found < 1e-30) | found.isinf())
    doubtful = ~converged.all(1) | ~((low >= SAFE_RANGE[0]) & (high <= SAFE_RANGE[1])) | (2 * shift > totals).any(1)
    doubtful |= wrong.flatten(1).any(1)
    distances = found.double().sqrt()
    neighbors = {name: Neighbors(distances=distances[:, place]) for place, name in enumerate(dimensional)}
    unit = 1 / (counts - 1).clamp_min(1)
    views: dict[str, dict[str, Any]] = {"neighbors": neighbors, "moments": {}, "gram_sums": {}, "directions": {}}
    for place, name in enumerate(spectral):
        total, scale = totals[:, place] * unit[:, place], unit[:, place]
        part = torch.minimum(leading[:, place] * scale, total)
        views["moments"][name] = Moments(total=total, leading=part, axis=axes[:, place])
        views["gram_sums"][name] = GramSums(total=total, squares=products[:, place] * scale.square(), dim=d)
        views["directions"][name] = Directions(total=unit_sums[:, place], count=counts[:, place])
    return Surveyed(
        views=views,
        points={name: members[name].sum(-1) for name in dict.fromkeys((*spectral, *dimensional))},
        distinct=distinct,
        shares=shares,
        doubtful=doubtful,
    )


def _largest_pairs(points: Tensor, centre: Tensor, halves: Any, weights: Tensor) -> Tensor:
    """What rounding did to Σ (x·y)² over pairs of the largest rows: where a few rows own it, errors do not average."""
    rows = halves.squares.topk(min(LARGEST, points.shape[1])).indices
    wide = rows[..., None].expand(-1, -1, points.shape[2])
    exact = points.gather(1, wide).double() - centre.double()[:, None]
    rounded = halves.rows.gather(1, rows[..., None].expand(-1, -1, halves.rows.shape[2])).double()
    lengths = halves.fits.gather(1, rows).double()
    difference = (exact @ exact.mT).square()
    difference -= (rounded @ rounded.mT).square() * lengths[:, None] * lengths[..., None]
    own = weights.gather(2, rows[:, None].expand(-1, weights.shape[1], -1)).double()
    return torch.einsum("swi,sij,swj->sw", own, difference, own)


def _rough_centre(points: Float[Tensor, "s n d"], weights: Float[Tensor, "s n"]) -> Float[Tensor, "s d"]:
    """A mean of some of the points: what is left of the true mean is accounted for exactly."""
    some = min(256, points.shape[1])
    share = weights[:, :some] / weights[:, :some].sum(-1, keepdim=True).clamp_min(1)
    return (share[..., None] * points[:, :some].float()).sum(1)


def _repeats(hashes: Tensor, members: Tensor) -> Tensor:
    """Which members repeat an earlier member."""
    n = hashes.shape[1]
    # Whoever is no member gets a number of its own.
    lonely = torch.arange(n, device=hashes.device).expand_as(hashes)
    ordered, order = torch.where(members, hashes | 1, lonely * 2).sort(dim=-1, stable=True)
    again = torch.zeros_like(members)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(members).scatter_(1, order, again)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _leading(
    points: Tensor, centre: Tensor, offsets: Tensor, weights: Tensor, sums: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Largest eigenvalues (s w), axes (s w d) and whether they are proven: gram.leading_eigenpair for many at once."""
    from anisoscope.kernels import fused

    (s, _, d), w = points.shape, weights.shape[1]
    steps = min(MOST_STEPS, d)
    start = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = torch.zeros(s, w, steps + 1, d, dtype=torch.float64, device=points.device)
    basis[:, :, 0] = (start / start.norm()).to(points.device)
    diagonal, beside = torch.zeros(2, s, w, steps, dtype=torch.float64, device=points.device)
    leading, axes = torch.zeros_like(diagonal[..., 0]), torch.zeros_like(offsets)
    proven = torch.zeros(s, w, dtype=torch.bool, device=points.device)
    # Clouds still worked on: the others' share of a pass is not paid for.
    active = torch.arange(s, device=points.device)
    done = 0
    while done < steps and len(active):
        goal = min(steps, FIRST_STEPS if not done else done + MORE_STEPS)
        offset, known = offsets[active], basis[active]
        for step in range(done, goal):
            vector = known[:, :, step]
            turned = (offset * vector).sum(-1)
            images, along = fused.apply_covariance(
                points, active, centre, vector.float().contiguous(), turned.float(), weights
            )
            image = images - along.sum(-1, dtype=torch.float64)[..., None] * offset
            diagonal[active, :, step] = (image * vector).sum(-1)
            so_far = known[:, :, : step + 1]
            for _ in range(2):
                image = image - (so_far.mT @ (so_far @ image[..., None]))[..., 0]
            size = image.norm(dim=-1)
            beside[active, :, step] = size
            known[:, :, step + 1] = image / size.clamp_min(1e-300)[..., None]
        basis[active] = known
        done = goal
        totals, squares = sums()
        theta, coordinates, error = _bound(
            diagonal[active, :, :done], beside[active, :, :done], totals[active], squares[active]
        )
        leading[active] = theta
        axes[active] = (coordinates[..., None, :] @ known[:, :, :done])[..., 0, :]
        proven[active] = error <= LEADING_TOLERANCE * theta
        active = torch.nonzero(~proven.all(1)).flatten()
    return leading, axes / axes.norm(dim=-1, keepdim=True).clamp_min(1e-300), proven


def _bound(diagonal: Tensor, beside: Tensor, totals: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest Ritz values, their coordinates, and how far below the eigenvalue they may be (see leading_eigenpair)."""
    off = beside[..., :-1]
    tridiagonal = torch.diag_embed(diagonal) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    # States beyond float32 are doubtful already; no decomposition takes them.
    tridiagonal = tridiagonal.nan_to_num(0.0, 0.0, 0.0)
    ritz, vectors = torch.linalg.eigh(tridiagonal)
    theta, coupling = ritz[..., -1], beside[..., -1]
    error = coupling * vectors[..., -1, -1].abs()
    outside = squares * (1 + SQUARES_ERROR) - tridiagonal.square().sum((-1, -2)) - 2 * coupling.square()
    rest = torch.minimum(totals * (1 + SUMS_ERROR) - diagonal.sum(-1), outside.clamp_min(0).sqrt())
    tridiagonal[..., -1, -1] += torch.where(rest < theta, coupling.square() / (theta - rest), 0.0)
    upper = torch.linalg.eigvalsh(tridiagonal.nan_to_num(0.0, 0.0, 0.0))[..., -1]
    return theta, vectors[..., -1], torch.where(rest < theta, torch.minimum(error, upper - theta), error)


def most_clouds(points: int, states: Tensor) -> int:
    """How many clouds to stack: what they need besides the states is kept to a small part of the device's memory."""
    memory = torch.cuda.get_device_properties(states.device).total_memory
    return max(1, memory // (64 * points * states.shape[-1]))


def to_host(tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """All tensors in float64 in main memory, by one transfer: each would wait for the GPU."""
    flat = torch.cat([tensor.double().flatten() for tensor in tensors.values()]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors.values()])
    return {key: part.view(tensors[key].shape) for key, part in zip(tensors, parts, strict=True)}
