"""The store: whole units or none, however a writer dies."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anisoscope.columns import SCHEMA, settings_row
from anisoscope.errors import StoreError
from anisoscope.merged import NAME as MERGED
from anisoscope.records import Record, Spec, Unit
from anisoscope.store import Store


def make_unit(model: str = "m", step: int | None = None, sites: tuple[str, ...] = ("block.0",)) -> Unit:
    spec = Spec(model=model, step=step)
    records = tuple(
        Record(
            key=spec.key,
            model=model,
            revision=None,
            step=step,
            tokens=None,
            kind="decoder",
            stack=None,
            corpus="pydoc",
            population="all",
            site=site,
            depth=0.5 if site.startswith("block") else None,
            metric="twonn",
            metric_version=1,
            value=3.5,
            spread=math.nan,
            null=18.0,
            batches=2,
            points=100,
            dropped=3,
            excluded=0,
            dim=8,
            values=(3.0, math.nan),
        )
        for site in sites
    )
    return Unit(spec=spec, provenance={"time": "now", "notes": []}, records=records, attachments={"a": np.arange(3)})


def with_spec(unit: Unit, spec: Spec) -> Unit:
    return replace(unit, spec=spec, records=tuple(replace(one, key=spec.key) for one in unit.records))


def write_version_1(folder: Path, unit: Unit, *, without: Sequence[str] = ()) -> Path:
    """The unit as the first version wrote it: a key of all fields of the Spec, no checksum, fewer columns."""
    spec = json.loads(json.dumps(unit.spec.as_dict()))
    rows = [{**vars(record), "key": unit.spec.key_of_version_1} for record in unit.records]
    metadata = {"store_version": 1, "spec": spec, "provenance": dict(unit.provenance)}
    schema = SCHEMA.with_metadata({b"anisoscope": json.dumps(metadata).encode()})
    path = folder / f"{unit.spec.key_of_version_1}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema).drop_columns(list(without)), path)
    return path


def test_a_unit_comes_back_as_it_was_put(tmp_path: Path) -> None:
    store, unit = Store(tmp_path / "run"), make_unit()
    store.put(unit)
    back = store.get(unit.key)
    assert back.spec == unit.spec
    assert back.key == unit.key
    assert back.provenance == unit.provenance
    for one, two in zip(unit.records, back.records, strict=True):
        assert one.as_json() == two.as_json()
        assert math.isnan(two.spread)
        assert math.isnan(two.values[1])
    assert np.array_equal(back.attachments["a"], np.arange(3))


def test_the_table_has_one_column_for_each_field_of_a_record() -> None:
    assert SCHEMA.names == [item.name for item in fields(Record)]
    promised = (
        "key model revision step tokens kind stack corpus population site depth metric metric_version value spread "
        "null batches points dropped excluded dim control control_value p gradient proxy rank bin variant values note "
        "seconds stage suspect"
    )
    assert SCHEMA.names[: len(promised.split())] == promised.split()


def test_every_setting_of_a_spec_that_can_differ_is_a_column_of_the_table(tmp_path: Path) -> None:
    base = make_unit().spec
    changed: dict[str, Any] = {
        "weights": "abc",
        "corpus_hash": "def",
        "tokens": 4096,
        "seq_len": 128,
        "special_tokens": False,
        "batch_points": 1024,
        "dtype": "bfloat16",
        "seed": 1,
        "typical_k": 4.0,
        "discard_fraction": 0.2,
        "neighbors": 10,
        "isoscore_zeta": 0.5,
        "blocks": ("a.b", "c"),
        "final_norm": ("n",),
        "rank": "variance:0.9",
        "curvature_rank": 2,
        "proxy": "seminmf",
        "proxy_from": "rolling=k",
        "gradients": ("virtual", "embedding"),
        "controls": ("shares",),
        "unknown_fields": (("later", 3), ("other", (1, 2))),
    }
    written: dict[str, Any] = {"unknown_fields": "later=3,other=[1, 2]"}
    named = {"tokens": "measured_tokens", "rank": "requested_rank", "proxy": "requested_proxy"}
    in_rows = {"model", "revision", "run", "step", "corpus", "sites", "populations", "metrics", "gride_scales"}
    assert changed.keys() | in_rows == {item.name for item in fields(Spec)}
    store = Store(tmp_path)
    specs = [base, *(replace(base, **{name: value}) for name, value in changed.items())]
    for spec in specs:
        store.put(with_spec(make_unit(), spec))
    rows = {row["key"]: row for row in store.table().to_pylist()}
    default = rows[base.key]
    for spec, (name, value) in zip(specs[1:], changed.items(), strict=True):
        column, row = named.get(name, name), rows[spec.key]
        text = ",".join(map(str, value)) if isinstance(value, tuple) else value
        assert row[column] == written.get(name, text)
        assert {one for one in row if row[one] != default[one] and one not in ("key", "spread", "values")} == {column}
    assert default["measured_tokens"] == 65536
    assert default["requested_rank"] == "16"
    assert list(default)[len(SCHEMA)] == "weights"


def test_a_setting_that_a_stored_spec_does_not_have_is_at_its_default() -> None:
    row = settings_row({"model": "m", "seed": 3, "later": 1})
    assert (row["seed"], row["seq_len"], row["weights"], row["controls"]) == (3, 512, None, "")
    assert row["unknown_fields"] == "later=1"
    assert settings_row({"model": "m"})["unknown_fields"] == ""


def test_rows_come_in_order_of_model_numeric_step_and_site(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (1000, 90, None):
        store.put(make_unit("b", step, sites=("final_norm", "block.10", "block.9", "embed", "output")))
    store.put(make_unit("a", 5))
    table = store.table()
    assert table["model"].to_pylist() == ["a"] + ["b"] * 15
    assert table["step"].to_pylist()[1::5] == [None, 90, 1000]
    assert table["site"].to_pylist()[1:6] == ["embed", "block.9", "block.10", "final_norm", "output"]


def test_an_empty_run_has_an_empty_table(tmp_path: Path) -> None:
    assert Store(tmp_path / "nothing").table().num_rows == 0
    assert Store(tmp_path / "nothing").keys() == set()


def test_a_unit_that_is_there_is_never_edited(tmp_path: Path) -> None:
    store, unit = Store(tmp_path), make_unit()
    before = store.put(unit).read_bytes()
    store.put(replace(unit, provenance={"time": "later", "notes": []}))
    assert (tmp_path / f"{unit.key}.parquet").read_bytes() == before


def test_a_changed_attachment_is_refused(tmp_path: Path) -> None:
    store, unit = Store(tmp_path), make_unit()
    store.put(unit)
    store.attachment(unit.key)
    path = next(tmp_path.glob(f"{unit.key}.*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with pytest.raises(StoreError, match="not the file that it was written with"):
        store.attachment(unit.key)


def test_a_failure_is_kept_until_the_unit_succeeds(tmp_path: Path) -> None:
    store, unit = Store(tmp_path), make_unit()
    store.put_failure(unit.spec, ValueError("no luck"))
    assert [(row["key"], row["error"], row["message"]) for row in store.failures()] == [
        (unit.key, "ValueError", "no luck")
    ]
    store.put(unit)
    assert store.failures() == []


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(StoreError, match="cannot write to the run folder"):
        Store(blocked).check_writable()
    with pytest.raises(StoreError, match="cannot write to the run folder"):
        Store(blocked / "below").put(make_unit())


def test_a_missing_or_broken_unit_is_a_clear_error(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(StoreError, match="no readable result"):
        store.get("nothing")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(StoreError, match="no readable result"):
        store.get("broken")


def test_temporary_files_of_a_killed_writer_are_not_units(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(make_unit())
    (tmp_path / ".tmp-x.parquet").write_bytes(b"half")
    assert len(store.keys()) == 1
    assert store.table().num_rows == 1


WRITER = """
import sys, itertools
sys.path.insert(0, sys.argv[2])
from test_store import make_unit
from anisoscope.store import Store
store = Store(sys.argv[1])
print("ready", flush=True)
for step in itertools.count():
    store.put(make_unit("m", step, sites=tuple(f"block.{k}" for k in range(200))))
"""


def test_a_writer_killed_at_any_moment_leaves_only_whole_units(tmp_path: Path) -> None:
    for trial in range(4):
        folder = tmp_path / str(trial)
        command = [sys.executable, "-c", WRITER, str(folder), str(Path(__file__).parent)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "src"})
        assert writer.stdout is not None
        writer.stdout.readline()
        while len(Store(folder).keys()) < 3:
            assert writer.poll() is None
            time.sleep(0.001)
        time.sleep(0.007 * trial)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        store = Store(folder)
        assert len(store.keys()) >= 3
        for key in sorted(store.keys()):
            assert len(store.get(key).records) == 200
            store.attachment(key)


RIVAL = """
import sys
from dataclasses import replace
import numpy as np
sys.path.insert(0, sys.argv[2])
from test_store import make_unit
from anisoscope.store import Store
store = Store(sys.argv[1])
for step in range(40):
    unit = make_unit("m", step, sites=("block.0", "block.1", "block.2"))
    mine = {"a": np.full(5, int(sys.argv[3]))}
    store.put(replace(unit, attachments=mine, provenance={**unit.provenance, "writer": int(sys.argv[3])}))
"""


def test_of_several_writers_of_a_unit_one_counts_and_readers_see_whole_units_only(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RIVAL, str(tmp_path / "run"), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": "src"}
    rivals = [subprocess.Popen([*command, str(number)], env=environment) for number in range(3)]
    store, sizes = Store(tmp_path / "run"), []
    while any(rival.poll() is None for rival in rivals):
        table = store.table()
        counts = Counter(table["key"].to_pylist())
        assert set(counts.values()) <= {3}
        sizes.append(len(counts))
    assert [rival.returncode for rival in rivals] == [0, 0, 0]
    assert sizes == sorted(sizes)
    assert len(store.keys()) == 40
    assert store.table().num_rows == 120
    for key in store.keys():  # noqa: SIM118
        unit = store.get(key)
        assert set(unit.attachments["a"].tolist()) == {unit.provenance["writer"]}
    # What the others attached is gone with them.
    assert len(list((tmp_path / "run").glob("*.safetensors"))) == 40


def test_what_was_read_once_is_kept_and_never_believed_over_the_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anisoscope.store.MERGED_AT_ONCE", 3)
    monkeypatch.setattr("anisoscope.store.SETTLED_SECONDS", 0.0)
    store = Store(tmp_path)
    units = [make_unit("m", step) for step in range(5)]
    for unit in units[:4]:
        store.put(unit)
    first = store.table()
    cache = tmp_path / MERGED
    assert cache.is_file()
    store.put(units[4])
    (tmp_path / f"{units[1].key}.parquet").unlink()
    assert store.table()["step"].to_pylist() == [0, 2, 3, 4]
    cache.write_bytes(b"broken")
    assert store.table()["step"].to_pylist() == [0, 2, 3, 4]
    assert first["step"].to_pylist() == [0, 1, 2, 3]


def test_units_of_an_older_anisoscope_lack_the_newest_columns(tmp_path: Path) -> None:
    store, unit = Store(tmp_path), make_unit()
    write_version_1(tmp_path, unit, without=("stage", "suspect", "run", "low", "high"))
    store.put(make_unit("n"))
    assert store.table()["suspect"].to_pylist() == [None, None]
    assert store.get(unit.key).records[0].stage is None


def test_running_units_show_while_their_process_lives(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.working_on("somekey"):
        assert store.running()["somekey"]["pid"] == os.getpid()
    assert store.running() == {}
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with store.working_on("other"):
        path = tmp_path / "other.running.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "pid": dead.pid}))
        assert store.running() == {}
        path.write_text(json.dumps({**json.loads(path.read_text()), "host": "elsewhere"}))
        assert set(store.running()) == {"other"}
        os.utime(path, (time.time() - 100,) * 2)
        assert store.running() == {}


def test_key_depends_on_every_field_and_on_nothing_else() -> None:
    base = Spec(model="m")
    assert base.key == Spec(model="m").key
    assert base.key == Spec.from_dict(json.loads(json.dumps(base.as_dict()))).key
    changed: dict[str, object] = {
        "step": 1,
        "gride_scales": (2, 4),
        "special_tokens": False,
        **{name: getattr(base, name) + 1 for name in ("tokens", "seq_len", "batch_points", "seed", "neighbors")},
        **{name: getattr(base, name) + 1 for name in ("rank", "curvature_rank")},
        **{name: getattr(base, name) + 0.5 for name in ("typical_k", "discard_fraction", "isoscore_zeta")},
    }
    keys = {base.key}
    for item in fields(Spec):
        old = getattr(base, item.name)
        new = changed.get(item.name, ("x",) if isinstance(old, tuple) else "x")
        new = (("later", 3),) if item.name == "unknown_fields" else new
        # Not validated: any other value is another key.
        keys.add(Spec.from_dict(base.as_dict() | {item.name: new}).key)
    assert len(keys) == len(fields(Spec)) + 1


def test_units_open_without_torch(tmp_path: Path) -> None:
    unit = make_unit()
    Store(tmp_path).put(unit)
    code = (
        "import sys, anisoscope as an; s = an.Store(sys.argv[1]); s.table(); s.get(sys.argv[2]);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), unit.key], check=True)
    assert pq.read_table(tmp_path / f"{unit.key}.parquet").num_rows == 1
