"""Models that cannot be read or loaded: one sentence that names what is wrong, and the exit code of a failure."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import anisoscope as an
from anisoscope.cli import app
from anisoscope.errors import ModelError, SpecError
from anisoscope.sources import locate

SMALL = ["--tokens", "256", "--seq-len", "32", "--batch-points", "64", "--metrics", "mean_cosine"]


def unreadable(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    # Opens, and fails when it is read: for root as well.
    (folder / "model.safetensors").symlink_to("/proc/self/mem")


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 900)


def emptied(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 0)


def config_is_a_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def config_is_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def weights_are_a_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def tokenizer_is_a_loop(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("tokenizer.json")


def larger_tokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"word{number}" for number in range(2048 - len(tokenizer) + 2)])
    tokenizer.save_pretrained(folder)


BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (unreadable, "model.safetensors cannot be read"),
    (cut, "corrupt or cut short"),
    (emptied, "corrupt or cut short"),
    (config_is_a_folder, "no file config.json"),
    (config_is_a_list, "holds a list"),
    (weights_are_a_pipe, "no weight files"),
    (tokenizer_is_a_loop, "no tokenizer that can be loaded"),
    (larger_tokenizer, "2 of the tokenizer's ids have no row in the embedding"),
]


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.output


@pytest.mark.parametrize(("spoil", "reason"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_model_that_cannot_be_loaded_is_one_sentence(
    spoil: Callable[[Path], None], reason: str, saved_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved_models["decoder"], tmp_path / "run" / "step1")
    spoil(folder)
    model, store = str(folder), str(tmp_path / "store")
    for words in (
        ["doctor", model],
        ["measure", model, *SMALL],
        ["sweep", str(folder.parent), *SMALL, "--no-verify", "-o", store],
    ):
        code, output = run(*words)
        text = output + " ".join(str(row["message"]) for row in an.Store(store).failures())
        assert (code in (1, 3), "unexpected error" in text) == (True, False), text
        assert reason in " ".join(text.split()), words
    assert run("ls", "checkpoints", str(folder.parent))[0] == 0


@pytest.mark.parametrize(
    ("name", "code", "reasons"),
    [
        ("a" * 5000, 1, ("5000 characters",)),
        ("a/" * 2500, 1, ("5000 characters",)),
        ("loop", 1, ("symbolic links",)),
        ("", 2, ("is empty", "must be the name of a model")),
        ("  ", 2, ("is empty", "must be the name of a model")),
        ("sur\udcff", 2, ("not UTF-8", "in UTF-8")),
    ],
    ids=["long", "deep", "loop", "empty", "blank", "no UTF-8"],
)
def test_a_name_that_cannot_be_a_model_is_one_sentence(
    name: str, code: int, reasons: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    os.mkdir(b"sur\xff")
    for words in (["measure"], ["doctor"], ["ls", "checkpoints"], ["sweep", "-o", "store"]):
        found, output = run(*words, name)
        assert (found, "unexpected" in output) == (code, False), output
        assert any(reason in output for reason in reasons), output
        assert len(output) < 600


def test_folders_of_odd_names_and_odd_files_inside_load(saved_models: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saved_models["decoder"], tmp_path / "x.gguf")
    (folder / "again").symlink_to(folder)
    (folder / "loop").symlink_to("loop")
    (folder / "a\udcff.txt").write_text("x")
    (folder / "a\udcff").mkdir()
    assert run("doctor", str(folder))[0] == 0
    assert run("measure", str(folder), *SMALL)[0] == 0


def test_a_revision_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "step1\udcff").mkdir()
    for words in (
        ["ls", "checkpoints", str(tmp_path), "--revisions", "*"],
        ["sweep", str(tmp_path), "--revisions", "*"],
    ):
        code, output = run(*words, *(["-o", str(tmp_path / "store")] if words[0] == "sweep" else []))
        assert (code, "not UTF-8" in output) == (2, True), output


def test_a_store_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="not UTF-8"):
        an.Store(tmp_path / "st\udcff")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0)
    for words in (["measure"], ["doctor"], ["ls", "checkpoints"]):
        code, output = run(*words, str(folder))
        assert (code, "closed cannot be read: Permission denied" in output) == (1, True), output
    with pytest.raises(ModelError, match="Permission denied"):
        locate(str(folder / "inside"))
