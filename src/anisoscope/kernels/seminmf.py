"""Semi-non-negative factorisation: points as non-negative mixtures of free directions.

    min ‖A - ZD‖²_F  subject to  Z ≥ 0

Notation: A (n, d) holds the points as rows, Z (n, r) the codes, D (r, d) the directions, σ₁ ≥ σ₂ ≥ ... the singular
values of A, Q (d, m) an orthonormal basis of about its leading right singular vectors and B = AQ.

The least error lies between the truncation errors (Σ_{k>r} σ²)^½ and (Σ_{k≥r} σ²)^½ of the singular value
decomposition. It is the first where the rows of the truncation lie in an open half-space (Gillis and Kumar 2015), and
never above the second, since the corners of a simplex of r - 1 dimensions reach every point of them. A cone that holds
the points may be widened: the error singles out the span of D at best, never D.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anisoscope.errors import SpecError, StatesError
from anisoscope.kernels import has_triton
from anisoscope.kernels.gram import for_products, limit_on, power_of_two, squared_norms, working_dtype

# m / r, and products with AᵀA that turn random vectors towards Q. The error is within 2e-5 of that without compression
# on spectra that decay like 1/k and within 3e-4 on isotropic clouds, where half the passes leave 2e-3.
BASIS_WIDTH = 4
BASIS_PASSES = 6
# Steps on Z for each D: with 3 the same error takes longer, with 8 it comes no sooner.
CODE_STEPS = 5
# Iterations from one look at the progress to the next.
CHECK_EVERY = 10
# A step that moves no code by more than this share of its point's largest ends `encode`. Directions that are nearly
# dependent multiply the error that it leaves, and at last run into the limit of steps.
ENCODE_TOLERANCE = 1e-8
ENCODE_STEPS = 20_000
# Numbers of residuals that are held at one time where only their norms are wanted.
RESIDUAL_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 28}
# Far below the square of any code or length.
SMALLEST = 1e-250
# What iterations change of a `Run`.
PROGRESS = ("codes", "last_codes", "directions", "last_directions", "squares", "momentum")


@dataclass(frozen=True, kw_only=True)
class SemiNMF:
    """A factorisation A ≈ ZD with Z ≥ 0 and rows of D of length one (zero for a direction that no point uses)."""

    codes: Float[Tensor, "n r"]
    directions: Float[Tensor, "r d"]
    errors: Float[Tensor, " t"]
    """‖A - ZD‖_F / ‖A‖_F at the start, after each iteration and, last, as returned; float64, on the CPU. Only rounding
    raises it."""
    converged: bool


def semi_nmf(
    points: Float[Tensor, "n d"],
    rank: int,
    *,
    seed: int,
    iterations: int = 500,
    tolerance: float = 1e-4,
) -> SemiNMF:
    """Factorise points into non-negative codes and free directions, from a random start that the seed decides.

    ‖A - ZD‖² = ‖A - BQᵀ‖² + ‖B - ZDQ‖² for D in the span of Q: iterations see B alone, and only the last D is
    (ZᵀZ)⁻¹ZᵀA. They end when CHECK_EVERY of them have lowered the error by no more than the tolerance times the error.
    """
    return Factorising(points[None], rank, seed=seed, iterations=iterations, tolerance=tolerance).finish().one(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Factorised:
    """Several factorisations side by side; see SemiNMF."""

    codes: Float[Tensor, "s n r"]
    directions: Float[Tensor, "s r d"]
    squares: list[list[float]]
    """‖A - ZD‖² at the start, after each iteration and, last, as returned,"""
    totals: list[float]
    """and ‖A‖²; of points divided by a power of two."""
    converged: list[bool]

    def one(self, place: int) -> SemiNMF:
        """That of one cloud."""
        return SemiNMF(
            codes=self.codes[place],
            directions=self.directions[place],
            errors=(torch.tensor(self.squares[place], dtype=torch.float64) / (self.totals[place] or 1)).sqrt(),
            converged=self.converged[place],
        )


class Factorising:
    """Several factorisations under way, each as if alone; a GPU goes on with them beside other work until `finish`.

    What it reads is kept here until then. Rows of zeros, which fill up shorter clouds, have zero codes and change
    nothing. `axes` are the right singular vectors of the points, leading first, where they are known: Q is made of them
    then.
    """

    def __init__(
        self,
        points: Float[Tensor, "s n d"],
        rank: int,
        *,
        seed: int,
        iterations: int = 500,
        tolerance: float = 1e-4,
        axes: Float[Tensor, "s d k"] | None = None,
    ) -> None:
        if min(rank, iterations) < 1:
            raise SpecError(f"a factorisation needs rank and iterations of at least 1; got {rank} and {iterations}")
        self.points, self.axes, self.iterations, self.tolerance = points, axes, iterations, tolerance
        self.scales, self.whole = _scaled(points)
        generator = torch.Generator().manual_seed(seed)
        codes = _start(self.whole, rank, generator)
        width = BASIS_WIDTH * rank
        if axes is not None and width <= axes.shape[2] and width < points.shape[2]:
            self.basis = axes[:, :, :width].to(self.whole)
        else:
            self.basis = _leading_basis(self.whole, width, generator)
        narrow = self.whole @ self.basis
        self.run = Run(narrow, codes, _squared_errors(narrow.mT, self.basis.mT, self.whole), iterations)
        self.started = None
        if points.is_cuda and has_triton():
            from anisoscope.kernels.alternation import Started, can_iterate

            if can_iterate(narrow, rank):
                self.started = Started(self.run, iterations, tolerance)

    def finish(self) -> Factorised:
        """The factorisations."""
        if self.started is None:
            codes, inside, squares, converged = _alternate(self.run, self.iterations, self.tolerance)
        else:
            squares, converged = self.started.finish()
            codes, inside = self.run.codes, self.run.directions
        dtype = working_dtype(self.points.dtype)
        directions = _least_squares(codes, self.whole, inside @ self.basis.mT.double())
        lengths = directions.norm(dim=2, keepdim=True)
        codes, directions = codes * lengths.to(codes), torch.where(lengths > 0, directions / lengths, 0).to(codes)
        totals = torch.linalg.vector_norm(self.whole, dim=2).double().square().sum(1)
        last, totals = torch.stack([_squared_errors(codes, directions, self.whole), totals]).tolist()
        return Factorised(
            codes=(codes.mT * self.scales[:, None, None]).to(dtype),
            directions=directions.to(dtype),
            squares=[[*mine, end] for mine, end in zip(squares, last, strict=True)],
            totals=totals,
            converged=converged,
        )


def encode(points: Float[Tensor, "n d"], directions: Float[Tensor, "r d"]) -> Float[Tensor, "n r"]:
    """Codes of points when the directions are given: non-negative least squares, each point by itself.

    z = argmin ‖a - zD‖², z ≥ 0, by accelerated projected gradient steps in float64. A point whose step went uphill
    starts its momentum afresh (O'Donoghue and Candès 2015).
    """
    (scale,), (whole,) = _scaled(points[None])
    shrink, shift = _gradient_step(directions.double(), whole.double())
    codes = previous = torch.zeros_like(shift)
    momentum = shift.new_zeros(shift.shape[1])
    for step in range(ENCODE_STEPS):
        ahead = torch.lerp(previous, codes, 1 + momentum / (momentum + 3))
        previous, codes = codes, torch.addmm(shift, shrink, ahead).clamp_min_(0)
        moved = codes - ahead
        momentum = torch.where((moved * (codes - previous)).sum(0) < 0, 0, momentum + 1)
        if step % CHECK_EVERY == 0 and bool((moved.abs().amax(0) <= ENCODE_TOLERANCE * codes.amax(0)).all()):
            break
    return (codes.T * scale).to(working_dtype(points.dtype))


def _scaled(points: Float[Tensor, "s n d"]) -> tuple[Float[Tensor, " s"], Float[Tensor, "s n d"]]:
    """Each divided by a power of two, which comes first."""
    if not points.numel():
        raise SpecError(f"a factorisation needs points; got a tensor of shape {tuple(points.shape[1:])}")
    raw = points.to(working_dtype(points.dtype))
    largest = raw.abs().amax((1, 2)).double()
    if not bool(largest.isfinite().all()):
        raise StatesError("a factorisation needs finite points, and some are NaN or infinite; drop them first")
    scale = power_of_two(largest)
    return scale, for_products(raw / scale.to(raw.dtype)[:, None, None])


def _start(points: Float[Tensor, "s n d"], rank: int, generator: torch.Generator) -> Float[Tensor, "s r n"]:
    """Positive parts of random projections; of their negatives where all points lie on that side."""
    codes = torch.randn(rank, points.shape[2], generator=generator, dtype=torch.float64).to(points) @ points.mT
    return torch.where(codes.amax(2, keepdim=True) > 0, codes, -codes).clamp_min_(0)


def _leading_basis(points: Float[Tensor, "s n d"], width: int, generator: torch.Generator) -> Float[Tensor, "s d m"]:
    """Q by subspace iteration; the identity where it would be as wide as the points."""
    count, _, d = points.shape
    if width >= d:
        return torch.eye(d, dtype=points.dtype, device=points.device).expand(count, d, d)
    basis = torch.randn(d, width, generator=generator, dtype=torch.float64).to(points)
    for _ in range(BASIS_PASSES):
        basis = torch.linalg.qr(points.mT @ (points @ basis)).Q
    return basis


def _alternate(
    run: "Run", iterations: int, tolerance: float
) -> tuple[Float[Tensor, "s r n"], Float[Tensor, "s r d"], list[list[float]], list[bool]]:
    """Codes, directions (float64), squared errors and whether they settled.

    Clouds are looked at every CHECK_EVERY iterations, and in between nothing waits for a GPU. Those that have settled
    leave the others.
    """
    squares, settled = [[one] for one in run.squares.tolist()], [False] * len(run.codes)
    here, found = list(range(len(squares))), {}
    for start in range(0, iterations, CHECK_EVERY):
        run.redirect()
        seen = run.advance(min(CHECK_EVERY, iterations - start)).tolist()
        for place, mine in zip(here, seen, strict=True):
            before = squares[place][-1]
            settled[place] = append_errors(squares[place], mine)
            # A relative change of the error is half that of its square.
            if len(mine) == CHECK_EVERY and before - squares[place][-1] <= 2 * tolerance * squares[place][-1]:
                settled[place] = True
        going = [number for number, place in enumerate(here) if not settled[place]]
        if len(going) < len(here) or start + CHECK_EVERY >= iterations:
            found |= {place: (run.codes[number], run.directions[number]) for number, place in enumerate(here)}
            if not going:
                break
            run.keep(going)
            here = [here[number] for number in going]
    parts = [torch.stack([found[place][part] for place in range(len(squares))]) for part in (0, 1)]
    return parts[0], parts[1], squares, settled


def append_errors(history: list[float], errors: Sequence[float]) -> bool:
    """Errors of more iterations, until steps from Z itself no longer lower them: what is left then is rounding."""
    for one in errors:
        if len(history) > 1 and one == history[-1] == history[-2]:
            return True
        history.append(one)
    return False


class Run:
    """Where the factorisations of several clouds are."""

    def __init__(
        self,
        points: Float[Tensor, "s n d"],
        codes: Float[Tensor, "s r n"],
        dropped: Float[Tensor, " s"],
        iterations: int,
    ) -> None:
        start = codes.new_zeros(*codes.shape[:2], points.shape[2], dtype=torch.float64)
        self.points, self.dropped, self.codes = points, dropped, codes
        self.directions = _least_squares(codes, points, start)
        self.last_codes, self.last_directions = self.codes, self.directions
        self.squares = dropped + _squared_errors(codes, self.directions, points)
        self.momentum = torch.zeros(len(codes), dtype=torch.long, device=codes.device)
        """For how many iterations it has gathered; what it weighs then is kept ready."""
        gathered = torch.arange(iterations + 1, dtype=torch.float64, device=codes.device)
        self.weights = (1 + gathered / (gathered + 3))[:, None, None]

    def keep(self, chosen: Sequence[int]) -> None:
        """Leave the other clouds behind."""
        index = torch.tensor(chosen, device=self.codes.device)
        for name, held in list(vars(self).items()):
            if name != "weights":
                setattr(self, name, held[index])

    def advance(self, count: int) -> Float[Tensor, "s t"]:
        """So many iterations: squared errors after each.

        One extrapolates Z and D along their last change, steps Z and solves for D. Where it raised the error it is
        undone, and the next goes without momentum (Ang and Gillis 2019).
        """
        return torch.stack([self._step() for _ in range(count)], 1)

    def _step(self) -> Float[Tensor, " s"]:
        weights = self.weights[self.momentum]
        ahead = torch.lerp(self.last_directions, self.directions, weights)
        codes = torch.lerp(self.last_codes, self.codes, weights.to(self.codes))
        codes = _step_codes(codes, *_gradient_step(ahead, self.points))
        directions = _least_squares(codes, self.points, ahead)
        squares = self.dropped + _squared_errors(codes, directions, self.points)
        better = squares <= self.squares
        self.last_codes, self.codes = _choose(better, self.codes, self.last_codes), _choose(better, codes, self.codes)
        self.last_directions, self.directions = (
            _choose(better, self.directions, self.last_directions),
            _choose(better, directions, self.directions),
        )
        self.squares = torch.fmin(self.squares, squares)
        self.momentum = (self.momentum + 1) * better
        return self.squares

    def redirect(self, among: Sequence[int] | None = None) -> None:
        """Turn directions that no point uses, of some clouds, to the points that the others miss most.

        ZD stays as it is.
        """
        idle = self.codes.amax(2) == 0
        if not bool(idle.any()):
            return
        self.directions = self.directions.clone()
        for number in idle.any(1).nonzero().flatten().tolist() if among is None else among:
            points, which = self.points[number], idle[number]
            residual = _residuals(self.codes[number, None], self.directions[number, None], points[None])[0]
            worst = squared_norms(residual).topk(min(int(which.sum()), len(points))).indices
            self.directions[number, which.nonzero().flatten()[: len(worst)]] = residual[worst].double()
            self.momentum[number] = 0


def _choose(first: Bool[Tensor, " s"], one: Tensor, other: Tensor) -> Tensor:
    """Of two stacks the first's where it is said, else the other's."""
    # Asking a GPU would take longer than choosing.
    return one if first.device.type == "cpu" and bool(first.all()) else torch.where(first[:, None, None], one, other)


def _gradient_step(directions: Float[Tensor, "*s r d"], points: Float[Tensor, "*s n d"]) -> tuple[Tensor, Tensor]:
    """W and b of a gradient step z ← Wz + b on ‖a - zD‖², for codes as columns.

    W = I - SG, b = SDa with G = DDᵀ and S = diag(G)⁻¹ / L, so that the lengths of directions do not matter. L bounds
    the largest eigenvalue of C = diag(G)^-½ G diag(G)^-½ without a decomposition: λ₁ ≤ ‖C¹⁶‖_F^(1/16) ≤ r^(1/32) λ₁.
    """
    gram = directions @ directions.mT
    # A direction of length zero has only zeros in G, whatever they are divided by.
    inverse = gram.diagonal(dim1=-2, dim2=-1).clamp_min(SMALLEST).rsqrt()[..., None]
    power = gram * inverse * inverse.mT
    for _ in range(4):
        power = power @ power
    sizes = inverse.square() / torch.linalg.matrix_norm(power, keepdim=True).pow(1 / 16).clamp_min(1)
    shrink = torch.addcmul(_identity(gram.shape[-1], gram.device), sizes, gram, value=-1)
    return shrink.to(points), (sizes * directions).to(points) @ points.mT


def _step_codes(codes: Tensor, shrink: Tensor, shift: Tensor) -> Tensor:
    """Accelerated projected gradient steps (Beck and Teboulle 2009), columnwise coordinate descent's equal at r = 32.

    They need r times fewer and larger products, so they pull ahead at larger r and on a GPU.
    """
    previous = codes
    for step in range(CODE_STEPS):
        # The first two have no momentum yet.
        ahead = codes if step < 2 else torch.lerp(previous, codes, 1 + (step - 1) / (step + 2))
        previous, codes = codes, torch.baddbmm(shift, shrink, ahead).clamp_min_(0)
    return codes


def _least_squares(
    codes: Float[Tensor, "s r n"], points: Float[Tensor, "s n d"], start: Float[Tensor, "s r d"]
) -> Float[Tensor, "s r d"]:
    """D = (ZᵀZ)⁻¹ZᵀA in float64, damped so that dependent codes keep the D they start from.

    D₀ + (M + ρ diag M)⁻¹(ZᵀA - MD₀) with M = ZᵀZ never raises the error, and where it leaves D₀ as it was, D₀ is a
    least squares solution.
    """
    gram, products = (codes @ codes.mT).double(), (codes @ points).double()
    smallest, more = _damping(gram.shape[1], torch.finfo(codes.dtype).eps, gram.device)
    damped = torch.addcmul(smallest, gram, more)
    rest = torch.baddbmm(products, gram, start, alpha=-1)
    return start + torch.cholesky_solve(rest, torch.linalg.cholesky_ex(damped).L)


@lru_cache(maxsize=8)
def _identity(rank: int, device: torch.device) -> Float[Tensor, "r r"]:
    return torch.eye(rank, dtype=torch.float64, device=device)


def damping(rank: int, roundoff: float) -> float:
    """ρ: what lifts M above its rounding."""
    return 16 * rank * roundoff


@lru_cache(maxsize=8)
def _damping(rank: int, roundoff: float, device: torch.device) -> tuple[Float[Tensor, "r r"], Float[Tensor, "r r"]]:
    """What M gets so that it is above zero where no point uses a code, and what it is multiplied by."""
    identity = _identity(rank, device)
    return SMALLEST * identity, 1 + damping(rank, roundoff) * identity


def _residuals(codes: Tensor, directions: Tensor, points: Tensor) -> Float[Tensor, "s n d"]:
    return torch.baddbmm(points, codes.mT, directions.to(points), alpha=-1)


def _squared_errors(codes: Tensor, directions: Tensor, points: Tensor) -> Float[Tensor, " s"]:
    """‖A - ZD‖² itself: ‖A‖² - ⟨D, ZᵀA⟩ costs less and loses all digits where the fit is close."""
    step = max(1, limit_on(RESIDUAL_ELEMENTS, points) // (len(points) * points.shape[2]))
    rows = zip(codes.split(step, 2), points.split(step, 1), strict=True)
    norms = [torch.linalg.vector_norm(_residuals(some, directions, here), dim=2) for some, here in rows]
    return torch.cat(norms, 1).double().square().sum(1)
