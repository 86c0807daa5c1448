# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""The iterations of seminmf.py as one Triton kernel: a cloud is one program's, start to end.

What PyTorch would start as sixty small kernels an iteration, at the pace of the CPU, needs no start here, and clouds do
not wait for each other. The arithmetic and the notation are those of seminmf.py.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels.seminmf import CODE_STEPS, SMALLEST, damping

# Products of float32 on tensor cores, each as three of 11 bits: the error that is left is that of float32.
PRECISION = tl.constexpr("tf32x3")
# A cloud has one program, so that a large one takes longer than it does with all of a GPU at its service.
MOST_POINTS, MOST_RANK, MOST_WIDTH = 1 << 13, 32, 128


@triton.jit(do_not_specialize=["n", "count"])
def _iterate(
    points,
    codes,
    last_codes,
    new_codes,
    directions,
    last_directions,
    dropped,
    squares,
    momentum,
    seen,
    n,
    m,
    r,
    count,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    MORE: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Iterations of one cloud, in place; `new_codes` is room to work in."""
    cloud = tl.program_id(0).to(tl.int64)
    code, other, column = tl.arange(0, RANK), tl.arange(0, RANK), tl.arange(0, WIDTH)
    points += cloud * n * m
    codes += cloud * r * n
    last_codes += cloud * r * n
    new_codes += cloud * r * n
    inside = (code[:, None] < r) & (column[None, :] < m)
    place = cloud * r * m + code[:, None] * m + column[None, :]
    here = tl.load(directions + place, mask=inside, other=0.0)
    before = tl.load(last_directions + place, mask=inside, other=0.0)
    same = code[:, None] == other[None, :]
    identity = tl.where(same, 1.0, 0.0).to(tl.float64)
    outside, least = tl.load(dropped + cloud), tl.load(squares + cloud)
    gathered = tl.load(momentum + cloud)
    for number in range(count):
        weight = 1.0 + gathered.to(tl.float64) / (gathered + 3).to(tl.float64)
        ahead = before + weight * (here - before)
        # A gradient step: W = I - SG and b = SDa.
        gram = tl.dot(ahead, tl.trans(ahead), out_dtype=tl.float64)
        inverse = 1.0 / tl.sqrt(tl.maximum(tl.sum(tl.where(same, gram, 0.0), 1), SMALLEST))
        power = gram * inverse[:, None]
        power = power * tl.sum(tl.where(same, inverse[:, None], 0.0), 0)[None, :]
        for _ in tl.static_range(4):
            power = tl.dot(power, power, out_dtype=tl.float64)
        bound = tl.sum(tl.sum(power * power, 1), 0)
        for _ in tl.static_range(5):
            bound = tl.sqrt(bound)
        sizes = inverse * inverse / tl.maximum(bound, 1.0)
        shrink = (identity - sizes[:, None] * gram).to(tl.float32)
        scaled = (sizes[:, None] * ahead).to(tl.float32)
        weight_32 = weight.to(tl.float32)
        squared = tl.zeros((RANK, RANK), tl.float32)
        products = tl.zeros((RANK, WIDTH), tl.float32)
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            there = (code[:, None] < r) & (i[None, :] < n)
            at = code[:, None] * n + i[None, :]
            x = tl.load(
                points + i[:, None] * m + column[None, :], mask=(i[:, None] < n) & (column[None, :] < m), other=0.0
            )
            z = tl.load(codes + at, mask=there, other=0.0)
            previous = tl.load(last_codes + at, mask=there, other=0.0)
            z = previous + weight_32 * (z - previous)
            shift = tl.dot(scaled, tl.trans(x), input_precision=PRECISION)
            previous = z
            for step in tl.static_range(STEPS):
                forward = z
                if step >= 2:
                    forward = previous + (1 + (step - 1) / (step + 2)) * (z - previous)
                previous = z
                z = tl.maximum(tl.dot(shrink, forward, acc=shift, input_precision=PRECISION), 0.0)
            tl.store(new_codes + at, z, mask=there)
            squared = tl.dot(z, tl.trans(z), acc=squared, input_precision=PRECISION)
            products = tl.dot(z, x, acc=products, input_precision=PRECISION)
        # D = D₀ + (M + ρ diag M)⁻¹(ZᵀA - MD₀), by elimination; without a choice of pivots, as M is positive definite.
        exact = squared.to(tl.float64)
        rest = products.to(tl.float64) - tl.dot(exact, ahead, out_dtype=tl.float64)
        system = exact * (1.0 + MORE * identity) + SMALLEST * identity
        for k in range(RANK):
            mine = code == k
            row = tl.sum(tl.where(mine[:, None], system, 0.0), 0)
            right = tl.sum(tl.where(mine[:, None], rest, 0.0), 0)
            factor = tl.sum(tl.where(other[None, :] == k, system, 0.0), 1)
            factor = tl.where(mine, 0.0, factor / tl.sum(tl.where(mine, factor, 0.0), 0))
            system -= factor[:, None] * row[None, :]
            rest -= factor[:, None] * right[None, :]
        found = ahead + rest / tl.sum(tl.where(same, system, 0.0), 1)[:, None]
        found_32 = found.to(tl.float32)
        error = outside
        tl.debug_barrier()
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            there = (code[:, None] < r) & (i[None, :] < n)
            x = tl.load(
                points + i[:, None] * m + column[None, :], mask=(i[:, None] < n) & (column[None, :] < m), other=0.0
            )
            z = tl.load(new_codes + code[:, None] * n + i[None, :], mask=there, other=0.0)
            left = x - tl.dot(tl.trans(z), found_32, input_precision=PRECISION)
            error += tl.sum(tl.sum(left * left, 1).to(tl.float64), 0)
        better = error <= least
        if better:
            for start in range(0, n, BLOCK):
                i = start + tl.arange(0, BLOCK)
                there = (code[:, None] < r) & (i[None, :] < n)
                at = code[:, None] * n + i[None, :]
                tl.store(last_codes + at, tl.load(codes + at, mask=there), mask=there)
                tl.store(codes + at, tl.load(new_codes + at, mask=there), mask=there)
        tl.debug_barrier()
        before = tl.where(better, here, before)
        here = tl.where(better, found, here)
        least = tl.where(better, error, least)
        gathered = tl.where(better, gathered + 1, 0)
        tl.store(seen + cloud * count + number, least)
    tl.store(directions + place, here, mask=inside)
    tl.store(last_directions + place, before, mask=inside)
    tl.store(squares + cloud, least)
    tl.store(momentum + cloud, gathered)


def can_iterate(points: Float[Tensor, "s n m"], rank: int) -> bool:
    """Whether a program can take a cloud of these."""
    _, n, m = points.shape
    if not points.is_cuda or points.dtype != torch.float32 or torch.version.cuda is None:
        return False
    modern = torch.cuda.get_device_capability(points.device)[0] >= 8
    return modern and n <= MOST_POINTS and m <= MOST_WIDTH and rank <= MOST_RANK


def iterate(
    points: Float[Tensor, "s n m"], dropped: Float[Tensor, " s"], progress: Sequence[Tensor], count: int
) -> tuple[Float[Tensor, "s t"], list[Tensor]]:
    """So many iterations: squared errors after each, and what they made of the progress so far."""
    made = [one.clone(memory_format=torch.contiguous_format) for one in progress]
    codes, last_codes, directions, last_directions, squares, momentum = made
    several, rank, n = codes.shape
    seen = squares.new_empty(several, count)
    # Triton would start it on the current device, wherever the points are.
    with torch.cuda.device(points.device):
        _iterate[(several,)](
            points.contiguous(),
            codes,
            last_codes,
            torch.empty_like(codes),
            directions,
            last_directions,
            dropped,
            squares,
            momentum,
            seen,
            n,
            points.shape[2],
            rank,
            count,
            RANK=max(16, triton.next_power_of_2(rank)),
            WIDTH=max(16, triton.next_power_of_2(points.shape[2])),
            BLOCK=128 if rank <= 16 else 64,
            STEPS=CODE_STEPS,
            MORE=damping(rank, torch.finfo(codes.dtype).eps),
            SMALLEST=SMALLEST,
            num_warps=8,
            num_stages=1,
        )
    return seen, made
