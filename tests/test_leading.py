"""Leading eigenvalues and eigenvectors, several matrices side by side, against whole decompositions in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from anisoscope.kernels import leading
from anisoscope.kernels.leading import leading_axes, leading_values, leading_without


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(d: int, r: int, *, seed: int = 0) -> Tensor:
    return torch.linalg.qr(normal(d, r, seed=seed)).Q


def moment(points: Tensor) -> Tensor:
    return points.T @ points / points.square().sum()


D = 300
PLACES = torch.arange(1, D + 1, dtype=torch.float64)
SPECTRA = {
    "flat": torch.ones(D),
    "slow": PLACES**-0.5,
    "fast": 1 / PLACES,
    "exponential": torch.exp(-PLACES / 10),
    "one sink": torch.cat([torch.tensor([300.0]), PLACES[:-1] ** -0.5]),
    "few axes": (PLACES <= 20).double(),
    "pairs": PLACES.div(2, rounding_mode="floor").add(1) ** -0.5,
}


@pytest.fixture(scope="module")
def matrices() -> Tensor:
    """One for each spectrum, as covariances of as many points as make them differ from it."""
    turn = orthonormal(D, D, seed=9)
    return torch.stack([moment(normal(900, D, seed=7) * spectrum @ turn) for spectrum in SPECTRA.values()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spare", [8, 24])
def test_axes_are_those_of_a_whole_decomposition(matrices: Tensor, dtype: torch.dtype, spare: int) -> None:
    values, axes = leading_axes(matrices.to(dtype), 16, spare=spare)
    assert values.shape == (len(matrices), 16 + spare)
    assert axes.dtype == dtype
    axes = axes.double()
    torch.testing.assert_close(
        axes.mT @ axes, torch.eye(16 + spare).double().expand(len(axes), -1, -1), atol=1e-6, rtol=0
    )
    rounding = {torch.float64: 1e-13, torch.float32: 2e-7}[dtype]
    for name, matrix, found, vectors in zip(SPECTRA, matrices, values, axes, strict=True):
        exact, whole = torch.linalg.eigh(matrix)
        exact, whole = exact.flip(0), whole.flip(1)
        np.testing.assert_allclose(found[:16], exact[:16], rtol=1e-6, atol=rounding * float(exact[0]), err_msg=name)
        # Eigenvectors are only as well told apart as their eigenvalues: the span up to the widest gap near the end.
        gaps = (exact[8:16] - exact[9:17]) / exact[8:16]
        kept = 9 + int(gaps.argmax())
        assert float((whole[:, :kept].T @ vectors[:, :kept]).square().sum()) == pytest.approx(kept, abs=1e-3), name


@pytest.mark.parametrize("dim", [104, 112, 256, 300])
def test_narrow_matrices_are_searched_beside_a_gpu(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a CPU decomposes them whole; also what is left without a basis, and nothing at all."""
    for limit in (leading.WHOLE_DIM, leading.WHOLE_RATIO):
        monkeypatch.setitem(limit, "cpu", limit["cuda"])
    turn, spectra = orthonormal(dim, dim, seed=9), [spectrum[:dim] for spectrum in SPECTRA.values()]
    full = torch.stack([moment(normal(900, dim, seed=7) * spectrum @ turn) for spectrum in spectra])
    rest = torch.eye(dim).double() - turn[:, :16] @ turn[:, :16].T
    several = torch.cat([full, rest @ full @ rest, torch.zeros(1, dim, dim)]).float()
    monkeypatch.setattr(leading, "_whole", None)
    values, axes = leading_axes(several, 16)
    exact = torch.linalg.eigvalsh(several.double()).flip(1).clamp_min(0)
    torch.testing.assert_close(values[:, :16], exact[:, :16], rtol=1e-6, atol=1e-9)
    found = axes.double()
    torch.testing.assert_close(found.mT @ found, torch.eye(24).double().expand(len(axes), 24, 24), atol=1e-6, rtol=0)
    held = (found[:, :, :16].mT @ several.double() @ found[:, :, :16]).diagonal(dim1=1, dim2=2).sum(1)
    torch.testing.assert_close(held, exact[:, :16].sum(1), rtol=1e-6, atol=1e-9)


def test_matrices_that_do_not_settle_are_decomposed_whole(matrices: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "LOOKS", 1)
    values, axes = leading_axes(matrices, 16, settled=0.0)
    exact, whole = (one.flip(-1) for one in torch.linalg.eigh(matrices))
    torch.testing.assert_close(values, exact[:, :24], atol=1e-14, rtol=1e-10)
    torch.testing.assert_close(axes.abs(), whole[:, :, :24].abs(), atol=1e-10, rtol=0)


@pytest.mark.parametrize("factor", [1.0, 30.0, 100.0])
def test_a_few_axes_far_above_the_others_do_not_make_the_search_longer(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sink tokens make them: filters that may not let these outgrow the others hardly move the others."""
    looks, ritz = [], leading._ritz
    monkeypatch.setattr(leading, "_ritz", lambda *given: (looks.append(1), ritz(*given))[1])
    spectrum = torch.cat([torch.tensor([10 * factor, 3 * factor]), PLACES[:-2] ** -0.5])
    matrix = moment(normal(900, D, seed=7) * spectrum @ orthonormal(D, D, seed=9))
    values, _ = leading_axes(matrix.float()[None], 16)
    exact = torch.linalg.eigvalsh(matrix.float().double()).flip(0)
    np.testing.assert_allclose(values[0, :16], exact[:16], rtol=1e-6)
    assert len(looks) <= 3


def test_zeros_have_axes_too() -> None:
    values, axes = leading_axes(torch.zeros(2, D, D), 16)
    assert float(values.abs().max()) == 0
    torch.testing.assert_close(axes.mT @ axes, torch.eye(24).expand(2, 24, 24), atol=1e-5, rtol=0)


def test_zeros_beside_others_change_nothing(matrices: Tensor) -> None:
    among = torch.cat([matrices[:3], torch.zeros(1, D, D).double(), matrices[3:]])
    values, axes = leading_axes(among, 16)
    assert float(values[3].abs().max()) == 0
    torch.testing.assert_close(axes.mT @ axes, torch.eye(24).double().expand(len(axes), 24, 24), atol=1e-9, rtol=0)
    alone = leading_axes(matrices, 16)[0]
    torch.testing.assert_close(values[[0, 1, 2, *range(4, len(values))], :16], alone[:, :16], atol=1e-13, rtol=1e-6)


def without(matrix: Tensor, basis: Tensor) -> float:
    rest = torch.eye(len(matrix), dtype=torch.float64) - basis @ basis.T
    return float(torch.linalg.eigvalsh(rest @ matrix @ rest)[-1])


@pytest.mark.parametrize("near", ["nothing", "the first", "the last"])
@pytest.mark.parametrize("held", [1, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_leading_values_without_a_subspace(
    matrices: Tensor, near: str, held: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(leading.HELD_ELEMENTS, "cpu", held)
    own = torch.linalg.eigh(matrices)[1].flip(2)[:, :, :8]
    drawn = torch.stack([orthonormal(D, 8, seed=seed) for seed in range(3)]).expand(len(matrices), 3, D, 8)
    # The leading axes are the hard ones, random spaces end sooner; nothing is taken out by zeros.
    bases = torch.cat([own[:, None], drawn, torch.zeros(len(matrices), 1, D, 8)], 1)
    # Where a search starts makes it shorter or longer, and changes nothing: not even at the wrong end.
    start = {"nothing": None, "the first": own.sum(2), "the last": torch.linalg.eigh(matrices)[1][:, :, 0]}[near]
    found = leading_without(matrices.to(dtype), bases.to(dtype), near=start)
    close = {torch.float64: 1e-8, torch.float32: 1e-6}[dtype]
    for name, matrix, mine, values in zip(SPECTRA, matrices, bases, found, strict=True):
        exact = torch.tensor([without(matrix, basis) for basis in mine], dtype=torch.float64)
        # What is below the rounding of λ₁ counts as nothing: in float32 all that a sink leaves.
        seen = exact > 64 * torch.finfo(dtype).eps * exact[-1]
        assert bool(seen.all()) or (name, dtype) == ("one sink", torch.float32)
        np.testing.assert_allclose(values[seen], exact[seen], rtol=close, err_msg=name)
        assert float(values[~seen].sum()) <= 1e-5 * float(exact[-1])


def test_what_is_left_beside_one_dominating_direction_is_found_in_float32() -> None:
    axes = orthonormal(112, 112, seed=5)
    spectrum = torch.cat([torch.ones(1), 1e-4 / torch.arange(1, 112)]).double()
    matrix = (axes * (spectrum / spectrum.sum())) @ axes.T
    bases = torch.stack([axes[:, :1], axes[:, 5:6]])
    found = leading_without(matrix.float()[None], bases.float()[None])[0]
    exact = torch.tensor([without(matrix, basis) for basis in bases], dtype=torch.float64)
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("dim", [40, 300])
def test_leading_values_of_many(dim: int) -> None:
    several = torch.stack([moment(normal(500, dim, seed=seed) / PLACES[:dim]) for seed in range(4)])
    exact = torch.linalg.eigvalsh(several)[:, -1]
    torch.testing.assert_close(leading_values(several.float()), exact, rtol=1e-5, atol=0)
    assert float(leading_values(torch.zeros(1, dim, dim))) == 0
