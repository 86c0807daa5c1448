"""Tangent energy by token frequency. Frequencies come from other text than the gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Dealt:
    """Tokens by frequency, whatever is measured of them: some in bins, and some of every type."""

    tokens: Int[Tensor, " m"]
    """Those of the bins, bin after bin, as many of each."""
    place: Int[Tensor, " m"]
    """The type of each among those of its bin, counted on from bin to bin."""
    counts: list[int]
    """How many types each bin has,"""
    log_frequencies: list[float]
    """and the mean over its tokens."""
    drawn: Int[Tensor, "v c"]
    """As many occurrences of every type that has them,"""
    known: Float[Tensor, " v"]
    """whose log frequency this is."""
    note: str | None
    seed: int

    def of(self, rows: Int[Tensor, " n"], device: torch.device) -> "Dealt":
        """The same for tokens that are these rows of a larger table, there where the table is."""
        tokens, drawn = rows[self.tokens].to(device), rows[self.drawn].to(device)
        return replace(self, tokens=tokens, drawn=drawn, place=self.place.to(device), known=self.known.to(device))


def deal_tokens(
    log_frequency: Float[Tensor, " n"],
    types: Int[Tensor, " n"],
    *,
    bins: int = BINS,
    by: str = "tokens",
    occurrences: int = 1,
    seed: int = 0,
) -> Dealt:
    """Into bins of which each gives as many tokens as any other."""
    log_frequency, types = log_frequency.cpu(), types.cpu()
    place = bin_tokens(log_frequency, types, bins=bins, by=by)
    shuffled = torch.randperm(len(types), generator=torch.Generator().manual_seed(seed))
    members = shuffled[place[shuffled].argsort(stable=True)].split(place.bincount(minlength=bins).tolist())
    filled = [one for one in members if len(one)]
    size, empty = min((len(one) for one in filled), default=0), bins - len(filled)
    tokens = torch.cat([one[:size] for one in filled]) if filled else shuffled
    most = int(types.max()) + 1 if len(types) else 1
    found, number = torch.unique(place[tokens] * most + types[tokens], return_inverse=True)
    drawn = shuffled[_draw_occurrences(types[shuffled], occurrences)]
    return Dealt(
        tokens=tokens,
        place=number,
        counts=[count for count in (found // most).bincount().tolist() if count],
        log_frequencies=log_frequency[tokens].double().view(len(filled), size).mean(1).tolist() if filled else [],
        drawn=drawn,
        known=log_frequency[drawn[:, 0]].double(),
        note=f"{empty} of {bins} bins are empty: single types are more than a bin" if empty else None,
        seed=seed,
    )


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
    dealt = deal_tokens(log_frequency, types, bins=bins, by=by, occurrences=occurrences, seed=seed)
    squares, shape = row_squares(rows[None], basis[None, None]), (len(basis), basis.shape[1])
    return squares_by_frequency(squares, [[shape]], dealt, resamples=resamples)[0][0]


def squares_by_frequency(
    squares: Float[Tensor, "s n _"],
    shapes: Sequence[Sequence[tuple[int, int]]],
    dealt: Dealt,
    *,
    resamples: int = RESAMPLES,
) -> list[list[ByFrequency]]:
    """`energy_by_frequency` at several places for bases of these shapes, from `row_squares` of the same tokens."""
    several, _, last = squares.shape
    binned = squares[:, dealt.tokens].double()
    sums = binned.new_zeros(several, sum(dealt.counts), last).index_add_(1, dealt.place.to(squares.device), binned)
    intervals = ratios_of_parts(torch.cat(_sides(sums), 1).split(dealt.counts), seed=dealt.seed, resamples=resamples)
    above, below = _sides(squares[:, dealt.drawn].double().sum(2))
    energies = above / torch.where(below > 0, below, math.nan)
    trends = permutation_correlations(dealt.known, energies, ranked=True, seed=dealt.seed, resamples=resamples)
    size, by_type = len(dealt.tokens) // max(1, len(dealt.counts)), energies.T.cpu().unbind()
    settings = {"known": dealt.known, "seed": dealt.seed, "resamples": resamples, "note": dealt.note}
    found: list[list[ByFrequency]] = []
    for at, mine in enumerate(shapes):
        found.append([])
        for column, (dim, rank) in enumerate(mine, at * (last - 1)):
            parts = zip(dealt.log_frequencies, dealt.counts, intervals, strict=True)
            bins = tuple(
                Bin(
                    log_frequency=mean,
                    energy=of_bin[column],
                    normal=(1 - of_bin[column].value) * rank / (dim - rank),
                    tokens=size,
                    types=count,
                )
                for mean, count, of_bin in parts
            )
            found[at].append(ByFrequency(bins=bins, spearman=trends[column], energies=by_type[column], **settings))
    return found


def _sides(sums: Float[Tensor, "s g _"]) -> tuple[Float[Tensor, "g k"], Float[Tensor, "g k"]]:
    """‖Qᵀa‖² and ‖a‖² for each basis of each place."""
    inside, whole = sums[..., :-1].transpose(0, 1), sums[..., -1:].transpose(0, 1)
    return inside.flatten(1), whole.expand_as(inside).flatten(1)


def _draw_occurrences(types: Int[Tensor, " n"], count: int) -> Int[Tensor, "v c"]:
    """The first so many rows of every type that has them, types ascending."""
    if count < 1:
        raise SpecError(f"a type needs at least one occurrence; came {count}")
    order = types.argsort(stable=True)
    _, counts = torch.unique(types, return_counts=True)
    first = (counts.cumsum(0) - counts)[counts >= count]
    return order[first[:, None] + torch.arange(count, device=order.device)]
