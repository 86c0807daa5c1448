"""The models inside the package: found by name, as their card says, and what the demo makes of them."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import anisoscope as an
from anisoscope.checkpoints import find_checkpoints
from anisoscope.cli import app
from anisoscope.errors import ModelError
from anisoscope.models import load_model
from anisoscope.sources import POCKET, POCKET_SUITE, hash_weights, locate, split_pocket
from anisoscope.store import Store

STEPS = [0, 16, 64, 256, 1024, 4096]

each_model = pytest.mark.parametrize("name", POCKET_SUITE)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@each_model
def test_checkpoints_are_found_by_name(name: str) -> None:
    found = find_checkpoints(name)
    assert [item.step for item in found] == STEPS
    assert [item.tokens for item in found] == [16384 * step for step in STEPS]
    assert split_pocket(f"{name}@256", None) == (name, "step256")
    assert split_pocket(name, None) == (name, "step4096")
    assert locate(name, "16").path == locate(f"{name}@step16").path == POCKET / name / "step16"
    assert len({hash_weights(name, revision=f"step{step}") for step in STEPS}) == len(STEPS)
    with pytest.raises(ModelError, match=r"has no checkpoint 17; it has step0, step16"):
        locate(f"{name}@17")


def test_all_of_it_is_small_and_described() -> None:
    assert sum(path.stat().st_size for path in POCKET.rglob("*") if path.is_file()) <= 30e6
    card = (POCKET / "README.md").read_text()
    for name in POCKET_SUITE:
        assert f"## {name}" in card
    weights = [path for path in POCKET.rglob("*") if path.suffix in (".safetensors", ".bin", ".pt")]
    assert len(weights) == 2 * (len(STEPS) - 1)


@each_model
def test_step_0_is_its_seed_and_no_file(name: str) -> None:
    before = torch.get_rng_state()
    one, two = (load_model(name, revision="step0", device="cpu").module.state_dict() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    trained = load_model(name, device="cpu").module.state_dict()
    assert one.keys() == two.keys() == trained.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert any(not torch.allclose(one[key], trained[key], atol=0.1) for key in one)


@each_model
def test_they_have_learned(name: str) -> None:
    spec = {"corpus": "pydoc", "tokens": 4096, "seq_len": 256, "batch_points": 1024, "metrics": ("loss",)}
    losses = [
        an.measure(an.Spec(model=f"{name}@{step}", **spec), device="cpu", progress=False).records[0].value
        for step in (0, 256, 4096)
    ]
    # Of 2,048 entries, unlearned: log 2048 = 7.62.
    assert losses[0] == pytest.approx(7.62, abs=0.1)
    assert losses[0] - 1.5 > losses[1] > losses[2] + 0.5


def test_a_step_is_picked_on_the_command_line(tmp_path: Path) -> None:
    words = ["measure", "pocket-decoder@64", "--tokens", "2048", "--seq-len", "256", "--batch-points", "512"]
    done = CliRunner().invoke(app, [*words, "--metrics", "mean_cosine", "--json"])
    assert done.exit_code == 0, done.stderr
    row = json.loads(done.stdout)[0]
    assert (row["model"], row["revision"], row["step"], row["tokens"]) == ("pocket-decoder", "step64", 64, 1048576)
    assert CliRunner().invoke(app, ["measure", "pocket-decoder@65"]).exit_code == 1


def test_the_demo_shows_profiles_dynamics_stages_and_verdicts(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["demo", "-o", str(tmp_path / "demo"), "--tokens", "2048"])
    assert done.exit_code == 0, done.stderr
    assert len(Store(tmp_path / "demo").keys()) == 2 * len(STEPS) + 2 * 3
    assert "Gradients in the tangent proxy" in done.output
    assert (tmp_path / "demo" / "report.html").stat().st_size > 100_000
    for name in POCKET_SUITE:
        assert f"{name} @ step4096" in done.stdout
        assert f"{name}: means over blocks as training goes on" in done.stdout
    for shown in ("Through the final norm", "twonn[types]", "Inconclusive with so few models and seeds"):
        assert shown in done.stdout
