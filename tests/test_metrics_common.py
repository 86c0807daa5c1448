"""What every metric must do, read from its declaration: a new metric is tested here without a line being added."""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope import estimates
from anisoscope.cloud import Cloud, Tokens
from anisoscope.errors import AnisoscopeError, SpecError, StatesError
from anisoscope.estimates import Evaluated, answer_once, estimate, evaluate, judge, summarize
from anisoscope.metrics import Metric, all_metrics, declaration, find_metrics, metric
from anisoscope.records import POPULATIONS, Spec
from anisoscope.weights import POPULATION as ROWS

SETTINGS = {"discard_fraction": 0.1, "gride_scales": (2, 4), "neighbors": 20, "isoscore_zeta": 0.25}
# How far rounding may carry a value past its bounds.
ROUNDING = 1e-6


def each_metric_of(metrics: Iterable[Metric]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("metric", list(metrics), ids=lambda metric: metric.name)


# Metrics of the final norm take its gain and bias besides points, those of attention no points at all:
# tests/test_norms.py, tests/test_drift.py.
OF_PARTS = {
    "norm",
    "heads",
    "attention",
    "updates",
    "enrichment",
    "removal",
    "trend",
    "turn",
    "movement",
    "pinned",
    "curved",
    "concepts",
}
OF_POINTS = [item for item in all_metrics().values() if item.needs not in OF_PARTS]


def each_metric_invariant_to(change: str) -> pytest.MarkDecorator:
    return each_metric_of(item for item in OF_POINTS if change in item.invariant_to)


each_metric = each_metric_of(OF_POINTS)
each_declaration = each_metric_of(all_metrics().values())


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens_for(points: Tensor) -> Tokens:
    count = torch.arange(len(points))
    # Among the first three points are two types, one of them twice; among the first six is one five times.
    return Tokens(
        ids=torch.where(count < 6, (count == 2).long(), count % 12),
        positions=count,
        documents=count // 20,
        sentences=count // 10,
        special=torch.zeros(len(points), dtype=torch.bool),
        losses=1 + normal(len(points), seed=3).abs(),
    )


def cloud_of(points: Tensor, previous: Tensor | None = None) -> Cloud:
    if previous is None:
        previous = normal(*points.shape, seed=2).to(points.dtype)
    return Cloud(points=points, previous=previous, tokens=tokens_for(points), neighbor_count=64)


def evaluated(metric: Metric, cloud: Cloud) -> Evaluated:
    return evaluate(cloud, metric, SETTINGS)


def value_of(metric: Metric, points: Tensor, previous: Tensor | None = None) -> float:
    return float(evaluated(metric, cloud_of(points, previous)).value)


def ordinary_points() -> Tensor:
    """Off the origin, stretched, with more points than any metric needs."""
    return normal(150, 6) * torch.tensor([2.0, 1.0, 1.0, 0.7, 0.5, 0.3]) + torch.tensor([1.0, 0, 0, 0.5, 0, 0])


def ordinary_previous() -> Tensor:
    """States that the ordinary ones depend on, in part and not only linearly."""
    points = ordinary_points()
    return 0.5 * points.roll(1, 1) + 0.1 * points.square() + normal(150, 6, seed=8)


# What it says of itself


@each_declaration
def test_a_metric_explains_itself_with_an_equation(metric: Metric) -> None:
    text = inspect.cleandoc(metric.function.__doc__ or "")
    first, blank, *rest = text.split("\n")
    assert first.endswith(".")
    assert first == metric.summary
    assert blank == ""
    assert any(line.startswith("    ") and "=" in line for line in rest), "an indented line with the equation"


def cited_keys() -> set[str]:
    return set(
        re.findall(
            r"^@\w+\{([^,\s]+),",
            (Path(__file__).parents[1] / "src" / "anisoscope" / "references.bib").read_text(),
            re.M,
        )
    )


@each_declaration
def test_a_metric_cites_a_work_that_is_in_the_references(metric: Metric) -> None:
    assert metric.cite in cited_keys()


@each_declaration
def test_a_declaration_is_complete(metric: Metric) -> None:
    assert all_metrics()[metric.name] is metric
    assert isinstance(metric.version, int)
    assert metric.version >= 1
    assert metric.family
    assert hasattr(Cloud, metric.needs) or metric.needs in {*OF_PARTS, *(item.name for item in fields(Cloud))}
    assert metric.invariant_to <= {"translation", "rotation", "scale"}
    assert metric.bounds[0] < metric.bounds[1]
    assert metric.populations
    # Rows of a matrix are a population of their own.
    assert set(metric.populations) <= {*POPULATIONS, ROWS}
    assert set(metric.settings) <= {item.name for item in fields(Spec)}
    assert metric.neighbors == "neighbors" or metric.neighbors >= 0
    assert (metric.neighbors != 0) == (metric.needs == "neighbors")
    assert metric.min_points(8, 20) >= 1
    assert metric.undefined
    assert (metric.closed_form is not None) == (metric.null in ("exact", "independent"))
    assert (metric.control is not None) == (metric.null == "control")
    assert bool(metric.reason) == (metric.null == "none")


def test_these_metrics_exist() -> None:
    by_family: dict[str, set[str]] = {}
    for name, item in all_metrics().items():
        by_family.setdefault(item.family, set()).add(name)
    assert by_family == {
        "anisotropy": {"leading_variance", "mean_cosine", "mean_norm", "mean_offset"},
        "contextuality": {
            "inter_similarity",
            *(
                name + form
                for name in ("intra_similarity", "intra_sentence_similarity", "max_explainable_variance")
                for form in ("", "_adjusted")
            ),
        },
        "drift": {
            *("rogue_share", "rogue_share_3", "rogue_r2_1", "rogue_r2_3", "rogue_r2_5"),
            *("query_drift", "key_drift", "query_key_drift", "attention_entropy"),
            *("common_drift", "common_drift_share", "rare_drift"),
        },
        "isotropy": {
            "isoscore",
            "isoscore_star",
            "partition_isotropy",
            "log_partition_isotropy",
            "participation_ratio",
            "effective_rank",
            "hull_margin",
        },
        "intrinsic_dimension": {
            "twonn",
            "twonn_mle",
            *(f"gride_{scale}" for scale in (2, 4, 8, 16, 32, 64)),
            "levina_bickel",
            "near_duplicate_rate",
        },
        "final_norm": {
            *("norm_gain", "norm_bias", "norm_bias_ratio", "norm_bias_ratio_effective"),
            *("residual_drift", "drift_cancellation"),
        },
        "alignment": {
            *("tangent_energy", "tangent_gain", "tangent_excess", "normal_ratio", "gradient_leading_variance"),
            *("tangent_anisotropy_share", "tangent_frequency_trend", "subspace_distance", "update_alignment"),
            *("variance_gain", "gradient_signal_to_noise"),
        },
        "pinning": {"type_dispersion", "centroid_distance", "trajectory_variance"},
        "curvature": {"curvature_visibility", "second_fundamental_form", "frequency_attenuation"},
        "concepts": {"concept_replication", "concept_stability", "concept_energy"},
        "linearity": {"procrustes_linearity", "procrustes_linearity_heldout"},
        "output": {"loss"},
    }


# Invariances


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "translation": lambda points: points + torch.tensor([3.0, -1.0, 2.0, 0.5, 1.0, -4.0]),
    "rotation": lambda points: points @ torch.linalg.qr(normal(6, 6, seed=4)).Q,
    "scale": lambda points: points * 3.7,
}


@each_metric
@pytest.mark.parametrize("change", CHANGES)
def test_declared_invariances_hold_and_others_do_not(metric: Metric, change: str) -> None:
    points, previous = ordinary_points(), ordinary_previous()
    before = value_of(metric, points, previous)
    after = value_of(metric, CHANGES[change](points), CHANGES[change](previous))
    if change in metric.invariant_to:
        assert after == pytest.approx(before, rel=1e-6, abs=1e-9)
    else:
        assert abs(after - before) > 1e-2 * abs(before)


@each_metric_invariant_to("scale")
@pytest.mark.parametrize("size", [1e-20, 1e15])
def test_metrics_that_do_not_depend_on_scale_take_very_small_and_very_large_points(metric: Metric, size: float) -> None:
    points, previous = ordinary_points().float(), ordinary_previous().float()
    expected = value_of(metric, points, previous)
    assert value_of(metric, points * size, previous * size) == pytest.approx(expected, rel=1e-4)


@each_metric_invariant_to("translation")
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_metrics_that_do_not_depend_on_translation_take_a_large_offset(metric: Metric, kind: torch.dtype) -> None:
    points, previous = (ordinary_points() + 1e4).to(kind), (ordinary_previous() - 1e4).to(kind)
    # The offset rounds the points; what they are afterwards is what is measured.
    near, near_previous = points.double() - 1e4, previous.double() + 1e4
    assert value_of(metric, points, previous) == pytest.approx(value_of(metric, near, near_previous), rel=1e-4)


# The first half is fitted and the second scored, or points are dealt into random groups by their place: the order is
# part of the estimator. Clouds come in random order.
ORDERED = {
    "procrustes_linearity_heldout",
    "intra_sentence_similarity_adjusted",
    "max_explainable_variance_adjusted",
}


@each_metric
def test_the_order_of_points_does_not_matter(metric: Metric) -> None:
    points, previous = ordinary_points(), ordinary_previous()
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(5))
    cloud = cloud_of(points, previous)
    before, after = (float(evaluated(metric, item).value) for item in (cloud, cloud.take(order)))
    if metric.name in ORDERED:
        assert after != pytest.approx(before, rel=1e-6)
    else:
        assert after == pytest.approx(before, rel=1e-6, abs=1e-12)


@each_metric
def test_a_metric_gives_the_same_number_twice_and_changes_nothing(metric: Metric) -> None:
    points, previous = ordinary_points().float(), ordinary_previous().float()
    kept = points.clone(), previous.clone()
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    assert value_of(metric, points, previous) == value_of(metric, points, previous)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(points, kept[0])
    assert torch.equal(previous, kept[1])


# Numbers


CLOUDS: dict[str, Callable[[], Tensor]] = {
    "ordinary": ordinary_points,
    "isotropic": lambda: normal(150, 6),
    "a line": lambda: normal(150, 1) * normal(1, 6, seed=1) + 2,
    "equal eigenvalues": lambda: torch.cat([torch.eye(6), -torch.eye(6)]).double().repeat(8, 1) * 2,
    "one huge token": lambda: torch.cat([normal(149, 6), 1e4 * normal(1, 6, seed=1)]),
    "far from the origin": lambda: normal(150, 6) + 50,
    "repeats": lambda: normal(80, 6).repeat(2, 1),
    "near repeats": lambda: normal(80, 6).repeat(2, 1) + 1e-9 * normal(160, 6, seed=1),
    "few points in many dimensions": lambda: normal(70, 300),
    "small": lambda: 0.01 * normal(150, 6),
}


@each_metric
@pytest.mark.parametrize("name", CLOUDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_are_finite_within_their_bounds_or_nan_with_a_note(
    metric: Metric, name: str, dtype: torch.dtype
) -> None:
    found = evaluated(metric, cloud_of(CLOUDS[name]().to(dtype)))
    value, (low, high) = float(found.value), metric.bounds
    assert found.value.shape == ()
    if math.isnan(value):
        assert found.note
    else:
        assert found.note is None
        assert math.isfinite(value)
        assert low - ROUNDING <= value <= high + ROUNDING


@each_metric
def test_the_number_is_the_same_whatever_dtype_holds_the_same_points(metric: Metric) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        points, previous = ordinary_points().to(dtype), ordinary_previous().to(dtype)
        expected = value_of(metric, points.double(), previous.double())
        assert value_of(metric, points, previous) == pytest.approx(expected, rel=1e-5, abs=1e-7)


# What rounding the points themselves does to the value, relative.
@each_metric
@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-5), ("float16", 0.02), ("bfloat16", 0.1)])
def test_numbers_from_rounded_points_agree_within_the_rounding(metric: Metric, dtype: str, allowed: float) -> None:
    kind = getattr(torch, dtype)
    points, previous = ordinary_points(), ordinary_previous()
    exact, rounded = value_of(metric, points, previous), value_of(metric, points.to(kind), previous.to(kind))
    assert rounded == pytest.approx(exact, rel=allowed)


# Degenerate clouds: what is a number there, and which; everything else is NaN with a note.


ANY = object()
DEGENERATE: dict[str, tuple[Callable[[], Tensor], dict[str, Any]]] = {
    "no point": (lambda: torch.zeros(0, 4), {}),
    "one point": (lambda: normal(1, 4), {"loss": ANY, "mean_norm": ANY}),
    "all equal": (
        lambda: torch.full((60, 4), 0.1, dtype=torch.float64),
        {
            "mean_cosine": 1,
            "mean_offset": 1,
            "mean_norm": 0.2,
            "partition_isotropy": ANY,
            "log_partition_isotropy": ANY,
            "hull_margin": 1,
            "inter_similarity": 1,
            "intra_similarity": 1,
            "intra_similarity_adjusted": 0,
            "intra_sentence_similarity": 1,
            "intra_sentence_similarity_adjusted": 0,
            "rogue_share": 0.25,
            "rogue_share_3": 0.75,
            "loss": ANY,
        },
    ),
    "all zero": (
        lambda: torch.zeros(60, 4),
        {"mean_norm": 0, "partition_isotropy": 1, "log_partition_isotropy": 0, "loss": ANY},
    ),
    "two points": (
        lambda: normal(2, 4),
        {
            "mean_cosine": ANY,
            "mean_offset": ANY,
            "leading_variance": 1,
            "participation_ratio": 1,
            "effective_rank": 1,
            "isoscore": 0,
            # (PR* - 1) / (d - 1) with PR* = 1 / ((1 - ζ)² + (1 - (1 - ζ)²) / 4)
            "isoscore_star": (1 / (0.5625 + 0.4375 / 4) - 1) / 3,
            "mean_norm": ANY,
            "partition_isotropy": ANY,
            "log_partition_isotropy": ANY,
            "intra_sentence_similarity": ANY,
            # Two points can be dealt in one way only.
            "intra_sentence_similarity_adjusted": 0,
            "loss": ANY,
        },
    ),
    "two points, many times": (
        lambda: normal(2, 4).repeat(40, 1),
        {
            "mean_cosine": ANY,
            "mean_offset": ANY,
            "leading_variance": 1,
            "participation_ratio": 1,
            "effective_rank": 1,
            "isoscore": 0,
            "isoscore_star": ANY,
            "mean_norm": ANY,
            "partition_isotropy": ANY,
            "log_partition_isotropy": ANY,
            "hull_margin": ANY,
            **{name: ANY for name, item in all_metrics().items() if item.family == "contextuality"},
            "max_explainable_variance": 1,
            "max_explainable_variance_adjusted": 0,
            **dict.fromkeys(("rogue_r2_1", "rogue_r2_3"), 1),
            **dict.fromkeys(("rogue_share", "rogue_share_3"), ANY),
            "procrustes_linearity": ANY,
            "procrustes_linearity_heldout": ANY,
            "loss": ANY,
        },
    ),
    "one coordinate": (
        lambda: normal(100, 1),
        {
            **dict.fromkeys(all_metrics(), ANY),
            "leading_variance": 1,
            "participation_ratio": 1,
            "effective_rank": 1,
            "isoscore": None,
            "isoscore_star": None,
            "hull_margin": 0,
            **dict.fromkeys(("rogue_r2_1", "rogue_r2_3", "rogue_r2_5"), None),
            # As many points to the left as to the right: there is no mean cosine to share.
            **dict.fromkeys(("rogue_share", "rogue_share_3"), None),
        },
    ),
    "fewer points than coordinates": (
        lambda: normal(10, 40),
        {
            **dict.fromkeys(all_metrics(), ANY),
            **dict.fromkeys(("gride_16", "gride_32", "gride_64", "levina_bickel"), None),
            **dict.fromkeys(("procrustes_linearity", "procrustes_linearity_heldout"), None),
            **dict.fromkeys(("hull_margin", "rogue_share", "rogue_share_3"), None),
        },
    ),
    "all distances equal": (
        lambda: torch.eye(70, dtype=torch.float64),
        {
            **dict.fromkeys(all_metrics(), ANY),
            **{name: None for name in all_metrics() if re.match("twonn|gride|levina", name)},
            **dict.fromkeys(("procrustes_linearity", "procrustes_linearity_heldout"), None),
            **{name: None for name in all_metrics() if re.match("hull|rogue", name)},
            "participation_ratio": 69,
            "effective_rank": 69,
            "near_duplicate_rate": 0,
        },
    ),
}


@each_metric
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_clouds_give_nan_with_a_note_or_a_known_number(metric: Metric, name: str) -> None:
    make, numbers = DEGENERATE[name]
    found = evaluated(metric, cloud_of(make()))
    expected = numbers.get(metric.name)
    if expected is None:
        assert math.isnan(float(found.value))
        assert found.note
    else:
        assert math.isfinite(float(found.value))
        assert found.note is None
        assert expected is ANY or float(found.value) == pytest.approx(expected, abs=1e-9)


@each_metric
def test_one_point_less_than_it_needs_is_nan_and_the_note_says_how_many(metric: Metric) -> None:
    needed = metric.min_points(6, SETTINGS["neighbors"])
    few = evaluated(metric, cloud_of(ordinary_points()[: needed - 1]))
    assert math.isnan(float(few.value))
    assert few.note == f"{needed - 1} points, and it needs {needed}"
    assert math.isfinite(float(evaluated(metric, cloud_of(ordinary_points()[:needed])).value))


def test_a_note_about_too_few_points_counts_the_distinct_ones() -> None:
    points = normal(2, 4).repeat(30, 1)
    assert evaluated(all_metrics()["twonn"], cloud_of(points)).note == "2 distinct points, and it needs 3"


# Asking for metrics


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one() -> None:
    with pytest.raises(SpecError, match=r"unknown metric 'twon'; did you mean twonn"):
        find_metrics(["twon"])
    with pytest.raises(SpecError, match=r"unknown metric 'Anisotropy'; did you mean .*anisotropy"):
        find_metrics(["Anisotropy"])
    with pytest.raises(SpecError, match=r"unknown metric 'qqqq'; `anisoscope ls metrics` lists them"):
        find_metrics(["qqqq"])
    with pytest.raises(SpecError, match="no metrics were asked for"):
        find_metrics([])


def test_a_family_means_its_members_and_gride_at_the_scales_asked_for() -> None:
    names = [item.name for item in find_metrics(["anisotropy"])]
    assert sorted(names) == ["leading_variance", "mean_cosine", "mean_offset"]
    dimensions = {item.name for item in find_metrics(["intrinsic_dimension"], gride_scales=(4, 16))}
    assert dimensions == {"twonn", "twonn_mle", "levina_bickel", "near_duplicate_rate", "gride_4", "gride_16"}
    assert not any(item.name.startswith("gride") for item in find_metrics(["intrinsic_dimension"]))
    assert [item.name for item in find_metrics(["gride_8"])] == ["gride_8"]


def test_metrics_come_once_and_in_the_order_asked_for() -> None:
    names = [item.name for item in find_metrics(["twonn", "mean_offset", "anisotropy", "twonn"])]
    assert names[:2] == ["twonn", "mean_offset"]
    assert sorted(names) == sorted({"twonn", "leading_variance", "mean_cosine", "mean_offset"})


@pytest.fixture
def _registry() -> Iterator[None]:
    """Forget what a test registers."""
    before = dict(declaration._REGISTRY)
    yield
    declaration._REGISTRY.clear()
    declaration._REGISTRY.update(before)


@pytest.mark.usefixtures("_registry")
def test_two_metrics_of_one_name_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match="two metrics are called 'twonn'"):

        @metric(family="mine", needs="points", version=1, cite="x", null="none", reason="a test", name="twonn")
        def other(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
            """Not twonn."""
            return points.sum()

    assert all_metrics()["twonn"].family == "intrinsic_dimension"


@pytest.mark.parametrize("null", ["exact", "independent"])
def test_a_null_in_closed_form_must_be_given(null: Any) -> None:
    with pytest.raises(TypeError, match="needs its closed form"):
        metric(family="mine", needs="points", version=1, cite="x", null=null)


def test_a_control_must_be_given() -> None:
    with pytest.raises(TypeError, match="needs its control"):
        metric(family="mine", needs="points", version=1, cite="x", null="control")


def test_a_missing_null_needs_a_reason() -> None:
    with pytest.raises(TypeError, match="needs a reason"):
        metric(family="mine", needs="points", version=1, cite="x", null="none")


def declare_largest_norm() -> Metric:
    @metric(
        family="third_party", needs="points", version=3, cite="x", null="exact", closed_form=lambda n, d: float(n + d)
    )
    def largest_norm(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
        """The largest norm."""
        return points.norm(dim=1).max()

    return largest_norm


@pytest.mark.usefixtures("_registry")
def test_a_metric_of_a_third_party_is_measured_like_our_own() -> None:
    declared = declare_largest_norm()
    points = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])
    for asked in ("largest_norm", "third_party"):
        found = estimate(points, [asked, "mean_offset"])
        assert list(found) == ["largest_norm", "mean_offset"]
        assert found["largest_norm"].value == 5
        assert found["largest_norm"].null == 5
        assert found["largest_norm"].note is None
    assert float(declared(points)) == 5
    with pytest.raises(SpecError, match="did you mean largest_norm"):
        estimate(points, ["largest_norn"])


@pytest.mark.usefixtures("_registry")
def test_an_isotropic_null_that_was_not_simulated_is_nan_and_says_so() -> None:
    @metric(family="third_party", needs="points", version=1, cite="x", null="isotropic")
    def first_coordinate(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
        """The mean of the first coordinate."""
        return points[:, 0].mean()

    found = estimate(torch.ones(10, 2), ["first_coordinate"])["first_coordinate"]
    assert found.value == 1
    assert math.isnan(found.null)
    assert found.note is not None
    assert "no null was simulated" in found.note


def test_what_a_third_party_registered_is_forgotten_after_its_test() -> None:
    assert "largest_norm" not in all_metrics()
    assert "first_coordinate" not in all_metrics()


@pytest.mark.usefixtures("_registry")
def test_metrics_of_installed_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        def load(self) -> Metric:
            return declare_largest_norm()

    asked = []

    def entry_points(*, group: str) -> list[Entry]:
        asked.append(group)
        return [Entry()]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    declaration._load_plugins.cache_clear()
    try:
        assert all_metrics()["largest_norm"].version == 3
        all_metrics()
    finally:
        monkeypatch.undo()
        declaration._load_plugins.cache_clear()
    assert asked == ["anisoscope.metrics"]


# The side door


def default_metrics_of_a_matrix() -> list[str]:
    return [item.name for item in all_metrics().values() if item.needs not in {"losses", "pair", *OF_PARTS}]


def test_every_metric_of_points_is_measured_through_estimate_with_null_and_without_spread() -> None:
    tokens = tokens_for(ordinary_points())
    found = estimate(ordinary_points(), default_metrics_of_a_matrix(), token_ids=tokens.ids, sentences=tokens.sentences)
    assert list(found) == default_metrics_of_a_matrix()
    for name, answer in found.items():
        assert answer.note is None, name
        assert math.isfinite(answer.value), name
        assert answer.values == (answer.value,)
        assert (answer.batches, answer.points, answer.dropped, answer.dim) == (1, 150, 0, 6)
        assert math.isnan(answer.spread), "one batch has no spread"
        assert math.isnan(answer.null) == (all_metrics()[name].null == "none")


def test_points_are_dealt_into_batches_of_at_least_the_size_asked_for() -> None:
    points = normal(1000, 3)
    answer = estimate(points, ["mean_cosine"], batch_points=300)["mean_cosine"]
    assert answer.batches == len(answer.values) == 3
    assert answer.points == 1000
    assert answer.value == pytest.approx(np.mean(answer.values))
    assert answer.spread == pytest.approx(np.std(answer.values, ddof=1))
    assert estimate(points, ["mean_cosine"], batch_points=300)["mean_cosine"] == answer
    assert estimate(points, ["mean_cosine"], batch_points=300, seed=1)["mean_cosine"].values != answer.values
    sizes = [len(hand) for hand in estimates.deal(1000, 3, 0)]
    assert sorted(sizes) == [333, 333, 334]
    assert sorted(torch.cat(estimates.deal(1000, 3, 0)).tolist()) == list(range(1000))


def test_batches_without_a_value_are_left_out_of_the_mean_and_counted() -> None:
    # One zero row has no direction: its batch has no mean cosine.
    points = normal(600, 3)
    points[5] = 0
    answer = estimate(points, ["mean_cosine"], batch_points=200)["mean_cosine"]
    numbers = [value for value in answer.values if not math.isnan(value)]
    assert len(numbers) == 2
    assert answer.value == pytest.approx(np.mean(numbers))
    assert answer.note == "some points are zero and have no direction; no value in 1 of 3 batches"


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["torch", "numpy", "bfloat16"])
def test_points_that_are_not_finite_are_refused_and_counted(wrong: float, kind: str) -> None:
    points: Any = normal(40, 5)
    points[3, 2] = points[7, 0] = points[7, 1] = wrong
    points = {"torch": points, "numpy": points.numpy(), "bfloat16": points.to(torch.bfloat16)}[kind]
    with pytest.raises(StatesError, match="3 of 200 values are NaN or infinite") as raised:
        estimate(points, ["leading_variance"])
    assert isinstance(raised.value, AnisoscopeError)


@pytest.mark.parametrize(
    "points",
    [
        torch.arange(12).reshape(6, 2),
        np.arange(12).reshape(6, 2),
        normal(6),
        normal(2, 3, 4),
        torch.zeros(0, 4),
        torch.zeros(4, 0),
        torch.zeros(4, 2, dtype=torch.complex64),
        "points",
        None,
        [[1.0, 2.0], [3.0]],
        np.array([["a", "b"]]),
        np.array([[1.0, 2.0]], dtype=object),
    ],
    ids=lambda points: type(points).__name__,
)
def test_what_is_no_matrix_of_floats_is_refused_in_words(points: Any) -> None:
    with pytest.raises(SpecError, match="points must be a matrix of floats, one point per row; came "):
        estimate(points, ["leading_variance"])


def same_points_in_other_dress() -> dict[str, Any]:
    points = ordinary_points()
    array = points.numpy()
    read_only = array.copy()
    read_only.flags.writeable = False
    return {
        "torch": points,
        "numpy": array,
        "lists": array.tolist(),
        "read-only": read_only,
        "reversed rows": array[::-1].copy()[::-1],
        "column order": np.asfortranarray(array),
        "foreign byte order": array.astype(">f8"),
        "not contiguous": torch.cat([points, points], 1)[:, :6],
        "with gradients": points.clone().requires_grad_(),
    }


@pytest.mark.parametrize("dress", same_points_in_other_dress())
def test_a_matrix_comes_in_many_forms(dress: str) -> None:
    names = ["leading_variance", "mean_cosine", "twonn"]
    expected = estimate(ordinary_points(), names)
    for name, answer in estimate(same_points_in_other_dress()[dress], names).items():
        assert answer.value == pytest.approx(expected[name].value, rel=1e-6)


@pytest.mark.parametrize("name", ["loss", "procrustes_linearity", "linearity", "output"])
def test_metrics_that_need_a_model_are_refused_for_a_matrix(name: str) -> None:
    with pytest.raises(SpecError, match=r"needs a model, not a matrix of points; use measure\(\)"):
        estimate(ordinary_points(), [name])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("batch_points", 1),
        ("discard_fraction", -0.1),
        ("discard_fraction", 1.0),
        ("discard_fraction", math.nan),
        ("neighbors", 1),
        ("neighbors", 2000),
        ("isoscore_zeta", 1.5),
    ],
)
def test_settings_outside_their_range_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(SpecError, match=rf"{setting} \(--[a-z-]+\) must be a (whole )?number between"):
        estimate(ordinary_points(), ["leading_variance"], **{setting: value})


def test_scales_that_are_not_declared_are_refused() -> None:
    with pytest.raises(SpecError, match="must be out of 2, 4, 8, 16, 32, 64; got 3"):
        estimate(ordinary_points(), ["intrinsic_dimension"], gride_scales=(2, 3))


@pytest.mark.parametrize("name", ["tangent_excess", "tangent_energy", "leading_variance"])
@pytest.mark.parametrize(("value", "points"), [(0.3, 500), (math.nan, 500), (0.3, 1)])
def test_one_answer_is_that_of_a_single_batch(name: str, value: float, points: int) -> None:
    metric = all_metrics()[name]
    one = answer_once(metric, value, points, 24)
    assert repr(one) == repr(summarize([judge(metric, value, points, 0, 24, {})], metric, 24, {}))


def test_settings_reach_the_metrics_that_declare_them() -> None:
    points = ordinary_points()
    for name, setting, values in (
        ("twonn", "discard_fraction", (0.1, 0.8)),
        ("twonn_mle", "discard_fraction", (0.1, 0.8)),
        ("levina_bickel", "neighbors", (5, 40)),
        ("isoscore_star", "isoscore_zeta", (0.25, 0.75)),
    ):
        first, second = (estimate(points, [name], **{setting: value})[name].value for value in values)
        assert first != pytest.approx(second, rel=1e-3)


def test_metrics_that_need_a_model_say_so_when_the_cloud_has_none() -> None:
    with pytest.raises(SpecError, match="no earlier site was given"):
        evaluate(Cloud(points=normal(100, 2)), all_metrics()["procrustes_linearity"], SETTINGS)
    with pytest.raises(SpecError, match="needs the model's loss"):
        evaluate(Cloud(points=normal(100, 2)), all_metrics()["loss"], SETTINGS)


def test_metrics_of_one_view_share_its_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    search = estimates.Cloud.neighbors.func

    def spy(cloud: Cloud) -> object:
        calls.append(cloud.neighbor_count)
        return search(cloud)

    monkeypatch.setattr(estimates.Cloud.neighbors, "func", spy)
    estimate(ordinary_points(), ["twonn", "gride_8", "levina_bickel"], neighbors=30)
    assert calls == [30]
