"""`train(Recipe)`: small models trained from scratch with the Trainer of transformers, in as many parts as it takes.

RUN/recipe.json       what is trained; the same folder takes no other recipe
RUN/tokens/           the corpus as token ids, and the tokenizer
RUN/checkpoint-STEP/  kept: weights, config, tokenizer, tokens seen; what `anisoscope sweep RUN` measures
RUN/losses.jsonl      the loss curve
RUN/training.json     the summary
RUN/state/            the last full state of weights, optimizer, schedule and random numbers, to go on from
"""

import contextlib
import errno
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers

from anisoscope.errors import AnisoscopeError, MissingPackageError, SpecError, StoreError
from anisoscope.lab import Loss, Recipe, Trained, checkpoint_steps
from anisoscope.penalties import find_penalties
from anisoscope.progress import show_progress
from anisoscope.trainer import Keeper, Run, check_device, read_curve, write_json
from anisoscope.undisturbed import same_chance


def train(
    recipe: Recipe,
    output: Path | str,
    *,
    resume: bool = True,
    callbacks: Sequence[transformers.TrainerCallback] = (),
    device: str = "auto",
    max_seconds: float | None = None,
    save_every_seconds: float = 60.0,
    progress: bool = False,
) -> Trained:
    """Train a recipe into a folder, or go on where an earlier call ended or was killed.

    On a CPU the weights are the same bits, however often it was interrupted. `max_seconds` ends this part cleanly, its
    state saved; it counts from the call. `callbacks` are those of transformers' Trainer; they get model and tokenizer.
    `resume=False` refuses a folder that holds a training.
    """
    if find_spec("accelerate") is None:
        raise MissingPackageError("accelerate", extra="train", purpose="Training")
    find_penalties(recipe.regularize)
    check_device(device)
    checkpoint_steps(recipe.steps, recipe.checkpoints)
    for name, seconds in (("max_seconds", max_seconds), ("save_every_seconds", save_every_seconds)):
        if seconds is not None and not seconds >= 0:
            raise SpecError(f"{name} is a number of seconds of at least 0; came {seconds}")
    begun = time.monotonic()
    output = Path(output).absolute()
    with same_chance(), _quiet(), _explaining_full_disk(output), _alone(output):
        wanted = json.loads(json.dumps(asdict(recipe)))
        _check_folder(output, wanted, resume)
        done = read_training(output)
        if done is not None and done.finished:
            return done
        write_json(output / "recipe.json", wanted)
        run = Run(recipe, output, device)
        keeper = Keeper(run, begun, max_seconds, save_every_seconds)
        with show_progress("training", total=recipe.steps, shown=progress) as advance:
            keeper.advance = advance
            trainer = run.make_trainer([keeper, *callbacks])
            trainer.train(resume_from_checkpoint=run.resumed and str(run.resumed))
        run.summarise(trainer.state.global_step)
        trained = read_training(output)
    assert trained is not None
    return trained


def read_training(output: Path | str) -> Trained | None:
    """The summary of a training's folder, or None where there is none yet."""
    path = Path(output) / "training.json"
    if not path.exists():
        return None
    facts = json.loads(path.read_text("utf-8"))
    rows = read_curve(path.parent)
    exponent = facts["sampling_exponent"]
    return Trained(
        recipe=Recipe(**facts["recipe"]),
        output=path.parent,
        losses=tuple(Loss(**row) for row in rows),
        checkpoints=tuple(path.parent / f"checkpoint-{step}" for step in facts["checkpoints"]),
        sampling_exponent=math.nan if exponent is None else exponent,
        **{name: facts[name] for name in ("finished", "step", "tokens", "unigram", "bigram", "seconds", "void")},
    )


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(output / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise StoreError(f"another process trains in {output}; wait for it or use another folder") from error
    try:
        yield
    finally:
        lock.release()


def _check_folder(output: Path, wanted: dict[str, Any], resume: bool) -> None:
    """A folder that holds a training takes no other recipe; what a start left that made no step is cleared away."""
    path = output / "recipe.json"
    if not path.exists():
        return
    began = _has_begun(output)
    if began and not resume:
        raise SpecError(f"{output} holds a training already; give another folder, or let it resume")
    there = json.loads(path.read_text("utf-8"))
    changed = [name for name in wanted | there if wanted.get(name) != there.get(name)]
    if changed and began:
        what = ", ".join(f"{name}={there.get(name)} (now {wanted.get(name)})" for name in changed)
        raise SpecError(f"{output} holds a training with {what}; give the same recipe or another folder")
    if changed:
        shutil.rmtree(output / "tokens", ignore_errors=True)
        path.unlink()


def _has_begun(output: Path) -> bool:
    """Whether a step was made or measured: the weights before the first step follow from the recipe alone."""
    checkpoints = [*output.glob("checkpoint-*"), *output.glob("state/checkpoint-*")]
    return (
        (output / "training.json").exists()
        or any(path.name != "checkpoint-0" and not path.name.endswith(".part") for path in checkpoints)
        or any(output.glob("*.parquet"))
    )


@contextlib.contextmanager
def _explaining_full_disk(output: Path) -> Iterator[None]:
    """A folder that cannot be written is an error of one sentence, from whatever library it comes."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        yield
    except AnisoscopeError:
        raise
    except Exception as error:
        number = getattr(error, "errno", None)
        full = number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        # Torch raises a RuntimeError without a number.
        full = full or (isinstance(error, RuntimeError) and "writ" in str(error) and _free_bytes(output) < 1 << 16)
        if not full and number not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR):
            raise
        if full:
            told = "no space left on its disk. Checkpoints written before stay; with room, the same command goes on"
        else:
            told = f"{error}. Name a folder that can be written with -o"
        raise StoreError(f"cannot write to {output}: {told}") from error


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No remarks or bars of transformers between two of our own lines."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
