"""Semi-non-negative factorisation against singular values, planted factors and references that share no code."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anisoscope.errors import SpecError, StatesError
from anisoscope.kernels import has_triton, seminmf
from anisoscope.kernels.seminmf import encode, semi_nmf

# Rises of the relative error that rounding may cause, also in the last step that normalises the directions.
RISE_TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}
# The reported error against the one computed directly in float64.
ERROR_TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}
# ‖Zᵀ(A - ZD)‖ / ‖Z‖‖A‖, zero where D solves the least squares problem for Z.
NORMAL_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
# Eight codes for points of a rank below may be large and cancel, which costs digits.
DEGENERATE_TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-8}
# Codes against exact ones, relative to the largest of their point, for directions with a Gram of condition below 1e3.
CODE_TOLERANCE = 1e-5

DTYPES = [torch.float32, torch.float64]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def decaying(n: int, d: int, *, seed: int = 0) -> Tensor:
    """Gaussian points around the origin whose variances fall like 1/k, in random directions."""
    return normal(n, d, seed=seed) * torch.arange(1, d + 1) ** -0.5 @ torch.linalg.qr(normal(d, d, seed=seed + 1)).Q


def planted(n: int, d: int, rank: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Codes with half of their entries zero, and unit directions."""
    directions = normal(rank, d, seed=seed + 1)
    return normal(n, rank, seed=seed).clamp_min(0), directions / directions.norm(dim=1, keepdim=True)


def mixed(n: int, d: int, rank: int, *, seed: int = 0) -> Tensor:
    codes, directions = planted(n, d, rank, seed=seed)
    return codes @ directions


CLOUDS: dict[str, Callable[[], Tensor]] = {
    "around the origin": lambda: decaying(400, 60),
    "isotropic": lambda: normal(300, 50),
    "off the origin": lambda: decaying(400, 60) + 0.5,
    "planted": lambda: mixed(300, 50, 6),
    "planted with noise": lambda: mixed(300, 50, 6) + 0.1 * normal(300, 50, seed=9),
    "one huge point": lambda: torch.cat([decaying(200, 40), 1e4 * normal(1, 40, seed=5)]),
    "fewer points than dimensions": lambda: decaying(20, 60),
}


@pytest.fixture(params=CLOUDS, ids=str)
def cloud(request: pytest.FixtureRequest) -> Tensor:
    return CLOUDS[request.param]()


def truncation_error(points: Tensor, rank: int) -> float:
    values = torch.linalg.svdvals(points.double())
    return float(values[rank:].norm() / values.norm())


def direct_error(points: Tensor, codes: Tensor, directions: Tensor) -> float:
    exact = points.double()
    return float((exact - codes.double() @ directions.double()).norm() / exact.norm())


def span_overlap(directions: Tensor, others: Tensor) -> float:
    """Cosine of the largest principal angle between two row spaces: 1 where they agree."""
    one, two = (torch.linalg.qr(rows.double().T).Q for rows in (directions, others))
    return float(torch.linalg.svdvals(one.T @ two).min())


@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_never_rise_and_codes_are_never_negative(cloud: Tensor, dtype: torch.dtype) -> None:
    for seed in range(2):
        found = semi_nmf(cloud.to(dtype), 6, seed=seed, tolerance=0.0, iterations=100)
        assert float(found.errors.diff().max()) <= RISE_TOLERANCE[dtype]
        assert float(found.errors[-1]) < 0.95 * float(found.errors[0])
        assert bool((found.codes >= 0).all())
        assert torch.allclose(found.directions.double().norm(dim=1), torch.ones(6).double(), atol=1e-6)
        assert found.codes.dtype == found.directions.dtype == dtype
        assert found.errors.dtype == torch.float64


def returned_by(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """What every call of a function of the module returns from now on."""
    original, results = getattr(seminmf, name), []

    def keep(*args: object) -> object:
        results.append(original(*args))
        return results[-1]

    monkeypatch.setattr(seminmf, name, keep)
    return results


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reported_error_is_the_true_one_during_the_iterations_and_after(
    cloud: Tensor, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The iterations see the points in a basis of 4 · 6 directions; what it misses has to be accounted for.
    bases, fits = returned_by(monkeypatch, "_leading_basis"), returned_by(monkeypatch, "_alternate")
    points = cloud.to(dtype)
    found = semi_nmf(points, 6, seed=0, iterations=25)
    basis, codes, directions = (one[0] for one in (bases[0], *fits[0][:2]))
    assert basis.shape[1] == 24 < points.shape[1]
    scale = 2.0 ** torch.floor(torch.log2(points.abs().max())).double()
    inside = direct_error(points / scale, codes.T, directions @ basis.T.double())
    assert float(found.errors[-2]) == pytest.approx(inside, abs=ERROR_TOLERANCE[dtype])
    assert float(found.errors[-1]) == pytest.approx(
        direct_error(points, found.codes, found.directions), abs=ERROR_TOLERANCE[dtype]
    )


def test_the_error_lies_between_two_truncations_of_the_singular_value_decomposition(cloud: Tensor) -> None:
    for rank in (2, 6):
        error = float(semi_nmf(cloud, rank, seed=0).errors[-1])
        assert truncation_error(cloud, rank) - 1e-12 <= error <= truncation_error(cloud, rank - 1) + 1e-12, rank


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_directions_solve_the_least_squares_problem_outside_the_basis_too(dtype: torch.dtype) -> None:
    points = decaying(400, 60).to(dtype)
    found = semi_nmf(points, 6, seed=0)
    codes, exact = found.codes.double(), points.double()
    normal_residual = codes.T @ (exact - codes @ found.directions.double())
    assert float(normal_residual.norm()) <= NORMAL_TOLERANCE[dtype] * float(codes.norm() * exact.norm())


@pytest.mark.parametrize("dtype", DTYPES)
def test_points_in_a_half_space_reach_the_truncation_error_in_its_span(dtype: torch.dtype) -> None:
    # Five directions well above the rest, and a mean along the first that outweighs the spread.
    rank, points = 5, normal(400, 60) * torch.tensor([1.0] * 5 + [0.1] * 55)
    points[:, 0] += 8
    leading = torch.linalg.svd(points, full_matrices=False).Vh[:rank]
    assert bool(((points @ leading.T @ leading)[:, 0] > 0).all())
    found = semi_nmf(points.to(dtype), rank, seed=0, tolerance=1e-7)
    assert found.converged
    assert float(found.errors[-1]) == pytest.approx(truncation_error(points, rank), rel=1e-5)
    assert span_overlap(found.directions, leading) > 1 - 1e-5


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_a_planted_factorisation_is_found_up_to_the_choice_of_its_cone(dtype: torch.dtype, error: float) -> None:
    for seed in range(3):
        codes, directions = planted(300, 60, 6, seed=seed)
        points = (codes @ directions).to(dtype)
        found = semi_nmf(points, 6, seed=seed)
        assert float(found.errors[-1]) <= error
        assert span_overlap(found.directions, directions) > 1 - error
        # Its own cone holds every point, so codes in it leave nothing over; so does any wider cone.
        assert float((encode(points, directions.to(dtype)) - codes).abs().max()) <= CODE_TOLERANCE


def reference_errors(points: Tensor, codes: Tensor, iterations: int) -> list[float]:
    """Alternating least squares: lstsq for D, coordinate descent until it stands still for Z. Codes are (n, r)."""
    codes, errors = codes.clone(), []
    for _ in range(iterations):
        directions = torch.linalg.lstsq(codes, points, driver="gelsd").solution
        for _ in range(200):
            before = codes.clone()
            for k in range(codes.shape[1]):
                gradient = (points - codes @ directions) @ directions[k]
                codes[:, k] = (codes[:, k] + gradient / directions[k].square().sum()).clamp_min(0)
            if float((codes - before).abs().max()) <= 1e-4 * float(codes.max()):
                break
        errors.append(direct_error(points, codes, directions))
    return errors


@pytest.mark.parametrize("name", ["around the origin", "off the origin", "planted with noise", "isotropic"])
def test_it_ends_no_worse_than_exact_alternation_from_the_same_start(name: str) -> None:
    points = CLOUDS[name]()[:60, :20]
    start = seminmf._start(points[None], 4, torch.Generator().manual_seed(3))[0].T
    found = semi_nmf(points.float(), 4, seed=3)
    assert float(found.errors[-1]) <= reference_errors(points, start, 15)[-1] + 1e-3


def test_compression_costs_little_error(monkeypatch: pytest.MonkeyPatch) -> None:
    points = decaying(600, 100).float()
    compressed = semi_nmf(points, 6, seed=0).errors[-1]
    monkeypatch.setattr(seminmf, "BASIS_WIDTH", 100)
    assert float(compressed) == pytest.approx(float(semi_nmf(points, 6, seed=0).errors[-1]), rel=1e-3)


def test_a_seed_decides_the_result_and_the_global_random_state_is_left_alone() -> None:
    points = decaying(200, 50).float()
    state = torch.get_rng_state()
    one, two, other = (semi_nmf(points, 5, seed=seed, iterations=20) for seed in (7, 7, 8))
    assert bool((torch.get_rng_state() == state).all())
    assert torch.equal(one.codes, two.codes)
    assert torch.equal(one.directions, two.directions)
    assert torch.equal(one.errors, two.errors)
    assert not torch.equal(one.codes, other.codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_points_give_what_the_same_points_in_float32_give(dtype: torch.dtype) -> None:
    points = decaying(200, 50).to(dtype)
    half, single = (semi_nmf(some, 5, seed=0, iterations=20) for some in (points, points.float()))
    assert half.codes.dtype == half.directions.dtype == torch.float32
    assert torch.equal(half.codes, single.codes)
    assert torch.equal(half.directions, single.directions)
    assert torch.equal(encode(points, half.directions), encode(points.float(), single.directions))


@pytest.mark.parametrize("exponent", [100, -100])
def test_a_power_of_two_scales_the_codes_and_nothing_else(exponent: int) -> None:
    points = decaying(200, 50).float()
    one, two = (semi_nmf(some, 5, seed=0, iterations=20) for some in (points, points * 2.0**exponent))
    assert torch.equal(one.errors, two.errors)
    assert torch.equal(one.directions, two.directions)
    assert torch.equal(one.codes * 2.0**exponent, two.codes)
    assert torch.equal(encode(points, one.directions) * 2.0**exponent, encode(points * 2.0**exponent, one.directions))


def test_products_that_torch_may_round_further_are_made_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    points = decaying(200, 50).float()
    monkeypatch.setattr("anisoscope.kernels.gram.product_roundoff", lambda points: 2.0**-11)
    found, exact = (semi_nmf(some, 5, seed=0, iterations=20) for some in (points, points.double()))
    assert found.codes.dtype == torch.float32
    assert torch.equal(found.codes, exact.codes.float())
    assert torch.equal(found.errors, exact.errors)


def test_an_idle_code_is_put_to_use() -> None:
    points = mixed(200, 40, 4)
    start = seminmf._start(points[None], 4, torch.Generator().manual_seed(0))
    start[:, 1:3] = 0
    run = seminmf.Run(points[None], start, torch.zeros(1), 300)
    codes, directions, squares, _ = seminmf._alternate(run, 300, 1e-4)
    assert bool((codes.amax(2) > 0).all())
    assert direct_error(points, codes[0].T, directions[0]) <= 1e-9
    assert float(torch.tensor(squares[0]).diff().max()) <= 1e-12


def side_by_side(clouds: list[Tensor], axes: Tensor | None = None) -> list[seminmf.SemiNMF]:
    points = pad_sequence(clouds, batch_first=True)
    found = seminmf.Factorising(points, 6, seed=2, tolerance=1e-3, axes=axes).finish()
    every = [found.one(place) for place in range(len(clouds))]
    assert not any(bool(one.codes[len(cloud) :].any()) for cloud, one in zip(clouds, every, strict=True))
    return [replace(one, codes=one.codes[: len(cloud)]) for cloud, one in zip(clouds, every, strict=True)]


@pytest.mark.parametrize("known", [False, True])
def test_clouds_side_by_side_are_factorised_as_if_each_were_alone(known: bool) -> None:
    # They settle at different times, one has an idle code, and all but one are filled up.
    clouds = [decaying(400, 60), mixed(300, 60, 6) + 0.1 * normal(300, 60, seed=9), normal(250, 60), mixed(90, 60, 3)]
    axes = torch.stack([torch.linalg.svd(one, full_matrices=False).Vh.T for one in clouds]) if known else None
    together, lengths = side_by_side(clouds, axes), set()
    for place, (cloud, found) in enumerate(zip(clouds, together, strict=True)):
        (alone,) = side_by_side([cloud], None if axes is None else axes[place : place + 1])
        assert found.converged == alone.converged
        # Where nothing is left of the error, rounding says when it ends.
        assert len(found.errors) == len(alone.errors) or float(alone.errors[-1]) < 1e-12
        count = min(len(found.errors), len(alone.errors))
        torch.testing.assert_close(found.errors[:count], alone.errors[:count], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.codes @ found.directions, alone.codes @ alone.directions, rtol=1e-6, atol=1e-6)
        lengths.add(len(found.errors))
    assert len(lengths) > 1


DEGENERATE: dict[str, Callable[[], Tensor]] = {
    "all zero": lambda: torch.zeros(30, 20),
    "all equal": lambda: torch.full((30, 20), 0.1),
    "one point": lambda: normal(1, 20),
    "one coordinate": lambda: normal(30, 1),
    "fewer points than codes": lambda: normal(5, 20),
    "fewer dimensions than codes": lambda: normal(30, 4),
    "rank one": lambda: normal(30, 1) * normal(1, 20, seed=1),
    "rank three, repeated": lambda: (normal(10, 3) @ normal(3, 60, seed=1)).repeat(3, 1),
    "half of them zero": lambda: torch.cat([torch.zeros(15, 4), normal(15, 4)]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_clouds_are_reproduced_by_eight_codes(name: str, dtype: torch.dtype) -> None:
    # Each has a rank below eight, so the least error is zero.
    points = DEGENERATE[name]().to(dtype)
    found = semi_nmf(points, 8, seed=0)
    assert found.codes.shape == (len(points), 8)
    assert found.directions.shape == (8, points.shape[1])
    assert bool(found.codes.isfinite().all())
    assert bool(found.directions.isfinite().all())
    assert bool((found.codes >= 0).all())
    assert found.converged
    assert float(found.errors[-1]) <= DEGENERATE_TOLERANCE[dtype]
    assert float((points - found.codes @ found.directions).norm()) <= DEGENERATE_TOLERANCE[dtype] * float(points.norm())
    assert bool(encode(points, found.directions).isfinite().all())


def test_iterations_that_run_out_are_said_so() -> None:
    points = decaying(200, 50)
    short, long = semi_nmf(points, 5, seed=0, iterations=3), semi_nmf(points, 5, seed=0)
    assert not short.converged
    assert long.converged
    assert len(short.errors) == 3 + 2
    assert torch.allclose(short.errors[:-1], long.errors[:4], rtol=1e-12)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_points_that_are_not_finite_are_refused(value: float) -> None:
    points = normal(20, 6)
    points[3, 2] = value
    with pytest.raises(StatesError, match="finite"):
        semi_nmf(points, 2, seed=0)
    with pytest.raises(StatesError, match="finite"):
        encode(points, normal(2, 6))


@pytest.mark.parametrize(("rank", "iterations"), [(0, 5), (-1, 5), (2, 0)])
def test_a_rank_or_iterations_below_one_are_refused(rank: int, iterations: int) -> None:
    with pytest.raises(SpecError, match="at least 1"):
        semi_nmf(normal(20, 6), rank, seed=0, iterations=iterations)


@pytest.mark.parametrize("shape", [(0, 6), (20, 0)])
def test_no_points_or_no_dimensions_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(SpecError, match="needs points"):
        semi_nmf(torch.ones(shape), 2, seed=0)
    with pytest.raises(SpecError, match="needs points"):
        encode(torch.ones(shape), torch.ones(2, shape[1]))


def exact_codes(point: Tensor, directions: Tensor) -> Tensor:
    """Non-negative least squares by trying every set of active directions."""
    best, least = torch.zeros(len(directions)).double(), point.norm()
    for size in range(1, len(directions) + 1):
        for active in combinations(range(len(directions)), size):
            some = torch.linalg.lstsq(directions[list(active)].T, point, driver="gelsd").solution
            error = (point - some @ directions[list(active)]).norm()
            if bool((some >= 0).all()) and bool(error < least):
                best, least = torch.zeros_like(best), error
                best[list(active)] = some
    return best


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("angle", [1.0, 0.1])
def test_codes_of_new_points_are_those_of_an_exhaustive_search(
    angle: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At the smaller angle the directions nearly agree: it takes 490 steps, and 4590 if momentum never starts afresh.
    monkeypatch.setattr(seminmf, "ENCODE_STEPS", 1000)
    directions = (normal(5, 12, seed=1) * angle + normal(1, 12, seed=2)).to(dtype)
    points = torch.cat([normal(40, 12) @ directions.double().T @ directions.double(), torch.zeros(1, 12)]).to(dtype)
    codes = encode(points, directions)
    assert codes.dtype == dtype
    expected = torch.stack([exact_codes(point, directions.double()) for point in points.double()])
    assert bool((expected > 0).any(0).all())
    assert bool((expected == 0).any(0).all())
    largest = expected.amax(1, keepdim=True)
    assert bool(((codes.double() - expected).abs() <= CODE_TOLERANCE * largest).all())


def test_directions_that_depend_on_each_other_or_are_zero_still_give_the_least_error() -> None:
    free = normal(3, 10, seed=1)
    points = normal(30, 10)
    expected = encode(points, free)
    codes = encode(points, torch.cat([free, free[:2], torch.zeros(1, 10)]))
    assert not bool(codes[:, 5].any())
    assert torch.allclose(codes[:, :3] @ free + codes[:, 3:5] @ free[:2], expected @ free, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_cpu_and_gpu_agree() -> None:
    for points in (decaying(1000, 80), (decaying(1000, 80) + 0.5).float()):
        here, there = semi_nmf(points, 8, seed=0, iterations=20), semi_nmf(points.cuda(), 8, seed=0, iterations=20)
        assert there.codes.is_cuda
        assert there.directions.is_cuda
        assert torch.allclose(there.errors, here.errors, rtol=1e-4)
        assert torch.allclose(there.directions.cpu(), here.directions, atol=1e-2)
        assert torch.allclose(encode(points.cuda(), there.directions).cpu(), encode(points, here.directions), rtol=0.05)


@pytest.mark.skipif(not torch.cuda.is_available() or not has_triton(), reason="no CUDA device or no triton")
@pytest.mark.parametrize("rank", [1, 5, 16, 23])
def test_one_kernel_does_what_the_operations_of_an_iteration_do(rank: int) -> None:
    from anisoscope.kernels.alternation import Started, can_iterate

    clouds = [decaying(700, 70), mixed(700, 70, 6) + 0.1 * normal(700, 70, seed=9), normal(700, 70)]
    points = torch.stack(clouds).float().cuda()[:, :, : 4 * rank]
    assert can_iterate(points, rank)
    codes, dropped = seminmf._start(points, rank, torch.Generator().manual_seed(0)), torch.rand(3).double().cuda()
    there, here = (seminmf.Run(points, codes, dropped, 40) for _ in range(2))
    for _ in range(3):
        squares, settled = Started(there, seminmf.CHECK_EVERY, 0.0).finish()
        expected = [here.squares.tolist(), *here.advance(seminmf.CHECK_EVERY).T.tolist()]
        for one, other, ended in zip(squares, zip(*expected, strict=True), settled, strict=True):
            # Nothing is told of iterations that change nothing.
            assert ended or len(one) == seminmf.CHECK_EVERY + 1
            assert one == pytest.approx(other[: len(one)], rel=1e-5)
        exact = seminmf._squared_errors(there.codes.double(), there.directions, points.double()) + dropped
        torch.testing.assert_close(there.squares, exact, rtol=1e-6, atol=0)
        # Both go on from one place: small differences would grow.
        vars(here).update({name: getattr(there, name) for name in seminmf.PROGRESS})


@pytest.mark.skipif(not torch.cuda.is_available() or not has_triton(), reason="no CUDA device or no triton")
def test_one_kernel_ends_where_the_operations_end_and_turns_idle_directions() -> None:
    from anisoscope.kernels.alternation import Started

    clouds = [decaying(700, 24), mixed(700, 24, 6) + 0.1 * normal(700, 24, seed=9), normal(700, 24)]
    points = torch.stack(clouds).float().cuda()
    codes = seminmf._start(points, 6, torch.Generator().manual_seed(0))
    codes[1, :2] = 0
    there, here = (seminmf.Run(points, codes, torch.zeros(3).double().cuda(), 200) for _ in range(2))
    squares, settled = Started(there, 200, 1e-3).finish()
    kept, directions, expected, ended = seminmf._alternate(here, 200, 1e-3)
    assert settled == ended == [True] * 3
    assert [len(one) for one in squares] == [len(one) for one in expected]
    assert len({len(one) for one in squares}) > 1
    assert bool((there.codes.amax(2) > 0).all())
    for one, other in zip(squares, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    products = (one.mT.double() @ other for one, other in ((there.codes, there.directions), (kept, directions)))
    torch.testing.assert_close(*products, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_clouds_are_reproduced_on_a_gpu(name: str) -> None:
    points = DEGENERATE[name]().float()
    found = semi_nmf(points.cuda(), 8, seed=0)
    assert bool((found.codes >= 0).all())
    error = float((points - (found.codes @ found.directions).cpu()).norm())
    assert error <= DEGENERATE_TOLERANCE[torch.float32] * float(points.norm())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_clouds_side_by_side_on_a_gpu_are_factorised_as_if_each_were_alone() -> None:
    clouds = [decaying(400, 60), mixed(300, 60, 6) + 0.1 * normal(300, 60, seed=9), normal(250, 60)]
    clouds = [one.float().cuda() for one in clouds]
    for cloud, found in zip(clouds, side_by_side(clouds), strict=True):
        alone = semi_nmf(cloud, 6, seed=2, tolerance=1e-3)
        assert len(found.errors) == len(alone.errors)
        torch.testing.assert_close(found.errors, alone.errors, rtol=1e-5, atol=1e-6)
