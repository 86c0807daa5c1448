"""What is to be measured at each size: settings, models and checkpoints, and how large they are. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anisoscope.errors import CheckpointError, ModelError, SpecError
from anisoscope.lab import Recipe
from anisoscope.protocols import load_protocol
from anisoscope.records import Checkpoint
from anisoscope.reproductions.nouns import Followed, Paper

SIZES = ("pocket", "small", "paper")
SEEDS = 3
UNREACHABLE = "size unknown: hub not reachable"
# Small models of the shape of the pocket suite, with a text that is always there.
SMALL_CORPUS = "pydoc"
_SMALL: dict[str, Any] = {
    "layers": 6,
    "width": 112,
    "heads": 7,
    "steps": 1000,
    "learning_rate": 2e-3,
    "warmup": 50,
    "checkpoints": 12,
}
_TOKENS_IN_STEP = 2048
_LAYOUTS = {"decoder": "gpt_neox", "encoder": "eurobert"}


@dataclass(frozen=True, kw_only=True)
class Series:
    """Checkpoints to measure, and the whole run they were chosen from."""

    chosen: tuple[Checkpoint, ...]
    run: tuple[Checkpoint, ...]


def check_request(paper: Paper, size: str, variant: str | None) -> None:
    """Refuse what there is not."""
    if size not in SIZES:
        raise SpecError(f"sizes are {', '.join(SIZES)}; came {size!r}")
    if variant is not None and variant not in paper.protocols:
        there = ", ".join(paper.protocols)
        raise SpecError(f"{paper.name} has no variant {variant!r}: what is known of it is {there}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Fields of Spec, once for each unit."""

    every: tuple[dict[str, Any], ...]
    """Of every checkpoint."""
    last: tuple[dict[str, Any], ...]
    """Of the last one besides."""

    @property
    def longest(self) -> int:
        """Tokens in the longest window."""
        return max(one["seq_len"] for one in (*self.every, *self.last))


def plan_settings(paper: Paper, size: str, variant: str | None, given: Mapping[str, Any]) -> Settings:
    """What the protocol says, smaller at small sizes, and what was given by hand."""
    spec = {name: value for name, value in load_protocol(paper.protocol(variant)).spec.items() if name != "corpus"}
    smaller = {} if size == "paper" else paper.pocket[variant or next(iter(paper.protocols))]

    def filled(asked: Mapping[str, Any]) -> dict[str, Any]:
        return {**spec, **asked, **_smaller_than(asked, smaller), **given}

    return Settings(every=tuple(map(filled, paper.asked)), last=tuple(map(filled, paper.asked_last)))


def _smaller_than(asked: Mapping[str, Any], smaller: Mapping[str, Any]) -> dict[str, Any]:
    """Where a unit asks for sites of another kind, those of the small size do not apply."""
    other = any(not site.startswith("block") for site in asked.get("sites", ()))
    return {name: value for name, value in smaller.items() if not (other and name == "sites")}


def plan_corpora(paper: Paper, size: str, corpus: str | None) -> tuple[str, ...]:
    """The paper's corpora at its own size, else a text that is always there; small models read what they never saw."""
    if size == "paper":
        return paper.corpora if corpus is None else (corpus,)
    named = corpus or SMALL_CORPUS
    return (f"heldout:{named}",) if size == "small" else (named,)


def plan_recipes(
    paper: Paper, output: Path, *, seq_len: int, seeds: int, steps: int | None, corpus: str | None
) -> dict[Path, Recipe]:
    """The trainings of the size `small`: folders, whose names tell their seeds, and recipes.

    `seq_len` is that of the windows to be measured: a model reads no more positions than it was trained with.
    """
    windows = {"seq_len": seq_len, "batch_size": max(1, _TOKENS_IN_STEP // seq_len)}
    named: dict[str, Any] = _SMALL | windows | {"corpus": corpus or SMALL_CORPUS}
    named |= {} if steps is None else {"steps": steps}
    return {
        output / "trainings" / f"small-{kind}-seed{seed}": Recipe(kind=kind, layout=_LAYOUTS[kind], seed=seed, **named)
        for kind in paper.kinds
        for seed in range(seeds)
    }


def published(paper: Paper) -> list[Followed | str]:
    """Every model of the paper: names of those measured once, and those followed over training."""
    return [*paper.models, *paper.followed]


def find_series(item: Followed | str) -> Series:
    """The checkpoints of a model, by asking the hub; a model without any is measured as it is."""
    from anisoscope.checkpoints import choose, find_checkpoints

    if isinstance(item, str):
        alone = Checkpoint(model=item, revision=None)
        return Series(chosen=(alone,), run=(alone,))
    try:
        run = find_checkpoints(item.model)
    except CheckpointError:
        if "*" in item.model or item.revisions:
            raise
        return find_series(item.model)
    chosen = [one for one in run if one.revision in item.revisions] if item.revisions else run
    if not chosen:
        raise CheckpointError(f"{item.model} has none of the checkpoints that the paper names")
    return Series(chosen=tuple(choose(chosen, log_spaced=None if item.revisions else item.log_spaced)), run=tuple(run))


def list_plan(
    paper: Paper, size: str, *, output: Path, seeds: int, steps: int | None, corpus: str | None
) -> Iterator[dict[str, Any]]:
    """Every model and revision with its size in bytes, None where it is not known; `note` says why."""
    if size == "small":
        longest = plan_settings(paper, size, None, {}).longest
        recipes = plan_recipes(paper, output, seq_len=longest, seeds=seeds, steps=steps, corpus=corpus)
        for folder, recipe in recipes.items():
            note = f"to be trained: {recipe.layers} x {recipe.width}, {recipe.steps:,} steps on {recipe.corpus}"
            yield _row(str(folder), f"{recipe.checkpoints} checkpoints", None, note)
        return
    items = published(paper) if size == "paper" else [Followed(model=f"pocket-{kind}") for kind in paper.kinds]
    reachable = True
    for item in items:
        if reachable:
            try:
                yield from _sizes(find_series(item))
                continue
            except ModelError as error:
                if not _is_away(error):
                    yield from _named(item, str(error))
                    continue
                reachable = False
        yield from _named(item, UNREACHABLE)


def _sizes(series: Series) -> Iterator[dict[str, Any]]:
    from anisoscope.checkpoints import inspect_all

    for item in inspect_all(series.chosen, series=series.run).checkpoints:
        yield _row(item.model, item.revision or "main", item.size, item.suspect or "")


def _is_away(error: BaseException) -> bool:
    from anisoscope.hub import is_passing

    return error.__cause__ is not None and is_passing(error.__cause__)


def _named(item: Followed | str, note: str) -> Iterator[dict[str, Any]]:
    """What is known of a model without asking."""
    if isinstance(item, str):
        yield _row(item, "main", None, note)
        return
    for revision in item.revisions or (f"{item.log_spaced} of its checkpoints, even in log step",):
        yield _row(item.model, revision, None, note)


def _row(model: str, revision: str, size: int | None, note: str) -> dict[str, Any]:
    return {"model": model, "revision": revision, "bytes": size, "note": note}
