"""Make what a reproduction needs: train, fetch, and measure what is not stored yet."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anisoscope.atomic import write_file
from anisoscope.citing import REPRODUCTION
from anisoscope.errors import CorpusError, MissingPackageError, ModelError
from anisoscope.lab import Recipe
from anisoscope.records import Spec
from anisoscope.reproductions.nouns import Followed, Paper
from anisoscope.reproductions.plans import (
    Series,
    Settings,
    find_series,
    plan_corpora,
    plan_recipes,
    plan_settings,
    published,
)
from anisoscope.store import Store


@dataclass(kw_only=True)
class Work:
    """What was done: keys of units, and models that could not be measured."""

    measured: list[str] = field(default_factory=list)
    stored_before: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Model -> why."""

    @property
    def keys(self) -> set[str]:
        """The units that this reproduction rests on."""
        return {*self.measured, *self.stored_before}

    @property
    def partly(self) -> bool:
        """Whether something is missing."""
        return bool(self.failed or self.refused)


def reproduce(
    paper: Paper,
    size: str,
    output: Path,
    *,
    variant: str | None = None,
    corpus: str | None = None,
    given: Mapping[str, Any] | None = None,
    seeds: int = 3,
    steps: int | None = None,
    drift: bool | None = None,
    engine: str = "local",
    workers: int | None = None,
    gpus_per_job: float = 0.0,
    verify: bool = True,
    progress: bool = True,
    **measuring: Any,
) -> Work:
    """Measure everything the paper's claims ask for into a run folder; what is there already is skipped.

    A model that cannot be had is named in `refused`, and the others go on. `given` are fields of Spec.
    """
    store, work = Store(output), Work()
    store.check_writable()
    settings = plan_settings(paper, size, variant, given or {})
    corpora = plan_corpora(paper, size, corpus)
    follows = (size != "paper" if drift is None else drift) and paper.drift
    if size == "small":
        recipes = plan_recipes(paper, output, seq_len=settings.longest, seeds=seeds, steps=steps, corpus=corpus)
        _train_all(recipes, measuring.get("device", "auto"), progress)
        items: Sequence[Followed | str] = [Followed(model=str(folder), log_spaced=99) for folder in recipes]
    elif size == "pocket":
        items = [Followed(model=f"pocket-{kind}") for kind in paper.kinds]
    else:
        items = published(paper)
    jobs = {"engine": engine, "workers": workers, "gpus_per_job": gpus_per_job, "verify": verify}
    for item in items:
        name = item if isinstance(item, str) else item.model
        try:
            series = find_series(item)
            if size != "paper" and not any(kind in Path(name).name for kind in paper.follows):
                series = replace(series, chosen=series.chosen[-1:])
            options = jobs | {"progress": progress} | measuring
            _sweep(series, corpora, settings, store, work, options | _following(paper, series))
            if follows:
                keys = store.keys()
                drifts = list(_follow(series, corpora, settings.every[0], store, {"progress": progress} | measuring))
                work.stored_before += [key for key in drifts if key in keys]
                work.measured += [key for key in drifts if key not in keys]
        except (CorpusError, MissingPackageError):
            raise
        except ModelError as error:
            work.refused[name] = str(error)
    return work


def _following(paper: Paper, series: Series) -> dict[str, Any]:
    """Proxies of earlier checkpoints need earlier checkpoints."""
    return {"follow": True} if paper.follow and len(series.chosen) > 1 else {}


def _sweep(
    series: Series,
    corpora: Sequence[str],
    settings: Settings,
    store: Store,
    work: Work,
    options: dict[str, Any],
) -> None:
    from anisoscope.sweep import plan_specs, run_sweep

    specs = [spec for one in settings.every for spec in plan_specs(series.chosen, corpora, one)]
    specs += [spec for one in settings.last for spec in plan_specs(series.chosen[-1:], corpora, one)]
    swept = run_sweep(specs, store, checkpoints=series.chosen, series=series.run, **options)
    work.measured += swept.measured
    work.stored_before += swept.stored_before
    work.failed += swept.failed


def _follow(
    series: Series, corpora: Sequence[str], settings: dict[str, Any], store: Store, options: dict[str, Any]
) -> Iterator[str]:
    """How rows of the output embedding moved from checkpoint to checkpoint: keys of the units."""
    from anisoscope.drift import follow_drift

    loading = {name: value for name, value in options.items() if name != "batch_size"}
    for corpus in corpora:
        spec = Spec(model=series.chosen[0].model, corpus=corpus, **settings)
        yield from (unit.key for unit in follow_drift(series.chosen, spec, store=store, **loading))


def _train_all(recipes: Mapping[Path, Recipe], device: str, progress: bool) -> None:
    from anisoscope.training import train

    for folder, recipe in recipes.items():
        train(recipe, folder, device=device, progress=progress)


def note_reproduction(paper: Paper, size: str, variant: str | None, output: Path) -> None:
    """Say in the run folder what it reproduces, for whoever cites it."""
    facts = {"paper": paper.name, "size": size, "protocol": paper.protocol(variant)}
    write_file(output / REPRODUCTION, json.dumps(facts, indent=1) + "\n")
