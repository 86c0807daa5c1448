"""Live measuring under the Trainer of transformers; what sinks show."""

import json
import math
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_live import VOCABULARY, make_model, spec_for, steps_in

import anisoscope as an
from anisoscope.corpora import load_corpus
from anisoscope.errors import MissingPackageError, SpecError
from anisoscope.lab import train_tokenizer
from anisoscope.live import Scope
from anisoscope.schedules import every
from anisoscope.shells import TrainerCallback
from anisoscope.sinks import JsonlSink, TensorBoardSink, TrackioSink, WandbSink, paint


@pytest.fixture(scope="module")
def tokenizer(corpus_file: Path) -> Any:
    return train_tokenizer(load_corpus(str(corpus_file)), "decoder")


def examples(count: int = 64) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, VOCABULARY, (count, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def run_trainer(folder: Path, callbacks: list[Any], tokenizer: Any, resume: str | None = None, **changes: Any) -> Any:
    from transformers import Trainer, TrainingArguments, default_data_collator

    settings = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no"}
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{**settings, **changes},
    )
    trainer = Trainer(
        make_model(),
        arguments,
        data_collator=default_data_collator,
        train_dataset=examples(),
        eval_dataset=examples(8),
        callbacks=callbacks,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: value.clone() for name, value in trainer.model.state_dict().items()}, trainer


def equal(one: Any, other: Any) -> bool:
    return one[0] == other[0] and all(torch.equal(value, other[1][name]) for name, value in one[1].items())


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bfloat16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
}


@pytest.mark.parametrize("mode", MODES)
def test_the_trainer_trains_the_same_under_the_callback(
    mode: str, tokenizer: Any, corpus_file: Path, tmp_path: Path
) -> None:
    callback = TrainerCallback(spec_for(corpus_file), store=tmp_path / "run", when=every(2), budget=1e9)
    alone = run_trainer(tmp_path / "alone", [], tokenizer, **MODES[mode])
    watched = run_trainer(tmp_path / "watched", [callback], tokenizer, **MODES[mode])
    assert len(alone[0]) == 6
    assert equal(alone, watched)
    assert callback.scope is not None
    assert callback.scope.summary["failed"] == 0
    assert callback.scope.run == "out"
    assert steps_in(callback.scope) == [0, 2, 4, 6]
    # Step 6 describes the weights after six updates, in the precision of the weights.
    model = make_model()
    model.load_state_dict(watched[1])
    unit = callback.scope.store.get(replace(callback.scope.spec, step=6).key)
    assert [row.values for row in unit.records] == numbers(callback.scope, model)


def test_a_resumed_training_goes_on_where_it_was(tokenizer: Any, corpus_file: Path, tmp_path: Path) -> None:
    def callback() -> TrainerCallback:
        return TrainerCallback(spec_for(corpus_file), store=tmp_path / "run", when=every(2), budget=1e9)

    first, second = callback(), callback()
    counted = {"include_num_input_tokens_seen": "all"}
    run_trainer(tmp_path, [first], tokenizer, max_steps=4, save_strategy="steps", save_steps=4, **counted)
    run_trainer(tmp_path, [second], tokenizer, resume=str(tmp_path / "out" / "checkpoint-4"), max_steps=7, **counted)
    assert second.scope is not None
    assert steps_in(second.scope) == [0, 2, 4, 6, 7]
    assert second.scope.summary["stored_before"] == 1
    assert second.scope.summary["measured"] == 2
    rows = second.scope.store.table().to_pylist()
    assert {(row["step"], row["tokens"]) for row in rows} == {(step, step * 4 * 16) for step in (0, 2, 4, 6, 7)}


def test_the_last_state_is_not_that_of_the_best_checkpoint(tokenizer: Any, corpus_file: Path, tmp_path: Path) -> None:
    """The largest loss is made to count as the best: step 2 is loaded at the end, and the last unit is of step 6."""
    shown = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    }
    kept = TrainerCallback(spec_for(corpus_file), store=tmp_path / "run", when=every(4), budget=1e9)
    _, loaded, trainer = run_trainer(tmp_path, [kept], tokenizer, **shown, **best)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert kept.scope is not None
    assert steps_in(kept.scope) == [0, 4, 6]
    last = make_model()
    last.load_state_dict(load_file(tmp_path / "out" / "checkpoint-6" / "model.safetensors"), strict=False)
    unit = kept.scope.store.get(replace(kept.scope.spec, step=6).key)
    assert numbers(kept.scope, last) == [row.values for row in unit.records]
    best_model = make_model()
    best_model.load_state_dict(loaded)
    assert numbers(kept.scope, best_model) != [row.values for row in unit.records]


def numbers(scope: Scope, model: Any) -> list[tuple[float, ...]]:
    """What a model gives on the probe of a Scope, measured when training is over."""
    spec = replace(scope.spec, run=None, weights=None, step=None)
    known = {"tokenizer": scope._tokenizer, "windows": scope.windows, "progress": False}
    return [row.values for row in an.measure(spec, model=model, **known).records]


def test_a_gate_stops_the_trainer(tokenizer: Any, corpus_file: Path, tmp_path: Path) -> None:
    gate = {"when": every(1), "budget": 1e9, "stop_if": "leading_variance[embed] > 0 for 3"}
    callback = TrainerCallback(spec_for(corpus_file), store=tmp_path / "one", **gate)
    *_, trainer = run_trainer(tmp_path, [callback], tokenizer, max_steps=50)
    assert trainer.state.global_step == 2


def test_a_callback_refuses_wrong_requests_when_it_is_made(corpus_file: Path) -> None:
    with pytest.raises(SpecError, match="unknown preset"):
        TrainerCallback(spec_for(corpus_file), preset="luxury")
    with pytest.raises(SpecError, match="what Scope takes"):
        TrainerCallback(spec_for(corpus_file), often=True)


def test_a_training_that_nothing_can_measure_ends_before_its_first_step(corpus_file: Path, tmp_path: Path) -> None:
    class Steps(transformers.TrainerCallback):
        made = 0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.made += 1

    steps, callback = Steps(), TrainerCallback(spec_for(corpus_file), store=tmp_path / "run")
    with pytest.raises(SpecError, match="processing_class=tokenizer"):
        run_trainer(tmp_path, [steps, callback], None)
    assert steps.made == 0
    run_trainer(tmp_path, [steps], None, max_steps=1)
    assert steps.made == 1


def test_a_relative_store_of_a_callback_is_where_the_callback_was_made(
    tokenizer: Any, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("there", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "there")
    callback = TrainerCallback(spec_for(corpus_file), store="run", when=every(2), budget=1e9)
    monkeypatch.chdir(tmp_path / "elsewhere")
    run_trainer(tmp_path, [callback], tokenizer, max_steps=2)
    assert (tmp_path / "there" / "run").is_dir()
    assert not (tmp_path / "elsewhere" / "run").exists()


# Sinks.


def show(corpus_file: Path, tokenizer: Any, folder: Path, sinks: Any) -> Scope:
    options = {"tokenizer": tokenizer, "store": folder / "run", "when": every(1), "budget": 1e9, "run": "shown"}
    scope = Scope(make_model(), spec_for(corpus_file), sinks=sinks, **options)
    with scope:
        for step in range(3):
            scope.step(step)
    assert scope.summary["measured"] == 3
    return scope


SPECTRAL = ("leading_variance", "leading_variance.typical")
SUMMARY = {
    *(f"geom/{metric}/{part}" for metric in SPECTRAL for part in ("mean", "max", "embed", "final_norm")),
    "geom/loss/output",
    "geom/overhead_ms",
}
BLOCKS = {f"geom/{metric}/block.0{k}" for metric in SPECTRAL for k in (0, 1)}


def test_a_jsonl_sink_holds_what_the_store_holds(tokenizer: Any, corpus_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "numbers" / "geometry.jsonl"
    scope = show(corpus_file, tokenizer, tmp_path, [JsonlSink(path)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    scope.close()
    assert len(path.read_text().splitlines()) == 3
    assert set(lines[0]) == {"step"} | SUMMARY | BLOCKS
    rows = scope.store.get(replace(scope.spec, step=1).key).records
    value = {row.site: row.value for row in rows if (row.metric, row.population) == ("leading_variance", "all")}
    assert lines[1]["geom/leading_variance/block.01"] == value["block.1"]
    assert lines[1]["geom/leading_variance/mean"] == pytest.approx((value["block.0"] + value["block.1"]) / 2)
    assert lines[1]["geom/leading_variance/max"] == max(value["block.0"], value["block.1"])
    assert lines[1]["geom/overhead_ms"] > 0


def test_tensorboard_reads_back_what_was_written(tokenizer: Any, corpus_file: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        scope = show(corpus_file, tokenizer, tmp_path, "tensorboard")
        events = EventAccumulator(str(Path(scope.store.folder) / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == SUMMARY
    rows = scope.store.table().to_pylist()
    losses = {row["step"]: row["value"] for row in rows if row["metric"] == "loss"}
    assert {event.step: event.value for event in events.Scalars("geom/loss/output")} == pytest.approx(losses, rel=1e-6)
    (*_, picture) = events.Images("geom/leading_variance/heat_map")
    # Four sites from top to bottom, three steps from left to right.
    assert (picture.height, picture.width) == (32, 24)


def test_every_site_is_shown_where_that_is_asked_for(tokenizer: Any, corpus_file: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        show(corpus_file, tokenizer, tmp_path, TensorBoardSink(tmp_path / "board", all_sites=True))
        events = EventAccumulator(str(tmp_path / "board")).Reload()
    assert set(events.Tags()["scalars"]) == SUMMARY | BLOCKS


def test_weights_and_biases_gets_numbers_under_the_step_of_the_training(
    tokenizer: Any, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = wandb.init(project="geometry", dir=str(tmp_path))
        sent: list[dict[str, Any]] = []
        log = run.log
        monkeypatch.setattr(run, "log", lambda row, **rest: (sent.append(dict(row)), log(row, **rest))[1])
        show(corpus_file, tokenizer, tmp_path, WandbSink(run))
        summary = dict(run.summary)
        run.finish()
    assert [row["train/global_step"] for row in sent] == [0, 1, 2, 2]
    assert set(sent[2]) == {"train/global_step"} | SUMMARY
    assert isinstance(sent[-1]["geom/leading_variance/heat_map"], wandb.Image)
    assert summary["train/global_step"] == 2
    assert math.isfinite(summary["geom/leading_variance/mean"])
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 30
    while b"geom/loss/output" not in written.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)  # a process of W&B's own writes the file
    assert b"geom/*" in written.read_bytes()
    assert b"geom/loss/output" in written.read_bytes()


def test_trackio_holds_what_was_written(
    tokenizer: Any, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("trackio")
        show(corpus_file, tokenizer, tmp_path, TrackioSink("geometry", name="run"))
    found = [path for path in (tmp_path / "trackio").rglob("*") if path.is_file()]
    assert any(b"geom/loss/output" in path.read_bytes() for path in found)


def test_a_sink_that_fails_is_told_once_and_training_goes_on(
    tokenizer: Any, corpus_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def write(self, *_: Any) -> None:
            raise OSError("gone")

        def close(self) -> None:
            raise OSError("gone")

    show(corpus_file, tokenizer, tmp_path, [Broken(), "jsonl"])
    assert caplog.text.count("a sink failed: OSError: gone") == 1
    assert len((tmp_path / "run" / "geometry.jsonl").read_text().splitlines()) == 3


def test_a_package_that_is_missing_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anisoscope.sinks.find_spec", lambda _: None)
    with pytest.raises(MissingPackageError, match=r"WandbSink needs wandb: pip install 'anisoscope\[wandb\]'"):
        WandbSink()


def test_a_heat_map_is_dark_where_low_bright_where_high_and_grey_where_unknown() -> None:
    picture = paint({0: {"embed": 0.0, "block.00": 1.0}, 5: {"embed": math.nan, "block.00": 0.5}})
    assert picture.shape == (16, 16, 3)
    assert picture[0, 0].tolist() == [68, 1, 84]
    assert picture[8, 0].tolist() == [253, 231, 37]
    assert picture[8, 8].tolist() == [33, 145, 140]
    assert picture[0, 8].tolist() == [128, 128, 128]
