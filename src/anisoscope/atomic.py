"""Output files appear under their name only when they are complete, on whatever the writing fails."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from anisoscope.errors import AnisoscopeError, StoreError


def write_file(path: str | os.PathLike[str], data: str | bytes) -> Path:
    """Write text (as UTF-8) or bytes to `path`, which then holds either all of it or what it held before."""
    with complete_file(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
    return Path(path)


@contextlib.contextmanager
def complete_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """An empty temporary file for the block to fill; it is flushed to disk and renamed to `path` when the block ends.

    Missing parent folders are made. When anything fails, the temporary file is removed, `path` stays as it was, and an
    OSError becomes a StoreError that names `path`. A device or a pipe (/dev/stdout) is written directly.
    """
    path, temporary = Path(path), None
    try:
        target = check_target(path)
        if _is_special(target):
            yield target
            return
        temporary = target.with_name(f".tmp-{secrets.token_hex(8)}")
        temporary.touch(exist_ok=False)
        yield temporary
        _flush(temporary)
        temporary.replace(target)
        # The rename itself is on disk only once its folder is.
        _flush(target.parent)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, AnisoscopeError):
            raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
        raise


def check_target(path: Path) -> Path:
    """Make the parent folders of an output file and refuse what cannot be written, before long work ends there.

    Returns the file to replace: of a symbolic link the file that it points to, so that the link stays.
    """
    try:
        if path.is_dir():
            raise StoreError(f"cannot write {path}: it is a folder; name a file")
        if _is_special(path):
            return path
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        for place in (target, target.parent):
            if place.exists() and not os.access(place, os.W_OK):
                raise StoreError(f"cannot write {path}: {place} is read-only")
    except (FileExistsError, NotADirectoryError):
        raise StoreError(f"cannot write {path}: a file stands where its folder should be") from None
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
    return target


def _is_special(path: Path) -> bool:
    """Whether it is a device or a pipe."""
    return path.exists() and not path.is_file()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
