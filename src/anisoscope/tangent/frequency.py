"""Tangent energy by token frequency. Frequencies come from other text than the gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import SpecError
from anisoscope.tangent.energies import row_squares
from anisoscope.tangent.inference import (
    RESAMPLES,
    Correlation,
    Interval,
    permutation_correlation,
    permutation_correlations,
    ratios_of_parts,
    sum_groups,
)

BINS = 10


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Tokens of about the same frequency."""

    log_frequency: float
    """Mean over its tokens."""
    energy: Interval
    """Types are resampled whole."""
    normal: float
    """The expectation of N1 for its tokens, (1 - E) r / (d - r)."""
    tokens: int
    """How many were used: as many as in every other bin."""
    types: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ByFrequency:
    """Per-bin energies, and how the energy of a type goes with its frequency."""

    bins: tuple[Bin, ...]
    spearman: Correlation
    """Energy of a type and its frequency, on ranks."""
    known: Float[Tensor, " v"]
    """Log frequencies of the types,"""
    energies: Float[Tensor, " v"]
    """and their energies, each by the same number of occurrences."""
    seed: int
    resamples: int
    note: str | None = None

    @cached_property
    def linear(self) -> Correlation:
        """Energy of a type on its log frequency; each type counts once."""
        return permutation_correlation(self.known, self.energies, seed=self.seed, resamples=self.resamples)


def bin_tokens(
    log_frequency: Float[Tensor, " n"], types: Int[Tensor, " n"], *, bins: int = BINS, by: str = "tokens"
) -> Int[Tensor, " n"]:
    """The bin of each token, rarest first: of equal token mass, or of equal type count. A type is never split.

    Types in order of frequency (of id where that is equal); each goes where the middle of its mass lies. Some bins stay
    empty where one type is more than a bin.
    """
    if by not in ("tokens", "types") or bins < 2:
        raise SpecError(f"at least two bins by tokens or by types; came {bins} by {by!r}")
    ids, place, counts = torch.unique(types, return_inverse=True, return_counts=True)
    known = log_frequency.new_zeros(len(ids)).scatter_(0, place, log_frequency)
    mass = counts.double() if by == "tokens" else torch.ones_like(counts, dtype=torch.float64)
    order = known.argsort(stable=True)
    middle = mass[order].cumsum(0) - mass[order] / 2
    bin_of = torch.empty_like(order)
    bin_of[order] = (middle / mass.sum() * bins).long().clamp(max=bins - 1)
    return bin_of[place]


def energy_by_frequency(
    rows: Float[Tensor, "n d"],
    basis: Float[Tensor, "d r"],
    log_frequency: Float[Tensor, " n"],
    types: Int[Tensor, " n"],
    *,
    bins: int = BINS,
    by: str = "tokens",
    occurrences: int = 1,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> ByFrequency:
    """Energies of the gradient rows of each bin, at equal numbers of tokens, and their trend over types.

    p permutes log f over types, never inside a bin; for that a type is as many `occurrences` as any other, drawn from
    its tokens: the energy of many is less scattered and, a ratio of sums, on average another than that of few. For a
    bin's part of a weight gradient give `pair_windows` the bin as the tokens to keep.
    """
    settings = {"bins": bins, "by": by, "occurrences": occurrences, "seed": seed, "resamples": resamples}
    above, below = row_squares(rows[None], basis[None, None])[0].split(1, 1)
    return squares_by_frequency(above, below, [(len(basis), basis.shape[1])], log_frequency, types, **settings)[0]


def squares_by_frequency(
    above: Float[Tensor, "n k"],
    below: Float[Tensor, "n k"],
    shapes: Sequence[tuple[int, int]],
    log_frequency: Float[Tensor, " n"],
    types: Int[Tensor, " n"],
    *,
    bins: int = BINS,
    by: str = "tokens",
    occurrences: int = 1,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> list[ByFrequency]:
    """`energy_by_frequency` of several gradients of the same tokens and bases of these shapes, from ‖Qᵀa‖² and ‖a‖²."""
    # Tokens are dealt on the CPU, and what is drawn of them is added up where the squares are.
    squares, log_frequency, types = torch.cat([above, below], 1), log_frequency.cpu(), types.cpu()
    place = bin_tokens(log_frequency, types, bins=bins, by=by)
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(squares), generator=generator)
    members = [shuffled[place[shuffled] == one] for one in range(bins)]
    filled = [one for one in members if len(one)]
    size = min((len(one) for one in filled), default=0)
    found: list[list[Bin]] = [[] for _ in shapes]
    chosen = [one[:size] for one in filled]
    counts = [len(types[index].unique()) for index in chosen]
    means = [float(log_frequency[index].double().mean()) for index in chosen]
    # Types of all bins at once, bin after bin.
    together, each = torch.cat([*chosen, shuffled[:0]]), place * (int(types.max()) + 1 if len(types) else 1) + types
    every = sum_groups(squares[together], each[together]).split(counts)
    intervals = ratios_of_parts(every, seed=seed, resamples=resamples)
    for mean, count, energies in zip(means, counts, intervals, strict=True):
        for mine, energy, (dim, rank) in zip(found, energies, shapes, strict=True):
            normal = (1 - energy.value) * rank / (dim - rank)
            mine.append(Bin(log_frequency=mean, energy=energy, normal=normal, tokens=size, types=count))
    drawn = shuffled[_draw_occurrences(types[shuffled], occurrences)]
    over, under = sum_groups(squares[drawn.flatten()], types[drawn.flatten()]).split(len(shapes), 1)
    energies, known = over / torch.where(under > 0, under, math.nan), log_frequency[drawn[:, 0]].double()
    trends = permutation_correlations(known, energies, ranked=True, seed=seed, resamples=resamples)
    empty = bins - len(filled)
    note = f"{empty} of {bins} bins are empty: single types are more than a bin" if empty else None
    settings = {"known": known, "seed": seed, "resamples": resamples, "note": note}
    return [
        ByFrequency(bins=tuple(mine), spearman=trend, energies=one, **settings)
        for mine, trend, one in zip(found, trends, energies.T.cpu(), strict=True)
    ]


def _draw_occurrences(types: Int[Tensor, " n"], count: int) -> Int[Tensor, "v c"]:
    """The first so many rows of every type that has them, types ascending."""
    if count < 1:
        raise SpecError(f"a type needs at least one occurrence; came {count}")
    order = types.argsort(stable=True)
    _, counts = torch.unique(types, return_counts=True)
    first = (counts.cumsum(0) - counts)[counts >= count]
    return order[first[:, None] + torch.arange(count, device=order.device)]
