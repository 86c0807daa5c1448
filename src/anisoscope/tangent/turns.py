"""Gradients with windows paired anew, many at once: the windows stand on rings, and a pairing is a turn of one of them.

    G_π = Σ_u A_{u+k}ᵀ X_u        for the turn π by k places, u along a ring

Two ways to the same squares: in frequencies along a ring a correlation is a product; or from products of two tokens,
which serve all turns of all rings. Notation as in windows.py; X (w, t, r) are the states, or their coordinates.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.kernels.gram import limit_on
from anisoscope.tangent.inference import Permutations

# Numbers held at one time by a table of products: caches hold the first, a GPU is busy with the second.
TABLE_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 27}
# Windows whose products with others are made at once: the CPU does not make those twice that are their own mirrors.
AT_ONCE = {"cpu": 8, "cuda": 1 << 20}


def side_by_side(bases: Float[Tensor, "s k d r"]) -> Float[Tensor, "s d q"]:
    """All of a place in one matrix."""
    return bases.transpose(1, 2).flatten(2)


def own_products(gradients: Float[Tensor, "s w t e"], values: Float[Tensor, "s w t r"]) -> Float[Tensor, "s w w"]:
    """⟨B_w, B_v⟩ of B_w = A_wᵀX_w, some columns of A at a time; float64."""
    several, count, _, rank = values.shape
    products = torch.zeros(several, count, count, dtype=torch.float64, device=values.device)
    for some in columns_of(gradients, several * count * rank):
        own = (some.mT @ values).flatten(2)
        products += (own @ own.mT).double()
    return products


def columns_of(gradients: Float[Tensor, "s w t e"], each: int) -> tuple[Tensor, ...]:
    """Some columns at a time, where each makes so many numbers."""
    return gradients.split(max(1, limit_on(TABLE_ELEMENTS, gradients) // each), 3)


def squares_by_turns(
    gradients: Float[Tensor, "s w t e"],
    values: Float[Tensor, "s w t r"],
    permutations: Permutations,
    bases: Float[Tensor, "s k p q"] | None = None,
) -> Float[Tensor, "s _ m"]:
    """‖G_π‖² for G_π = Σ_w A_π(w)ᵀX_w; then ‖G_πQ‖² for each of some bases, of the first p columns of X.

    Over the turns k of a ring the sum is a circular correlation, Σ_u A_{u+k}ᵀX_u, and so in frequencies along the ring
    a product for each. About e·r·(2n + w²) multiplications for a ring, transforms included.
    """
    several, count, _, rank = values.shape
    bases = values.new_empty(several, 0, 0, 0) if bases is None else bases
    each = 3 * count * rank * len(permutations.rings) * gradients.shape[3]
    some = max(1, limit_on(TABLE_ELEMENTS, values) // each)
    parts = zip(gradients.split(some), values.split(some), bases.split(some), strict=True)
    return torch.cat([_turn(*part, permutations) for part in parts])


def _turn(gradients: Tensor, values: Tensor, bases: Tensor, permutations: Permutations) -> Float[Tensor, "s _ m"]:
    several, count = values.shape[:2]
    rings, size = permutations.rings, bases.shape[1]
    squares = torch.zeros(several, 1 + size, count, len(rings), dtype=torch.float64, device=values.device)
    if not len(permutations):
        return squares.flatten(2)[:, :, :0]
    for found in turned_gradients(gradients, values, rings[0], rings):
        squares[:, 0] += torch.linalg.vector_norm(found, dim=(3, 4)).double().square()
        if size:
            inside = found[..., : bases.shape[2]].flatten(1, 3) @ side_by_side(bases)
            lengths = inside.view(*found.shape[:4], -1).square().sum(3).double()
            squares[:, 1:] += lengths.unflatten(3, (size, -1)).sum(4).movedim(3, 1)
    return squares.mT.flatten(2)[:, :, permutations.chosen]


def turned_gradients(
    gradients: Float[Tensor, "s w t e"], values: Float[Tensor, "s w t r"], first: Int[Tensor, " w"], rings: Tensor
) -> Iterator[Float[Tensor, "s w j c r"]]:
    """G_π for all turns of some rings, whose windows meet those of the first; some of its rows at a time."""
    several, count, length, rank = values.shape
    cosines, sines = _waves(count, values.dtype, values.device)
    # A frequency stands for its negative too; 0, and half the ring where it is even, are their own.
    weights = torch.full((len(cosines), 1), 2 * math.sqrt(count), dtype=values.dtype, device=values.device)
    weights[0] /= 2
    if count % 2 == 0:
        weights[-1] /= 2
    states = values[:, first].flatten(2)
    real, imaginary = ((wave @ states).view(several, -1, length, rank) for wave in (cosines, sines))
    # (a + ib)(c - id) = (ac + bd) + i(bc - ad), with both parts of a factor along one axis.
    del states
    ahead, aside = torch.cat([real, imaginary], 2), torch.cat([-imaginary, real], 2)
    del real, imaginary
    back = (weights * cosines).T.contiguous(), (weights * sines).T.contiguous()
    for some in columns_of(gradients, 3 * several * count * rank * len(rings)):
        # Window, ring and column, place in the window.
        turned = some.mT.contiguous()[:, rings.T].flatten(2)
        both = torch.cat([(wave @ turned).view(several, len(cosines), -1, length) for wave in (cosines, sines)], 3)
        found = back[0] @ (both @ ahead).flatten(2)
        found += back[1] @ (both @ aside).flatten(2)
        yield found.view(several, count, len(rings), -1, rank)


@lru_cache(maxsize=4)
def _waves(count: int, dtype: torch.dtype, device: torch.device) -> tuple[Float[Tensor, "f w"], Float[Tensor, "f w"]]:
    """cos and sin of 2πfu/w, over √w."""
    places = torch.arange(count)
    turns = torch.outer(places[: count // 2 + 1], places) % count
    angles = turns.double() * (2 * math.pi / count)
    return tuple((wave(angles) / math.sqrt(count)).to(device, dtype) for wave in (torch.cos, torch.sin))  # type: ignore[return-value]


def squares_by_tokens(
    gradients: Float[Tensor, "s w t e"], values: Float[Tensor, "s w t d"], permutations: Permutations
) -> tuple[Float[Tensor, "s m"], Float[Tensor, "s w w"]]:
    """‖G_π‖² = Σ_{w,v} ⟨A_π(w) A_π(v)ᵀ, H_w H_vᵀ⟩, from blocks of products of two tokens; and what `own_products` is.

    Windows that are δ apart on the first ring are, after any turn, δ apart on another: one product for each δ serves
    all turns of all rings. About n²(e + d + m)/2 multiplications for m permutations.
    """
    tokens = values.shape[1] * values.shape[2]
    some = max(1, limit_on(TABLE_ELEMENTS, values) // tokens**2)
    parts = zip(gradients.split(some), values.split(some), strict=True)
    squares, products = zip(*(_meet(*part, permutations) for part in parts), strict=True)
    return torch.cat(squares), torch.cat(products)


def _meet(gradients: Tensor, values: Tensor, permutations: Permutations) -> tuple[Tensor, Tensor]:
    several, count, length, _ = values.shape
    blocks, step = gradients.new_empty(several, count, count, length, length), limit_on(AT_ONCE, values)
    for start in range(0, count, step):
        rows, others = gradients[:, start : start + step], gradients[:, start:]
        table = rows.flatten(1, 2) @ others.flatten(1, 2).mT
        table = table.view(several, -1, length, others.shape[1], length)
        blocks[:, start : start + step, start:] = table.transpose(2, 3)
        if start + step < count:
            blocks[:, start + step :, start : start + step] = table[:, :, :, step:].permute(0, 3, 1, 4, 2)
    rings, place = permutations.rings, torch.arange(count, device=values.device)
    beside = _products_along(values[:, rings[0]]).flatten(3)
    # Row k, column u: where the window at place u of the first ring is after k turns.
    turned = (place[:, None] + place) % count
    squares = torch.zeros(several, *rings.shape, dtype=torch.float64, device=values.device)
    products, half = squares.new_zeros(several, count, count), beside.shape[1]
    # Pairs that are -δ apart give the same; 0 and half the ring are their own negatives.
    weights = torch.where(2 * place[:half] % count == 0, 1, 2)
    step = max(1, limit_on(TABLE_ELEMENTS, values) // (2 * several * rings.numel() * length**2))
    for start in range(0, half, step):
        some = slice(start, min(start + step, half))
        apart = torch.arange(some.start, some.stop, device=values.device)[:, None]
        further = rings[:, (place + apart) % count].transpose(0, 1)
        met = blocks[:, rings, further].flatten(2, 3).flatten(3)
        table = (met @ beside[:, some].mT).view(several, -1, len(rings), count, count)
        squares += (weights[some, None, None] * table[..., turned, place].double().sum(4)).sum(1)
        own = table[:, :, 0].diagonal(dim1=2, dim2=3).double()
        products[:, rings[0], further[:, 0]] = products[:, further[:, 0], rings[0]] = own
    return squares.flatten(1)[:, permutations.chosen], products


def _products_along(ring: Float[Tensor, "s w t d"]) -> Float[Tensor, "s f w t t"]:
    """H_u H_vᵀ of each window and of those that follow it, v = u + δ for δ up to half the ring."""
    several, count, length, _ = ring.shape
    half, step = count // 2 + 1, limit_on(AT_ONCE, ring)
    around, apart = torch.cat([ring, ring[:, :half]], 1), torch.arange(half, device=ring.device)[:, None]
    found = ring.new_empty(several, half, count, length, length)
    for start in range(0, count, step):
        rows = around[:, start : min(start + step, count)]
        number = torch.arange(rows.shape[1], device=ring.device)
        table = rows.flatten(1, 2) @ around[:, start : start + len(number) + half - 1].flatten(1, 2).mT
        table = table.view(several, len(number), length, -1, length)
        found[:, :, start : start + len(number)] = table[:, number, :, number + apart].movedim(2, 0)
    return found
