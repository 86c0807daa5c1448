"""Every kernel against float64 references that share no code with it, each with its tolerance written down."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from anisoscope.cloud import Cloud
from anisoscope.kernels import gram, neighbors
from anisoscope.kernels.gram import center, eigenvalues, gram_sums, leading_eigenpair, moments, power_of_two_scale
from anisoscope.kernels.neighbors import drop_duplicates, first_occurrences, nearest_neighbors

# Relative errors against float64, promised for every cloud whatever its dtype.
LEADING_TOLERANCE = 1e-5
TOTAL_TOLERANCE = 1e-6
SQUARES_TOLERANCE = 2e-6
DISTANCE_TOLERANCE = 1e-6
# Against the largest eigenvalue: small ones drown in the rounding of the points themselves.
SPECTRUM_TOLERANCE = 1e-6
# | ‖v‖ - 1 |, in float32.
AXIS_TOLERANCE = 1e-6

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DETERMINISTIC = settings(derandomize=True, deadline=None, max_examples=60, database=None)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(rows: int, columns: int, *, seed: int) -> Tensor:
    return torch.linalg.qr(normal(rows, columns, seed=seed)).Q


def with_spectrum(spectrum: Tensor, n: int, d: int, *, seed: int = 0) -> Tensor:
    """Points whose XᵀX has exactly these eigenvalues (as far as float64 goes), in random directions."""
    left, right = orthonormal(n, len(spectrum), seed=seed), orthonormal(d, len(spectrum), seed=seed + 1000)
    return (left * spectrum.double().sqrt()) @ right.T


def with_outlier(points: Tensor, factor: float) -> Tensor:
    points = points.clone()
    points[7] *= factor
    return points


CLOUDS: dict[str, Callable[[], Tensor]] = {
    "steep spectrum": lambda: (normal(400, 120) * torch.arange(1, 121).double() ** -2).float(),
    "slow decay": lambda: (normal(300, 80) * torch.arange(1, 81).double() ** -0.5).float(),
    "isotropic, n > d": lambda: normal(600, 100).float(),
    "isotropic, n < d": lambda: normal(100, 300).float(),
    "isotropic, n = d": lambda: normal(128, 128).float(),
    "equal top eigenvalues": lambda: with_spectrum(torch.tensor([4.0] * 5 + [1.0] * 60), 200, 90).float(),
    "all eigenvalues equal": lambda: with_spectrum(torch.ones(64), 200, 64).float(),
    "few points": lambda: normal(40, 300).float(),
    "two points": lambda: normal(2, 60).float(),
    "one coordinate": lambda: normal(200, 1).float(),
    "mean offset 1e4": lambda: (normal(300, 64) + 1e4).float(),
    "mean offset 1e4 in one coordinate": lambda: (normal(300, 64) + 1e4 * torch.eye(64).double()[3]).float(),
    "mean offset 1e8, float64": lambda: normal(300, 64) + 1e8,
    "scale 1e19": lambda: (normal(200, 50) * 1e19).float(),
    "scale 1e-25": lambda: (normal(200, 50) * 1e-25).float(),
    "bfloat16": lambda: normal(300, 70).to(torch.bfloat16),
    "float16": lambda: normal(300, 70).to(torch.float16),
    "bfloat16 with offset": lambda: (normal(300, 70) + 20).to(torch.bfloat16),
    "float64": lambda: normal(300, 70),
    "one huge token": lambda: with_outlier(normal(300, 70), 1e4).float(),
    "one rogue coordinate": lambda: (normal(300, 70) * torch.tensor([300.0] + [1.0] * 69)).float(),
    "rank one": lambda: (normal(200, 1) * normal(1, 64, seed=1)).float(),
    "just above the size that is decomposed": lambda: normal(33, 33).float(),
    "just below it": lambda: normal(33, 32).float(),
}


@pytest.fixture(params=[(name, device) for name in CLOUDS for device in DEVICES], ids=lambda item: "/".join(item))
def cloud(request: pytest.FixtureRequest) -> Tensor:
    name, device = request.param
    return CLOUDS[name]().to(device)


def reference_spectrum(points: Tensor) -> Tensor:
    """Eigenvalues of the covariance, ascending: singular values of the centred points, no Gram."""
    exact = points.double().cpu()
    exact = exact - exact.mean(0)
    exact = exact - exact.mean(0)
    return torch.linalg.svdvals(exact).flip(0).square() / (len(exact) - 1)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.cpu().double() - expected).abs().max() / expected.abs().max())


def test_the_leading_eigenvalue_and_the_total_are_right_on_every_cloud(cloud: Tensor) -> None:
    expected = reference_spectrum(cloud)
    found = moments(center(cloud))
    assert found.leading.dtype == found.total.dtype == torch.float64
    assert relative_error(found.leading, expected[-1]) <= LEADING_TOLERANCE
    assert relative_error(found.total, expected.sum()) <= TOTAL_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_leading_eigenvalue_never_exceeds_the_total(dtype: torch.dtype) -> None:
    # On a line they are equal; computed apart, rounding puts one above the other now and then.
    for seed in range(20):
        line = normal(40, 1, seed=seed) * normal(1, 3 + 3 * seed, seed=seed + 1)
        found = moments(center(line.to(dtype)))
        assert 1 - LEADING_TOLERANCE <= float(found.leading / found.total) <= 1


def test_the_leading_axis_is_a_unit_eigenvector_on_every_cloud(cloud: Tensor) -> None:
    exact = cloud.double().cpu()
    exact = exact - exact.mean(0)
    axis = moments(center(cloud)).axis.double().cpu()
    leading = (exact @ axis).square().sum() / (len(cloud) - 1)
    assert abs(float(axis.norm()) - 1) <= AXIS_TOLERANCE
    # Hence ‖Cv - λv‖² ≤ λ₁(λ₁ - vᵀCv) ≤ 1e-5 λ₁²: a direction is known less well than its variance.
    assert relative_error(leading, reference_spectrum(cloud)[-1]) <= LEADING_TOLERANCE


def test_the_sums_of_eigenvalues_and_of_their_squares_are_right_on_every_cloud(cloud: Tensor) -> None:
    expected = reference_spectrum(cloud)
    centred = center(cloud)
    found, unit = gram_sums(centred), centred.scale.square()
    assert found.dim == cloud.shape[1]
    assert relative_error(found.total * unit, expected.sum()) <= TOTAL_TOLERANCE
    assert relative_error(found.squares * unit.square(), expected.square().sum()) <= SQUARES_TOLERANCE


def test_all_eigenvalues_are_right_and_none_is_negative_on_every_cloud(cloud: Tensor) -> None:
    expected, found = reference_spectrum(cloud), eigenvalues(center(cloud))
    assert found.shape == expected.shape
    assert bool((found >= 0).all())
    assert bool((found.diff() >= 0).all())
    assert relative_error(found, expected) <= SPECTRUM_TOLERANCE


def test_centred_points_have_mean_zero_and_undo_to_the_points(cloud: Tensor) -> None:
    centred = center(cloud)
    exact = cloud.double() - cloud.double().mean(0)
    largest = exact.abs().max()
    assert 2.0**-25 <= float(centred.squares.max().sqrt()) <= 2.0**25
    assert float((centred.points.double() * centred.scale - exact).abs().max() / largest) <= 2e-7 + gram.MEAN_LEFT
    assert float(centred.points.double().mean(0).norm() / centred.squares.mean().sqrt()) <= gram.MEAN_LEFT
    assert relative_error(centred.squares, centred.points.double().square().sum(1).cpu()) <= 1e-6


# Numbers of equal points; for some of them the mean in float64 is another number, which ones depends on the machine.
COUNTS = (2, 6, 39, 50, 60, 64, 97)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.7, 1e-30, 6e4])
@pytest.mark.parametrize("d", [1, 5, 60])
@pytest.mark.parametrize("device", DEVICES)
def test_points_that_are_all_equal_have_exactly_no_variance(
    d: int, value: float, dtype: torch.dtype, device: str
) -> None:
    for n in (1, *COUNTS):
        # One column in three is something else, so that a common scale does not round all of them alike.
        points = torch.full((n, d), value, dtype=dtype, device=device)
        points[:, ::3] /= 3
        centred = center(points)
        assert not bool(centred.points.any())
        found, sums = moments(centred), gram_sums(centred)
        assert float(found.total) == float(found.leading) == float(sums.total) == float(sums.squares) == 0
        assert bool(found.axis.isfinite().all())
        assert not bool(eigenvalues(centred).any())


def test_the_mean_of_equal_numbers_is_another_number_now_and_then() -> None:
    # Why the test above can fail: without care such residues are taken for variation.
    clouds = [torch.full((n, 5), 0.1, dtype=torch.float64) for n in COUNTS]
    assert any(bool((points - points.mean(0)).any()) for points in clouds)


def test_a_coordinate_that_does_not_vary_adds_nothing_beside_one_that_does() -> None:
    points = torch.cat([torch.full((97, 40), 0.1), normal(97, 1).float() * 1e-6], dim=1)
    expected = reference_spectrum(points[:, -1:])[-1]
    found = moments(center(points))
    assert relative_error(found.leading, expected) <= LEADING_TOLERANCE
    assert relative_error(found.total, expected) <= TOTAL_TOLERANCE


def test_the_scale_is_the_power_of_two_below_the_largest_value_over_the_whole_range_of_float64() -> None:
    for exponent in range(-1074, 1024):
        value = torch.tensor([[0.0, -(2.0**exponent) * (1.5 if exponent > -1074 else 1)]], dtype=torch.float64)
        assert float(power_of_two_scale(value)) == 2.0**exponent
    assert float(power_of_two_scale(torch.zeros(3, 2))) == 1


def spy_on(monkeypatch: pytest.MonkeyPatch, room: object, name: str) -> list[tuple[object, ...]]:
    """The arguments of every call of a function from now on."""
    original, calls = getattr(room, name), []

    def spy(*args: object) -> object:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(room, name, spy)
    return calls


def leading_error(points: Tensor) -> float:
    expected = torch.linalg.svdvals(points.double())[0].square()
    return relative_error(leading_eigenpair(points)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [0.0, 1e-4, 1e-2])
def test_close_eigenvalues_at_the_top_do_not_end_the_search_early(width: float, dtype: torch.dtype) -> None:
    # A gap between two Ritz values is no gap between eigenvalues: a rule that trusts it is off by the width of the
    # cluster on most of these clouds.
    for seed in range(12):
        n, d, top = 60 + 17 * seed, 40 + 11 * seed, 3 + 2 * seed
        spectrum = 1 - width * torch.linspace(0, 1, top)
        points = with_spectrum(spectrum, n, d, seed=seed) + 1e-4 * normal(n, d, seed=seed + 1) / (n + d) ** 0.5
        assert leading_error(points.to(dtype)) <= LEADING_TOLERANCE, (n, d, top)


@pytest.mark.parametrize("runner_up", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("d", [64, 256, 512])
def test_a_leading_axis_almost_orthogonal_to_the_start_is_found(d: int, runner_up: float) -> None:
    # Rogue dimensions are coordinates, so the leading axis may be the very coordinate where the start is smallest.
    start = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64).abs()
    for floor in (0.0, 1e-6, 1e-2):
        spectrum = torch.full((d,), floor, dtype=torch.float64)
        spectrum[start.argmin()], spectrum[start.argmax()] = 1, runner_up
        points = orthonormal(600, d, seed=d) * spectrum.sqrt()
        assert leading_error(points.float()) <= LEADING_TOLERANCE


def test_one_eigenvalue_above_many_equal_ones_is_found() -> None:
    for seed in range(60):
        n, d, equal = 64 + seed % 7, 50 + seed, 22 + seed % 15
        points = with_spectrum(torch.tensor([1.0] + [0.9] * equal), n, d, seed=seed)
        assert leading_error(points.float()) <= LEADING_TOLERANCE, seed


@DETERMINISTIC
@given(
    n=st.integers(33, 90),
    d=st.integers(33, 90),
    seed=st.integers(0, 2**20),
    exponents=st.lists(st.floats(-8, 0), min_size=1, max_size=20),
    noise=st.sampled_from([0.0, 1e-7, 1e-3]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_leading_eigenvalue_of_any_spectrum_is_found(
    n: int, d: int, seed: int, exponents: list[float], noise: float, dtype: torch.dtype
) -> None:
    points = with_spectrum(10 ** torch.tensor(exponents), n, d, seed=seed) + noise * normal(n, d, seed=seed + 1)
    assert leading_error(points.to(dtype)) <= LEADING_TOLERANCE


def test_what_lanczos_does_not_finish_is_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spy_on(monkeypatch, gram, "_leading_by_decomposition")
    points = center(normal(200, 90).float()).points
    assert leading_error(points) <= LEADING_TOLERANCE
    assert not calls
    monkeypatch.setattr(gram, "LANCZOS_STEPS", 5)
    assert leading_error(points) <= 1e-12
    assert len(calls) == 1


def test_flat_spectra_of_ordinary_size_need_no_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spy_on(monkeypatch, gram, "_leading_by_decomposition")
    leading_eigenpair(center(normal(2048, 512).float()).points)
    leading_eigenpair(center(normal(512, 1024).float()).points)
    assert not calls


def test_the_leading_pair_is_the_same_twice_and_leaves_the_random_state_alone() -> None:
    points = center(normal(300, 90).float()).points
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first, second = leading_eigenpair(points), leading_eigenpair(points)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.fixture
def precision() -> Iterator[Callable[[str], None]]:
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("setting", "largest"), [("highest", 2.0**-24), ("high", 2.0**-11), ("medium", 2.0**-8)])
def test_the_roundoff_of_products_follows_torchs_setting(
    setting: str, largest: float, device: str, precision: Callable[[str], None]
) -> None:
    precision(setting)
    low = gram.product_roundoff(torch.ones(2, 2, device=device))
    # A GPU has no bfloat16 products of float32: "medium" is TF32 there.
    assert low == (min(largest, 2.0**-11) if device == "cuda" else largest) if setting == "medium" else low == largest
    assert gram.product_roundoff(torch.ones(2, 2, device=device, dtype=torch.float64)) == 2.0**-53


def test_the_roundoff_of_products_is_known_when_it_was_set_through_torchs_newer_interface() -> None:
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has only the older interface")
    # In a process of its own: torch cannot undo the mixing of its two interfaces.
    code = (
        "import torch; from anisoscope.kernels import gram\n"
        "torch.backends.mkldnn.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "for device in ['cpu'] + ['cuda'] * torch.cuda.is_available():\n"
        "    assert gram.product_roundoff(torch.ones(2, 2, device=device)) == 2.0**-11\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("device", DEVICES)
def test_sums_are_made_in_float64_where_float32_products_would_be_rounded_further(
    device: str, precision: Callable[[str], None]
) -> None:
    centred = center(normal(300, 80).float().to(device))
    exact = centred.points.double() * centred.scale
    spectrum = torch.linalg.svdvals(exact).square() / 299
    precision("medium")
    squares = gram_sums(centred).squares * centred.scale**4
    assert float((squares / spectrum.square().sum() - 1).abs()) <= 1e-13
    assert float((moments(centred).total / spectrum.sum() - 1).abs()) <= TOTAL_TOLERANCE
    assert float((moments(centred).leading / spectrum.max() - 1).abs()) <= LEADING_TOLERANCE


def near_duplicates(n: int, d: int, distance: float, *, groups: int, dtype: torch.dtype) -> Tensor:
    """Groups of points around common centres, at about this distance relative to the centre's coordinates."""
    centres = normal(groups, d, seed=5).repeat_interleave(-(-n // groups), 0)[:n]
    return (centres + distance * normal(n, d, seed=6)).to(dtype)


NEIGHBOR_CLOUDS = CLOUDS | {
    "exact repeats": lambda: normal(60, 30).float().repeat(3, 1),
    "hardly any distinct points": lambda: normal(5, 40).float().repeat(40, 1),
    "pairs at 1e-6": lambda: near_duplicates(200, 50, 1e-6, groups=100, dtype=torch.float32),
    "groups of 20 at 1e-4": lambda: near_duplicates(200, 50, 1e-4, groups=10, dtype=torch.float32),
    "groups of 20 at 1e-6": lambda: near_duplicates(200, 50, 1e-6, groups=10, dtype=torch.float32),
    "groups of 20 at 1e-6, bfloat16": lambda: near_duplicates(200, 50, 1e-6, groups=10, dtype=torch.bfloat16),
    "groups of 20 at 1e-12, float64": lambda: near_duplicates(200, 50, 1e-12, groups=10, dtype=torch.float64),
    "many dimensions": lambda: normal(80, 3000).float(),
    "many dimensions with offset": lambda: (normal(80, 3000) + 100).float(),
    "tokens of norm 1e4": lambda: torch.cat([normal(190, 40), normal(10, 40) * 1e4]).float(),
    "a lattice": lambda: torch.cartesian_prod(*[torch.arange(6.0)] * 3),
    "a lattice far away": lambda: torch.cartesian_prod(*[torch.arange(6.0)] * 3) + 1e5,
    "a line with wild steps": lambda: (10.0 ** torch.linspace(-30, 0, 90)).reshape(-1, 1),
}


def reference_distances(points: Tensor) -> Tensor:
    """All distances by differences in float64, the point itself at infinity."""
    exact = points.double().cpu()
    distances = torch.stack([(exact - row).square().sum(1).sqrt() for row in exact])
    return distances.fill_diagonal_(torch.inf)


def assert_neighbors_are_right(points: Tensor, k: int) -> None:
    every = reference_distances(points)
    expected = every.sort(dim=1).values[:, :k]
    found = nearest_neighbors(points, k)
    assert found.indices is not None
    distances, indices = found.distances.cpu(), found.indices.cpu()
    assert distances.dtype == torch.float64
    assert distances.shape == indices.shape == (len(points), k)
    allowed = DISTANCE_TOLERANCE * expected
    assert bool(((distances - expected).abs() <= allowed).all()), "distances"
    assert bool((distances[expected == 0] == 0).all()), "repeats"
    assert bool((every.gather(1, indices) - expected <= allowed).all()), "indices"
    assert all(len(set(row)) == k for row in indices.tolist())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NEIGHBOR_CLOUDS)
@pytest.mark.parametrize("k", [1, 2, 20, 64])
def test_neighbour_distances_are_right_on_every_cloud(name: str, k: int, device: str) -> None:
    points = NEIGHBOR_CLOUDS[name]().to(device)
    assert_neighbors_are_right(points, min(k, len(points) - 1))


@pytest.mark.parametrize("k", [1, 2, 5, 64])
def test_all_other_points_can_be_asked_for(k: int) -> None:
    assert_neighbors_are_right(normal(k + 1, 12).float(), k)
    assert_neighbors_are_right(near_duplicates(k + 1, 12, 1e-7, groups=1, dtype=torch.float32), k)


@DETERMINISTIC
@given(
    n=st.integers(3, 60),
    d=st.integers(1, 40),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**20),
    closeness=st.floats(-12, 0),
    offset=st.floats(-2, 7),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_neighbour_distances_are_right_on_any_cloud(
    n: int, d: int, share: float, seed: int, closeness: float, offset: float, dtype: torch.dtype
) -> None:
    points = normal(max(1, n // 4), d, seed=seed)[torch.arange(n) % max(1, n // 4)]
    points = (
        points + 10**closeness * normal(n, d, seed=seed + 1) + min(10**offset, 1e3 if dtype == torch.float16 else 1e9)
    )
    assert_neighbors_are_right(points.to(dtype), max(1, min(64, round(share * (n - 1)))))


@pytest.mark.parametrize(
    ("name", "again", "differences"),
    [
        ("isotropic, n > d", False, False),
        ("tokens of norm 1e4", True, False),
        ("groups of 20 at 1e-4", True, False),
        ("groups of 20 at 1e-12, float64", True, True),
        ("hardly any distinct points", True, True),
    ],
)
def test_rows_without_a_proof_are_searched_again_in_float64_and_at_last_by_differences(
    name: str, again: bool, differences: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = spy_on(monkeypatch, neighbors, "_search")
    singles = spy_on(monkeypatch, neighbors, "_search_by_differences")
    points = NEIGHBOR_CLOUDS[name]()
    assert_neighbors_are_right(points, 2)
    assert len(searches) == (2 if again else 1)
    assert searches[-1][3].points.dtype == (torch.float64 if again else torch.float32)  # pyright: ignore
    assert bool(singles) == differences


def test_large_tokens_do_not_cost_the_others_their_proof() -> None:
    # A bound by the largest norm instead of each row's own would leave no row proven.
    large = normal(10, 40, seed=1) * 1e4
    points = torch.cat([normal(180, 40), large, -large]).float()
    hidden = torch.zeros(200, dtype=torch.bool)
    found = neighbors._search(points, slice(0, 200), 2, neighbors.multiply(center(points)), hidden)
    assert bool(found.proven[:180].all())


@pytest.mark.parametrize("name", ["groups of 20 at 1e-4", "groups of 20 at 1e-6"])
def test_without_the_proof_the_neighbours_would_be_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The clouds above are hard enough: a screening that trusts its products fails on them.
    monkeypatch.setattr(neighbors, "product_roundoff", lambda points: 0.0)
    with pytest.raises(AssertionError, match="distances"):
        assert_neighbors_are_right(NEIGHBOR_CLOUDS[name](), 2)


def test_blocks_do_not_change_the_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    points = near_duplicates(150, 20, 1e-3, groups=30, dtype=torch.float32)
    whole = nearest_neighbors(points, 5)
    monkeypatch.setattr(neighbors, "BLOCK_ELEMENTS", 400)
    parts = nearest_neighbors(points, 5)
    assert torch.equal(whole.distances, parts.distances)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_repeats_are_dropped_the_first_is_kept_and_the_order_stays(dtype: torch.dtype, device: str) -> None:
    rows = [[1.0, 2.0], [0.0, 3.0], [1.0, 2.0], [2.0, 1.0], [-0.0, 3.0], [1.0, -2.0], [1.0, 2.0]]
    found = drop_duplicates(torch.tensor(rows, dtype=dtype, device=device))
    assert found.index.tolist() == [0, 1, 3, 5]
    assert found.dropped == 3


def test_rows_that_differ_in_the_last_bit_are_kept() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        one = torch.ones(3, 50, dtype=dtype)
        one[1, 49] += torch.finfo(dtype).eps
        assert drop_duplicates(one).index.tolist() == [0, 1]
        tiny = torch.zeros(2, 50, dtype=dtype)
        tiny[1, 0] = torch.finfo(dtype).smallest_normal
        assert drop_duplicates(tiny).dropped == 0


def test_no_repeats_means_nothing_is_dropped() -> None:
    found = drop_duplicates(normal(500, 20).to(torch.bfloat16))
    assert found.dropped == 0
    assert found.index.tolist() == list(range(500))


def test_rows_of_equal_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    # With all weights 1 a row and its permutation have one hash.
    monkeypatch.setattr(torch, "randint", lambda low, high, size, **rest: torch.zeros(size, dtype=torch.int64))
    compared = []
    unique = torch.unique

    def spy(values: Tensor, **options: object) -> object:
        compared.append(options.get("dim"))
        return unique(values, **options)

    monkeypatch.setattr(torch, "unique", spy)
    points = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [2.0, 1.0, 3.0], [3.0, 2.0, 1.0]])
    found = drop_duplicates(points)
    assert found.index.tolist() == [0, 1, 3]
    assert found.dropped == 2
    assert 0 in compared


@DETERMINISTIC
@given(labels=st.lists(st.integers(-3, 3), max_size=30))
def test_first_occurrences_are_those_of_a_list(labels: list[int]) -> None:
    found = first_occurrences(torch.tensor(labels, dtype=torch.int64))
    assert found.tolist() == [labels.index(label) for label in labels]


def draw_hostile(kind: str, n: int, d: int, seed: int) -> Tensor:
    """The clouds that fool fast arithmetic, each in one way."""
    points = normal(n, d, seed=seed) * torch.arange(1, d + 1) ** -0.5
    others = points[torch.arange(n) // 2]
    if kind == "repeats":
        return others.float()
    if kind.startswith("near-repeats"):
        return others + float(kind.split()[-1]) * normal(n, d, seed=seed + 1)
    if kind == "offset 1e4":
        return (points + 1e4).float()
    if kind == "one row 1e4 times larger":
        return with_outlier(points, 1e4).float()
    if kind == "several rows 300 times larger":
        points[::9] *= 300
        return points.float()
    if kind == "two equal leading axes":
        return with_spectrum(torch.tensor([1.0, 1.0, *torch.full((min(n, d) - 2,), 0.01)]), n, d, seed=seed).float()
    if kind == "subnormals":
        return (points * 1e-39).float()
    return points.to({"bfloat16": torch.bfloat16, "plain": torch.float32}[kind])


HOSTILE = (
    "plain", "bfloat16", "repeats", "near-repeats 1e-3", "near-repeats 1e-9", "offset 1e4", "one row 1e4 times larger",
    "several rows 300 times larger", "two equal leading axes", "subnormals",
)  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
@settings(derandomize=True, deadline=None, max_examples=12, database=None)
# A part of subnormals that is scaled by another power of two than the whole.
@example(n=12, d=1, seed=43, share=0.75)
@given(n=st.integers(12, 150), d=st.integers(1, 90), seed=st.integers(0, 2**20), share=st.floats(0.4, 1.0))
def test_every_fast_path_is_right_on_hostile_clouds_and_on_parts_of_them(
    kind: str, n: int, d: int, seed: int, share: float
) -> None:
    if kind == "two equal leading axes" and min(n, d) < 3:
        d = 3
    points = draw_hostile(kind, n, d, seed)
    whole = Cloud(points=points, neighbor_count=2)
    index = torch.nonzero(torch.rand(n, generator=torch.Generator().manual_seed(seed)) < share).flatten()
    for cloud in (whole, whole.take(index)) if len(index) > 9 else (whole,):
        assert_views_are_right(cloud)


def assert_views_are_right(cloud: Cloud) -> None:
    """Every view that metrics share, against float64 algebra without shortcuts."""
    points = cloud.points
    spectrum = reference_spectrum(points)
    if float(spectrum.sum()) > 0:
        assert relative_error(cloud.moments.leading, spectrum[-1]) <= LEADING_TOLERANCE
        assert relative_error(cloud.moments.total, spectrum.sum()) <= TOTAL_TOLERANCE
        squares = cloud.gram_sums.squares * cloud.centred.scale**4
        assert relative_error(squares, spectrum.square().sum()) <= SQUARES_TOLERANCE
    exact = points.double()
    directions = (exact / exact.norm(dim=1, keepdim=True)).sum(0)
    assert float((cloud.directions.total - directions).norm()) <= 1e-6 * len(points)
    rows = torch.unique(exact, dim=0)
    assert len(cloud.unique.index) == len(rows)
    if len(rows) > 2:
        expected = reference_distances(points[cloud.unique.index]).sort(dim=1).values[:, :2]
        found = cloud.neighbors.distances
        assert bool(((found - expected).abs() <= DISTANCE_TOLERANCE * expected).all())


def test_a_part_reads_its_sum_of_squares_from_the_whole_unless_what_is_left_out_owns_it() -> None:
    points = normal(200, 40).float()
    whole = neighbors.multiply(center(points))
    part = torch.arange(10, 200)
    expected = reference_spectrum(points[part]).square().sum() * 189**2
    found = neighbors.squares_of_part(whole, part)
    assert found is not None
    assert relative_error(found, expected) <= SQUARES_TOLERANCE
    points[:10] *= 1000
    assert neighbors.squares_of_part(neighbors.multiply(center(points)), part) is None


def test_the_bound_from_the_sums_ends_the_search_sooner_and_is_never_wrong() -> None:
    for seed in range(6):
        points = center((normal(400, 150, seed=seed) * torch.arange(1, 151) ** -0.8).float())
        expected = torch.linalg.svdvals(points.points.double())[0].square()
        total, squares = points.squares.sum(), (points.points.double().T @ points.points.double()).square().sum()
        for known in ((None, None), (total, None), (total, squares)):
            assert relative_error(leading_eigenpair(points.points, *known)[0], expected) <= LEADING_TOLERANCE


def test_larger_batches_are_searched_in_blocks_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    points = near_duplicates(150, 20, 1e-3, groups=30, dtype=torch.float32)
    whole, squares = nearest_neighbors(points, 5), gram_sums(center(points)).squares
    monkeypatch.setattr(neighbors, "KEPT_POINTS", 100)
    products = neighbors.multiply(center(points))
    assert products.matrix is None
    assert torch.allclose(nearest_neighbors(points, 5, products).distances, whole.distances, rtol=1e-6)
    assert relative_error(products.row_squares.sum() / 149**2, squares) <= SQUARES_TOLERANCE


def test_points_left_out_are_neither_asked_about_nor_found() -> None:
    points = normal(80, 6).float()
    without = torch.tensor([3, 10, 79])
    kept = torch.tensor([row for row in range(80) if row not in without])
    found, expected = nearest_neighbors(points, 4, without=without), nearest_neighbors(points[kept], 4)
    assert torch.allclose(found.distances, expected.distances)
    assert torch.equal(found.indices, expected.indices)  # pyright: ignore


def test_equal_rows_have_equal_norms_wherever_they_stand() -> None:
    # What the search for repeats rests on.
    for d in (1, 7, 64, 301, 768):
        row = normal(1, d).float()
        points = torch.cat([normal(37, d, seed=1).float(), row, normal(130, d, seed=2).float(), row])
        norms = torch.linalg.vector_norm(points, dim=1)
        assert norms[37] == norms[-1]


@pytest.mark.parametrize(("width", "count"), [(2048, 6), (4096, 3), (4096, 9), (2049, 4), (50, 5)])
def test_the_smallest_of_wide_rows_are_those_of_a_full_selection(width: int, count: int) -> None:
    values = normal(20, width).float()
    values[3] = values[3].round()
    values[4, 10:] = torch.inf
    found, places = neighbors._smallest(values, count)
    assert torch.equal(found, values.sort(dim=1).values[:, :count])
    assert torch.equal(values.gather(1, places), found)
    assert all(len(set(row)) == count for row in places.tolist())
