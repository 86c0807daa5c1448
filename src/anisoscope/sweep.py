"""Many checkpoints: plan, verify, and measure what is not stored yet, in the hands of an engine."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anisoscope.checkpoints import inspect_all
from anisoscope.engines import Resources, find_engine
from anisoscope.errors import ModelError, SpecError
from anisoscope.fetch import Fetching, default_scratch
from anisoscope.jobs import Job, Orders, Outcome, Task, read_corpus
from anisoscope.past import choose_past, write_reference
from anisoscope.records import Checkpoint, Record, Site, Spec, Unit
from anisoscope.revisions import place_in_training, training_order
from anisoscope.status import watch
from anisoscope.store import PLACE, Store
from anisoscope.validation import check_settings
from anisoscope.walk import resolve

# What is measured again against the proxies of earlier checkpoints.
AGAINST_PAST = ("tangent_energy", "tangent_gain", "tangent_excess", "normal_ratio", "subspace_distance")
FOLLOWED = (*AGAINST_PAST, "trajectory_variance")


@dataclass(frozen=True, kw_only=True)
class Swept:
    """What a sweep did: keys of units."""

    measured: tuple[str, ...]
    stored_before: tuple[str, ...]
    failed: tuple[str, ...]
    findings: tuple[str, ...] = ()
    """What verification found, where it was told to go on."""


def plan_specs(checkpoints: Sequence[Checkpoint], corpora: Sequence[str], settings: dict[str, Any]) -> list[Spec]:
    """The grid: every checkpoint with every corpus."""
    return [
        Spec(**settings | {"model": item.model, "revision": item.revision, "step": item.step, "corpus": corpus})
        for item in checkpoints
        for corpus in corpora
    ]


def run_sweep(
    specs: Sequence[Spec],
    store: Store | str | os.PathLike[str],
    engine: str = "local",
    *,
    checkpoints: Sequence[Checkpoint] = (),
    series: Sequence[Checkpoint] = (),
    workers: int | None = None,
    gpus_per_job: float = 0.0,
    cpus_per_job: int = 1,
    max_retries: int = 2,
    verify: bool = True,
    keep_cache: bool = False,
    downloads: int = 2,
    scratch: Path | None = None,
    engine_options: dict[str, Any] | None = None,
    progress: bool = True,
    follow: bool = False,
    **measuring: Any,
) -> Swept:
    """Measure every Spec that the store does not hold yet.

    `follow`: then also hold the gradients of each checkpoint against the tangent proxies of earlier ones, and say how
    far token types moved.

    `checkpoints` says more about the checkpoints than their names do, and `series` names the whole runs they were
    chosen from; both may be left out. `measuring` goes to `measure`: device, batch_size, trust_remote_code ...
    """
    check_settings({"engine": engine, "workers": workers, "gpus_per_job": gpus_per_job, "cpus_per_job": cpus_per_job})
    check_settings({"max_retries": max_retries, "downloads": downloads, "batch_size": measuring.get("batch_size")})
    store = store if isinstance(store, Store) else Store(store)
    run_engine = find_engine(engine)
    if engine != "local" and any(spec.corpus == "-" for spec in specs):
        raise SpecError("standard input can be read once, by the local engine: give other engines a file")
    store.check_writable()
    named = {(item.model, item.revision): item for item in checkpoints}
    wanted = [named.get(place) or _describe(*place) for place in dict.fromkeys((s.model, s.revision) for s in specs)]
    verified = inspect_all(wanted, series=series, progress=progress)
    if verify:
        verified.check()
    first = plan_jobs(specs, verified.checkpoints)
    if follow and not any(name in FOLLOWED for job in first for task in job.tasks for name, _ in task.spec.metrics):
        raise SpecError("there is nothing to follow: it takes metrics of the families alignment or pinning")
    jobs = [*first, *(plan_following(first) if follow else [])]
    keys = [task.spec.key for job in jobs for task in job.tasks]
    plan = store.plan([_entry(task.spec) for job in jobs for task in job.tasks])
    before = store.keys() & set(keys)
    todo = [_without(job, before) for job in jobs if any(task.spec.key not in before for task in job.tasks)]
    orders = Orders(
        store=store.folder.absolute(),
        plan=plan.name,
        folder=Path.cwd(),
        fetching=Fetching(
            scratch=scratch or default_scratch(),
            run=hashlib.sha256(str(store.folder.absolute()).encode()).hexdigest()[:12],
            keep=keep_cache,
            at_once=downloads,
            retries=max_retries,
        ),
        max_retries=max_retries,
        measuring={**measuring, "progress": False},
    )
    resources = Resources(workers=workers, gpus=gpus_per_job, cpus=cpus_per_job, options=dict(engine_options or {}))
    with watch(store, keys, shown=progress) as announce:
        # Those that need others come after all of them.
        for wave in ([job for job in todo if _needs_others(job) is needs] for needs in (False, True)):
            for outcome in run_engine(wave, orders, resources) if wave else ():
                _settle(store, outcome)
                announce(outcome.spec, outcome.error)
    if follow:
        follow_types(store, first)
    failed = {row["key"] for row in store.failures()} & set(keys)
    done = store.keys() & set(keys)
    return Swept(
        measured=tuple(key for key in keys if key in done - before),
        stored_before=tuple(key for key in keys if key in before),
        failed=tuple(key for key in keys if key in failed),
        findings=verified.findings,
    )


def _describe(model: str, revision: str | None) -> Checkpoint:
    place = place_in_training(model, revision)
    return Checkpoint(model=model, revision=revision, stage=place.stage, step=place.step, tokens=place.tokens)


def plan_jobs(specs: Sequence[Spec], checkpoints: Sequence[Checkpoint]) -> list[Job]:
    """One job per checkpoint, in their order, with every Spec resolved."""
    known = {(item.model, item.revision): item for item in checkpoints}
    tasks: dict[tuple[str, str | None], dict[str, Task]] = {place: {} for place in known}
    for spec in specs:
        place = (spec.model, spec.revision)
        pinned = replace(spec, weights=spec.weights or known[place].commit)
        resolved = resolve(pinned, corpus=read_corpus(spec.corpus))
        # Two Specs that come to the same are one unit.
        tasks[place][resolved.key] = Task(spec=resolved, corpus=spec.corpus)
    return [Job(checkpoint=item, tasks=tuple(tasks[place].values())) for place, item in known.items()]


def plan_following(jobs: Sequence[Job]) -> list[Job]:
    """A job more for each checkpoint but the first: its gradients against the proxies of those before it."""
    found = []
    for members in _series(jobs):
        steps, keys = [item.step for item, _ in members], [task.spec.key for _, task in members]
        last = max((step for step in steps if step is not None), default=None)
        for place, (checkpoint, task) in enumerate(members):
            chosen = choose_past(steps[: place + 1], place, last)
            metrics = tuple(item for item in task.spec.metrics if item[0] in AGAINST_PAST)
            if not chosen or not metrics:
                continue
            named = write_reference({fit: [keys[one] for one in places] for fit, places in chosen.items()})
            spec = replace(task.spec, proxy_from=named, metrics=metrics)
            found.append(Job(checkpoint=checkpoint, tasks=(Task(spec=spec, corpus=task.corpus),)))
    return found


def _series(jobs: Sequence[Job]) -> list[list[tuple[Checkpoint, Task]]]:
    """The checkpoints of each training, in its order, measured in the same way on the same text."""
    series: dict[tuple[str, str, str], list[tuple[Checkpoint, Task]]] = {}
    for job in jobs:
        for task in job.tasks:
            settings = replace(task.spec, revision=None, weights=None, step=None).key
            series.setdefault((task.spec.model, task.corpus, settings), []).append((job.checkpoint, task))
    for members in series.values():
        members.sort(key=lambda item: training_order(item[0].stage, item[0].step, item[0].revision))
    return list(series.values())


def follow_types(store: Store, jobs: Sequence[Job]) -> list[Unit]:
    """How far token types moved over each training, from the centroids that its units keep: a unit more for each."""
    from anisoscope.metrics import all_metrics
    from anisoscope.pinning import follow

    made = []
    for members in _series(jobs):
        there = [(checkpoint, task) for checkpoint, task in members if task.spec.key in store]
        if len(there) < 2:
            continue
        keys, (checkpoint, task) = [item.spec.key for _, item in there], there[-1]
        metric = all_metrics()["trajectory_variance"]
        named = replace(task.spec, proxy_from=f"trajectory={','.join(keys)}", metrics=((metric.name, metric.version),))
        last = store.get(keys[-1])
        sites = {Site(name=row.site, stack=row.stack, depth=row.depth) for row in last.records}
        rows = list(follow([store.attachment(key) for key in keys], sites=sites, seed=task.spec.seed))
        if not rows or named.key in store:
            continue
        records = [
            Record.from_estimate(
                row.answer,
                spec=named,
                checkpoint=checkpoint,
                kind=last.records[0].kind,
                site=row.site,
                population=row.population,
                metric=metric.name,
                metric_version=metric.version,
                **row.columns,
            )
            for row in rows
        ]
        made.append(Unit(spec=named, provenance={"seconds": 0.0, "notes": []}, records=tuple(records)))
        store.put(made[-1])
    return made


def _needs_others(job: Job) -> bool:
    return any(task.spec.proxy_from is not None for task in job.tasks)


def _entry(spec: Spec) -> dict[str, Any]:
    return {"key": spec.key, "request": spec.request(), **{name: getattr(spec, name) for name in PLACE}}


def _without(job: Job, keys: set[str]) -> Job:
    return replace(job, tasks=tuple(task for task in job.tasks if task.spec.key not in keys))


def _settle(store: Store, outcome: Outcome) -> None:
    """Store here what could not be stored where it was made."""
    if outcome.unit is not None:
        store.put(outcome.unit)
    elif outcome.error is not None and not outcome.noted and outcome.spec.key not in store:
        store.put_failure(outcome.spec, ModelError(outcome.error))
