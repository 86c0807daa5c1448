"""Matrices that are written some rows at a time and read back one by one, in memory or in a temporary file.

A probe has three of them at every site: states to fit on, states to test on and the gradients of those. Together they
are many times what one site needs, so beyond a limit they go into a file and an analysis reads one site at a time.
"""

import contextlib
import ctypes
import errno
import tempfile
import weakref
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from anisoscope.errors import StoreError

# Bytes that stay in memory on the CPU; on a GPU, a share of what is free there.
KEPT_BYTES = 1 << 24
KEPT_SHARE = 1 / 4
# Bytes that go through memory at a time on their way to and from the file.
BLOCK_BYTES = 1 << 24

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, eq=False)
class InMemory:
    """A matrix that stays where it was made."""

    matrix: Tensor


@dataclass(frozen=True, eq=False)
class _InFile:
    offset: int
    width: int
    dtype: torch.dtype
    device: torch.device
    """Where the matrix was made, and where it is read to."""


class Matrices(Mapping[Name, Tensor]):
    """Matrices of as many rows each, by name. Looking one up reads it: hold on to it only while it is in use.

    The file has no name where the system allows that (Linux, macOS) and vanishes with the process, whatever ends it.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._places: dict[Name, InMemory | _InFile] = {}
        self._kept = 0
        self._size = 0
        self._file = None

    def __iter__(self) -> Iterator[Name]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def width(self, name: Name) -> int:
        """Columns of a matrix, without reading it."""
        place = self._places[name]
        return place.matrix.shape[1] if isinstance(place, InMemory) else place.width

    def write(self, name: Name, rows: slice, part: Tensor) -> None:
        """Some rows of a matrix, (rows, width); written twice, the later ones stay."""
        place = self._places.get(name) or self._add(name, part)
        if isinstance(place, InMemory):
            place.matrix[rows] = part
            return
        assert self._file is not None
        row_bytes = place.width * place.dtype.itemsize
        raw = part.to("cpu", place.dtype).contiguous().numpy()
        try:
            self._file.seek(place.offset + rows.start * row_bytes)
            self._file.write(raw.data.cast("B"))
            self._file.flush()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise StoreError(
                f"{tempfile.gettempdir()} is full: states and gradients of the probe take {self._size / 2**30:.1f} GiB "
                "there. Name a folder on another disk in the environment variable TMPDIR, or take fewer --tokens or "
                "--sites"
            ) from error

    def __getitem__(self, name: Name) -> Tensor:
        place = self._places[name]
        if isinstance(place, InMemory):
            return place.matrix
        assert self._file is not None
        matrix = torch.empty(self.rows, place.width, dtype=place.dtype, device=place.device)
        block = max(1, BLOCK_BYTES // (place.width * place.dtype.itemsize))
        self._file.seek(place.offset)
        for some in matrix.split(block):
            # Straight into the matrix where it is in the memory of the host.
            room = some if some.device.type == "cpu" else torch.empty(some.shape, dtype=some.dtype)
            wanted = room.numpy().data.cast("B")
            if self._file.readinto(wanted) != len(wanted):
                raise StoreError(f"{name}: a temporary file ended before its last row was written")
            if room is not some:
                some.copy_(room)
        return matrix

    def _add(self, name: Name, part: Tensor) -> InMemory | _InFile:
        width, size = part.shape[1], self.rows * part.shape[1] * part.element_size()
        if self._kept + size <= _most_kept(part.device):
            self._kept += size
            self._places[name] = InMemory(part.new_empty(self.rows, width))
        else:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="anisoscope-")  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            self._places[name] = _InFile(self._size, width, part.dtype, part.device)
            self._size += size
        return self._places[name]


def _most_kept(device: torch.device) -> int:
    if device.type != "cuda":
        return KEPT_BYTES
    return int(torch.cuda.mem_get_info(device)[0] * KEPT_SHARE)


def return_free_memory(device: torch.device) -> None:
    """Hand free heap pages back: glibc keeps the holes that thousands of large arrays leave, and would only grow.

    A few milliseconds. Beside a GPU the host has little to hand back, and the GPU would wait for it.
    """
    if device.type == "cpu":
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
