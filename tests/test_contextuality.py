"""Similarity of occurrences, rogue dimensions and the margin of the hull: by hand, by all pairs, by closed forms."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import anisoscope as an
from anisoscope.cloud import Cloud, Tokens
from anisoscope.errors import SpecError
from anisoscope.estimates import Evaluated, estimate, evaluate
from anisoscope.kernels.groups import GroupSums, deal_labels, sum_groups
from anisoscope.kernels.hull import hull_distance
from anisoscope.metrics import all_metrics
from anisoscope.metrics.rogue import cosine_contributions


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(n: int, kinds: int, *, seed: int = 0) -> Tensor:
    return torch.randint(kinds, (n,), generator=torch.Generator().manual_seed(seed)).square()


def evaluated(name: str, points: Tensor, ids: Tensor | None = None, sentences: Tensor | None = None) -> Evaluated:
    zeros = torch.zeros(len(points), dtype=torch.int64)
    tokens = Tokens(
        ids=zeros if ids is None else ids,
        positions=zeros,
        documents=zeros,
        sentences=zeros if sentences is None else sentences,
        special=zeros.bool(),
    )
    return evaluate(Cloud(points=points, tokens=tokens), all_metrics()[name], {})


def value_of(name: str, points: Tensor, ids: Tensor | None = None, sentences: Tensor | None = None) -> float:
    return float(evaluated(name, points, ids, sentences).value)


def cosines_of(points: Tensor) -> Tensor:
    units = points.double() / points.double().norm(dim=1, keepdim=True)
    return units @ units.T


# Within and between types


def inter_by_pairs(points: Tensor, ids: Tensor) -> float:
    return float(cosines_of(points)[ids[:, None] != ids[None]].mean())


def intra_by_pairs(points: Tensor, ids: Tensor) -> float:
    cosines, means = cosines_of(points), []
    for kind in ids.unique():
        part = cosines[ids == kind][:, ids == kind]
        n = len(part)
        if n >= 2:
            means.append(float((part.sum() - part.trace()) / (n * (n - 1))))
    return float(np.mean(means))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 0.7, 100.0])
def test_inter_and_intra_similarity_are_means_over_all_pairs(dtype: torch.dtype, offset: float) -> None:
    ids = labels(90, 40)
    points = (normal(90, 7) + offset + 0.5 * ids[:, None].sin()).to(dtype)
    inter, intra = inter_by_pairs(points, ids), intra_by_pairs(points, ids)
    assert (torch.unique(ids, return_counts=True)[1] == 1).any(), "types that occur once are among them"
    assert value_of("inter_similarity", points, ids) == pytest.approx(inter, abs=1e-12)
    assert value_of("intra_similarity", points, ids) == pytest.approx(intra, abs=1e-12)
    assert value_of("intra_similarity_adjusted", points, ids) == pytest.approx(intra - inter, abs=1e-12)
    assert float(evaluated("intra_similarity", points, ids).control) == pytest.approx(inter, abs=1e-12)


def test_similarities_by_hand() -> None:
    points = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [3.0, 4.0], [0.0, 9.0]])
    ids = torch.tensor([7, 7, 3, 3, 100])
    # Between: 7-3 are 0, .6, 0, .6; 7-100 are 0, 0; 3-100 are 1, .8. Within: 1 and .8; 100 occurs once.
    assert value_of("inter_similarity", points, ids) == pytest.approx((0.6 + 0.6 + 1 + 0.8) / 8)
    assert value_of("intra_similarity", points, ids) == pytest.approx(0.9)
    # Mean of the first two along (1, 0): cosines 1, 1. Of the others along (3, 14).
    sentences = torch.tensor([0, 0, 5, 5, 5])
    length = math.hypot(3, 14)
    expected = (1 + 1 + 14 / length + (9 + 56) / (5 * length) + 14 / length) / 5
    assert value_of("intra_sentence_similarity", points, sentences=sentences) == pytest.approx(expected, rel=1e-12)


def test_types_that_never_change_have_similarity_one_and_types_that_say_nothing_none() -> None:
    ids = labels(400, 20)
    table = normal(400, 16)
    fixed = table[ids]
    assert value_of("intra_similarity", fixed, ids) == pytest.approx(1, abs=1e-12)
    assert value_of("intra_similarity_adjusted", fixed, ids) > 0.8
    assert abs(value_of("intra_similarity_adjusted", normal(400, 16) + 1, ids)) < 0.02
    assert value_of("intra_similarity", normal(400, 16) + 1, ids) > 0.4, "what all points share is not context"


@pytest.mark.parametrize(
    ("name", "ids", "note"),
    [
        ("inter_similarity", torch.zeros(9).long(), "there is only one type"),
        ("intra_similarity", torch.arange(9), "no type occurs twice"),
        ("intra_similarity_adjusted", torch.arange(9), "no type occurs twice"),
        ("intra_similarity_adjusted", torch.zeros(9).long(), "there is only one type"),
        ("max_explainable_variance", torch.arange(9) // 4, "no type with five occurrences varies"),
        ("max_explainable_variance_adjusted", torch.arange(9) // 4, "no type with five occurrences varies"),
    ],
)
def test_without_occurrences_to_compare_there_is_no_value(name: str, ids: Tensor, note: str) -> None:
    found = evaluated(name, normal(9, 4), ids)
    assert math.isnan(float(found.value))
    assert found.note is not None
    assert note in found.note


def test_a_point_without_a_direction_has_no_similarity() -> None:
    points = normal(9, 4)
    points[4] = 0
    for name in ("inter_similarity", "intra_similarity", "intra_sentence_similarity"):
        found = evaluated(name, points, torch.arange(9) // 3, torch.arange(9) // 3)
        assert math.isnan(float(found.value))
        assert found.note is not None
        assert "some points are zero" in found.note


# Sums that add up


def same(one: GroupSums, two: GroupSums) -> bool:
    return torch.equal(one.labels, two.labels) and all(
        torch.allclose(getattr(one, name), getattr(two, name), atol=1e-12) for name in ("counts", "totals", "units")
    )


@pytest.mark.parametrize("cuts", [[50], [1, 2, 3], [100, 101], list(range(10, 200, 10))])
def test_sums_of_parts_are_the_sums_of_the_whole(cuts: list[int]) -> None:
    points, ids = normal(200, 6) + 0.3, labels(200, 30)
    whole = sum_groups(points, ids)
    parts = [sum_groups(*part) for part in zip(points.tensor_split(cuts), ids.tensor_split(cuts), strict=True)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    assert same(merged, whole)
    backwards = parts[-1]
    for part in reversed(parts[:-1]):
        backwards = part.merge(backwards)
    assert same(backwards, whole)
    for name in ("inter_similarity", "intra_similarity", "intra_similarity_adjusted"):
        assert float(all_metrics()[name](merged)) == pytest.approx(value_of(name, points, ids), abs=1e-12)


# A token in its passage


def passage_by_loops(points: Tensor, sentences: Tensor) -> float:
    cosines = []
    for sentence in sentences.unique():
        rows = points[sentences == sentence].double()
        if len(rows) >= 2:
            cosines += torch.nn.functional.cosine_similarity(rows, rows.mean(0, keepdim=True)).tolist()
    return float(np.mean(cosines))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_intra_sentence_similarity_is_the_mean_cosine_with_the_mean(dtype: torch.dtype) -> None:
    sentences = labels(120, 40)
    points = (normal(120, 9) + 0.4 * sentences[:, None].cos() + 0.2).to(dtype)
    own = passage_by_loops(points, sentences)
    dealt = passage_by_loops(points, deal_labels(sentences))
    assert value_of("intra_sentence_similarity", points, sentences=sentences) == pytest.approx(own, abs=1e-7)
    found = evaluated("intra_sentence_similarity_adjusted", points, sentences=sentences)
    assert float(found.value) == pytest.approx(own - dealt, abs=1e-7)
    assert float(evaluated("intra_sentence_similarity", points, sentences=sentences).control) == pytest.approx(dealt)


def test_random_passages_of_k_isotropic_points_read_one_over_root_k_and_nothing_when_adjusted() -> None:
    for size in (4, 25, 100):
        sentences = torch.arange(4000) // size
        points = normal(4000, 300)
        assert value_of("intra_sentence_similarity", points, sentences=sentences) == pytest.approx(
            1 / math.sqrt(size), rel=0.02
        )
        assert abs(value_of("intra_sentence_similarity_adjusted", points, sentences=sentences)) < 2e-3


def test_dealing_keeps_the_sizes_of_groups() -> None:
    ids = labels(500, 40)
    dealt = deal_labels(ids)
    assert torch.equal(ids.sort().values, dealt.sort().values)
    assert torch.equal(dealt, deal_labels(ids))
    assert (ids == dealt).double().mean() < 0.2


# Maximum explainable variance


def explained_by_svd(points: Tensor, ids: Tensor) -> float:
    shares = []
    for kind in ids.unique():
        rows = points[ids == kind].double()
        if len(rows) >= 5:
            squares = torch.linalg.svdvals(rows - rows.mean(0)).square()
            shares.append(float(squares[0] / squares.sum()))
    return float(np.mean(shares))


@pytest.mark.parametrize("d", [3, 40])
def test_explainable_variance_is_the_mean_leading_share_of_centred_occurrences(d: int) -> None:
    points, ids = normal(300, d) * torch.linspace(0.3, 2, d) + 5, labels(300, 30)
    own, dealt = explained_by_svd(points, ids), explained_by_svd(points, deal_labels(ids))
    found = evaluated("max_explainable_variance", points, ids)
    assert float(found.value) == pytest.approx(own, rel=1e-10)
    assert float(found.control) == pytest.approx(dealt, rel=1e-10)
    assert value_of("max_explainable_variance_adjusted", points, ids) == pytest.approx(own - dealt, abs=1e-10)


def test_contexts_on_a_line_are_fully_explained_and_random_ones_are_as_random_points() -> None:
    ids = torch.arange(2000) % 100
    lines = normal(100, 30, seed=1)[ids] * normal(2000, 1) + 3 * normal(100, 30, seed=2)[ids]
    assert value_of("max_explainable_variance", lines, ids) == pytest.approx(1, abs=1e-9)
    assert value_of("max_explainable_variance_adjusted", lines, ids) > 0.7
    assert abs(value_of("max_explainable_variance_adjusted", normal(2000, 30), ids)) < 0.01


def test_types_that_do_not_vary_are_left_out_with_their_share_of_the_control() -> None:
    ids = torch.arange(60) // 10
    points = normal(60, 8)
    points[:10] = 1 / 3
    some = points[10:]
    expected = explained_by_svd(some, ids[10:])
    found = evaluated("max_explainable_variance", points, ids)
    assert float(found.value) == pytest.approx(expected, rel=1e-10)
    points[:] = 0.1
    assert evaluated("max_explainable_variance", points, ids).note == "no type with five occurrences varies"


# Through the side door


def test_a_matrix_with_token_ids_is_measured_and_its_null_is_the_control() -> None:
    points, ids = normal(900, 6) + 0.5, labels(900, 30)
    answer = estimate(points, ["intra_similarity", "inter_similarity"], token_ids=ids.numpy(), batch_points=300)
    intra, inter = answer["intra_similarity"], answer["inter_similarity"]
    assert intra.batches == 3
    assert intra.null == pytest.approx(inter.value, abs=1e-12)
    assert intra.note is None
    whole = estimate(points, ["intra_similarity"], token_ids=ids.tolist())["intra_similarity"]
    assert whole.value == pytest.approx(intra_by_pairs(points, ids), abs=1e-12)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("intra_similarity", "token_ids"), ("max_explainable_variance", "token_ids"), ("contextuality", "token_ids")],
)
def test_what_a_point_is_must_be_said(name: str, wanted: str) -> None:
    with pytest.raises(SpecError, match=f"compares occurrences; give {wanted}="):
        estimate(normal(50, 4), [name], sentences=torch.zeros(50).long())
    with pytest.raises(SpecError, match="give sentences="):
        estimate(normal(50, 4), ["intra_sentence_similarity"], token_ids=torch.zeros(50).long())
    with pytest.raises(SpecError, match="not known which token a point is"):
        evaluate(Cloud(points=normal(50, 4)), all_metrics()["intra_similarity"], {})


@pytest.mark.parametrize(
    "ids", [torch.zeros(49).long(), torch.zeros(50), torch.zeros(50, 1).long(), [0.5] * 50, ["the"] * 50]
)
def test_labels_are_one_whole_number_per_point(ids: object) -> None:
    with pytest.raises(SpecError, match="token_ids must be 50 whole numbers; came "):
        estimate(normal(50, 4), ["intra_similarity"], token_ids=ids)


# Rogue dimensions


def contributions_by_pairs(points: Tensor) -> Tensor:
    units = points / points.norm(dim=1, keepdim=True)
    n = len(points)
    products = units[:, None] * units[None]
    products[range(n), range(n)] = 0
    return products.sum((0, 1)) / (n * (n - 1))


def test_contributions_are_means_over_pairs_and_add_up_to_the_mean_cosine() -> None:
    points = normal(60, 7) + torch.linspace(0, 2, 7)
    found = cosine_contributions(points)
    assert torch.allclose(found, contributions_by_pairs(points), atol=1e-13)
    assert float(found.sum()) == pytest.approx(value_of("mean_cosine", points), abs=1e-12)
    top = found.sort(descending=True).values
    assert value_of("rogue_share", points) == pytest.approx(float(top[0] / top.sum()), rel=1e-12)
    assert value_of("rogue_share_3", points) == pytest.approx(float(top[:3].sum() / top.sum()), rel=1e-12)


def test_one_coordinate_that_owns_everything_has_all_of_the_share() -> None:
    points = 0.01 * normal(200, 50)
    points[:, 13] = 5
    assert value_of("rogue_share", points) == pytest.approx(1, abs=1e-4)
    assert int(cosine_contributions(points).argmax()) == 13
    even = torch.ones(200, 50, dtype=torch.float64)
    assert value_of("rogue_share", even) == pytest.approx(1 / 50, rel=1e-9)
    assert value_of("rogue_share_3", even) == pytest.approx(3 / 50, rel=1e-9)


def test_where_there_is_no_mean_cosine_there_is_nothing_to_share() -> None:
    found = evaluated("rogue_share", torch.cat([normal(50, 6), -normal(50, 6)]))
    assert math.isnan(float(found.value))
    assert found.note is not None
    assert "nothing to share" in found.note


def r2_by_pairs(points: Tensor, removed: int) -> float:
    top = contributions_by_pairs(points).topk(removed).indices
    left = points.clone()
    left[:, top] = 0
    pairs = torch.triu_indices(len(points), len(points), 1)
    one, two = (cosines_of(item)[*pairs].numpy() for item in (points, left))
    return float(np.corrcoef(one, two)[0, 1] ** 2)


@pytest.mark.parametrize("removed", [1, 3, 5])
@pytest.mark.parametrize(("n", "d"), [(60, 9), (20, 40)])
def test_r2_is_the_squared_correlation_over_all_pairs(removed: int, n: int, d: int) -> None:
    points = normal(n, d) * torch.linspace(0.5, 4, d) + torch.linspace(0, 3, d)
    assert value_of(f"rogue_r2_{removed}", points) == pytest.approx(r2_by_pairs(points, removed), abs=1e-10)


def test_r2_without_the_coordinate_that_decides_is_near_zero() -> None:
    points = normal(500, 30)
    points[:, 4] = 20 + 60 * normal(500, seed=3)
    assert value_of("rogue_r2_1", points) < 0.02
    points[:, 9], points[:, 17] = 15 + 60 * normal(500, seed=4), 10 + 60 * normal(500, seed=5)
    assert value_of("rogue_r2_3", points) < 0.02
    assert value_of("rogue_r2_1", points) > 0.2


def test_the_nulls_of_rogue_dimensions_are_what_random_directions_give() -> None:
    share, top, r2 = (all_metrics()[name] for name in ("rogue_share", "rogue_share_3", "rogue_r2_3"))
    assert share.closed_form is not None
    assert top.closed_form is not None
    assert r2.closed_form is not None
    # Of two squared normals the larger has mean 1 + 2/π.
    assert share.closed_form(100, 2) == pytest.approx((1 + 2 / math.pi) / 2, abs=1e-6)
    assert share.closed_form(100, 1) == top.closed_form(100, 3) == 1
    squares = normal(4000, 200).square()
    shares = (squares / squares.sum(1, keepdim=True)).sort(1, descending=True).values
    assert share.closed_form(100, 200) == pytest.approx(float(shares[:, 0].mean()), rel=0.01)
    assert top.closed_form(100, 200) == pytest.approx(float(shares[:, :3].sum(1).mean()), rel=0.01)
    assert 0 < top.closed_form(100, 16384) < 0.004
    values = [value_of("rogue_r2_3", normal(600, 25, seed=seed)) for seed in range(12)]
    error = float(np.std(values, ddof=1)) / math.sqrt(12)
    assert r2.closed_form(600, 25) == pytest.approx(float(np.mean(values)), abs=4 * error)
    assert r2.closed_form(600, 25) == pytest.approx(1 - 3 / 25, abs=0.01)
    assert math.isnan(r2.closed_form(600, 3))


# The margin of the hull


def cap(n: int, d: int, angle: float) -> Tensor:
    """Points all at one angle from the first axis: the nearest point of their hull lies on it, at its cosine."""
    around = normal(n, d - 1)
    around = torch.cat([around, -around]) / around.norm(dim=1).repeat(2)[:, None]
    return torch.cat([torch.full((2 * n, 1), math.cos(angle), dtype=torch.float64), math.sin(angle) * around], 1)


@pytest.mark.parametrize("angle", [0.2, 0.8, 1.4, 1.56])
@pytest.mark.parametrize("d", [3, 30])
def test_the_margin_of_a_cap_is_the_cosine_of_its_angle(angle: float, d: int) -> None:
    points = cap(3 * d, d, angle) @ torch.linalg.qr(normal(d, d, seed=1)).Q
    lengths = 1 + normal(6 * d, 1, seed=2).abs()
    found = evaluated("hull_margin", points * lengths)
    assert float(found.value) == pytest.approx(math.cos(angle), rel=1e-4)
    assert float(evaluated("hull_margin", (points * lengths).float()).value) == pytest.approx(math.cos(angle), rel=1e-4)


def test_opposite_points_and_points_all_around_have_no_margin() -> None:
    assert value_of("hull_margin", torch.tensor([[1.0, 2.0], [-2.0, -4.0]]).repeat(4, 1)) == 0
    assert value_of("hull_margin", torch.cat([torch.eye(5), -torch.eye(5)]).repeat(2, 1)) == 0
    assert value_of("hull_margin", normal(400, 20)) == 0
    assert value_of("hull_margin", torch.eye(5).repeat(4, 1)) == pytest.approx(1 / math.sqrt(5), rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("offset", [0.3, 0.6, 1.5])
def test_the_bounds_meet_and_agree_with_quadratic_programming(seed: int, offset: float) -> None:
    points = normal(80, 12, seed=seed) + offset
    units = points / points.norm(dim=1, keepdim=True)
    low, high = (float(bound) for bound in hull_distance(units))
    if high > 1e-4:
        assert 0 <= high - low <= 1e-5 * high
        # Independently: the nearest point of a hull by non-negative least squares on the cone (w ≥ 0, Σw = 1).
        from scipy.optimize import nnls

        weight = 1e4
        system = np.vstack([units.numpy().T, weight * np.ones((1, 80))])
        solution = nnls(system, np.append(np.zeros(12), weight))[0]
        nearest = float(np.linalg.norm(units.numpy().T @ (solution / solution.sum())))
        assert high == pytest.approx(nearest, rel=1e-5)
    else:
        assert low <= 1e-4


def test_a_margin_that_says_something_stands_out_from_random_signs() -> None:
    points = normal(400, 50) + 0.8
    found = estimate(points, ["hull_margin"])["hull_margin"]
    assert found.value > 0.4
    assert found.null < 1e-4
    assert found.note is None
    # By counting alone: fewer points than 2d have a margin whatever their signs. Hence n ≥ 4d.
    few = normal(60, 50)
    assert float(hull_distance(few / few.norm(dim=1, keepdim=True))[0]) > 0.01
    refused = evaluated("hull_margin", normal(199, 50))
    assert math.isnan(float(refused.value))
    assert refused.note == "199 points, and it needs 200"


def test_a_search_that_is_cut_short_gives_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anisoscope.kernels.hull.HULL_STEPS", 3)
    points = normal(100, 20) + 1
    low, high = hull_distance(points / points.norm(dim=1, keepdim=True))
    assert low < high, "the bounds hold all the same"
    found = evaluated("hull_margin", points)
    assert math.isnan(float(found.value))
    assert found.note is not None
    assert "did not come to its bound" in found.note


def test_a_hull_that_barely_misses_the_origin_is_found_too() -> None:
    # A cap of nearly a half-space: steps alone would take hundreds of thousands.
    for angle in (math.pi / 2 - 0.003, math.pi / 2 - 0.0005):
        low, high = (float(bound) for bound in hull_distance(cap(600, 60, angle)))
        assert low == pytest.approx(math.cos(angle), rel=1e-4)
        assert high == pytest.approx(math.cos(angle), rel=1e-4)


def test_one_point_on_the_other_side_takes_the_margin() -> None:
    points = normal(200, 10) * 0.1 + 1
    assert value_of("hull_margin", points) > 0.8
    points[7] = -points[7]
    assert value_of("hull_margin", points) < 0.3


# In the walk


def test_the_walk_measures_occurrences_at_every_site(saved_models: dict[str, Path], corpus_file: Path) -> None:
    unit = an.measure(
        an.Spec(
            model=str(saved_models["decoder"]),
            corpus=str(corpus_file),
            tokens=4096,
            seq_len=64,
            batch_points=1024,
            sites=("embed", "block.1"),
            metrics=("contextuality", "drift", "hull_margin"),
        ),
        progress=False,
    )
    rows = {(row.site, row.metric): row for row in unit.records if row.population == "all"}
    assert len(rows) == 2 * (7 + 5 + 1)
    for site in ("embed", "block.1"):
        same, other = rows[site, "intra_similarity"], rows[site, "inter_similarity"]
        assert other.value < same.value < 1
        assert same.null == pytest.approx(other.value, abs=1e-9)
        assert rows[site, "intra_similarity_adjusted"].value == pytest.approx(same.value - other.value, abs=1e-9)
        for name in ("intra_sentence_similarity", "max_explainable_variance"):
            raw, adjusted = rows[site, name], rows[site, f"{name}_adjusted"]
            assert adjusted.value == pytest.approx(raw.value - raw.null, abs=1e-9)
        assert rows[site, "hull_margin"].null < 1e-4
