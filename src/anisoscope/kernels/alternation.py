# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""The iterations of seminmf.py as one Triton kernel: a cloud is one program's, start to end.

What PyTorch would start as sixty small kernels an iteration, at the pace of the CPU, needs no start here, and each
cloud ends by itself: only directions that no point uses wait for the host. The arithmetic and the notation are those of
seminmf.py.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels.seminmf import CHECK_EVERY, CODE_STEPS, PROGRESS, SMALLEST, Run, append_errors, damping

# Products of float32 on tensor cores, each as three of 11 bits: the error that is left is that of float32.
PRECISION = tl.constexpr("tf32x3")
# A cloud has one program, so that a large one takes longer than it does with all of a GPU at its service.
MOST_POINTS, MOST_RANK, MOST_WIDTH = 1 << 13, 32, 128
# How a cloud stands: under way (or out of iterations), settled, or with directions that no point uses.
GOING, SETTLED, IDLE = 0, 1, 2


@triton.jit(do_not_specialize=["n", "most", "anyway"])
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
    done,
    states,
    n,
    m,
    r,
    most,
    tolerance,
    anyway,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    EVERY: tl.constexpr,
    MORE: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Iterations of one cloud, in place; `new_codes` is room to work in.

    They end as `_alternate` ends them: where the error no longer changes, where EVERY of them have hardly lowered it,
    and before the next EVERY where a direction is idle (`anyway`: not before the first). An error that stands still
    from one call to the next is seen by the host alone.
    """
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
    number, state = tl.load(done + cloud), tl.load(states + cloud)
    largest = tl.zeros((RANK,), tl.float32)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        there = (code[:, None] < r) & (i[None, :] < n)
        z = tl.load(codes + code[:, None] * n + i[None, :], mask=there, other=0.0)
        largest = tl.maximum(largest, tl.max(z, 1))
    # Of the last iteration and of the one before it, which there is not yet.
    last, earlier = least, -1.0 + 0.0 * least
    while (state == 0) & (number < most):
        idle = (tl.sum(tl.where((code < r) & (largest == 0.0), 1, 0), 0) > 0) & (anyway == 0)
        end = tl.where(idle, number, tl.minimum(number + EVERY, most))
        looked, same_error = least, 0
        for place_in_row in range(number, end):
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
            widest = tl.zeros((RANK,), tl.float32)
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
                widest = tl.maximum(widest, tl.max(z, 1))
                squared = tl.dot(z, tl.trans(z), acc=squared, input_precision=PRECISION)
                products = tl.dot(z, x, acc=products, input_precision=PRECISION)
            # D = D₀ + (M + ρ diag M)⁻¹(ZᵀA - MD₀), by elimination; M is positive definite, and no pivots are chosen.
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
            largest = tl.where(better, widest, largest)
            gathered = tl.where(better, gathered + 1, 0)
            tl.store(seen + cloud * most + place_in_row, least)
            same_error += ((least == last) & (last == earlier)).to(tl.int32)
            earlier = last
            last = least
        settled = (same_error > 0) | ((end - number == EVERY) & (looked - least <= 2 * tolerance * least))
        state = tl.where(idle, 2, tl.where(settled, 1, 0))
        number = end
        anyway = 0
    tl.store(directions + place, here, mask=inside)
    tl.store(last_directions + place, before, mask=inside)
    tl.store(squares + cloud, least)
    tl.store(momentum + cloud, gathered)
    tl.store(done + cloud, number)
    tl.store(states + cloud, state)


def can_iterate(points: Float[Tensor, "s n m"], rank: int) -> bool:
    """Whether a program can take a cloud of these."""
    _, n, m = points.shape
    if not points.is_cuda or points.dtype != torch.float32 or torch.version.cuda is None:
        return False
    modern = torch.cuda.get_device_capability(points.device)[0] >= 8
    return modern and n <= MOST_POINTS and m <= MOST_WIDTH and rank <= MOST_RANK


class Started:
    """Factorisations under way: nothing is waited for before they are asked for."""

    def __init__(self, run: Run, iterations: int, tolerance: float) -> None:
        self.run, self.most, self.tolerance = run, iterations, tolerance
        self.first = run.squares
        # The kernel writes where they stand.
        for name in PROGRESS:
            setattr(run, name, getattr(run, name).clone(memory_format=torch.contiguous_format))
        self.seen = run.squares.new_empty(len(run.codes), iterations)
        self.done, self.states = torch.zeros(2, len(run.codes), dtype=torch.int32, device=run.codes.device)
        self.room, self.points = torch.empty_like(run.codes), run.points.contiguous()
        self._go(anyway=False)

    def finish(self) -> tuple[list[list[float]], list[bool]]:
        """Squared errors of each, and whether it settled; the rest is in the run."""
        while idle := [place for place, state in enumerate(self.states.tolist()) if state == IDLE]:
            self.run.redirect(idle)
            self.states[self.states == IDLE] = GOING
            self._go(anyway=True)
        settled = [state == SETTLED for state in self.states.tolist()]
        squares, counts = [[one] for one in self.first.tolist()], self.done.tolist()
        for place, mine in enumerate(self.seen[:, : max(counts)].tolist()):
            settled[place] |= append_errors(squares[place], mine[: counts[place]])
        return squares, settled

    def _go(self, *, anyway: bool) -> None:
        several, rank, n = self.run.codes.shape
        # Triton would start it on the current device, wherever the points are.
        with torch.cuda.device(self.points.device):
            _iterate[(several,)](
                self.points,
                self.run.codes,
                self.run.last_codes,
                self.room,
                self.run.directions,
                self.run.last_directions,
                self.run.dropped,
                self.run.squares,
                self.run.momentum,
                self.seen,
                self.done,
                self.states,
                n,
                self.points.shape[2],
                rank,
                self.most,
                self.tolerance,
                int(anyway),
                RANK=max(16, triton.next_power_of_2(rank)),
                WIDTH=max(16, triton.next_power_of_2(self.points.shape[2])),
                BLOCK=128 if rank <= 16 else 64,
                STEPS=CODE_STEPS,
                EVERY=CHECK_EVERY,
                MORE=damping(rank, torch.finfo(self.points.dtype).eps),
                SMALLEST=SMALLEST,
                num_warps=8,
                num_stages=1,
            )
