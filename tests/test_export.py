"""A finished run elsewhere: every step, by the keys that the live sinks use."""

import csv
import json
import time
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from anisoscope.cli import app
from anisoscope.errors import SpecError, StoreError
from anisoscope.exporting import export_run, find_curves
from anisoscope.records import Record, Spec, Unit
from anisoscope.store import Store

STEPS = (0, 10, 100)
MEANS = {"geom/leading_variance/mean", "geom/leading_variance/max", "geom/leading_variance/final_norm"}
TYPICAL = {key.replace("leading_variance", "leading_variance.typical") for key in MEANS}
BLOCKS = {f"geom/leading_variance{name}/block.0{k}" for name in ("", ".typical") for k in (0, 1)}
GRADIENT = {
    f"geom/tangent_excess.{name}.pca.mean=in/{end}" for name in ("virtual", "activation") for end in ("mean", "max")
}


def record(spec: Spec, site: str, metric: str, value: float, **rest: Any) -> Record:
    given: dict[str, Any] = {"population": "all", "tokens": None, "stack": None, "metric_version": 1, "kind": "decoder"}
    given |= {"spread": 0.1, "null": 0.0, "batches": 2, "points": 10, "dropped": 0, "excluded": 0, "dim": 4}
    given |= {"depth": 0.5 if site.startswith("block") else None, "values": (value, value)}
    named = {name: getattr(spec, name) for name in ("key", "model", "revision", "step", "corpus", "run")}
    return Record(site=site, metric=metric, value=value, **{**given, **named, **rest})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A training of three steps, and a model without a step."""
    store = Store(tmp_path / "run")
    for step in (*STEPS, None):
        model = "lab/tiny" if step is not None else "lab/other"
        spec = Spec(model=model, step=step, revision=None if step is None else f"step{step}", corpus="text")
        records = [
            record(spec, site, "leading_variance", number + (step or 0) / 1000, population=population)
            for population in ("all", "typical")
            for number, site in enumerate(("block.0", "block.1", "final_norm"))
        ]
        records += [
            record(spec, "block.0", "tangent_excess", value, gradient=name, proxy="pca", variant="mean=in")
            for name, value in (("virtual", 0.3), ("activation", 0.1))
        ]
        records.append(record(spec, "output", "loss", 3.0))
        store.put(Unit(spec=spec, provenance={"notes": []}, records=tuple(records)))
    return store


def test_a_line_of_json_for_every_step_has_the_keys_of_the_live_sink(store: Store, tmp_path: Path) -> None:
    written = export_run(store, "jsonl", tmp_path / "lines")
    assert written.stepless == ("lab/other",)
    lines = [json.loads(line) for line in (tmp_path / "lines" / "lab--tiny.text.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(STEPS)
    keys = set(lines[0]) - {"step"}
    assert keys - {key for key in keys if "tangent" in key} == MEANS | TYPICAL | BLOCKS | {"geom/loss/output"}
    assert keys >= GRADIENT
    assert lines[2]["geom/leading_variance/block.01"] == pytest.approx(1.1)
    assert lines[2]["geom/tangent_excess.virtual.pca.mean=in/mean"] == pytest.approx(0.3)
    export_run(store, "jsonl", tmp_path / "lines")
    assert len((tmp_path / "lines" / "lab--tiny.text.jsonl").read_text().splitlines()) == len(STEPS)


def test_tensorboard_has_scalars_at_their_steps_and_heat_maps(store: Store, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        export_run(store, "tensorboard", tmp_path / "board")
        events = EventAccumulator(str(tmp_path / "board" / "lab--tiny.text")).Reload()
    assert set(events.Tags()["scalars"]) == MEANS | TYPICAL | GRADIENT | {"geom/loss/output"}
    found = {event.step: event.value for event in events.Scalars("geom/leading_variance/final_norm")}
    assert found == pytest.approx({0: 2.0, 10: 2.01, 100: 2.1})
    (picture,) = events.Images("geom/leading_variance/heat_map")
    # Three sites from top to bottom, three steps from left to right.
    assert (picture.height, picture.width) == (24, 24)


def test_weights_and_biases_offline_holds_every_training_as_a_run(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("wandb")
        written = export_run(store, "wandb", tmp_path / "wandb", all_sites=True)
    assert written.places == ("anisoscope/lab--other.text", "anisoscope/lab--tiny.text")
    files = list((tmp_path / "wandb").glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not all(b"block.01" in file.read_bytes() for file in files):
        time.sleep(0.1)  # a process of W&B's own writes the files
    assert all(b"geom/leading_variance/block.01" in file.read_bytes() for file in files)
    assert any(b"lab/tiny" in file.read_bytes() for file in files)


def test_rows_are_the_table_itself(store: Store, tmp_path: Path) -> None:
    export_run(store, "parquet", tmp_path / "rows.parquet")
    assert str(pq.read_table(tmp_path / "rows.parquet").to_pylist()) == str(store.table().to_pylist())
    export_run(store, "csv", tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["value"]) for row in rows] == store.table()["value"].to_pylist()
    assert [json.loads(row["values"]) for row in rows] == store.table()["values"].to_pylist()


def test_the_table_is_a_data_frame_where_pandas_is_installed(store: Store) -> None:
    pytest.importorskip("pandas")
    frame = store.table().to_pandas()
    assert list(frame.columns) == store.table().column_names
    assert frame.groupby("model")["value"].count().to_dict() == {"lab/other": 9, "lab/tiny": 27}


def test_of_two_units_that_measured_one_thing_one_is_shown(store: Store) -> None:
    table = pa.concat_tables([store.table(), store.table()])
    (_, tiny) = find_curves(table)
    assert [len(records) for records in tiny.steps.values()] == [9, 9, 9]


def test_the_command_says_where_it_wrote_and_what_had_no_step(store: Store, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", str(store.folder), "--to", "jsonl"])
    assert done.exit_code == 0, done.output
    places = [Path(line) for line in done.stdout.splitlines()]
    assert [path.parent for path in places] == [store.folder / "exported" / "jsonl"] * 2
    assert all(path.is_file() for path in places)
    assert "no step is known of lab/other" in done.stderr
    # What was exported into the run folder is no part of the run.
    assert Store(store.folder).table().num_rows == 36


def test_unknown_formats_and_empty_runs_are_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="wandb, tensorboard, jsonl, csv, parquet"):
        export_run(store, "excel")
    with pytest.raises(StoreError, match="no finished unit"):
        export_run(Store(tmp_path / "empty"), "csv")
