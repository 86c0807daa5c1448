"""model@revision -> where its files are, and what identifies them, before anything is loaded. No torch."""

import contextlib
import fnmatch
import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from anisoscope.errors import ModelError, SpecError

# Weights in the order in which transformers looks for them: one file, or the shards that an index names.
_WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json", re.compile(r"[^/]*\.safetensors")),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", re.compile(r"pytorch_model[^/]*\.bin")),
    # Weights before the first step need no file: the seed they are drawn from says which they are.
    ("seed.json", None, re.compile(r"seed\.json")),
)
# Files that change no state: notes, pictures, what a training keeps for itself, settings of text generation, and
# weights in a format that is not loaded. Everything else identifies a model.
_CANNOT_MATTER = (
    *("*.md", "license*", "*.log", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.pdf"),
    *("trainer_state.json", "training.json", "*_results.json", "events.out.tfevents.*", "generation_config.json"),
    *("*.safetensors", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.onnx"),
    *("*.gguf", "*.tflite"),
)

POCKET = Path(__file__).parent / "pocket"
POCKET_SUITE = ("pocket-decoder", "pocket-encoder")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model's files are: a path here, or a repository on the hub."""

    path: Path | None = None
    repo: str | None = None
    revision: str | None = None
    """Of the repository."""

    @property
    def is_gguf(self) -> bool:
        """Whether it is a `.gguf` file."""
        return self.path is not None and self.path.suffix == ".gguf" and self.path.is_file()


def locate(model: str, revision: str | None = None) -> Source:
    """Where the files of a model are.

    A revision of a local folder is a subfolder of that name (`out` and `checkpoint-500`). In a family, `*` in the
    model's name is what the revision stands for (`google/multiberts-seed_0-step_*k` and `20`). `pocket-decoder` and
    `pocket-encoder` are in the package; without a revision, their last checkpoint.
    """
    for what, text in (("model", model), ("revision", revision)):
        _check_text(what, text)
    model, revision = split_pocket(model, revision)
    if model in POCKET_SUITE:
        return Source(path=_pocket_checkpoint(model, revision))
    name = model
    if "*" in model:
        if revision is None:
            raise SpecError(f"{model} is a family of checkpoints: say which with a revision (what * stands for)")
        name, revision = model.replace("*", revision), None
    path, mode = Path(name), _mode_of(name)
    if mode is None:
        return Source(repo=name, revision=revision)
    if stat.S_ISDIR(mode):
        if revision is not None:
            path = path / revision
            if not os.path.isdir(path):
                raise ModelError(f"the folder {name} has no subfolder {shorten(revision)}")
        return Source(path=path)
    if path.suffix != ".gguf" or not stat.S_ISREG(mode):
        raise ModelError(f"{name} is a file, but no .gguf file: name the folder it is in")
    return Source(path=path)


def _check_text(what: str, text: str | None) -> None:
    """Refuse names that no result could be stored under."""
    if text is None:
        return
    if what == "model" and not text.strip():
        raise SpecError("the name of the model is empty: a hub name, a folder or a .gguf file is wanted")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SpecError(f"the name of the {what}, {text!a}, is not UTF-8: rename it to measure it") from error


def shorten(name: str) -> str:
    """A name that fits into a sentence."""
    return name if len(name) <= 200 else f"{name[:100]}...{name[-60:]} ({len(name)} characters)"


def _mode_of(name: str) -> int | None:
    """What is at a path; None where there is nothing."""
    try:
        return os.stat(name).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise ModelError(f"{shorten(name)} cannot be read: {error.strerror or error}") from error


def run_folder(model: str) -> Path | None:
    """The folder of a training here: one of the user's, or of the pocket suite."""
    _check_text("model", model)
    if model in POCKET_SUITE:
        return POCKET / model
    mode = _mode_of(model)
    return Path(model) if mode is not None and stat.S_ISDIR(mode) else None


def split_pocket(model: str, revision: str | None) -> tuple[str, str | None]:
    """`pocket-decoder@512` is `pocket-decoder` and its revision `step512`; other names stay as they are.

    >>> split_pocket("pocket-decoder@512", None)
    ('pocket-decoder', 'step512')
    """
    name, _, step = model.partition("@")
    if name not in POCKET_SUITE:
        return model, revision
    return name, _pocket_checkpoint(name, step or revision).name


def _pocket_checkpoint(name: str, revision: str | None) -> Path:
    steps = {path.name.removeprefix("step"): path for path in (POCKET / name).glob("step*")}
    wanted = max(steps, key=int) if revision is None else revision.removeprefix("step")
    if wanted not in steps:
        known = ", ".join(f"step{step}" for step in sorted(steps, key=int))
        raise ModelError(f"{name} has no checkpoint {revision}; it has {known}")
    return steps[wanted]


def is_seed(folder: Path) -> bool:
    """Whether a folder holds a seed in place of weights."""
    return weight_files(folder, list_files(folder)) == ["seed.json"]


def hash_weights(model: str, *, revision: str | None = None) -> str:
    """What identifies a model before it is loaded.

    A hub model: its commit. A `.gguf` file: its SHA-256. A folder: SHA-256 over the names and hashes of
    `identifying_files`.
    """
    source = locate(model, revision)
    if source.repo is not None:
        return _find_commit(source.repo, source.revision)
    path = source.path
    assert path is not None
    if source.is_gguf:
        return hash_file(path)
    with reading(path):
        listed = (f"{name} {hash_file(path / name)}\n" for name in identifying_files(path))
        return hashlib.sha256(os.fsencode("".join(listed))).hexdigest()


def identifying_files(folder: Path) -> list[str]:
    """Every file of a saved model that can change what is computed from it: the weights, then the others by name.

    Of the weights, those that would be loaded, wherever the index says they are. Of the others, every file in the
    folder and every Python file below it, except for a few kinds that cannot matter. A list of the files that matter
    would lack those of the next tokenizer; a file too many costs a repeated measurement, one too few a wrong number.
    """
    names = list_files(folder)
    weights = weight_files(folder, names)
    if not weights:
        inside = sorted(item.name for item in folder.iterdir() if item.is_dir())
        some = ", ".join(inside[:3]) + (" ..." if len(inside) > 3 else "")
        hint = f" It holds {some}: if they are checkpoints, sweep it or name one of them." if inside else ""
        raise ModelError(f"{folder} has no weight files (*.safetensors): is it the folder of a saved model?{hint}")
    return weights + sorted(name for name in names if can_matter(name) and name not in weights)


def can_matter(name: str) -> bool:
    """Whether a file that is not loaded as weights can change what is computed; its name is relative to the folder."""
    path = PurePosixPath(name)
    if any(part.startswith(".") or part == "__pycache__" for part in path.parts):
        return False
    if len(path.parts) > 1:
        return path.suffix == ".py"
    return not any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in _CANNOT_MATTER)


def list_files(folder: Path) -> list[str]:
    """Names of the files in a folder, and of the Python files below it; links to folders are not followed."""
    found = [item.name for item in folder.iterdir() if item.is_file()]
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if Path(parent) != folder:
            found += [Path(parent, name).relative_to(folder).as_posix() for name in files if name.endswith(".py")]
    return sorted(found)


def weight_files(folder: Path, names: Sequence[str]) -> list[str]:
    """Which files would be loaded as weights, relative to a folder whose files have these names."""
    weights = pick_weights(names)
    for whole, index, _ in _WEIGHTS:
        if whole in names:
            break
        if index is not None and index in names:
            weights = _shards(folder, index)
            break
    named = read_json(folder / "config.json").get("transformers_weights") if "config.json" in names else None
    if isinstance(named, str):
        # Versions of transformers differ in whether they follow it: both sets of weights count.
        weights += _shards(folder, named) if named.endswith(".index.json") else [named]
    return sorted({name for name in weights if (folder / name).is_file()})


def pick_weights(names: Sequence[str]) -> list[str]:
    """Which of these files would be loaded as weights, where no index can be read: safetensors before pickled ones."""
    for whole, _, pattern in _WEIGHTS:
        if found := [name for name in names if pattern.fullmatch(name)]:
            return [whole] if whole in found else found
    return []


def _shards(folder: Path, index: str) -> list[str]:
    named = read_json(folder / index).get("weight_map")
    if not isinstance(named, dict):
        raise ModelError(f"{folder / index} names no weight files: a weight_map from weights to files was wanted")
    return [name for name in set(named.values()) if isinstance(name, str)]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model."""
    try:
        with reading(path):
            found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds a {type(found).__name__}; a JSON object was wanted")
    return found


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Files that cannot be read are an error of the model."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error


def hash_file(path: Path) -> str:
    """SHA-256 of a file; read again only when its size or time has changed."""
    with reading(path):
        found = path.stat()
        return _hash_stamped(path.absolute(), found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _hash_stamped(path: Path, size: int, modified: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_commit(revision: str | None) -> bool:
    """Whether a revision is the hash of a commit, which never moves."""
    return revision is not None and re.fullmatch("[0-9a-f]{40}", revision) is not None


def check_repo_name(name: str) -> None:
    """Refuse what cannot be a hub model."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelError(
            f"{shorten(name)} is neither a folder, nor a .gguf file, nor the name of a hub model"
        ) from error


def _find_commit(name: str, revision: str | None) -> str:
    from huggingface_hub import model_info, try_to_load_from_cache
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    check_repo_name(name)
    if revision is not None and is_commit(revision):
        return revision
    try:
        commit = model_info(name, revision=revision, timeout=20).sha
    except RevisionNotFoundError as error:
        raise ModelError(f"{name} has no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name} is no local folder and no hub model (or a private one: log in with `hf auth`)"
        ) from error
    except Exception as error:  # offline, in any of the ways of the HTTP library in use
        cached = try_to_load_from_cache(name, "config.json", revision=revision or "main")
        if isinstance(cached, str):
            return Path(cached).parent.name
        raise ModelError(
            f"{name} is no local folder, not in the cache, and the hub cannot be reached: {error}"
        ) from error
    if commit is None:
        raise ModelError(f"the hub names no commit for {name}")
    return commit
