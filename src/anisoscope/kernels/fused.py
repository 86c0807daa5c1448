# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""Triton twins for stacks of clouds on a GPU: every site of a model at once, nothing read back in between.

The arithmetic is that of gram.py and neighbors.py, proof included: low precision screens, exact differences of the
states decide, and what cannot be proven is left to those rooms. Notation as there; s clouds of n points are stacked.
Triton starts a kernel on the current device, which is not always the one where the tensors are.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

# Columns whose two smallest distances are kept together; their place among them fits into the low bits of a distance.
GROUP = tl.constexpr(64)
TILE, DEPTH = 128, 64
NOTHING = tl.constexpr(0x7FFFFFFF)
# Largest relative error of a number rounded to float16 either way, and the sigmas of such errors that the proof allows
# (see neighbors.py).
HALF_ROUNDOFF = 2.0**-10
ROUNDING_SIGMAS = 8.0


@triton.jit
def _describe_rows(points, norms, hashes, n, d, WIDTH: tl.constexpr):
    """‖x‖² of each row, and two sums of its bits that equal rows share."""
    row = tl.program_id(0).to(tl.int64) * n + tl.program_id(1)
    squares = tl.zeros((WIDTH,), tl.float32)
    first = tl.zeros((WIDTH,), tl.int32)
    second = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, d, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        x = tl.load(points + row * d + columns, mask=columns < d, other=0.0).to(tl.float32)
        squares += x * x
        # Adding zero turns -0.0 into 0.0, whose bits differ. Products wrap around.
        bits = (x + 0.0).to(tl.int32, bitcast=True)
        bits = bits ^ (bits >> 15)
        first ^= bits * (columns * 0x3C6EF372 + 0x1E3779B1)
        second ^= (bits ^ (bits >> 7)) * (columns * 0x2545F492 + 0x05EBCA77)
    tl.store(norms + row, tl.sum(squares, 0))
    tl.store(hashes + 2 * row, tl.xor_sum(first, 0))
    tl.store(hashes + 2 * row + 1, tl.xor_sum(second, 0))


@triton.jit
def _sum_columns(
    points, centre, weights, sums, n, d, rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr
):
    """Σᵢ wᵢ (xᵢ - centre) for four sets of weights, over a share of the rows."""
    stack, share = tl.program_id(0).to(tl.int64), tl.program_id(2)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < d
    last = tl.minimum((share + 1) * rows, n)
    c = tl.load(centre + stack * d + columns, mask=inside, other=0.0)
    total_0 = tl.zeros((ROWS, WIDTH), tl.float32)
    total_1 = tl.zeros((ROWS, WIDTH), tl.float32)
    total_2 = tl.zeros((ROWS, WIDTH), tl.float32)
    total_3 = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in tl.range(share * rows, last, ROWS, num_stages=AHEAD):
        index = start + tl.arange(0, ROWS)
        there = index < last
        within = there[:, None] & inside[None, :]
        x = tl.load(points + (stack * n + index[:, None]) * d + columns[None, :], mask=within, other=0.0)
        x = x.to(tl.float32) - c[None, :]
        own = weights + stack * 4 * n + index
        total_0 += x * tl.load(own, mask=there, other=0.0)[:, None]
        total_1 += x * tl.load(own + n, mask=there, other=0.0)[:, None]
        total_2 += x * tl.load(own + 2 * n, mask=there, other=0.0)[:, None]
        total_3 += x * tl.load(own + 3 * n, mask=there, other=0.0)[:, None]
    base = sums + (stack * tl.num_programs(2) + share) * 4 * d + columns
    tl.store(base, tl.sum(total_0, 0), mask=inside)
    tl.store(base + d, tl.sum(total_1, 0), mask=inside)
    tl.store(base + 2 * d, tl.sum(total_2, 0), mask=inside)
    tl.store(base + 3 * d, tl.sum(total_3, 0), mask=inside)


@triton.jit
def _halve_rows(points, centre, halves, squares, scales, peaks, fits, n, d, padded, WIDTH: tl.constexpr):
    """x - centre, divided by its own power of two, in float16; what it was divided by and how well it fits."""
    stack, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = stack * n + i
    total = tl.zeros((WIDTH,), tl.float32)
    largest = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, d, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        x = tl.load(points + row * d + columns, mask=columns < d, other=0.0).to(tl.float32)
        x -= tl.load(centre + stack * d + columns, mask=columns < d, other=0.0)
        total += x * x
        largest = tl.maximum(largest, tl.abs(x))
    peak = tl.max(largest, 0)
    # The exponent alone of a float32 is the power of two below it.
    scale = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(scale > 0, scale, 1.0)
    rounded = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, padded, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        x = tl.load(points + row * d + columns, mask=columns < d, other=0.0).to(tl.float32)
        x -= tl.load(centre + stack * d + columns, mask=columns < d, other=0.0)
        # States in bfloat16 less one centre fall on the same places between two float16 numbers, row after row: rounded
        # to the nearest, their errors would add up in sums over all products. So each is rounded by a draw of its own.
        draw = (i * 0x2C1B3C6D + columns * 0x297A2D39) ^ (columns << 15)
        draw = (draw ^ (draw >> 15)) * 0x5851F42D
        draw = (draw ^ (draw >> 13)) & 0x1FFF
        bits = (x / scale).to(tl.int32, bitcast=True) + draw
        half = tl.where(columns < d, (bits & ~0x1FFF).to(tl.float32, bitcast=True), 0.0).to(tl.float16)
        rounded += half.to(tl.float32) * half.to(tl.float32)
        tl.store(halves + row * padded + columns, half, mask=columns < padded)
    square = tl.sum(total, 0)
    tl.store(squares + row, square)
    tl.store(scales + row, scale)
    tl.store(peaks + row, peak)
    # The square of this brings a rounded row back to its own length.
    tl.store(fits + row, square / tl.maximum(tl.sum(rounded, 0), 1e-30))


@triton.jit
def _two_smallest(keys, AXIS: tl.constexpr):
    first = tl.min(keys, AXIS)
    rest = tl.where(keys == tl.expand_dims(first, AXIS), NOTHING, keys)
    return first, tl.min(rest, AXIS)


@triton.jit
def _multiply_tiles(
    halves,
    squares,
    scales,
    visible,
    weights,
    keys,
    sums,
    n,
    padded,
    groups,
    P: tl.constexpr,
    W: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of X̄X̄ᵀ: the two smallest distances of each group, both ways, and the weighted sum of squares."""
    tiles = tl.cdiv(n, TILE)
    across, down = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    stack = tl.program_id(1).to(tl.int64)
    if across < down:
        return
    i, j = down * TILE + tl.arange(0, TILE), across * TILE + tl.arange(0, TILE)
    k = tl.arange(0, DEPTH)
    base = halves + stack * n * padded
    # Rows beyond the last are read again from the first: they are invisible and weigh nothing.
    left = base + (i % n)[:, None] * padded + k[None, :]
    right = base + (j % n)[None, :] * padded + k[:, None]
    product = tl.zeros((TILE, TILE), tl.float32)
    for _ in range(0, padded, DEPTH):
        product = tl.dot(tl.load(left), tl.load(right), product)
        left += DEPTH
        right += DEPTH
    row, column = stack * n + i, stack * n + j
    here, there = i < n, j < n
    inner = product * product
    for w in tl.static_range(W):
        by_column = tl.load(weights + (stack * W + w) * n + j, mask=there, other=0.0)
        by_row = tl.load(weights + (stack * W + w) * n + i, mask=here, other=0.0)
        total = tl.sum(tl.sum(inner * by_column[None, :], 1) * by_row, 0)
        tl.store(
            sums + (stack * tl.num_programs(0) + tl.program_id(0)) * W + w, total * tl.where(across > down, 2.0, 1.0)
        )
    distance = tl.load(squares + row, mask=here, other=0.0)[:, None] + tl.load(squares + column, mask=there, other=0.0)
    si, sj = tl.load(scales + row, mask=here, other=0.0), tl.load(scales + column, mask=there, other=0.0)
    distance = tl.maximum(distance - 2.0 * si[:, None] * sj[None, :] * product, 0.0)
    bits = distance.to(tl.int32, bitcast=True) & ~(GROUP - 1)
    bits = tl.where(i[:, None] == j[None, :], NOTHING, bits)
    seen_i = tl.load(visible + row, mask=here, other=0)
    seen_j = tl.load(visible + column, mask=there, other=0)
    parts: tl.constexpr = TILE // GROUP
    block = tl.arange(0, parts)
    for p in tl.static_range(P):
        chosen = tl.where(((seen_j >> p) & 1)[None, :] == 1, bits | (j % GROUP)[None, :], NOTHING)
        first, second = _two_smallest(tl.reshape(chosen, (TILE, parts, GROUP)), 2)
        slots = ((stack * P + p) * n + i[:, None]) * (2 * groups) + 2 * (across * parts + block[None, :])
        inside = here[:, None] & (across * parts + block < groups)[None, :]
        tl.store(keys + slots, first, mask=inside)
        tl.store(keys + slots + 1, second, mask=inside)
        if across > down:
            mirrored = tl.where(((seen_i >> p) & 1)[:, None] == 1, bits | (i % GROUP)[:, None], NOTHING)
            nearest, next_one = _two_smallest(tl.reshape(mirrored, (parts, GROUP, TILE)), 1)
            where = ((stack * P + p) * n + j[None, :]) * (2 * groups) + 2 * (down * parts + block[:, None])
            reached = there[None, :] & (down * parts + block < groups)[:, None]
            tl.store(keys + where, nearest, mask=reached)
            tl.store(keys + where + 1, next_one, mask=reached)


@triton.jit
def _square_distance(one, other, d, WIDTH: tl.constexpr):
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, d, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        x = tl.load(one + columns, mask=columns < d, other=0.0).to(tl.float32)
        x -= tl.load(other + columns, mask=columns < d, other=0.0).to(tl.float32)
        total += x * x
    return tl.sum(total, 0)


@triton.jit
def _refine_rows(
    points,
    squares,
    gammas,
    visible,
    keys,
    found,
    n,
    d,
    groups,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The two smallest squared distances of a row, exactly: candidates are taken until no other can be nearer."""
    i, p, stack = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = stack * n + i
    place = (stack * P + p) * n + i
    if ((tl.load(visible + row) >> p) & 1) == 0:
        return
    slots = tl.arange(0, KEYS)
    left = tl.load(keys + place * (2 * groups) + slots, mask=slots < 2 * groups, other=NOTHING)
    norm = tl.sqrt(tl.load(squares + row))
    gamma = tl.load(gammas + row)
    own = points + row * d
    nearest = float("inf")
    second = float("inf")
    best = -1
    runner = -1
    key = tl.min(left, 0)
    value = (key & ~(GROUP - 1)).to(tl.float32, bitcast=True)
    limit = float("inf")
    while (key != NOTHING) & (value < limit):
        slot = tl.argmin(left, 0)
        start = (slot // 2) * GROUP
        # The second of a group hides the others of that group: all of them are looked at.
        many = slot % 2 == 1
        begin = tl.where(many, 0, key & (GROUP - 1))
        end = tl.where(many, GROUP, begin + 1)
        for member in range(begin, end):
            j = start + member
            seen = (tl.load(visible + stack * n + j, mask=j < n, other=0) >> p) & 1
            if (seen == 1) & (j != i) & (j != best) & (j != runner):
                square = _square_distance(own, points + (stack * n + j) * d, d, WIDTH)
                if square < nearest:
                    second = nearest
                    runner = best
                    nearest = square
                    best = j
                elif square < second:
                    second = square
                    runner = j
        left = tl.where(slots == slot, NOTHING, left)
        key = tl.min(left, 0)
        value = (key & ~(GROUP - 1)).to(tl.float32, bitcast=True)
        radius = tl.sqrt(second)
        limit = second + 2 * gamma * norm * (norm + radius) + 4e-6 * (2 * norm + radius) * (2 * norm + radius)
    tl.store(found + 2 * place, nearest)
    tl.store(found + 2 * place + 1, second)


@triton.jit
def _apply_covariance(
    points,
    which,
    centre,
    vectors,
    shifts,
    weights,
    images,
    along,
    n,
    d,
    rows,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Σᵢ tᵢ (xᵢ - centre) with tᵢ = wᵢ ((xᵢ - centre)·v - shift), for one or two pairs of w and v; and the tᵢ."""
    place, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stack = tl.load(which + place).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < d
    last = tl.minimum((share + 1) * rows, n)
    c = tl.load(centre + stack * d + columns, mask=inside, other=0.0)
    v = tl.load(vectors + place * W * d + columns, mask=inside, other=0.0)
    v_shift = tl.load(shifts + place * W)
    u = tl.load(vectors + (place * W + W - 1) * d + columns, mask=inside, other=0.0)
    u_shift = tl.load(shifts + place * W + W - 1)
    v_image = tl.zeros((WIDTH,), tl.float32)
    u_image = tl.zeros((WIDTH,), tl.float32)
    for start in tl.range(share * rows, last, ROWS, num_stages=AHEAD):
        index = start + tl.arange(0, ROWS)
        there = index < last
        within = there[:, None] & inside[None, :]
        x = tl.load(points + (stack * n + index[:, None]) * d + columns[None, :], mask=within, other=0.0)
        x = tl.where(within, x.to(tl.float32) - c[None, :], 0.0)
        t = tl.sum(x * v[None, :], 1) - v_shift
        t *= tl.load(weights + stack * W * n + index, mask=there, other=0.0)
        tl.store(along + place * W * n + index, t, mask=there)
        v_image += tl.sum(x * t[:, None], 0)
        if W == 2:
            t = tl.sum(x * u[None, :], 1) - u_shift
            t *= tl.load(weights + (stack * W + 1) * n + index, mask=there, other=0.0)
            tl.store(along + (place * W + 1) * n + index, t, mask=there)
            u_image += tl.sum(x * t[:, None], 0)
    base = images + (place * tl.num_programs(1) + share) * W * d + columns
    tl.store(base, v_image, mask=inside)
    if W == 2:
        tl.store(base + d, u_image, mask=inside)


@triton.jit
def _lose_tokens(logits, targets, losses, vocabulary, stride, WIDTH: tl.constexpr):
    """log Σ exp - the logit of the target, one token a program."""
    token = tl.program_id(0).to(tl.int64)
    largest = tl.full((WIDTH,), float("-inf"), tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, vocabulary, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        x = tl.load(logits + token * stride + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        bigger = tl.maximum(largest, x)
        # Lanes that have seen nothing yet: infinity less infinity is no number.
        level = tl.where(bigger == float("-inf"), 0.0, bigger)
        total = total * tl.exp(largest - level) + tl.exp(x - level)
        largest = bigger
    top = tl.max(largest, 0)
    normaliser = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    target = tl.load(logits + token * stride + tl.load(targets + token)).to(tl.float32)
    tl.store(losses + token, normaliser - target)


@dataclass(frozen=True, kw_only=True)
class Halves:
    """Rows around a centre in float16, each divided by a power of two of its own."""

    rows: Float[Tensor, "s n _"]
    squares: Float[Tensor, "s n"]
    """‖x - centre‖²."""
    scales: Float[Tensor, "s n"]
    fits: Float[Tensor, "s n"]
    """Squared norm over that of the rounded row: a row times its root has the length it should have."""
    gammas: Float[Tensor, "s n"]
    """What rounding does to a product with this row, relative to the two norms."""


def describe_rows(points: Float[Tensor, "s n d"]) -> tuple[Float[Tensor, "s n"], Int[Tensor, "s n"]]:
    """‖x‖² of every row, and 64 bits that equal rows share (and others with the odds of 2⁻⁶⁴ a pair)."""
    s, n, d = points.shape
    norms, hashes = points.new_empty(s, n, dtype=torch.float32), points.new_empty(s, n, 2, dtype=torch.int32)
    with torch.cuda.device(points.device):
        _describe_rows[(s, n)](points, norms, hashes, n, d, WIDTH=_width(d), num_warps=4)
    return norms, hashes.view(torch.int64)[..., 0]


def sum_columns(
    points: Float[Tensor, "s n d"], centre: Float[Tensor, "s d"], weights: Float[Tensor, "s 4 n"]
) -> Float[Tensor, "s 4 d"]:
    """Σᵢ wᵢ (xᵢ - centre) for four sets of weights, in float64."""
    s, n, d = points.shape
    shares, width = max(1, min(16, n // 256)), 128
    sums = torch.empty(s, shares, 4, d, device=points.device)
    grid = (s, triton.cdiv(d, width), shares)
    with torch.cuda.device(points.device):
        _sum_columns[grid](
            points, centre, weights, sums, n, d, triton.cdiv(n, shares), ROWS=32, WIDTH=width, AHEAD=3, num_warps=4
        )
    return sums.sum(1, dtype=torch.float64)


def halve_rows(points: Float[Tensor, "s n d"], centre: Float[Tensor, "s d"]) -> Halves:
    """The rows around a centre in float16."""
    s, n, d = points.shape
    padded = triton.cdiv(d, DEPTH) * DEPTH
    rows = points.new_empty(s, n, padded, dtype=torch.float16)
    squares, scales, peaks, fits = points.new_empty(4, s, n, dtype=torch.float32)
    with torch.cuda.device(points.device):
        _halve_rows[(s, n)](
            points, centre, rows, squares, scales, peaks, fits, n, d, padded, WIDTH=_width(d), num_warps=4
        )
    # Rounding errors of d coordinates: each at most u|x|, together 8u · max|x| ‖y‖ but for odds of 10⁻¹³, at worst 2u.
    share = (ROUNDING_SIGMAS * peaks / squares.sqrt().clamp_min(1e-30)).clamp_max(2.0)
    gammas = 1.25 * (HALF_ROUNDOFF * share + (ROUNDING_SIGMAS * math.sqrt(d) + 8) * 2.0**-24 + math.sqrt(d) * 2.0**-24)
    return Halves(rows=rows, squares=squares, scales=scales, fits=fits, gammas=gammas)


def multiply_tiles(
    halves: Halves, visible: Int[Tensor, "s n"], populations: int, weights: Float[Tensor, "s w n"]
) -> tuple[Int[Tensor, "s p n _"], Float[Tensor, "s w"]]:
    """All products of the rows: keys of the nearest in each group of columns, and Σᵢⱼ wᵢwⱼ (xᵢ·xⱼ)² in float64."""
    (s, n, padded), w = halves.rows.shape, weights.shape[1]
    tiles, groups = triton.cdiv(n, TILE), triton.cdiv(n, GROUP.value)
    keys = torch.empty(s, populations, n, 2 * groups, dtype=torch.int32, device=visible.device)
    sums = torch.zeros(s, tiles * tiles, w, device=visible.device)
    scaled = (weights * halves.fits[:, None]).contiguous()
    with torch.cuda.device(halves.rows.device):
        _multiply_tiles[(tiles * tiles, s)](
            halves.rows,
            halves.squares,
            halves.scales,
            visible,
            scaled,
            keys,
            sums,
            n,
            padded,
            groups,
            P=populations,
            W=w,
            TILE=TILE,
            DEPTH=DEPTH,
            num_warps=8,
            num_stages=4,
        )
    return keys, sums.sum(1, dtype=torch.float64)


def refine_rows(
    points: Float[Tensor, "s n d"], halves: Halves, visible: Int[Tensor, "s n"], keys: Int[Tensor, "s p n _"]
) -> Float[Tensor, "s p n 2"]:
    """Squared distances to the two nearest others, exactly; NaN for points that are not visible."""
    (s, n, d), populations, slots = points.shape, keys.shape[1], keys.shape[3]
    found = torch.full((s, populations, n, 2), torch.nan, device=points.device)
    with torch.cuda.device(points.device):
        _refine_rows[(n, populations, s)](
            points,
            halves.squares,
            halves.gammas,
            visible,
            keys,
            found,
            n,
            d,
            slots // 2,
            P=populations,
            KEYS=triton.next_power_of_2(slots),
            **_refine_plan(d),
        )
    return found


def apply_covariance(
    points: Float[Tensor, "s n d"],
    which: Int[Tensor, " c"],
    centre: Float[Tensor, "s d"],
    vectors: Float[Tensor, "c w d"],
    shifts: Float[Tensor, "c w"],
    weights: Float[Tensor, "s w n"],
) -> tuple[Float[Tensor, "c w d"], Float[Tensor, "c w n"]]:
    """Σᵢ tᵢ (xᵢ - centre), in float64, and tᵢ = wᵢ ((xᵢ - centre)·v - shift), for some of the clouds."""
    (_, n, d), (c, w, _) = points.shape, vectors.shape
    width = triton.next_power_of_2(d)
    shares = max(1, min(64, n // 64))
    images = torch.empty(c, shares, w, d, device=points.device)
    along = torch.empty(c, w, n, device=points.device)
    with torch.cuda.device(points.device):
        _apply_covariance[(c, shares)](
            points,
            which,
            centre,
            vectors,
            shifts,
            weights,
            images,
            along,
            n,
            d,
            triton.cdiv(n, shares),
            W=w,
            WIDTH=width,
            **_apply_plan(width),
        )
    return images.sum(1, dtype=torch.float64), along


def _refine_plan(d: int) -> dict[str, int]:
    return {"WIDTH": 1024 if d > 2048 else 512, "num_warps": 4 if d > 2048 else 2 if d > 1024 else 1}


def _apply_plan(width: int) -> dict[str, int]:
    return {"ROWS": max(1, min(8, 8192 // width)), "AHEAD": 3, "num_warps": 4}


def lose_tokens(logits: Float[Tensor, "n v"], targets: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Cross entropy in nats of each token, in float32, without a float32 copy of the logits."""
    losses = torch.empty(len(targets), device=logits.device)
    width = min(4096, triton.next_power_of_2(logits.shape[1]))
    with torch.cuda.device(logits.device):
        _lose_tokens[(len(targets),)](
            logits, targets, losses, logits.shape[1], logits.stride(0), WIDTH=width, num_warps=8
        )
    return losses


def _width(d: int) -> int:
    return min(2048, triton.next_power_of_2(d))
