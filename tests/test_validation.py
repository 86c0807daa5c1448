"""Settings are refused before anything is loaded: one table of rules for Python, flags and TOML files."""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_report import unit_of
from typer.testing import CliRunner, Result

import anisoscope as an
from anisoscope.cli import app
from anisoscope.engines import ENGINES
from anisoscope.errors import CorpusError, SpecError
from anisoscope.inputs import read_file
from anisoscope.metrics.neighbors import GRIDE_SCALES
from anisoscope.records import Spec
from anisoscope.store import Store
from anisoscope.validation import ENGINES as ENGINE_NAMES
from anisoscope.validation import GRIDE_SCALES as NAMED_SCALES
from anisoscope.validation import RULES, check_setting


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_every_field_has_a_rule_and_its_default_follows_it() -> None:
    assert set(RULES) == {item.name for item in fields(Spec)} - {"unknown_fields"}
    for item in fields(Spec):
        if item.name in RULES and item.name != "model":
            check_setting(item.name, item.default)
    for name, rule in RULES.items():
        if rule.example is not None and not rule.several:
            check_setting(name, rule.example)


def test_names_that_stand_twice_are_the_same() -> None:
    assert NAMED_SCALES == GRIDE_SCALES
    assert tuple(ENGINES) == ENGINE_NAMES


REFUSED: tuple[tuple[str, Any], ...] = (
    ("model", ""),
    ("model", "  "),
    ("model", "a\0b"),
    ("model", "caf\udce9"),
    ("tokens", 0),
    ("tokens", True),
    ("tokens", 1.5),
    ("tokens", "many"),
    ("tokens", 10**30),
    ("seq_len", -1),
    ("special_tokens", 1),
    ("batch_points", 1),
    ("dtype", "float23"),
    ("seed", -1),
    ("seed", 2**64),
    ("sites", ()),
    ("sites", ("finalnorm",)),
    ("sites", ("",)),
    ("sites", "embed"),
    ("populations", ("typicl",)),
    ("typical_k", -1.0),
    ("typical_k", 0.0),
    ("typical_k", math.nan),
    ("typical_k", math.inf),
    ("metrics", ()),
    ("metrics", (("twonn", "1"),)),
    ("discard_fraction", 1.0),
    ("discard_fraction", math.nan),
    ("gride_scales", (3,)),
    ("neighbors", 1),
    ("isoscore_zeta", 1.1),
    ("rank", 0),
    ("rank", True),
    ("rank", "variance:"),
    ("rank", "variance:0"),
    ("rank", "variance:1.5"),
    ("rank", "variance:nan"),
    ("rank", "some"),
    ("curvature_rank", 0),
    ("proxy", "pac"),
    ("gradients", ("virtul",)),
    ("gradients", ("linear:",)),
    ("controls", ("share",)),
    ("step", -1),
)


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda one: repr(one)[:30])
def test_impossible_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=rf"^{name}.* must be .+; got "):
        check_setting(name, value)


@pytest.mark.parametrize("rank", [1, 500, "variance", "variance:0.9", "variance:1", "twonn", "participation_ratio"])
def test_ranks_that_work_are_accepted(rank: int | str) -> None:
    assert Spec(model="m", rank=rank).rank == rank


def test_an_error_names_field_flag_range_value_and_what_would_work() -> None:
    with pytest.raises(SpecError) as raised:
        Spec(model="m", populations=("all", "typicl"))
    assert str(raised.value) == (
        "populations (--populations) must be out of all, content, typical, types, matched; got 'typicl'; "
        "did you mean typical?; example: --populations all,typical"
    )
    with pytest.raises(SpecError, match=r"--curvature-rank.* between 1 and \d+; got 0; example: --curvature-rank 4"):
        Spec(model="m", curvature_rank=0)


def test_python_numbers_and_lists_of_other_kinds_are_taken_as_what_they_are() -> None:
    # In a process of its own: here the tests check types themselves.
    code = (
        "import numpy as np, json; from anisoscope import Spec\n"
        "spec = Spec(model='m', tokens=np.int64(64), typical_k=np.float32(6), sites=['block.*'])\n"
        "plain = Spec(model='m', tokens=64, sites=('block.*',))\n"
        "assert spec == plain and spec.key == plain.key, spec\n"
        "try: Spec(model='m', tokens=True)\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("tokens (--tokens) must be a whole number between 1 and"), done.stderr


def test_a_stored_spec_is_read_whatever_the_rules_are(tmp_path: Path) -> None:
    old = Spec(model="m").as_dict() | {"typical_k": -1.0, "curvature_rank": 0}
    spec = Spec.from_dict(old)
    assert spec.typical_k == -1.0
    assert spec.as_dict() == old
    store = Store(tmp_path / "run")
    unit = unit_of(step=1)
    stored = Spec.from_dict(unit.spec.as_dict() | {"seed": 2**40})
    key = stored.key
    store.put(replace(unit, spec=stored, records=tuple(replace(row, key=key) for row in unit.records)))
    assert store.get(key).spec == stored


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("measure", "m", "--seed", "-1"), "--seed"),
        (("measure", "m", "--typical-k", "-1"), "--typical-k"),
        (("measure", "m", "--typical-k", "nan"), "--typical-k"),
        (("measure", "m", "--curvature-rank", "-1"), "--curvature-rank"),
        (("measure", "m", "--gradients", "vortual"), "did you mean virtual"),
        (("measure", "m", "--proxy", "pcaa"), "did you mean pca"),
        (("measure", "m", "--rank", "variance:"), "variance:0.9"),
        (("measure", "m", "--rank", "--5"), "--rank"),
        (("measure", "m", "--sites", ""), "--sites"),
        (("measure", "m", "--sites", "blocks.3"), "block.*"),
        (("measure", "m", "--metrics", " , "), "--metrics"),
        (("measure", "m", "--controls", "norm=own"), "--controls"),
        (("measure", "m", "--batch-size", "²"), "--batch-size"),
        (("measure", "m", "--batch-size", "0"), "--batch-size"),
        (("measure", "m", "--corpus", ""), "--corpus"),
        (("measure", ""), "model must be"),
        (("measure", "m", "--tokens", "²"), "--tokens"),
        (("sweep", "m", "-o", "{run}", "--workers", "-1"), "--workers"),
        (("sweep", "m", "-o", "{run}", "--workers", "0"), "--workers"),
        (("sweep", "m", "-o", "{run}", "--gpus-per-job", "nan"), "--gpus-per-job"),
        (("sweep", "m", "-o", "{run}", "--gpus-per-job", "-1"), "--gpus-per-job"),
        (("sweep", "m", "-o", "{run}", "--cpus-per-job", "0"), "--cpus-per-job"),
        (("sweep", "m", "-o", "{run}", "--max-retries", "-1"), "--max-retries"),
        (("sweep", "m", "-o", "{run}", "--downloads", "0"), "--downloads"),
        (("sweep", "m", "-o", "{run}", "--engine", "slrum"), "did you mean slurm"),
        (("sweep", "m", "-o", "{run}", "--every", "0"), "--every"),
        (("sweep", "m", "-o", "{run}", "--log-spaced", "0"), "--log-spaced"),
        (("sweep", "m", "-o", "{run}", "--tokens-per-step", "-1"), "--tokens-per-step"),
        (("sweep", "m", "-o", "{run}", "--corpora", ","), "--corpora"),
        (("sweep", "m"), "-o RUN"),
        (("train", "-o", "{run}", "--width", "0"), "--width"),
        (("train", "-o", "{run}", "--learning-rate", "-1"), "--learning-rate"),
        (("train", "-o", "{run}", "--learning-rate", "nan"), "--learning-rate"),
        (("train", "-o", "{run}", "--dropout", "nan"), "--dropout"),
        (("train", "-o", "{run}", "--steps", "0"), "--steps"),
        (("train", "-o", "{run}", "--budget", "0"), "--budget"),
        (("train", "-o", "{run}", "--max-seconds", "inf"), "--max-seconds"),
        (("train", "-o", "{run}", "--watch-steps", "-3"), "--watch-steps"),
        (("train", "-o", "{run}", "--seed", "-1"), "--seed"),
        (("train", "-o", "{run}", "--regularize", "isoscore=nan"), "--regularize"),
        (("train", "-o", "{run}", "--metrics", ","), "--metrics"),
        (("train", "-o", "{run}", "--watch", "standrad"), "unknown preset"),
        (("train", "-o", "{run}", "--stop-if", "loss > 3"), "a condition reads"),
        (("demo", "-o", "{run}", "--tokens", "0"), "--tokens"),
        (("claims", "{run}", "--seed", "-1"), "--seed"),
        (("claims", "{run}", "--against", "a.csv"), "--correlate"),
        (("report", "{run}", "--seed", "-1"), "--seed"),
        (("serve", "{run}", "--port", "-1"), "--port"),
        (("reproduce", "bernas2026", "-o", "{run}", "--workers", "-1"), "--workers"),
        (("reproduce", "bernas2026", "-o", "{run}", "--seeds", "0"), "--seeds"),
        (("reproduce", "bernas2026", "-o", "{run}", "--tokens", "-4"), "--tokens"),
    ],
    ids=lambda one: " ".join(one)[:60] if isinstance(one, tuple) else None,
)
def test_flags_out_of_range_are_usage_errors_before_anything_is_written(
    words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = call(*(str(run) if word == "{run}" else word for word in words))
    assert done.exit_code == 2, done.output
    assert told in done.stderr
    assert "unexpected" not in done.stderr
    assert not run.exists()


def test_flags_are_checked_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['measure', 'm', '--seed', '-1']\n"
        "from anisoscope.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: seed (--seed) must be a whole number between 0 and")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("tokens = true", "tokens must be of type int; got True"),
        ("tokens = 1.5", "tokens must be of type int; got 1.5"),
        ('tokens = "64"', "tokens must be of type int; got '64'"),
        ("typical-k = true", "typical-k must be of type float; got True"),
        ("dtype = true", "dtype must be of type text; got True"),
        ("owners = 1", "owners must be of type bool; got 1"),
        ("sites = [1979-05-27]", "sites must be of type text"),
        ("metrics = [[1]]", "metrics must be of type text"),
        ("[corpus]\nname = 'x'", "corpus must be of type text"),
        ("seed = -1", "seed (--seed) must be a whole number"),
        ("sites = []", "--sites takes one or more words"),
        ("tokens = ", "is not valid TOML"),
        ("a = " + "[" * 5000, "is not valid TOML"),
    ],
)
def test_values_of_a_config_file_are_checked_by_type(line: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(line)
    done = call("measure", "m", "--config", tmp_path / "a.toml")
    assert done.exit_code == 2, done.output
    assert told in done.stderr


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """End what takes longer, reading from a pipe that nobody writes to included."""

    def end(*_: object) -> None:
        raise AssertionError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def odd_files(folder: Path) -> dict[str, Path]:
    """A path to each kind of thing that is no plain small text."""
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    with (folder / "large").open("wb") as file:
        file.truncate(1 << 40)
    (folder / "binary").write_bytes(b"\xff\xfe\0")
    paths = {name: folder / name for name in ("pipe", "loop", "large", "binary", "missing")}
    return {**paths, "folder": folder, "zero": Path("/dev/zero"), "long": folder / ("x" * 5000)}


@pytest.mark.parametrize(
    "words",
    [
        ("measure", "m", "--config", "{}"),
        ("sweep", "m", "-o", "{run}", "--list", "{}"),
        ("claims", "{run}", "--correlate", "isoscore[final_norm]", "--against", "{}"),
        ("measure", "m", "--corpus", "enwik8:{}"),
    ],
    ids=lambda words: words[-2],
)
def test_files_that_cannot_be_read_are_named_and_nothing_hangs(words: tuple[str, ...], tmp_path: Path) -> None:
    run = tmp_path / "run"
    Store(run).put(unit_of(step=1))
    for kind, path in odd_files(tmp_path).items():
        arguments = [word.format(path) if "{}" in word else str(run) if word == "{run}" else word for word in words]
        with at_most(20):
            done = call(*arguments)
        assert done.exit_code in (1, 2), (kind, done.output)
        assert re.search(r"cannot be read|is not UTF-8|is empty", done.stderr), (kind, done.stderr)
        assert "Traceback" not in done.stderr
        assert len(done.stderr) < 6000


def test_a_file_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_file(tmp_path / "a", at_most=5) == b"12345"
    with pytest.raises(CorpusError, match="it has 5 bytes, and at most 4 are read"):
        read_file(tmp_path / "a", at_most=4, error=CorpusError)


def test_a_sweep_refuses_zero_workers_from_python(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"workers .* must be a whole number between 1"):
        an.run_sweep([], tmp_path / "run", "processes", workers=-1)
    with pytest.raises(SpecError, match="gpus_per_job"):
        an.run_sweep([], tmp_path / "run", gpus_per_job=math.nan)
    assert not (tmp_path / "run").exists()


def test_a_data_frame_is_measured_by_its_values() -> None:
    import pandas as pd

    array = np.random.default_rng(0).normal(size=(200, 5))
    frame = pd.DataFrame(array, columns=list("abcde"), index=range(64, 264))
    expected = an.estimate(array, ["leading_variance", "twonn"])
    assert an.estimate(frame, ["leading_variance", "twonn"]) == expected
    frame["name"] = "text"
    with pytest.raises(
        SpecError, match=r"points must be a matrix of floats.* not numbers .*select the numeric columns"
    ):
        an.estimate(frame, ["leading_variance"])


def test_gradients_of_another_shape_are_refused_whatever_is_measured() -> None:
    points = np.random.default_rng(0).normal(size=(64, 4))
    with pytest.raises(SpecError, match="grads must be of the shape of the points"):
        an.estimate(points, ["leading_variance"], grads=points[:, :3])
    with pytest.raises(SpecError, match="windows must be 64 whole numbers"):
        an.estimate(points, ["leading_variance"], windows=np.arange(3))
    with pytest.raises(SpecError, match=r"seed .* must be a whole number"):
        an.estimate(points, ["leading_variance"], seed=-1)


@pytest.mark.parametrize("text", ["a\nb,c\n", "\n\n1,2\n", "model,step,x\nm,1\n", "model,step,x\nm,1,2,3\n"])
def test_a_ragged_csv_file_is_a_sentence(text: str, tmp_path: Path) -> None:
    Store(tmp_path / "run").put(unit_of(step=1))
    (tmp_path / "a.csv").write_text(text)
    done = call("claims", tmp_path / "run", "--correlate", "twonn[final_norm]", "--against", tmp_path / "a.csv")
    assert done.exit_code in (0, 2), done.output
    assert "unexpected" not in done.stderr
