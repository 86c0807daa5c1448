"""Semi-non-negative factorisation: points as non-negative mixtures of free directions.

    min ‖A - ZD‖²_F  subject to  Z ≥ 0

Notation: A (n, d) holds the points as rows, Z (n, r) the codes, D (r, d) the directions, σ₁ ≥ σ₂ ≥ ... the singular
values of A, Q (d, m) an orthonormal basis of about its leading right singular vectors and B = AQ.

The least error lies between the truncation errors (Σ_{k>r} σ²)^½ and (Σ_{k≥r} σ²)^½ of the singular value
decomposition. It is the first where the rows of the truncation lie in an open half-space (Gillis and Kumar 2015), and
never above the second, since the corners of a simplex of r - 1 dimensions reach every point of them. A cone that holds
the points may be widened: the error singles out the span of D at best, never D.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import SpecError, StatesError
from anisoscope.kernels.gram import for_products, power_of_two_scale, squared_norms, working_dtype

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


@dataclass(frozen=True, kw_only=True)
class SemiNMF:
    """A factorisation A ≈ ZD with Z ≥ 0 and rows of D of length one (zero for a direction that no point uses)."""

    codes: Float[Tensor, "n r"]
    directions: Float[Tensor, "r d"]
    errors: Float[Tensor, " t"]
    """‖A - ZD‖_F / ‖A‖_F at the start, after each iteration and, last, as returned; float64. Only rounding raises it.
    """
    converged: bool


def semi_nmf(
    points: Float[Tensor, "n d"],
    rank: int,
    *,
    seed: int,
    iterations: int = 500,
    tolerance: float = 1e-4,
    axes: Float[Tensor, "d k"] | None = None,
) -> SemiNMF:
    """Factorise points into non-negative codes and free directions, from a random start that the seed decides.

    ‖A - ZD‖² = ‖A - BQᵀ‖² + ‖B - ZDQ‖² for D in the span of Q: iterations see B alone, and only the last D is
    (ZᵀZ)⁻¹ZᵀA. They end when CHECK_EVERY of them have lowered the error by no more than the tolerance times the error.
    `axes` are the right singular vectors of the points, leading first, where they are known: Q is made of them then.
    """
    if min(rank, iterations) < 1:
        raise SpecError(f"a factorisation needs rank and iterations of at least 1; got {rank} and {iterations}")
    scale, whole = _scaled(points)
    generator = torch.Generator().manual_seed(seed)
    codes = _start(whole, rank, generator)
    width = BASIS_WIDTH * rank
    if axes is not None and width <= axes.shape[1] and width < whole.shape[1]:
        basis = axes[:, :width].to(whole)
    else:
        basis = _leading_basis(whole, width, generator)
    narrow = whole @ basis
    dropped = _squared_error(narrow.T, basis.T, whole)
    codes, inside, squares, converged = _alternate(narrow, codes, dropped, iterations, tolerance)
    directions = _least_squares(codes, whole, inside @ basis.T.double())
    lengths = directions.norm(dim=1, keepdim=True)
    codes, directions = codes * lengths.to(codes), torch.where(lengths > 0, directions / lengths, 0).to(codes)
    squares.append(_squared_error(codes, directions, whole))
    total, dtype = float(squared_norms(whole).sum()), working_dtype(points.dtype)
    return SemiNMF(
        codes=(codes.T * scale).to(dtype),
        directions=directions.to(dtype),
        errors=(torch.tensor(squares, dtype=torch.float64, device=points.device) / (total or 1)).sqrt(),
        converged=converged,
    )


def encode(points: Float[Tensor, "n d"], directions: Float[Tensor, "r d"]) -> Float[Tensor, "n r"]:
    """Codes of points when the directions are given: non-negative least squares, each point by itself.

    z = argmin ‖a - zD‖², z ≥ 0, by accelerated projected gradient steps in float64. A point whose step went uphill
    starts its momentum afresh (O'Donoghue and Candès 2015).
    """
    scale, whole = _scaled(points)
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


def _scaled(points: Tensor) -> tuple[Tensor, Tensor]:
    if not points.numel():
        raise SpecError(f"a factorisation needs points; got a tensor of shape {tuple(points.shape)}")
    raw = points.to(working_dtype(points.dtype))
    if not bool(raw.isfinite().all()):
        raise StatesError("a factorisation needs finite points, and some are NaN or infinite; drop them first")
    scale = power_of_two_scale(raw)
    return scale, for_products(raw / scale.to(raw.dtype))


def _start(points: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    """Positive parts of random projections, (r, n); of their negatives where all points lie on that side."""
    codes = torch.randn(rank, points.shape[1], generator=generator, dtype=torch.float64).to(points) @ points.T
    return torch.where(codes.amax(1, keepdim=True) > 0, codes, -codes).clamp_min_(0)


def _leading_basis(points: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Q by subspace iteration; the identity where it would be as wide as the points."""
    d = points.shape[1]
    if width >= d:
        return torch.eye(d, dtype=points.dtype, device=points.device)
    basis = torch.randn(d, width, generator=generator, dtype=torch.float64).to(points)
    for _ in range(BASIS_PASSES):
        basis = torch.linalg.qr(points.T @ (points @ basis)).Q
    return basis


def _alternate(
    points: Tensor, codes: Tensor, dropped: float, iterations: int, tolerance: float
) -> tuple[Tensor, Tensor, list[float], bool]:
    """Codes (r, n), directions (float64), squared errors and whether they settled.

    Each iteration extrapolates Z and D along their last change, steps Z and solves for D. One that raised the error is
    undone, and the next goes without momentum (Ang and Gillis 2019).
    """
    directions = _least_squares(codes, points, points.new_zeros(len(codes), points.shape[1], dtype=torch.float64))
    squares, momentum = [dropped + _squared_error(codes, directions, points)], 0
    last_codes, last_directions = codes, directions
    for iteration in range(1, iterations + 1):
        if iteration % CHECK_EVERY == 1 and bool((idle := codes.amax(1) == 0).any()):
            directions, momentum = _redirect(idle, codes, directions, points), 0
        weight = 1 + momentum / (momentum + 3)
        ahead = torch.lerp(last_directions, directions, weight) if momentum else directions
        shrink, shift = _gradient_step(ahead, points)
        new_codes = _step_codes(torch.lerp(last_codes, codes, weight) if momentum else codes, shrink, shift)
        new_directions = _least_squares(new_codes, points, ahead)
        error = dropped + _squared_error(new_codes, new_directions, points)
        if error <= squares[-1]:
            last_codes, last_directions, momentum = codes, directions, momentum + 1
            codes, directions = new_codes, new_directions
        elif momentum:
            error, momentum = squares[-1], 0
        else:
            # Steps from Z itself no longer lower the error: what is left is rounding.
            return codes, directions, squares, True
        squares.append(error)
        # A relative change of the error is half that of its square.
        if iteration % CHECK_EVERY == 0 and squares[-1 - CHECK_EVERY] - error <= 2 * tolerance * error:
            return codes, directions, squares, True
    return codes, directions, squares, False


def _gradient_step(directions: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """W and b of a gradient step z ← Wz + b on ‖a - zD‖², for codes as columns.

    W = I - SG, b = SDa with G = DDᵀ and S = diag(G)⁻¹ / L, so that the lengths of directions do not matter. L bounds
    the largest eigenvalue of C = diag(G)^-½ G diag(G)^-½ without a decomposition: λ₁ ≤ ‖C¹⁶‖_F^(1/16) ≤ r^(1/32) λ₁.
    """
    gram = directions @ directions.T
    inverse = torch.where(gram.diagonal() > 0, 1 / gram.diagonal(), 0)
    power = gram * inverse.sqrt()[:, None] * inverse.sqrt()
    for _ in range(4):
        power = power @ power
    sizes = (inverse / power.norm().pow(1 / 16).clamp_min(1))[:, None]
    shrink = torch.eye(len(gram), dtype=gram.dtype, device=gram.device) - sizes * gram
    return shrink.to(points), (sizes * directions).to(points) @ points.T


def _step_codes(codes: Tensor, shrink: Tensor, shift: Tensor) -> Tensor:
    """Accelerated projected gradient steps (Beck and Teboulle 2009), columnwise coordinate descent's equal at r = 32.

    They need r times fewer and larger products, so they pull ahead at larger r and on a GPU.
    """
    ahead = codes
    for step in range(CODE_STEPS):
        previous, codes = codes, torch.addmm(shift, shrink, ahead).clamp_min_(0)
        ahead = torch.lerp(previous, codes, 1 + step / (step + 3))
    return codes


def _least_squares(codes: Tensor, points: Tensor, start: Tensor) -> Tensor:
    """D = (ZᵀZ)⁻¹ZᵀA in float64, damped so that dependent codes keep the D they start from.

    D₀ + S(SMS + ρI)⁻¹S(ZᵀA - MD₀) with M = ZᵀZ and S = diag(M)^-½ never raises the error, and where it leaves D₀ as it
    was, D₀ is a least squares solution.
    """
    gram, products = (codes @ codes.T).double(), (codes @ points).double()
    scales = torch.where(gram.diagonal() > 0, gram.diagonal().rsqrt(), 0)[:, None]
    # Above the rounding of M, which may leave it indefinite.
    damping = 16 * len(gram) * torch.finfo(codes.dtype).eps * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor = torch.linalg.cholesky_ex(gram * scales * scales.T + damping).L
    return start + scales * torch.cholesky_solve(scales * (products - gram @ start), factor)


def _residual(codes: Tensor, directions: Tensor, points: Tensor) -> Tensor:
    return torch.addmm(points, codes.T, directions.to(points), alpha=-1)


def _squared_error(codes: Tensor, directions: Tensor, points: Tensor) -> float:
    """‖A - ZD‖² itself: ‖A‖² - ⟨D, ZᵀA⟩ costs less and loses all digits where the fit is close."""
    return float(torch.linalg.vector_norm(_residual(codes, directions, points), dim=1).double().square().sum())


def _redirect(idle: Tensor, codes: Tensor, directions: Tensor, points: Tensor) -> Tensor:
    """Turn directions that no point uses to the points that the others miss most, which leaves ZD as it is."""
    residual = _residual(codes, directions, points)
    worst = squared_norms(residual).topk(min(int(idle.sum()), len(points))).indices
    return directions.index_copy(0, idle.nonzero().flatten()[: len(worst)], residual[worst].double())
