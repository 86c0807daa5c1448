"""Pinning as rows: planted types, a real decoder, and types that move over checkpoints."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import anisoscope as an
from anisoscope.corpora import load_corpus
from anisoscope.layout import select_sites
from anisoscope.metrics import all_metrics
from anisoscope.metrics.pinning import Pinned, usable
from anisoscope.models import Model, load_model
from anisoscope.pinning import attach_centroids, follow, pinning_attachments, pinning_rows, rows_of_types
from anisoscope.probed import Probed, ProbeRow
from anisoscope.probes import draw_probe
from anisoscope.records import Site
from anisoscope.tangent.pinning import log_trend, pin_types

FAMILY = ("type_dispersion", "centroid_distance", "trajectory_variance")
SITE = Site(name="block.1", depth=1.0)
TYPES, EACH, DIM = 60, 12, 24


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def zipf(types: Tensor) -> Tensor:
    """Type v is the (v + 1)th most frequent."""
    return -(types.double() + 1).log()


def planted(dispersion: float, distance: float, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """States of types whose spread is f^dispersion and whose centroid lies f^distance away."""
    types = torch.arange(TYPES).repeat_interleave(EACH)
    frequency = zipf(types).exp()[:, None]
    away = normal(TYPES, DIM, seed=seed)
    away = away / away.norm(dim=1, keepdim=True) * 30
    noise = normal(TYPES * EACH, DIM, seed=seed + 1)
    return away[types] * frequency**distance + noise * frequency**dispersion, types


def rows_for(states: Tensor, types: Tensor) -> dict[tuple[str, str | None], ProbeRow]:
    metrics = [all_metrics()[name] for name in FAMILY]
    rows = rows_of_types(states, types, zipf, metrics, site=SITE, population="content", seed=0)
    return {(row.metric.name, row.columns.get("variant")): row for row in rows}


def test_types_that_frequency_pins_are_found() -> None:
    found = rows_for(*planted(-0.4, 0.0))
    spread = found["type_dispersion", None]
    # Eight occurrences in 24 dimensions leave little noise in the length.
    assert spread.answer.value < -0.95
    assert spread.columns["p"] == pytest.approx(1 / 1000)
    assert spread.columns["low"] <= spread.answer.value <= spread.columns["high"] < -0.9
    assert spread.answer.points == TYPES
    assert spread.answer.null == 0
    assert abs(found["centroid_distance", None].answer.value) < 0.4


def test_distance_and_dispersion_are_told_apart() -> None:
    found = rows_for(*planted(0.0, -0.2))
    assert found["centroid_distance", None].answer.value < -0.9
    assert abs(found["type_dispersion", None].answer.value) < 0.3
    assert found["type_dispersion", None].columns["p"] > 0.01


def test_means_are_lengths_and_scale_with_the_states() -> None:
    states, types = planted(0.0, 0.0)
    found, doubled = rows_for(states, types), rows_for(2 * states, types)
    spread = found["type_dispersion", "of=mean"]
    # ‖z‖ of 24 normal numbers, and centroids on a sphere of 30.
    assert spread.answer.value == pytest.approx(math.sqrt(24), rel=0.03)
    assert found["centroid_distance", "of=mean"].answer.value == pytest.approx(30, rel=0.03)
    assert doubled["type_dispersion", "of=mean"].answer.value == pytest.approx(2 * spread.answer.value, rel=1e-6)
    assert math.isnan(spread.answer.null)
    for name in ("type_dispersion", "centroid_distance"):
        assert doubled[name, None].answer.value == pytest.approx(found[name, None].answer.value, abs=1e-6)


def test_the_metric_is_the_correlation_that_is_tested() -> None:
    x, y = normal(50), normal(50, seed=1).exp()
    y[3], y[4] = math.nan, 0.0
    view = Pinned(log_frequency=x, quantity=y)
    value = float(all_metrics()["type_dispersion"](view))
    assert value == pytest.approx(log_trend(x, y).r.value, abs=1e-12)
    assert len(usable(view)[0]) == 48
    assert value == pytest.approx(np.corrcoef(torch.stack(usable(view)).numpy())[0, 1])


def test_states_that_are_their_types_have_no_dispersion_and_say_so() -> None:
    """As at embeddings without positions."""
    types = torch.arange(TYPES).repeat_interleave(EACH)
    row = rows_for(normal(TYPES, DIM)[types], types)["type_dispersion", None]
    assert math.isnan(row.answer.value)
    assert row.answer.note is not None
    assert "their occurrences do not differ" in row.answer.note


def test_types_that_occur_too_rarely_give_no_number() -> None:
    found = rows_for(normal(40, DIM), torch.arange(40) % 10)
    for name in FAMILY:
        answer = found[name, None].answer
        assert math.isnan(answer.value)
        assert answer.note
    assert "0 points, and it needs 3" in str(found["type_dispersion", None].answer.note)


# Over checkpoints


def moving(exponent: float) -> list[dict[str, np.ndarray]]:
    """Six checkpoints through which a type takes random steps of f^exponent."""
    states, types = planted(0.0, 0.0)
    pace = zipf(torch.arange(TYPES)).exp()[:, None] ** exponent
    place, found = torch.zeros(TYPES, DIM, dtype=torch.float64), []
    for number in range(6):
        place = place + 3 * pace * normal(TYPES, DIM, seed=50 + number)
        found.append(attach_centroids(pin_types(states + place[types], types), zipf, SITE))
    return found


def test_types_that_move_less_the_more_frequent_they_are_are_found() -> None:
    rows = {row.columns.get("variant"): row for row in follow(moving(-0.3), sites=[SITE])}
    assert rows.keys() == {None, "of=mean", "of=length"}
    for variant in (None, "of=length"):
        assert rows[variant].answer.value < -0.8
        assert rows[variant].columns["p"] == pytest.approx(1 / 1000)
        assert rows[variant].answer.points == TYPES
    assert rows[None].site == SITE
    assert "6 checkpoints" in str(rows[None].answer.note)
    steady = next(iter(follow(moving(0.0))))
    assert steady.columns["p"] > 0.001
    assert steady.site == Site(name="block.1")


def test_half_precision_and_missing_types_do_not_matter_to_trajectories() -> None:
    whole = moving(-0.3)
    assert whole[0]["centroids//block.1.centroids"].dtype == np.float16
    value = next(iter(follow(whole))).answer.value
    part = [
        {name: (one[2:] if number == 3 else one) for name, one in arrays.items()} for number, arrays in enumerate(whole)
    ]
    row = next(iter(follow(part)))
    assert row.answer.points == TYPES - 2
    assert row.answer.value == pytest.approx(value, abs=0.1)
    # A site that a checkpoint has not is not followed; one checkpoint has no trajectory.
    assert not list(follow([*whole, {}]))
    assert not list(follow(whole[:1]))
    states, types = planted(0.0, 0.0)
    large = attach_centroids(pin_types(1e4 * states, types), zipf, SITE)
    assert large["centroids//block.1.centroids"].dtype == np.float32


# A real model


@pytest.fixture(scope="module")
def decoder() -> Model:
    return load_model("pocket-decoder", device="cpu")


def probed_for(model: Model, **changes: Any) -> Probed:
    given = {"model": "pocket-decoder", "tokens": 8192, "seq_len": 128, "sites": ("block.0", "block.5")}
    spec = an.Spec(**{**given, **changes})
    probe = draw_probe(spec, model.tokenizer, load_corpus("pydoc"))
    return Probed(model=model, probe=probe, sites=tuple(select_sites(model.layout, list(spec.sites))), spec=spec)


def test_a_decoder_has_its_rows_and_keeps_centroids(decoder: Model) -> None:
    probed = probed_for(decoder)
    rows = list(pinning_rows(probed, FAMILY))
    seen = {(row.site.name, row.population, row.metric.name, row.columns.get("variant")) for row in rows}
    assert len(seen) == len(rows) == 2 * (2 * 2 * 2 + 1)
    assert {row.population for row in rows if row.metric.name == "trajectory_variance"} == {"content"}
    for row in rows:
        missing = row.metric.name == "trajectory_variance"
        assert math.isnan(row.answer.value) == missing
        if missing:
            assert "two checkpoints" in str(row.answer.note)
    tokens = probed.fit_tokens(torch.device("cpu"))
    content = probed.members("content", probed.fit_states[probed.sites[0]], tokens)
    counts = torch.unique(tokens.ids[content], return_counts=True)[1]
    assert rows[0].answer.points == int((counts >= 8).sum())
    kept = pinning_attachments(probed)
    assert kept["centroids//block.5.centroids"].shape == (len(kept["centroids//block.5.types"]), 112)
    # The same tokens in another checkpoint have the same types.
    other = load_model("pocket-decoder@256", device="cpu")
    before = pinning_attachments(probed_for(other))
    assert (before["centroids//block.5.types"] == kept["centroids//block.5.types"]).all()
    moved = [row for row in follow([before, kept]) if row.columns.get("variant") is None]
    assert len(moved) == 2
    assert all(-1 <= row.answer.value <= 1 for row in moved)
    assert not probed.__dict__.get("gradients"), "no backward pass is needed"


def test_only_what_was_asked_for_is_there(decoder: Model) -> None:
    probed = probed_for(decoder, sites=("block.0",), populations=("all",))
    rows = list(pinning_rows(probed, ["centroid_distance", "leading_variance"]))
    assert {(row.metric.name, row.population) for row in rows} == {("centroid_distance", "all")}
    assert not list(pinning_rows(probed, ["leading_variance"]))
