"""States and gradients window by window, and the gradient with whole windows paired anew (N6).

    G_π = Σ_w A_π(w)ᵀ H_w

Notation: H (w, t, d) the centred states of w windows, A (w, t, e) the centred gradients that belong to them, π a
permutation of windows. Positions stay: row s of a window meets row s of another. Single tokens are never permuted:
neighbours resemble each other, and a null without that resemblance calls signal-free gradients significant.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.errors import SpecError
from anisoscope.kernels.gram import squared_norms
from anisoscope.kernels.leading import small_eigh
from anisoscope.tangent.clouds import center_clouds
from anisoscope.tangent.controls import second_moments
from anisoscope.tangent.inference import Permutations, draw_permutations
from anisoscope.tangent.turns import (
    columns_of,
    own_products,
    side_by_side,
    squares_by_tokens,
    squares_by_turns,
    turned_gradients,
)

# Fewer windows than this do not keep the nominal rate.
LEAST_WINDOWS = 32
DRAWS = 199
# Tokens up to which all products of two tokens are kept.
KEPT_TOKENS = 8192
# Up to so many coordinates states are turned so that what bases span comes first.
TURNED_DIM = 256


def place_in_windows(windows: Int[Tensor, " n"]) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """The number of each row's window, windows ascending, and the row's place in it, in the order of rows."""
    _, window, counts = torch.unique(windows, return_inverse=True, return_counts=True)
    order = window.argsort(stable=True)
    first = counts.cumsum(0) - counts
    position = torch.empty_like(window)
    position[order] = torch.arange(len(window), device=window.device) - first.repeat_interleave(counts)
    return window, position


def stack_windows(tables: Sequence[Float[Tensor, "s n _"]], windows: Int[Tensor, " n"]) -> list[Tensor]:
    """Rows by window and by their place in it, (s, w, t, _); shorter windows end in zeros."""
    window, position = place_in_windows(windows)
    shape = int(window.max()) + 1, int(position.max()) + 1
    if len(windows) == math.prod(shape) and bool((window * shape[1] + position).diff().eq(1).all()):
        # They come one after the other, all of one length.
        return [rows.unflatten(1, shape) for rows in tables]
    stacked = [rows.new_zeros(len(rows), *shape, rows.shape[2]) for rows in tables]
    for table, rows in zip(stacked, tables, strict=True):
        table[:, window, position] = rows
    return stacked


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairing:
    """Centred states and gradients by window, of places side by side. Numbers that every proxy needs are computed once.

    In the precision of the input, products summed in float64; from float32 energies are within 1e-5 of those from
    float64, relative.
    """

    values: Float[Tensor, "s w t d"]
    gradients: Float[Tensor, "s w t e"]
    permutations: Permutations
    """None where there are too few windows."""
    note: str | None = None

    @property
    def dim(self) -> int:
        """Of the states."""
        return self.values.shape[3]

    @cached_property
    def gradient(self) -> Float[Tensor, "s e d"]:
        """G = Σ (a - ā)(h - h̄)ᵀ, up to a factor."""
        return self.gradients.flatten(1, 2).mT @ self.values.flatten(1, 2)

    @cached_property
    def products(self) -> Float[Tensor, "s w w"]:
        """⟨A_wᵀH_w, A_vᵀH_v⟩; their sum is ‖G‖²."""
        return self._by_tokens[1] if self._few_tokens else own_products(self.gradients, self.values)

    @cached_property
    def moments(self) -> Float[Tensor, "s d d"]:
        """GᵀG over its trace."""
        # Of states and gradients whose squares add up to one.
        return second_moments(self.gradient, finite=True)

    @cached_property
    def permuted_squares(self) -> Float[Tensor, "s m"]:
        """‖G_π‖², float64."""
        if self._few_tokens:
            return self._by_tokens[0]
        return squares_by_turns(self.gradients, self.values, self.permutations)[:, 0]

    @cached_property
    def _by_tokens(self) -> tuple[Float[Tensor, "s m"], Float[Tensor, "s w w"]]:
        return squares_by_tokens(self.gradients, self.values, self.permutations)

    @property
    def _few_tokens(self) -> bool:
        """Whether products of tokens need fewer multiplications than products of frequencies."""
        _, count, length, width = self.gradients.shape
        tokens, rings = count * length, len(self.permutations.rings)
        by_turns = rings * width * self.dim * (2 * tokens + count**2)
        by_tokens = tokens**2 * (width + self.dim + rings * count) // 2
        return tokens <= KEPT_TOKENS and by_tokens < by_turns and len(self.permutations) > 0

    def permuted_energies(self, bases: Float[Tensor, "s k d r"]) -> Float[Tensor, "s k m"]:
        """‖G_πQ‖² / ‖G_π‖² for each permutation and basis, float64."""
        bases = bases.to(self.values)
        # With and without the mean, by one method and another: bases share most of what they span.
        axes = _span(bases)
        if "permuted_squares" in self.__dict__ or self._few_tokens:
            whole, inside = self.permuted_squares, axes[:, None].mT @ bases
            squares = squares_by_turns(self.gradients, _times(self.values, axes), self.permutations, inside)[:, 1:]
        else:
            values, inside = self.values, bases
            if self.dim <= TURNED_DIM:
                turn = torch.linalg.qr(axes.cpu(), mode="complete").Q.to(axes)
                values, inside = _times(values, turn), turn[:, None, :, : axes.shape[2]].mT @ bases
            every = squares_by_turns(self.gradients, values, self.permutations, inside)
            whole, squares = every[:, 0], every[:, 1:]
            self.__dict__["permuted_squares"] = whole
        return squares / whole[:, None]

    def permuted_moments(self, places: slice) -> Iterator[Float[Tensor, "s w d d"]]:
        """G_πᵀG_π over its trace, of some places, for all turns of one ring after the other.

        They stand as `permutations.chosen` counts them. About e·d·(2n / w + w + d) multiplications for each.
        """
        values, gradients = self.values[places], self.gradients[places]
        several, count, _, dim = values.shape
        for ring in self.permutations.rings:
            moments = values.new_zeros(several, count, dim, dim)
            for found in turned_gradients(gradients, values, self.permutations.rings[0], ring[None]):
                moments += found[:, :, 0].mT @ found[:, :, 0]
            traces = moments.diagonal(dim1=2, dim2=3).sum(2)
            yield moments / torch.where(traces > 0, traces, 1)[..., None, None]

    def look_in(self, bases: Float[Tensor, "s k d r"]) -> "PairedIn":
        """What is to be known of several subspaces, from one projection of the states; columns of zeros do nothing.

        A GPU is given its work and not waited for.
        """
        bases = bases.to(self.values)
        several, count, _, rank = bases.shape
        # First, because it asks how many directions the bases span.
        permuted = bases.new_empty(several, count, 0) if self.note else self.permuted_energies(bases)
        inside = _times(self.values, side_by_side(bases))
        squares = torch.linalg.vector_norm(inside.flatten(1, 2), dim=1).double().square()
        each = several * count * rank * self.values.shape[1]
        own = torch.cat([some.mT @ inside for some in columns_of(self.gradients, each)], 2)
        # Basis first, then window.
        flat = own.unflatten(3, (count, rank)).movedim(3, 1).flatten(3)
        spread = squared_norms(self.values.flatten(0, 2)).view(several, -1).sum(1, keepdim=True)
        shares = squares.view(several, count, rank).sum(2) / torch.where(spread > 0, spread, math.nan)
        return PairedIn(
            products=(flat @ flat.mT).double(),
            permuted=permuted.double(),
            variance_shares=shares,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class PairedIn:
    """Pairings seen in subspaces; float64."""

    products: Float[Tensor, "s k w w"]
    """⟨A_wᵀH_wQ, A_vᵀH_vQ⟩; their sum is ‖GQ‖²."""
    permuted: Float[Tensor, "s k m"]
    """‖G_πQ‖² / ‖G_π‖²; none where there are too few windows."""
    variance_shares: Float[Tensor, "s k"]
    """Of the states: ‖HQ‖² / ‖H‖²."""


def signal_to_noise(products: Float[Tensor, "*s w w"]) -> Float[Tensor, "*s"]:
    """⟨G₁, G₂⟩ / ‖G₁ - G₂‖², each averaged over all halvings of the windows, from products between windows.

    G₁ and G₂ are the sums over two halves. What differs from window to window leaves their product near zero on
    average; what all windows share leaves nothing of their difference.
    """
    count, own = products.shape[-1], products.diagonal(dim1=-2, dim2=-1).sum(-1)
    if count < 2:
        return torch.full_like(own, math.nan)
    # Two windows land in different halves with probability W / 2(W - 1), for even W.
    apart = count / (2 * (count - 1))
    others = products.sum((-2, -1)) - own
    noise = own + others * (1 - 2 * apart)
    return torch.where(noise > 0, others * apart / 2 / noise, math.nan)


def pair_windows(
    values: Float[Tensor, "n d"],
    gradients: Float[Tensor, "_ e"],
    windows: Int[Tensor, " _"],
    *,
    keep: Bool[Tensor, " n"] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Pairing:
    """States and gradients of one place; see `pair_each`. Give documents as `windows` to permute whole documents."""
    if len(values) != len(gradients) or len(values) != len(windows) or not len(values):
        raise SpecError(
            f"states, gradients and windows must have one row per token; came {len(values)}, {len(gradients)} and "
            f"{len(windows)}"
        )
    kept = torch.ones(len(values), dtype=torch.bool, device=values.device) if keep is None else keep
    return pair_each(values[None], gradients[None], windows, keep=kept[None], draws=draws, seed=seed)


def pair_each(
    values: Float[Tensor, "s n d"],
    gradients: Float[Tensor, "s n e"],
    windows: Int[Tensor, " n"],
    *,
    keep: Bool[Tensor, "s n"],
    draws: int = DRAWS,
    seed: int = 0,
) -> Pairing:
    """States and gradients of sites (or inputs and output gradients of linear modules), centred over kept tokens.

    Tokens that are not kept count as the mean. The windows are those of all places.
    """
    if not bool(keep.any(1).all()):
        raise SpecError("no token is kept: keep at least one")
    dtype = torch.promote_types(values.dtype, gradients.dtype)
    both = [values.to(dtype), gradients.to(dtype)]
    if values.shape == gradients.shape and values.is_cuda:
        # In one stack: a GPU hardly needs longer for it than for one of them. A CPU would need the memory of both.
        both = list(center_clouds(torch.cat(both), keep.repeat(2, 1)).points.chunk(2))
    else:
        both = [center_clouds(rows, keep).points for rows in both]
    stacked = stack_windows(both, windows)
    count = stacked[0].shape[1]
    enough = count >= LEAST_WINDOWS
    note = None if enough else f"{count} windows; a permuted null needs at least {LEAST_WINDOWS}"
    # Copied once, and now: later a copy would wait for all that a GPU has been given to do.
    permutations = draw_permutations(draws if enough else 0, count, seed).to(values.device)
    return Pairing(values=stacked[0], gradients=stacked[1], permutations=permutations, note=note)


def _times(values: Float[Tensor, "s w t d"], axes: Float[Tensor, "s d q"]) -> Float[Tensor, "s w t q"]:
    return (values.flatten(1, 2) @ axes).unflatten(1, values.shape[1:3])


def _span(bases: Float[Tensor, "s k d r"]) -> Float[Tensor, "s d q"]:
    """An orthonormal basis of what those of each place span together; zeros stand where others span more.

    One basis after the other, each by what it has beyond those before it.
    """
    known, kept = bases.double().new_empty(len(bases), bases.shape[2], 0), []
    for more in bases.double().unbind(1):
        # Once more for what rounding left.
        for _ in range(2 if kept else 0):
            more = more - known @ (known.mT @ more)
        squares, turn = small_eigh(more.mT @ more)
        # What they have in common leaves zeros, up to the rounding of float32 in the bases: 1e-7, squared.
        kept.append(squares > 1e-12)
        shrink = torch.where(kept[-1], squares.clamp_min(1e-12).rsqrt(), 0)
        known = torch.cat([known, (more @ turn) * shrink[:, None]], 2)
    real = torch.cat(kept, 1)
    most = int(real.sum(1).max())
    first = real.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, None, :most]
    return known.gather(2, first.expand(-1, known.shape[1], -1)).to(bases)
