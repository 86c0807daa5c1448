"""Files that a user names: regular ones of bounded size, so that a pipe or a device cannot be read without end."""

import os
import stat
from pathlib import Path

from anisoscope.errors import AnisoscopeError, SpecError


def read_file(path: Path, *, at_most: int, error: type[AnisoscopeError] = SpecError) -> bytes:
    """The bytes of a regular file of at most so many; whatever is wrong with it is raised as `error`."""
    try:
        found = path.stat()
        fault = _fault(found, at_most)
        data = b"" if fault else path.read_bytes()
    except OSError as reason:
        fault, data = reason.strerror or str(reason), b""
    except ValueError as reason:
        # A name with a null character in it.
        fault, data = str(reason), b""
    if fault:
        raise error(f"{path} cannot be read: {fault}")
    return data


def _fault(found: os.stat_result, at_most: int) -> str | None:
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a device, pipe or socket"
        return f"it is {kind}, and a regular file is needed"
    if found.st_size > at_most:
        return f"it has {found.st_size:,} bytes, and at most {at_most:,} are read"
    return None


def read_text(path: Path, *, at_most: int, error: type[AnisoscopeError] = SpecError) -> str:
    """The text of such a file, which must be UTF-8."""
    try:
        return read_file(path, at_most=at_most, error=error).decode()
    except UnicodeDecodeError as reason:
        raise error(f"{path} cannot be read: it is not UTF-8 at byte {reason.start}") from reason
