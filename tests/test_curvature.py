"""Curvature against surfaces whose curvature is known, flat noise, and the closed forms of sampling by frequency."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from anisoscope.errors import SpecError, StatesError
from anisoscope.tangent.attenuation import draw_by_frequency, measure_frequency_response
from anisoscope.tangent.curvature import Curvature, CurvatureSettings, measure_curvature

# What the issue asks for: curvature of known surfaces.
CURVATURE_TOLERANCE = 0.10
QUICK = CurvatureSettings(shuffles=19, resamples=400)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def embed(surface: Tensor, dim: int, *, noise: float = 0.0, seed: int = 0) -> Tensor:
    """Turned at random into more dimensions, with noise in all of them."""
    axes = torch.linalg.qr(normal(dim, dim, seed=seed + 1)).Q[: surface.shape[1]]
    return surface @ axes + noise * normal(len(surface), dim, seed=seed + 2)


def sphere(n: int, rank: int, radius: float, *, seed: int = 0) -> Tensor:
    directions = normal(n, rank + 1, seed=seed)
    return radius * directions / directions.norm(dim=1, keepdim=True)


def forms(rank: int, normals: int, size: float, *, seed: int = 0) -> Tensor:
    """Symmetric matrices H, one per normal direction, with the norm ‖II‖ asked for."""
    found = normal(normals, rank, rank, seed=seed)
    found = found + found.mT
    return size * found / found.norm()


def paraboloid(u: Tensor, second: Tensor) -> Tensor:
    return torch.cat([u, torch.einsum("ni,aij,nj->na", u, second, u) / 2], 1)


def flat(n: int, rank: int, dim: int, noise: float, *, seed: int = 0) -> Tensor:
    square = 2 * torch.rand(n, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return embed(square, dim, noise=noise, seed=seed)


@pytest.mark.parametrize(("rank", "n", "noise"), [(1, 600, 0.0), (2, 2000, 0.0), (2, 2000, 0.02), (3, 4000, 0.02)])
def test_a_sphere_has_the_root_of_r_over_its_radius(rank: int, n: int, noise: float) -> None:
    cloud = embed(sphere(n, rank, 2.0), 20, noise=noise)
    found = measure_curvature(cloud, settings=replace(QUICK, rank=rank))
    wanted = math.sqrt(rank) / 2
    assert found.second_fundamental_form.value == pytest.approx(wanted, rel=CURVATURE_TOLERANCE)
    assert found.curved
    assert found.p == pytest.approx(1 / (1 + QUICK.flips))
    assert found.shuffled_p == pytest.approx(1 / 20)
    assert abs(found.dimension - rank) < 1


@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_a_paraboloid_has_its_own_curvature_also_in_noise(noise: float) -> None:
    cloud = embed(paraboloid(0.1 * normal(1500, 3), forms(3, 5, 4.34)), 40, noise=noise)
    found = measure_curvature(cloud, settings=replace(QUICK, rank=3))
    assert found.second_fundamental_form.value == pytest.approx(4.34, rel=CURVATURE_TOLERANCE)
    assert measure_curvature(cloud, settings=replace(QUICK, rank=3)) == found


def test_units_and_turns_change_nothing_but_the_units() -> None:
    cloud = embed(paraboloid(0.1 * normal(800, 2), forms(2, 3, 3.0)), 8, noise=0.002)
    settings = replace(QUICK, rank=2)
    one = measure_curvature(cloud, settings=settings)
    other = measure_curvature(100 * cloud @ torch.linalg.qr(normal(8, 8, seed=5)).Q + 7, settings=settings)
    assert other.second_fundamental_form.value == pytest.approx(one.second_fundamental_form.value / 100, rel=1e-6)
    assert other.curvature_visibility.value == pytest.approx(one.curvature_visibility.value, rel=1e-6)


@pytest.mark.parametrize("t", [0.02, 0.05, 0.1])
def test_visibility_and_shift_of_one_patch_are_those_of_the_theory(t: float) -> None:
    """One neighbourhood holds the whole patch, so V and the shift can be read off its coordinates too."""
    rank, n, second = 3, 2000, forms(3, 9, 7.72, seed=3)
    surface = paraboloid(t * normal(n, rank, seed=4), second)
    theory = t**2 * float(second.square().sum()) / (2 * rank)
    trace = torch.einsum("aii->a", second)
    shift = t / 2 * float(trace.norm()) / math.sqrt(rank)
    tangent, bent = surface[:, :rank], surface[:, rank:]
    assert float(bent.var(0).sum() / tangent.var(0).sum()) == pytest.approx(theory, rel=0.1)
    assert float(bent.mean(0).norm() / tangent.var(0).sum().sqrt()) == pytest.approx(shift, rel=0.1)
    found = measure_curvature(
        embed(surface, 12), settings=replace(QUICK, rank=rank, neighbors=n - 1, anchors=16, shuffles=1, flips=39)
    )
    assert found.curvature_visibility.value == pytest.approx(theory, rel=CURVATURE_TOLERANCE)
    assert found.mean_shift == pytest.approx(shift, rel=CURVATURE_TOLERANCE)
    assert found.radius == pytest.approx(t, rel=0.05)


@pytest.mark.parametrize(("dim", "noise"), [(12, 0.05), (200, 0.01)])
def test_a_flat_cloud_is_called_curved_no_more_often_than_said(dim: int, noise: float) -> None:
    """The bound is one that a true rate at the nominal one exceeds once in a hundred times.

    The first noise is loud enough to fail it where neighbours are chosen by their distance in space.
    """
    draws, settings = 200, CurvatureSettings(rank=2, anchors=64, shuffles=19, resamples=400, flips=79)
    found = [
        measure_curvature(flat(600, 2, dim, noise, seed=10 * draw), settings=replace(settings, seed=draw))
        for draw in range(draws)
    ]
    assert all(math.isfinite(one.p) for one in found)
    assert sum(one.curved for one in found) <= stats.binom.ppf(0.99, draws, 0.025)
    for name in ("p", "shuffled_p"):
        assert sum(getattr(one, name) <= 0.05 for one in found) <= stats.binom.ppf(0.99, draws, 0.05)
    # Signs are kept: as many are below zero as above, within four standard errors.
    below = sum(one.curvature_visibility.value < 0 for one in found)
    assert abs(below - draws / 2) < 2 * math.sqrt(draws)
    # The plain fit would have called all of them curved.
    assert min(one.plain_form for one in found) > 1


def test_noise_that_a_plain_fit_takes_for_curvature_is_named() -> None:
    second = forms(3, 5, 4.34)
    cloud = embed(paraboloid(0.05 * normal(400, 3), second), 40, noise=0.002)
    found = measure_curvature(cloud, settings=replace(QUICK, rank=3, neighbors=40))
    assert found.note is not None
    assert "noise reads as curvature" in found.note
    assert found.plain_form > 1.2 * 4.34
    assert found.second_fundamental_form.low < 4.34 < found.second_fundamental_form.high
    clean = measure_curvature(embed(paraboloid(0.05 * normal(400, 3), second), 40), settings=replace(QUICK, rank=3))
    assert clean.note is None


@pytest.mark.parametrize(
    ("cloud", "settings", "reason"),
    [
        (flat(300, 2, 8, 0.01), replace(QUICK, rank=4, neighbors=44), "44 neighbours, and rank 4 needs 45"),
        (flat(50, 2, 8, 0.01), QUICK, "50 distinct points"),
        (flat(300, 2, 8, 0.01), replace(QUICK, rank=2, anchors=8), "8 anchors"),
        (normal(600, 20), replace(QUICK, rank=2), "dimensions at this scale, more than 4"),
        (flat(600, 2, 30, 0.3), replace(QUICK, rank=2), "dimensions at this scale, more than 4"),
        (normal(300, 2), replace(QUICK, rank=2), "no direction is normal"),
        (normal(20, 8).repeat(20, 1), replace(QUICK, rank=2), "20 distinct points"),
    ],
    ids=["few neighbours", "few points", "few anchors", "no surface", "loud noise", "no room", "repeats"],
)
def test_what_the_data_forbid_is_nan_with_a_reason(cloud: Tensor, settings: CurvatureSettings, reason: str) -> None:
    found = measure_curvature(cloud, settings=settings)
    assert math.isnan(found.curvature_visibility.value)
    assert math.isnan(found.second_fundamental_form.value)
    assert not found.curved
    assert found.note is not None
    assert found.note.startswith("cannot tell")
    assert reason in found.note


def test_anchors_of_few_types_have_no_interval() -> None:
    cloud = embed(sphere(600, 2, 1.0), 6)
    found = measure_curvature(cloud, torch.arange(600) % 7, replace(QUICK, rank=2))
    assert "anchors of 7 types" in (found.note or "")
    assert not math.isnan(measure_curvature(cloud, torch.arange(600) % 8, replace(QUICK, rank=2)).p)


def test_repeats_are_dropped_and_counted() -> None:
    cloud = embed(sphere(400, 2, 1.0), 6)
    found = measure_curvature(torch.cat([cloud, cloud[:50]]), settings=replace(QUICK, rank=2))
    assert (found.points, found.dropped) == (400, 50)


def test_bad_input_is_refused() -> None:
    cloud = flat(300, 2, 8, 0.01)
    with pytest.raises(StatesError, match="finite"):
        measure_curvature(cloud.clone().fill_(math.nan), settings=QUICK)
    with pytest.raises(SpecError, match="one type per point"):
        measure_curvature(cloud, torch.zeros(3, dtype=torch.int64), QUICK)
    with pytest.raises(SpecError, match="rank"):
        CurvatureSettings(rank=0)
    with pytest.raises(SpecError, match="more flips"):
        CurvatureSettings(flips=38)
    with pytest.raises(SpecError, match="without repetition"):
        draw_by_frequency(torch.zeros(5, dtype=torch.int64), torch.ones(5), 1.0, 6, seed=0)
    with pytest.raises(SpecError, match="frequency of its type"):
        draw_by_frequency(torch.zeros(5, dtype=torch.int64), torch.ones(4), 1.0, 3, seed=0)
    with pytest.raises(SpecError, match="above 0"):
        draw_by_frequency(torch.zeros(5, dtype=torch.int64), torch.zeros(5), 1.0, 3, seed=0)
    with pytest.raises(SpecError, match="exponents 0 and 1"):
        measure_frequency_response(
            cloud, torch.zeros(300, dtype=torch.int64), torch.ones(300), draw_points=100, exponents=(0.0, 0.5)
        )


def test_draws_reach_their_exponent_without_repetition() -> None:
    supply = torch.tensor([6000, 3000, 2000, 1500, 1200])
    types = torch.repeat_interleave(torch.arange(5), supply)
    for exponent in (0.0, 0.5, 1.0):
        drawn = draw_by_frequency(types, supply[types].double(), exponent, 1500, seed=1)
        assert len(drawn.unique()) == 1500
        wanted = supply.double() ** exponent
        shares = torch.bincount(types[drawn], minlength=5) / 1500
        # Draws without repetition drift towards what is left: a tenth of the supply was taken.
        assert torch.allclose(shares.double(), wanted / wanted.sum(), atol=0.04)


def closed_form(frequencies: np.ndarray, radii: np.ndarray) -> float:
    """Σ p t⁴ / Σ p t² with p ~ f, over the same with p uniform."""
    weighted = (frequencies * radii**4).sum() / (frequencies * radii**2).sum()
    return float(weighted / ((radii**4).sum() / (radii**2).sum()))


def test_attenuation_of_zipf_types_is_its_closed_form() -> None:
    """2,000 types with t ~ f^-.15, drawn either way; variances of the draws themselves, no fit."""
    ranks = np.arange(1, 2001)
    frequencies, second = 1.0 / ranks, forms(3, 4, 2.0)
    radii = 0.1 * frequencies**-0.15
    assert closed_form(frequencies, radii) == pytest.approx(0.668, abs=5e-4)

    def pooled(weights: np.ndarray) -> float:
        types = np.random.default_rng(0).choice(2000, size=200_000, p=weights / weights.sum())
        t = torch.from_numpy(radii[types])
        surface = paraboloid(t[:, None] * normal(len(types), 3), second)
        bent = surface[:, 3:] - t[:, None] ** 2 / 2 * torch.einsum("aii->a", second)
        return float(bent.square().sum() / surface[:, :3].square().sum())

    assert pooled(frequencies) / pooled(np.ones(2000)) == pytest.approx(0.668, rel=0.03)


def test_reweighted_attenuation_of_zipf_types_is_its_closed_form() -> None:
    """Each type is a patch that fills one neighbourhood; every fortieth of 2,000 types."""
    ranks = np.arange(20, 2000, 40)
    frequencies, k = 1.0 / ranks, 60
    radii = 0.02 * frequencies**-0.15
    second = forms(2, 3, 4.0)
    patches = [paraboloid(t * normal(k + 1, 2, seed=i), second) for i, t in enumerate(radii)]
    dim, types = 8, torch.repeat_interleave(torch.arange(len(ranks)), k + 1)
    places = 100 * normal(len(ranks), dim, seed=99)
    cloud = embed(torch.cat(patches), dim, noise=1e-4) + places[types]
    found = measure_frequency_response(
        cloud,
        types,
        torch.from_numpy(frequencies)[types],
        draw_points=len(cloud),
        exponents=(0.0, 1.0),
        settings=replace(QUICK, rank=2, neighbors=k, anchors=len(cloud) // 4, shuffles=1),
    )
    wanted = closed_form(frequencies, radii)
    assert found.reweighted_attenuation.value == pytest.approx(wanted, rel=0.1)
    assert found.reweighted_attenuation.low < wanted < found.reweighted_attenuation.high < 1
    # With the supply exhausted both draws are one and the same.
    assert found.frequency_attenuation.value == pytest.approx(1.0, abs=0.05)


def spheres_by_type(power: float) -> tuple[Tensor, Tensor, Tensor, np.ndarray, np.ndarray]:
    """Sixteen types, each a sphere far from the others; f falls with the rank, R² = f^power."""
    frequencies = np.arange(1, 17) ** -0.35
    radii = frequencies ** (power / 2)
    supply = 2000
    types = torch.repeat_interleave(torch.arange(16), supply)
    places = 1000 * normal(16, 6, seed=7)
    surfaces = [embed(sphere(supply, 2, radius, seed=i), 6, seed=50) for i, radius in enumerate(radii)]
    return torch.cat(surfaces) + places[types], types, torch.from_numpy(frequencies)[types], frequencies, radii


def test_attenuation_of_draws_is_that_of_k_neighbours_on_spheres() -> None:
    """k of n p points fill a cap with t² = R² k/(n p) (less its bend), so A = mean over R² of 1/(N p).

    Neighbourhoods shrink where a draw is dense: the radii follow the draw, and A is not that of fixed radii.
    """
    cloud, types, often, frequencies, radii = spheres_by_type(4.0)
    settings = replace(QUICK, rank=2, neighbors=18, anchors=1000, shuffles=1)
    found = measure_frequency_response(cloud, types, often, draw_points=4000, settings=settings)
    assert found.exponents == (0.0, 0.25, 0.5, 0.75, 1.0)
    mass = frequencies / frequencies.sum()
    wanted = (radii**2 / (16 * mass)).sum() / (radii**2).sum()
    assert wanted < 0.75
    assert found.frequency_attenuation.value == pytest.approx(wanted, rel=0.1)
    assert found.frequency_attenuation.low < wanted < found.frequency_attenuation.high
    seen = [one.curvature_visibility.value for one in found.curvatures]
    assert seen == sorted(seen, reverse=True)
    assert len({one.points for one in found.curvatures}) == 1


def test_dense_draws_may_show_more_curvature_though_frequent_types_are_pinned() -> None:
    """R ~ f^-.15: frequent types are the tighter ones, and yet A > 1, for rare ones are read at larger radii.

    With the neighbourhoods of one draw the weights alone count: t² ~ R² and ‖II‖² = 2/R², so exactly nothing changes.
    """
    cloud, types, often, frequencies, radii = spheres_by_type(-0.3)
    settings = replace(QUICK, rank=2, neighbors=18, anchors=1000, shuffles=1)
    found = measure_frequency_response(cloud, types, often, draw_points=4000, exponents=(0.0, 1.0), settings=settings)
    wanted = (radii**2 * frequencies.sum() / (16 * frequencies)).sum() / (radii**2).sum()
    assert wanted > 1.05
    assert found.frequency_attenuation.value == pytest.approx(wanted, rel=0.1)
    assert found.reweighted_attenuation.value == pytest.approx(1.0, abs=0.03)


def test_there_is_no_attenuation_of_what_is_not_there() -> None:
    cloud = flat(2000, 2, 12, 0.02)
    types = torch.arange(2000) % 40
    found = measure_frequency_response(
        cloud, types, 1.0 / (1 + types).double(), draw_points=600, settings=replace(QUICK, rank=2)
    )
    assert math.isnan(found.frequency_attenuation.value)
    assert math.isnan(found.reweighted_attenuation.value)
    assert found.note == "cannot tell: no curvature was found in the draw that is uniform over types"
    few = measure_frequency_response(
        cloud, types, 1.0 / (1 + types).double(), draw_points=30, settings=replace(QUICK, rank=2)
    )
    assert few.note is not None
    assert few.note.startswith("exponent 0: cannot tell: 30 distinct points")


def gradient_of(x: Tensor, labels: Tensor) -> Tensor:
    """Of the mean of ½(y - label)² at y = Wx, W = 0."""
    weight = torch.zeros(1, x.shape[1], dtype=x.dtype, requires_grad=True)
    ((x @ weight.T)[:, 0] - labels).square().div(2).mean().backward()
    assert weight.grad is not None
    return weight.grad[0]


def test_a_parabola_whose_gradient_is_all_normal() -> None:
    """x = (u, u²), label -1: the tangent part is E u = 0, the normal part E u² > 0. Bounds from above are no ratio."""
    u = 0.1 * normal(4000, 1)
    u = torch.cat([u, -u])
    tangent, bent = gradient_of(torch.cat([u, u.square()], 1), -torch.ones(len(u), dtype=torch.float64)).tolist()
    assert abs(tangent) < 1e-15
    assert bent == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("t", [0.1, 0.3])
def test_errors_independent_of_the_states_favour_the_tangent(t: float) -> None:
    """E‖G P_T‖² = s² r t²/n and E‖G P_N‖² = s² t⁴ (‖II‖²/2 + Σ(tr H)²/4)/n: here H = 2, so 3 t⁴."""
    n, energies = 200, []
    for seed in range(400):
        u = t * normal(n, 1, seed=seed)
        energies.append(gradient_of(torch.cat([u, u.square()], 1), normal(n, seed=1000 + seed)).square())
    tangent, bent = torch.stack(energies).mean(0).tolist()
    # A mean of 400 squares of Gaussians is off by 7 %.
    assert tangent == pytest.approx(t**2 / n, rel=0.25)
    assert bent == pytest.approx(3 * t**4 / n, rel=0.25)
    assert bent < tangent


def test_nothing_read_is_not_curved() -> None:
    assert not Curvature().curved
