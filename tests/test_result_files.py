"""Result files that are damaged, foreign or copied, keys that stay, and the merged file."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_store import make_unit, with_spec, write_version_1

from anisoscope import merged
from anisoscope.errors import SpecError, StoreError
from anisoscope.records import KEY_VERSION, Spec
from anisoscope.status import survey
from anisoscope.store import Store

RUNS = Path(__file__).parents[1] / "docs" / "runs"


def settle(folder: Path) -> None:
    """Date the files back, as if they had been written some time ago."""
    for path in folder.iterdir():
        if path.is_file():
            before = path.stat().st_mtime_ns - 10**10
            os.utime(path, ns=(before, before))


def rows_of(table: pa.Table) -> list[str]:
    """The rows as text, in which NaN equals NaN, without the time that they took."""
    return [str(row) for row in table.drop_columns(["seconds"]).to_pylist()]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-900])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_in_rows(path: Path) -> None:
    """One bit of a stored number: 100.19 may become 6.26."""
    data = bytearray(path.read_bytes())
    data[data.index(np.float64(3.5).tobytes()) + 6] ^= 1
    path.write_bytes(data)


def flip_in_spec(path: Path) -> None:
    data = path.read_bytes()
    assert b'"seed": 0' in data
    path.write_bytes(data.replace(b'"seed": 0', b'"seed": 1'))


def flip_in_checksum(path: Path) -> None:
    data = path.read_bytes()
    assert b'"file_sha256"' in data
    path.write_bytes(data.replace(b'"file_sha256"', b'"file_sha257"'))


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def change_attachment(path: Path) -> None:
    attachment = next(path.parent.glob(f"{path.stem}.*.safetensors"))
    attachment.write_bytes(attachment.read_bytes()[:-1] + b"\x07")


DAMAGES = [
    cut,
    empty,
    flip_in_rows,
    flip_in_spec,
    flip_in_checksum,
    make_fifo,
    change_attachment,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_result_is_named_not_finished_and_replaced(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, unit, others = Store(tmp_path), make_unit("m", 1), [make_unit("m", 2), make_unit("n")]
    for one in (unit, *others):
        store.put(one)
    before = rows_of(store.table())
    damage(tmp_path / f"{unit.key}.parquet")
    for reader in (store, Store(tmp_path)):
        assert unit.key not in reader
        assert reader.keys() == set(reader.results()) == {one.key for one in others}
        assert set(reader.table()["key"].to_pylist()) == reader.keys()
        (problem,) = reader.problems()
        assert problem.startswith(f"{unit.key}.parquet is ")
        assert survey(reader).count("done") == 2
        for read in (reader.get, reader.spec, reader.attachment):
            with pytest.raises(StoreError, match=f"no readable result {unit.key}"):
                read(unit.key)
    assert sum(f"{unit.key}.parquet" in message for message in caplog.messages) == 1
    store.put(unit)
    assert unit.key in store
    assert Store(tmp_path).problems() == []
    assert rows_of(store.table()) == before
    assert np.array_equal(store.get(unit.key).attachments["a"], np.arange(3))


def test_a_result_without_its_attachment_keeps_its_rows(tmp_path: Path) -> None:
    store, unit = Store(tmp_path), make_unit()
    store.put(unit)
    next(tmp_path.glob("*.safetensors")).unlink()
    found = Store(tmp_path)
    assert found.table().num_rows == 1
    assert not found.results()[unit.key].has_arrays
    for read in (found.get, found.attachment):
        with pytest.raises(StoreError, match=f"is missing; delete {unit.key}.parquet"):
            read(unit.key)
    (tmp_path / f"{unit.key}.parquet").unlink()
    store.put(unit)
    assert np.array_equal(store.get(unit.key).attachments["a"], np.arange(3))


def test_every_changed_byte_of_a_result_file_is_found(tmp_path: Path) -> None:
    path = Store(tmp_path).put(replace(make_unit(), attachments={}))
    whole = path.read_bytes()
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        assert Store(tmp_path).keys() == set(), place
    path.write_bytes(whole)
    assert len(Store(tmp_path).keys()) == 1


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Change the rows of a file of version 1, which has no checksum."""
    table = pq.read_table(path)
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table.set_column(9, "site", pa.nulls(table.num_rows, pa.string())), "rows have no site"),
        (lambda table: pa.concat_tables([table, table.set_column(0, "key", pa.array(["x"]))]), "rows of 2 results"),
        (lambda table: table.drop_columns(["value"]), "has no column value"),
        (lambda table: table.set_column(13, "value", pa.array(["text"])), "is damaged"),
    ],
)
def test_rows_that_cannot_be_those_of_a_result_are_not_read(
    change: Callable[[pa.Table], pa.Table], words: str, tmp_path: Path
) -> None:
    store, good = Store(tmp_path), make_unit("good")
    store.put(good)
    path = write_version_1(tmp_path, make_unit("m"))
    assert len(store.keys()) == 2
    rewrite(path, change)
    assert store.keys() == {good.key}
    (problem,) = store.problems()
    assert path.name in problem
    assert words in problem


def test_the_settings_of_a_file_of_version_1_are_compared_with_its_key(tmp_path: Path) -> None:
    path = write_version_1(tmp_path, make_unit("m"))
    table = pq.read_table(path)
    text = table.schema.metadata[b"anisoscope"].replace(b'"tokens": 65536', b'"tokens": 65537')
    pq.write_table(table.replace_schema_metadata({b"anisoscope": text}), path)
    assert "its key is not that of its settings" in Store(tmp_path).problems()[0]


def test_foreign_files_are_named_and_passed_over(tmp_path: Path) -> None:
    store, unit = Store(tmp_path), make_unit()
    store.put(unit)
    before = store.table()
    pq.write_table(pa.table({"other": [1]}), tmp_path / "foreign.parquet")
    (tmp_path / "folder.parquet").mkdir()
    os.mkfifo(tmp_path / "pipe.parquet")
    (tmp_path / "link.parquet").symlink_to("nowhere")
    (tmp_path / "zero.parquet").symlink_to("/dev/zero")
    (tmp_path / "text.parquet").write_text("hello")
    found = Store(tmp_path)
    assert found.keys() == {unit.key}
    assert rows_of(found.table()) == rows_of(before)
    problems = found.problems()
    assert [problem.split()[0] for problem in problems] == [
        "folder.parquet",
        "foreign.parquet",
        "link.parquet",
        "pipe.parquet",
        "text.parquet",
        "zero.parquet",
    ]
    assert all("is no result of anisoscope" in problem for problem in problems)


def test_a_folder_in_the_place_of_a_result_is_named_as_one_and_leaves_no_open_file(tmp_path: Path) -> None:
    store, unit = Store(tmp_path), make_unit()
    path = tmp_path / f"{unit.key}.parquet"
    path.mkdir()
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    for _ in range(5):
        assert store.problems() == [f"{path.name} is no result of anisoscope: it is a folder; it is not read"]
    assert not before or len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(StoreError, match=r"a folder has that name; move it elsewhere"):
        store.put(unit)
    assert path.is_dir()
    path.rmdir()
    store.put(unit)
    assert store.keys() == {unit.key}


def test_names_that_are_not_utf_8_do_not_stop_a_report(tmp_path: Path) -> None:
    Store(tmp_path).put(make_unit())
    for name in (b"\xff.parquet", b"\xff.failed.json"):
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).write_bytes(b"x")
    problems = Store(tmp_path).problems()
    assert len(problems) == 2
    assert all(problem.startswith("\\udcff.") for problem in problems)
    "".join(problems).encode()


def test_a_unit_that_could_not_be_read_again_is_not_stored(tmp_path: Path) -> None:
    unit = make_unit()
    rows = tuple(replace(row) for row in unit.records)
    object.__setattr__(rows[0], "site", None)
    with pytest.raises(StoreError, match="rows have no site"):
        Store(tmp_path).put(replace(unit, records=rows))
    assert list(tmp_path.iterdir()) == []
    # Rows are stored under the key of their unit.
    other = replace(unit, spec=replace(unit.spec, seed=5))
    Store(tmp_path).put(other)
    assert Store(tmp_path).keys() == {other.key}


def test_a_file_of_a_newer_format_is_named_as_such(tmp_path: Path) -> None:
    path = write_version_1(tmp_path, make_unit())
    table = pq.read_table(path)
    text = table.schema.metadata[b"anisoscope"].replace(b'"store_version": 1', b'"store_version": 9')
    pq.write_table(table.replace_schema_metadata({b"anisoscope": text}), path)
    assert "a newer version wrote it" in Store(tmp_path).problems()[0]


def test_a_copy_is_named_and_not_counted_twice(tmp_path: Path) -> None:
    store, unit = Store(tmp_path), make_unit()
    path = store.put(unit)
    before = store.table()
    shutil.copy(path, tmp_path / f"{unit.key} (copy).parquet")
    assert rows_of(Store(tmp_path).table()) == rows_of(before)
    assert Store(tmp_path).keys() == {unit.key}
    assert f"it holds the rows of {unit.key}.parquet" in Store(tmp_path).problems()[0]


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, one, two = Store(tmp_path), make_unit("m"), make_unit("n")
    locked = store.put(one)
    store.put(two)
    real = os.open

    def refuse(path: Any, *rest: Any, **named: Any) -> int:
        # The tests run as root, who may read everything.
        if Path(path) == locked:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    assert store.keys() == {two.key}
    assert "Permission denied" in store.problems()[0]


# Keys.

DEFAULTS: dict[str, Any] = {
    "revision": None,
    "weights": None,
    "run": None,
    "step": None,
    "corpus": "pydoc",
    "corpus_hash": None,
    "tokens": 65536,
    "seq_len": 512,
    "special_tokens": True,
    "batch_points": 4096,
    "dtype": "float32",
    "seed": 0,
    "sites": ("embed", "block.*", "final_norm"),
    "populations": (),
    "typical_k": 6.0,
    "metrics": ("leading_variance", "mean_cosine", "isoscore", "participation_ratio", "twonn", "loss"),
    "discard_fraction": 0.1,
    "gride_scales": (2, 4, 8, 16, 32, 64),
    "neighbors": 20,
    "isoscore_zeta": 0.25,
    "blocks": (),
    "final_norm": (),
    "rank": 16,
    "curvature_rank": 4,
    "proxy": "pca",
    "proxy_from": None,
    "gradients": (),
    "controls": (),
    "unknown_fields": (),
}


def test_the_defaults_of_a_spec_are_those_of_its_keys() -> None:
    """A field at its default is not in the key: to change a default, raise KEY_VERSION and change this test."""
    found = {item.name: item.default for item in fields(Spec) if item.default is not MISSING}
    # A field that is added changes no key. A default that changes would give new numbers an old key.
    assert {name: found[name] for name in DEFAULTS} == DEFAULTS
    assert set(found) >= set(DEFAULTS)
    assert KEY_VERSION == 2


GOLDEN_KEYS = [
    (Spec(model="pocket-decoder"), "445bffeaa90a0664b1ae", "72cd8e7bd6de42b9b3c2"),
    (
        Spec(
            model="EleutherAI/pythia-160m",
            revision="step3000",
            weights="0" * 40,
            step=3000,
            corpus="enwik8",
            corpus_hash="f" * 64,
            metrics=(("twonn", 1), ("loss", 1)),
        ),
        "e011eb3f7a898495b3e8",
        "eaacc248e8817d8d6a3e",
    ),
    (
        Spec(model="m", run="first", step=0, dtype="bfloat16", seq_len=128),
        "88050d029a2ce58a3cc1",
        "6a8ac071524e48feb060",
    ),
    (
        Spec(
            model="m",
            rank="variance:0.9",
            gradients=("virtual",),
            controls=("shares", "type_disjoint"),
            proxy_from="rolling=0123456789abcdef0123",
            typical_k=4.5,
        ),
        "d9ee95b15aac5115fd1a",
        "af44c6b3e1872c00e000",
    ),
    (Spec(model="m", unknown_fields=(("later", (1, "zwei")),)), "0e4617ea34554fd3ae0a", "1197bcf0304cefaf730e"),
]


@pytest.mark.parametrize(("spec", "key", "key_of_version_1"), GOLDEN_KEYS)
def test_keys_stay(spec: Spec, key: str, key_of_version_1: str) -> None:
    """Stored results are found by these keys: a change of the code that changes one loses results."""
    assert (spec.key, spec.key_of_version_1) == (key, key_of_version_1)
    assert Spec.from_dict(json.loads(json.dumps(spec.as_dict()))).key == key


def test_a_field_at_its_default_is_not_in_the_key() -> None:
    spec = Spec(model="m", step=3)
    assert spec.canonical() == '{"model":"m","step":3}'
    assert Spec.from_dict({"model": "m", "typical_k": 4}).key == Spec(model="m", typical_k=4.0).key
    assert Spec.from_dict({"model": "m", "step": 3}) == spec


def test_fields_of_a_newer_version_are_kept_and_change_the_key(tmp_path: Path) -> None:
    stored = Spec(model="m", seed=1).as_dict() | {"later": [1, 2], "alpha": None}
    spec = Spec.from_dict(json.loads(json.dumps(stored)))
    assert spec.unknown_fields == (("alpha", None), ("later", (1, 2)))
    assert json.loads(json.dumps(spec.as_dict())) == json.loads(json.dumps(stored))
    assert spec.key != Spec(model="m", seed=1).key
    store = Store(tmp_path)
    store.put(with_spec(make_unit(), spec))
    assert store.get(spec.key).spec == spec
    assert store.spec(spec.key)["later"] == [1, 2]
    assert set(store.table()["unknown_fields"].to_pylist()) == {"alpha=None,later=[1, 2]"}
    settings = replace(spec, model="other")
    assert settings.unknown_fields == spec.unknown_fields


def test_a_stored_spec_is_not_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Spec) -> None:
        raise SpecError("a rule that came later")

    stored = Spec(model="m").as_dict()
    monkeypatch.setattr(Spec, "__post_init__", refuse)
    with pytest.raises(SpecError):
        Spec(model="m")
    spec = Spec.from_dict(stored)
    assert len(spec.key) == len(spec.request()) == 20


@pytest.mark.parametrize("run", sorted(path.name for path in RUNS.iterdir() if path.is_dir()))
def test_results_of_version_1_are_found_by_the_keys_of_today(run: str, tmp_path: Path) -> None:
    shutil.copytree(RUNS / run, tmp_path / run)
    store = Store(tmp_path / run)
    files = sorted(store.folder.glob("[!.]*.parquet"))
    specs = {path.stem: json.loads(pq.read_schema(path).metadata[b"anisoscope"])["spec"] for path in files}
    keys = store.keys()
    assert len(keys) == len(specs)
    assert store.problems() == []
    current = {old: Spec.from_dict(spec).key for old, spec in specs.items() if spec["proxy_from"] is None}
    for spec in specs.values():
        # What a sweep requests now names earlier results by the keys that they have now.
        named = set(re.findall("[0-9a-f]{20}", spec["proxy_from"] or ""))
        if named <= current.keys():
            text = re.sub("[0-9a-f]{20}", lambda found: current[found[0]], spec["proxy_from"] or "") or None
            assert Spec.from_dict(spec | {"proxy_from": text}).key in keys
    for old in list(specs)[:10]:
        spec = Spec.from_dict(store.spec(old))
        assert spec.key in store
        assert store.spec(spec.key) == store.spec(old)
        assert store.results()[spec.key].name == f"{old}.parquet"
    assert set(store.table()["key"].to_pylist()) == keys


# The merged file.


def test_a_result_that_was_deleted_and_measured_again_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anisoscope.store.MERGED_AT_ONCE", 3)
    store, units = Store(tmp_path), [make_unit("m", step) for step in range(4)]
    for unit in units:
        store.put(unit)
    settle(tmp_path)
    assert set(Store(tmp_path).table()["value"].to_pylist()) == {3.5}
    assert (tmp_path / merged.NAME).is_file()
    (tmp_path / f"{units[1].key}.parquet").unlink()
    again = replace(units[1], records=tuple(replace(row, value=9.5) for row in units[1].records))
    store.put(again)
    for reader in (store, Store(tmp_path)):
        assert reader.table()["value"].to_pylist() == [3.5, 9.5, 3.5, 3.5]


def test_the_merged_file_gives_what_the_files_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in [
        *sorted((RUNS / "pocket-gradients").glob("[!.]*.parquet"))[:40],
        *(RUNS / "large").glob("[!.]*.parquet"),
    ]:
        shutil.copy(path, tmp_path)
    monkeypatch.setattr("anisoscope.store.MERGED_AT_ONCE", 10**6)
    wanted, results = Store(tmp_path).table(), Store(tmp_path).results()
    monkeypatch.setattr("anisoscope.store.MERGED_AT_ONCE", 10)
    settle(tmp_path)
    assert rows_of(Store(tmp_path).table()) == rows_of(wanted)
    assert (tmp_path / merged.NAME).is_file()
    reads: list[str] = []
    from anisoscope import store as module

    real = module.read_result
    monkeypatch.setattr(module, "read_result", lambda path: reads.append(path.name) or real(path))
    again = Store(tmp_path)
    assert rows_of(again.table()) == rows_of(wanted)
    assert {key: file.spec for key, file in again.results().items()} == {k: f.spec for k, f in results.items()}
    assert reads == []
    # One file less, one more and a damaged cache: still the same rows.
    gone = next(iter(results.values()))
    (tmp_path / gone.name).unlink()
    assert set(Store(tmp_path).table()["key"].to_pylist()) == set(results) - {gone.key}
    data = (tmp_path / merged.NAME).read_bytes()
    (tmp_path / merged.NAME).write_bytes(data[: len(data) // 2] + b"\x00" + data[len(data) // 2 + 1 :])
    assert set(Store(tmp_path).table()["key"].to_pylist()) == set(results) - {gone.key}


def test_files_written_just_now_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two contents of one size within the resolution of a file's time have one stamp."""
    monkeypatch.setattr("anisoscope.store.MERGED_AT_ONCE", 1)
    store, unit = Store(tmp_path), replace(make_unit(), attachments={})
    path = store.put(unit)
    stamp = path.stat()
    assert store.table()["value"].to_pylist() == [3.5]
    path.unlink()
    store.put(replace(unit, records=tuple(replace(row, value=4.5) for row in unit.records)))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert path.stat().st_size == stamp.st_size
    assert store.table()["value"].to_pylist() == [4.5]


MERGER = """
import sys
sys.path.insert(0, sys.argv[2])
from test_store import make_unit
import anisoscope.store as module
module.MERGED_AT_ONCE, module.SETTLED_SECONDS = 1, 0.0
store = module.Store(sys.argv[1])
for step in range(30):
    store.put(make_unit("m", step + 100 * int(sys.argv[3]), sites=("block.0", "block.1")))
    assert set(store.table()["value"].to_pylist()) == {3.5}
    print(step, flush=True)
"""


def test_writers_that_merge_at_the_same_time_and_are_killed_lose_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-c", MERGER, str(run), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": "src"}
    writers = [
        subprocess.Popen([*command, str(number)], env=environment, stdout=subprocess.PIPE, text=True)
        for number in range(3)
    ]
    killed = writers[0]
    assert killed.stdout is not None
    while "10" not in killed.stdout.readline():
        assert killed.poll() is None
    killed.kill()
    for writer in writers:
        writer.communicate(timeout=120)
    assert [writer.returncode for writer in writers[1:]] == [0, 0]
    assert len(Store(run).keys()) >= 71
    table = Store(run).table()
    assert table.num_rows == 2 * len(Store(run).keys())
    (run / merged.NAME).unlink()
    assert rows_of(Store(run).table()) == rows_of(table)


# Notes and writing.

BAD_NOTES = ['{"spec": ', "[]", "nothing", '{"spec": {"model": 3}}', "[{}]", '[{"key": 1}]', '"text"', "[" * 99999]


@pytest.mark.parametrize("kind", ["failed", "plan", "running"])
@pytest.mark.parametrize("text", BAD_NOTES)
def test_a_malformed_note_is_named_and_ignored(kind: str, text: str, tmp_path: Path) -> None:
    if (kind, text) == ("plan", "[]"):
        pytest.skip("an empty plan is a plan")
    store, unit = Store(tmp_path), make_unit()
    store.put(unit)
    (tmp_path / f"bad.{kind}.json").write_text(text)
    os.mkfifo(tmp_path / f"pipe.{kind}.json")
    (tmp_path / f"latin.{kind}.json").write_bytes(b'{"error": "\xe9"}')
    seen = survey(Store(tmp_path))
    assert [row["state"] for row in seen.rows] == ["done"]
    assert (store.failures(), store.planned(), store.running()) == ([], {}, {})
    problems = store.problems()
    assert [problem.split()[0] for problem in problems] == [f"{name}.{kind}.json" for name in ("bad", "latin", "pipe")]


def test_a_sign_of_life_from_the_future_is_none(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.working_on("somekey"):
        path = tmp_path / "somekey.running.json"
        assert set(store.running()) == {"somekey"}
        os.utime(path, (time.time() + 3600,) * 2)
        assert store.running() == {}


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EIO])
def test_what_stopped_a_write_is_what_is_reported(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EPERM, "in the clean-up")))
    with pytest.raises(StoreError, match=os.strerror(number)):
        store.put(make_unit())


def test_a_result_that_cannot_be_written_leaves_no_attachment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, unit = Store(tmp_path), make_unit()
    real = os.link

    def refuse(source: Any, target: Any) -> None:
        if str(target).endswith(".parquet"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(Path, "replace", _refuse_parquet(Path.replace))
    with pytest.raises(StoreError, match="No space left"):
        store.put(unit)
    assert list(tmp_path.iterdir()) == []


def _refuse_parquet(real: Any) -> Any:
    def refuse(self: Path, target: Any) -> Any:
        if str(target).endswith(".parquet"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, target)

    return refuse


def test_a_file_where_the_folder_should_be_is_a_clear_error_without_attachments_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot write to the run folder"):
        Store(tmp_path / "file").put(replace(make_unit(), attachments={}))


def entry(spec: Spec) -> dict[str, Any]:
    from anisoscope.sweep import _entry

    return _entry(spec)


def test_a_failure_of_a_checkpoint_that_was_repaired_does_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path)
    resolved = replace(make_unit("m", 5).spec, metrics=(("twonn", 1),), corpus_hash="c", weights="broken")
    other = replace(resolved, step=6, revision="step6")
    early = Spec(model="m", metrics=("twonn",), revision="step7")
    for spec in (resolved, other, early):
        store.put_failure(spec, ValueError("no luck"))
    store.plan([entry(resolved), entry(other)])
    assert survey(store).count("failed") == 3
    repaired = replace(resolved, weights="whole")
    later = store.plan([entry(repaired), entry(other)])
    os.utime(later, (time.time() + 5,) * 2)
    store.put(with_spec(make_unit("m", 5), repaired))
    store.put(with_spec(make_unit("m", 7), replace(resolved, step=7, revision="step7", weights="whole")))
    assert [row["spec"]["step"] for row in store.failures()] == [6]
    states = sorted(row["state"] for row in survey(store).rows)
    assert states == ["done", "done", "failed"]


def test_what_version_1_planned_is_not_waited_for_when_it_is_done_or_planned_again(tmp_path: Path) -> None:
    store, done, left = Store(tmp_path), make_unit("m", 1), make_unit("m", 2)
    write_version_1(tmp_path, done)
    old = [{name: value for name, value in entry(unit.spec).items() if name != "request"} for unit in (done, left)]
    for one, unit in zip(old, (done, left), strict=True):
        one["key"] = unit.spec.key_of_version_1
    store.plan(old)
    assert sorted(row["state"] for row in survey(store).rows) == ["done", "waiting"]
    store.plan([entry(unit.spec) for unit in (done, left)])
    assert sorted((row["state"], row["key"]) for row in survey(store).rows) == [
        ("done", done.key),
        ("waiting", left.key),
    ]


def test_a_damaged_file_of_version_1_goes_when_it_was_measured_again(tmp_path: Path) -> None:
    store, unit = Store(tmp_path), make_unit()
    path = write_version_1(tmp_path, unit)
    assert unit.key in store
    store.put(unit)
    assert not (tmp_path / f"{unit.key}.parquet").exists()
    cut(path)
    assert unit.key not in store
    store.put(unit)
    assert not path.exists()
    assert Store(tmp_path).problems() == []
    assert store.get(unit.key).records
