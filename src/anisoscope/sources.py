"""model@revision -> where its files are, and what identifies them, before anything is loaded. No torch."""

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from anisoscope.errors import ModelError, SpecError

# What defines a saved model besides its weights.
_DEFINING = ("config.json", "tokenizer*", "vocab*", "merges.txt", "spiece.model", "special_tokens_map.json")
_WEIGHTS = {
    "safetensors": re.compile(r"[^/]*\.safetensors"),
    "pickled": re.compile(r"pytorch_model[^/]*\.bin"),
    # Weights before the first step need no file: the seed they are drawn from says which they are.
    "seed": re.compile(r"seed\.json"),
}

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
        return self.path is not None and self.path.suffix == ".gguf"


def locate(model: str, revision: str | None = None) -> Source:
    """Where the files of a model are.

    A revision of a local folder is a subfolder of that name (`out` and `checkpoint-500`). In a family, `*` in the
    model's name is what the revision stands for (`google/multiberts-seed_0-step_*k` and `20`). `pocket-decoder` and
    `pocket-encoder` are in the package; without a revision, their last checkpoint.
    """
    model, revision = split_pocket(model, revision)
    if model in POCKET_SUITE:
        return Source(path=_pocket_checkpoint(model, revision))
    name = model
    if "*" in model:
        if revision is None:
            raise SpecError(f"{model} is a family of checkpoints: say which with a revision (what * stands for)")
        name, revision = model.replace("*", revision), None
    path = Path(name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{name} is a file, but no .gguf file: name the folder it is in")
        return Source(path=path)
    if path.is_dir():
        if revision is not None:
            path = path / revision
            if not path.is_dir():
                raise ModelError(f"the folder {name} has no subfolder {revision}")
        return Source(path=path)
    return Source(repo=name, revision=revision)


def run_folder(model: str) -> Path | None:
    """The folder of a training here: one of the user's, or of the pocket suite."""
    if model in POCKET_SUITE:
        return POCKET / model
    return Path(model) if Path(model).is_dir() else None


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
    return [file.name for file in weight_files(folder)] == ["seed.json"]


def hash_weights(model: str, *, revision: str | None = None) -> str:
    """What identifies a model before it is loaded.

    A hub model: its commit. A `.gguf` file: its SHA-256. A folder: SHA-256 over the names and hashes of the weight
    files that would be loaded (safetensors where there are any, else pickled ones), the config and the tokenizer, since
    an edited config changes numbers as surely as other weights.
    """
    source = locate(model, revision)
    if source.repo is not None:
        return _find_commit(source.repo, source.revision)
    path = source.path
    assert path is not None
    if source.is_gguf:
        return hash_file(path)
    files = weight_files(path)
    if not files:
        inside = sorted(item.name for item in path.iterdir() if item.is_dir())
        hint = f"; it holds {', '.join(inside[:3])} ...: sweep them, or name one as revision" if inside else ""
        raise ModelError(f"{path} has no weight files (*.safetensors): is it the folder of a saved model?{hint}")
    files += sorted(file for pattern in _DEFINING for file in path.glob(pattern))
    listed = "".join(f"{file.name} {hash_file(file)}\n" for file in files)
    return hashlib.sha256(listed.encode()).hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder that would be loaded."""
    return [folder / name for name in pick_weights(sorted(item.name for item in folder.iterdir()))]


def pick_weights(names: list[str]) -> list[str]:
    """Which of these files would be loaded as weights: safetensors where there are any, else pickled ones."""
    for pattern in _WEIGHTS.values():
        if found := [name for name in names if pattern.fullmatch(name)]:
            return found
    return []


def hash_file(path: Path) -> str:
    """SHA-256 of a file; read again only when its size or time has changed."""
    stat = path.stat()
    return _hash_stamped(path.absolute(), stat.st_size, stat.st_mtime_ns)


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
        raise ModelError(f"{name} is neither a folder, nor a .gguf file, nor the name of a hub model") from error


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
