"""Output files: complete or not there, and refused with one sentence that names them."""

import csv
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pcsv
import pytest
from test_report import stored, unit_of
from typer.testing import CliRunner

from anisoscope.atomic import check_target, complete_file, write_file
from anisoscope.cli import app
from anisoscope.errors import StoreError
from anisoscope.exporting import export_run
from anisoscope.figures import save
from anisoscope.store import Store
from anisoscope.tables import write_table

SOURCE = Path(__file__).parent.parent / "src" / "anisoscope"
# Files that grow line by line, folders that are renamed as a whole, and the module that writes.
WRITES_ITSELF = {"atomic.py", "tables.py", "store.py", "sinks.py", "tokens.py", "trainer.py"}


def limited(code: str, *, file_bytes: int) -> subprocess.CompletedProcess[str]:
    """Run code in a process whose files cannot grow beyond a size, as on a full disk."""
    limit = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({file_bytes}, {file_bytes}))\n"
    )
    return subprocess.run([sys.executable, "-c", limit + code], capture_output=True, text=True, check=False)


def test_parent_folders_are_made_and_text_is_utf8(tmp_path: Path) -> None:
    path = write_file(tmp_path / "new" / "folder" / "a.txt", "λ₁\n")
    assert path.read_bytes() == "λ₁\n".encode()
    assert [one.name for one in path.parent.iterdir()] == ["a.txt"]


def fail_while_writing(path: Path, error: BaseException) -> None:
    with complete_file(path) as temporary:
        temporary.write_text("half")
        raise error


@pytest.mark.parametrize("error", [ValueError("of the writer"), KeyboardInterrupt()])
def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = write_file(tmp_path / "a.txt", "old")
    with pytest.raises(type(error)) as caught:
        fail_while_writing(path, error)
    assert caught.value is error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def fail_so_that_nothing_can_be_removed(path: Path) -> None:
    with complete_file(path) as temporary:
        temporary.unlink()
        temporary.mkdir()
        raise ValueError("the cause")


def test_an_error_of_the_clean_up_does_not_hide_the_error_that_caused_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the cause"):
        fail_so_that_nothing_can_be_removed(tmp_path / "a.txt")


def test_a_full_disk_is_one_sentence_and_leaves_no_half_file(tmp_path: Path) -> None:
    code = (
        "from anisoscope.atomic import write_file\n"
        "from anisoscope.errors import StoreError\n"
        f"try: write_file({str(tmp_path / 'a.bin')!r}, bytes(100_000))\n"
        "except StoreError as error: print(error)\n"
    )
    done = limited(code, file_bytes=10_000)
    assert done.stdout == f"cannot write {tmp_path / 'a.bin'}: File too large\n", done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("report",), ("report", "--format", "csv"), ("export", "--to", "parquet")])
def test_a_report_or_export_on_a_full_disk_ends_with_exit_1_and_keeps_the_old_file(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    run = stored(tmp_path / "run", unit_of(step=1))
    target = write_file(tmp_path / "out" / "old", "old")
    words = [command[0], str(run), *command[1:], "-o", str(target)]
    done = limited(f"from anisoscope.cli import app\napp({words!r})", file_bytes=600)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"error: cannot write {target}: .*[Ff]ile too large.*\n", done.stderr), done.stderr
    assert target.read_text() == "old"
    assert list(target.parent.iterdir()) == [target]


def test_folders_and_files_in_the_way_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="it is a folder; name a file"):
        write_file(tmp_path, "")
    with pytest.raises(StoreError, match="a file stands where its folder should be"):
        write_file(tmp_path / "file" / "a" / "b.txt", "")
    with pytest.raises(StoreError, match=r"cannot write .*: File name too long"):
        write_file(tmp_path / ("a" * 5000), "")


def test_a_write_protected_file_or_folder_is_refused() -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from anisoscope.atomic import check_target, write_file\n"
        "from anisoscope.errors import StoreError\n"
        "folder = Path(sys.argv[1])\n"
        # The administrator may write everywhere: then it is tried as another user, in a folder of their own.
        "if os.geteuid() == 0: os.chown(folder, 65534, -1); os.setuid(65534)\n"
        "path = write_file(folder / 'a.txt', 'old')\n"
        "path.chmod(0o444)\n"
        "def refused(act, *given):\n"
        "    try: act(*given)\n"
        "    except StoreError as error: print(error)\n"
        "refused(write_file, path, 'new')\n"
        "folder.chmod(0o555)\n"
        "refused(check_target, folder / 'b.txt')\n"
        "print(path.read_text())\n"
    )
    with tempfile.TemporaryDirectory() as name:
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=False)
        os.chmod(name, 0o755)
    path = f"{name}/a.txt"
    assert done.stdout == (
        f"cannot write {path}: {path} is read-only\ncannot write {name}/b.txt: {name} is read-only\nold\n"
    ), done.stderr


def test_a_read_only_file_system_is_refused() -> None:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()] if os.name == "posix" else []
    folder = next((Path(m[1]) for m in mounts if m[3].startswith("ro") and Path(m[1]).is_dir()), None)
    if folder is None:
        pytest.skip("no read-only file system here")
    with pytest.raises(StoreError, match=f"cannot write {folder}/report.html: .* is read-only"):
        check_target(folder / "report.html")


def test_the_target_of_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    real = write_file(tmp_path / "real" / "a.txt", "old")
    link = tmp_path / "link.txt"
    link.symlink_to(real)
    write_file(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"


def test_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    run = stored(tmp_path / "run", unit_of(step=1))
    code = f"from anisoscope.cli import app\napp(['report', {str(run)!r}, '--format', 'csv', '-o', '/dev/stdout'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('"key","model"')
    assert Path("/dev/stdout").exists()


def test_figures_exports_and_reports_leave_no_temporary_files(tmp_path: Path) -> None:
    run = stored(tmp_path / "run", unit_of(step=1))
    out = tmp_path / "out"
    for to in ("csv", "parquet", "jsonl"):
        export_run(Store(run), to, out / "rows" if to != "jsonl" else out)
    from altair import Chart

    save(Chart({"values": [{"x": 1}]}).mark_point(), out / "a.json")
    assert sorted(path.name for path in out.iterdir()) == ["a.json", "rows", "tiny.pydoc.jsonl"]


def test_every_module_writes_files_through_atomic() -> None:
    calls = (r"\.write_(text|bytes)", r"np\.savez?", r"write_csv", r"pq\.write_table")
    pattern = re.compile(rf"({'|'.join(calls)})\(|open\([^)]*[\"'][wax]b?[\"']")
    others = [path for path in SOURCE.rglob("*.py") if path.name not in WRITES_ITSELF]
    found = [path.name for path in others if pattern.search(path.read_text())]
    assert not found, "write files with atomic.write_file"


HOSTILE = ("=cmd|calc", "+1", "-1", "@sum", "\tx", "\rx")


def test_text_that_could_be_a_formula_is_no_formula_in_a_csv_file(tmp_path: Path) -> None:
    columns = {"model": pa.array([*HOSTILE, "plain", None]), "value": pa.array([-1.5, *[2.0] * 7])}
    write_table(pa.table(columns), tmp_path / "a.csv", to="csv")
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == [*(f"'{text}" for text in HOSTILE), "plain", ""]
    assert rows[0]["value"] == "-1.5", "a number stays a number"


@pytest.mark.parametrize("command", [("report", "--format", "csv"), ("export", "--to", "csv")])
def test_a_model_named_like_a_formula_is_no_formula_in_any_csv_file(tmp_path: Path, command: tuple[str, ...]) -> None:
    run = stored(tmp_path / "run", unit_of("=cmd|calc", step=1, shift=-5.0))
    target = tmp_path / "a.csv"
    done = CliRunner().invoke(app, [command[0], str(run), *command[1:], "-o", str(target)])
    assert done.exit_code == 0, done.output
    found = pcsv.read_csv(target)
    assert set(found["model"].to_pylist()) == {"'=cmd|calc"}
    assert min(found["value"].to_pylist()) < 0


def test_lists_in_csv_cells_are_json(tmp_path: Path) -> None:
    unit = unit_of(step=1)
    odd = (0.1, float("nan"), float("-inf"), 1 / 3)
    run = stored(tmp_path / "run", replace(unit, records=(replace(unit.records[0], values=odd), *unit.records[1:])))
    export_run(Store(run), "csv", tmp_path / "a.csv")
    texts = pcsv.read_csv(tmp_path / "a.csv")["values"].to_pylist()
    assert "[0.1, NaN, -Infinity, 0.3333333333333333]" in texts
