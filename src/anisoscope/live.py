"""Scope: the walk inside a training, on a fixed probe text. Training goes on as if nobody had looked.

A live unit of step s describes the weights after s updates. Its Spec has no hash of the weights, which would cost more
than measuring them: the name of the run and the step say which they are.
"""

import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anisoscope.conditions import Gate, parse
from anisoscope.corpora import Corpus, load_corpus
from anisoscope.errors import AnisoscopeError, ModelError, SpecError, StoreError
from anisoscope.metrics import find_metrics
from anisoscope.models import Model, adopt_model
from anisoscope.past import Past, choose_past, read_past
from anisoscope.presets import fill_in
from anisoscope.probes import Probe, draw_probe
from anisoscope.records import Checkpoint, Record, Spec, Unit
from anisoscope.schedules import Ledger, When, log_spaced
from anisoscope.sinks import Board, find_sinks
from anisoscope.store import Store
from anisoscope.text import Windows
from anisoscope.undisturbed import fingerprint, same_chance, undisturbed, unwrap, updates_of, why_unreadable
from anisoscope.validation import check_setting
from anisoscope.walk import check_single, check_sites, measure, resolve

log = logging.getLogger("anisoscope.live")


class Scope:
    """Watches a model in training.

    with Scope(model, spec, tokenizer=tokenizer, store="runs/live", when=every(100)) as scope:
        for step, batch in enumerate(loader):
            model(**batch).loss.backward()
            scope.step(step)
            optimizer.step()
            optimizer.zero_grad()
    """

    @same_chance()
    def __init__(
        self,
        model: nn.Module,
        spec: Spec,
        *,
        tokenizer: Any = None,
        store: str | os.PathLike[str] | Store = "runs/live",
        when: When | None = None,
        probe: str | Corpus | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        run: str | None = None,
        preset: str | None = "standard",
        budget: float = 0.02,
        sinks: Any = (),
        stop_if: str | Iterable[str] | None = None,
        warn_if: str | Iterable[str] | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Wrong requests are refused here, or when the Scope is entered; failures during training are recorded.

        `probe` names a corpus, or is one; without it, it is that of the Spec.
        `run` names the training: give the same name when it is resumed, and steps that are stored are not measured
        again. `preset` fills in what the Spec leaves at its defaults; None takes the Spec as it is.
        `budget` is the share of training time that measuring may take, `steps` the number of updates that are planned.
        `batch_size` is the number of windows in a pass of a measurement; when memory runs out it is halved.
        `stop_if` sets `should_stop` and `warn_if` only warns, as soon as a condition holds.
        Relative paths are those of the working directory at this moment, wherever the process goes later.
        """
        if not budget > 0:
            raise SpecError(f"budget is a share of training time, above 0 (0.02 is 2 %); came {budget}")
        check_setting("batch_size", batch_size)
        if steps is not None and steps < 1:
            raise SpecError(f"steps is the number of updates that are planned, at least 1; came {steps}")
        self.spec = fill_in(spec, preset)
        self.run = run or spec.run or f"{spec.model}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        self._directory = Path.cwd()
        folder = Path(store.folder if isinstance(store, Store) else store)
        self.store = store if isinstance(store, Store) and folder.is_absolute() else Store(folder.absolute())
        self.when = when or log_spaced(300)
        self.gates = [Gate(parse(text), stops=True) for text in _as_list(stop_if)]
        self.gates += [Gate(parse(text), stops=False) for text in _as_list(warn_if)]
        check_single(self.spec)
        names = [item if isinstance(item, str) else item[0] for item in self.spec.metrics]
        measured = {item.name for item in find_metrics(names, gride_scales=self.spec.gride_scales)}
        for gate in self.gates:
            if gate.condition.metric not in measured:
                raise SpecError(f"{gate.condition} can never hold: measured are {', '.join(sorted(measured))}")
        self.should_stop = False
        self.unavailable: str | None = None
        """Why nothing can be measured, where that is so."""
        self._given, self._tokenizer, self._corpus, self._optimizer = model, tokenizer, probe, optimizer
        self._board = Board(find_sinks(sinks, Path(self.store.folder)))
        self._model: Model | None = None
        self._probe: Probe | None = None
        self._clock, self._ledger, self._steps = clock, Ledger(budget, clock), steps
        self._batch_size = batch_size
        self._seen: int | None = None
        self._tokens: int | None = None
        self._done: int | None = None
        self._opened = self._open = False
        self._changes = self._changes_then = 0
        self._handle: Any = None
        self._setup = 0.0
        self._counts = dict.fromkeys(("measured", "stored_before", "skipped", "failed"), 0)
        self._skipped_since = 0
        self._said: set[str] = set()
        # Texts: an error keeps what its frames held, the memory of a failed measurement included.
        self._errors: list[str] = []
        self._without_value: dict[str, str] = {}
        self._kept: dict[int, str] = {}

    @property
    def windows(self) -> Windows:
        """The windows of the probe, both halves in turn."""
        return self._drawn().windows

    @property
    def fit_windows(self) -> Windows:
        """The half of the probe to fit on; it shares no document with the other."""
        return self._drawn().fit

    @property
    def test_windows(self) -> Windows:
        """The half of the probe to test on."""
        return self._drawn().test

    def _drawn(self) -> Probe:
        if self._probe is None:
            raise SpecError("there is no probe: it is drawn when the Scope is entered, by the process that measures")
        return self._probe

    @property
    def summary(self) -> dict[str, Any]:
        """What was done and what it cost, in seconds; `share` is of the time that training took by itself."""
        spent, trained = self._ledger.spent, self._ledger.trained
        return {
            "run": self.run,
            **self._counts,
            "setup_seconds": self._setup,
            "measuring_seconds": spent,
            "training_seconds": trained,
            "share": spent / trained if trained > 0 else math.nan,
            "budget": self._ledger.budget,
            "unavailable": self.unavailable,
        }

    def __enter__(self) -> "Scope":
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        # A training that broke off may be in the middle of an update.
        self.close(measure_last=kind is None)

    @same_chance()
    def open(self) -> None:
        """Find the model's layout and draw the probe. What cannot be measured is refused here, before any step."""
        if self._opened:
            raise SpecError("a Scope watches one training: make another with Scope(...) for the next one")
        self._opened = True
        start = self._clock()
        error: Exception | None = None
        # Every process sees this alike, and sharded weights may not take part in the exchange below.
        unreadable = why_unreadable(unwrap(self._given))
        if unreadable is not None:
            error = ModelError(f"live geometry is unavailable: {unreadable}, and a part of the weights gives no number")
        elif _rank() == 0:
            try:
                self._prepare()
            except Exception as found:
                error = found
        if error is not None:
            self.unavailable = f"{type(error).__name__}: {error}"
            if _rank() == 0:
                self._put_failure(replace(self.spec, run=self.run), error)
        if unreadable is None and _agree(error is not None, self._given) and error is None:
            error = ModelError("live geometry is unavailable: the first process, which measures, raised the reason")
        if error is not None:
            raise error
        if self._optimizer is not None:
            self._handle = self._optimizer.register_step_post_hook(self._count_update)
        self._open = True
        self._setup = self._clock() - start
        self._ledger.begun = self._clock()

    def _prepare(self) -> None:
        """Everything that must succeed before a step can be measured."""
        _check_writable(Path(self.store.folder))
        self.when(0)
        self._ledger.plan(self.when, self._steps)
        if self._ledger.steps and not self._ledger.planned:
            raise SpecError(f"the schedule is due at none of the steps 0 to {self._steps}: choose another when=")
        self._adopt()

    def _adopt(self) -> None:
        module = unwrap(self._given)
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise SpecError(
                "a tokenizer is needed to read the probe: Scope(..., tokenizer=tokenizer), or "
                "Trainer(..., processing_class=tokenizer)"
            )
        spec = replace(self.spec, run=self.run, dtype=_dtype_of(module), seq_len=_fitting(self.spec.seq_len, module))
        with chdir(self._directory):
            corpus = self._corpus if isinstance(self._corpus, Corpus) else load_corpus(self._corpus or spec.corpus)
        with undisturbed(module):
            hand: dict[str, Any] = {"blocks": spec.blocks, "final_norm": spec.final_norm}
            model = adopt_model(module, tokenizer, name=spec.model, in_training=True, **hand)
        self._probe = draw_probe(spec, tokenizer, corpus)
        self.spec = resolve(spec, corpus=corpus, model=model)
        check_sites(self.spec, model)
        self._model = model
        self._changes = updates_of(module)

    def _count_update(self, *_: Any) -> None:
        self._changes += 1

    def step(self, step: int, *, tokens: int | None = None) -> None:
        """Tell that `step` updates were made so far, and measure if that is due.

        In a plain loop: after `backward()`, before `optimizer.step()`, with 0 before the first update. Calls with the
        same number, as in gradient accumulation, count once. `tokens` is how many the training has seen.
        The first call raises where nothing at all could be measured; later failures are recorded and training goes on.
        """
        if not self._open:
            state = "was closed" if self._opened else "was not entered"
            raise SpecError(
                f"this Scope {state}, and measures nothing: call step() inside\n"
                "    with Scope(model, spec, tokenizer=tokenizer) as scope:\n"
                "        ...\n"
                "        scope.step(step)"
            )
        due = first = False
        with self._harmless(f"step {step} was not measured"):
            first = self._seen is None
            again = step == self._seen
            if self._seen is not None and step < self._seen:
                self._say_once(f"steps went back from {self._seen} to {step}: count updates from the beginning")
            self._note_arrival(step, tokens)
            due = not again and (first or self.when(step))
            if due and self._model is not None:
                self._ledger.due += 1
                self._visit(step, tokens, certain=first)
        if first and self._errors:
            self.close(measure_last=False)
            raise AnisoscopeError(f"nothing can be measured, as the first step shows: {self._errors[0]}")
        if due and any(gate.stops for gate in self.gates):
            with self._harmless("the processes could not agree whether to stop"):
                self.should_stop = _agree(self.should_stop, self._given)

    def _note_arrival(self, step: int, tokens: int | None) -> None:
        self._seen, self._tokens = step, tokens
        if self._model is not None:
            self._ledger.arrive(step)
            self._changes_then = self._updates_now()

    def _updates_now(self) -> int:
        return self._changes if self._optimizer is not None or self._model is None else updates_of(self._model.module)

    @same_chance()
    def close(self, step: int | None = None, *, measure_last: bool = True) -> None:
        """Measure the last state, whether or not it is due, and end. `step` is the number of updates made, if known."""
        if not self._open:
            return
        self._open = False
        with self._harmless("the last state was not measured"):
            if measure_last and self._seen is not None and self._model is not None:
                if step is None:
                    step = self._seen + int(self._updates_now() != self._changes_then)
                self._visit(step, self._tokens if step == self._seen else None, certain=True)
        if self._handle is not None:
            self._handle.remove()
        with self._harmless("a sink was not closed"):
            for error in self._board.close() if self._counts["measured"] else ():
                self._say_once(f"a sink failed: {type(error).__name__}: {error}")
        self._ledger.ended = self._clock()
        if self._model is not None:
            done = self.summary
            log.info(
                "%s: %d steps measured, %d skipped for the budget, %d failed; %.1f s, %.1f %% of training",
                *(done[name] for name in ("run", "measured", "skipped", "failed", "measuring_seconds")),
                100 * done["share"],
            )
            if self._errors:
                log.error(
                    "%s: %d of %d measurements FAILED; the first: %s. %s holds a .failed.json for each, where it "
                    "could be written; saved checkpoints can still be measured with `anisoscope sweep`",
                    *(self.run, done["failed"], done["failed"] + done["measured"], self._errors[0], self.store.folder),
                )
            if self._without_value:
                log.error("%s: metrics without a value: %s", self.run, "; ".join(self._without_value.values()))
        self._model = None

    # Stores and sinks may draw random numbers too.
    @same_chance()
    def _visit(self, step: int, tokens: int | None, *, certain: bool) -> None:
        """Measure a step, unless it is stored already or the budget forbids it."""
        if step == self._done:
            return
        spec = replace(self.spec, step=step)
        if spec.key in self.store:
            self._counts["stored_before"] += 1
            self._recall(self.store.get(spec.key))
        elif certain or self._ledger.allows():
            self._measure(spec, tokens)
        else:
            self._counts["skipped"] += 1
            self._skipped_since += 1
            self._say_once(
                f"due steps are skipped to keep measuring below {self._ledger.budget:.1%} of training time "
                f"(one takes {self._ledger.last_cost:.3g} s); the summary and every unit say how many",
                about="budget",
            )
            return
        self._done = step

    def _measure(self, spec: Spec, tokens: int | None) -> None:
        assert self._model is not None
        assert spec.step is not None
        start = self._now()
        try:
            with undisturbed(self._model.module):
                unit = self._unit(spec, 0 if spec.step == 0 else tokens)
            reasons = unit.provenance.get("failed", {})
            if reasons and not self._counts["measured"] and all(math.isnan(row.value) for row in unit.records):
                raise ModelError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
            self.store.put(unit)
            self._remember(unit)
            self._counts["measured"] += 1
            self._skipped_since = 0
        except Exception as error:
            self._counts["failed"] += 1
            self._errors.append(f"{type(error).__name__}: {error}")
            log.error("step %d was not measured: %s: %s", spec.step, type(error).__name__, error)
            self._put_failure(spec, error)
        else:
            with self._harmless(f"step {spec.step} was stored but not shown"):
                self._show(spec.step, unit, self._now() - start)
        finally:
            self._ledger.charge(self._now() - start)

    def _put_failure(self, spec: Spec, error: Exception) -> None:
        # Where the store is what failed, the log has said so.
        with suppress(Exception):
            self.store.put_failure(spec, error)

    def _show(self, step: int, unit: Unit, seconds: float) -> None:
        for name, reason in unit.provenance.get("failed", {}).items():
            self._without_value.setdefault(name, f"{name} (from step {step}: {reason})")
            self._say_once(f"{name} has no value at step {step}: {reason}", about=f"{name} fails")
        for error in self._board.write(step, unit.records, seconds):
            self._say_once(f"a sink failed: {type(error).__name__}: {error}")
        self._check_gates(unit.records)

    def _unit(self, spec: Spec, tokens: int | None) -> Unit:
        assert self._model is not None
        probe = self._drawn()
        unit = measure(
            spec,
            model=self._model,
            corpus=probe.corpus,
            windows=probe.windows,
            probe=probe,
            past=self._past_of(spec.step),
            checkpoint=Checkpoint(model=spec.model, revision=spec.revision, step=spec.step, tokens=tokens),
            batch_size=self._batch_size,
            progress=False,
            forgiving=True,
        )
        live = {
            "fingerprint": fingerprint(self._model.module),
            "budget": self._ledger.budget,
            "measuring_seconds": round(self._ledger.spent, 3),
            "training_seconds": round(self._ledger.trained, 3),
            "skipped": self._counts["skipped"],
            "skipped_since_last": self._skipped_since,
        }
        return replace(unit, provenance={**unit.provenance, "live": live})

    def _remember(self, unit: Unit) -> None:
        """Note which steps have tangent proxies in the store: later gradients are held against them."""
        if unit.spec.step is not None and any(name.startswith("proxy/") for name in unit.attachments):
            self._kept[unit.spec.step] = unit.key

    def _past_of(self, step: int | None) -> Past | None:
        steps = [known for known in sorted(self._kept) if step is not None and known < step]
        chosen = choose_past([*steps, step], len(steps), self._steps)
        keys = {fit: [self._kept[steps[place]] for place in places] for fit, places in chosen.items()}
        return read_past(self.store, keys) if keys else None

    def _recall(self, unit: Unit) -> None:
        """A stored step counts for the gates; weights that are not those it was measured on are worth a word."""
        assert self._model is not None
        self._remember(unit)
        with undisturbed(self._model.module):
            here = fingerprint(self._model.module)
        if unit.provenance.get("live", {}).get("fingerprint") != here:
            self._say_once(
                f"step {unit.spec.step} of run {self.run!r} is stored already, with other weights; what is stored "
                "stays. Give a new training a run= of its own",
                about="other weights",
            )
        self._check_gates(unit.records)

    def _check_gates(self, records: Iterable[Record]) -> None:
        rows = list(records)
        for gate in self.gates:
            where = gate.closes(rows)
            if where is None:
                self._say_once(f"no measured value is concerned by {gate.condition}")
            elif where:
                self.should_stop |= gate.stops
                action = "training is to stop" if gate.stops else "training goes on"
                self._say_once(f"{gate.condition} holds at {', '.join(where)}: {action}")

    def _now(self) -> float:
        """The time when all that was asked of the GPU is done."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return self._clock()

    def _say_once(self, text: str, about: str | None = None) -> None:
        if (about or text) not in self._said:
            self._said.add(about or text)
            log.warning("%s", text)

    @contextmanager
    def _harmless(self, consequence: str) -> Iterator[None]:
        """Nothing that goes wrong here reaches the training."""
        try:
            yield
        except Exception as error:
            log.error("%s: %s: %s", consequence, type(error).__name__, error)


def _check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(
            f"cannot write to the run folder {folder}: {error.strerror or error}. Give another with store="
        ) from error


def _as_list(conditions: str | Iterable[str] | None) -> list[str]:
    return [conditions] if isinstance(conditions, str) else list(conditions or ())


def _dtype_of(module: nn.Module) -> str:
    floats = (parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    return str(next(floats, torch.float32)).removeprefix("torch.")


def _fitting(seq_len: int, module: nn.Module) -> int:
    """The default length, or what a shorter model has positions for; a length that was asked for is not changed."""
    positions = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return min(seq_len, positions) if positions and seq_len == Spec.seq_len else seq_len


def _rank() -> int:
    return torch.distributed.get_rank() if _is_distributed() else 0


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _agree(stop: bool, module: nn.Module) -> bool:
    """What the measuring process decided, in every process: one that stopped alone would leave the others waiting."""
    if not _is_distributed():
        return stop
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    decided = torch.tensor([int(stop)], device=device)
    torch.distributed.broadcast(decided, src=0)
    return bool(decided.item())
