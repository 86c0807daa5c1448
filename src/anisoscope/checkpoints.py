"""Find, order, choose and inspect the checkpoints of a training run. No torch: `ls checkpoints` answers at once."""

import fnmatch
import glob
import math
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from anisoscope.errors import CheckpointError, ModelError, SpecError
from anisoscope.hub import ask_hub
from anisoscope.inputs import read_text
from anisoscope.integrity import Verified, verify
from anisoscope.progress import show_progress
from anisoscope.records import Checkpoint, WeightFile
from anisoscope.revisions import ENDS_WITH_MAIN, look_up, place_in_training, place_of, training_order
from anisoscope.sources import (
    can_matter,
    check_repo_name,
    hash_file,
    is_commit,
    list_files,
    locate,
    pick_weights,
    read_json,
    reading,
    run_folder,
    weight_files,
)

_INSPECTED_AT_ONCE = 8


def find_checkpoints(
    model: str, *, revisions: str | None = None, tokens_per_step: int | None = None
) -> list[Checkpoint]:
    """The checkpoints of a training run, in order of training.

    `model` is a hub repository (branches and tags are read), a local folder of checkpoints, or a family: folders or
    repositories whose names differ where `*` stands. `revisions` is a glob on their names; without it, names that
    state a step or a number are taken.
    """
    names, commits = _list_names(model)
    wanted = [name for name in names if fnmatch.fnmatchcase(name, revisions or "*")]
    stated = [name for name in wanted if _states_a_place(name) or (name == "main" and look_up(ENDS_WITH_MAIN, model))]
    if not stated and revisions is None:
        some = f": it has {', '.join(sorted(names)[:5])}" if names else ""
        raise CheckpointError(f"no checkpoint of {model} states a step{some}; name them with a glob or a list")
    chosen = stated or wanted
    if not chosen:
        raise CheckpointError(f"{model} has no revision that matches {revisions!r}; it has {', '.join(names[:8])} ...")
    found = [_describe(model, name, commits.get(name), tokens_per_step) for name in chosen]
    found.sort(key=lambda item: (item.revision == "main", *training_order(item.stage, item.step, item.revision)))
    return found


def _states_a_place(name: str) -> bool:
    return place_of(name).step is not None or re.search(r"ckpt[-_]?\d+$", name) is not None


def _list_names(model: str) -> tuple[list[str], dict[str, str]]:
    """Names of all revisions, and the commits of those on the hub."""
    if "*" in model:
        return _list_family(model)
    folder = run_folder(model)
    if folder is not None:
        with reading(folder):
            return sorted(item.name for item in folder.iterdir() if item.is_dir()), {}
    check_repo_name(model)
    from huggingface_hub import HfApi

    refs = ask_hub(model, HfApi().list_repo_refs, model)
    # A tag and a branch of one name: the branch is what `revision=` would load.
    commits = {ref.name: ref.target_commit for ref in (*refs.tags, *refs.branches)}
    return list(commits), commits


def _list_family(model: str) -> tuple[list[str], dict[str, str]]:
    if model.count("*") != 1:
        raise SpecError(f"a family has one * in its name, which stands for the checkpoint; came {model!r}")
    before, after = model.split("*")
    members = [name for name in glob.glob(model) if Path(name).is_dir()]
    if not members:
        check_repo_name(f"{before}0{after}")
        from huggingface_hub import HfApi

        author, _, start = before.rpartition("/")
        listed = ask_hub(model, lambda: list(HfApi().list_models(author=author or None, search=start)))
        members = [item.id for item in listed if fnmatch.fnmatchcase(item.id, model)]
    return [name[len(before) : len(name) - len(after)] for name in members], {}


def _describe(model: str, revision: str | None, commit: str | None, tokens_per_step: int | None) -> Checkpoint:
    place = place_in_training(model, revision, tokens_per_step=tokens_per_step)
    tokens = place.tokens
    if tokens is None:
        # The Trainer writes 0 where it was not told to count.
        tokens = _trainer_state(model, revision).get("num_input_tokens_seen") or None
    return Checkpoint(model=model, revision=revision, commit=commit, stage=place.stage, step=place.step, tokens=tokens)


def _trainer_state(model: str, revision: str | None) -> dict[str, Any]:
    """What the Trainer of transformers noted beside a local checkpoint."""
    source = locate(model, revision)
    path = None if source.path is None else source.path / "trainer_state.json"
    if path is None or not path.is_file():
        return {}
    return read_json(path)


_LIST_BYTES = 1 << 26


def read_list(path: Path, model: str | None = None, *, tokens_per_step: int | None = None) -> list[Checkpoint]:
    """Checkpoints from a file, in its order: one a line, `MODEL@REVISION`, a folder, or a revision of `model`.

    `step=3000` and `tokens=6.3B` may follow. Blank lines and what follows a # are passed over.
    """
    lines = read_text(path, at_most=_LIST_BYTES).splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        name, *facts = line.partition("#")[0].split() or [""]
        if not name:
            continue
        given = {fact.partition("=")[0]: fact.partition("=")[2] for fact in facts}
        if set(given) - {"step", "tokens"}:
            raise SpecError(f"{path}, line {number}: wanted NAME [step=N] [tokens=T]; came {line.strip()!r}")
        owner, at, revision = name.partition("@")
        if not at and model is not None and not os.path.exists(name):
            owner, revision = model, name
        one = _describe(owner, revision or None, None, tokens_per_step)
        step = int(_amount(given["step"], path, number)) if "step" in given else one.step
        tokens = int(_amount(given["tokens"], path, number)) if "tokens" in given else one.tokens
        found.append(replace(one, step=step, tokens=tokens))
    if not found:
        raise SpecError(f"the list {path} names no checkpoint")
    return found


def _amount(text: str, path: Path, line: int) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbt]?)", text.lower())
    if match is None:
        raise SpecError(f"{path}, line {line}: {text!r} is no number such as 3000, 20k or 6.3B")
    return float(match.group(1)) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match.group(2)]


def choose(
    checkpoints: Sequence[Checkpoint], *, log_spaced: int | None = None, every: int | None = None
) -> list[Checkpoint]:
    """Some of a series: N spread evenly in log step, or every Nth; the first and the last are always among them."""
    if log_spaced is not None and every is not None:
        raise SpecError("--log-spaced and --every exclude each other")
    if (log_spaced is not None and log_spaced < 2) or (every is not None and every < 1):
        raise SpecError("--log-spaced takes a number from 2 on, --every one from 1 on")
    if every is not None:
        return [item for place, item in enumerate(checkpoints) if place % every == 0 or item is checkpoints[-1]]
    if log_spaced is None or log_spaced >= len(checkpoints):
        return list(checkpoints)
    steps = [item.step for item in checkpoints]
    stages = {item.stage for item in checkpoints}
    # Where stages count from zero again, or steps are unknown, the place in the series is all there is.
    known = len(stages) == 1 and all(step is not None for step in steps)
    places = [math.log1p(step if known and step is not None else place) for place, step in enumerate(steps)]
    kept = {0, len(checkpoints) - 1}
    while len(kept) < log_spaced:
        # The one that is farthest from all that are kept: log spacing without ever choosing one twice.
        rest = (place for place in range(len(places)) if place not in kept)
        kept.add(max(rest, key=lambda place: (min(abs(places[place] - places[other]) for other in kept), -place)))
    return [checkpoints[place] for place in sorted(kept)]


def pin(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the commit that its revision points to now."""
    source = locate(checkpoint.model, checkpoint.revision)
    if source.repo is None or checkpoint.commit is not None:
        return checkpoint
    if is_commit(source.revision):
        return replace(checkpoint, commit=source.revision)
    from huggingface_hub import HfApi

    info = ask_hub(checkpoint.name, HfApi().model_info, source.repo, revision=source.revision)
    return replace(checkpoint, commit=info.sha)


def inspect(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its commit and the files that loading it would read; weight files with their hashes."""
    source = locate(checkpoint.model, checkpoint.revision)
    if source.path is not None:
        noted = _trainer_state(checkpoint.model, checkpoint.revision).get("global_step", checkpoint.step)
        wrong = checkpoint.step is not None and noted != checkpoint.step
        suspect = f"its name says step {checkpoint.step}, its trainer_state.json {noted}" if wrong else None
        return replace(checkpoint, files=_local_files(source.path), suspect=suspect)
    checkpoint = pin(checkpoint)
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    listed = {"revision": checkpoint.commit, "recursive": True}
    tree = ask_hub(checkpoint.name, lambda: list(HfApi().list_repo_tree(str(source.repo), **listed)))
    sizes = {item.path: item for item in tree if isinstance(item, RepoFile)}
    weights = set(pick_weights(sorted(sizes)))
    files = [
        WeightFile(name=name, size=item.size, sha256=_hash_of(item) if name in weights else None)
        for name, item in sorted(sizes.items())
        if name in weights or can_matter(name)
    ]
    return replace(checkpoint, files=tuple(files))


def _hash_of(item: Any) -> str:
    """Of a file on the hub; weights small enough to lie in git itself are identified by their blob."""
    return item.lfs.sha256 if item.lfs else f"git:{item.blob_id}"


def _local_files(path: Path) -> tuple[WeightFile, ...]:
    with reading(path):
        if path.is_file():
            return (WeightFile(name=path.name, size=path.stat().st_size, sha256=hash_file(path)),)
        names = list_files(path)
        weights = weight_files(path, names)
        return tuple(
            WeightFile(
                name=name, size=(path / name).stat().st_size, sha256=hash_file(path / name) if name in weights else None
            )
            for name in sorted({*weights, *filter(can_matter, names)})
        )


def inspect_all(
    checkpoints: Sequence[Checkpoint], *, series: Sequence[Checkpoint] = (), progress: bool = False
) -> Verified:
    """Look at the files of checkpoints, model by model, and say what cannot be right.

    `series` holds the whole runs they were chosen from. The end of a run is looked at as well, since weights of the end
    under the name of another step are the commonest mistake.
    """
    models = dict.fromkeys(item.model for item in checkpoints)
    ends = {model: _ends(model, checkpoints, series) for model in models}
    todo = [*checkpoints, *(end for some in ends.values() for end in some)]
    with (
        show_progress("looking at files", total=len(todo), shown=progress) as advance,
        ThreadPoolExecutor(_INSPECTED_AT_ONCE) as pool,
    ):

        def look(item: Checkpoint) -> Checkpoint:
            try:
                return inspect(item)
            except ModelError:
                if item.revision == "main" and item not in checkpoints:
                    return item
                raise
            finally:
                advance(1)

        seen = dict(zip(todo, pool.map(look, todo), strict=True))
    marked: dict[Checkpoint, Checkpoint] = {}
    for model, some in ends.items():
        mine = [item for item in checkpoints if item.model == model]
        verified = verify([seen[item] for item in mine], ends=[seen[end] for end in some])
        marked |= zip(mine, verified.checkpoints, strict=True)
    return Verified(checkpoints=tuple(marked[item] for item in checkpoints))


def _ends(model: str, checkpoints: Sequence[Checkpoint], series: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The last checkpoint of a model's run, and `main` of its repository, which may repeat it."""
    last = [item for item in (*checkpoints, *series) if item.model == model][-1]
    if last.commit is None or "*" in model or last.step is None or last.revision == "main":
        return [last]
    return [last, replace(last, revision="main", commit=None)]
