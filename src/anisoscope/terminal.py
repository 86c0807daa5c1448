"""Standard output and standard error as a command needs them: no encoding, full disk or closed pipe breaks it."""

import codecs
import errno
import io
import os
import sys
from typing import Any

from anisoscope.errors import StoreError


def prepare_streams() -> None:
    """Make standard output and standard error safe to print to. Call it once, before anything is printed."""
    codecs.register_error("anisoscope.escape", _escape)
    sys.stdout = _safe(sys.stdout, is_result=True)
    sys.stderr = _safe(sys.stderr, is_result=False)


def finish_output() -> None:
    """Write out what is still in the buffer of standard output; raises a StoreError where that fails."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except StoreError:
        # Python flushes once more when it ends, and must not fail again.
        _discard(1)
        raise


def _safe(stream: Any, *, is_result: bool) -> Any:
    # A stream is None where its descriptor is closed, and has another class where a test or notebook replaced it.
    if type(stream) is not io.TextIOWrapper:
        return stream
    if stream.isatty():
        stream.reconfigure(errors="anisoscope.escape")
        return stream
    stream.flush()
    raw = _Pipe(stream.fileno(), is_result=is_result)
    # Messages appear at once, results when the buffer is full.
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "anisoscope.escape", line_buffering=not is_result)


class _Pipe(io.FileIO):
    """A file descriptor that a reader may close before all is written (`| head`): the rest is then discarded.

    The command goes on, so that its exit code still says how its work ended. Any other failure to write results is
    raised; a failure to write messages is not, since there is nowhere left to report it.
    """

    def __init__(self, descriptor: int, *, is_result: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.is_result = is_result

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if self.is_result and error.errno not in (errno.EPIPE, errno.EINVAL):
                raise StoreError(f"cannot write to standard output: {error.strerror}") from error
            _discard(self.fileno())
            return len(data)


def _discard(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _escape(error: UnicodeError) -> tuple[str, int]:
    r"""Characters that the terminal cannot show, as `\uXXXX`: JSON stays the JSON that it was."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    pairs = (units[place : place + 2].hex() for place in range(0, len(units), 2))
    return "".join(f"\\u{pair}" for pair in pairs), error.end
