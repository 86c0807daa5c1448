"""A folder of immutable result files, one Parquet file each; a good file is a finished measurement.

    RUN/<key>.parquet        records; the Spec and provenance in the file's metadata
    RUN/<key>.<hash>.safetensors   attachments, written first; their hash stands in the Parquet metadata
    RUN/<key>.failed.json    the last error of a unit that failed; a success removes it
    RUN/<key>.running.json   who is measuring it; touched while that lives, and never a lock
    RUN/<hash>.plan.json     the units a sweep is to make
    RUN/.merged-2.parquet    the rows of all results in one file, with an index; deleting it costs time only

Every file is written under a temporary name, flushed to disk and renamed: a reader never sees half a unit, and a killed
writer leaves at most a hidden temporary file. Of several writers of one unit, on whatever hosts, the first counts.

Every reader goes through `result_files.read_result`: files that are damaged, foreign or copies are named in a warning
(logger `anisoscope.store`) and passed over. A damaged result is not finished: measuring it again replaces the file.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anisoscope import merged
from anisoscope.columns import SCHEMA as SCHEMA
from anisoscope.columns import TABLE_SCHEMA, record_from, settings_columns
from anisoscope.errors import SpecError, StoreError
from anisoscope.merged import MergedFile, RowCollector
from anisoscope.records import Spec, Unit, site_order
from anisoscope.result_files import (
    ResultFile,
    Stamp,
    UnusableFileError,
    attachment_name,
    first_line,
    load_arrays,
    printable,
    read_regular_file,
    read_result,
    replace_keys,
    stamp_of,
    write_result,
)
from anisoscope.revisions import training_order

log = logging.getLogger("anisoscope.store")

# A unit that is being measured shows a sign of life this often; three that fail to come mean it is dead.
HEARTBEAT_SECONDS = 10.0
# So many results, and a tenth of those that are merged, are worth writing the merged file again.
MERGED_AT_ONCE = 200
# Files written so recently may be replaced within the resolution of their time (2 s on some file systems).
SETTLED_SECONDS = 2.0


def name_trainings(table: pa.Table) -> pa.Table:
    """The table with the name of the run in place of the model where it was measured live.

    Two trainings of one model are two curves.
    """
    if "run" not in table.column_names:
        return table
    names = pc.coalesce(table["run"], table["model"])  # pyright: ignore[reportAttributeAccessIssue]
    return table.set_column(table.column_names.index("model"), "model", names)


@dataclass(frozen=True, kw_only=True)
class _Scan:
    """A run folder at one moment."""

    files: tuple[ResultFile, ...]
    """The good results in the order of their file names, each with its current key."""
    problems: tuple[str, ...]
    """A sentence for each file that is not read."""
    merged: MergedFile | None
    fresh: RowCollector
    """Rows of the files that were read just now."""
    rows: pa.Table | None = None
    """Those of all results, where they were needed already."""


class Store:
    """The units of a run."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Name a run folder; it is made when the first unit is put."""
        self.folder = Path(folder)
        try:
            str(self.folder).encode()
        except UnicodeEncodeError as error:
            raise SpecError(f"the name of the run folder, {str(folder)!a}, is not UTF-8: give it another") from error
        self._known: dict[str, ResultFile] = {}
        self._older: dict[str, ResultFile] | None = None
        self._merged: tuple[Stamp, MergedFile | None] | None = None
        self._can_merge = True

    def keys(self) -> set[str]:
        """Keys of the finished units."""
        return {file.key for file in self._scan().files}

    def __contains__(self, key: str) -> bool:
        try:
            self._read(key)
        except StoreError:
            return False
        return True

    def put(self, unit: Unit) -> Path:
        """Write a unit; one that is already there stays as it is, unless its file is damaged."""
        path = self.folder / f"{unit.key}.parquet"
        if unit.key in self:
            return path
        attached, sha256, is_new = None, None, False
        if unit.attachments:
            from safetensors.numpy import save

            data = save({name: np.ascontiguousarray(values) for name, values in unit.attachments.items()})
            sha256 = hashlib.sha256(data).hexdigest()
            attached = self.folder / attachment_name(unit.key, sha256)
            is_new = not attached.exists()
            self._write(attached.name, data)
        try:
            data = write_result(unit, sha256)
            is_first = self._write(path.name, data, once=True)
            if not is_first and unit.key not in self:
                # What is there is no result, but damaged: it is replaced.
                is_first = self._write(path.name, data)
        except BaseException:
            if attached is not None and is_new and unit.key not in self:
                _remove(attached)
            raise
        if not is_first and attached is not None and attached.name != self._read(unit.key)[0].attachment:
            _remove(attached)
        _remove(self.folder / f"{unit.key}.failed.json")
        # Nor was a file that version 1 wrote of the same Spec, if there is one.
        older = self.folder / f"{unit.spec.key_of_version_1}.parquet"
        if older.is_file():
            _remove(older)
        return path

    def put_failure(self, spec: Spec, error: BaseException) -> Path:
        """Note that a unit failed, and why; a later success replaces it."""
        note = {
            "spec": spec.as_dict(),
            "error": type(error).__name__,
            "message": str(error),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        name = f"{spec.key}.failed.json"
        self._write(name, json.dumps(note, indent=1).encode())
        return self.folder / name

    def get(self, key: str) -> Unit:
        """A unit as it was put; `key` may be one that an older version gave it."""
        file, rows, attached = self._read(key)
        return Unit(
            spec=Spec.from_dict(json.loads(file.spec)),
            provenance=json.loads(file.provenance),
            records=tuple(record_from(row | {"key": file.key}) for row in rows.to_pylist()),
            attachments=load_arrays(file, attached),
        )

    def attachment(self, key: str) -> dict[str, np.ndarray]:
        """The arrays attached to a unit; refused when they are not those it was written with."""
        file, _, attached = self._read(key)
        return load_arrays(file, attached)

    def spec(self, key: str) -> dict[str, Any]:
        """The fields of a unit's Spec, those of a newer version too."""
        return json.loads(self._read(key)[0].spec)

    def results(self) -> dict[str, ResultFile]:
        """Every finished unit by its key, without its records: its file, Spec and provenance."""
        return {file.key: file for file in self._scan().files}

    def problems(self) -> list[str]:
        """A sentence for each file that is passed over: damaged, foreign, a copy, or a note that cannot be read."""
        unreadable = [note for kind in _NOTES for _, note, _ in self._read_notes(kind) if isinstance(note, str)]
        return [*self._scan().problems, *unreadable]

    def table(self) -> pa.Table:
        """One row per record of every finished unit, in order of model, stage, step, site, metric, population.

        After the columns of a Record come the settings of the unit's Spec (`columns.SETTINGS_SCHEMA`).
        """
        scan = self._scan()
        rows = self._rows(scan) if scan.rows is None else scan.rows
        files, scan, self._merged = scan.files, None, None  # the bytes of the merged file, which are many
        numbers = rows["result"].combine_chunks()
        keys = pa.array([file.key for file in files], pa.string()).take(numbers)
        settings = settings_columns((json.loads(file.spec) for file in files), numbers)
        return pa.table([keys, *rows.drop_columns(["result"]).columns, *settings], schema=TABLE_SCHEMA)

    def failures(self) -> list[dict[str, Any]]:
        """What is known of the units that failed and have not succeeded since, whatever their weights were then."""
        notes = [note for _, note, _ in self._read_notes("failed") if not isinstance(note, str)]
        # A failure that an older version noted has another key there.
        notes.sort(key=lambda note: str(note.get("time")))
        failed = {Spec.from_dict(note["spec"]).key: note for note in notes}
        if not failed:
            return []
        answered = _answered(self.results(), {note["spec"]["model"] for note in failed.values()})
        return [{"key": key, **note} for key, note in sorted(failed.items()) if not _requests(note["spec"]) & answered]

    def plan(self, entries: Sequence[dict[str, Any]]) -> Path:
        """Note what a sweep is to make: one entry with a `key` per unit. The same plan is the same file."""
        data = json.dumps(list(entries), indent=1, ensure_ascii=False).encode()
        name = hashlib.sha256("".join(sorted(entry["key"] for entry in entries)).encode()).hexdigest()[:20]
        self._write(f"{name}.plan.json", data)
        return self.folder / f"{name}.plan.json"

    def planned(self) -> dict[str, dict[str, Any]]:
        """Every unit that some sweep is to make, by key.

        Of one request with other weights the later plan counts. What an older version planned and did not make is left
        out where a later plan has the same checkpoint and text.
        """
        plans = [(stamp[1], note) for _, note, stamp in self._read_notes("plan") if not isinstance(note, str)]
        plans.sort(key=lambda plan: plan[0])
        entries = {entry.get("request", entry["key"]): entry for _, plan in plans for entry in plan}
        if not entries:
            return {}
        results, older = self.results(), self._older or {}
        named = {older[key].key if (key := entry["key"]) in older else key: entry for entry in entries.values()}
        waiting = {key: entry for key, entry in named.items() if key not in results}
        answered = _answered(results, {entry["model"] for entry in waiting.values()})
        later = {tuple(entry[name] for name in PLACE) for entry in named.values() if "request" in entry}
        for key, entry in waiting.items():
            is_replaced = "request" not in entry and tuple(entry[name] for name in PLACE) in later
            if is_replaced or entry.get("request") in answered:
                del named[key]
        return {key: entry | {"key": key} for key, entry in named.items()}

    def begun(self) -> float | None:
        """When the last sweep began: its plan was written then."""
        stamps = [stamp for name, stamp in self._entries().items() if name.endswith(".plan.json") and stamp]
        return max((stamp[1] / 1e9 for stamp in stamps), default=None)

    def finished(self, key: str) -> float:
        """When a unit was stored."""
        return self._read(key)[0].finished

    @contextlib.contextmanager
    def working_on(self, key: str) -> Iterator[None]:
        """Let readers see that a unit is being measured, for as long as this process lives."""
        who = {"host": platform.node(), "pid": os.getpid(), "since": time.time()}
        path = self.folder / f"{key}.running.json"
        self._write(path.name, json.dumps(who).encode())
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(HEARTBEAT_SECONDS):
                with contextlib.suppress(OSError):
                    os.utime(path)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            _remove(path)

    def running(self) -> dict[str, dict[str, Any]]:
        """Units being measured somewhere: key -> host, pid, since. The dead are left out."""
        found: dict[str, dict[str, Any]] = {}
        for key, who, stamp in self._read_notes("running"):
            # A sign of life from the future is none: it would stay for as long as the date says.
            if isinstance(who, str) or abs(time.time() - stamp[1] / 1e9) > 3 * HEARTBEAT_SECONDS or key in self:
                continue
            if not (who["host"] == platform.node() and _is_gone(who["pid"])):
                found[key] = who
        return found

    def check_writable(self) -> None:
        """Make the folder and prove that it can be written, before hours of work depend on it."""
        name = f".probe-{secrets.token_hex(4)}"
        self._write(name, b"")
        _remove(self.folder / name)

    def _scan(self) -> _Scan:
        """What lies in the folder; only files that are new or have changed since they were read are read."""
        entries, merged_file = self._entries(), self._read_merged()
        merged_files = () if merged_file is None else merged_file.files
        known = {file.name: file for file in merged_files} | self._known
        good, problems, fresh = [], [], RowCollector()
        for name in sorted(name for name in entries if name.endswith(".parquet") and not name.startswith(".")):
            file = known.get(name)
            if file is None or file.stamp != _stamp_in(entries, file):
                try:
                    file, rows, _ = read_result(self.folder / name)
                except FileNotFoundError:  # it was removed since it was listed
                    continue
                except UnusableFileError as error:
                    problems.append(str(error))
                    continue
                fresh.add(file, rows)
            good.append(file)
        now = time.time()
        self._known = {file.name: file for file in good if _is_settled(file, now)}
        files = _with_current_keys(good, problems)
        older = [file for file in files if file.name != f"{file.key}.parquet"]
        self._older = {key: file for file in older for key in (file.key, Path(file.name).stem)}
        for problem in problems:
            self._warn(problem)
        scan = _Scan(files=files, problems=tuple(problems), merged=merged_file, fresh=fresh)
        unmerged = len(self._known) - sum(self._known.get(file.name) == file for file in merged_files)
        if self._can_merge and unmerged >= max(MERGED_AT_ONCE, len(merged_files) // 10):
            scan = replace(scan, rows=self._rows(scan))
            self._write_merged(scan)
        return scan

    def _rows(self, scan: _Scan) -> pa.Table:
        """The rows of all results, in the order of the table; `result` is the place in `scan.files`."""
        places = {file.name: place for place, file in enumerate(scan.files)}
        fresh, from_merged = scan.fresh, []
        for file in () if scan.merged is None else scan.merged.files:
            place = places.get(file.name, -1)
            from_merged.append(place if place >= 0 and scan.files[place].stamp == file.stamp else -1)
        there = {file.name for file in fresh.files} | {scan.files[place].name for place in from_merged if place >= 0}
        for file in scan.files:
            if file.name not in there:
                # Read by an earlier scan, which needed no rows.
                with contextlib.suppress(FileNotFoundError, UnusableFileError):
                    fresh.add(*read_result(self.folder / file.name)[:2])
        from_fresh = [places.get(file.name, -1) for file in fresh.files]
        parts = [] if scan.merged is None else [_renumber(scan.merged.rows(), from_merged)]
        if from_fresh or not parts:
            parts.append(_renumber(fresh.take_table(), from_fresh))
        columns = pa.concat_tables(parts).columns
        del parts
        return _sort(columns) if from_fresh else pa.table(columns, schema=merged.ROWS_SCHEMA)

    def _read_merged(self) -> MergedFile | None:
        """The merged file, where there is one that this version can read."""
        path, known = self.folder / merged.NAME, self._merged
        try:
            if known is None or known[0] != stamp_of(path.stat()):
                data, stamp = read_regular_file(path)
                known = self._merged = stamp, merged.read_merged(data)
        except OSError:
            return None
        return known[1]

    def _write_merged(self, scan: _Scan) -> None:
        """Replace the merged file; readers see the old one or the new one, and so do other writers."""
        assert scan.rows is not None
        # A file that may have been replaced within the resolution of its time is read again.
        files = [file if file.name in self._known else replace(file, stamp=(-1,)) for file in scan.files]
        try:
            self._write(merged.NAME, merged.write_merged(files, scan.rows))
            _remove(self.folder / ".merged-1.parquet")
        except StoreError:
            # Where the folder cannot be written, reading stays slow and right.
            self._can_merge = False

    def _read(self, key: str) -> tuple[ResultFile, pa.Table, bytes | None]:
        """A result by its key or by the one that an older version gave it."""
        reason = "there is no such file"
        try:
            found = read_result(self.folder / f"{key}.parquet")
            if found[0].key == key:
                return found
        except FileNotFoundError:
            pass
        except UnusableFileError as error:
            reason = str(error)
        if self._older is None:
            self._scan()
        file = (self._older or {}).get(key)
        if file is not None:
            with contextlib.suppress(FileNotFoundError, UnusableFileError):
                return file, *read_result(self.folder / file.name)[1:]
        raise StoreError(f"no readable result {key} in {self.folder}: {reason}")

    def _read_notes(self, kind: str) -> Iterator[tuple[str, Any, Stamp]]:
        """The notes of a kind with their keys and times; in place of one that cannot be read, a sentence about it."""
        for name in sorted(name for name in self._entries() if name.endswith(f".{kind}.json")):
            note: Any = None
            stamp: Stamp = (0, 0)
            try:
                data, stamp = read_regular_file(self.folder / name)
                note = json.loads(data)
                _NOTES[kind](note)
            except FileNotFoundError:  # it ended since it was listed
                continue
            except Exception as error:  # a note may hold anything
                note = f"{printable(name)} is not read: {first_line(error)}; delete it where nothing is writing it"
                self._warn(note)
            yield name.removesuffix(f".{kind}.json"), note, stamp

    def _entries(self) -> dict[str, Stamp | None]:
        """Names in the folder with size and time; None where these cannot be had."""
        try:
            with os.scandir(self.folder) as entries:
                return {entry.name: _stamp_of_entry(entry) for entry in entries}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StoreError(f"cannot read the run folder {self.folder}: {error.strerror or error}") from error

    def _warn(self, sentence: str) -> None:
        """Say once in a process what is passed over."""
        if (self.folder.absolute(), sentence) not in _WARNED:
            _WARNED.add((self.folder.absolute(), sentence))
            log.warning("warning: %s: %s", self.folder, sentence)

    def _write(self, name: str, data: bytes, *, once: bool = False) -> bool:
        """Write a file whole; `once`: only where there is none. Returns whether it was written."""
        path = self.folder / name
        temporary = self.folder / f".tmp-{name}-{secrets.token_hex(4)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if once:
                if not _move_once(temporary, path):
                    return False
            else:
                temporary.replace(path)
            # The rename itself is on disk only once its folder is.
            handle = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        except FileExistsError:
            raise StoreError(f"cannot write to the run folder {self.folder}: it is a file") from None
        except IsADirectoryError as error:
            raise StoreError(f"cannot write {path}: a folder has that name; move it elsewhere") from error
        except OSError as error:
            raise StoreError(f"cannot write to the run folder {self.folder}: {error}") from error
        finally:
            _remove(temporary)
        return True


_WARNED: set[tuple[Path, str]] = set()
PLACE = ("model", "revision", "step", "corpus")
"""Which checkpoint and text a unit is of."""


def _check_place(values: Mapping[str, Any]) -> None:
    types = {"model": str, "revision": str | None, "step": int | None, "corpus": str}
    for name in PLACE:
        if not isinstance(values[name], types[name]):
            raise ValueError(f"{name} cannot be {values[name]!r}")


def _check_failure(note: Any) -> None:
    _check_place(vars(Spec.from_dict(note["spec"])))
    if not isinstance(note["error"], str) or not isinstance(note["message"], str):
        raise ValueError("error and message are no text")


def _check_plan(note: Any) -> None:
    for entry in note:
        _check_place(entry)
        if not isinstance(entry["key"], str) or not isinstance(entry.get("request", ""), str):
            raise ValueError("a key is no text")


def _check_running(note: Any) -> None:
    if not isinstance(note["host"], str) or not isinstance(note["pid"], int) or note["pid"] < 1:
        raise ValueError("host and pid name no process")
    float(note["since"])


_NOTES = {"failed": _check_failure, "plan": _check_plan, "running": _check_running}


def _requests(spec: Mapping[str, Any]) -> set[str]:
    """The key of a Spec that failed, and what it requested."""
    found = Spec.from_dict(spec)
    return {found.key, found.request(early=not found.is_resolved)}


def _answered(results: Mapping[str, ResultFile], models: set[str]) -> set[str]:
    """Keys of the results, and what the results of these models were requested by."""
    found = set(results)
    for file in results.values() if models else ():
        spec = json.loads(file.spec)
        if spec["model"] in models:
            found |= {Spec.from_dict(spec).request(early=early) for early in (False, True)}
    return found


def _with_current_keys(files: Sequence[ResultFile], problems: list[str]) -> tuple[ResultFile, ...]:
    """The files with the keys that their Specs have now, in which keys of other results are current as well.

    Of two files of one Spec (an older version named its file differently) the one that has the current name counts.
    """
    current = {Path(file.name).stem: file.key for file in files if file.name != f"{file.key}.parquet"}
    named: dict[str, ResultFile] = {}
    for file in sorted(files, key=lambda one: Path(one.name).stem in current):
        found = file
        if Path(file.name).stem in current and '"proxy_from": null' not in file.spec:
            spec = json.loads(file.spec)
            spec["proxy_from"] = replace_keys(spec.get("proxy_from") or "", current) or None
            found = replace(file, spec=json.dumps(spec), key=Spec.from_dict(spec).key)
        if found.key in named:
            other = f"{named[found.key].name} is the same result"
            problems.append(str(UnusableFileError(file.name, "duplicate", other)))
        else:
            named[found.key] = found
    return tuple(sorted(named.values(), key=lambda one: one.name)) if current else tuple(files)


def _stamp_of_entry(entry: "os.DirEntry[str]") -> Stamp | None:
    try:
        return stamp_of(entry.stat())
    except OSError:
        return None


def _stamp_in(entries: Mapping[str, Stamp | None], file: ResultFile) -> Stamp:
    """The stamp of a result's files as they are now."""
    names = [file.name] if file.attachment is None else [file.name, file.attachment]
    return tuple(number for name in names for number in entries.get(name) or ())


def _is_settled(file: ResultFile, now: float) -> bool:
    """Whether its time would be another if it were replaced from now on."""
    return all(abs(now - time_ns / 1e9) > SETTLED_SECONDS for time_ns in file.stamp[1::2])


def _renumber(rows: pa.Table, numbers: Sequence[int]) -> pa.Table:
    """The rows with other numbers of results; those of results that are numbered -1 are left out."""
    changed = np.array(numbers, np.int32)[rows["result"].to_numpy()]
    rows = rows.set_column(rows.column_names.index("result"), "result", pa.array(changed))
    return rows if (changed >= 0).all() else rows.filter(pa.array(changed >= 0))


def _sort(columns: list[Any]) -> pa.Table:
    """The rows in the order of the table."""
    table = pa.table(columns, schema=merged.ROWS_SCHEMA)
    ranks = [
        _ranks(table, ("model",), lambda model: model or ""),
        _ranks(table, ("stage", "step", "revision"), training_order),
        _ranks(table, ("stack",), lambda stack: stack or ""),
        _ranks(table, ("site",), site_order),
        _ranks(table, ("metric",), str),
        _ranks(table, ("population",), str),
        table["result"].to_numpy(),
    ]
    order = pa.array(np.lexsort(ranks[::-1]))
    del table, ranks
    for place in range(len(columns)):
        # One column after the other: all rows twice would take twice the memory.
        columns[place] = columns[place].combine_chunks().take(order)
    return pa.table(columns, schema=merged.ROWS_SCHEMA)


def _remove(path: Path) -> None:
    """Remove a file if it can be removed: what went wrong before, if anything did, is what is to be told."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _move_once(source: Path, target: Path) -> bool:
    """Rename, unless the target is there: a link is the one way of renaming that refuses to overwrite."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError:
        # Some file systems have no links; there the last of several writers counts.
        source.replace(target)
    return True


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _ranks(table: pa.Table, names: tuple[str, ...], key: Callable[..., Any]) -> np.ndarray:
    """For each row, the place of its values among all that occur, ordered by `key` of them."""
    codes, tables = np.zeros(table.num_rows, np.int64), []
    for name in names:
        column = table[name].combine_chunks().dictionary_encode(null_encoding="encode")
        tables.append(column.dictionary.to_pylist())
        codes = codes * len(tables[-1]) + column.indices.to_numpy(zero_copy_only=False)
    distinct, place = np.unique(codes, return_inverse=True)
    values = []
    for code in distinct.tolist():
        found = []
        for known in reversed(tables):
            code, index = divmod(code, len(known))
            found.append(known[index])
        values.append(key(*reversed(found)))
    rank = np.empty(len(values), np.int64)
    rank[sorted(range(len(values)), key=values.__getitem__)] = np.arange(len(values))
    return rank[place]
