"""What a shell can do to a command: close its pipe, fill its disk, speak ASCII, take its folders away."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_report import unit_of

from anisoscope.store import Store

COMMAND = f"{shlex.quote(sys.executable)} -c 'from anisoscope.cli import main; main()'"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminal") / "run"
    Store(folder).put(unit_of(step=1))
    return folder


def shell(script: str, run: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of shell, in which `an` is the command; every part of a pipe counts for the exit code."""
    line = f'set -o pipefail; an() {{ {COMMAND} "$@"; }}; RUN={shlex.quote(str(run))}; {script}'
    words = ["bash", "-c", line]
    return subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **environment}
    )


def test_a_reader_that_closes_the_pipe_is_no_error(run: Path) -> None:
    # More than a pipe holds, so that writing meets the closed pipe for certain.
    for command in ("an ls metrics --json", "an cite $RUN", "an --help"):
        done = shell(f"{command} | head -c 1 >/dev/null", run)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
    done = shell("{ sleep 3; an cite $RUN; } | true", run)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_a_gate_still_decides_the_exit_code_behind_a_closed_pipe(run: Path) -> None:
    gate = "'leading_variance[*] > -1'"
    done = shell(f"{{ sleep 3; an claims $RUN --fail-if {gate}; }} | true", run)
    assert done.returncode == 1
    assert "leading_variance" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_standard_output_is_a_sentence(run: Path) -> None:
    for command in ("an cite $RUN", "an ls metrics --json", "an --help", "an --version"):
        done = shell(f"{command} > /dev/full", run)
        assert done.returncode == 1, command
        assert done.stderr == "error: cannot write to standard output: No space left on device\n"
    assert shell("an cite nowhere 2> /dev/full", run).returncode == 1
    assert shell("an cite $RUN >&-", run).returncode == 0


def test_a_terminal_that_knows_only_ascii_gets_everything(run: Path) -> None:
    Store(run.parent / "odd").put(unit_of("mod\u00e8le \U0001f642", step=1))
    for command in ("an ls metrics", "an status $RUN/../odd"):
        done = shell(command, run, PYTHONIOENCODING="ascii")
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
    plain = shell("an status $RUN/../odd --json", run, PYTHONIOENCODING="utf-8")
    escaped = shell("an status $RUN/../odd --json", run, PYTHONIOENCODING="ascii")
    assert not plain.stdout.isascii()
    assert escaped.stdout.isascii()
    assert json.loads(escaped.stdout) == json.loads(plain.stdout)
    assert shell("an claims $RUN", run, LC_ALL="C").returncode == 0


def test_names_that_are_not_utf8_are_refused_or_used(run: Path, tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/caf\xe9"
    os.symlink(os.fsencode(run), odd)
    main = os.fsencode(sys.executable), b"-c", b"from anisoscope.cli import main; main()"
    for words, code in (
        ((b"cite", odd), 2),
        ((b"status", odd), 2),
        ((b"measure", odd), 2),
        ((b"measure", b"m", b"--corpus", odd), 2),
        ((b"measure", b"m", b"--config", odd), 2),
        ((b"export", os.fsencode(run), b"--to", b"csv", b"-o", odd + b".csv"), 0),
        ((b"report", os.fsencode(run), b"-o", odd + b".html"), 0),
    ):
        done = subprocess.run([*main, *words], capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == code, (words, done.stderr)
        assert "unexpected" not in done.stderr
        assert "Traceback" not in done.stderr


LONG = "x" * 5000


@pytest.mark.parametrize("name", [LONG, "loop", f"{'d/' * 2500}x"], ids=["long", "loop", "deep"])
def test_names_that_the_system_refuses_are_a_sentence(name: str, run: Path, tmp_path: Path) -> None:
    from test_validation import at_most, call

    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = tmp_path / name
    small = ("--tokens", "64", "--seq-len", "16", "--metrics", "mean_cosine")
    for words in (
        ("cite", path),
        ("status", path),
        ("claims", path),
        ("report", path),
        ("concepts", path),
        ("report", run, "-o", path),
        ("report", run, "--format", "csv", "-o", path),
        ("export", run, "--to", "csv", "-o", path),
        ("export", run, "--to", "jsonl", "-o", path),
        ("measure", path),
        ("measure", "pocket-decoder", *small, "-o", path),
        ("measure", "pocket-decoder", *small, "--corpus", path),
        ("measure", "pocket-decoder", "--revision", name, *small),
        ("sweep", path, "-o", run),
        ("sweep", "--checkpoints", path, "-o", run),
        ("train", "-o", path, "--steps", "1"),
        ("doctor", path),
        ("ls", "checkpoints", path),
    ):
        with at_most(120):
            done = call(*words)
        shown = [str(word)[-20:] for word in words]
        # A loop as output is replaced by the file, as any link that leads nowhere.
        allowed = (0, 1, 2) if name == "loop" and "-o" in words else (1, 2)
        assert done.exit_code in allowed, (shown, done.output[-300:])
        assert "unexpected" not in done.stderr, (shown, done.stderr[-300:])
        assert done.exit_code == 0 or "rror: " in done.stderr
        (tmp_path / "loop").unlink(missing_ok=True)
        (tmp_path / "loop").symlink_to(tmp_path / "loop")


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A file system of 64 KB, and one that is read-only."""
    full, read_only = tmp_path / "full", tmp_path / "read-only"
    made = []
    try:
        for folder, options in ((full, "size=64k"), (read_only, "ro")):
            folder.mkdir()
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
            )
            if done.returncode:
                pytest.skip("no right to mount a file system here")
            made.append(folder)
        yield full, read_only
    finally:
        for folder in made:
            subprocess.run(["umount", str(folder)], check=True)


def test_file_systems_that_are_full_or_read_only_are_a_sentence(mounts: tuple[Path, Path], run: Path) -> None:
    from test_validation import call

    full, read_only = mounts
    with contextlib.suppress(OSError):
        (full / "filler").write_bytes(b"x" * (1 << 20))
    small = ("--tokens", "64", "--seq-len", "16", "--metrics", "mean_cosine")
    for folder, reason in ((full, "o space left on"), (read_only, "ead-only")):
        before = sorted(folder.iterdir())
        for words in (
            ("export", run, "--to", "csv", "-o", folder / "a.csv"),
            ("export", run, "--to", "parquet", "-o", folder / "a.parquet"),
            ("export", run, "--to", "jsonl", "-o", folder),
            ("report", run, "-o", folder / "a.html"),
            ("report", run, "--format", "csv", "-o", folder / "b.csv"),
            ("measure", "pocket-decoder", *small, "-o", folder / "run"),
            ("train", "--steps", "2", "--corpus", "pydoc", "--watch", "none", "-o", folder / "trained"),
        ):
            done = call(*words)
            assert done.exit_code == 1, (words, done.output)
            assert reason in done.stderr, (words, done.stderr)
            assert "unexpected" not in done.stderr, (words, done.stderr)
            if words[0] in ("export", "report"):
                assert sorted(folder.iterdir()) == before, "nothing half written is left"
