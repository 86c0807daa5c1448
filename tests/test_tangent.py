"""Tangent energies and their controls: closed forms, and slow references that share no code with them."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anisoscope.claims.resampling import benjamini_hochberg
from anisoscope.errors import SpecError, StatesError
from anisoscope.kernels import leading
from anisoscope.tangent import controls, proxies, turns
from anisoscope.tangent import windows as windowed
from anisoscope.tangent.anisotropy import LED_DRAWS, anisotropy_share, find_leading
from anisoscope.tangent.clouds import center_clouds, pad_clouds
from anisoscope.tangent.controls import energy_of, random_spaces, random_spaces_beside, second_moment, sign_energies
from anisoscope.tangent.dynamics import turn_between, update_alignment
from anisoscope.tangent.energies import coupled_alignment, row_squares, uncoupled_alignment
from anisoscope.tangent.frequency import bin_tokens, energy_by_frequency
from anisoscope.tangent.inference import (
    draw_permutations,
    jackknife_ratio,
    permutation_correlation,
    permutation_correlations,
    permutation_p,
    ranks,
    ratio_of_sums,
    sum_groups,
)
from anisoscope.tangent.local import local_alignment
from anisoscope.tangent.means import without_mean
from anisoscope.tangent.pinning import follow_centroids, log_trend, pin_types
from anisoscope.tangent.proxies import LocalProxy, Proxy, fit_global, fit_local, fit_proxy, stack_bases
from anisoscope.tangent.share_controls import permuted_shares, uncoupled_shares
from anisoscope.tangent.windows import pair_each, pair_windows, signal_to_noise, stack_windows

# Relative difference between a fast path in float32 and its reference in float64.
FAST_TOLERANCE = 2e-5
EXACT = 1e-9


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(d: int, r: int, *, seed: int = 0) -> Tensor:
    return torch.linalg.qr(normal(d, r, seed=seed)).Q


def decaying(n: int, d: int, *, seed: int = 0, power: float = 0.6) -> Tensor:
    """States whose variances fall like k^(-2 power) along the same random axes, whatever the seed."""
    return normal(n, d, seed=seed) * torch.arange(1, d + 1) ** -power @ orthonormal(d, d, seed=99)


def windows_of(count: int, length: int) -> Tensor:
    return torch.arange(count).repeat_interleave(length)


def overlap(one: Tensor, other: Tensor) -> float:
    """‖PᵀQ‖² over the smaller rank: 1 where one span holds the other."""
    return float((one.T @ other).square().sum()) / min(one.shape[1], other.shape[1])


# Clouds


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_clouds_side_by_side_are_centred_as_each_alone(dtype: torch.dtype, scale: float) -> None:
    # One far from the origin, one that hardly varies, one with a constant coordinate, of unequal numbers of points.
    every = [decaying(50, 6), decaying(40, 6) + 1e3, 1 + 1e-4 * decaying(30, 6), decaying(20, 6)]
    every[3][:, 2] = 0.1
    every = [(scale * one).to(dtype) for one in every]
    stacked, keep = pad_clouds(every)
    # What is not kept does not count, whatever it is.
    found = center_clouds(torch.where(keep[..., None], stacked, math.nan), keep)
    for number, one in enumerate(every):
        exact = one.double() - one.double().mean(0)
        size = float(exact.norm())
        close = {torch.float64: 1e-12, torch.float32: 1e-6}[dtype]
        assert float(found.size[number]) == pytest.approx(size, rel=close)
        torch.testing.assert_close(found.points[number, : len(one)].double(), exact / size, rtol=0, atol=close)
        assert not bool(found.points[number, len(one) :].any())
        torch.testing.assert_close(found.mean[number], one.double().mean(0), rtol=close, atol=close * size)
    assert not bool(found.points[3, :, 2].any())


def test_equal_points_have_no_size_and_infinite_ones_are_refused() -> None:
    # A mean of numbers that are no powers of two may round to another.
    equal = torch.full((1, 77, 3), 0.1)
    assert float(center_clouds(equal, torch.ones(1, 77, dtype=torch.bool)).size) == 0
    with pytest.raises(StatesError):
        center_clouds(equal / 0, torch.ones(1, 77, dtype=torch.bool))


# Proxies


def test_pca_and_svd_are_the_singular_vectors() -> None:
    states = decaying(300, 24) + 2
    left = torch.linalg.svd(states - states.mean(0)).Vh
    proxy = fit_global(states, method="pca", rank=5, last=True)
    assert overlap(proxy.basis, left[:5].T) == pytest.approx(1, abs=1e-10)
    assert overlap(proxy.following, left[5:10].T) == pytest.approx(1, abs=1e-10)
    assert overlap(proxy.last, left[-5:].T) == pytest.approx(1, abs=1e-10)
    torch.testing.assert_close(proxy.mean, states.mean(0))
    shares = torch.linalg.svdvals(states - states.mean(0)).square()
    assert proxy.explained == pytest.approx(float(shares[:5].sum() / shares.sum()), abs=1e-10)
    raw = fit_global(states, method="svd", rank=5)
    assert overlap(raw.basis, torch.linalg.svd(states).Vh[:5].T) == pytest.approx(1, abs=1e-10)


def test_a_cone_gives_semi_nmf_the_span_of_the_uncentred_svd() -> None:
    states = decaying(400, 32, power=1.0) + 1.5
    svd = fit_global(states, method="svd", rank=4)
    cone = fit_global(states, method="seminmf", rank=4, centred=False)
    assert overlap(svd.basis, cone.basis) > 0.999
    mean = states.mean(0, keepdim=True).T / states.mean(0).norm()
    assert overlap(mean, cone.basis) > 0.99
    # Centred, the mean is not among the directions.
    assert overlap(mean, fit_global(states, method="seminmf", rank=4).basis) < 0.2


def test_every_proxy_is_orthonormal_with_normals_outside_it() -> None:
    states = decaying(300, 24) + 1
    for method in ("pca", "svd", "seminmf"):
        assert fit_global(states, method=method, rank=5).last.shape == (24, 0)
        proxy = fit_global(states.float(), method=method, rank=5, last=True)
        for one in (proxy, *without_mean([proxy])):
            whole = torch.cat([one.basis, one.following], 1).double()
            identity = torch.eye(whole.shape[1], dtype=torch.float64)
            torch.testing.assert_close(whole.T @ whole, identity, atol=2e-5, rtol=0)
            last = torch.cat([one.basis, one.last], 1).double()
            torch.testing.assert_close(last.T @ last, identity, atol=2e-5, rtol=0)


def test_more_concepts_than_directions() -> None:
    proxy = fit_global(decaying(300, 24), method="seminmf", rank=3, concepts=8)
    assert proxy.rank == 3
    assert overlap(proxy.basis, fit_global(decaying(300, 24), rank=3).basis) > 0.9


def test_rank_rules() -> None:
    loose = normal(40, 14, seed=3)
    exact = torch.linalg.qr(loose - loose.mean(0)).Q * torch.tensor([4.0, 3.0, 2.0, 1.0] + [0.0] * 10).sqrt()
    assert fit_global(exact, rank="variance:0.85").rank == 3
    assert fit_global(exact, rank="variance:0.95").rank == 4
    assert fit_global(exact, rank="participation_ratio").rank == round(100 / 30)
    flat = torch.cat([torch.rand(3000, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(3000, 6)], 1)
    proxy = fit_global(flat, rank="twonn")
    assert proxy.rank == 2
    assert "twonn" in proxy.notes[0]
    limited = fit_global(normal(4000, 6), rank="participation_ratio")
    assert limited.rank == 3
    assert "limited" in limited.notes[0]


@pytest.mark.parametrize("rank", [0, 24, "variance:2", "variance:x", "best"])
def test_impossible_ranks_are_refused(rank: Any) -> None:
    with pytest.raises(SpecError):
        fit_global(decaying(100, 24), rank=rank)


def test_bad_states_are_refused() -> None:
    with pytest.raises(StatesError):
        fit_global(torch.full((10, 4), math.nan), rank=2)
    with pytest.raises(StatesError):
        fit_global(torch.ones(10, 4), rank=2)
    with pytest.raises(SpecError):
        fit_global(torch.ones(1, 4), rank=2)
    with pytest.raises(SpecError):
        fit_global(decaying(100, 24), method="ica")
    with pytest.raises(SpecError):
        fit_global(decaying(100, 24), method="pca", centred=False)


def test_pooled_checkpoints_have_equal_weight() -> None:
    early = normal(200, 12) * torch.tensor([5.0] + [0.1] * 11)
    late = 1000 * normal(50, 12, seed=1) * torch.tensor([0.1, 5.0] + [0.1] * 10) + 7
    pooled = fit_global([early, late], rank=2)
    wanted = torch.eye(12, dtype=torch.float64)[:, :2]
    assert overlap(pooled.basis, wanted) > 0.999
    covariances = [one.T.cov() for one in (early, late)]
    mean = sum(one / one.trace() for one in covariances) / 2
    assert pooled.explained == pytest.approx(float(torch.linalg.eigvalsh(mean)[-2:].sum()), rel=1e-6)


def test_the_mean_direction_is_taken_out() -> None:
    states = decaying(300, 24) + 3
    mean = (states.mean(0) / states.mean(0).norm())[:, None]
    raw = fit_global(states, method="svd", rank=4)
    centred = fit_global(states, rank=4)
    rid, kept = without_mean([raw, centred])
    assert rid.rank == 3
    assert float((mean.T @ rid.basis).abs().max()) < 1e-10
    # A centred proxy keeps its rank.
    assert kept.rank == 4
    for before, after in ((raw, rid), (centred, kept)):
        identity = torch.eye(24, dtype=torch.float64)
        left = torch.linalg.svd((identity - mean @ mean.T) @ before.basis).U[:, : after.rank]
        assert overlap(after.basis, left) == pytest.approx(1, abs=1e-10)
        outside = torch.linalg.qr(torch.cat([after.basis, mean, before.following], 1)).Q[:, after.rank + 1 :]
        assert overlap(after.following, outside[:, : after.rank]) == pytest.approx(1, abs=1e-10)


# Energies and controls


def test_energies_of_an_orthonormal_completion_sum_to_one() -> None:
    rows, axes = decaying(200, 20), orthonormal(20, 20, seed=5)
    moment = second_moment(rows)
    parts = [energy_of(moment, axes[:, part]) for part in (slice(0, 6), slice(6, 7), slice(7, 20))]
    assert sum(parts) == pytest.approx(1, abs=1e-12)
    assert parts[0] == pytest.approx(float((rows @ axes[:, :6]).square().sum() / rows.square().sum()), abs=1e-12)


def test_random_spaces_have_their_expectations() -> None:
    moment, basis = second_moment(decaying(500, 24)), fit_global(decaying(500, 24, seed=1), rank=4).basis
    energy = energy_of(moment, basis)
    spaces = random_spaces(moment, basis, draws=4000)
    for draws, expected in ((spaces.haar, 4 / 24), (spaces.normal, (1 - energy) * 4 / 20)):
        error = float(draws.std()) / math.sqrt(4000)
        assert abs(float(draws.mean()) - expected) < 4 * error
    signs = sign_energies(moment[None], basis[None, None], draws=4000)[0, 0]
    expected = float(moment.diagonal() @ basis.square().sum(1))
    assert abs(float(signs.mean()) - expected) < 4 * float(signs.std()) / math.sqrt(4000)


def test_random_spaces_are_those_of_their_bases() -> None:
    moment, basis = second_moment(decaying(500, 24)), orthonormal(24, 4, seed=2)
    spaces = random_spaces(moment, basis, draws=9, keep=9)
    for energy, squares, axes in zip(spaces.normal, spaces.normal_squares, spaces.normal_bases, strict=True):
        torch.testing.assert_close(axes.T @ axes, torch.eye(4, dtype=torch.float64), atol=1e-10, rtol=0)
        assert float((axes.T @ basis).abs().max()) < 1e-10
        assert float(energy) == pytest.approx(energy_of(moment, axes), rel=EXACT)
        rest = torch.eye(24, dtype=torch.float64) - axes @ axes.T
        assert float(squares) == pytest.approx(float((rest @ moment @ rest).square().sum()), rel=EXACT)


def test_sign_energies_are_those_of_flipped_bases() -> None:
    moment, basis = second_moment(decaying(500, 24)), orthonormal(24, 4, seed=2)
    signs = torch.randint(2, (7, 24), generator=torch.Generator().manual_seed(3)) * 2 - 1
    naive = [energy_of(moment, one[:, None] * basis) for one in signs]
    np.testing.assert_allclose(sign_energies(moment[None], basis[None, None], draws=7, seed=3)[0, 0], naive, rtol=EXACT)


@pytest.mark.parametrize("dim", [48, 120])
def test_float32_controls_agree_with_float64(dim: int) -> None:
    rows, basis = decaying(500, dim), orthonormal(dim, 6, seed=2)
    exact, fast = second_moment(rows), second_moment(rows.float())
    for attribute in ("haar", "normal", "normal_squares"):
        one, other = (getattr(random_spaces(m, basis.to(m)), attribute) for m in (exact, fast))
        torch.testing.assert_close(one, other, rtol=FAST_TOLERANCE, atol=0)
    signs = [sign_energies(moment[None], basis[None, None]) for moment in (exact, fast)]
    torch.testing.assert_close(*signs, rtol=FAST_TOLERANCE, atol=0)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_float32_normals_are_exact_where_hardly_anything_is_left_for_them(power: float) -> None:
    rows = decaying(500, 120, power=power)
    basis = torch.linalg.svd(rows).Vh[:6].T
    one, other = (random_spaces(second_moment(some), basis.to(some)).normal for some in (rows, rows.float()))
    torch.testing.assert_close(one, other, rtol=0, atol=5e-6 * 6 / 120)


def test_normals_beside_what_is_no_basis_are_unknown() -> None:
    moment, basis = second_moment(decaying(500, 120)), orthonormal(120, 6, seed=2)
    assert bool(random_spaces(moment, basis, draws=30).normal.isfinite().all())
    assert bool(random_spaces(moment, 9 * basis, draws=30).normal.isnan().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_leading_shares_are_those_of_whole_decompositions(dtype: torch.dtype) -> None:
    # Falling, flat, and with two at the top that are nearly equal.
    several = [decaying(400, 300), normal(400, 300), decaying(400, 300)]
    several[2] = several[2] @ torch.diag(torch.cat([torch.ones(2, dtype=torch.float64) * 9, torch.ones(298)]))
    moments = torch.stack([second_moment(one) for one in several]).to(dtype)
    values = torch.linalg.eigvalsh(moments.double())
    shares = torch.tensor(find_leading(moments, 16).shares, dtype=torch.float64)
    torch.testing.assert_close(shares, values[:, -1] / values.sum(1), rtol=1e-7, atol=0)


@pytest.mark.parametrize("held", [1, 1 << 20])
def test_random_spaces_of_many_places_are_those_of_each(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(controls.DRAWN_ELEMENTS, "cpu", held)
    rows = [[decaying(300, 24, seed=at), normal(300, 24, seed=at)] for at in range(3)]
    moments = torch.stack([torch.stack([second_moment(one) for one in some]) for some in rows])
    # Ranks differ between bases of a place and between places, and not all are led.
    bases = [[orthonormal(24, rank, seed=at) for rank in ranks] for at, ranks in enumerate(([4, 4, 3], [4, 4], [3, 4]))]
    led = [[True, False, True], [True, False], [False, False]]
    every = random_spaces_beside(moments, bases, draws=30, keep=5, led=led)
    for here, spaces, mine, ahead in zip(moments, every, bases, led, strict=True):
        for moment, found in zip(here, spaces, strict=True):
            for basis, one, first in zip(mine, found, ahead, strict=True):
                alone = random_spaces(moment, basis, draws=30, keep=5)
                for name in ("haar", "normal"):
                    torch.testing.assert_close(getattr(one, name), getattr(alone, name), rtol=EXACT, atol=0)
                for name in ("normal_squares", "normal_bases"):
                    wanted = getattr(alone, name)
                    torch.testing.assert_close(
                        getattr(one, name), wanted if first else wanted[:0], rtol=1e-9, atol=1e-9
                    )


# Windows


def naive_energies(values: Tensor, gradients: Tensor, basis: Tensor, length: int, permutations: Tensor) -> list[float]:
    values, gradients = values - values.mean(0), gradients - gradients.mean(0)
    found = []
    for permutation in permutations:
        rows = torch.cat([torch.arange(length) + length * int(window) for window in permutation])
        gradient = gradients[rows].T @ values
        found.append(float((gradient @ basis).square().sum() / gradient.square().sum()))
    return found


@pytest.mark.parametrize("path", ["tables", "tokens"])
@pytest.mark.parametrize(("width", "count"), [(20, 33), (11, 34)])
def test_fast_permuted_energies_equal_the_naive_loop(
    path: str, width: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "tables":
        monkeypatch.setattr(windowed, "KEPT_TOKENS", 0)
        # Several columns at a time, not all.
        monkeypatch.setitem(turns.TABLE_ELEMENTS, "cpu", 33**2 * 20 * 3)
    values, basis = decaying(count * 6, 20) + 1, orthonormal(20, 4, seed=2)
    gradients = normal(count * 6, width, seed=3) + values[:, :width]
    pairing = pair_windows(values, gradients, windows_of(count, 6), draws=75, seed=4)
    naive = naive_energies(values, gradients, basis, 6, pairing.permutations.orders)
    if path == "tokens":
        squares, products = turns.squares_by_tokens(pairing.gradients, pairing.values, pairing.permutations)
        torch.testing.assert_close(squares, pairing.permuted_squares, rtol=EXACT, atol=0)
        own = turns.own_products(pairing.gradients, pairing.values)
        torch.testing.assert_close(products, own, rtol=EXACT, atol=EXACT * float(own.abs().max()))
        object.__setattr__(pairing, "permuted_squares", squares)
    np.testing.assert_allclose(pairing.permuted_energies(basis[None, None])[0, 0], naive, rtol=EXACT)


@pytest.mark.parametrize(("dim", "length"), [(20, 6), (300, 3)])
def test_pairings_side_by_side_are_those_of_each_alone(dim: int, length: int) -> None:
    # By turns, and by tokens; some tokens are left out, and bases have unequal numbers of directions.
    count = 34 * length
    values = torch.stack([decaying(count, dim, seed=seed) + seed for seed in range(3)])
    gradients = torch.stack([normal(count, dim, seed=9 + seed) for seed in range(3)]) + values / 2
    keep = torch.stack([torch.arange(count) % (5 + seed) != 0 for seed in range(3)])
    bases = [[orthonormal(dim, 4, seed=seed), orthonormal(dim, 3, seed=seed)] for seed in range(3)]
    together = pair_each(values, gradients, windows_of(34, length), keep=keep, draws=75)
    assert together._few_tokens == (dim == 300)
    seen = together.look_in(stack_bases(bases))
    for at, mine in enumerate(bases):
        alone = pair_windows(values[at], gradients[at], windows_of(34, length), keep=keep[at], draws=75)
        torch.testing.assert_close(together.moments[at], alone.moments[0], rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(together.products[at], alone.products[0], rtol=EXACT, atol=1e-15)
        for place, basis in enumerate(mine):
            one = alone.look_in(basis[None, None])
            for name in ("products", "permuted", "variance_shares"):
                torch.testing.assert_close(
                    getattr(seen, name)[at, place], getattr(one, name)[0, 0], rtol=EXACT, atol=1e-15
                )


def test_float32_windows_agree_with_float64() -> None:
    values, gradients, basis = decaying(40 * 8, 48), normal(40 * 8, 48, seed=3), orthonormal(48, 6, seed=2)
    exact = pair_windows(values, gradients, windows_of(40, 8))
    fast = pair_windows(values.float(), gradients.float(), windows_of(40, 8))
    torch.testing.assert_close(
        *(one.permuted_energies(basis[None, None]) for one in (exact, fast)), rtol=FAST_TOLERANCE, atol=0
    )
    by_tokens, products = turns.squares_by_tokens(fast.gradients, fast.values, fast.permutations)
    torch.testing.assert_close(by_tokens, fast.permuted_squares, rtol=FAST_TOLERANCE, atol=0)
    own = turns.own_products(exact.gradients, exact.values)
    torch.testing.assert_close(products, own, rtol=0, atol=FAST_TOLERANCE * float(own.sum()))


def test_windows_may_come_in_any_order_and_length() -> None:
    rows = torch.arange(10.0)[:, None]
    windows = torch.tensor([7, 3, 7, 3, 3, 7, 7, 5, 3, 7])
    stacked = stack_windows([torch.stack([rows, 10 * rows])], windows)[0][..., 0]
    wanted = torch.tensor([[1, 3, 4, 8, 0], [7, 0, 0, 0, 0], [0, 2, 5, 6, 9]]).float()
    assert torch.equal(stacked, torch.stack([wanted, 10 * wanted]))
    for windows in (torch.arange(10) // 5, torch.arange(10) % 2, -(torch.arange(10) // 5)):
        stacked = stack_windows([rows[None]], windows)[0][0, ..., 0]
        assert stacked.tolist() == [rows[windows == one, 0].tolist() for one in windows.unique()]


def test_tokens_that_are_not_kept_do_not_count() -> None:
    values, gradients = decaying(160, 12), normal(160, 12, seed=1)
    keep = torch.arange(160) % 5 != 0
    spoiled = torch.where(keep[:, None], values, 1e3)
    found, wanted = (
        pair_windows(one, gradients, windows_of(32, 5), keep=keep).gradient for one in (spoiled, values.clone())
    )
    torch.testing.assert_close(found, wanted)
    few = pair_windows(values[keep], gradients[keep], windows_of(32, 5)[keep]).gradient
    torch.testing.assert_close(found / found.norm(), few / few.norm())


def test_scale_does_not_matter() -> None:
    values, gradients = decaying(160, 12).float(), normal(160, 12, seed=1).float()
    proxy = fit_global(decaying(200, 12, seed=4).float(), rank=3)
    one = coupled_alignment(pair_windows(values, gradients, windows_of(32, 5)), proxy)
    other = coupled_alignment(pair_windows(values * 1e12, gradients * 1e-22, windows_of(32, 5)), proxy)
    assert other.energy.value == pytest.approx(one.energy.value, rel=FAST_TOLERANCE)
    assert other.gain == pytest.approx(one.gain, rel=FAST_TOLERANCE)


def test_few_windows_give_nan_with_a_note() -> None:
    pairing = pair_windows(decaying(80, 12), normal(80, 12), windows_of(16, 5))
    found = coupled_alignment(pairing, fit_global(decaying(80, 12, seed=1), rank=3))
    assert math.isnan(found.p)
    assert math.isnan(found.excess)
    assert math.isnan(found.gain)
    assert 0 < found.energy.value < 1
    assert "32" in (found.note or "")


def test_no_gradient_gives_nan_with_a_note() -> None:
    proxy = fit_global(decaying(80, 12), rank=3)
    for found in (
        uncoupled_alignment(torch.zeros(80, 12), proxy),
        coupled_alignment(pair_windows(decaying(160, 12), torch.zeros(160, 12), windows_of(32, 5)), proxy),
    ):
        assert math.isnan(found.energy.value)
        assert math.isnan(found.p)
        assert "zero" in (found.note or "")


def test_half_of_all_directions_have_no_normals() -> None:
    found = uncoupled_alignment(normal(80, 12), fit_global(decaying(80, 12), rank=8))
    assert math.isnan(found.normal_ratio)
    assert "normal" in (found.note or "")


def test_bad_requests_are_refused() -> None:
    proxy = fit_global(decaying(80, 12), rank=3)
    with pytest.raises(SpecError, match="does not depend"):
        uncoupled_alignment(normal(80, 12), proxy, controls=("haar", "permuted"))
    with pytest.raises(SpecError, match="controls are"):
        uncoupled_alignment(normal(80, 12), proxy, controls=("best",))
    with pytest.raises(SpecError, match="coordinates"):
        uncoupled_alignment(normal(80, 11), proxy)
    with pytest.raises(SpecError, match="one row"):
        pair_windows(normal(80, 12), normal(79, 12), windows_of(16, 5))
    with pytest.raises(StatesError):
        pair_windows(normal(80, 12), normal(80, 12) / 0, windows_of(16, 5))


def test_an_uncoupled_alignment_is_made_of_its_controls() -> None:
    rows = decaying(300, 24)
    proxy = fit_global(decaying(300, 24, seed=1), rank=4, last=True)
    found = uncoupled_alignment(rows, proxy, states=rows, untrained=fit_global(normal(300, 24), rank=4))
    energy = float((rows @ proxy.basis).square().sum() / rows.square().sum())
    assert found.energy.value == pytest.approx(energy, rel=1e-12)
    assert found.energy.low < energy < found.energy.high
    # Of controls with the same p, the one that gives most; that of the next directions has finer steps.
    hardest = max(found.controls[name].value for name in ("haar", "signs", "span"))
    assert found.controls["next"].p < 1 / 200
    assert found.control_value == hardest
    assert found.excess == pytest.approx(energy - hardest)
    assert found.gain == pytest.approx(energy * 6)
    assert found.p == found.normal_p == 1 / 200
    assert found.normal_ratio == pytest.approx(energy / ((1 - energy) * 4 / 20), rel=0.1)
    # Gradients that are the states themselves lie where states vary.
    assert found.variance_gain == pytest.approx(1, abs=0.02)
    assert set(found.controls) == {"haar", "normal", "next", "last", "untrained", "signs", "span"}


def test_split_halves_are_the_average_over_all_halvings() -> None:
    from itertools import combinations

    values, gradients, basis = decaying(6 * 5, 8), normal(30, 8, seed=3), orthonormal(8, 3, seed=2)
    gradients = gradients + 0.3 * values
    pairing = pair_windows(values, gradients, windows_of(6, 5))
    parts = (pairing.gradients.mT @ pairing.values)[0] @ basis
    crossed, noise = 0.0, 0.0
    for half in combinations(range(6), 3):
        one = parts[list(half)].sum(0)
        other = parts.sum(0) - one
        crossed += float((one * other).sum())
        noise += float((one - other).square().sum())
    found = signal_to_noise(pairing.look_in(basis[None, None]).products)
    assert float(found) == pytest.approx(crossed / noise, rel=1e-9)


# Statistics


def test_p_has_a_floor() -> None:
    assert permutation_p(2.0, torch.zeros(199)) == 1 / 200
    assert permutation_p(0.0, torch.zeros(20)) == 1
    assert math.isnan(permutation_p(math.nan, torch.zeros(20)))
    assert math.isnan(permutation_p(1.0, torch.zeros(0)))


def test_permutations_are_permutations_and_seeded() -> None:
    found = draw_permutations(100, 33, 4).orders
    assert bool((found.sort(1).values == torch.arange(33)).all())
    assert len(found.unique(dim=0)) == 100
    assert not bool((found == torch.arange(33)).all(1).any())
    assert torch.equal(found, draw_permutations(100, 33, 4).orders)
    assert not torch.equal(found, draw_permutations(100, 33, 5).orders)


def test_every_window_meets_every_other_equally_often() -> None:
    met = torch.zeros(5, 5)
    for seed in range(2000):
        met += torch.nn.functional.one_hot(draw_permutations(14, 5, seed).orders, 5).sum(0)
    # Three rings of five turns without the identity: 15 · 2000 / 5 meetings, less 2000 with themselves.
    wanted = torch.full((5, 5), 6000.0) - 2000 * torch.eye(5)
    assert float((met - wanted).abs().max()) < 5 * math.sqrt(6000)


def test_benjamini_hochberg_as_scipy_has_it() -> None:
    from scipy.stats import false_discovery_control

    p = np.random.default_rng(0).uniform(size=30) ** 2
    np.testing.assert_allclose(benjamini_hochberg(p.tolist()), false_discovery_control(p))


def test_a_ratio_of_sums_is_not_a_mean_of_ratios() -> None:
    found = ratio_of_sums(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 99.0]), seed=0)
    assert found.value == 0.01
    assert math.isnan(ratio_of_sums(torch.tensor([1.0]), torch.tensor([2.0]), seed=0).low)


def test_the_interval_over_documents_covers() -> None:
    covered = 0
    for seed in range(200):
        below = normal(60, seed=seed).square() + 0.5
        above = below * (0.3 + 0.1 * normal(60, seed=1000 + seed))
        found = ratio_of_sums(above, below, seed=seed, resamples=199)
        covered += found.low <= 0.3 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_the_jackknife_is_that_of_windows_left_out() -> None:
    parts, basis = normal(9, 5, 7), orthonormal(7, 3)
    inside, whole = ((one.flatten(1) @ one.flatten(1).T) for one in (parts @ basis, parts))
    found = jackknife_ratio(inside, whole)
    left = []
    for window in range(9):
        rest = parts.sum(0) - parts[window]
        left.append(float((rest @ basis).square().sum() / rest.square().sum()))
    error = math.sqrt(8 * np.var(left))
    assert found.high - found.value == pytest.approx(2.306004 * error, rel=1e-5)


def test_energies_add_up_by_document() -> None:
    rows, basis = normal(6, 4), orthonormal(4, 2)
    squares = row_squares(rows[None], basis[None, None])[0]
    above, below = sum_groups(squares, torch.tensor([5, 2, 5, 2, 2, 9])).T
    assert float(below[0]) == pytest.approx(float(rows[[1, 3, 4]].square().sum()))
    assert float(above[2]) == pytest.approx(float((rows[5] @ basis).square().sum()))


# Anisotropy of gradients


def test_anisotropy_shares_are_those_of_the_projected_moment() -> None:
    rows = decaying(600, 32)
    proxy = fit_global(decaying(600, 32, seed=1), rank=4)
    moment = second_moment(rows)
    found = anisotropy_share(moment, proxy, draws=30)
    spaces = random_spaces(moment, proxy.basis, draws=30, keep=30)

    def by_decomposition(basis: Tensor) -> tuple[float, float, float, float]:
        rest = torch.linalg.svd(basis).U[:, 4:]
        left = torch.linalg.eigvalsh(rest.T @ moment @ rest).flip(0)
        whole, axes = torch.linalg.eigh(moment)
        whole, axes = whole.flip(0), axes.flip(1)

        def star(spectrum: Tensor) -> float:
            spectrum = 0.75 * spectrum + 0.25 * spectrum.mean()
            return float((spectrum.sum() ** 2 / spectrum.square().sum() - 1) / (len(spectrum) - 1))

        share = float(whole[:4] @ (basis.T @ axes[:, :4]).square().sum(0) / whole[:4].sum())
        uneven = rest.T @ (moment - whole.mean() * torch.eye(32)) @ rest
        energy = 1 - float(uneven.square().sum() / (whole - whole.mean()).square().sum())
        drop = float(whole[0] / whole.sum() - left[0] / left.sum())
        return star(left) - star(whole), drop, share, energy

    removals = (found.isoscore_change, found.leading_drop, found.spectral_share, found.anisotropic_energy)
    for removal, tangent, following in zip(
        removals, by_decomposition(proxy.basis), by_decomposition(proxy.following), strict=True
    ):
        assert removal.tangent == pytest.approx(tangent, rel=1e-6)
        assert removal.following == pytest.approx(following, rel=1e-6)
    normals = np.array([by_decomposition(basis) for basis in spaces.normal_bases])
    for column, (removal, draws) in enumerate(zip(removals, (30, LED_DRAWS, LED_DRAWS, 30), strict=True)):
        assert removal.normal == pytest.approx(normals[:draws, column].mean(), rel=1e-6, abs=1e-9)
        assert removal.p == 1 / (draws + 1)


@pytest.mark.parametrize("left", [0.1, 1e-2, 1e-3, 1e-4, 2e-5])
def test_shares_are_known_where_nearly_all_of_a_gradient_lies_in_the_proxy(left: float) -> None:
    """From float32 gradients and bases: what is left is a small difference of large numbers."""
    dim, rank = 96, 8
    turn = torch.linalg.qr(torch.randn(2, dim, dim, generator=torch.Generator().manual_seed(0)).double()).Q
    inside, outside = torch.arange(1, rank + 1).double() ** -1.5, torch.arange(1, dim - rank + 1).double() ** -0.8
    values = torch.cat([inside * (1 - left) / inside.sum(), outside * left / outside.sum()])
    gradient = (turn[0] * values.sqrt() @ turn[1].T).float()
    basis = turn[1].float()
    proxy = Proxy(
        basis=basis[:, :rank],
        mean=torch.zeros(dim).double(),
        following=basis[:, rank : 2 * rank],
        last=basis[:, :0],
        explained=math.nan,
        method="pca",
        centred=True,
    )
    moment = second_moment(gradient)
    found = anisotropy_share(moment, proxy, draws=30)

    def star(spectrum: Tensor) -> float:
        spectrum = 0.75 * spectrum + 0.25 * spectrum.mean()
        return float((spectrum.sum() ** 2 / spectrum.square().sum() - 1) / (len(spectrum) - 1))

    rest = values[rank:]
    exact = star(rest) - star(values), float(values[0] - rest[0] / rest.sum())
    assert found.isoscore_change.tangent == pytest.approx(exact[0], abs=1e-4 if left > 1e-4 else 2e-3)
    assert found.leading_drop.tangent == pytest.approx(exact[1], abs=1e-4 if left > 1e-4 else 2e-3)
    assert found.note is None
    ((controls,),) = uncoupled_shares(moment[None], [[proxy]], [[found]], zeta=0.25, draws=30)
    assert controls["isoscore_change"]["haar"].p == 1 / 31


def test_what_float32_cannot_tell_of_the_rest_of_a_gradient_is_not_told() -> None:
    proxy = fit_global(decaying(600, 32, seed=1), rank=4)
    rows = normal(600, 4) @ proxy.basis.T + 1e-4 * normal(600, 32, seed=5)
    found = anisotropy_share(second_moment(rows), proxy, draws=30)
    assert math.isnan(found.isoscore_change.tangent)
    assert math.isnan(found.leading_drop.tangent)
    assert math.isnan(found.isoscore_change.p)
    assert found.anisotropic_energy.p == 1 / 31
    assert found.note == "less than 1e-05 of the gradients' energy is left without it"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_permuted_shares_equal_the_naive_loop(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(turns.TABLE_ELEMENTS, "cpu", 3 * 40 * 5 * 12 * 2)
    windows = windows_of(40, 5)
    places = [(decaying(200, 16, seed=seed), normal(200, 12, seed=seed + 1)) for seed in (2, 4)]
    states, gradients = (torch.stack(part).to(dtype) for part in zip(*places, strict=True))
    pairing = pair_each(states, gradients, windows, keep=torch.ones(2, 200, dtype=torch.bool), draws=30)
    # Ranks may differ: those of the second place are chosen by a rule.
    fitted = [[fit_global(decaying(300, 16, seed=7), rank=rank) for rank in ranks] for ranks in ((4, 2), (3, 4))]
    shares = [
        [anisotropy_share(moment, proxy, draws=5) for proxy in mine]
        for moment, mine in zip(pairing.moments, fitted, strict=True)
    ]
    found = permuted_shares(pairing, fitted, shares, zeta=0.25)
    orders = draw_permutations(30, 40, 0).orders
    for (h, a), mine, nulls, own in zip(places, fitted, found, shares, strict=True):
        h, a = (part - part.mean(0) for part in (h, a))
        for proxy, null, share in zip(mine, nulls, own, strict=True):
            met = (a.view(40, 5, 12)[order].reshape(200, 12) for order in orders)
            every = [anisotropy_share(second_moment(one.T @ h), proxy, draws=1) for one in met]
            for name in ("isoscore_change", "anisotropic_energy"):
                control, true = null[name]["permuted"], getattr(share, name).tangent
                draws = torch.tensor([getattr(one, name).tangent for one in every], dtype=torch.float64)
                tolerance = EXACT if dtype == torch.float64 else 1e-5
                assert control.draws.numpy() == pytest.approx(draws.numpy(), abs=tolerance)
                assert control.value == pytest.approx(float(draws.mean()), abs=tolerance)
                assert control.p == permutation_p(true, draws)


def test_few_windows_have_no_permuted_shares() -> None:
    pairing = pair_windows(decaying(60, 16), normal(60, 12), windows_of(20, 3))
    proxy = fit_global(decaying(60, 16, seed=1), rank=3)
    share = anisotropy_share(pairing.moments[0], proxy, draws=5)
    ((found,),) = permuted_shares(pairing, [[proxy]], [[share]], zeta=0.25)
    assert math.isnan(found["isoscore_change"]["permuted"].value)
    assert math.isnan(found["anisotropic_energy"]["permuted"].p)


def test_uncoupled_shares_are_those_of_turned_and_flipped_spaces() -> None:
    rows, fitted = decaying(200, 16, seed=3), [fit_global(decaying(300, 16, seed=7), rank=rank) for rank in (4, 2)]
    moment = second_moment(rows)
    shares = [anisotropy_share(moment, proxy, draws=5) for proxy in fitted]
    (found,) = uncoupled_shares(moment[None], [fitted], [shares], zeta=0.25, draws=30, seed=5)
    signs = controls.random_signs(30, 16, 5, moment.dtype, moment.device)
    for proxy, share, mine in zip(fitted, shares, found, strict=True):
        uniform = controls.uniform_spaces(30, proxy.rank, 16, 5, moment.dtype, moment.device)
        spaces = {"haar": [one.T for one in uniform], "signs": [one[:, None] * proxy.basis for one in signs]}
        assert set(mine["isoscore_change"]) == set(spaces)
        for name, bases in spaces.items():
            every = [anisotropy_share(moment, replace(proxy, basis=basis), draws=1) for basis in bases]
            for way in ("isoscore_change", "anisotropic_energy"):
                draws = torch.tensor([getattr(one, way).tangent for one in every], dtype=torch.float64)
                assert mine[way][name].draws.numpy() == pytest.approx(draws.numpy(), abs=EXACT)
                assert mine[way][name].p == permutation_p(getattr(share, way).tangent, draws)


def test_the_next_directions_are_searched_for_where_the_proxy_holds_nearly_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounding of what is projected out is then as large as what is left: unless symmetric, nothing settles."""
    states = decaying(900, 300, seed=2)
    states[:4] *= 6e2
    monkeypatch.setattr(leading, "_whole", lambda *_: pytest.fail("decomposed whole"))
    found = fit_global(states.float(), method="seminmf", rank=8)
    basis, around = found.basis.double(), states - states.mean(0)
    exact = torch.linalg.svd(around - (around @ basis) @ basis.T, full_matrices=False).Vh[:8].T
    assert float((exact.T @ found.following.double()).square().sum()) == pytest.approx(8, abs=1e-4)


def test_no_normal_space_gives_nan_with_a_note() -> None:
    found = anisotropy_share(second_moment(normal(80, 12)), fit_global(decaying(80, 12), rank=8))
    assert math.isnan(found.isoscore_change.difference)
    assert found.note


# Local proxies


def test_local_tangent_spaces_of_a_circle() -> None:
    angle = torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64)[:-1]
    circle = torch.stack([angle.cos(), angle.sin(), 0 * angle], 1)
    proxy = fit_proxy(circle, method="local_pca", rank=1, neighbors=9)
    assert isinstance(proxy, LocalProxy)
    at = 0.4 + angle[::37]
    points = torch.stack([at.cos(), at.sin(), 0 * at], 1)
    tangents = torch.stack([-at.sin(), at.cos(), 0 * at], 1)
    for part, bases in proxy.bases(points):
        cosines = (bases[:, :, 0] * tangents[part]).sum(1).abs()
        assert float(cosines.min()) > 0.9999
    with pytest.raises(SpecError):
        fit_local(circle, rank=1, neighbors=1)
    with pytest.raises(SpecError):
        fit_proxy([circle, circle], method="local_pca", rank=1)


def test_local_energies_equal_the_naive_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    states, gradients, windows = decaying(33 * 5, 12), normal(33 * 5, 12, seed=1), windows_of(33, 5)
    proxy = fit_local(decaying(300, 12, seed=2), rank=3, neighbors=20)
    found = local_alignment(states, gradients, windows, proxy, draws=7, seed=3)
    # Some tokens at a time give the same.
    monkeypatch.setattr(proxies, "HELD_ELEMENTS", 20 * 12 * 50)
    assert local_alignment(states, gradients, windows, proxy, draws=7, seed=3).energy == found.energy
    bases = torch.cat([some for _, some in proxy.bases(states)])
    torch.testing.assert_close(bases.mT @ bases, torch.eye(3, dtype=torch.float64).expand(165, 3, 3))
    for value, order in zip(
        [found.energy.value, *found.controls["permuted"].draws.tolist()],
        [torch.arange(33), *draw_permutations(7, 33, 3).orders],
        strict=True,
    ):
        rows = (order[:, None] * 5 + torch.arange(5)).flatten()
        inside = (gradients[rows][:, None] @ bases)[:, 0]
        assert value == pytest.approx(float(inside.square().sum() / gradients.square().sum()), rel=1e-10)


# Frequency


def zipf(types: int, tokens: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token types drawn by a Zipf law, and their log frequencies."""
    weights = 1 / torch.arange(1, types + 1, dtype=torch.float64)
    drawn = weights.multinomial(tokens, replacement=True, generator=torch.Generator().manual_seed(seed))
    return drawn, (weights / weights.sum()).log()[drawn]


def test_bins_have_equal_mass_and_whole_types() -> None:
    types, logs = zipf(2000, 20000)
    bins = bin_tokens(logs, types, bins=5)
    counts = bins.bincount(minlength=5)
    assert int(counts.max() - counts.min()) < 0.2 * 4000
    for one in (0, 3, 17):
        assert len(bins[types == one].unique()) == 1
    assert float(logs[bins == 0].max()) <= float(logs[bins == 1].min())
    by_types = bin_tokens(logs, types, bins=5, by="types")
    sizes = [len(types[by_types == one].unique()) for one in range(5)]
    assert max(sizes) - min(sizes) <= 1


def test_energy_that_grows_with_frequency_is_found_and_none_is_not() -> None:
    types, logs = zipf(400, 4000)
    basis = orthonormal(16, 4)
    level = (logs - logs.min()) / (logs.max() - logs.min())
    rows = normal(4000, 16, seed=1)
    growing = rows + 4 * level[:, None] * normal(4000, 4, seed=2) @ basis.T
    found = energy_by_frequency(growing, basis, logs, types, bins=6)
    energies = [one.energy.value for one in found.bins]
    assert energies == sorted(energies)
    assert found.spearman.p == found.linear.p == 1 / 1000
    assert found.linear.slope.low > 0
    assert len({one.tokens for one in found.bins}) == 1
    flat = energy_by_frequency(rows, basis, logs, types, bins=6)
    assert flat.spearman.r.low < 0 < flat.spearman.r.high
    assert all(abs(one.energy.value - 0.25) < 0.05 for one in flat.bins)
    # A type that fills a bin has no others to be resampled with.
    assert math.isnan(flat.bins[-1].energy.low) == (flat.bins[-1].types == 1)
    falling = energy_by_frequency(growing, basis, -logs, types, bins=6)
    assert falling.spearman.p == 1
    assert falling.spearman.p_two_sided == 1 / 1000


def test_spearman_as_scipy_has_it() -> None:
    from scipy.stats import spearmanr

    x, y = normal(50).round(decimals=1), normal(50, seed=1).round(decimals=1)
    found = permutation_correlation(ranks(x), ranks(y), seed=0).r.value
    assert found == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    assert math.isnan(permutation_correlation(x, torch.ones(50).double(), seed=0).p)


def test_correlations_equal_a_naive_bootstrap() -> None:
    x, y = normal(40) + 7, normal(40, seed=1)
    y = y + 0.5 * x
    found = permutation_correlation(x, y, seed=3, resamples=400)
    assert found.r.value == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-12)
    assert found.slope.value == pytest.approx(np.polyfit(x, y, 1)[0], abs=1e-12)
    chance = np.random.default_rng(0)
    drawn = [chance.integers(40, size=40) for _ in range(4000)]
    low, high = np.quantile([np.polyfit(x[index], y[index], 1)[0] for index in drawn], [0.025, 0.975])
    assert found.slope.low == pytest.approx(low, abs=0.1)
    assert found.slope.high == pytest.approx(high, abs=0.1)
    # The same whatever is held at one time, but for the draws.
    null = [np.corrcoef(chance.permutation(x), y)[0, 1] for _ in range(4000)]
    weak = permutation_correlation(x, normal(40, seed=2), seed=3, resamples=4000)
    assert weak.p == pytest.approx(np.mean(np.array(null) >= weak.r.value), abs=0.05)


def test_several_correlations_are_those_of_each() -> None:
    x, y = normal(60).round(decimals=1), normal(60, 4, seed=1)
    y[:, 1], y[7, 2] = 3.0, math.nan
    for ranked in (False, True):
        found = permutation_correlations(x, y, ranked=ranked, seed=2, resamples=199)
        for one, column in zip(found, y.T, strict=True):
            known = column.isfinite()
            pair = (x[known], column[known])
            alone = permutation_correlation(*(map(ranks, pair) if ranked else pair), seed=2, resamples=199)
            for name in ("p", "p_two_sided", "types"):
                assert getattr(one, name) == pytest.approx(getattr(alone, name), nan_ok=True)
            for name in ("r", "slope"):
                for end in ("value", "low", "high"):
                    wanted = getattr(getattr(alone, name), end)
                    assert getattr(getattr(one, name), end) == pytest.approx(wanted, abs=1e-12, nan_ok=True)
    assert math.isnan(found[1].r.value)
    assert found[2].types == 59


def test_turns_of_rings_are_permutations_of_types() -> None:
    x, y = normal(17), normal(17, seed=1)
    found = permutation_correlation(x, y, seed=5, resamples=50)
    orders = draw_permutations(50, 17, 5).orders
    draws = torch.tensor([np.corrcoef(x[order], y)[0, 1] for order in orders])
    assert found.p == permutation_p(found.r.value, draws)
    assert found.p_two_sided == permutation_p(abs(found.r.value), draws.abs())


def test_frequencies_permuted_over_types_keep_the_nominal_rate() -> None:
    flagged = 0
    for seed in range(200):
        # Occurrences of a type share a level of their own: tokens are not independent, types are.
        types, logs = zipf(60, 400, seed=seed)
        own = 2 * normal(60, 1, seed=seed + 1000).abs()[types]
        rows = normal(400, 8, seed=seed + 2000) + own * normal(400, 2, seed=seed + 3000) @ orthonormal(8, 2).T
        found = energy_by_frequency(rows, orthonormal(8, 2), logs, types, seed=seed, bins=2, resamples=99)
        flagged += found.spearman.p <= 0.05
    assert flagged <= 20


# Pinning


def test_dispersion_and_distance_are_unbiased() -> None:
    spread, far, dim = 0.5, 3.0, 40
    centres = far * torch.nn.functional.normalize(normal(300, dim), dim=1)
    centres = centres - centres.mean(0)
    types = torch.arange(300).repeat_interleave(12)
    states = centres[types] + spread * normal(3600, dim, seed=1)
    for occurrences in (3, 12):
        found = pin_types(states, types, occurrences=occurrences)
        # √(m/(m-1)) is exact for squares: the mean norm lies below their root by about 1/4d.
        assert float(found.dispersion.mean()) == pytest.approx(spread * math.sqrt(dim), rel=0.02)
        wanted = torch.linalg.vector_norm(centres, dim=1)
        assert float((found.distance / wanted).mean()) == pytest.approx(1, abs=0.02)


def test_pinning_goes_with_frequency_where_it_does() -> None:
    types, logs = zipf(60, 6000)
    radius = (-0.5 * logs).exp() / 10
    states = 5 * normal(60, 20)[types] + radius[:, None] * normal(6000, 20, seed=1)
    found = pin_types(states, types)
    weights = 1 / torch.arange(1, 61, dtype=torch.float64)
    trend = log_trend((weights / weights.sum()).log()[found.types], found.dispersion)
    assert trend.r.value < -0.95
    assert trend.slope.value == pytest.approx(-0.5, abs=0.05)
    assert trend.p_two_sided == 1 / 1000
    assert "fewer than 8" in (found.note or "")


def test_types_at_the_centroid_have_no_distance() -> None:
    types = torch.arange(50).repeat_interleave(8)
    found = pin_types(normal(400, 10), types)
    # Without debiasing each would read √(10/8).
    assert 10 < int(found.distance.isnan().sum()) < 45
    assert "noise" in (found.note or "")


def test_trajectories() -> None:
    there = torch.tensor([[[0.0, 0.0], [1.0, 1.0]], [[3.0, 4.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]]])
    found = follow_centroids(there)
    assert found.length.tolist() == [10, 0]
    assert found.variance.tolist() == pytest.approx([25 * 2 / 3 / 2, 0])
    with pytest.raises(SpecError):
        follow_centroids(there[:1])


# Dynamics


def test_principal_angles() -> None:
    angles = torch.tensor([0.0, 1e-9, 0.3, 1.5], dtype=torch.float64)
    turn = orthonormal(12, 12)
    one = turn[:, :4]
    other = one * angles.cos() + turn[:, 4:8] * angles.sin()
    found = turn_between(one, other @ orthonormal(4, 4, seed=8))
    torch.testing.assert_close(found.angles, angles, atol=1e-12, rtol=1e-6)
    assert found.grassmann == pytest.approx(float(angles.norm()))
    assert found.chordal == pytest.approx(float(angles.sin().norm()))
    assert found.overlap == pytest.approx(float(angles.cos().square().mean()))
    assert turn_between(one, one[:, :2]).grassmann < 1e-12


def test_updates_of_rows() -> None:
    proxy = fit_global(decaying(300, 24), rank=4)
    updates = 0.1 * normal(200, 24) + normal(200, 4, seed=1) @ proxy.basis.T
    updates[:50] = 0
    updates[50] = 100 * proxy.following[:, 0]
    logs = torch.linspace(-9, -1, 200).double()
    found = update_alignment(updates, proxy, log_frequency=logs, bins=3)
    assert found.rows == 150
    assert found.alignment.energy.value < 0.1
    assert found.unweighted > 0.8
    moved = updates[50:]
    shares = (moved @ proxy.basis).square().sum(1) / moved.square().sum(1)
    assert found.unweighted == pytest.approx(float(shares.mean()), rel=1e-10)
    assert found.by_frequency is not None
    assert [one.types for one in found.by_frequency.bins] == [50, 50, 50]
    assert found.by_frequency.bins[2].energy.value == pytest.approx(
        float((moved[100:] @ proxy.basis).square().sum() / moved[100:].square().sum()), rel=1e-10
    )


def test_normal_spaces_exist_where_they_are_half_of_all_directions() -> None:
    generator = torch.Generator().manual_seed(6)
    states = torch.randn(1024, 32, generator=generator)
    basis = fit_global(states, rank=16).basis
    moment = second_moment(torch.randn(300, 32, generator=generator))
    spaces = random_spaces(moment, basis, draws=199, seed=3)
    # There is one normal space of rank 16, and it has what the basis has not.
    torch.testing.assert_close(
        spaces.normal, torch.full((199,), 1 - energy_of(moment, basis)).double(), rtol=1e-4, atol=0
    )
