"""Finding, ordering, choosing and verifying checkpoints: names, folders, and a hub of our own."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hub import Hub
from hypothesis import given
from hypothesis import strategies as st

from anisoscope.checkpoints import choose, find_checkpoints, inspect_all, read_list
from anisoscope.errors import CheckpointError, ModelError, SpecError
from anisoscope.integrity import verify
from anisoscope.records import Checkpoint, WeightFile
from anisoscope.revisions import place_in_training, place_of, training_order
from anisoscope.sources import hash_weights, locate


@pytest.mark.parametrize(
    ("name", "stage", "step", "tokens"),
    [
        ("step3000", None, 3000, None),
        ("step0", None, 0, None),
        ("global_step1000", None, 1000, None),
        ("step-001000-2BT", None, 1000, 2 * 10**9),
        ("step1000-tokens4B", None, 1000, 4 * 10**9),
        ("stage1-step140000-tokens294B", "stage1", 140000, 294 * 10**9),
        ("stage2-ingredient3-step1000-tokens5B", "stage2-ingredient3", 1000, 5 * 10**9),
        ("stage3-step-4720000", "stage3", 4720000, None),
        ("lc-4k-to-32k-step-20000", "lc-4k-to-32k", 20000, None),
        ("checkpoint-500", None, 500, None),
        ("20k", None, 20000, None),
        ("0k", None, 0, None),
        ("240k-503b", None, 240000, 503 * 10**9),
        ("50K-105b", None, 50000, 105 * 10**9),
        ("955k-token-2T", None, 955000, 2 * 10**12),
        ("1195k-token-2.5T", None, 1195000, 2500 * 10**9),
        # Counted, annealed or named otherwise: no step is guessed.
        ("ckpt_007", None, None, None),
        ("main", None, None, None),
        ("last-10k", None, None, None),
        ("it-SFT", None, None, None),
        ("", None, None, None),
    ],
)
def test_a_name_tells_stage_step_and_tokens_and_nothing_is_guessed(
    name: str, stage: str | None, step: int | None, tokens: int | None
) -> None:
    place = place_of(name)
    assert (place.stage, place.step, place.tokens) == (stage, step, tokens)


def test_tokens_come_from_the_name_the_family_or_the_user() -> None:
    assert place_in_training("EleutherAI/pythia-160m", "step1000").tokens == 1000 * 2_097_152
    assert place_in_training("allenai/OLMo-7B", "step1000-tokens4B").tokens == 4 * 10**9
    assert place_in_training("EleutherAI/pythia-160m", "step0").tokens == 0
    assert place_in_training("somebody/else", "step0").tokens == 0
    assert place_in_training("somebody/else", "stage2-step0").tokens is None
    assert place_in_training("somebody/else", "step1000").tokens is None
    assert place_in_training("somebody/else", "step1000", tokens_per_step=512).tokens == 512_000
    # What the name states counts more than what steps would come to.
    assert place_in_training("a/b", "step1000-tokens4B", tokens_per_step=512).tokens == 4 * 10**9


def test_early_branches_without_a_stage_belong_to_the_first() -> None:
    assert place_in_training("allenai/OLMo-2-1124-7B", "step150-tokens1B").stage == "stage1"
    assert place_in_training("allenai/OLMo-7B", "step150-tokens1B").stage is None


def order(*names: str) -> list[str]:
    return sorted(names, key=lambda name: training_order(place_of(name).stage, place_of(name).step, name))


def test_order_is_numeric_and_stage_comes_before_step() -> None:
    assert order("step1000", "step9", "step90", "step0") == ["step0", "step9", "step90", "step1000"]
    assert order(
        "stage2-ingredient1-step1", "stage1-step900", "stage10-step1", "lc-step3", "stage2-ingredient1-step0"
    ) == [
        "stage1-step900",
        "stage2-ingredient1-step0",
        "stage2-ingredient1-step1",
        "stage10-step1",
        "lc-step3",
    ]
    assert order("ckpt_100", "ckpt_99", "ckpt_9") == ["ckpt_9", "ckpt_99", "ckpt_100"]


@given(st.lists(st.integers(0, 10**7), unique=True, min_size=1))
def test_any_steps_come_in_their_order(steps: list[int]) -> None:
    assert [place_of(name).step for name in order(*(f"step{step}" for step in steps))] == sorted(steps)


def make_folder(root: Path, name: str, contents: dict[str, bytes]) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    for file, data in contents.items():
        (folder / file).write_bytes(data)
    return folder


def make_run(root: Path, steps: tuple[int, ...] = (0, 5, 10, 100)) -> Path:
    for step in steps:
        make_folder(
            root,
            f"checkpoint-{step}",
            {
                "config.json": b"{}",
                "tokenizer.json": b"{}",
                "model.safetensors": b"weights of %d" % step,
                "optimizer.pt": b"x" * 1000,
                "trainer_state.json": json.dumps({"global_step": step, "num_input_tokens_seen": step * 64}).encode(),
            },
        )
    return root


def test_the_checkpoints_of_a_folder_are_found_in_order_with_what_the_trainer_noted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "out")
    (run / "runs").mkdir()
    found = find_checkpoints(str(run))
    assert [item.revision for item in found] == ["checkpoint-0", "checkpoint-5", "checkpoint-10", "checkpoint-100"]
    assert [item.step for item in found] == [0, 5, 10, 100]
    assert [item.tokens for item in found] == [0, 320, 640, 6400]
    assert [item.step for item in find_checkpoints(str(run), revisions="checkpoint-1*")] == [10, 100]
    with pytest.raises(CheckpointError, match="no revision that matches 'epoch"):
        find_checkpoints(str(run), revisions="epoch*")
    (tmp_path / "empty" / "a").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="states a step"):
        find_checkpoints(str(tmp_path / "empty"))


def test_a_family_of_folders_is_one_run(tmp_path: Path) -> None:
    for step in (20, 3):
        make_folder(tmp_path, f"bert-step_{step}k", {"config.json": b"{}"})
    found = find_checkpoints(f"{tmp_path}/bert-step_*k")
    assert [(item.revision, item.step) for item in found] == [("3", 3), ("20", 20)]
    assert locate(found[1].model, found[1].revision).path == tmp_path / "bert-step_20k"
    with pytest.raises(SpecError, match="one \\*"):
        find_checkpoints("a-*-b-*")


def test_a_revision_of_a_folder_is_its_subfolder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "out")
    assert hash_weights(str(run), revision="checkpoint-5") == hash_weights(str(run / "checkpoint-5"))
    with pytest.raises(ModelError, match="no subfolder checkpoint-7"):
        locate(str(run), "checkpoint-7")
    with pytest.raises(ModelError, match="if they are checkpoints, sweep it or name one of them"):
        hash_weights(str(run))


def test_a_list_names_checkpoints_in_its_own_order(tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    file.write_text("# two runs\nstep20\nother/model@step3 tokens=6.3B\n\nstep1 step=7 # odd\n")
    found = read_list(file, "some/model")
    assert [(item.model, item.revision, item.step, item.tokens) for item in found] == [
        ("some/model", "step20", 20, None),
        ("other/model", "step3", 3, 6_300_000_000),
        ("some/model", "step1", 7, None),
    ]
    file.write_text("step1 epoch=3")
    with pytest.raises(SpecError, match="line 1"):
        read_list(file, "some/model")
    file.write_text("# nothing\n")
    with pytest.raises(SpecError, match="names no checkpoint"):
        read_list(file)


def series_of(*steps: int | None, stage: str | None = None) -> list[Checkpoint]:
    return [Checkpoint(model="m", revision=f"step{step}", step=step, stage=stage) for step in steps]


PYTHIA = (0, *(2**k for k in range(10)), *range(1000, 144000, 1000))


def test_log_spacing_keeps_both_ends_and_spreads_in_log_step() -> None:
    chosen = [item.step or 0 for item in choose(series_of(*PYTHIA), log_spaced=12)]
    assert len(chosen) == len(set(chosen)) == 12
    assert chosen[0] == 0
    assert chosen[-1] == 143000
    assert chosen == sorted(chosen)
    # An even spacing of 154 checkpoints would have one below 1,000; log spacing has about as many as above.
    assert 5 <= sum(step < 1000 for step in chosen) <= 9
    assert choose(series_of(1, 2, 3), log_spaced=9) == series_of(1, 2, 3)


def test_every_nth_keeps_the_last() -> None:
    assert [item.step for item in choose(series_of(*range(8)), every=3)] == [0, 3, 6, 7]
    with pytest.raises(SpecError, match="exclude each other"):
        choose(series_of(1), every=2, log_spaced=2)
    with pytest.raises(SpecError, match="from 2 on"):
        choose(series_of(1), log_spaced=1)


def with_files(step: int, *hashes: str, model: str = "m", names: tuple[str, ...] = ("config.json",)) -> Checkpoint:
    count = len(hashes)
    weights = [
        WeightFile(
            name=f"model-{k:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors", size=9, sha256=h
        )
        for k, h in enumerate(hashes, start=1)
    ]
    small = [WeightFile(name=name, size=2) for name in names]
    return Checkpoint(model=model, revision=f"step{step}", step=step, files=(*weights, *small))


def test_a_clean_series_has_no_findings() -> None:
    assert verify([with_files(0, "a"), with_files(1, "b"), with_files(2, "c")]).findings == ()


def test_two_steps_with_the_same_weights_are_both_suspicious() -> None:
    found = verify([with_files(0, "a"), with_files(1, "b"), with_files(2, "b"), with_files(3, "c")])
    assert [item.suspect is not None for item in found.checkpoints] == [False, True, True, False]
    assert "same weights as step2" in (found.checkpoints[1].suspect or "")
    with pytest.raises(CheckpointError, match="2 of 4 checkpoints are not what their names say"):
        found.check()


def test_weights_of_the_end_belong_to_the_end() -> None:
    found = verify([with_files(0, "z"), with_files(1, "b"), with_files(9, "z")])
    assert [item.suspect is not None for item in found.checkpoints] == [True, False, False]
    assert found.checkpoints[0].suspect == "it has the weights of the end of the run (step9)"


def test_the_end_of_the_run_counts_even_when_it_is_not_measured() -> None:
    series = [with_files(0, "z"), with_files(1, "b")]
    assert verify(series).findings == ()
    main = replace(with_files(9, "z"), revision="main")
    assert "end of the run (main)" in verify(series, ends=[with_files(9, "y"), main]).findings[0]
    # The last step and `main` may be one and the same.
    assert verify([*series[1:], with_files(9, "z")], ends=[with_files(9, "z"), main]).findings == ()


def test_a_shard_of_another_step_is_found() -> None:
    found = verify([with_files(1, "a", "b"), with_files(2, "c", "b"), with_files(3, "e", "f")])
    assert found.checkpoints[0].suspect == "1 of its 2 weight files are those of step2"
    assert found.checkpoints[2].suspect is None


def test_missing_files_are_found() -> None:
    whole = with_files(1, "a", "b", "c", names=("config.json", "tokenizer.json"))
    cut = with_files(2, "d", "e", "f", names=("config.json",))
    cut = replace(cut, files=cut.files[1:])
    none = Checkpoint(model="m", revision="step3", step=3, files=(WeightFile(name="config.json", size=2),))
    found = verify([whole, cut, with_files(4, "g", "h", "i", names=("config.json", "tokenizer.json"))])
    assert "1 of 3 shards are missing (model-00001-of-00003.safetensors)" in (found.checkpoints[1].suspect or "")
    assert "tokenizer.json is missing" in (found.checkpoints[1].suspect or "")
    assert verify([whole, none]).checkpoints[1].suspect == "it has no weight files"
    assert "config.json is missing" in verify([with_files(1, "a", names=())]).findings[0]


def test_a_folder_is_read_and_its_label_compared_with_the_trainers_notes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "out")
    found = inspect_all(find_checkpoints(str(run)))
    assert found.findings == ()
    # Optimizer states are not what a model is.
    assert "optimizer.pt" not in {file.name for file in found.checkpoints[0].files}
    shutil.copy(run / "checkpoint-5" / "model.safetensors", run / "checkpoint-10" / "model.safetensors")
    (run / "checkpoint-0").rename(run / "checkpoint-77")
    found = inspect_all(find_checkpoints(str(run)))
    assert len(found.findings) == 3
    assert "its name says step 77, its trainer_state.json 0" in found.findings[2]


def in_subprocess(code: str, environment: dict[str, str]) -> Any:
    """What a program prints as JSON, with the hub of our own in its environment."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json\n{code}"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def files_for(text: str) -> dict[str, bytes]:
    return {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": text.encode()}


def test_branches_and_tags_of_a_hub_are_listed_and_verified_without_a_download(tmp_path: Path) -> None:
    with Hub(tmp_path / "hub") as hub:
        commits = {
            name: hub.add("lab/m", name, files_for(name), kind=kind)
            for name, kind in (("step10", "branch"), ("step9", "tag"), ("step100", "branch"), ("notes", "branch"))
        }
        hub.add("lab/m", "step0", files_for("step100"))
        hub.add("lab/m", "main", files_for("step100"))
        code = """
from dataclasses import asdict
from anisoscope.checkpoints import find_checkpoints, inspect_all, choose
series = find_checkpoints("lab/m")
found = inspect_all(choose(series, every=3), series=series)
print(json.dumps([[asdict(item) for item in series], [asdict(item) for item in found.checkpoints], found.findings]))
"""
        series, looked, findings = in_subprocess(code, hub.environment(tmp_path / "home"))
        assert [item["revision"] for item in series] == ["step0", "step9", "step10", "step100"]
        assert [item["commit"] for item in series[1:]] == [commits[name] for name in ("step9", "step10", "step100")]
        assert [item["revision"] for item in looked] == ["step0", "step100"]
        assert looked[0]["files"][0]["sha256"] is None
        assert len(findings) == 1
        assert "lab/m@step0: it has the weights of the end of the run" in findings[0]
        assert not hub.downloads("*")


def test_a_family_of_repositories_is_one_run(tmp_path: Path) -> None:
    with Hub(tmp_path / "hub") as hub:
        for step in (20, 3):
            hub.add(f"lab/bert-seed_0-step_{step}k", "main", files_for(f"{step}"))
        hub.add("lab/bert-seed_1-step_3k", "main", files_for("other"))
        code = """
from dataclasses import asdict
from anisoscope.checkpoints import find_checkpoints, inspect_all
found = inspect_all(find_checkpoints("lab/bert-seed_0-step_*k"))
print(json.dumps([[asdict(item) for item in found.checkpoints], found.findings]))
"""
        found, findings = in_subprocess(code, hub.environment(tmp_path / "home"))
        assert [(item["revision"], item["step"]) for item in found] == [("3", 3), ("20", 20)]
        assert all(item["commit"] for item in found)
        assert findings == []


def test_a_hub_that_refuses_is_named_in_one_sentence(tmp_path: Path) -> None:
    with Hub(tmp_path / "hub") as hub:
        hub.add("lab/m", "step1", files_for("1"))
        # Busy twice, then well: asked again, nobody notices.
        hub.refuse("api/models/lab/m/refs*", 503, times=2)
        code = """
from anisoscope import hub
hub.PAUSES = (0.01, 0.01)
from anisoscope.checkpoints import find_checkpoints
from anisoscope.errors import ModelError
said = []
for name in ("lab/m", "lab/nothing", "not a name"):
    try:
        said.append([item.revision for item in find_checkpoints(name)])
    except ModelError as error:
        said.append(str(error))
print(json.dumps(said))
"""
        said = in_subprocess(code, hub.environment(tmp_path / "home"))
        assert said[0] == ["step1"]
        assert "no local folder and no hub model" in said[1]
        assert "neither a folder" in said[2]
