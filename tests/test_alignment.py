"""Alignment through the walk: rows, their columns, and the numbers against plain sums."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import anisoscope as an
from anisoscope.corpora import load_corpus
from anisoscope.errors import SpecError
from anisoscope.gauge import seed_for
from anisoscope.gradients import capture_gradients
from anisoscope.models import Model, load_model
from anisoscope.probes import draw_probe
from anisoscope.records import Record, Site

FAMILY = ("tangent_energy", "tangent_gain", "tangent_excess", "normal_ratio", "gradient_leading_variance")
SITE = Site(name="block.2", depth=0.5)


def spec_for(**changes: Any) -> an.Spec:
    given = {"model": "pocket-decoder", "tokens": 64 * 32, "seq_len": 32, "rank": 8, "sites": ("block.2",)}
    return an.Spec(**{"metrics": ("alignment",), **given, **changes})


@pytest.fixture(scope="module")
def decoder() -> Model:
    return load_model("pocket-decoder", device="cpu")


@pytest.fixture(scope="module")
def unit(decoder: Model) -> an.Unit:
    return an.measure(spec_for(), model=decoder, progress=False)


def rows(unit: an.Unit, **wanted: Any) -> list[Record]:
    return [row for row in unit.records if all(getattr(row, name) == value for name, value in wanted.items())]


def one(unit: an.Unit, **wanted: Any) -> Record:
    (found,) = rows(unit, **wanted)
    return found


def test_every_gradient_proxy_population_and_variant_has_its_rows(unit: an.Unit) -> None:
    assert {row.metric for row in unit.records} == set(FAMILY)
    for name, known in (
        ("gradient", {"virtual", "activation"}),
        ("proxy", {"pca", "seminmf"}),
        ("population", {"all", "typical"}),
        ("variant", {"mean=in", "mean=out"}),
    ):
        assert {getattr(row, name) for row in unit.records} == known
    assert len(unit.records) == len(FAMILY) * 2**4
    for row in unit.records:
        assert row.points + row.excluded == 32 * 32
        assert not math.isnan(row.value), row
    for row in rows(unit, metric="tangent_excess"):
        assert row.p is not None
        assert 1 / 200 <= row.p <= 1
        energy = one(
            unit,
            metric="tangent_energy",
            **{n: getattr(row, n) for n in ("gradient", "proxy", "population", "variant")},
        )
        assert row.control_value is not None
        assert row.value == pytest.approx(energy.value - row.control_value, abs=1e-9)
        assert energy.low is not None
        assert energy.high is not None
        assert energy.low < energy.high
    assert {row.control for row in rows(unit, metric="tangent_excess", gradient="virtual")} == {"permuted"}
    assert {row.control for row in rows(unit, metric="tangent_excess", gradient="activation")} <= {
        "haar",
        "signs",
        "next",
    }
    assert {row.control for row in rows(unit, metric="normal_ratio")} == {"normal"}


def test_energies_are_those_of_plain_sums(unit: an.Unit, decoder: Model) -> None:
    spec = spec_for()
    probe = draw_probe(spec, decoder.tokenizer, load_corpus("pydoc"))
    assert not set(np.unique(probe.fit.documents)) & set(np.unique(probe.test.documents))
    seeds = [seed_for(0, window, 2) for window in range(32)]
    test = capture_gradients(decoder, probe.test, [SITE], seeds=seeds).sites[SITE]
    fit = capture_gradients(decoder, probe.fit, [SITE]).sites[SITE].values.double()
    basis = torch.linalg.svd(fit - fit.mean(0), full_matrices=False).Vh[:8].T
    states, gradients = test.values.double(), test.gradients.double()
    energy = (gradients @ basis).square().sum() / gradients.square().sum()
    chosen = {"proxy": "pca", "population": "all", "variant": "mean=in"}
    assert one(unit, metric="tangent_energy", gradient="activation", **chosen).value == pytest.approx(
        float(energy), rel=1e-4
    )
    virtual = (gradients - gradients.mean(0)).T @ (states - states.mean(0))
    energy = (virtual @ basis).square().sum() / virtual.square().sum()
    assert one(unit, metric="tangent_energy", gradient="virtual", **chosen).value == pytest.approx(
        float(energy), rel=1e-4
    )
    leading = torch.linalg.svdvals(gradients).square()
    share = one(unit, metric="gradient_leading_variance", gradient="activation", **chosen)
    assert share.value == pytest.approx(float(leading[0] / leading.sum()), rel=1e-4)


def test_a_trained_decoder_is_enriched_over_permuted_windows(unit: an.Unit) -> None:
    found = one(unit, metric="tangent_excess", gradient="virtual", proxy="pca", population="all", variant="mean=in")
    assert found.value > 0
    assert found.p == pytest.approx(1 / 200)


def test_too_few_windows_have_no_permuted_null(decoder: Model) -> None:
    few = an.measure(spec_for(tokens=31 * 32, gradients=("virtual",)), model=decoder, progress=False)
    for row in rows(few, metric="tangent_excess"):
        assert math.isnan(row.value)
        assert row.note is not None
        assert "a permuted null needs at least 32" in row.note
    assert all(row.value > 0 for row in rows(few, metric="tangent_energy"))


def test_what_cannot_be_asked_is_refused(decoder: Model) -> None:
    with pytest.raises(SpecError, match="gradients are virtual and activation"):
        an.measure(spec_for(gradients=("weight",)), model=decoder, progress=False)
    with pytest.raises(SpecError, match="a tangent proxy is one of"):
        an.measure(spec_for(proxy="ica"), model=decoder, progress=False)
    with pytest.raises(SpecError, match="needs a model, not a matrix"):
        an.estimate(np.eye(4), ["tangent_excess"])


def test_alignment_comes_with_other_metrics_and_an_encoder_has_it_too() -> None:
    encoder = load_model("pocket-encoder", device="cpu")
    spec = spec_for(
        model="pocket-encoder", metrics=("alignment", "mean_cosine"), gradients=("virtual",), batch_points=512
    )
    found = an.measure(replace(spec, populations=("all",)), model=encoder, progress=False)
    assert {row.metric for row in found.records} == {*FAMILY, "mean_cosine"}
    assert {row.population for row in found.records} == {"all"}
    assert one(found, metric="tangent_energy", proxy="pca", variant="mean=in").value > 8 / 112
