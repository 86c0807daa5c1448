"""A revision's name -> where in its training it stands: stage, step, tokens. Nothing is guessed.

step3000                               Pythia, OLMo and most others
global_step1000                        Bloom
step-001000-2BT                        step, and two billion tokens
stage2-ingredient3-step1000-tokens5B   OLMo 2: stages, and forks of a stage
ckpt_007                               Amber: counted, so no step is known
checkpoint-500                         the Trainer of transformers
20k, 240k-503b, 50K-105b, 955k-token-2T   what the `*` of a family of repositories stands for
"""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")

_SCALE = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_STEP = re.compile(r"(?:^|[^a-z])(?:global[-_])?(?:steps?|checkpoint|iter)[-_]?(\d+)([km]?)(?![a-z\d])", re.IGNORECASE)
# What a family's `*` stands for may be the number alone.
_BARE = re.compile(r"^(\d+)([km]?)(?=$|-)", re.IGNORECASE)
_TOKENS = re.compile(r"(?:^|[-_])(?:tokens?[-_]?)?(\d+(?:\.\d+)?)([mbt])(?:t|tokens?)?(?=$|[-_])", re.IGNORECASE)

# Tokens in one step of training, as the authors state them.
TOKENS_PER_STEP = {
    "pocket-*coder": 16_384,
    "EleutherAI/pythia-*": 2_097_152,
    "HuggingFaceTB/SmolLM2-135M-intermediate-checkpoints": 1_048_576,
    "HuggingFaceTB/SmolLM3-3B-checkpoints": 2_359_296,
}
# Some early branches of these lack the name of the stage that they belong to.
UNNAMED_STAGE = {"allenai/OLMo-2-*": "stage1"}
# Here `main` ends the series; elsewhere it repeats a checkpoint, is annealed further or holds no weights.
ENDS_WITH_MAIN = {"LLM360/Amber": True}

NaturalKey = tuple[tuple[int, int | str], ...]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in a training a revision stands, as far as its name says."""

    stage: str | None = None
    """What the name has before the step: parts of a training may count their steps from 0 again."""
    step: int | None = None
    tokens: int | None = None


def place_of(revision: str | None) -> Place:
    """What a revision's name states.

    >>> place_of("stage1-step1000-tokens5B")
    Place(stage='stage1', step=1000, tokens=5000000000)
    >>> place_of("ckpt_007")
    Place(stage=None, step=None, tokens=None)
    """
    name = revision or ""
    step = _STEP.search(name) or _BARE.match(name)
    if step is None:
        return Place()
    tokens = _TOKENS.search(name, step.end())
    return Place(
        stage=name[: step.start()].strip("-_/") or None,
        step=int(step.group(1)) * _SCALE[step.group(2).lower()],
        tokens=round(float(tokens.group(1)) * _SCALE[tokens.group(2).lower()]) if tokens else None,
    )


def place_in_training(model: str, revision: str | None, *, tokens_per_step: int | None = None) -> Place:
    """What a revision's name states, and what its family's table or the user adds to it."""
    place = place_of(revision)
    stage = place.stage
    if stage is None and place.step is not None:
        stage = look_up(UNNAMED_STAGE, model)
    tokens, per_step = place.tokens, tokens_per_step or look_up(TOKENS_PER_STEP, model)
    if tokens is None and place.step is not None and per_step is not None:
        tokens = place.step * per_step
    if tokens is None and place.step == 0 and stage is None:
        # Before its first step a training has seen nothing, whatever the size of its steps.
        tokens = 0
    return Place(stage=stage, step=place.step, tokens=tokens)


def look_up(table: Mapping[str, T], model: str) -> T | None:
    """The entry of a family table whose pattern fits the model."""
    return next((value for pattern, value in table.items() if fnmatch.fnmatchcase(model, pattern)), None)


@lru_cache(maxsize=65_536)
def training_order(
    stage: str | None, step: int | None, revision: str | None
) -> tuple[int, NaturalKey, int, NaturalKey]:
    """Sort key of a training: numbered stages before others, stage before step, 9 before 10; then the name."""
    numbered = stage is None or stage.lower().startswith("stage")
    return 0 if numbered else 1, _natural(stage or ""), -1 if step is None else step, _natural(revision or "")


def _natural(name: str) -> NaturalKey:
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts if part)
