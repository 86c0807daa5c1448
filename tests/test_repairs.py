"""Repairs do what they say: known answers, one set fitted and another repaired, numpy and torch alike."""

import doctest
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import anisoscope as an
from anisoscope import repairs
from anisoscope.errors import SpecError
from anisoscope.repairs import center, remove_top, standardize, whiten

ALL = (center, remove_top, whiten, standardize)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stretched() -> Tensor:
    mixed = normal(8, 8, seed=1)
    return normal(500, 8) * torch.tensor([9.0, 3, 2, 1, 1, 1, 0.5, 0.1]) @ torch.linalg.qr(mixed).Q + 4


def by_name(items: Any) -> str:
    return items.__name__


def test_centred_points_have_mean_zero_and_keep_their_differences() -> None:
    points = stretched()
    found = center(points)
    assert float(found.mean(0).abs().max()) < 1e-13
    assert torch.allclose(found[1:] - found[:-1], points[1:] - points[:-1])


def test_all_but_the_top_by_hand() -> None:
    # Along the first axis they vary most; it goes, and so does the mean (2, 1).
    points = np.array([[5.0, 1.0], [-1.0, 1.0], [2.0, 2.0], [2.0, 0.0]])
    assert remove_top(points, 1) == pytest.approx(np.array([[0.0, 0], [0, 0], [0, 1], [0, -1]]), abs=1e-12)


def test_all_but_the_top_takes_the_leading_axes_and_nothing_else() -> None:
    points = stretched()
    before = torch.linalg.eigvalsh(points.T.cov())
    for count in (0, 1, 3, 8):
        after = torch.linalg.eigvalsh(remove_top(points, count).T.cov())
        expected = torch.cat([torch.zeros(count), before[: 8 - count]])
        assert torch.allclose(after, expected, atol=1e-10)
        assert float(remove_top(points, count).mean(0).abs().max()) < 1e-12
    assert an.estimate(remove_top(points), ["mean_cosine"])["mean_cosine"].value < 0.1


@pytest.mark.parametrize(("d", "count"), [(8, 1), (100, 1), (101, 2), (768, 8)])
def test_one_axis_in_a_hundred_is_removed_by_default(d: int, count: int) -> None:
    points = normal(2 * d, d)
    assert torch.linalg.matrix_rank(remove_top(points)) == d - count


def test_whitened_points_have_the_identity_for_covariance() -> None:
    points = stretched()
    found = whiten(points)
    assert torch.allclose(found.T.cov(), torch.eye(8, dtype=torch.float64), atol=1e-9)
    assert float(found.mean(0).abs().max()) < 1e-12
    assert an.estimate(found, ["isoscore"])["isoscore"].value == pytest.approx(1, abs=1e-9)


def test_the_floor_keeps_axes_without_variance_small() -> None:
    flat = torch.cat([stretched(), torch.zeros(500, 2)], 1)
    found = whiten(flat)
    variances = found.var(0)
    assert torch.allclose(variances[:8], torch.ones(8, dtype=torch.float64), atol=1e-9)
    assert float(variances[8:].max()) < 1e-9
    # λ is at most 81; an axis below floor · λ₁ comes out with λ / (floor · λ₁).
    spectrum = torch.linalg.eigvalsh(stretched().T.cov()).flip(0)
    floored = whiten(stretched(), floor=0.05).var(0)
    assert torch.allclose(floored, spectrum / torch.maximum(spectrum, 0.05 * spectrum[0]), atol=1e-9)


def test_whitening_tells_axes_by_their_order_and_sign() -> None:
    points = stretched()
    again = whiten(points.flip(0)).flip(0)
    assert torch.allclose(whiten(points), again, atol=1e-9)
    # The sign of an axis is that of its largest coordinate, whatever the decomposition gave.
    axes = torch.linalg.lstsq(points - points.mean(0), whiten(points)).solution
    assert bool((axes.gather(0, axes.abs().argmax(0, keepdim=True)) > 0).all())


def test_standardised_coordinates_have_mean_zero_and_deviation_one() -> None:
    points = torch.cat([stretched(), torch.full((500, 1), 0.1)], 1)
    found = standardize(points)
    assert torch.allclose(found[:, :8].std(0), torch.ones(8, dtype=torch.float64))
    assert torch.equal(found[:, 8], torch.zeros(500, dtype=torch.float64))


def test_standardising_takes_a_rogue_dimension_its_power() -> None:
    points = normal(400, 20)
    points[:, 7] = 10 + 30 * normal(400, seed=2)
    assert an.estimate(points, ["rogue_share"])["rogue_share"].value > 0.95
    assert an.estimate(points, ["rogue_r2_1"])["rogue_r2_1"].value < 0.1
    repaired = an.estimate(standardize(points), ["mean_cosine", "rogue_r2_1"])
    assert abs(repaired["mean_cosine"].value) < 0.01
    assert repaired["rogue_r2_1"].value == pytest.approx(repaired["rogue_r2_1"].null, abs=0.03)


@pytest.mark.parametrize("repair", ALL, ids=by_name)
def test_what_is_fitted_on_one_set_is_applied_to_another(repair: Callable[..., Any]) -> None:
    points, other = stretched(), normal(7, 8, seed=4)
    whole = repair(torch.cat([points, other]), fit=points)
    assert torch.allclose(whole[:500], repair(points), atol=1e-10)
    assert torch.allclose(whole[500:], repair(other, fit=points), atol=1e-10)
    assert not torch.allclose(whole[500:], repair(other), atol=1e-3)


@pytest.mark.parametrize("repair", ALL, ids=by_name)
def test_arrays_come_back_as_they_came(repair: Callable[..., Any]) -> None:
    points = stretched()
    kept = points.clone()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = repair(points.to(dtype))
        assert found.dtype == dtype
        exact = repair(points.to(dtype).double())
        assert torch.equal(found, exact.to(dtype))
    for kind in (np.float64, np.float32):
        found = repair(points.numpy().astype(kind))
        assert isinstance(found, np.ndarray)
        assert found.dtype == kind
        assert found == pytest.approx(repair(points).numpy(), abs=1e-3)
    assert torch.equal(points, kept)


@pytest.mark.parametrize("repair", ALL, ids=by_name)
def test_what_cannot_be_repaired_is_refused(repair: Callable[..., Any]) -> None:
    for points, fit in ((normal(5), None), (normal(1, 3), None), (normal(5, 3), normal(5, 4)), (normal(2, 3, 4), None)):
        with pytest.raises(SpecError, match="a repair takes a matrix of points"):
            repair(points, fit=fit)


@pytest.mark.parametrize("count", [-1, 9])
def test_more_axes_than_there_are_cannot_be_removed(count: int) -> None:
    with pytest.raises(SpecError, match="between 0 and 8 can be removed"):
        remove_top(stretched(), count)


@pytest.mark.parametrize("repair", ALL, ids=by_name)
def test_points_that_do_not_vary_become_zero(repair: Callable[..., Any]) -> None:
    found = repair(torch.full((9, 3), 1 / 3, dtype=torch.float64))
    assert float(found.abs().max()) < 1e-9
    assert math.isfinite(float(found.sum()))


def test_examples_are_true() -> None:
    assert doctest.testmod(repairs).failed == 0
    assert doctest.testmod(repairs).attempted > 0
