"""Tangent energy by token frequency. Frequencies come from other text than the gradients."""

import math
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
    ranks,
    ratio_of_sums,
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
    known: Float[Tensor, " v"]
    """Log frequencies of the types that count,"""
    energies: Float[Tensor, " v"]
    """and their energies, each by the same number of occurrences."""
    seed: int
    resamples: int
    note: str | None = None

    @cached_property
    def linear(self) -> Correlation:
        """Energy of a type on its log frequency; each type counts once."""
        return permutation_correlation(self.known, self.energies, seed=self.seed, resamples=self.resamples)

    @cached_property
    def spearman(self) -> Correlation:
        """The same on ranks (r is Spearman's; ranks are those of the whole sample, also where types are resampled)."""
        found = ranks(self.known), ranks(self.energies)
        return permutation_correlation(*found, seed=self.seed, resamples=self.resamples)


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
    squares = row_squares(rows, [basis])
    return squares_by_frequency(
        squares,
        (basis.shape[0], basis.shape[1]),
        log_frequency,
        types,
        bins=bins,
        by=by,
        occurrences=occurrences,
        seed=seed,
        resamples=resamples,
    )


def squares_by_frequency(
    squares: Float[Tensor, "n 2"],
    shape: tuple[int, int],
    log_frequency: Float[Tensor, " n"],
    types: Int[Tensor, " n"],
    *,
    bins: int = BINS,
    by: str = "tokens",
    occurrences: int = 1,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> ByFrequency:
    """`energy_by_frequency` from what `row_squares` found for a basis of that shape, ‖Qᵀa‖² and ‖a‖²."""
    (dim, rank), log_frequency, types = shape, log_frequency.cpu(), types.cpu()
    place = bin_tokens(log_frequency, types, bins=bins, by=by)
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(squares), generator=generator)
    members = [shuffled[place[shuffled] == one] for one in range(bins)]
    filled = [one for one in members if len(one)]
    size = min((len(one) for one in filled), default=0)
    found = []
    for index in (one[:size] for one in filled):
        sums = sum_groups(squares[index], types[index])
        energy = ratio_of_sums(sums[:, 0], sums[:, 1], seed=seed, resamples=resamples)
        found.append(
            Bin(
                log_frequency=float(log_frequency[index].double().mean()),
                energy=energy,
                normal=(1 - energy.value) * rank / (dim - rank),
                tokens=size,
                types=len(sums),
            )
        )
    drawn = _draw_occurrences(types[shuffled], occurrences)
    sums = sum_groups(squares[shuffled[drawn.flatten()]], types[shuffled[drawn.flatten()]])
    above, below = sums.T
    energies, known = above / torch.where(below > 0, below, math.nan), log_frequency[shuffled[drawn[:, 0]]].double()
    usable = energies.isfinite() & known.isfinite()
    empty = bins - len(filled)
    return ByFrequency(
        bins=tuple(found),
        known=known[usable],
        energies=energies[usable],
        seed=seed,
        resamples=resamples,
        note=f"{empty} of {bins} bins are empty: single types are more than a bin" if empty else None,
    )


def _draw_occurrences(types: Int[Tensor, " n"], count: int) -> Int[Tensor, "v c"]:
    """The first so many rows of every type that has them, types ascending."""
    if count < 1:
        raise SpecError(f"a type needs at least one occurrence; came {count}")
    order = types.argsort(stable=True)
    _, counts = torch.unique(types, return_counts=True)
    first = (counts.cumsum(0) - counts)[counts >= count]
    return order[first[:, None] + torch.arange(count, device=order.device)]
