"""Text files that are too large to hold in memory: documents that read their part of the file when they are used."""

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from jaxtyping import Int

from anisoscope.errors import CorpusError

_BLOCK = 1 << 16
_BOM = b"\xef\xbb\xbf"


class _File:
    """A file that must stay as it was when it was first read."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.state = self._state_of(os.stat(self.path))

    @staticmethod
    def _state_of(found: os.stat_result) -> tuple[int, int]:
        return found.st_size, found.st_mtime_ns

    def read(self, begin: int, end: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                if self._state_of(os.fstat(file.fileno())) != self.state:
                    raise CorpusError(f"{self.path} changed while it was measured: measure again")
                file.seek(begin)
                return file.read(end - begin)
        except OSError as error:
            raise CorpusError(f"{self.path} cannot be read: {error}") from error


class LargeText:
    """One document: len() and slices count characters, as those of a str, and a slice is a str."""

    def __init__(self, path: Path) -> None:
        """Read the file once: refuse what is not UTF-8, and count characters block by block."""
        self._file = _File(path)
        self.is_blank = True
        offsets, starts = [], [0]
        for offset, data in self.blocks():
            text = decode(data, str(path), offset)
            self.is_blank = self.is_blank and (not text or text.isspace())
            offsets.append(offset)
            starts.append(starts[-1] + len(text))
        size = self._file.state[0]
        self.bytes = size - offsets[0] if offsets else 0
        self._offsets = np.array([*offsets, size], dtype=np.int64)
        self._starts = np.array(starts, dtype=np.int64)
        self._begin, self._end = 0, starts[-1]

    def blocks(self) -> Iterator[tuple[int, bytes]]:
        """The bytes of the file without a byte order mark, cut between characters; and where each block begins."""
        size = self._file.state[0]
        offset = len(_BOM) if self._file.read(0, len(_BOM)) == _BOM else 0
        while offset < size:
            data = self._file.read(offset, min(offset + _BLOCK, size))
            if offset + len(data) < size:
                # Back to the beginning of the last character: at most three bytes of it are continuations.
                cut = len(data) - 1
                while cut > len(data) - 4 and data[cut] & 0xC0 == 0x80:
                    cut -= 1
                data = data[:cut] if cut > 0 else data
            yield offset, data
            offset += len(data)

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, part: slice) -> str:
        begin, end, step = part.indices(len(self))
        if step != 1:
            raise ValueError("a LargeText has slices of step 1 alone")
        begin, end = begin + self._begin, max(begin, end) + self._begin
        if begin == end:
            return ""
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        last = int(np.searchsorted(self._starts, end, side="left"))
        text = self._file.read(int(self._offsets[first]), int(self._offsets[last])).decode()
        return text[begin - int(self._starts[first]) : end - int(self._starts[first])]

    def __str__(self) -> str:
        return self[:]

    def view(self, begin: int, end: int) -> "LargeText":
        """A part of the document as a document."""
        other = object.__new__(LargeText)
        other.__dict__.update(self.__dict__)
        other._begin, other._end = self._begin + begin, self._begin + end
        return other


class LargeLines(Sequence[str]):
    """The documents of a JSONL file: the `text` of each line, parsed when it is used."""

    def __init__(self, file: _File, spans: Int[np.ndarray, "n 2"], lengths: Int[np.ndarray, " n"]) -> None:
        self._file, self._spans = file, spans
        self.lengths = lengths
        """Characters of each document."""

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> "LargeLines": ...
    def __getitem__(self, place: int | slice) -> "str | LargeLines":
        if isinstance(place, slice):
            return self.take(np.arange(len(self))[place])
        begin, end = self._spans[place].tolist()
        return json.loads(self._file.read(begin, end).decode())["text"]

    def take(self, places: Sequence[int] | Int[np.ndarray, " m"]) -> "LargeLines":
        """Some of the documents."""
        chosen = np.asarray(places, dtype=np.int64)
        return LargeLines(self._file, self._spans[chosen], self.lengths[chosen])


class LineTitles(Sequence[str]):
    """FILE:LINE for each document of a JSONL file."""

    def __init__(self, title: str, numbers: Int[np.ndarray, " n"]) -> None:
        self._title, self._numbers = title, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return LineTitles(self._title, self._numbers[place])
        return f"{self._title}:{self._numbers[place]}"

    def take(self, places: Sequence[int]) -> "LineTitles":
        """The titles of some of the documents."""
        return LineTitles(self._title, self._numbers[np.asarray(places, dtype=np.int64)])


class LinesRead:
    """One reading of a JSONL file, line by line; afterwards, where its documents are."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, _File(path)
        self._spans, self._lengths, self._numbers = array("q"), array("q"), array("q")

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Number and text of each line that is not blank."""
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                begin = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
                text = decode(line[begin:], str(self.path), offset + begin)
                if text.strip():
                    document = text_of_line(text, self.path, number)
                    if document and not document.isspace():
                        self._spans.extend((offset + begin, offset + len(line)))
                        self._lengths.append(len(document))
                        self._numbers.append(number)
                        yield number, document
                offset += len(line)

    def found(self, title: str) -> tuple[LargeLines, LineTitles]:
        """Documents and titles."""
        spans = np.array(self._spans, dtype=np.int64).reshape(-1, 2)
        lines = LargeLines(self._file, spans, np.array(self._lengths, dtype=np.int64))
        return lines, LineTitles(title, np.array(self._numbers, dtype=np.int64))


def text_of_line(line: str, path: Path, number: int) -> str:
    """The document on a line of a JSONL file."""
    try:
        # Adding "" refuses what is not a string.
        return json.loads(line)["text"] + ""
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusError(f'{path} line {number} is not a JSON object with a string "text"') from error


def decode(data: bytes, where: str, offset: int = 0) -> str:
    """Bytes as text; what is not UTF-8 is refused with its place."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{where} is not UTF-8 at byte {offset + error.start}: {error.reason}. Convert it, e.g. with iconv"
        ) from error


def lengths_of(documents: Sequence[Any]) -> Int[np.ndarray, " n"]:
    """Characters of each document."""
    if isinstance(documents, LargeLines):
        return documents.lengths
    return np.array([len(text) for text in documents], dtype=np.int64)


def take(items: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    """Some of the documents, or of the titles."""
    if isinstance(items, LargeLines | LineTitles):
        return items.take(places)
    return tuple(items[place] for place in places)
