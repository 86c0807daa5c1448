"""Metrics on clouds whose answer is known: closed forms, hand calculations, manifolds of known dimension."""

import doctest
import math

import pytest
import torch
from torch import Tensor

from anisoscope.cloud import Cloud, Tokens
from anisoscope.estimates import Evaluated, estimate, evaluate
from anisoscope.kernels.gram import GramSums
from anisoscope.kernels.neighbors import Neighbors
from anisoscope.metrics import Metric, all_metrics
from anisoscope.metrics.neighbors import (
    gride_2,
    gride_4,
    gride_8,
    gride_16,
    gride_32,
    levina_bickel,
    near_duplicate_rate,
    solve_gride,
    twonn,
    twonn_mle,
)
from anisoscope.metrics.spectrum import isoscore, isoscore_star, participation_ratio

DEFAULTS = {"discard_fraction": 0.1, "gride_scales": (2, 4), "neighbors": 20, "isoscore_zeta": 0.25}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(d: int, *, seed: int = 0) -> Tensor:
    return torch.linalg.qr(normal(d, d, seed=seed)).Q


def measured(name: str, points: Tensor, *, previous: Tensor | None = None, **settings: float) -> Evaluated:
    cloud = Cloud(points=points, previous=previous, neighbor_count=64)
    return evaluate(cloud, all_metrics()[name], DEFAULTS | settings)


def value_of(name: str, points: Tensor, *, previous: Tensor | None = None, **settings: float) -> float:
    return float(measured(name, points, previous=previous, **settings).value)


def cross(*lengths: float) -> Tensor:
    """Points at ± each length along each axis: the eigenvalues are in the proportion of the squares."""
    axes = torch.diag(torch.tensor(lengths, dtype=torch.float64))
    return torch.cat([axes, -axes])


# The spectrum


def test_leading_variance_of_a_diagonal_spectrum_is_its_largest_share() -> None:
    for lengths in ((3.0, 1.0), (1.0, 2.0, 2.0), tuple(range(1, 60))):
        squares = [length**2 for length in lengths]
        points = cross(*lengths)
        expected = max(squares) / sum(squares)
        assert value_of("leading_variance", points) == pytest.approx(expected, rel=1e-6)
        assert value_of("leading_variance", points @ rotation(len(lengths)) + 5) == pytest.approx(expected, rel=1e-6)


def test_leading_variance_of_a_line_is_one_and_of_equal_eigenvalues_one_over_d() -> None:
    assert value_of("leading_variance", uniform(50, 1) * normal(1, 40) + 3) == pytest.approx(1, abs=1e-12)
    assert value_of("leading_variance", cross(*[2.0] * 40)) == pytest.approx(1 / 40, rel=1e-6)


@pytest.mark.parametrize(("n", "d"), [(2000, 100), (500, 200), (300, 600)])
def test_leading_variance_of_isotropic_points_lies_at_the_edge_of_marchenko_and_pastur(n: int, d: int) -> None:
    floor = (1 + math.sqrt(d / n)) ** 2 / d
    assert value_of("leading_variance", normal(n, d).float()) == pytest.approx(floor, rel=0.06)
    assert floor > 1.3 / d


def spectra() -> list[Tensor]:
    steep = torch.arange(1, 51, dtype=torch.float64) ** -2
    return [steep, uniform(30), torch.ones(20, dtype=torch.float64), cross(1.0, 2.0)[:2].square().sum(0)]


def sums_of(spectrum: Tensor) -> GramSums:
    return GramSums(total=spectrum.sum(), squares=spectrum.square().sum(), dim=len(spectrum))


def published_isoscore(spectrum: Tensor) -> float:
    d = len(spectrum)
    normalised = math.sqrt(d) * spectrum / spectrum.norm()
    delta = (normalised - 1).norm() / math.sqrt(2 * (d - math.sqrt(d)))
    return float(((d - delta**2 * (d - math.sqrt(d))) ** 2 - d) / (d * (d - 1)))


@pytest.mark.parametrize("spectrum", spectra(), ids=["steep", "uniform", "equal", "two"])
def test_isoscore_is_the_published_formula(spectrum: Tensor) -> None:
    assert float(isoscore(sums_of(spectrum))) == pytest.approx(published_isoscore(spectrum), abs=1e-12)


def test_isoscore_of_a_cloud_is_the_published_formula_of_its_covariance() -> None:
    points = normal(200, 30) * torch.linspace(0.1, 3, 30)
    spectrum = torch.linalg.eigvalsh(points.T.cov())
    assert value_of("isoscore", points) == pytest.approx(published_isoscore(spectrum), abs=1e-12)
    assert value_of("isoscore", points.float()) == pytest.approx(published_isoscore(spectrum), abs=1e-6)


def test_isoscore_of_a_line_is_zero_and_of_equal_eigenvalues_one() -> None:
    assert value_of("isoscore", uniform(50, 1) * normal(1, 8)) == pytest.approx(0, abs=1e-12)
    assert value_of("isoscore", cross(*[3.0] * 8) @ rotation(8) - 2) == pytest.approx(1, abs=1e-12)


def test_participation_ratio_of_a_line_is_one_and_of_m_equal_eigenvalues_m() -> None:
    assert value_of("participation_ratio", uniform(50, 1) * normal(1, 8)) == pytest.approx(1, abs=1e-12)
    for m in (2, 5, 8):
        points = cross(*[3.0] * m, *[0.0] * (8 - m)) @ rotation(8)
        assert value_of("participation_ratio", points) == pytest.approx(m, rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_participation_ratio_lies_between_one_over_a_and_one_over_a_squared(seed: int) -> None:
    for power in (0.0, 0.5, 2.0):
        points = normal(150, 40, seed=seed) * torch.arange(1, 41) ** -power
        leading, ratio = value_of("leading_variance", points), value_of("participation_ratio", points)
        assert 1 / leading <= ratio <= 1 / leading**2


@pytest.mark.parametrize("zeta", [0.0, 0.25, 0.75, 1.0])
def test_isoscore_star_is_the_isoscore_of_the_shrunk_covariance(zeta: float) -> None:
    points = normal(90, 12) * torch.linspace(0.1, 3, 12)
    covariance = points.T.cov()
    target = covariance.trace() / 12 * torch.eye(12, dtype=torch.float64)
    shrunk = torch.linalg.eigvalsh((1 - zeta) * covariance + zeta * target)
    expected = published_isoscore(shrunk)
    assert value_of("isoscore_star", points, isoscore_zeta=zeta) == pytest.approx(expected, abs=1e-12)


def test_isoscore_star_is_isoscore_at_zero_and_one_at_one() -> None:
    for spectrum in spectra():
        sums = sums_of(spectrum)
        assert float(isoscore_star(sums, isoscore_zeta=0.0)) == pytest.approx(float(isoscore(sums)), abs=1e-14)
        assert float(isoscore_star(sums, isoscore_zeta=1.0)) == pytest.approx(1, abs=1e-14)


def test_participation_ratio_and_isoscore_are_one_number() -> None:
    for spectrum in spectra():
        sums = sums_of(spectrum)
        ratio = float(participation_ratio(sums))
        assert float(isoscore(sums)) == pytest.approx((ratio - 1) / (len(spectrum) - 1), abs=1e-14)


def test_effective_rank_is_the_number_of_equal_eigenvalues() -> None:
    # A constant inside the logarithm would read 802 where there are 768 dimensions.
    for m, d in ((1, 8), (2, 8), (8, 8), (96, 96)):
        points = cross(*[3.0] * m, *[0.0] * (d - m)) @ rotation(d)
        assert value_of("effective_rank", points) == pytest.approx(m, rel=1e-10)
        assert value_of("effective_rank", points) <= d + 1e-10


def test_effective_rank_of_two_eigenvalues_by_hand() -> None:
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert value_of("effective_rank", cross(3.0, 1.0)) == pytest.approx(math.exp(entropy), rel=1e-12)


# Directions


def mean_cosine_by_pairs(points: Tensor) -> float:
    units = points.double() / points.double().norm(dim=1, keepdim=True)
    cosines = units @ units.T
    n = len(points)
    return float((cosines.sum() - cosines.trace()) / (n * (n - 1)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_mean_cosine_is_the_mean_over_all_pairs(dtype: torch.dtype) -> None:
    for offset in (0.0, 0.5, 10.0):
        points = (normal(60, 9) + offset).to(dtype)
        # Sums of float32 points are made in float32, around their mean.
        tolerance = 1e-14 if dtype == torch.float64 else 1e-7
        assert value_of("mean_cosine", points) == pytest.approx(mean_cosine_by_pairs(points), abs=tolerance)


def test_mean_cosine_at_the_ends_of_its_range() -> None:
    assert value_of("mean_cosine", (uniform(50, 1) + 0.1) * normal(1, 8)) == pytest.approx(1, abs=1e-14)
    assert value_of("mean_cosine", torch.tensor([[1.0, 2.0], [-2.0, -4.0]])) == pytest.approx(-1, abs=1e-7)
    # A regular simplex around the origin: the least there can be is -1/(n - 1).
    simplex = torch.eye(6) - 1 / 6
    assert value_of("mean_cosine", simplex) == pytest.approx(-1 / 5, abs=1e-7)


def test_mean_cosine_takes_points_of_any_length() -> None:
    points = normal(40, 5) + 1
    # The squares of most of them are beyond float64.
    lengths = 10.0 ** torch.linspace(-290, 290, 40, dtype=torch.float64).reshape(-1, 1)
    assert value_of("mean_cosine", points * lengths) == pytest.approx(mean_cosine_by_pairs(points), abs=1e-12)


def test_mean_offset_by_hand() -> None:
    points = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert value_of("mean_offset", points) == pytest.approx(math.hypot(1.5, 2) / math.sqrt((9 + 16) / 2), rel=1e-12)
    assert value_of("mean_offset", cross(1.0, 2.0)) == pytest.approx(0, abs=1e-15)
    assert value_of("mean_offset", torch.full((7, 3), 0.1)) == pytest.approx(1, abs=1e-12)
    for size in (1e-200, 1e200):
        assert value_of("mean_offset", points.double() * size) == pytest.approx(value_of("mean_offset", points))


# The partition function


def partition_by_loops(points: Tensor) -> float:
    exact = points.double()
    partitions = [
        sum(math.exp(sign * float(row @ axis)) for row in exact)
        for axis in torch.linalg.svd(exact).Vh
        for sign in (1, -1)
    ]
    return min(partitions) / max(partitions)


@pytest.mark.parametrize(("n", "d"), [(30, 4), (5, 4), (3, 6)])
def test_partition_isotropy_is_the_ratio_over_both_signs_of_every_eigenvector(n: int, d: int) -> None:
    points = normal(n, d) * torch.linspace(0.5, 2, d) + 0.2
    assert value_of("partition_isotropy", points) == pytest.approx(partition_by_loops(points), rel=1e-9)


def test_partition_isotropy_is_at_most_what_one_sign_of_each_eigenvector_gives() -> None:
    points = normal(30, 4) * torch.linspace(0.5, 2, 4) + 0.2
    axes = torch.linalg.svd(points).Vh
    both, singles = value_of("partition_isotropy", points), []
    for signs in torch.cartesian_prod(*[torch.tensor([1.0, -1.0], dtype=torch.float64)] * 4):
        partitions = torch.logsumexp(points @ (signs[:, None] * axes).T, 0)
        singles.append(float((partitions.min() - partitions.max()).exp()))
    # Signs are arbitrary, and the one-sign value depends on them: here by more than a factor of two.
    assert max(singles) > 2 * min(singles)
    assert both <= min(singles) * (1 + 1e-12)


def test_partition_isotropy_by_hand() -> None:
    # XᵀX is diagonal, so the axes are the coordinates. Z: e² + 1 and e⁻² + 1 along the first, e + 1 and e⁻¹ + 1 along
    # the second.
    points = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    assert value_of("partition_isotropy", points) == pytest.approx((1 + math.exp(-2)) / (math.exp(2) + 1), rel=1e-12)


def test_partition_isotropy_does_not_depend_on_the_signs_of_eigenvectors() -> None:
    points = normal(50, 6) + 0.3
    assert value_of("partition_isotropy", -points) == pytest.approx(value_of("partition_isotropy", points), rel=1e-12)


def test_partition_isotropy_tends_to_one_for_small_points_and_falls_with_their_size() -> None:
    points = normal(50, 6) + 0.3
    assert value_of("partition_isotropy", points * 1e-9) == pytest.approx(1, abs=1e-7)
    assert value_of("partition_isotropy", torch.zeros(50, 6)) == 1
    values = [value_of("partition_isotropy", points * size) for size in (0.1, 0.5, 1, 2, 4)]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("size", [300.0, 1e19])
def test_partition_isotropy_of_long_points_does_not_overflow(size: float) -> None:
    # exp(300 · 3) is more than float64 holds; the ratio of symmetric points is not.
    points = cross(1.0, 1.0, 1.0) * size
    assert value_of("partition_isotropy", points) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize(("size", "dtype"), [(1e4, torch.float32), (1e30, torch.float32), (1e200, torch.float64)])
def test_partition_isotropy_below_the_smallest_number_is_nan_with_a_note(size: float, dtype: torch.dtype) -> None:
    found = measured("partition_isotropy", (normal(50, 6) * size).to(dtype))
    assert math.isnan(float(found.value))
    assert found.note is not None
    assert "too long for a partition function" in found.note


# Intrinsic dimension


def neighbors_with_ratios(ratios: Tensor) -> Neighbors:
    """Neighbours whose r₂ / r₁ are these; r₁ itself is arbitrary."""
    first = 0.5 + uniform(len(ratios), seed=9)
    distances = torch.stack([first, first * ratios], dim=1)
    return Neighbors(distances=distances, indices=torch.zeros(len(ratios), 2, dtype=torch.int64))


def pareto(n: int, d: float, *, seed: int) -> Tensor:
    """Exact samples of the ratio's law F(μ) = 1 - μ⁻ᵈ."""
    return (1 - uniform(n, seed=seed)) ** (-1 / d)


@pytest.mark.parametrize("d", [1.0, 12.0, 300.0])
@pytest.mark.parametrize(("discard", "noise"), [(0.1, 1.15), (0.8, 2.4), (0.0, 2.0)])
def test_twonn_recovers_the_dimension_of_exact_ratios(d: float, discard: float, noise: float) -> None:
    # `noise` is the standard deviation in units of d/√N: near 1 for the lowest 90 %, more than twice that for 20 %.
    n, trials = 4096, 24
    values = torch.tensor(
        [float(twonn(neighbors_with_ratios(pareto(n, d, seed=s)), discard_fraction=discard)) for s in range(trials)]
    )
    error = noise * d / math.sqrt(n)
    assert float(values.mean()) == pytest.approx(d, abs=5 * error / math.sqrt(trials))
    assert 0.5 * error < float(values.std()) < 1.5 * error


@pytest.mark.parametrize("discard", [0.0, 0.1, 0.5, 0.8])
def test_twonn_mle_recovers_the_dimension_of_exact_ratios_with_the_error_it_states(discard: float) -> None:
    n, trials, d = 2000, 40, 12.0
    values = torch.tensor(
        [float(twonn_mle(neighbors_with_ratios(pareto(n, d, seed=s)), discard_fraction=discard)) for s in range(trials)]
    )
    error = d / math.sqrt(n * (1 - discard))
    assert float(values.mean()) == pytest.approx(d, abs=4 * error / math.sqrt(trials))
    assert 0.7 * error < float(values.std()) < 1.35 * error


def test_twonn_by_hand() -> None:
    # N = 4, discard 0.25: the three smallest of log μ = 1, 2, 3, 9 against y = -log(1 - i/4).
    y = [-math.log(3 / 4), -math.log(2 / 4), -math.log(1 / 4)]
    expected = (1 * y[0] + 2 * y[1] + 3 * y[2]) / (1 + 4 + 9)
    logs = torch.tensor([9.0, 2.0, 1.0, 3.0], dtype=torch.float64)
    assert float(twonn(neighbors_with_ratios(logs.exp()), discard_fraction=0.25)) == pytest.approx(expected, rel=1e-12)


def test_twonn_mle_by_hand() -> None:
    # N = 4, k = 3: (3 - 1) / (1 + 2 + 3 + (4 - 3) · 3); the largest ratio is known only to exceed the third.
    for largest in (4.0, 9.0, 30.0):
        logs = torch.tensor([largest, 2.0, 1.0, 3.0], dtype=torch.float64)
        found = twonn_mle(neighbors_with_ratios(logs.exp()), discard_fraction=0.25)
        assert float(found) == pytest.approx(2 / 9, rel=1e-12)


def test_the_last_ratio_is_never_used_however_little_is_discarded() -> None:
    # Its empirical F is 1 and -log(1 - F) infinite.
    logs = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    y = [-math.log(2 / 3), -math.log(1 / 3)]
    found = twonn(neighbors_with_ratios(logs.exp()), discard_fraction=0.0)
    assert float(found) == pytest.approx((y[0] + 2 * y[1]) / 5, rel=1e-12)
    assert float(twonn_mle(neighbors_with_ratios(logs.exp()), discard_fraction=0.0)) == pytest.approx(1 / 5, rel=1e-12)


@pytest.mark.parametrize("discard", [0.0, 0.1])
def test_three_points_have_a_dimension(discard: float) -> None:
    # On a line at 0, 1 and 3: log μ = log 3, log 2 and log 1.5.
    points = torch.tensor([[0.0, 0.0], [1.0, 1.0], [3.0, 3.0]])
    x, y = [math.log(1.5), math.log(2)], [-math.log(2 / 3), -math.log(1 / 3)]
    expected = (x[0] * y[0] + x[1] * y[1]) / (x[0] ** 2 + x[1] ** 2)
    assert value_of("twonn", points, discard_fraction=discard) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["twonn", "twonn_mle"])
@pytest.mark.parametrize(("n", "discard"), [(3, 0.5), (4, 0.8), (9, 0.8), (50, 0.99)])
def test_a_dimension_from_fewer_than_two_ratios_is_nan_with_a_note(name: str, n: int, discard: float) -> None:
    found = measured(name, normal(n, 3), discard_fraction=discard)
    assert math.isnan(float(found.value))
    assert found.note == "all ratios of distances are 1, or too few are kept"


@pytest.mark.parametrize("name", ["twonn", "twonn_mle"])
@pytest.mark.parametrize(("n", "discard"), [(4, 0.5), (10, 0.8), (200, 0.99)])
def test_two_ratios_are_enough_for_a_dimension(name: str, n: int, discard: float) -> None:
    found = measured(name, normal(n, 3), discard_fraction=discard)
    assert float(found.value) > 0
    assert found.note is None


@pytest.mark.parametrize(("d", "expected"), [(2, 1.99), (10, 9.5)])
def test_twonn_of_gaussians_reads_what_is_known_of_it(d: int, expected: float) -> None:
    values = [value_of("twonn", normal(2000, d, seed=seed).float()) for seed in range(4)]
    assert sum(values) / 4 == pytest.approx(expected, rel=0.03)


def test_twonn_recovers_the_dimension_of_a_sphere_in_a_larger_space() -> None:
    sphere = normal(2000, 4)
    sphere = sphere / sphere.norm(dim=1, keepdim=True) @ rotation(64)[:4]
    for name in ("twonn", "twonn_mle", "gride_2", "gride_4", "levina_bickel"):
        assert value_of(name, sphere.float() + 7) == pytest.approx(3, rel=0.07), name


def test_twonn_recovers_the_dimension_of_a_swiss_roll() -> None:
    angle, height = 1.5 * math.pi * (1 + 2 * uniform(2000)), 21 * uniform(2000, seed=1)
    roll = torch.stack([angle * angle.cos(), height, angle * angle.sin()], dim=1)
    for name in ("twonn", "twonn_mle", "gride_2", "gride_8", "levina_bickel"):
        assert value_of(name, roll) == pytest.approx(2, rel=0.07), name


def test_twonn_is_not_the_equation_as_printed() -> None:
    # y = 1 - F in place of -log(1 - F), all ratios kept, reads an eighth of the dimension.
    points = normal(2000, 10)
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").sort(dim=1).values
    log_mu = (distances[:, 2] / distances[:, 1]).log().sort().values
    printed = 1 - torch.arange(1, 2001) / 2000
    assert float((log_mu * printed).sum() / log_mu.square().sum()) == pytest.approx(10 / 8, abs=0.25)
    assert value_of("twonn", points, discard_fraction=0.0) > 8
    assert value_of("twonn", points) == pytest.approx(9.5, rel=0.05)


def rounded(points: Tensor, kind: str) -> Tensor:
    """float64, float32, or values that bfloat16 holds, in bfloat16 or in float32."""
    if kind == "bfloat16 values in float32":
        return points.to(torch.bfloat16).float()
    return points.to(getattr(torch, kind))


NEIGHBOR_METRICS = [metric.name for metric in all_metrics().values() if metric.needs == "neighbors"]


@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16", "bfloat16 values in float32"])
@pytest.mark.parametrize("d", [5, 64])
def test_repeated_rows_change_no_dimension_and_are_counted(d: int, kind: str) -> None:
    points = rounded(normal(300, 5) @ normal(5, d, seed=1) + 3, kind)
    repeated = torch.cat([points, points[:90], points[:30]])
    for name in NEIGHBOR_METRICS:
        alone, together = measured(name, points), measured(name, repeated)
        assert float(together.value) == float(alone.value), name
        assert (alone.dropped, together.dropped) == (0, 120)
        assert alone.points == together.points == 300


def test_repeats_of_tokens_as_in_an_embedding_layer_are_removed() -> None:
    # Zipf draws of 400 vectors: most rows are repeats.
    table = normal(400, 64).float()
    draws = torch.multinomial(1 / torch.arange(1.0, 401), 1000, True, generator=torch.Generator().manual_seed(0))
    found = measured("twonn", table[draws])
    distinct = draws.unique()
    assert found.points == len(distinct)
    assert found.dropped == 1000 - len(distinct)
    assert float(found.value) == pytest.approx(value_of("twonn", table[distinct]), rel=1e-12)


def test_near_repeats_raise_the_near_duplicate_rate_and_wreck_the_dimension() -> None:
    points = normal(1000, 10)
    assert value_of("near_duplicate_rate", points) == 0
    near = torch.cat([points, points[:300] + 1e-9 * normal(300, 10, seed=1)])
    # 600 of 1300 have a neighbour on top of them.
    assert value_of("near_duplicate_rate", near) == pytest.approx(600 / 1300)
    assert value_of("twonn", near) < 1


def test_near_duplicate_rate_by_hand() -> None:
    distances = torch.tensor([[1.0], [2.0], [3.0], [1.9e-3], [2.1e-3]], dtype=torch.float64)
    found = near_duplicate_rate(Neighbors(distances=distances, indices=torch.zeros(5, 1, dtype=torch.int64)))
    # The median is 1: none is below 1e-3.
    assert float(found) == 0
    distances[3:] /= 4
    found = near_duplicate_rate(Neighbors(distances=distances, indices=torch.zeros(5, 1, dtype=torch.int64)))
    assert float(found) == pytest.approx(2 / 5)


def test_gride_2_is_the_uncensored_maximum_likelihood_of_twonn() -> None:
    log_mu = pareto(500, 7.0, seed=3).log()
    found = gride_2(neighbors_with_ratios(log_mu.exp()))
    assert float(found) == pytest.approx(499 / float(log_mu.sum()), rel=1e-10)


def gride_ratios(n: int, d: float, near: int, far: int, *, seed: int) -> Tensor:
    """Exact log μ: μ⁻ᵈ is the share of the far ball's points that the near one holds, Beta(near, far - near)."""
    sums = -torch.log(1 - uniform(n, far, seed=seed)).cumsum(1)
    return torch.log(sums[:, far - 1] / sums[:, near - 1]) / d


@pytest.mark.parametrize("far", [2, 4, 16, 64])
@pytest.mark.parametrize("d", [0.7, 10.0, 200.0])
def test_gride_recovers_the_dimension_of_exact_ratios(far: int, d: float) -> None:
    near = far // 2
    values = [float(solve_gride(gride_ratios(2000, d, near, far, seed=seed), near, far)) for seed in range(6)]
    # The standard error is near d/√(N far/4) for larger scales, d/√N for the smallest.
    assert sum(values) / 6 == pytest.approx(d, rel=3.5 / math.sqrt(2000 * max(1, far / 4) * 6))


@pytest.mark.parametrize(("near", "far"), [(1, 2), (2, 4), (8, 16), (32, 64)])
@pytest.mark.parametrize("d", [0.01, 3.0, 5000.0])
def test_gride_solves_its_score_equation(near: int, far: int, d: float) -> None:
    log_mu = gride_ratios(300, d, near, far, seed=1)

    def score(candidate: float) -> float:
        logs = log_mu.tolist()
        held = sum(x / (1 - math.exp(-candidate * x)) for x in logs)
        return (len(logs) - 1) / candidate + (far - near - 1) * held - (far - 1) * sum(logs)

    # A root of our own: a grid in log d, then Newton with a numerical derivative.
    grid = [d * math.exp(step / 50) for step in range(-100, 101)]
    crossing = next(i for i in range(200) if score(grid[i]) > 0 >= score(grid[i + 1]))
    root = grid[crossing]
    for _ in range(20):
        slope = (score(root * (1 + 1e-6)) - score(root * (1 - 1e-6))) / (2e-6 * root)
        root -= score(root) / slope
    assert float(solve_gride(log_mu, near, far)) == pytest.approx(root, rel=1e-8)


def test_gride_stays_level_on_uniform_data_of_constant_dimension() -> None:
    # On a torus there is no border, so every scale sees the plane.
    angles = 2 * math.pi * uniform(3000, 2)
    torus = torch.cat([angles.cos(), angles.sin()], dim=1)
    for name in ("gride_2", "gride_4", "gride_8", "gride_16", "gride_32"):
        assert value_of(name, torus) == pytest.approx(2, rel=0.06), name


def test_gride_reads_the_two_neighbours_it_is_named_after() -> None:
    distances = torch.linspace(1, 2, 64, dtype=torch.float64).expand(50, 64) * (1 + uniform(50, 64) / 100)
    distances = distances.sort(dim=1).values
    found = Neighbors(distances=distances, indices=torch.zeros(50, 64, dtype=torch.int64))
    for metric, near, far in ((gride_4, 2, 4), (gride_8, 4, 8), (gride_16, 8, 16), (gride_32, 16, 32)):
        logs = torch.log(distances[:, far - 1] / distances[:, near - 1])
        assert float(metric(found)) == pytest.approx(float(solve_gride(logs, near, far)), rel=1e-10)


def test_levina_bickel_averages_inverses_over_k_minus_one_terms() -> None:
    distances = torch.tensor([[1.0, 2.0, 4.0, 100.0], [1.0, 1.0, 8.0, 100.0]], dtype=torch.float64)
    found = levina_bickel(Neighbors(distances=distances, indices=torch.zeros(2, 4, dtype=torch.int64)), neighbors=3)
    first, second = (math.log(4) + math.log(2)) / 2, 2 * math.log(8) / 2
    assert float(found) == pytest.approx(1 / ((first + second) / 2), rel=1e-12)
    # With the zero term log(r_k / r_k) counted it would be 3/2 of that.


@pytest.mark.parametrize("k", [5, 20])
def test_levina_bickel_recovers_the_dimension_of_uniform_and_gaussian_points(k: int) -> None:
    angles = 2 * math.pi * uniform(2000, 2)
    torus = torch.cat([angles.cos(), angles.sin()], dim=1)
    # Counting k terms instead of k - 1 would read 2.5 and 2.1.
    assert value_of("levina_bickel", torus, neighbors=k) == pytest.approx(2, rel=0.04)
    assert value_of("levina_bickel", normal(2000, 3), neighbors=k) == pytest.approx(3, rel=0.08)


# Linearity


def test_a_linear_image_is_fully_explained() -> None:
    source = normal(200, 8)
    image = source @ normal(8, 8, seed=1) + 5
    for name in ("procrustes_linearity", "procrustes_linearity_heldout"):
        assert value_of(name, image, previous=source) == pytest.approx(1, abs=1e-10)
        assert value_of(name, image.float(), previous=source.float()) == pytest.approx(1, abs=1e-6)
        assert value_of(name, source @ rotation(8), previous=source) == pytest.approx(1, abs=1e-10)


def test_a_source_of_lower_rank_explains_what_it_spans() -> None:
    factors = normal(200, 3)
    source = factors @ normal(3, 8, seed=1)
    assert value_of("procrustes_linearity", factors @ normal(3, 8, seed=2), previous=source) == pytest.approx(1)
    mixed = torch.cat([factors[:, :1], normal(200, 1, seed=3)], dim=1)
    assert 0.3 < value_of("procrustes_linearity", mixed, previous=source) < 0.7


def test_linearity_is_one_minus_the_least_squares_residual_of_normalised_states() -> None:
    source, target = normal(60, 5) + 1, normal(60, 4, seed=1) - 2
    target[:, 0] += source[:, 1] ** 2
    x, y = source - source.mean(0), target - target.mean(0)
    x, y = x / x.norm(), y / y.norm()
    residual = x @ torch.linalg.lstsq(x, y).solution - y
    expected = 1 - float(residual.square().sum())
    assert value_of("procrustes_linearity", target, previous=source) == pytest.approx(expected, abs=1e-12)


def test_heldout_linearity_is_the_score_of_the_second_half_under_the_fit_of_the_first() -> None:
    source, target = normal(80, 5) + 1, normal(80, 4, seed=1) - 2
    target[:, 0] += 3 * source[:, 1]
    x_mean, y_mean = source[:40].mean(0), target[:40].mean(0)
    fit = torch.linalg.lstsq(source[:40] - x_mean, target[:40] - y_mean).solution
    rest = target[40:] - y_mean
    expected = 1 - float(((source[40:] - x_mean) @ fit - rest).square().sum() / rest.square().sum())
    assert value_of("procrustes_linearity_heldout", target, previous=source) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(("n", "d"), [(100, 10), (64, 16)])
def test_independent_states_score_the_closed_form_of_their_null(n: int, d: int) -> None:
    for name in ("procrustes_linearity", "procrustes_linearity_heldout"):
        metric = all_metrics()[name]
        assert metric.closed_form is not None
        values = torch.tensor(
            [value_of(name, normal(n, d, seed=2 * s), previous=normal(n, d, seed=2 * s + 1)) for s in range(60)]
        )
        error = float(values.std()) / math.sqrt(len(values))
        assert float(values.mean()) == pytest.approx(metric.closed_form(n, d), abs=4 * error)
    assert all_metrics()["procrustes_linearity"].closed_form(n, d) == d / (n - 1)  # pyright: ignore


@pytest.mark.parametrize(("name", "factor"), [("procrustes_linearity", 2), ("procrustes_linearity_heldout", 4)])
def test_too_few_points_for_a_map_are_nan_with_a_note(name: str, factor: int) -> None:
    enough, few = factor * 8, factor * 8 - 1
    assert measured(name, normal(enough, 8), previous=normal(enough, 8, seed=1)).note is None
    found = measured(name, normal(few, 8), previous=normal(few, 8, seed=1))
    assert math.isnan(float(found.value))
    assert found.note == f"{few} points, and it needs {enough}"


@pytest.mark.parametrize(("name", "factor"), [("procrustes_linearity", 2), ("procrustes_linearity_heldout", 4)])
def test_where_widths_differ_it_is_the_previous_one_that_sets_floor_and_null(name: str, factor: int) -> None:
    found = measured(name, normal(300, 4), previous=normal(300, 30, seed=1))
    assert found.null_dim == 30
    few = measured(name, normal(factor * 30 - 1, 4), previous=normal(factor * 30 - 1, 30, seed=1))
    assert few.note == f"{factor * 30 - 1} points, and it needs {factor * 30}"
    narrow = measured(name, normal(factor * 4, 30), previous=normal(factor * 4, 4, seed=1))
    assert narrow.note is None


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["procrustes_linearity", "procrustes_linearity_heldout"])
def test_states_that_do_not_vary_have_no_linearity(name: str, dtype: torch.dtype, value: float) -> None:
    for n in (39, 50, 60, 64, 97):
        varying, constant = normal(n, 4).to(dtype), torch.full((n, 4), value, dtype=dtype)
        for target, source in ((varying, constant), (constant, varying), (constant, constant)):
            found = measured(name, target, previous=source)
            assert math.isnan(float(found.value))
            assert found.note == "the points do not vary"


# The loss


def tokens_with(losses: list[float]) -> Tokens:
    count = torch.arange(len(losses))
    return Tokens(
        ids=count,
        positions=count,
        documents=count,
        special=torch.zeros(len(losses)).bool(),
        losses=torch.tensor(losses),
    )


def test_the_loss_is_the_mean_over_tokens_that_have_one() -> None:
    cloud = Cloud(points=torch.zeros(4, 1), tokens=tokens_with([1.0, math.nan, 2.0, 6.0]))
    found = evaluate(cloud, all_metrics()["loss"], DEFAULTS)
    assert float(found.value) == 3
    assert (found.points, found.dropped, found.note) == (3, 0, None)


def test_without_a_loss_anywhere_it_is_nan_with_a_note() -> None:
    cloud = Cloud(points=torch.zeros(2, 1), tokens=tokens_with([math.nan, math.nan]))
    found = evaluate(cloud, all_metrics()["loss"], DEFAULTS)
    assert math.isnan(float(found.value))
    assert found.note == "0 points, and it needs 1"


# Examples in the documentation


def examples_in(text: str, name: str) -> doctest.DocTest:
    return doctest.DocTestParser().get_doctest(text, {}, name, None, None)


DOCUMENTED = [
    *((name, metric.function.__doc__ or "") for name, metric in all_metrics().items()),
    ("estimate", estimate.__doc__ or ""),
]


@pytest.mark.parametrize(("name", "text"), [pytest.param(*item, id=item[0]) for item in DOCUMENTED if ">>>" in item[1]])
def test_examples_in_docstrings_are_true(name: str, text: str) -> None:
    example = examples_in(text, name)
    assert example.examples
    said: list[str] = []
    failed, attempted = doctest.DocTestRunner().run(example, out=said.append)
    assert attempted >= 3
    assert failed == 0, "".join(said)


def test_there_are_examples_to_run() -> None:
    assert {"estimate", "leading_variance", "participation_ratio", "mean_cosine"} <= {
        name for name, text in DOCUMENTED if ">>>" in text
    }


def test_an_example_that_is_false_is_found() -> None:
    said: list[str] = []
    failed, _ = doctest.DocTestRunner().run(examples_in(">>> 1 + 1\n3\n", "false"), out=said.append)
    assert failed == 1


def test_metrics_can_be_called_as_the_functions_they_are() -> None:
    assert isinstance(isoscore, Metric)
    assert float(isoscore(sums_of(torch.ones(4, dtype=torch.float64)))) == 1


@pytest.mark.parametrize("scale", [1e100, 1e150, 1e-100, 1e-150])
@pytest.mark.parametrize("name", ["isoscore", "isoscore_star", "participation_ratio", "leading_variance"])
def test_ratios_of_variances_are_those_of_points_of_any_size(name: str, scale: float) -> None:
    """The square of a variance of 1e200 is beyond float64, and that of 1e-300 below it."""
    points = normal(300, 8) * torch.arange(1.0, 9.0, dtype=torch.float64)
    expected = estimate(points, name)[name].value
    assert estimate(points * scale, name)[name].value == pytest.approx(expected, rel=1e-5)
