"""The shipped nulls: complete, current, in agreement with theory and with simulation, and honest in between."""

import csv
import importlib.resources
import math
from collections.abc import Iterator
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from anisoscope import nulls
from anisoscope.cloud import Cloud
from anisoscope.estimates import evaluate
from anisoscope.metrics import Metric, all_metrics
from anisoscope.nulls import NullTable, load_tables, null_of, variant_of
from anisoscope.records import Spec

DEFAULTS = asdict(Spec(model="any"))
# What null_of promises off the grid, for clouds of at least 32 points.
OFF_GRID_TOLERANCE = 0.02


def isotropic_metrics() -> list[Metric]:
    return [metric for metric in all_metrics().values() if metric.null == "isotropic"]


def null_at(name: str, points: float, dim: int) -> float:
    return null_of(all_metrics()[name], points, dim, DEFAULTS)[0]


def shipped_rows() -> Iterator[dict[str, str]]:
    with importlib.resources.files("anisoscope").joinpath("data/nulls.csv").open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def simulate(n: int, d: int, trials: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Each isotropic metric at its default settings on Gaussian clouds; metrics with too few points are left out."""
    generator = torch.Generator().manual_seed(seed)
    clouds = [Cloud(points=torch.randn(n, d, generator=generator), neighbor_count=64) for _ in range(trials)]
    samples = {
        metric.name: np.array([float(evaluate(cloud, metric, DEFAULTS).value) for cloud in clouds])
        for metric in isotropic_metrics()
    }
    return {name: sample for name, sample in samples.items() if not np.isnan(sample).any()}


def standard_error(sample: np.ndarray) -> float:
    return float(sample.std(ddof=1)) / math.sqrt(len(sample))


def relative_error(row: dict[str, str]) -> float:
    null = float(row["null"])
    return float(row["spread"]) / math.sqrt(int(row["trials"])) / null if null else 0.0


@pytest.mark.parametrize("metric", isotropic_metrics(), ids=lambda metric: metric.name)
def test_every_isotropic_null_was_simulated_at_default_settings_for_the_current_version(metric: Metric) -> None:
    table = load_tables()[metric.name, variant_of(metric, DEFAULTS)]
    assert table.version == metric.version
    assert not np.isnan(table.values).any()
    assert (table.n_grid[-1], table.d_grid[-1]) == (16384, 16384)
    assert table.n_grid[0] <= max(8, 2 * metric.min_points(1, DEFAULTS["neighbors"]))
    assert table.d_grid[0] <= 2


def test_the_table_holds_each_cell_once() -> None:
    cells = [(row["metric"], row["settings"], row["n"], row["d"]) for row in shipped_rows()]
    assert len(cells) == len(set(cells))


@pytest.mark.parametrize("metric", all_metrics().values(), ids=lambda metric: metric.name)
def test_every_metric_has_a_null_at_ordinary_sizes_or_says_why_not(metric: Metric) -> None:
    for points, dim in ((4096, 768), (4096.0, 1000), (333.3, 50), (1000.5, 64), (16384, 4096), (10000, 129)):
        null, missing = null_of(metric, points, dim, DEFAULTS)
        assert missing is None
        assert math.isnan(null) == (metric.null in ("none", "control"))
        assert metric.null != "none" or metric.reason


def test_leading_variance_agrees_with_the_tracy_widom_law() -> None:
    for n, d in ((128, 64), (512, 64), (512, 4096), (4096, 768), (4096, 4096), (16384, 1024), (2048, 16384)):
        edge = math.sqrt(n - 2) + math.sqrt(d)
        width = edge * (1 / math.sqrt(n - 2) + 1 / math.sqrt(d)) ** (1 / 3)
        # Johnstone 2001; -1.2065 is the mean of the law for real matrices.
        assert null_at("leading_variance", n, d) == pytest.approx((edge**2 - 1.2065 * width) / ((n - 1) * d), rel=0.01)


def test_participation_ratio_agrees_with_the_moments_of_a_wishart_matrix() -> None:
    for n, d in ((64, 64), (512, 16), (512, 4096), (4096, 768), (4096, 4096), (16384, 16384), (256, 16384)):
        assert null_at("participation_ratio", n, d) == pytest.approx(d / (1 + (d + 1) / (n - 1)), rel=0.01)


def test_isoscore_of_an_isotropic_cloud_is_far_from_one() -> None:
    assert null_at("isoscore", 4096, 768) == pytest.approx(0.842, abs=0.001)
    assert null_at("isoscore", 4096, 4096) == pytest.approx(0.4997, abs=0.001)


def test_isoscore_star_agrees_with_the_shrunk_isoscore() -> None:
    kept = (1 - DEFAULTS["isoscore_zeta"]) ** 2
    for n, d in ((64, 64), (4096, 768), (512, 4096)):
        shrunk = 1 / (kept / null_at("participation_ratio", n, d) + (1 - kept) / d)
        assert null_at("isoscore_star", n, d) == pytest.approx((shrunk - 1) / (d - 1), rel=0.002)


def test_effective_rank_agrees_with_the_entropy_of_marchenko_and_pastur_on_both_sides_of_the_simulated_size() -> None:
    # Up to 1024 dimensions or points it was simulated, above it is the law itself: no step may show there.
    for n, d in ((512, 512), (512, 16384), (4096, 512), (4096, 1024), (4096, 1536), (1024, 2048), (2048, 2048)):
        small, large = min(n - 1, d), max(n - 1, d)
        law = small * math.exp(-small / (2 * large))
        assert null_at("effective_rank", n, d) == pytest.approx(law, rel=1 / small)


def test_twonn_underestimates_high_dimensions_as_known() -> None:
    # Three standard errors of the table, which are 1 % here.
    assert null_at("twonn", 4096, 20) == pytest.approx(17.6, rel=0.03)
    assert null_at("twonn", 4096, 256) == pytest.approx(89, rel=0.03)
    assert null_at("twonn", 4096, 2) == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize(("n", "d"), [(64, 2), (128, 24), (256, 6)])
def test_cells_simulated_again_agree(n: int, d: int) -> None:
    shipped = {
        row["metric"]: row
        for row in shipped_rows()
        if (row["n"], row["d"]) == (str(n), str(d))
        and row["settings"] == variant_of(all_metrics()[row["metric"]], DEFAULTS)
    }
    simulated = simulate(n, d, 32)
    assert set(shipped) == set(simulated)
    for name, sample in simulated.items():
        null = float(shipped[name]["null"])
        error = math.hypot(standard_error(sample), relative_error(shipped[name]) * null)
        assert null == pytest.approx(sample.mean(), abs=5 * error + 2e-6 * sample.mean()), name


@pytest.mark.parametrize(("n", "d"), [(45, 5), (91, 20), (150, 40)])
def test_nulls_off_the_grid_are_within_the_tolerance(n: int, d: int) -> None:
    simulated = simulate(n, d, 32, seed=1)
    assert len(simulated) > 10
    for name, sample in simulated.items():
        table = load_tables()[name, variant_of(all_metrics()[name], DEFAULTS)]
        if n < table.n_grid[0]:
            continue
        allowed = OFF_GRID_TOLERANCE * sample.mean() + 4 * standard_error(sample)
        assert null_at(name, n, d) == pytest.approx(sample.mean(), abs=allowed), name


def test_where_points_are_as_many_as_dimensions_and_nulls_bend_most_they_are_still_within_the_tolerance() -> None:
    for n, d in ((1448.5, 1254), (362, 443), (5793, 5000), (90.5, 80)):
        assert null_at("participation_ratio", n, d) == pytest.approx(d / (1 + (d + 1) / (n - 1)), rel=0.006)
        small, large = min(n - 1, d), max(n - 1, d)
        assert null_at("effective_rank", n, d) == pytest.approx(small * math.exp(-small / (2 * large)), rel=0.012)


def test_no_cell_stands_out_from_its_neighbours() -> None:
    """A cell left out and read by a cubic through the two above and the two below it in n comes back."""
    errors = {
        (row["metric"], row["settings"], float(row["n"]), float(row["d"])): relative_error(row)
        for row in shipped_rows()
    }
    compared = 0
    for (name, variant), table in load_tables().items():
        if name == "near_duplicate_rate":
            continue
        # With fewer points a fit to the lowest 20 % rests on a handful of ratios, and its mean is heavy-tailed.
        start = int(np.searchsorted(table.n_grid, 256 if variant == "discard_fraction=0.8" else 64))
        n_grid, logs = table.n_grid[start:], np.log(table.values[start:])
        for i in range(2, len(n_grid) - 2):
            read = (4 * (logs[i - 1] + logs[i + 1]) - logs[i - 2] - logs[i + 2]) / 6
            for j, d in enumerate(table.d_grid):
                own, *others = (errors[name, variant, n_grid[i + step], d] for step in (0, -1, 1, -2, 2))
                noise = math.hypot(own, *(np.array(others) * (4 / 6, 4 / 6, 1 / 6, 1 / 6)))
                assert abs(read[j] - logs[i, j]) < 0.03 + 5 * noise, (name, variant, n_grid[i], d)
                compared += 1
    assert compared > 2000


@pytest.fixture
def made_table(monkeypatch: pytest.MonkeyPatch) -> NullTable:
    """A table of participation_ratio that is a power law, with a zero and a missing cell planted by the tests."""
    n_grid, d_grid = np.array([8.0, 16.0, 32.0, 64.0, 128.0]), np.array([1.0, 2.0, 4.0, 8.0])
    values = np.sqrt(n_grid)[:, None] * d_grid**0.5
    table = NullTable(version=1, n_grid=n_grid, d_grid=d_grid, values=values)
    monkeypatch.setattr(nulls, "load_tables", lambda: {("participation_ratio", ""): table})
    return table


def test_a_power_law_is_interpolated_exactly_at_any_number_of_points(made_table: NullTable) -> None:
    for points, dim in ((8, 1), (128, 8), (100.25, 3), (8.5, 7), (127.9, 2), (32, 5)):
        assert null_at("participation_ratio", points, dim) == pytest.approx(math.sqrt(points * dim), rel=1e-12)


def test_between_cells_that_are_zero_the_null_is_zero(made_table: NullTable) -> None:
    made_table.values[:, 2:] = 0
    assert null_at("participation_ratio", 40, 4) == 0
    assert null_at("participation_ratio", 40, 6) == 0
    assert null_at("participation_ratio", 64, 2) == pytest.approx(math.sqrt(128))
    assert 0 < null_at("participation_ratio", 40, 3) < math.sqrt(40 * 2)


def test_a_cell_without_a_value_leaves_its_neighbours_alone(made_table: NullTable) -> None:
    made_table.values[0, 2] = math.nan
    assert math.isnan(null_at("participation_ratio", 8, 4))
    assert math.isnan(null_at("participation_ratio", 12, 3))
    assert null_at("participation_ratio", 8, 2) == pytest.approx(math.sqrt(16))
    assert null_at("participation_ratio", 12, 2) == pytest.approx(math.sqrt(24))
    assert null_at("participation_ratio", 16, 4) == pytest.approx(math.sqrt(64))
    # Next to the hole a straight line in place of a cubic: near, not exact.
    assert null_at("participation_ratio", 24, 4) == pytest.approx(math.sqrt(96), rel=0.02)


@pytest.mark.parametrize(("points", "dim"), [(7.9, 4), (16385, 4), (100, 16385)])
def test_a_null_outside_the_grid_is_nan_with_a_sentence(points: float, dim: int) -> None:
    null, missing = null_of(all_metrics()["participation_ratio"], points, dim, DEFAULTS)
    assert math.isnan(null)
    assert missing == "the null was simulated for 8-16384 points in 1-16384 dimensions only"


def test_settings_without_a_simulation_give_nan_with_a_sentence() -> None:
    null, missing = null_of(all_metrics()["twonn"], 4096, 64, DEFAULTS | {"discard_fraction": 0.3})
    assert math.isnan(null)
    assert missing == "no null was simulated for discard_fraction=0.3 (only discard_fraction=0.1, discard_fraction=0.8)"


def test_a_null_of_another_version_of_the_metric_is_not_used(made_table: NullTable) -> None:
    newer = replace(all_metrics()["participation_ratio"], version=2)
    null, missing = null_of(newer, 64, 4, DEFAULTS)
    assert math.isnan(null)
    assert missing == "its null was simulated for version 1, and this is version 2"


def test_with_fewer_points_than_the_metric_needs_there_is_no_null() -> None:
    assert math.isnan(null_at("procrustes_linearity", 127.5, 64))
    assert not math.isnan(null_at("procrustes_linearity", 128, 64))


@pytest.mark.parametrize(("n", "d"), [(40, 3), (101, 12)])
def test_the_exact_nulls_of_directions_hold(n: int, d: int) -> None:
    generator = torch.Generator().manual_seed(0)
    clouds = [Cloud(points=torch.randn(n, d, generator=generator)) for _ in range(200)]
    cosines, offsets = (
        np.array([float(evaluate(cloud, all_metrics()[name], {}).value) for cloud in clouds])
        for name in ("mean_cosine", "mean_offset")
    )
    assert null_at("mean_cosine", n, d) == 0
    assert abs(cosines.mean()) < 5 * standard_error(cosines)
    # The root mean square: the mean lies below it, by a fourth of 1/d.
    squares = offsets**2
    assert null_at("mean_offset", n + 0.2, d) ** 2 == pytest.approx(squares.mean(), abs=5 * standard_error(squares))


@pytest.mark.parametrize("name", ["procrustes_linearity", "procrustes_linearity_heldout"])
@pytest.mark.parametrize(("n", "d"), [(60, 6), (121, 10)])
def test_the_nulls_of_linearity_hold_for_independent_clouds(name: str, n: int, d: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sample = np.array(
        [
            float(evaluate(Cloud(points=target, previous=source), all_metrics()[name], {}).value)
            for source, target in torch.randn(400, 2, n, d, generator=generator)
        ]
    )
    assert standard_error(sample) < 0.03 * abs(sample.mean())
    assert null_at(name, n + 0.2, d) == pytest.approx(sample.mean(), abs=5 * standard_error(sample))
