"""Concepts: the directions of a semi-non-negative factorisation, and what they are made of.

A ≈ ZD with Z ≥ 0 leaves D open: any wider cone fits as well, so two seeds give two sets of directions. `sharpen` takes
the tightest one, in which few and small codes suffice. What then comes back from other seeds (`stability`) and from
other states (`replication`) is a concept; what does not is an artefact. What is known of them then, and their life in
training, needs no model: `tracks`.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import SpecError
from anisoscope.kernels.seminmf import SemiNMF, semi_nmf
from anisoscope.tracks import Concepts, partner_cosines, replication_over, stability_over

# What a unit of code costs, relative to the root mean square length of the points. Planted directions come back with
# cosines above .998 from .03 to .2; the less it is, the longer it takes.
PENALTY = 0.1
SHARPENING_STEPS, CODE_STEPS, LAST_CODE_STEPS, SPARSE_CODE_STEPS = 100, 10, 300, 500
# Directions that turn less than this in a step, as 1 - cosine, have settled: half a degree in twenty.
SETTLED = 1e-7
LISTED_TOKENS = 10
# Rows of gradients and states that are in float64 at one time.
EXACT_ROWS = 4096


def fit_concepts(states: Float[Tensor, "n d"], rank: int, *, seed: int) -> SemiNMF:
    """A factorisation from one seed, sharpened."""
    return sharpen(states, semi_nmf(states, rank, seed=seed))


def fit_halves(
    states: Float[Tensor, "n d"], rank: int, *, seed: int, groups: Int[Tensor, " n"] | None = None
) -> tuple[Float[Tensor, "r d"], Float[Tensor, "r d"]]:
    """Directions of two random halves that share no states, and no document where `groups` says which is whose."""
    labels = torch.arange(len(states)) if groups is None else groups.cpu()
    kinds, which = torch.unique(labels, return_inverse=True)
    if len(kinds) < 2:
        raise SpecError("two halves need states of at least two groups; came one")
    side = torch.randperm(len(kinds), generator=torch.Generator().manual_seed(seed)) < len(kinds) // 2
    first, second = (states[chosen.to(states.device)] for chosen in (side[which], ~side[which]))
    return (
        fit_concepts(first, rank, seed=2 * seed).directions,
        fit_concepts(second, rank, seed=2 * seed + 1).directions,
    )


def sharpen(states: Float[Tensor, "n d"], fit: SemiNMF, *, penalty: float = PENALTY) -> SemiNMF:
    """The tightest cone in the span of the directions: min ½‖A - ZD‖² + penalty · Σz, Z ≥ 0, rows of D of length one.

    All happens in the coordinates of the span. Codes take accelerated projected gradient steps, directions least
    squares (Engan et al. 1999). The codes that are returned are those without penalty.
    """
    if not penalty > 0:
        raise SpecError(f"sharpening needs a penalty above 0; came {penalty}")
    used = fit.directions.norm(dim=1) > 0
    basis = torch.linalg.qr(fit.directions[used].double().T).Q
    inside, directions = states.double() @ basis, fit.directions[used].double() @ basis
    scale = inside.square().sum(1).mean().sqrt().clamp_min(1e-300)
    inside, codes = (inside / scale).to(fit.codes), (fit.codes[:, used].double() / scale).to(fit.codes)
    converged = False
    for _ in range(SHARPENING_STEPS):
        codes = _step_codes(inside, directions, codes, penalty, CODE_STEPS)
        gram = (codes.T @ codes).double()
        # Directions whose codes have vanished stay as they are.
        damping = 1e-6 * gram.diagonal().mean().clamp_min(1e-300)
        eye = damping * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        turned = torch.linalg.solve(gram + eye, (codes.T @ inside).double() + damping * directions)
        turned = turned / turned.norm(dim=1, keepdim=True)
        converged = bool(((turned * directions).sum(1) > 1 - SETTLED).all())
        directions = turned
        if converged:
            break
    whole, found = torch.zeros_like(fit.directions), torch.zeros_like(fit.codes)
    whole[used] = (directions @ basis.T).to(whole)
    found[:, used] = _step_codes(inside, directions, codes, 0.0, LAST_CODE_STEPS) * scale.to(codes)
    error = torch.linalg.vector_norm(states.to(found) - found @ whole).double()
    relative = (error / torch.linalg.vector_norm(states.double()).clamp_min(1e-300)).reshape(1)
    return SemiNMF(codes=found, directions=whole, errors=torch.cat([fit.errors, relative.cpu()]), converged=converged)


def sparse_codes(
    states: Float[Tensor, "n d"], directions: Float[Tensor, "r d"], *, penalty: float = PENALTY
) -> Float[Tensor, "n r"]:
    """Codes at the price of sharpening: min ½‖a - zD‖² + penalty · Σz, z ≥ 0, each state by itself.

    Around their mean, directions add up to nothing with weights that are all above 0: the same weights could be added
    to any codes. Without a price such codes are arbitrary, and all concepts list the same tokens.
    """
    scale = states.double().square().sum(1).mean().sqrt().clamp_min(1e-300)
    start = torch.zeros(len(states), len(directions), dtype=states.dtype, device=states.device)
    # Of length zero: no direction, no code.
    codes = _step_codes(states / scale.to(states), directions.double(), start, penalty, SPARSE_CODE_STEPS)
    return codes * scale.to(codes)


def _step_codes(points: Tensor, directions: Tensor, codes: Tensor, penalty: float, steps: int) -> Tensor:
    """Accelerated projected gradient steps z ← max(0, zW + b) on ½‖a - zD‖² + penalty · Σz."""
    gram = directions @ directions.T
    size = 1 / torch.linalg.matrix_norm(gram, 2)
    shrink = (torch.eye(len(gram), dtype=gram.dtype, device=gram.device) - size * gram).to(points)
    shift, ahead = points @ (size * directions.T).to(points) - float(size) * penalty, codes
    for number in range(steps):
        previous, codes = codes, torch.addmm(shift, ahead, shrink).clamp_min_(0)
        ahead = torch.lerp(previous, codes, 1 + number / (number + 3))
    return codes


def describe_concepts(
    fit: SemiNMF,
    states: Float[Tensor, "n d"],
    *,
    gradients: Float[Tensor, "m d"] | None = None,
    refits: Sequence[Tensor] = (),
    halves: Sequence[tuple[Tensor, Tensor]] = (),
    types: Int[Tensor, " n"] | None = None,
    listed: int = LISTED_TOKENS,
) -> Concepts:
    """The table of a factorisation of these states; gradients at the same tokens.

    `refits` are directions from other seeds, `halves` pairs of them from `fit_halves`.
    """
    if gradients is not None and len(gradients) != len(states):
        raise SpecError(f"gradients at the same tokens are wanted; came {len(gradients)} for {len(states)} states")
    energy = fit.codes.double().square().sum(0)
    order = energy.argsort(descending=True, stable=True)
    codes, directions = fit.codes[:, order].double(), fit.directions[order].double()
    unknown = np.full(len(order), math.nan)
    centred = states.double() - states.double().mean(0)
    plain = coupled = unknown
    if gradients is not None:
        plain = energy_shares(gradients, directions)
        coupled = energy_shares(centred_product(gradients, states), directions)
    tokens, strengths = top_tokens(codes, listed, types)
    numbers = _numbers(directions)
    return Concepts(
        directions=directions.float().cpu().numpy(),
        tokens=tokens,
        strengths=strengths,
        sparsity=hoyer_sparsity(codes),
        code_share=(energy[order] / energy.sum()).cpu().numpy(),
        variance_share=energy_shares(centred, directions),
        gradient_share=plain,
        coupled_share=coupled,
        stability=stability_over(numbers, [_numbers(other) for other in refits]) if refits else unknown,
        replication=replication_over(numbers, [(_numbers(a), _numbers(b)) for a, b in halves]) if halves else unknown,
    )


def _numbers(directions: Tensor) -> np.ndarray:
    return directions.double().cpu().numpy()


def energy_shares(matrix: Float[Tensor, "n d"], directions: Float[Tensor, "r d"]) -> np.ndarray:
    """‖Md‖² / ‖M‖² of each direction; NaN for a matrix of zeros. Some rows at a time are in float64."""
    axes = directions.double().T
    inside, whole = axes.new_zeros(axes.shape[1]), axes.new_zeros(())
    for rows in matrix.split(EXACT_ROWS):
        exact = rows.double()
        inside, whole = inside + (exact @ axes).square().sum(0), whole + exact.square().sum()
    return (inside / whole).cpu().numpy()


def centred_product(one: Float[Tensor, "n e"], other: Float[Tensor, "n d"]) -> Float[Tensor, "e d"]:
    """Σ (a - ā)(h - h̄)ᵀ in float64, with some rows at a time in it."""
    means = [rows.mean(0, dtype=torch.float64) for rows in (one, other)]
    total = means[0].new_zeros(one.shape[1], other.shape[1])
    for rows in zip(one.split(EXACT_ROWS), other.split(EXACT_ROWS), strict=True):
        first, second = (some.double() - mean for some, mean in zip(rows, means, strict=True))
        total += first.T @ second
    return total


def hoyer_sparsity(codes: Float[Tensor, "n r"]) -> np.ndarray:
    """(√n - ‖z‖₁/‖z‖₂) / (√n - 1) of each column; NaN for a column of zeros (Hoyer 2004)."""
    root = math.sqrt(len(codes))
    return ((root - codes.abs().sum(0) / codes.norm(dim=0)) / (root - 1)).cpu().numpy()


def top_tokens(
    codes: Float[Tensor, "n r"], count: int, types: Int[Tensor, " n"] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The points with the largest codes of each concept, and the codes; of each type the largest only, with `types`."""
    numbers = codes.cpu().numpy()
    labels = np.arange(len(numbers)) if types is None else types.cpu().numpy()
    tokens = np.full((numbers.shape[1], count), -1)
    strengths = np.full(tokens.shape, math.nan)
    for concept, column in enumerate(numbers.T):
        ranked = np.argsort(-column, kind="stable")
        ranked = ranked[column[ranked] > 0]
        _, first = np.unique(labels[ranked], return_index=True)
        chosen = ranked[np.sort(first)[:count]]
        tokens[concept, : len(chosen)], strengths[concept, : len(chosen)] = chosen, column[chosen]
    return tokens, strengths


def permuted_cosines(
    directions: np.ndarray, states: Float[Tensor, "n d"], rank: int, *, seeds: Sequence[int]
) -> np.ndarray:
    """(seeds, r): cosines with the partners in fits to states whose coordinates were shuffled, each by itself.

    Mean and spread of every coordinate stay, and what coordinates say together is gone: what matches then is a common
    mean or a coordinate that is large in all states. One fit per seed.
    """
    found = []
    for seed in seeds:
        shuffled = fit_concepts(shuffle_coordinates(states, seed=seed), rank, seed=seed).directions
        found.append(partner_cosines(directions, _numbers(shuffled)))
    return np.stack(found)


def shuffle_coordinates(states: Float[Tensor, "n d"], *, seed: int) -> Float[Tensor, "n d"]:
    """Each coordinate dealt anew among the states."""
    order = torch.rand(states.shape, generator=torch.Generator().manual_seed(seed)).argsort(0).to(states.device)
    return states.gather(0, order)
