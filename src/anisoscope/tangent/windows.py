"""States and gradients window by window, and the gradient with whole windows paired anew (N6).

    G_π = Σ_w A_π(w)ᵀ H_w

Notation: H (w, t, d) the centred states of w windows, A (w, t, e) the centred gradients that belong to them, π a
permutation of windows. Positions stay: row s of a window meets row s of another. Single tokens are never permuted:
neighbours resemble each other, and a null without that resemblance calls signal-free gradients significant.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.errors import SpecError, StatesError
from anisoscope.kernels.gram import center, for_products, limit_on, power_of_two_scale, squared_norms
from anisoscope.tangent.controls import second_moment
from anisoscope.tangent.inference import Permutations, draw_permutations

# Fewer windows than this do not keep the nominal rate.
LEAST_WINDOWS = 32
DRAWS = 199
# Numbers held at one time by a table of products: caches hold the first, a GPU is busy with the second.
TABLE_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 25}
# Tokens up to which all products of two tokens are kept.
KEPT_TOKENS = 8192
# Windows whose products with others are made at once: the CPU does not make those twice that are their own mirrors.
AT_ONCE = {"cpu": 8, "cuda": 1 << 20}


def place_in_windows(windows: Int[Tensor, " n"]) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """The number of each row's window, windows ascending, and the row's place in it, in the order of rows."""
    _, window, counts = torch.unique(windows, return_inverse=True, return_counts=True)
    order = window.argsort(stable=True)
    first = counts.cumsum(0) - counts
    position = torch.empty_like(window)
    position[order] = torch.arange(len(window), device=window.device) - first.repeat_interleave(counts)
    return window, position


def stack_windows(
    tables: Sequence[Float[Tensor, "m _"]], windows: Int[Tensor, " n"], index: Int[Tensor, " m"] | None = None
) -> list[Float[Tensor, "w t _"]]:
    """Rows by window and by their place in it; shorter windows end in zeros.

    With an `index` the tables have only these of the rows, and the others are zeros too.
    """
    window, position = place_in_windows(windows)
    shape = int(window.max()) + 1, int(position.max()) + 1
    if index is not None:
        window, position = window[index], position[index]
    stacked = [rows.new_zeros(*shape, rows.shape[1]) for rows in tables]
    for table, rows in zip(stacked, tables, strict=True):
        table[window, position] = rows
    return stacked


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairing:
    """Centred states and gradients of one place, by window. Numbers that every proxy needs are computed once.

    In the precision of the input, products summed in float64; from float32 energies are within 1e-5 of those from
    float64, relative.
    """

    values: Float[Tensor, "w t d"]
    gradients: Float[Tensor, "w t e"]
    permutations: Permutations
    """None where there are too few windows."""
    note: str | None = None

    @property
    def dim(self) -> int:
        """Of the states."""
        return self.values.shape[2]

    @cached_property
    def gradient(self) -> Float[Tensor, "e d"]:
        """G = Σ (a - ā)(h - h̄)ᵀ, up to a power of two."""
        return self.gradients.flatten(0, 1).T @ self.values.flatten(0, 1)

    @cached_property
    def products(self) -> Float[Tensor, "w w"]:
        """⟨A_wᵀH_w, A_vᵀH_v⟩; their sum is ‖G‖²."""
        return self._by_tokens[1] if self._few_tokens else _own_products(self.gradients, self.values)

    @cached_property
    def moment(self) -> Float[Tensor, "d d"]:
        """GᵀG over its trace."""
        return second_moment(self.gradient)

    @cached_property
    def spread(self) -> float:
        """‖H‖²."""
        return float(squared_norms(self.values.flatten(0, 1)).sum())

    @cached_property
    def permuted_squares(self) -> Float[Tensor, " m"]:
        """‖G_π‖², float64."""
        if self._few_tokens:
            return self._by_tokens[0]
        return _squares_by_turns(self.gradients, self.values, self.permutations)[0]

    @cached_property
    def _by_tokens(self) -> tuple[Float[Tensor, " m"], Float[Tensor, "w w"]]:
        return _squares_by_tokens(self.gradients, self.values, self.permutations)

    @property
    def _few_tokens(self) -> bool:
        """Whether products of tokens need fewer multiplications than products of frequencies."""
        count, length, width = self.gradients.shape
        tokens, rings = count * length, len(self.permutations.rings)
        by_turns = rings * width * self.dim * (2 * tokens + count**2)
        by_tokens = tokens**2 * (width + self.dim + rings * count) // 2
        return tokens <= KEPT_TOKENS and by_tokens < by_turns and len(self.permutations) > 0

    def permuted_energies(self, basis: Float[Tensor, "d r"]) -> Float[Tensor, " m"]:
        """‖G_πQ‖² / ‖G_π‖² for each permutation, float64, on the CPU."""
        return self._energies([basis])[0]

    def _energies(self, bases: Sequence[Tensor]) -> Float[Tensor, "k m"]:
        """The same for several bases at once."""
        if "permuted_squares" in self.__dict__ or self._few_tokens:
            # With and without the mean, by one method and another: bases share most of what they span.
            axes, whole = _span(bases, self.values), self.permuted_squares
            inside = [axes.T @ one.to(axes) for one in bases]
            squares = _squares_by_turns(self.gradients, self.values @ axes, self.permutations, inside)[1:]
        else:
            whole, *each = _squares_by_turns(self.gradients, self.values, self.permutations, bases)
            self.__dict__["permuted_squares"], squares = whole, torch.stack(each)
        return (squares / whole).cpu()

    def look_in(self, bases: Sequence[Tensor]) -> list["PairedIn"]:
        """What is to be known of several subspaces, from one projection of the states."""
        sizes = [one.shape[1] for one in bases]
        inside = self.values @ _beside(bases, self.values)
        own = torch.cat([some.mT @ inside for some in _columns(self.gradients, inside[:, 0].numel())], 1)
        flat = [part.flatten(1) for part in own.split(sizes, 2)]
        squares = torch.linalg.vector_norm(inside.flatten(0, 1), dim=0).double().square().cpu()
        permuted = self._energies(bases) if self.note is None else squares.new_empty(len(bases), 0)
        return [
            PairedIn(
                products=(one @ one.T).double().cpu(),
                permuted=draws,
                variance_share=float(part.sum()) / self.spread if self.spread > 0 else math.nan,
            )
            for one, draws, part in zip(flat, permuted, squares.split(sizes), strict=True)
        ]

    def split_halves(self, basis: Float[Tensor, "d r"] | None = None) -> float:
        """Signal to noise of the gradient (in the basis): see `signal_to_noise`."""
        return signal_to_noise(self.products if basis is None else self.look_in([basis])[0].products)


@dataclass(frozen=True, kw_only=True, eq=False)
class PairedIn:
    """A pairing seen in a subspace; on the CPU, in float64."""

    products: Float[Tensor, "w w"]
    """⟨A_wᵀH_wQ, A_vᵀH_vQ⟩; their sum is ‖GQ‖²."""
    permuted: Float[Tensor, " m"]
    """‖G_πQ‖² / ‖G_π‖²; none where there are too few windows."""
    variance_share: float
    """Of the states: ‖HQ‖² / ‖H‖²."""


def signal_to_noise(products: Float[Tensor, "w w"]) -> float:
    """⟨G₁, G₂⟩ / ‖G₁ - G₂‖², each averaged over all halvings of the windows, from products between windows.

    G₁ and G₂ are the sums over two halves. What differs from window to window leaves their product near zero on
    average; what all windows share leaves nothing of their difference.
    """
    count, own = len(products), float(products.diagonal().sum())
    if count < 2:
        return math.nan
    # Two windows land in different halves with probability W / 2(W - 1), for even W.
    apart = count / (2 * (count - 1))
    others = float(products.sum()) - own
    crossed = others * apart / 2
    noise = own + others * (1 - 2 * apart)
    return crossed / noise if noise > 0 else math.nan


def pair_windows(
    values: Float[Tensor, "n d"],
    gradients: Float[Tensor, "_ e"],
    windows: Int[Tensor, " _"],
    *,
    keep: Bool[Tensor, " n"] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Pairing:
    """States and gradients of a site (or inputs and output gradients of a linear module), centred over kept tokens.

    Tokens that are not kept count as the mean. Give documents as `windows` to permute whole documents.
    """
    if len(values) != len(gradients) or len(values) != len(windows) or not len(values):
        raise SpecError(
            f"states, gradients and windows must have one row per token; came {len(values)}, {len(gradients)} and "
            f"{len(windows)}"
        )
    index = None if keep is None else keep.nonzero().flatten()
    if index is not None and not len(index):
        raise SpecError("no token is kept: keep at least one")
    dtype = torch.promote_types(values.dtype, gradients.dtype)
    kept = [rows if index is None else rows[index] for rows in (values, gradients)]
    stacked = stack_windows([_centred(rows.to(dtype)) for rows in kept], windows, index)
    count, enough = len(stacked[0]), len(stacked[0]) >= LEAST_WINDOWS
    note = None if enough else f"{count} windows; a permuted null needs at least {LEAST_WINDOWS}"
    permutations = draw_permutations(draws if enough else 0, count, seed)
    return Pairing(values=stacked[0], gradients=stacked[1], permutations=permutations, note=note)


def _centred(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Scaled by a power of two: energies do not see it, and products neither overflow nor vanish."""
    if not bool(rows.isfinite().all()):
        raise StatesError("states and gradients must be finite, and some are NaN or infinite; drop those tokens first")
    points = center(rows).points
    return for_products(points / power_of_two_scale(points).to(points.dtype))


def _beside(bases: Sequence[Tensor], like: Tensor) -> Float[Tensor, "d q"]:
    return torch.cat([one.to(like) for one in bases], 1)


def _span(bases: Sequence[Tensor], like: Tensor) -> Float[Tensor, "d q"]:
    """An orthonormal basis of what several span together."""
    every = _beside(bases, like).double()
    squares, turn = (one.to(every) for one in torch.linalg.eigh((every.T @ every).cpu()))
    # What two of them have in common leaves zeros, up to the rounding of float32 in the bases: 1e-7, squared.
    kept = squares > 1e-12 * squares[-1]
    return (every @ (turn[:, kept] / squares[kept].sqrt())).to(like)


def _own_products(gradients: Float[Tensor, "w t e"], values: Float[Tensor, "w t r"]) -> Float[Tensor, "w w"]:
    """⟨B_w, B_v⟩ of B_w = A_wᵀX_w, some columns of A at a time; float64."""
    count, rank = len(values), values.shape[2]
    products = torch.zeros(count, count, dtype=torch.float64, device=values.device)
    for some in _columns(gradients, count * rank):
        own = (some.mT @ values).flatten(1)
        products += (own @ own.T).double()
    return products


def _columns(gradients: Float[Tensor, "w t e"], each: int) -> tuple[Tensor, ...]:
    """Some columns at a time, where each makes so many numbers."""
    return gradients.split(max(1, limit_on(TABLE_ELEMENTS, gradients) // each), 2)


def _squares_by_turns(
    gradients: Float[Tensor, "w t e"],
    values: Float[Tensor, "w t r"],
    permutations: Permutations,
    bases: Sequence[Tensor] = (),
) -> Float[Tensor, "k m"]:
    """‖G_π‖² for G_π = Σ_w A_π(w)ᵀX_w; then ‖G_πQ‖² for each of some bases.

    Over the turns k of a ring the sum is a circular correlation, Σ_u A_{u+k}ᵀX_u, and so in frequencies along the ring
    a product for each. About e·r·(2n + w²) multiplications for a ring, transforms included.
    """
    count, length, rank = values.shape
    rings = permutations.rings.to(values.device)
    squares = torch.zeros(1 + len(bases), count, len(rings), dtype=torch.float64, device=values.device)
    if not len(permutations):
        return squares.flatten(1)[:, :0]
    cosines, sines = _waves(count, values)
    # A frequency stands for its negative too; 0, and half the ring where it is even, are their own.
    weights = torch.full((len(cosines), 1), 2 * math.sqrt(count), dtype=values.dtype, device=values.device)
    weights[0] /= 2
    if count % 2 == 0:
        weights[-1] /= 2
    states = values[rings[0]].flatten(1)
    real, imaginary = ((wave @ states).view(-1, length, rank) for wave in (cosines, sines))
    # (a + ib)(c - id) = (ac + bd) + i(bc - ad), with both parts of a factor along one axis.
    first, second = torch.cat([real, imaginary], 1), torch.cat([-imaginary, real], 1)
    back = (weights * cosines).T.contiguous(), (weights * sines).T.contiguous()
    for some in _columns(gradients, 3 * count * rank * len(rings)):
        # Window, ring and column, place in the window.
        turned = some.mT.contiguous()[rings.T].flatten(1)
        both = torch.cat([(wave @ turned).view(len(cosines), -1, length) for wave in (cosines, sines)], 2)
        found = back[0] @ (both @ first).flatten(1)
        found.addmm_(back[1], (both @ second).flatten(1))
        found = found.view(count, len(rings), -1, rank)
        squares[0] += torch.linalg.vector_norm(found, dim=(2, 3)).double().square()
        if bases:
            lengths = (found @ _beside(bases, found)).square().sum(2).double()
            parts = lengths.split([one.shape[1] for one in bases], 2)
            squares[1:] += torch.stack([part.sum(2) for part in parts])
    return squares.mT.flatten(1)[:, permutations.chosen.to(values.device)]


def _waves(count: int, like: Tensor) -> tuple[Float[Tensor, "f w"], Float[Tensor, "f w"]]:
    """cos and sin of 2πfu/w, over √w."""
    places = torch.arange(count)
    turns = torch.outer(places[: count // 2 + 1], places) % count
    angles = turns.double() * (2 * math.pi / count)
    return tuple((wave(angles) / math.sqrt(count)).to(like) for wave in (torch.cos, torch.sin))  # type: ignore[return-value]


def _squares_by_tokens(
    gradients: Float[Tensor, "w t e"], values: Float[Tensor, "w t d"], permutations: Permutations
) -> tuple[Float[Tensor, " m"], Float[Tensor, "w w"]]:
    """‖G_π‖² = Σ_{w,v} ⟨A_π(w) A_π(v)ᵀ, H_w H_vᵀ⟩, from blocks of products of two tokens; and what `_own_products` is.

    Windows that are δ apart on the first ring are, after any turn, δ apart on another: one product for each δ serves
    all turns of all rings. About n²(e + d + m)/2 multiplications for m permutations.
    """
    count, length, _ = values.shape
    blocks, step = gradients.new_empty(count, count, length, length), limit_on(AT_ONCE, values)
    for start in range(0, count, step):
        rows, others = gradients[start : start + step], gradients[start:]
        table = (rows.flatten(0, 1) @ others.flatten(0, 1).T).view(len(rows), length, len(others), length)
        blocks[start : start + step, start:] = table.transpose(1, 2)
        if len(rows) < len(others):
            blocks[start + step :, start : start + step] = table[:, :, step:].permute(2, 0, 3, 1)
    rings, place = permutations.rings.to(values.device), torch.arange(count, device=values.device)
    beside = _products_along(values[rings[0]])
    # Row k, column u: where the window at place u of the first ring is after k turns.
    turned = (place[:, None] + place) % count
    squares = torch.zeros(rings.shape, dtype=torch.float64, device=values.device)
    products = squares.new_zeros(count, count)
    # Pairs that are -δ apart give the same; 0 and half the ring are their own negatives.
    weights = torch.tensor([1 if 2 * apart in (0, count) else 2 for apart in range(len(beside))], device=values.device)
    step = max(1, limit_on(TABLE_ELEMENTS, values) // (2 * rings.numel() * length**2))
    for start in range(0, len(beside), step):
        some = slice(start, start + step)
        further = rings[:, (place + torch.arange(start, start + len(beside[some]))[:, None].to(place)) % count]
        further = further.transpose(0, 1)
        met = blocks[rings, further].flatten(1, 2).flatten(2)
        table = (met @ beside[some].flatten(2).mT).view(-1, len(rings), count, count)
        squares += (weights[some, None, None] * table[:, :, turned, place].double().sum(3)).sum(0)
        own = table[:, 0].diagonal(dim1=1, dim2=2).double()
        products[rings[0], further[:, 0]] = products[further[:, 0], rings[0]] = own
    return squares.flatten()[permutations.chosen.to(values.device)], products


def _products_along(ring: Float[Tensor, "w t d"]) -> Float[Tensor, "f w t t"]:
    """H_u H_vᵀ of each window and of those that follow it, v = u + δ for δ up to half the ring."""
    count, length, _ = ring.shape
    half, step = count // 2 + 1, limit_on(AT_ONCE, ring)
    around, apart = torch.cat([ring, ring[:half]]), torch.arange(half, device=ring.device)[:, None]
    found = ring.new_empty(half, count, length, length)
    for start in range(0, count, step):
        rows = around[start : min(start + step, count)]
        table = rows.flatten(0, 1) @ around[start : start + len(rows) + half - 1].flatten(0, 1).T
        number = torch.arange(len(rows), device=ring.device)
        found[:, start : start + len(rows)] = table.view(len(rows), length, -1, length)[number, :, number + apart]
    return found
