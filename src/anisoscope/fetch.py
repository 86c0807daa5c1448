"""Fetch a hub checkpoint's files to this host, prove them, and delete them after use.

The client retries some failures, forgets half a file between calls, and takes wrong bytes of the right length for
good: so what arrives is compared with the hashes the hub announced, and fetched again where it differs.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from anisoscope.errors import ModelError
from anisoscope.hub import is_passing
from anisoscope.records import Checkpoint
from anisoscope.sources import hash_file, locate

FILES_AT_ONCE = 4
PAUSE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Fetching:
    """How files come to this host."""

    scratch: Path
    """Folder on this host that all sweeps share."""
    run: str
    """Subfolder of it where one sweep's files lie until they were used."""
    keep: bool = False
    """Fetch into the hub client's cache, and leave the files there."""
    at_once: int = 2
    """Downloads on this host at the same time, over all processes."""
    retries: int = 2


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Where a checkpoint's files are."""

    folder: Path | None
    """None: in its own place on this host, not fetched."""
    ours: bool = False
    """Whether we brought them, and delete them after use."""

    def release(self) -> None:
        """Delete what was fetched for one use."""
        if self.ours and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def default_scratch() -> Path:
    """ANISOSCOPE_SCRATCH, else a folder in the user's cache."""
    named = os.environ.get("ANISOSCOPE_SCRATCH")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(named) if named else cache / "anisoscope" / "fetched"


def fetch(checkpoint: Checkpoint, how: Fetching) -> Fetched:
    """Bring the files of an inspected checkpoint here, each as the hub announced it."""
    repo = locate(checkpoint.model, checkpoint.revision).repo
    if repo is None:
        return Fetched(folder=None)
    cached = _in_cache(repo, checkpoint)
    if cached is not None:
        return Fetched(folder=cached)
    folder = None if how.keep else how.scratch / how.run / f"{repo.replace('/', '--')}--{checkpoint.commit}"
    for attempt in range(how.retries + 1):
        try:
            with _download_slot(how):
                got = _download(repo, checkpoint, folder)
            if wrong := _wrong_file(got, checkpoint):
                shutil.rmtree(got, ignore_errors=True)
                raise ConnectionError(f"{wrong} is not the file that the hub announced")
            return Fetched(folder=got, ours=folder is not None)
        except Exception as error:
            if attempt == how.retries or not is_passing(error):
                reason = str(error) or type(error).__name__
                raise ModelError(f"{checkpoint.name} could not be fetched: {reason}") from error
            time.sleep(PAUSE_SECONDS * 4**attempt)
    raise AssertionError("the last attempt returns or raises")


def _download(repo: str, checkpoint: Checkpoint, folder: Path | None) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repo,
            revision=checkpoint.commit,
            allow_patterns=[file.name for file in checkpoint.files],
            local_dir=folder,
            max_workers=FILES_AT_ONCE,
        )
    )


def _in_cache(repo: str, checkpoint: Checkpoint) -> Path | None:
    """The snapshot in the hub client's cache, where it is whole and right."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, "config.json", revision=checkpoint.commit)
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder is not None and _wrong_file(folder, checkpoint) is None else None


def _wrong_file(folder: Path, checkpoint: Checkpoint) -> str | None:
    """The first file that is missing or not what was announced."""
    for file in checkpoint.files:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.size:
            return file.name
        # Weights small enough to lie in git itself have no such hash.
        if file.sha256 and not file.sha256.startswith("git:") and hash_file(path) != file.sha256:
            return file.name
    return None


@contextlib.contextmanager
def _download_slot(how: Fetching) -> Iterator[None]:
    """Wait until fewer than `at_once` downloads run on this host. A killed process gives its slot back."""
    from filelock import FileLock, Timeout

    how.scratch.mkdir(parents=True, exist_ok=True)
    locks = [FileLock(how.scratch / f".slot-{number}.lock", thread_local=False) for number in range(how.at_once)]
    while True:
        for lock in locks:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            try:
                yield
            finally:
                lock.release()
            return
        time.sleep(0.2)
