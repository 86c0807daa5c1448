"""`anisoscope train`: a training, what was measured meanwhile, and what the folder is good for afterwards."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anisoscope.checkpoints import find_checkpoints
from anisoscope.cli import app
from anisoscope.store import Store

TINY = [
    *("--layers", "2", "--width", "32", "--heads", "2", "--vocabulary", "400", "--seq-len", "32", "--batch-size", "4"),
    *(
        "--steps",
        "12",
        "--warmup",
        "2",
        "--checkpoints",
        "4",
        "--device",
        "cpu",
        "--watch-steps",
        "5",
        "--budget",
        "inf",
    ),
]


def call(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny-seed0"
    # The achieved exponent of so few steps is off by chance: the run is void, and says so by its exit code.
    part = call("train", "--corpus", corpus_file, *TINY, "--max-seconds", "0.01", "-o", folder)
    assert part.exit_code == 3, part.stderr
    assert "not finished: the same command goes on from here" in part.stdout
    whole = call("train", "--corpus", corpus_file, *TINY, "--json", "-o", folder)
    assert whole.exit_code in (0, 3), whole.stderr
    told = json.loads(whole.stdout)
    assert told["finished"]
    assert told["step"] == 12
    return folder


def test_a_training_is_resumed_and_its_checkpoints_are_found(run: Path) -> None:
    assert [item.step for item in find_checkpoints(str(run))] == [0, 1, 3, 12]
    again = call("train", "--corpus", Path(json.loads((run / "recipe.json").read_text())["corpus"]), *TINY, "-o", run)
    assert "step 12 of 12" in again.stdout
    other = call("train", "--corpus", "pydoc", *TINY, "-o", run)
    assert other.exit_code == 2
    assert "give the same recipe or another folder" in other.stderr


def test_geometry_was_measured_meanwhile_on_held_out_text(run: Path) -> None:
    table = Store(run).table()
    assert {0, 1, 12} <= set(table["step"].to_pylist())
    assert set(table["run"].to_pylist()) == {"tiny-seed0"}
    assert all(name.startswith("heldout:") for name in table["corpus"].to_pylist())
    tokens = {row["step"]: row["tokens"] for row in table.to_pylist()}
    assert tokens[0] == 0
    assert tokens[12] == 12 * 4 * 32
    verdicts = json.loads(call("claims", run, "--json").stdout)
    assert {one["subject"] for one in verdicts} >= {"tiny-seed0"}


def test_nothing_is_watched_where_that_is_asked_for(tmp_path: Path, corpus_file: Path) -> None:
    done = call("train", "--corpus", corpus_file, *TINY, "--watch", "none", "--kind", "encoder", "-o", tmp_path / "e")
    assert done.exit_code in (0, 3), done.stderr
    assert "encoder (bert, 2 x 32), step 12 of 12" in done.stdout
    assert Store(tmp_path / "e").keys() == set()


def test_wrong_requests_are_usage_errors(tmp_path: Path, corpus_file: Path) -> None:
    for words, says in (
        (["--regularize", "leading_variance"], "METRIC=WEIGHT"),
        (["--regularize", "twonn=1"], "twonn"),
        (["--kind", "mixer"], "decoder or encoder"),
        (["--watch", "everything"], "everything"),
        (["--stop-if", "twonn[block.0 > 3"], "twonn"),
        (["--learning-rate", "-1"], "--learning-rate"),
        (["--width", "0"], "--width"),
        (["--seed", "-1"], "--seed"),
        (["--corpus", ""], "--corpus"),
        (["--watch-steps", "0"], "--watch-steps"),
        (["--max-seconds", "-1"], "--max-seconds"),
    ):
        done = call("train", "--corpus", corpus_file, *TINY, *words, "-o", tmp_path / "never")
        assert done.exit_code == 2, (words, done.stderr, done.stdout)
        assert says in done.stderr
        assert not list(tmp_path.iterdir()), words
    done = call("train", "--corpus", corpus_file, *TINY, "--watch", "none", "-o", tmp_path / "never")
    assert done.exit_code in (0, 3), done.stderr
