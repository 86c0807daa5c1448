"""A folder of immutable unit files, one Parquet file each; its existence is completion.

    RUN/<key>.parquet        records; the Spec and provenance in the file's metadata
    RUN/<key>.<hash>.safetensors   attachments, written first; their hash stands in the Parquet metadata
    RUN/<key>.failed.json    the last error of a unit that failed; a success removes it
    RUN/<key>.running.json   who is measuring it; touched while that lives, and never a lock
    RUN/<hash>.plan.json     the units a sweep is to make

Every file is written under a temporary name, flushed to disk and renamed: a reader never sees half a unit, and a killed
writer leaves at most a hidden temporary file. Of several writers of one unit, on whatever hosts, the first counts.
"""

import contextlib
import hashlib
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anisoscope.columns import SCHEMA, TABLE_SCHEMA, add_settings, record_from
from anisoscope.errors import SpecError, StoreError
from anisoscope.records import Spec, Unit, site_order
from anisoscope.revisions import training_order

STORE_VERSION = 1
# A unit that is being measured shows a sign of life this often; three that fail to come mean it is dead.
HEARTBEAT_SECONDS = 10.0
# So many units that were not read before are worth a file that holds them all.
MERGED_AT_ONCE = 200
_METADATA = b"anisoscope"


def name_trainings(table: pa.Table) -> pa.Table:
    """The table with the name of the run in place of the model where it was measured live.

    Two trainings of one model are two curves.
    """
    if "run" not in table.column_names:
        return table
    names = pc.coalesce(table["run"], table["model"])  # pyright: ignore[reportAttributeAccessIssue]
    return table.set_column(table.column_names.index("model"), "model", names)


class Store:
    """The units of a run."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Name a run folder; it is made when the first unit is put."""
        self.folder = Path(folder)
        try:
            str(self.folder).encode()
        except UnicodeEncodeError as error:
            raise SpecError(f"the name of the run folder, {str(folder)!a}, is not UTF-8: give it another") from error

    def keys(self) -> set[str]:
        """Keys of the finished units."""
        return {path.stem for path in self._parts()}

    def __contains__(self, key: str) -> bool:
        return (self.folder / f"{key}.parquet").is_file()

    def put(self, unit: Unit) -> Path:
        """Write a unit; one that is already there stays as it is."""
        path = self.folder / f"{unit.key}.parquet"
        if unit.key in self:
            return path
        metadata = {"store_version": STORE_VERSION, "spec": asdict(unit.spec), "provenance": dict(unit.provenance)}
        attached = None
        if unit.attachments:
            # The numpy part of safetensors needs no torch: results open on any laptop.
            from safetensors.numpy import save

            arrays = {name: np.ascontiguousarray(values) for name, values in unit.attachments.items()}
            data = save(arrays)
            metadata["attachments_sha256"] = hashlib.sha256(data).hexdigest()
            attached = self._write(_attachment_name(unit.key, metadata["attachments_sha256"]), data)
        rows = [vars(record) for record in unit.records]
        schema = SCHEMA.with_metadata({_METADATA: json.dumps(metadata).encode()})
        try:
            self._write(path.name, _to_parquet(pa.Table.from_pylist(rows, schema=schema)), once=True)
        except FileExistsError:
            # Another writer was first. Its attachment may be the same file.
            theirs = _metadata_of(pq.read_schema(path)).get("attachments_sha256")
            if attached is not None and attached.name != _attachment_name(unit.key, theirs or ""):
                attached.unlink(missing_ok=True)
        (self.folder / f"{unit.key}.failed.json").unlink(missing_ok=True)
        return path

    def put_failure(self, spec: Spec, error: BaseException) -> Path:
        """Note that a unit failed, and why; a later success replaces it."""
        note = {
            "spec": asdict(spec),
            "error": type(error).__name__,
            "message": str(error),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        return self._write(f"{spec.key}.failed.json", json.dumps(note, indent=1).encode())

    def get(self, key: str) -> Unit:
        """A unit as it was put."""
        try:
            table = pq.read_table(self.folder / f"{key}.parquet")
        except (OSError, pa.ArrowInvalid) as error:
            raise StoreError(f"no readable unit {key} in {self.folder}: {error}") from error
        metadata = _metadata_of(table.schema)
        records = tuple(record_from(row) for row in table.to_pylist())
        attachments = self.attachment(key) if "attachments_sha256" in metadata else {}
        spec = Spec.from_dict(metadata["spec"])
        return Unit(spec=spec, provenance=metadata["provenance"], records=records, attachments=attachments)

    def attachment(self, key: str) -> dict[str, np.ndarray]:
        """The arrays attached to a unit; refused when they are not those it was written with."""
        from safetensors.numpy import load

        try:
            wanted = _metadata_of(pq.read_schema(self.folder / f"{key}.parquet")).get("attachments_sha256")
            data = (self.folder / _attachment_name(key, wanted)).read_bytes() if wanted else b""
        except (OSError, pa.ArrowInvalid) as error:
            raise StoreError(f"no readable attachment of unit {key} in {self.folder}: {error}") from error
        if not wanted:
            return {}
        if hashlib.sha256(data).hexdigest() != wanted:
            raise StoreError(f"{self.folder / _attachment_name(key, wanted)} is not the file its unit was written with")
        return load(data)

    def table(self) -> pa.Table:
        """One row per record of every finished unit, in order of model, stage, step, site, metric, population.

        After the columns of a Record come the settings of the unit's Spec (`columns.SETTINGS_SCHEMA`).
        """
        table = self._read_all()
        ranks = [
            _ranks(table, ("model",), lambda model: model or ""),
            _ranks(table, ("stage", "step", "revision"), training_order),
            _ranks(table, ("stack",), lambda stack: stack or ""),
            _ranks(table, ("site",), site_order),
            _ranks(table, ("metric",), str),
            _ranks(table, ("population",), str),
        ]
        return table.take(pa.array(np.lexsort(ranks[::-1])))

    def _read_all(self) -> pa.Table:
        """The rows of all units. Units never change, so what was read once is kept in one file that reads at once."""
        paths = {path.stem: path for path in self._parts()}
        cache = self.folder / f".merged-{STORE_VERSION}.parquet"
        try:
            merged = pq.read_table(cache)
            merged = TABLE_SCHEMA.empty_table() if merged.schema.names != TABLE_SCHEMA.names else merged
        except (OSError, pa.ArrowInvalid):
            merged = TABLE_SCHEMA.empty_table()
        known = set(merged["key"].unique().to_pylist())
        if not known <= paths.keys():
            merged = merged.filter(pa.array([key in paths for key in merged["key"].to_pylist()]))
        fresh = [_read_part(path) for key, path in paths.items() if key not in known]
        table = pa.concat_tables([merged, *fresh]).unify_dictionaries().combine_chunks()
        if len(fresh) >= MERGED_AT_ONCE:
            # Only a cache: where the folder cannot be written, reading stays slow and right.
            with contextlib.suppress(StoreError):
                self._write(cache.name, _to_parquet(table))
        return table

    def failures(self) -> list[dict[str, Any]]:
        """What is known of the units that failed and have not succeeded since."""
        paths = sorted(self.folder.glob("*.failed.json")) if self.folder.is_dir() else []
        failed = (path for path in paths if path.name.removesuffix(".failed.json") not in self)
        return [
            {"key": path.name.removesuffix(".failed.json"), **json.loads(path.read_text("utf-8"))} for path in failed
        ]

    def plan(self, entries: Sequence[dict[str, Any]]) -> Path:
        """Note what a sweep is to make: one entry with a `key` per unit. The same plan is the same file."""
        data = json.dumps(list(entries), indent=1, ensure_ascii=False).encode()
        name = hashlib.sha256("".join(sorted(entry["key"] for entry in entries)).encode()).hexdigest()[:20]
        return self._write(f"{name}.plan.json", data)

    def planned(self) -> dict[str, dict[str, Any]]:
        """Every unit that some sweep is to make, by key."""
        paths = sorted(self.folder.glob("*.plan.json")) if self.folder.is_dir() else []
        return {entry["key"]: entry for path in paths for entry in json.loads(path.read_text("utf-8"))}

    def begun(self) -> float | None:
        """When the last sweep began: its plan was written then."""
        times = [path.stat().st_mtime for path in self.folder.glob("*.plan.json")] if self.folder.is_dir() else []
        return max(times, default=None)

    def finished(self, key: str) -> float:
        """When a unit was stored."""
        return (self.folder / f"{key}.parquet").stat().st_mtime

    def spec(self, key: str) -> dict[str, Any]:
        """The Spec of a unit, without its records."""
        try:
            return _metadata_of(pq.read_schema(self.folder / f"{key}.parquet"))["spec"]
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise StoreError(f"no readable unit {key} in {self.folder}: {error}") from error

    @contextlib.contextmanager
    def working_on(self, key: str) -> Iterator[None]:
        """Let readers see that a unit is being measured, for as long as this process lives."""
        who = {"host": platform.node(), "pid": os.getpid(), "since": time.time()}
        path = self._write(f"{key}.running.json", json.dumps(who).encode())
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
            path.unlink(missing_ok=True)

    def running(self) -> dict[str, dict[str, Any]]:
        """Units being measured somewhere: key -> host, pid, since. The dead are left out."""
        found: dict[str, dict[str, Any]] = {}
        for path in self.folder.glob("*.running.json") if self.folder.is_dir() else ():
            # It may end between being listed and being read.
            with contextlib.suppress(OSError, ValueError):
                key = path.name.removesuffix(".running.json")
                who = json.loads(path.read_text("utf-8"))
                beating = time.time() - path.stat().st_mtime < 3 * HEARTBEAT_SECONDS
                if beating and key not in self and not (who["host"] == platform.node() and _is_gone(who["pid"])):
                    found[key] = who
        return found

    def _parts(self) -> Iterator[Path]:
        if self.folder.is_dir():
            yield from sorted(path for path in self.folder.glob("*.parquet") if not path.name.startswith("."))

    def check_writable(self) -> None:
        """Make the folder and prove that it can be written, before hours of work depend on it."""
        probe = self._write(f".probe-{secrets.token_hex(4)}", b"")
        probe.unlink(missing_ok=True)

    def _write(self, name: str, data: bytes, *, once: bool = False) -> Path:
        """Write a file whole; `once`: raise FileExistsError where it is there already."""
        path = self.folder / name
        temporary = self.folder / f".tmp-{name}-{secrets.token_hex(4)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if once:
                _move_once(temporary, path)
            else:
                temporary.replace(path)
            # The rename itself is on disk only once its folder is.
            handle = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        except FileExistsError:
            if not once:
                raise StoreError(f"cannot write to the run folder {self.folder}: it is a file") from None
            temporary.unlink(missing_ok=True)
            raise
        except OSError as error:
            temporary.unlink(missing_ok=True) if self.folder.is_dir() else None
            raise StoreError(f"cannot write to the run folder {self.folder}: {error}") from error
        return path


def _attachment_name(key: str, sha256: str) -> str:
    return f"{key}.{sha256[:12]}.safetensors"


def _move_once(source: Path, target: Path) -> None:
    """Rename, unless the target is there: a link is the one way of renaming that refuses to overwrite."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        # Some file systems have no links; there the last of several writers counts.
        source.replace(target)
        return
    source.unlink()


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _to_parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    # Units are small and read by the thousand: compression and statistics would cost more than they save.
    pq.write_table(table, sink, compression="none", write_statistics=False)
    return sink.getvalue().to_pybytes()


def _read_part(path: Path) -> pa.Table:
    """The rows of a unit with its settings; columns that its writer did not know yet are empty."""
    try:
        part = pq.ParquetFile(path).read(use_threads=False)
        spec = _metadata_of(part.schema)["spec"]
    except (OSError, KeyError, pa.ArrowInvalid) as error:
        raise StoreError(f"{path} is no readable unit: {error}") from error
    part = part.replace_schema_metadata(None)
    if not part.schema.equals(SCHEMA):
        for name in SCHEMA.names[part.num_columns :]:
            part = part.append_column(name, pa.nulls(part.num_rows, SCHEMA.field(name).type))
        part = part.select(SCHEMA.names).cast(SCHEMA)
    return add_settings(part, [spec], [part.num_rows])


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


def _metadata_of(schema: pa.Schema) -> dict[str, Any]:
    return json.loads((schema.metadata or {}).get(_METADATA, b"{}"))
