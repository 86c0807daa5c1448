"""No command line and no damaged store gives a traceback, "unexpected error", a hang or an exit code outside 0 to 3.

Command lines are drawn from every command and flag there is, with hostile values; stores are damaged by hand. Nothing
is measured: models do not exist, and `train`, `demo` and `reproduce` get arguments that end before any work.
"""

import contextlib
import faulthandler
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_report import unit_of
from test_validation import at_most
from typer.testing import CliRunner

from anisoscope.cli import app
from anisoscope.store import Store

SECONDS = 20
FEW = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
MANY = settings(FEW, max_examples=1000)

NUMBERS = [
    "0",
    "-1",
    "1",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "²",
    "٣",
    "1_0",
    "0x10",
    "9" * 30,
    "9" * 5000,
    "1.5",
    "--5",
    "",
]
WORDS = ["", " ", ",", "x", "auto", "all", "block.*", "block.", "[", "*", "\U0001f642", "é", "\udce9", "a\nb", "=cmd|x"]
WORDS += ["variance:", "variance:nan", "linear:", "-", "--", "..", "/", "%s", "{}", "'", "x" * 5000, "hf:", "heldout:"]
WORDS += [
    "enwik8:",
    "a@b",
    "a@",
    "@",
    "a=b",
    "=",
    "mean_cosine[final_norm]",
    "isoscore[*] > nan",
    "twonn[block.*] > 1 for 0",
]
# Folders in which drawn paths stand; made once.
FILES = (
    "pipe",
    "loop",
    "folder",
    "empty",
    "binary",
    "text.toml",
    "wrong.toml",
    "missing",
    "run",
    "empty run",
    "x" * 300,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with odd files and a small run."""
    folder = tmp_path_factory.mktemp("fuzz")
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "folder").mkdir()
    (folder / "folder" / "config.json").mkdir()
    (folder / "empty run").mkdir()
    (folder / "empty").write_bytes(b"")
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "text.toml").write_text("seed = 1\n")
    (folder / "wrong.toml").write_text("seed = [[true]]\nx = 1\n")
    for step in (1, 2, 3):
        Store(folder / "run").put(unit_of(step=step))
    return folder


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


# These end only when they are interrupted, or do minutes of work where every flag happens to be good.
BY_HAND = {"serve": ["--host", "256.0.0.1"], "demo": ["--tokens", "0"], "train": ["--kind", "neither"]}
BY_HAND |= {"reproduce": ["--dry-run"], "sweep": ["--engine", "none"]}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command with some of its flags and arguments; `{}` stands for the folder of odd files."""
    name = draw(st.sampled_from(sorted(commands())))
    value = st.sampled_from(NUMBERS) | st.sampled_from(WORDS) | st.sampled_from([f"{{}}/{file}" for file in FILES])
    value |= st.text(max_size=8) | st.sampled_from(["/dev/zero", "/dev/null", "/proc/self/mem", "/"])
    words = [name]
    for item in commands()[name].params:
        if not item.opts[0].startswith("-"):
            words += draw(st.lists(value | st.just("{}/run"), max_size=2))
        elif item.name not in ("help", "debug") and draw(st.integers(0, 3)) == 0:
            words.append(draw(st.sampled_from([*item.opts, *item.secondary_opts])))
            if not getattr(item, "is_flag", False):
                words.append(draw(value))
    return words + BY_HAND.get(name, [])


def run(words: list[str]) -> None:
    """The command in this process; everything it may not do is an AssertionError."""
    shown = [word if len(word) < 60 else f"{word[:60]}..." for word in words]
    # The alarm ends what Python can interrupt; a library that waits in C is ended with the whole process.
    faulthandler.dump_traceback_later(6 * SECONDS, exit=True)
    try:
        with at_most(SECONDS):
            done = CliRunner().invoke(app, words)
    finally:
        faulthandler.cancel_dump_traceback_later()
    told = done.output + "".join(traceback.format_exception(done.exception) if done.exception else [])
    assert done.exception is None or isinstance(done.exception, SystemExit), (shown, told[-2000:])
    assert done.exit_code in (0, 1, 2, 3), shown
    assert "unexpected error" not in done.output, (shown, told[-1000:])
    assert "Traceback" not in done.output, (shown, told[-1000:])
    assert done.exit_code == 0 or done.output.strip(), f"failed without a word: {shown}"


@contextlib.contextmanager
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own, where relative outputs may be written; without any network."""
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@FEW
@given(words=command_lines())
def test_no_command_line_surprises(words: list[str], place: Path, monkeypatch_module: pytest.MonkeyPatch) -> None:
    with inside(place / "folder", monkeypatch_module):
        run([word.replace("{}", str(place)) if "{}/" in word else word for word in words])


@pytest.mark.slow(reason="1,000 command lines")
@settings(MANY, derandomize=False)
@given(words=command_lines())
def test_no_command_line_surprises_at_length(
    words: list[str], place: Path, monkeypatch_module: pytest.MonkeyPatch
) -> None:
    with inside(place / "folder", monkeypatch_module):
        run([word.replace("{}", str(place)) if "{}/" in word else word for word in words])


@pytest.mark.parametrize("text", ["", "{}", "null", "[]", '{"protocol": "x"}', "[" * 9000])
def test_a_malformed_note_of_a_reproduction_is_named(text: str, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    (tmp_path / "run" / "reproduction.json").write_text(text)
    done = CliRunner().invoke(app, ["cite", str(tmp_path / "run")])
    assert done.exit_code in (1, 2)
    assert "reproduction.json does not name a protocol" in done.stderr or "unknown protocol 'x'" in done.stderr


@pytest.mark.parametrize(
    "words", [["measure", "--config", "/dev/zero"], ["cite", "pipe"], ["claims", "\udce9"], ["export", "x" * 5000]]
)
def test_the_entry_point_itself_does_not_surprise(words: list[str], place: Path) -> None:
    command = [sys.executable, "-c", "from anisoscope.cli import main; main()", *map(os.fsencode, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=place)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def _foreign(path: Path, seed: int) -> None:
    columns = [{"a": [1]}, {"key": ["x"], "value": [None]}, {"key": [None], "model": [3]}, {}]
    pq.write_table(pa.table(columns[seed % len(columns)]), path)


def _flip(path: Path, seed: int) -> None:
    data = bytearray(path.read_bytes())
    for step in range(1 + seed % 5):
        if data:
            data[(seed * 7919 + step * 104729) % len(data)] ^= 1 << (seed % 8)
    path.write_bytes(data)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _replace_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


DAMAGES: dict[str, Callable[[Path, int], object]] = {
    "truncate": lambda path, seed: path.write_bytes(path.read_bytes()[: seed % max(path.stat().st_size, 1)]),
    "flip": _flip,
    "empty": lambda path, _: path.write_bytes(b""),
    "copy": lambda path, _: shutil.copy(path, path.with_name(f"{path.stem} (copy){path.suffix}")),
    "foreign": _foreign,
    "foreign beside": lambda path, seed: _foreign(path.with_name(f"other{seed % 3}.parquet"), seed),
    "json": lambda path, _: path.write_text('{"a": [1, null]}'),
    "lists": lambda path, _: path.write_text("[[[" * 2000),
    "remove": lambda path, _: path.unlink(),
    "folder": lambda path, _: _replace_by_folder(path),
    "pipe": lambda path, _: _replace_by_pipe(path),
    "loop": lambda path, _: _replace_by_loop(path),
    "pipe beside": lambda path, seed: os.mkfifo(path.with_name(f"pipe{seed}.parquet")),
    "note": lambda path, seed: path.with_name(f"{path.stem}{seed % 2}.failed.json").write_text("[" * (seed % 4)),
    "plan": lambda path, seed: path.with_name("x.plan.json").write_text(["", "{}", "[1]", "[{}]"][seed % 4]),
    "running": lambda path, seed: path.with_name("x.running.json").write_text(["", "{}", "null", "3"][seed % 4]),
    "paper": lambda path, seed: path.with_name("reproduction.json").write_text(["", "{}", "null", "[]"][seed % 4]),
}
READING = (
    ("status",), ("status", "--json"), ("claims",), ("cite",), ("concepts",), ("export", "--to", "csv"),
    ("export", "--to", "jsonl"), ("report", "--format", "csv", "-o", "out.csv"),
)  # fmt: skip
damage = st.lists(
    st.tuples(st.sampled_from(sorted(DAMAGES)), st.integers(0, 10), st.integers(0, 1 << 20)), min_size=1, max_size=3
)


def damaged_store_is_read(place: Path, harm: list[tuple[str, int, int]], command: tuple[str, ...]) -> None:
    folder = place / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place / "run", folder)
    if len(harm) % 2:
        # The merged file of the tables is damaged as well as what it was made from.
        Store(folder).table()
    for kind, which, seed in harm:
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
        if files:
            with contextlib.suppress(OSError):  # an earlier damage stands in the way
                DAMAGES[kind](files[which % len(files)], seed)
    name, *rest = command
    run([name, str(folder), *rest])


@FEW
@given(harm=damage, command=st.sampled_from(READING))
def test_no_damaged_store_surprises(
    harm: list[tuple[str, int, int]],
    command: tuple[str, ...],
    place: Path,
    monkeypatch_module: pytest.MonkeyPatch,
) -> None:
    with inside(place / "folder", monkeypatch_module):
        damaged_store_is_read(place, harm, command)


@pytest.mark.slow(reason="1,000 damaged stores")
@settings(MANY, derandomize=False)
@given(harm=damage, command=st.sampled_from(READING))
def test_no_damaged_store_surprises_at_length(
    harm: list[tuple[str, int, int]],
    command: tuple[str, ...],
    place: Path,
    monkeypatch_module: pytest.MonkeyPatch,
) -> None:
    with inside(place / "folder", monkeypatch_module):
        damaged_store_is_read(place, harm, command)
