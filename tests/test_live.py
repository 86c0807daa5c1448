"""Measuring in training: what is stored, what it costs, and that training is not disturbed."""

import contextlib
import gc
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anisoscope as an
from anisoscope.conditions import Gate, parse
from anisoscope.corpora import load_corpus
from anisoscope.errors import AnisoscopeError, SpecError
from anisoscope.lab import train_tokenizer
from anisoscope.live import Scope
from anisoscope.metrics import declaration
from anisoscope.presets import PRESETS
from anisoscope.schedules import every, log_spaced
from anisoscope.sinks import JsonlSink

VOCABULARY = 512
STEPS = 6


@pytest.fixture(scope="module")
def tokenizer(corpus_file: Path) -> Any:
    return train_tokenizer(load_corpus(str(corpus_file)), "decoder")


def make_model(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 2048, "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32}
    torch.manual_seed(0)
    # Dropout at its default of 0.1: a random number more or less changes every loss after it.
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **changes)
    return GPT2LMHeadModel(config).train()


def spec_for(corpus_file: Path, **changes: Any) -> an.Spec:
    small = {"tokens": 256, "seq_len": 16, "batch_points": 64, "metrics": ("leading_variance", "loss")}
    return an.Spec(model="tiny", corpus=str(corpus_file), **{**small, **changes})


@dataclass
class Trained:
    losses: list[float]
    weights: dict[str, Tensor]
    random: tuple[Any, ...]
    gradients: list[list[Tensor | None]]
    scope: Scope | None

    def same_bits(self, other: "Trained") -> bool:
        return (
            self.losses == other.losses
            and all(torch.equal(value, other.weights[name]) for name, value in self.weights.items())
            and self.random[:2] == other.random[:2]
            and all(map(np.array_equal, self.random[2:], other.random[2:]))
            and all(
                (one is None and two is None) or (one is not None and two is not None and torch.equal(one, two))
                for mine, theirs in zip(self.gradients, other.gradients, strict=True)
                for one, two in zip(mine, theirs, strict=True)
            )
        )


def states_of_chance() -> tuple[Any, ...]:
    numpy = np.random.get_state()  # noqa: NPY002
    return random.getstate(), numpy[2], torch.get_rng_state().numpy(), numpy[1]


Open = Callable[[nn.Module, torch.optim.Optimizer], Any]


def train(
    open_scope: Open | None,
    *,
    model: nn.Module | None = None,
    prepare: Callable[[nn.Module], nn.Module] = lambda module: module,
    micro_batches: int = 1,
    autocast: torch.dtype | None = None,
    inside_autocast: bool = False,
    steps: int = STEPS,
) -> Trained:
    module = make_model() if model is None else model
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    used = prepare(module)
    optimizer = torch.optim.AdamW([weight for weight in module.parameters() if weight.requires_grad], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=autocast is torch.float16, init_scale=256.0)
    losses, gradients = [], []
    scope = open_scope(used, optimizer) if open_scope else None
    with scope or contextlib.nullcontext():
        for step in range(steps):
            for _ in range(micro_batches):
                ids = torch.randint(0, VOCABULARY, (2, 16))
                with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                    loss = used(input_ids=ids, labels=ids).loss / micro_batches
                    if scope and inside_autocast:
                        scope.step(step)
                scaler.scale(loss).backward()
                losses.append(loss.item())
                if scope and not inside_autocast:
                    scope.step(step)
            gradients.append([None if it.grad is None else it.grad.clone() for it in module.parameters()])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return Trained(losses, weights, states_of_chance(), gradients, scope)


@pytest.fixture
def watch(corpus_file: Path, tokenizer: Any, tmp_path: Path) -> Callable[..., Open]:
    """How to open a Scope that measures every second step, whatever it costs."""

    def with_options(*, spec: an.Spec | None = None, **options: Any) -> Open:
        given = {"tokenizer": tokenizer, "store": tmp_path / "run", "when": every(2), "budget": 1e9, "run": "test"}
        # Made here: the checks of types in tests draw random numbers of Python for the items of a Spec.
        asked = spec or spec_for(corpus_file)
        return lambda model, optimizer: Scope(model, asked, **{**given, **options})

    return with_options


def steps_in(scope: Scope | None) -> list[int]:
    assert scope is not None
    return sorted(set(scope.store.table()["step"].to_pylist()))


@contextlib.contextmanager
def extra_metric(name: str, function: Callable[..., Tensor]) -> Iterator[str]:
    """A metric of a third party, for as long as a test needs it."""
    declare = declaration.metric(
        family="test", needs="moments", version=1, cite="none", null="none", reason="a test", name=name
    )
    declare(function)
    try:
        yield name
    finally:
        del declaration._REGISTRY[name]


# Schedules.


def test_every_and_log_spaced_are_functions_of_the_step() -> None:
    assert [step for step in range(301) if every(100)(step)] == [0, 100, 200, 300]
    due = [step for step in range(1001) if log_spaced(20, until=1000)(step)]
    assert len(due) == 20
    assert due[:5] == [0, 1, 2, 3, 4]
    assert due[-1] == 1000
    gaps = np.diff(np.log(due[8:]))
    assert gaps.max() / gaps.min() < 1.15
    later = [step for step in range(1001, 4000) if log_spaced(20, until=1000)(step)]
    assert np.diff(np.log([1000, *later])) == pytest.approx(gaps[-1], rel=0.05)


def test_wrong_schedules_are_refused() -> None:
    for wrong in (lambda: every(0), lambda: log_spaced(2), lambda: log_spaced(200, until=100)):
        with pytest.raises(SpecError, match="came"):
            wrong()


# What is stored.


def test_a_live_unit_describes_the_weights_after_that_many_updates(watch: Any, corpus_file: Path) -> None:
    kept: dict[int, dict[str, Tensor]] = {}
    model = make_model()
    opening = watch()

    def keeping(module: nn.Module, optimizer: torch.optim.Optimizer) -> Scope:
        kept[0] = {name: value.clone() for name, value in module.state_dict().items()}

        def keep(*_: Any) -> None:
            kept[len(kept)] = {name: value.clone() for name, value in module.state_dict().items()}

        optimizer.register_step_post_hook(keep)
        return opening(module, optimizer)

    scope = train(keeping, model=model).scope
    assert scope is not None
    # The last state, after update 6, is measured on exit.
    assert steps_in(scope) == [0, 2, 4, 6]
    for step in (0, 2, 4, 6):
        model.load_state_dict(kept[step])
        offline = an.measure(
            replace(scope.spec, run=None, weights=None, step=None),
            model=model,
            tokenizer=scope._tokenizer,
            windows=scope.windows,
            progress=False,
        )
        unit = scope.store.get(replace(scope.spec, step=step).key)
        assert unit.spec.run == "test"
        assert unit.spec.weights is None
        assert {row.run for row in unit.records} == {"test"}
        assert {row.step for row in unit.records} == {step}
        assert [row.values for row in unit.records] == [row.values for row in offline.records]
        assert {row.tokens for row in unit.records} == {0 if step == 0 else None}


def test_a_loop_left_before_its_update_has_no_state_after_it(watch: Any) -> None:
    for optimizer_known in (False, True):
        opening = watch(run=f"left-{optimizer_known}")
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            opening(model, optimizer)
            if not optimizer_known
            else watch(run="known", optimizer=optimizer)(model, optimizer) as scope
        ):
            for step in range(10):
                ids = torch.randint(0, VOCABULARY, (2, 16))
                model(ids, labels=ids).loss.backward()
                scope.step(step)
                if step == 3:
                    break
                optimizer.step()
        assert scope.summary["measured"] == 3
        keys = [replace(scope.spec, step=step).key in scope.store for step in range(5)]
        assert keys == [True, False, True, True, False]


def test_the_halves_of_the_probe_share_no_document(watch: Any) -> None:
    scope = watch()(make_model(), None)
    with pytest.raises(SpecError, match="when the Scope is entered"):
        _ = scope.fit_windows
    with scope:
        fit, test = scope.fit_windows, scope.test_windows
        assert not set(fit.documents.flat) & set(test.documents.flat)
        assert len(fit.token_ids) == len(test.token_ids) == 8
        assert len(scope.windows.token_ids) == 16
        texts = load_corpus(scope.spec.corpus).documents
        for half in (fit, test):
            for ids, documents in zip(half.token_ids, half.documents, strict=True):
                for document in set(documents.tolist()):
                    mine = scope._tokenizer.decode(ids[documents == document]).strip()
                    assert mine in texts[document]
        assert not set(fit.sentences.flat) & set(scope.windows.sentences[1::2].flat)
    again = watch()(make_model(), None)
    with again:
        assert np.array_equal(again.windows.token_ids, scope.windows.token_ids)


def test_a_live_unit_names_the_text_of_its_states(watch: Any) -> None:
    scope = train(watch(), steps=1).scope
    assert scope is not None
    text = scope.store.get(replace(scope.spec, step=0).key).provenance["text"]
    assert set(text) == {"states"}
    assert text["states"] == {
        "corpus": scope.spec.corpus,
        "corpus_hash": scope.spec.corpus_hash,
        "windows": len(scope.windows.token_ids),
        "tokens": 256,
        "documents": len(set(scope.windows.documents.ravel().tolist())),
    }


def test_a_corpus_of_one_document_is_cut_in_the_middle(watch: Any, corpus_file: Path, tmp_path: Path) -> None:
    text = tmp_path / "one.txt"
    text.write_text((corpus_file / "document00.txt").read_text())
    with watch(probe=str(text))(make_model(), None) as scope:
        assert scope.spec.corpus == str(text)
        assert "two parts" in scope.windows.notes[-1]
        assert len(scope.test_windows.token_ids) == 8


KILLED = """
import sys, torch, anisoscope as an
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_live import make_model, spec_for, VOCABULARY
from anisoscope.live import Scope
from anisoscope.corpora import load_corpus
from anisoscope.lab import train_tokenizer
tokenizer = train_tokenizer(load_corpus({corpus!r}), "decoder")
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = dict(tokenizer=tokenizer, store={store!r}, when=lambda step: True, budget=1e9, run="killed")
with Scope(model, spec_for(Path({corpus!r})), **options) as scope:
    for step in range({steps}):
        torch.manual_seed(step)
        ids = torch.randint(0, VOCABULARY, (2, 16))
        model(ids, labels=ids).loss.backward()
        scope.step(step)
        optimizer.step()
        optimizer.zero_grad()
print(scope.summary)
"""


def test_a_killed_training_loses_at_most_the_unit_being_written(corpus_file: Path, tmp_path: Path) -> None:
    store = an.Store(tmp_path / "run")
    settings = {"tests": str(Path(__file__).parent), "corpus": str(corpus_file), "store": str(store.folder)}
    first = subprocess.Popen([sys.executable, "-c", KILLED.format(**settings, steps=10_000)])
    deadline = time.monotonic() + 120
    while len(store.keys()) < 5 and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    stored = store.keys()
    before = {key: store.get(key) for key in stored}  # every file is whole
    steps = sorted(unit.spec.step for unit in before.values())
    assert len(steps) >= 5
    assert steps == list(range(len(steps)))
    times = {key: store.finished(key) for key in before}
    total = len(steps) + 2
    code = KILLED.format(**settings, steps=total)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # It trains again from the beginning under the same name: what is stored stays, and the rest is added.
    assert f"'measured': 3, 'stored_before': {len(steps)}" in done.stdout
    assert "other weights" not in done.stderr
    assert {key: store.finished(key) for key in before} == times
    assert sorted(set(store.table()["step"].to_pylist())) == list(range(total + 1))


def test_another_training_under_the_same_name_is_told_so(watch: Any, caplog: pytest.LogCaptureFixture) -> None:
    train(watch())
    assert "other weights" not in caplog.text
    model = make_model()
    nn.init.normal_(model.get_parameter("transformer.wte.weight"))
    scope = train(watch(), model=model).scope
    assert scope is not None
    assert scope.summary["measured"] == 0
    assert scope.summary["stored_before"] == 4
    assert "run= of its own" in caplog.text


def test_steps_that_go_back_are_remarked_upon(watch: Any, caplog: pytest.LogCaptureFixture) -> None:
    with watch()(make_model(), None) as scope:
        for step in (0, 2, 1):
            scope.step(step)
    assert "went back from 2 to 1" in caplog.text


# Presets and budget.


def test_presets_fill_in_what_the_spec_leaves_open(corpus_file: Path, tmp_path: Path) -> None:
    bare = an.Spec(model="tiny")
    costs = []
    for preset in PRESETS:
        spec = Scope(make_model(), bare, store=tmp_path, preset=preset).spec
        costs.append((spec.tokens, len(declaration.find_metrics(spec.metrics))))
    assert costs == sorted(costs)
    assert len(set(costs)) == 4
    assert Scope(make_model(), replace(bare, tokens=99), preset="economy").spec.tokens == 99
    assert Scope(make_model(), bare, preset=None).spec == bare


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "luxury"}, "economy, standard, gradients, full"),
        ({"budget": 0.0}, "share of training time"),
        ({"budget": float("nan")}, "share of training time"),
        ({"batch_size": 0}, "batch_size"),
        ({"stop_if": "leading_variance > 1"}, "a condition reads"),
        ({"stop_if": "twonn[embed] > 1"}, "can never hold"),
        ({"sinks": ["paper"]}, "unknown sink"),
        ({"spec": "unknown"}, "unknown metric"),
        ({"spec": "of two checkpoints"}, "compares two checkpoints"),
        ({"steps": 0}, "at least 1; came 0"),
    ],
)
def test_wrong_requests_are_refused_before_training(options: Any, message: str, watch: Any, corpus_file: Path) -> None:
    if "spec" in options:
        name = {"unknown": "leading_varience", "of two checkpoints": "common_drift"}[options["spec"]]
        options = {"spec": spec_for(corpus_file, metrics=(name,))}
    with pytest.raises(SpecError, match=message):
        watch(**options)(make_model(), None)


def run_with_costs(watch: Any, spec: an.Spec, *, per_cloud: float, steps: int = 401, **options: Any) -> Scope:
    """Steps of one second by a clock that nobody has to wait for; a metric takes `per_cloud` of it."""
    seconds = [0.0]

    def dear(moments: Any) -> Tensor:
        seconds[0] += per_cloud
        return moments.leading

    with extra_metric("dear", dear):
        spec = replace(spec, metrics=("dear",), populations=("all",), sites=("embed",), tokens=64, batch_points=64)
        given = {"when": every(10), "budget": 0.02, "clock": lambda: seconds[0], **options}
        scope = watch(spec=spec, **given)(make_model(), None)
        with scope:
            for step in range(steps):
                scope.step(step)
                seconds[0] += 1.0
    return scope


def test_a_probe_made_ten_times_dearer_stretches_the_schedule(
    watch: Any, corpus_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cheap = run_with_costs(watch, spec_for(corpus_file), per_cloud=0.1, run="cheap")
    assert cheap.summary["measured"] == 41
    assert cheap.summary["skipped"] == 0
    assert "skipped" not in caplog.text
    dear = run_with_costs(watch, spec_for(corpus_file), per_cloud=1.0, run="dear")
    # One second of measuring, at 2 %, needs fifty of training; the first is made on credit.
    stored = [step for step in range(401) if replace(dear.spec, step=step).key in dear.store]
    assert stored == [0, *range(100, 401, 50)]
    assert dear.summary["skipped"] == 41 - len(stored)
    assert dear.summary["measuring_seconds"] == pytest.approx(len(stored))
    assert dear.summary["share"] <= 0.02
    assert "below 2.0% of training time" in caplog.text
    last = dear.store.get(replace(dear.spec, step=400).key)
    assert last.provenance["live"]["skipped"] == 41 - len(stored)
    assert last.provenance["live"]["skipped_since_last"] == 4


def test_with_a_known_end_early_steps_draw_on_the_whole_budget(watch: Any, corpus_file: Path) -> None:
    early = {"when": log_spaced(30, until=2000), "per_cloud": 1.0, "steps": 2001}
    blind = run_with_costs(watch, spec_for(corpus_file), run="blind", **early)
    assert not any(replace(blind.spec, step=step).key in blind.store for step in range(1, 90))
    planned = run_with_costs_planned(watch, corpus_file, **early)
    measured = [step for step in range(2001) if replace(planned.spec, step=step).key in planned.store]
    assert len([step for step in measured if step < 90]) > 8
    assert planned.summary["measured"] == 30
    assert planned.summary["share"] <= 0.02


def run_with_costs_planned(watch: Any, corpus_file: Path, *, steps: int, **options: Any) -> Scope:
    def opening(**given: Any) -> Any:
        return watch(**given, steps=steps - 1)

    return run_with_costs(opening, spec_for(corpus_file), steps=steps, run="planned", **options)


# Gates.


def test_a_gate_closes_after_so_many_measured_steps_in_a_row(watch: Any, caplog: pytest.LogCaptureFixture) -> None:
    scope = watch(stop_if="leading_variance[final_norm] > 0 for 3", when=every(1))(make_model(), None)
    with scope:
        for step in range(4):
            scope.step(step)
            assert scope.should_stop == (step >= 2)
    assert "holds at final_norm: training is to stop" in caplog.text


def test_a_gate_that_warns_does_not_stop(watch: Any, caplog: pytest.LogCaptureFixture) -> None:
    with watch(warn_if="leading_variance[block.*] > 0")(make_model(), None) as scope:
        scope.step(0)
    assert not scope.should_stop
    assert "holds at block.0, block.1: training goes on" in caplog.text


def test_an_interrupted_row_starts_again(corpus_file: Path) -> None:
    gate = Gate(parse("loss[output] > 1 for 2"), stops=True)
    unit_row = an.Record(
        key="", model="", revision=None, step=0, tokens=None, kind="decoder", stack=None, corpus="", population="all",
        site="output", depth=None, metric="loss", metric_version=1, value=2.0, spread=0.0, null=0.0, batches=1,
        points=1, dropped=0, excluded=0, dim=1,
    )  # fmt: skip
    values = (2.0, 0.5, 2.0, math.nan, 2.0, 2.0, 0.0)
    closed = [bool(gate.closes([replace(unit_row, value=value)])) for value in values]
    assert closed == [False, False, False, False, False, True, False]
    assert gate.closes([replace(unit_row, metric="twonn")]) is None


def test_a_gate_that_concerns_nothing_is_remarked_upon(watch: Any, caplog: pytest.LogCaptureFixture) -> None:
    with watch(stop_if="leading_variance[block.77] > 0")(make_model(), None) as scope:
        scope.step(0)
    assert "no measured value is concerned" in caplog.text


def test_stored_steps_count_for_the_gates_of_a_resumed_training(watch: Any) -> None:
    train(watch())
    resumed = train(watch(stop_if="leading_variance[embed] > 0 for 3")).scope
    assert resumed is not None
    assert resumed.summary["measured"] == 0
    assert resumed.should_stop


# Whatever goes wrong stays here.


def test_a_metric_that_fails_is_a_nan_with_its_reason(
    watch: Any, corpus_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Any) -> Tensor:
        raise ZeroDivisionError("of all things")

    alone = train(None)
    with extra_metric("failing", fail):
        watched = train(watch(spec=spec_for(corpus_file, metrics=("failing", "loss"))))
    assert watched.same_bits(alone)
    assert watched.scope is not None
    assert watched.scope.summary["failed"] == 0
    rows = watched.scope.store.table().to_pylist()
    failed = [row for row in rows if row["metric"] == "failing"]
    assert failed
    assert all(
        math.isnan(row["value"]) and row["note"] == "it failed: ZeroDivisionError: of all things" for row in failed
    )
    assert all(math.isfinite(row["value"]) for row in rows if row["metric"] == "loss")
    assert "failing has no value at step 0: it failed" in caplog.text


def fails_from_step_two(breaking: Callable[[], None]) -> Callable[[int], bool]:
    """A schedule of every second step; the first time that a later one is due, something breaks."""

    def is_due(step: int) -> bool:
        if step == 2:
            breaking()
        return step % 2 == 0

    return is_due


def test_a_store_that_breaks_during_training_ends_no_training(
    watch: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def replace_by_a_file() -> None:
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").write_text("no folder")

    alone, watched = train(None), train(watch(sinks=["jsonl"], when=fails_from_step_two(replace_by_a_file)))
    assert watched.same_bits(alone)
    assert watched.scope is not None
    assert watched.scope.summary["measured"] == 1
    assert watched.scope.summary["failed"] == 3
    assert "step 2 was not measured: StoreError" in caplog.text
    assert "test: 3 of 4 measurements FAILED; the first: StoreError: cannot write" in caplog.text


def test_a_disk_that_fills_up_ends_no_training(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train(None)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    watched = train(watch(when=fails_from_step_two(lambda: monkeypatch.setattr(os, "fsync", full))))
    assert watched.same_bits(alone)
    assert watched.scope is not None
    assert watched.scope.summary["failed"] == 3
    assert len(list(Path(watched.scope.store.folder).glob("*.parquet"))) == 1


def test_states_that_are_not_finite_are_a_stored_failure(watch: Any) -> None:
    model = make_model()
    with watch()(model, None) as scope:
        scope.step(0)
        with torch.no_grad():
            model.get_parameter("transformer.wte.weight")[:] = math.nan
        scope.step(2)
    assert steps_in(scope) == [0]
    (failure, *_) = scope.store.failures()
    assert failure["error"] == "StatesError"


def broken(step: int) -> bool:
    raise ValueError(f"of all steps {step}")


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "tokenizer": ({"tokenizer": None}, "a tokenizer is needed"),
    "layout": ({}, "anisoscope measures models that read token ids"),
    "schedule that fails": ({"when": broken}, "of all steps 0"),
    "schedule never due": ({"when": lambda step: step == 7, "steps": 6}, "none of the steps 0 to 6"),
    "probe": ({"probe": "nowhere"}, "no corpus, file or folder is called 'nowhere'"),
    "store": ({"store": "file"}, "cannot write to the run folder"),
    "site": ({"spec": {"sites": ("block.9",)}}, "no site matches 'block.9'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_measured_is_refused_before_the_first_step(
    fault: str, watch: Any, corpus_file: Path, tmp_path: Path
) -> None:
    options, message = FAULTS[fault]
    (tmp_path / "file").write_text("no folder")
    options = options | ({"store": tmp_path / "file"} if fault == "store" else {})
    if "spec" in options:
        options = options | {"spec": spec_for(corpus_file, **options["spec"])}
    model = nn.Sequential(nn.Linear(2, 2)) if fault == "layout" else make_model()
    scope = watch(**options)(model, None)
    with pytest.raises((AnisoscopeError, ValueError), match=message), scope:
        pytest.fail("the body of a Scope that cannot measure was run")
    assert scope.summary["unavailable"]
    assert message in scope.summary["unavailable"]
    assert fault == "store" or scope.store.failures()


def test_a_first_step_with_no_value_at_all_refuses_the_training(watch: Any, corpus_file: Path) -> None:
    def fail(_: Any) -> Tensor:
        raise ZeroDivisionError("of all things")

    with extra_metric("failing", fail):
        scope = watch(spec=spec_for(corpus_file, metrics=("failing",)))(make_model(), None)
        with scope, pytest.raises(AnisoscopeError, match="ZeroDivisionError: of all things"):
            scope.step(0)
    assert not scope.store.keys()
    (failure,) = scope.store.failures()
    assert "of all things" in failure["message"]


def test_metrics_without_a_value_are_named_at_the_end(
    watch: Any, corpus_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Any) -> Tensor:
        raise ZeroDivisionError("of all things")

    with extra_metric("failing", fail):
        train(watch(spec=spec_for(corpus_file, metrics=("failing", "loss"))), steps=1)
    assert "test: metrics without a value: failing (from step 0: it failed: ZeroDivisionError" in caplog.text


def test_a_scope_that_was_not_entered_says_how_to_enter_it(watch: Any) -> None:
    scope = watch()(make_model(), None)
    with pytest.raises(SpecError, match=r"not entered(?s:.*)with Scope\(model, spec, tokenizer=tokenizer\) as scope:"):
        scope.step(0)
    with scope:
        scope.step(0)
    with pytest.raises(SpecError, match="was closed, and measures nothing"):
        scope.step(1)


def test_a_scope_is_used_once(watch: Any) -> None:
    scope = train(watch(), steps=1).scope
    assert scope is not None
    with pytest.raises(SpecError, match="watches one training: make another"), scope:
        pytest.fail("a Scope was entered twice")
    assert scope.summary["training_seconds"] >= 0


def test_relative_paths_are_those_of_where_the_scope_was_made(
    watch: Any, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    for folder in (there, elsewhere):
        folder.mkdir()
    shutil.copytree(corpus_file, there / "text")
    monkeypatch.chdir(there)
    sinks = [JsonlSink("numbers.jsonl"), "jsonl"]
    opening = watch(spec=replace(spec_for(corpus_file), corpus="text"), store=an.Store("run"), sinks=sinks)
    scope = opening(make_model(), None)
    monkeypatch.chdir(elsewhere)
    with scope:
        for step in range(3):
            scope.step(step)
            os.chdir(tmp_path)
    assert not list(elsewhere.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"there", "elsewhere"}
    assert {path.name for path in there.iterdir()} == {"text", "run", "numbers.jsonl"}
    assert steps_in(scope) == [0, 2]
    assert len((there / "numbers.jsonl").read_text().splitlines()) == 2
    assert scope.spec.corpus == "text"


def test_an_exception_of_the_training_passes_and_nothing_is_left(watch: Any) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = watch(optimizer=optimizer)(model, optimizer)

    def break_off() -> None:
        with scope:
            scope.step(0)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        break_off()
    assert steps_in(scope) == [0]
    assert not optimizer._optimizer_step_post_hooks


def test_memory_stays_flat_over_a_thousand_steps(watch: Any, corpus_file: Path) -> None:
    spec = spec_for(corpus_file, tokens=32, batch_points=16, metrics=("leading_variance",), sites=("embed", "block.0"))
    sizes = {}
    with watch(spec=spec, when=every(10), sinks=["jsonl"])(make_model(), None) as scope:
        for step in range(1001):
            scope.step(step)
            if step in (500, 1000):
                gc.collect()
                tensors = sum(issubclass(type(item), Tensor) for item in gc.get_objects())
                sizes[step] = tensors, sys.getallocatedblocks()
    assert scope.summary["measured"] == 101
    assert sizes[1000][0] == sizes[500][0]
    grown = (sizes[1000][1] - sizes[500][1]) / 50
    keys = sorted(scope.store.keys())
    before = sys.getallocatedblocks()
    kept = [scope.store.get(key) for key in keys[:50]]
    # What is left of a measurement is far less than its unit would be.
    assert grown < 0.05 * (sys.getallocatedblocks() - before) / len(kept)
    lines = (Path(scope.store.folder) / "geometry.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(0, 1001, 10))
