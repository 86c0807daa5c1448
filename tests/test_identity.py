"""What identifies a saved model: every file that can change what is computed, and no other."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import anisoscope as an
from anisoscope.checkpoints import find_checkpoints, inspect
from anisoscope.errors import ModelError
from anisoscope.sources import POCKET, hash_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model in shards, with code of its own; small enough to be hashed in no time."""
    made = tmp_path / "model"
    (made / "layers").mkdir(parents=True)
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for number, name in enumerate(shards):
        save_file({f"w{number}": torch.full((2,), float(number))}, made / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {f"w{number}": name for number, name in enumerate(shards)}}
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    (made / "config.json").write_text('{"model_type": "own"}')
    (made / "modeling_own.py").write_text("from .layers.block import Block")
    (made / "layers" / "block.py").write_text("class Block: ...")
    return made


COUNTS = [
    *("config.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors"),
    *("modeling_own.py", "layers/block.py", "layers/deep/er.py", "tokenization_own.py"),
    *("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"),
    *("vocab.json", "vocab.txt", "vocab.bpe", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("bpe.codes", "tokenizer.model", "source.spm", "qwen.tiktoken", "dict.txt", "preprocessor_config.json"),
    *("adapter_config.json", "quantize_config.json", "a name \udcff no UTF-8.txt"),
]
COUNTS_NOT = [
    *("README.md", "LICENSE", "LICENSE.txt", ".gitattributes", ".git/config", "train.log", "loss.png"),
    *("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pth", "training_args.bin"),
    *("trainer_state.json", "training.json", "generation_config.json", "eval_results.json"),
    *("events.out.tfevents.1.host", "pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5"),
    *("flax_model.msgpack", "rust_model.ot", "model.onnx", "consolidated.00.pth", "q4.gguf", "onnx/model.onnx"),
    # A folder with an adapter is refused when it is loaded.
    "adapter_model.safetensors",
    *("checkpoint-5/model.safetensors", "checkpoint-5/tokenizer.json", "checkpoint-5/optimizer.pt", ".cache/a.py"),
    *("__pycache__/modeling_own.cpython-311.pyc",),
]


def write(path: Path, text: str) -> None:
    """Add a file, or a word to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.name in ("config.json", "model.safetensors.index.json"):
        text = json.dumps(json.loads(path.read_text()) | {text: 1})
    elif path.exists():
        text += path.read_text("latin-1")
    path.write_text(text, "latin-1")


@pytest.mark.parametrize("name", COUNTS, ids=ascii)
def test_a_file_that_can_change_what_is_computed_changes_the_identity(folder: Path, name: str) -> None:
    seen = [hash_weights(str(folder))]
    for text in ("one", "two"):
        write(folder / name, text)
        seen.append(hash_weights(str(folder)))
    (folder / name).unlink()
    seen.append(hash_weights(str(folder)))
    assert len(set(seen[:3])) == 3, "added and edited"
    assert seen[3] not in seen[1:3], "removed"


@pytest.mark.parametrize("name", COUNTS_NOT)
def test_a_file_that_cannot_matter_does_not(folder: Path, name: str) -> None:
    before = hash_weights(str(folder))
    for text in ("one", "two"):
        write(folder / name, text)
        assert hash_weights(str(folder)) == before


def point_at(other: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        index["weight_map"]["w1"] = other
        file.write_text(json.dumps(index))

    return edit


def test_shards_are_those_that_the_index_names_wherever_they_are(folder: Path) -> None:
    other = folder.parent / "other.safetensors"
    for name in (str(other), "../other.safetensors"):
        save_file({"w1": torch.ones(2)}, other, metadata={"format": "pt"})
        point_at(name)(folder)
        before = hash_weights(str(folder))
        save_file({"w1": torch.zeros(2)}, other, metadata={"format": "pt"})
        assert hash_weights(str(folder)) != before


def test_a_weight_file_that_is_not_loaded_is_not_read(folder: Path) -> None:
    save_file({"w": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    # One file has precedence over shards. Its index may still be there; both count, a third file does not.
    before = hash_weights(str(folder))
    save_file({"w": torch.ones(2)}, folder / "consolidated.safetensors", metadata={"format": "pt"})
    assert hash_weights(str(folder)) == before
    (folder / "config.json").write_text('{"transformers_weights": "consolidated.safetensors"}')
    named = hash_weights(str(folder))
    save_file({"w": torch.zeros(2)}, folder / "consolidated.safetensors", metadata={"format": "pt"})
    assert hash_weights(str(folder)) not in (before, named)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", ["{", "[" * 100_000, '"\udcff"', "[]"], ids=["cut", "deep", "no UTF-8", "a list"])
def test_an_index_or_config_that_cannot_be_read_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(os.fsencode(text))
    with pytest.raises(ModelError, match=name):
        hash_weights(str(folder))


def test_what_a_sweep_inspects_and_fetches_is_what_identifies(folder: Path) -> None:
    run = folder.parent / "run"
    shutil.copytree(folder, run / "step1")
    for name in ("bpe.codes", "qwen.tiktoken", "optimizer.pt", "README.md"):
        (run / "step1" / name).write_text("x")
    (checkpoint,) = find_checkpoints(str(run))
    names = {file.name for file in inspect(checkpoint).files}
    assert names >= {"bpe.codes", "qwen.tiktoken", "layers/block.py", "model.safetensors.index.json"}
    assert not names & {"optimizer.pt", "README.md"}


def test_pocket_models_keep_the_identity_their_stored_results_have() -> None:
    stored = an.Store(POCKET.parent.parent.parent / "docs" / "runs" / "pocket-sites")
    for key in sorted(stored.keys()):
        spec = stored.spec(key)
        assert hash_weights(spec["model"], revision=spec["revision"]) == spec["weights"]


def test_an_index_that_points_elsewhere_is_measured_again(saved_models: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = shutil.copytree(saved_models["decoder"], tmp_path / "m")
    weights: dict[str, Any] = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    name = "transformer.wte.weight"
    rest = {key: value for key, value in weights.items() if key != name}
    for file, part in (("a", rest), ("b", {name: weights[name]}), ("c", {name: 5 * weights[name]})):
        save_file(part, folder / f"{file}.safetensors", metadata={"format": "pt"})
    losses = []
    store = an.Store(tmp_path / "store")
    for shard in ("b", "c"):
        index = {"metadata": {}, "weight_map": dict.fromkeys(rest, "a.safetensors") | {name: f"{shard}.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        spec = an.Spec(model=str(folder), corpus="pydoc", tokens=512, seq_len=64, batch_points=256, metrics=("loss",))
        unit = an.measure(spec, device="cpu", progress=False)
        assert unit.key not in store
        store.put(unit)
        losses.append(unit.records[0].value)
    assert abs(losses[0] - losses[1]) > 0.1
