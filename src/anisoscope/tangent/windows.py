"""States and gradients window by window, and three nulls for G = Σ_w A_wᵀ H_w.

    permuted               G_π = Σ_w A_π(w)ᵀ H_w                 gradients are independent of states
    permuted_directions    G_π = Σ_w U_π(w)ᵀ (S_w H_w)           directions of gradients are; sizes may depend on states
    flipped                G_s = Σ_w s_w A_wᵀ H_w,  s_w = ±1      given the states, gradients are as likely as their
                                                                 negatives: sizes and covariances may depend on states

Notation: H (w, t, d) the centred states of w windows, A (w, t, e) the centred gradients that belong to them, π a
permutation of windows. Positions stay: row s of a window meets row s of another. Single tokens are never permuted:
neighbours resemble each other, and a null without that resemblance calls signal-free gradients significant.

All three take windows for independent of each other, which windows of one document are not: `pair_each` uses one window
of each document.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.errors import SpecError
from anisoscope.kernels.gram import power_of_two, squared_norms
from anisoscope.kernels.leading import small_eigh
from anisoscope.tangent.clouds import center_clouds
from anisoscope.tangent.controls import random_signs, second_moments
from anisoscope.tangent.inference import LEAST_DOCUMENTS, Permutations, draw_permutations
from anisoscope.tangent.turns import (
    columns_of,
    own_products,
    side_by_side,
    squares_by_tokens,
    squares_by_turns,
    turned_gradients,
)

DRAWS = 199
# Tokens up to which all products of two tokens are kept.
KEPT_TOKENS = 8192
CPU = torch.device("cpu")
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
    """None where there are too few documents."""
    note: str | None = None
    """What a reader of the numbers must know: why there is no null, or which windows were left out."""
    mean_gradient: Float[Tensor, "s e"] | None = None
    """ā, in units of `gradients`; None stands for zero."""
    kept: Bool[Tensor, "s w t"] | None = None
    """Tokens that count; None stands for all."""
    seed: int = 0

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
    def directions(self) -> "Pairing":
        """The same gradient as a sum over directions, whose permutations leave the sizes of gradients with the states.

            G = Σ (a - ā)(h - h̄)ᵀ = Σ a (h - h̄)ᵀ = Σ u x ᵀ,   u = a / ‖a‖,   x = ‖a‖ (h - h̄)

        The gradients need no centring, because the states are centred; their sizes and directions are those of a
        itself. Where directions are independent of states and sizes, (u, x) have the same law with whole windows of u
        permuted, whatever the sizes have to do with the states. Neither u nor x is centred: the part that their means
        make, n ū x̄ᵀ, is the same in G and in every permutation of it.
        """
        raw = self.gradients
        if self.mean_gradient is not None:
            # A common gradient may be many orders above what varies.
            scale = power_of_two(self.mean_gradient.abs().amax(1)).clamp_min(1).to(raw)[:, None, None, None]
            raw = raw / scale + self.mean_gradient[:, None, None] / scale
        if self.kept is not None:
            raw = torch.where(self.kept[..., None], raw, 0)
        sizes = torch.linalg.vector_norm(raw, dim=3, keepdim=True)
        values = self.values * sizes
        whole = squared_norms(values.flatten(0, 2)).view(len(values), -1).sum(1).sqrt()
        return Pairing(
            values=values / torch.where(whole > 0, whole, 1).to(values)[:, None, None, None],
            gradients=raw / torch.where(sizes > 0, sizes, 1),
            permutations=self.permutations,
            note=self.note,
        )

    @cached_property
    def signs(self) -> Float[Tensor, "m w"]:
        """±1 of each window, as many draws as there are permutations; float64, on the CPU."""
        return random_signs(len(self.permutations), self.values.shape[1], self.seed, torch.float64, CPU)

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
        several, count = bases.shape[:2]
        # First, because it asks how many directions the bases span.
        permuted, directions = (
            (one.permuted_energies(bases) for one in (self, self.directions))
            if len(self.permutations)
            else (bases.new_empty(several, count, 0),) * 2
        )
        inside = _times(self.values, side_by_side(bases))
        squares = torch.linalg.vector_norm(inside.flatten(1, 2), dim=1).double().square()
        spread = squared_norms(self.values.flatten(0, 2)).view(several, -1).sum(1, keepdim=True)
        shares = squares.view(several, count, -1).sum(2) / torch.where(spread > 0, spread, math.nan)
        return PairedIn(
            products=self._products_of(inside, count),
            permuted=permuted.double(),
            permuted_directions=directions.double(),
            variance_shares=shares,
        )

    def products_in(self, bases: Float[Tensor, "s k d r"]) -> Float[Tensor, "s k w w"]:
        """⟨A_wᵀH_wQ, A_vᵀH_vQ⟩ alone, float64."""
        return self._products_of(_times(self.values, side_by_side(bases.to(self.values))), bases.shape[1])

    def _products_of(self, inside: Float[Tensor, "s w t q"], count: int) -> Float[Tensor, "s k w w"]:
        each = inside.shape[0] * inside.shape[1] * inside.shape[3]
        own = torch.cat([some.mT @ inside for some in columns_of(self.gradients, each)], 2)
        # Basis first, then window.
        flat = own.unflatten(3, (count, -1)).movedim(3, 1).flatten(3)
        return (flat @ flat.mT).double()


@dataclass(frozen=True, kw_only=True, eq=False)
class PairedIn:
    """Pairings seen in subspaces; float64."""

    products: Float[Tensor, "s k w w"]
    """⟨A_wᵀH_wQ, A_vᵀH_vQ⟩; their sum is ‖GQ‖²."""
    permuted: Float[Tensor, "s k m"]
    """‖G_πQ‖² / ‖G_π‖²; none where there are too few documents."""
    permuted_directions: Float[Tensor, "s k m"]
    """The same where the sizes of gradients stay with the states."""
    variance_shares: Float[Tensor, "s k"]
    """Of the states: ‖HQ‖² / ‖H‖²."""


def flipped_energies(
    inside: Float[Tensor, "k w w"], whole: Float[Tensor, "k w w"], signs: Float[Tensor, "m w"]
) -> Float[Tensor, "k m"]:
    """‖G_sQ‖² / ‖G_s‖² for G_s = Σ_w s_w A_wᵀH_w: quadratic forms of the signs in the products between windows."""
    above, below = (((signs @ one) * signs).sum(2) for one in (inside, whole))
    return torch.where(below > 0, above / below, math.nan)


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
    documents: Int[Tensor, " n"] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Pairing:
    """States and gradients of one place; see `pair_each`."""
    if len(values) != len(gradients) or len(values) != len(windows) or not len(values):
        raise SpecError(
            f"states, gradients and windows must have one row per token; came {len(values)}, {len(gradients)} and "
            f"{len(windows)}"
        )
    kept = torch.ones(len(values), dtype=torch.bool, device=values.device) if keep is None else keep
    return pair_each(
        values[None], gradients[None], windows, keep=kept[None], documents=documents, draws=draws, seed=seed
    )


def pair_each(
    values: Float[Tensor, "s n d"],
    gradients: Float[Tensor, "s n e"],
    windows: Int[Tensor, " n"],
    *,
    keep: Bool[Tensor, "s n"],
    documents: Int[Tensor, " n"] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Pairing:
    """States and gradients of sites (or inputs and output gradients of linear modules), centred over kept tokens.

    Tokens that are not kept count as the mean. The windows are those of all places. `documents` tell where each token
    comes from (each window from a document of its own, where they are not given): of windows that share a document
    only one is used, because they are not exchangeable with those of other documents. Where fewer than LEAST_DOCUMENTS
    are left, all windows are used and there is no null.
    """
    if not bool(keep.any(1).all()):
        raise SpecError("no token is kept: keep at least one")
    chosen, note = choose_windows(windows, windows if documents is None else documents)
    if chosen is not None and note is not None:
        rows = torch.isin(windows, windows.unique()[chosen.to(windows.device)])
        if bool(keep[:, rows].any(1).all()):
            values, gradients, windows, keep = values[:, rows], gradients[:, rows], windows[rows], keep[:, rows]
        else:
            chosen, note = None, f"{note}; no token of the population is in these, and there is no permuted null"
    dtype = torch.promote_types(values.dtype, gradients.dtype)
    both = [values.to(dtype), gradients.to(dtype)]
    if values.shape == gradients.shape and values.is_cuda:
        # In one stack: a GPU hardly needs longer for it than for one of them. A CPU would need the memory of both.
        clouds = center_clouds(torch.cat(both), keep.repeat(2, 1))
        points, (mean, size) = list(clouds.points.chunk(2)), (one.chunk(2)[1] for one in (clouds.mean, clouds.size))
    else:
        states, clouds = (center_clouds(rows, keep) for rows in both)
        points, mean, size = [states.points, clouds.points], clouds.mean, clouds.size
    stacked = stack_windows([*points, keep[..., None].to(points[0])], windows)
    count = stacked[0].shape[1]
    # Copied once, and now: later a copy would wait for all that a GPU has been given to do.
    permutations = draw_permutations(draws if chosen is not None else 0, count, seed).to(values.device)
    return Pairing(
        values=stacked[0],
        gradients=stacked[1],
        permutations=permutations,
        note=note,
        mean_gradient=(mean / torch.where(size > 0, size, 1)[:, None]).to(points[1]),
        kept=stacked[2][..., 0] > 0,
        seed=seed,
    )


def choose_windows(
    windows: Int[Tensor, " n"], documents: Int[Tensor, " n"]
) -> tuple[Int[Tensor, " w"] | None, str | None]:
    """Numbers of windows no two of which share a document, and a note where these are not all; None if too few.

    Windows in ascending order, each taken unless one before it has a document of its own.
    """
    pairs = torch.stack([torch.unique(windows, return_inverse=True)[1], documents]).unique(dim=1).cpu()
    count, used, chosen = int(pairs[0].max()) + 1, set[int](), list[int]()
    several = pairs[1].split(pairs[0].bincount().tolist())
    for number, held in enumerate(one.tolist() for one in several):
        if used.isdisjoint(held):
            used.update(held)
            chosen.append(number)
    if len(chosen) < LEAST_DOCUMENTS:
        shared = f", {len(chosen)} without a document in common" if len(chosen) < count else ""
        return None, f"{count} windows{shared}; a permuted null needs at least {LEAST_DOCUMENTS} from documents apart"
    note = f"one window of each document: {len(chosen)} of {count}" if len(chosen) < count else None
    return torch.tensor(chosen), note


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
