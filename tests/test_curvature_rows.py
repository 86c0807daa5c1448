"""Curvature as rows: surfaces that are known, clouds that are none, and a real decoder."""

import math
import time

import numpy as np
import pytest
import torch
from torch import Tensor

import anisoscope as an
from anisoscope.corpora import load_corpus
from anisoscope.curvature import ANCHORS, FLIPS, _reading, curvature_rows, rows_of_surface
from anisoscope.layout import select_sites
from anisoscope.metrics import all_metrics
from anisoscope.models import load_model
from anisoscope.probed import Probed, ProbeRow
from anisoscope.probes import draw_probe
from anisoscope.records import Site
from anisoscope.tangent.curvature import Bounded, Curvature

FAMILY = ("curvature_visibility", "second_fundamental_form", "frequency_attenuation")
EXPONENTS = ("0", "0.25", "0.5", "0.75", "1")
SITE = Site(name="block.1", depth=1.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def embed(surface: Tensor, dim: int, *, noise: float) -> Tensor:
    axes = torch.linalg.qr(normal(dim, dim, seed=1)).Q[: surface.shape[1]]
    return surface @ axes + noise * normal(len(surface), dim, seed=2)


def paraboloid(u: Tensor, size: float) -> Tensor:
    """Three normal directions whose second fundamental forms have this norm together."""
    second = normal(3, u.shape[1], u.shape[1], seed=7)
    second = second + second.mT
    second = size * second / second.norm()
    return torch.cat([u, torch.einsum("ni,aij,nj->na", u, second, u) / 2], 1)


def rows_for(
    cloud: Tensor, types: Tensor, frequencies: Tensor, *, rank: int = 2, names: tuple[str, ...] = FAMILY
) -> dict[tuple[str, str | None], ProbeRow]:
    metrics = [all_metrics()[name] for name in names]
    rows = list(rows_of_surface(cloud, types, frequencies, metrics, site=SITE, population="content", rank=rank, seed=0))
    found = {(row.metric.name, row.columns["variant"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def zipf(types: Tensor) -> Tensor:
    return 1.0 / (1 + types).double()


def test_a_paraboloid_has_its_curvature_in_every_draw() -> None:
    """Types lie anywhere on it, so how they are drawn changes nothing."""
    size, spread, types = 3.0, 0.1, torch.arange(6000) % 100
    cloud = embed(paraboloid(spread * normal(6000, 2), size), 10, noise=1e-5)
    found = rows_for(cloud, types, zipf(types))
    assert found.keys() == {
        *((name, f"exponent={exponent}") for name in FAMILY[:2] for exponent in EXPONENTS),
        ("frequency_attenuation", None),
        ("frequency_attenuation", "drawn"),
    }
    for exponent in EXPONENTS:
        form = found["second_fundamental_form", f"exponent={exponent}"]
        assert form.answer.value == pytest.approx(size, rel=0.15)
        assert form.columns["low"] < form.answer.value < form.columns["high"]
        assert form.columns["rank"] == 2
        assert form.answer.points == 1500
        seen = found["curvature_visibility", f"exponent={exponent}"]
        assert seen.columns["p"] == pytest.approx(1 / (1 + FLIPS))
        # Neighbourhoods are parts of the patch, which shows t² ‖II‖² / 2r as a whole.
        assert 0 < seen.answer.value < spread**2 * size**2 / 4
        assert seen.answer.null == 0
    whole = found["frequency_attenuation", None]
    assert whole.answer.null == 1
    assert whole.columns["low"] < 1 < whole.columns["high"]
    assert whole.answer.value != found["frequency_attenuation", "drawn"].answer.value


def test_types_that_frequency_pins_attenuate_as_the_closed_form_says() -> None:
    """Each type is a patch of its own radius; a neighbourhood's radius goes with it."""
    count, each = 24, 500
    types = torch.arange(count).repeat_interleave(each)
    frequencies = zipf(types)
    radii = 0.02 * frequencies**-0.3
    cloud = embed(paraboloid(radii[:, None] * normal(count * each, 2), 4.0), 8, noise=1e-5)
    cloud = cloud + 100 * normal(count, 8, seed=99)[types]
    row = rows_for(cloud, types, frequencies, names=("frequency_attenuation",))["frequency_attenuation", None]
    f, t = zipf(torch.arange(count)).numpy(), 0.02 * zipf(torch.arange(count)).numpy() ** -0.3
    wanted = ((f * t**4).sum() / (f * t**2).sum()) / ((t**4).sum() / (t**2).sum())
    assert wanted < 0.8
    assert row.answer.value == pytest.approx(float(wanted), rel=0.15)
    assert row.columns["high"] < 1


def test_a_flat_cloud_has_no_curvature_and_nothing_to_attenuate() -> None:
    types = torch.arange(4000) % 80
    found = rows_for(embed(normal(4000, 2), 12, noise=0.02), types, zipf(types))
    for exponent in EXPONENTS:
        seen = found["curvature_visibility", f"exponent={exponent}"]
        assert abs(seen.answer.value) < 0.01
        assert seen.columns["low"] < 0.005
    for variant in (None, "drawn"):
        row = found["frequency_attenuation", variant]
        assert math.isnan(row.answer.value)
        assert row.answer.note == "cannot tell: no curvature was found in the draw that is uniform over types"


def test_a_cloud_of_many_dimensions_cannot_be_told_and_says_why() -> None:
    types = torch.arange(2400) % 80
    found = rows_for(normal(2400, 20), types, zipf(types))
    for row in found.values():
        assert math.isnan(row.answer.value)
        assert "cannot tell: the points read" in str(row.answer.note)
        assert "more than 4" in str(row.answer.note)


def test_more_curvature_than_tangent_is_read_with_a_warning() -> None:
    def note_of(value: float) -> str | None:
        seen = Curvature(curvature_visibility=Bounded(value=value, low=value, high=value), points=100, p=0.01)
        place = {"site": SITE, "population": "content", "dim": 8, "rank": 2}
        return _reading(all_metrics()["curvature_visibility"], seen, "exponent=1", place).answer.note

    assert "no surface of this rank" in str(note_of(1.2))
    assert note_of(0.2) is None


def test_equal_points_are_dropped_and_no_points_are_no_error() -> None:
    types = torch.arange(3200) % 100
    found = rows_for(normal(100, 6)[types], types, zipf(types), names=("curvature_visibility",))
    row = found["curvature_visibility", "exponent=0"]
    assert row.answer.dropped + row.answer.points == 800
    assert row.answer.points <= 100
    nothing = rows_for(normal(0, 6), torch.arange(0), torch.ones(0))
    assert all(row.answer.note and "no points" in row.answer.note for row in nothing.values())


def test_a_decoder_has_its_rows_in_about_two_seconds_a_site() -> None:
    model = load_model("pocket-decoder", device="cpu")
    spec = an.Spec(model="pocket-decoder", tokens=16384, seq_len=256, sites=("block.3",))
    probe = draw_probe(spec, model.tokenizer, load_corpus("pydoc"))
    sites = tuple(select_sites(model.layout, list(spec.sites)))
    probed = Probed(model=model, probe=probe, sites=sites, spec=spec)
    assert probed.fit_states[sites[0]].shape == (8192, 112)
    assert len(probe.log_frequency)
    start = time.process_time()
    rows = list(curvature_rows(probed, FAMILY))
    # Twice what is promised: the processor may be shared.
    assert time.process_time() - start < 4
    assert len(rows) == 2 * len(EXPONENTS) + 2
    assert {row.population for row in rows} == {"content"}
    assert {row.columns["rank"] for row in rows} == {4}
    for row in rows:
        assert row.answer.points + row.answer.dropped == (8192 - 32) // 4
        told = np.isfinite(row.answer.value)
        assert told == np.isfinite(row.columns["low"])
        assert told or "cannot tell" in str(row.answer.note)
    assert ANCHORS >= 64
    assert "gradients" not in probed.__dict__, "no backward pass is needed"
    assert not list(curvature_rows(probed, ["leading_variance"]))
