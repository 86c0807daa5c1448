"""A job: one checkpoint and everything that is to be measured on it, wherever it runs.

Jobs are idempotent: they skip what the store has, and a unit is stored as soon as it is made. Whatever is killed costs
the unit it was working on.
"""

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anisoscope.corpora import Corpus, load_corpus
from anisoscope.errors import ModelError, SpecError
from anisoscope.fetch import Fetched, Fetching, fetch
from anisoscope.hub import is_passing
from anisoscope.records import Checkpoint, Spec, Unit
from anisoscope.store import Store

PAUSE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """One unit to make."""

    spec: Spec
    """Resolved: its key is known."""
    corpus: str
    """As the user wrote it, to be read where the job runs."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One checkpoint and what is to be measured on it."""

    checkpoint: Checkpoint
    tasks: tuple[Task, ...]


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What every job of a sweep is told."""

    store: Path
    plan: str
    """Name of the plan's file: a host that sees it shares the store."""
    folder: Path
    """Working folder, which relative names are about."""
    fetching: Fetching
    max_retries: int
    measuring: dict[str, Any] = field(default_factory=dict)
    """Device, batch size and whatever else changes no number."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a unit."""

    spec: Spec
    error: str | None = None
    noted: bool = False
    """Whether the store has the error already, as it was raised."""
    unit: Unit | None = None
    """Only where the store could not be reached from where it was made."""


@functools.lru_cache(maxsize=4)
def read_corpus(name: str) -> Corpus:
    """The corpus, read once in a process."""
    return load_corpus(name)


@functools.lru_cache(maxsize=4)
def open_store(folder: Path) -> Store:
    """The store of a sweep; one in a process, which remembers what it has read."""
    return Store(folder)


def run_job(job: Job, orders: Orders, fetched: Fetched | None = None) -> list[Outcome]:
    """Measure one checkpoint, wherever this runs: on this host, on a worker, on a node far away."""
    shared = (orders.store / orders.plan).exists()
    store = open_store(orders.store)
    if orders.folder.is_dir():
        os.chdir(orders.folder)
    outcomes = [Outcome(spec=task.spec) for task in job.tasks if shared and task.spec.key in store]
    todo = [task for task in job.tasks if not (shared and task.spec.key in store)]
    if not todo:
        return outcomes
    with _files(job.checkpoint, orders.fetching, fetched) as files:
        loaded = _Loaded(job.checkpoint, orders, files)
        for task in todo:
            with store.working_on(task.spec.key) if shared else contextlib.nullcontext():
                outcomes.append(_make_unit(task, loaded, orders, store if shared else None))
    return outcomes


@contextlib.contextmanager
def _files(checkpoint: Checkpoint, how: Fetching, fetched: Fetched | None) -> Iterator[Fetched | Exception]:
    """The files of a checkpoint, fetched now where they were not fetched before; or why they cannot be had."""
    try:
        gone = fetched is None or (fetched.folder is not None and not fetched.folder.is_dir())
        here: Fetched | Exception = fetch(checkpoint, how) if gone or fetched is None else fetched
    except Exception as error:
        here = error
    try:
        yield here
    finally:
        if isinstance(here, Fetched):
            here.release()


class _Loaded:
    """A checkpoint's model, loaded when the first task needs it and kept for the others."""

    def __init__(self, checkpoint: Checkpoint, orders: Orders, files: Fetched | Exception) -> None:
        self.checkpoint, self.orders, self.files = checkpoint, orders, files
        self._model: Any = None
        self._dtype: str | None = None

    def model_for(self, spec: Spec) -> Any:
        if isinstance(self.files, Exception):
            raise self.files
        if self._model is None or self._dtype != spec.dtype:
            from anisoscope.models import load_model

            named = ("device", "device_map", "trust_remote_code", "allow_pickle")
            options = {name: value for name, value in self.orders.measuring.items() if name in named}
            self._model, self._dtype = None, spec.dtype
            self._model = load_model(
                spec.model,
                revision=spec.revision,
                weights=spec.weights,
                folder=self.files.folder,
                dtype=spec.dtype,
                blocks=spec.blocks,
                final_norm=spec.final_norm,
                **options,
            )
        return self._model


def _make_unit(task: Task, loaded: _Loaded, orders: Orders, store: Store | None) -> Outcome:
    """Measure and store a unit; a failure that may pass is tried again, and one that stays is noted."""
    from anisoscope.walk import measure

    options = {name: orders.measuring[name] for name in ("batch_size", "progress") if name in orders.measuring}
    for attempt in range(orders.max_retries + 1):
        try:
            model = loaded.model_for(task.spec)
            unit = measure(
                task.spec,
                model=model,
                corpus=read_corpus(task.corpus),
                checkpoint=loaded.checkpoint,
                past=_past_of(task.spec, orders),
                **options,
            )
            if store is not None:
                store.put(unit)
            return Outcome(spec=task.spec, unit=None if store is not None else unit)
        except Exception as error:
            if attempt == orders.max_retries or not _may_pass(error):
                if store is not None:
                    store.put_failure(task.spec, error)
                return Outcome(spec=task.spec, error=f"{type(error).__name__}: {error}", noted=store is not None)
            time.sleep(PAUSE_SECONDS * 2**attempt)
    raise AssertionError("the last attempt returns")


def _past_of(spec: Spec, orders: Orders) -> Any:
    """The proxies of earlier units that a Spec names; they are in the store of the sweep."""
    if spec.proxy_from is None:
        return None
    from anisoscope.past import read_past, read_reference

    return read_past(open_store(orders.store), read_reference(spec.proxy_from))


def _may_pass(error: BaseException) -> bool:
    """Whether trying again may help: the network, a disk, memory that others use; not a wrong request or model."""
    import torch

    if isinstance(error, ModelError | SpecError):
        return error.__cause__ is not None and _may_pass(error.__cause__)
    return is_passing(error) or isinstance(error, OSError | MemoryError | torch.OutOfMemoryError)
