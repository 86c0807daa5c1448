"""Concepts: the directions of a semi-non-negative factorisation, what they are made of, and their life in training.

A ≈ ZD with Z ≥ 0 leaves D open: any wider cone fits as well, so two seeds give two sets of directions. `sharpen` takes
the tightest one, in which few and small codes suffice. What then comes back from other seeds (`stability`) and from
other states (`replication`) is a concept; what does not is an artefact. The sign of a direction has a meaning (codes
are not negative), so cosines keep theirs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import SpecError
from anisoscope.kernels.seminmf import SemiNMF, semi_nmf
from anisoscope.records import without_nan

# What a unit of code costs, relative to the root mean square length of the points. Planted directions come back with
# cosines above .998 from .03 to .2; the less it is, the longer it takes.
PENALTY = 0.1
SHARPENING_STEPS, CODE_STEPS, LAST_CODE_STEPS = 100, 10, 300
# Directions that turn less than this in a step, as 1 - cosine, have settled: half a degree in twenty.
SETTLED = 1e-7
LISTED_TOKENS = 10


@dataclass(frozen=True, kw_only=True)
class Concepts:
    """A table of r concepts, by falling share of code energy; NaN for what was not given."""

    directions: np.ndarray
    """(r, d), of length one."""
    tokens: np.ndarray
    """(r, m): the points with the largest codes, strongest first; -1 where there are no more."""
    strengths: np.ndarray
    """(r, m): their codes."""
    sparsity: np.ndarray
    """Hoyer: 0 where all points have the same code, 1 where one point has all of it."""
    code_share: np.ndarray
    """Of Σz². They sum to 1."""
    variance_share: np.ndarray
    """Of the variance of the states: directions are not orthogonal, so these and the next two need not sum to 1."""
    gradient_share: np.ndarray
    """Σ(a·d)² / Σ‖a‖² over gradients a at the tokens; 1/d for gradients that know no direction."""
    coupled_share: np.ndarray
    """‖Gd‖² / ‖G‖² of G = Σ (a - ā)(h - h̄)ᵀ; about `variance_share` where gradients know nothing of the states."""
    stability: np.ndarray
    """Mean cosine with its partner in fits from other seeds to the same states. Noise has some too: see the next."""
    replication: np.ndarray
    """Mean cosine between its partners in fits to two halves that share no states."""

    def rows(self, contexts: Sequence[Sequence[str]] | None = None) -> list[dict[str, Any]]:
        """One row per concept for machines, NaN as None; `contexts` are texts of its tokens, if they were rendered."""
        columns = [item.name for item in fields(self) if item.name != "directions"]
        found = []
        for number in range(len(self.directions)):
            row = {name: _json(getattr(self, name)[number]) for name in columns}
            found.append({"concept": number, **row, **({"contexts": list(contexts[number])} if contexts else {})})
        return found

    def attach(self, prefix: str) -> dict[str, np.ndarray]:
        """Arrays for a unit's attachments."""
        return {f"{prefix}.{item.name}": getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_attachments(cls, attachments: Mapping[str, np.ndarray], prefix: str) -> "Concepts":
        """What `attach` made."""
        return cls(**{item.name: attachments[f"{prefix}.{item.name}"] for item in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class Matching:
    """Pairs of directions, one of each set, so that the sum of their cosines is largest."""

    first: np.ndarray
    second: np.ndarray
    cosines: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Tracks:
    """Concepts through checkpoints, by birth; a track has no gaps."""

    steps: np.ndarray
    """(c,)"""
    members: np.ndarray
    """(tracks, c): which direction of the checkpoint it is, -1 where it does not exist."""
    angles: np.ndarray
    """(tracks, c - 1): how far it turned in each interval, in radians; NaN where it did not exist at both ends."""

    @property
    def births(self) -> np.ndarray:
        """The first step it was seen at; the first of all may be late."""
        return self.steps[(self.members >= 0).argmax(1)]

    @property
    def deaths(self) -> np.ndarray:
        """The first step it was missing at; -1 where it lives on."""
        alive = self.members >= 0
        last = alive.shape[1] - 1 - alive[:, ::-1].argmax(1)
        return np.where(alive[:, -1], -1, self.steps[np.minimum(last + 1, len(self.steps) - 1)])

    def rows(self) -> list[dict[str, Any]]:
        """One row per track for machines."""
        births, deaths = self.births.tolist(), self.deaths.tolist()
        return [
            {
                "track": number,
                "birth": births[number],
                "death": None if deaths[number] < 0 else deaths[number],
                "members": self.members[number].tolist(),
                "angles": _json(self.angles[number]),
            }
            for number in range(len(self.members))
        ]

    def attach(self, prefix: str) -> dict[str, np.ndarray]:
        """Arrays for a unit's attachments."""
        return {f"{prefix}.{item.name}": getattr(self, item.name) for item in fields(self)}


def _json(values: np.ndarray | np.generic) -> Any:
    listed = values.tolist()
    return without_nan(tuple(listed) if isinstance(listed, list) else listed)


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
    return SemiNMF(codes=found, directions=whole, errors=torch.cat([fit.errors, relative]), converged=converged)


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
        given = gradients.double()
        plain, coupled = _share(given, directions), _share((given - given.mean(0)).T @ centred, directions)
    tokens, strengths = top_tokens(codes, listed, types)
    numbers = _numbers(directions)
    return Concepts(
        directions=directions.float().cpu().numpy(),
        tokens=tokens,
        strengths=strengths,
        sparsity=hoyer_sparsity(codes),
        code_share=(energy[order] / energy.sum()).cpu().numpy(),
        variance_share=_share(centred, directions),
        gradient_share=plain,
        coupled_share=coupled,
        stability=stability_over(numbers, [_numbers(other) for other in refits]) if refits else unknown,
        replication=replication_over(numbers, [(_numbers(a), _numbers(b)) for a, b in halves]) if halves else unknown,
    )


def _numbers(directions: Tensor) -> np.ndarray:
    return directions.double().cpu().numpy()


def _share(matrix: Tensor, directions: Tensor) -> np.ndarray:
    return ((matrix @ directions.T).square().sum(0) / matrix.square().sum()).cpu().numpy()


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


def render_context(
    texts: Sequence[str], windows: np.ndarray, positions: np.ndarray, token: int, *, radius: int = 6
) -> str:
    """The text around a token of a window, the token itself between ⟦ and ⟧; other windows do not show."""
    near = np.flatnonzero((windows == windows[token]) & (np.abs(positions - positions[token]) <= radius))
    ordered: list[int] = near[np.argsort(positions[near], kind="stable")].tolist()
    return "".join(f"⟦{texts[row]}⟧" if row == token else texts[row] for row in ordered)


def cosines_between(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Of all pairs; 0 for directions of length 0."""
    if one.shape[1] != other.shape[1]:
        raise SpecError(f"directions of one space are wanted; came {one.shape[1]} and {other.shape[1]} dimensions")
    lengths = np.linalg.norm(one, axis=1)[:, None] * np.linalg.norm(other, axis=1)
    return np.divide(one @ other.T, lengths, out=np.zeros_like(lengths), where=lengths > 0)


def match_directions(one: np.ndarray, other: np.ndarray, *, threshold: float | np.ndarray | None = None) -> Matching:
    """Hungarian matching on cosines; pairs below the threshold are none, and do not count in the sum.

    `threshold` is one cosine for all, or one for each direction of the first set.
    """
    from scipy.optimize import linear_sum_assignment

    cosines = cosines_between(one.astype(float), other.astype(float))
    limits = np.broadcast_to(-np.inf if threshold is None else np.asarray(threshold), len(cosines))
    allowed = cosines >= limits[:, None]
    first, second = linear_sum_assignment(np.where(allowed, cosines, 0.0), maximize=True)
    kept = allowed[first, second]
    return Matching(first=first[kept], second=second[kept], cosines=cosines[first, second][kept])


def stability_over(directions: np.ndarray, refits: Sequence[np.ndarray]) -> np.ndarray:
    """For each direction the mean cosine with its partner in each refit; 0 where it has none."""
    return np.mean([_partner_cosines(directions, other) for other in refits], axis=0)


def replication_over(directions: np.ndarray, halves: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """For each direction the mean cosine between its partners in two halves; 0 where one is missing."""
    found = np.zeros((len(halves), len(directions)))
    for row, (one, other) in zip(found, halves, strict=True):
        left, right = (match_directions(directions, half) for half in (one, other))
        both, in_left, in_right = np.intersect1d(left.first, right.first, return_indices=True)
        cosines = cosines_between(one.astype(float), other.astype(float))
        row[both] = cosines[left.second[in_left], right.second[in_right]]
    return found.mean(0)


def _partner_cosines(directions: np.ndarray, other: np.ndarray) -> np.ndarray:
    matching, found = match_directions(directions, other), np.zeros(len(directions))
    found[matching.first] = matching.cosines
    return found


def random_cosines(
    directions: np.ndarray, count: int, *, draws: int, seed: int, states: np.ndarray | None = None
) -> np.ndarray:
    """(draws, r): cosines with the partners in random sets, of any direction or of random mixtures of the states.

    Mixtures are the harder null: they share the large axes of the states, which any fit would find.
    """
    random = np.random.default_rng(seed)
    mixed = np.eye(directions.shape[1]) if states is None else states
    return np.stack(
        [_partner_cosines(directions, random.standard_normal((count, len(mixed))) @ mixed) for _ in range(draws)]
    )


def permuted_cosines(
    directions: np.ndarray, states: Float[Tensor, "n d"], rank: int, *, seeds: Sequence[int]
) -> np.ndarray:
    """(seeds, r): cosines with the partners in fits to states whose coordinates were shuffled, each by itself.

    Mean and spread of every coordinate stay, and what coordinates say together is gone: what matches then is a common
    mean or a coordinate that is large in all states. One fit per seed.
    """
    found = []
    for seed in seeds:
        order = torch.rand(states.shape, generator=torch.Generator().manual_seed(seed)).argsort(0).to(states.device)
        shuffled = fit_concepts(states.gather(0, order), rank, seed=seed).directions
        found.append(_partner_cosines(directions, _numbers(shuffled)))
    return np.stack(found)


def match_threshold(cosines: np.ndarray, *, false_matches: float = 0.05) -> np.ndarray:
    """For each direction the cosine above which at most this share of its partners in a null lie.

    It is one of the M values of the null, the largest of them where M is small: a match beyond it has
    p ≤ max(false_matches, 1/(M + 1)). Never below 0.
    """
    if not 0 < false_matches < 1 or cosines.ndim != 2 or not cosines.size:
        raise SpecError(
            f"thresholds need a null of shape (draws, r) and a share inside (0, 1); came {cosines.shape} and "
            f"{false_matches}"
        )
    beyond = int(false_matches * (len(cosines) + 1) + 1e-9)
    return np.maximum(0.0, np.sort(cosines, axis=0)[-max(1, beyond)])


def follow_concepts(
    directions: Sequence[np.ndarray], steps: Sequence[int], *, threshold: float | Sequence[float | np.ndarray]
) -> Tracks:
    """Follow concepts through checkpoints: matched pairs go on, others end and begin.

    `threshold` is one cosine for all intervals, or one for each interval, or for each of its
    earlier directions (from `match_threshold`). Directions of length 0 are no concepts.
    """
    if len(directions) != len(steps) or not len(steps) or list(steps) != sorted(set(steps)):
        raise SpecError(f"one set of directions per rising step is wanted; came {len(directions)} for {list(steps)}")
    limits = list(threshold) if isinstance(threshold, Sequence) else [threshold] * (len(steps) - 1)
    if len(limits) != len(steps) - 1 or not all(
        np.all((np.asarray(limit) > 0) & (np.asarray(limit) < 1)) for limit in limits
    ):
        raise SpecError(f"thresholds inside (0, 1), one per interval, are wanted; came {limits}")
    members: list[list[int]] = []
    angles: list[list[float]] = []
    alive: dict[int, int] = {}
    for number, now in enumerate(directions):
        matching = None if number == 0 else match_directions(directions[number - 1], now, threshold=limits[number - 1])
        continued = {}
        if matching is not None:
            for first, second, cosine in zip(matching.first, matching.second, matching.cosines, strict=True):
                track = alive[int(first)]
                continued[int(second)] = track
                members[track][number] = int(second)
                angles[track][number - 1] = math.acos(min(1.0, float(cosine)))
        for newborn in np.flatnonzero(np.linalg.norm(now, axis=1) > 0).tolist():
            if newborn not in continued:
                continued[newborn] = len(members)
                members.append([-1] * number + [newborn] + [-1] * (len(steps) - number - 1))
                angles.append([math.nan] * (len(steps) - 1))
        alive = continued
    return Tracks(
        steps=np.array(steps),
        members=np.array(members, dtype=int).reshape(len(members), len(steps)),
        angles=np.array(angles, dtype=float).reshape(len(members), len(steps) - 1),
    )
