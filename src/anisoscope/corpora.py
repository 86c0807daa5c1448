"""Corpus name -> documents, with a hash over them.

Adding a named corpus: a reader here, and its line in `_READERS`.
"""

import ast
import contextlib
import difflib
import functools
import gzip
import hashlib
import http.client
import json
import os
import platform
import re
import sys
import sysconfig
import urllib.request
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from anisoscope.atomic import write_file
from anisoscope.errors import CorpusError, MissingPackageError
from anisoscope.inputs import read_file
from anisoscope.large_files import LargeText, LinesRead, decode, text_of_line
from anisoscope.wikitext import read_articles

# More than the memory of most machines; a corpus in many files has no limit.
_FILE_BYTES = 1 << 36
SEPARATOR = "\n\n"
"""Stands between two documents that share a window."""
HUB_CHARACTERS = 100_000_000
"""Random rows of a hub dataset are read until they hold this many characters: as many as enwik8 has bytes."""
LARGE_FILE = 1 << 25
"""A text file of more bytes stays on disk."""
HELD_OUT_EVERY = 50
CLEANING_VERSION = 1
"""Raised whenever the cleaned text of an unchanged enwik8 changes."""
ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
ENWIK8_SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts to measure on."""

    name: str
    """`pydoc`, `enwik8`, `stdin`, or a file, folder or `hf:` dataset as the user wrote it."""
    documents: Sequence[str | LargeText]
    """A tuple of strings; those of a file of more than `LARGE_FILE` bytes are read from it when they are used."""
    titles: Sequence[str]
    """One per document: module, article, file, line or row."""
    hash: str
    """SHA-256 over the documents, each preceded by its length."""
    notes: tuple[str, ...] = ()


def load_corpus(name: str) -> Corpus:
    """Read the corpus that a name stands for.

    A name of `CORPORA` wins over a file of the same name (write `./pydoc` for the file); then `-` (standard input),
    `enwik8:PATH`, `hf:DATASET[@CONFIG][:SPLIT[:COLUMN]]` (hub or local), and a file or folder. `.gz` files are
    unpacked, each line of a `.jsonl` file is a document with a `text` field, and every other file is one document.
    `heldout:NAME` is the part of a corpus that the lab never trains on.
    """
    if not name.strip():
        raise CorpusError("the name of the corpus is empty; name pydoc, a file or a folder")
    path = Path(name)
    if name.startswith("heldout:"):
        return split_held_out(load_corpus(name.removeprefix("heldout:")))[1]
    if name in _READERS:
        return _READERS[name](name)
    if name == "-":
        return _gather("stdin", [("stdin", _decode(sys.stdin.buffer.read(), "standard input"))])
    if name.startswith("enwik8:"):
        return _clean_enwik8(Path(name.removeprefix("enwik8:")))
    if name.startswith("hf:"):
        return _read_dataset(name)
    if path.is_file() and path.name in ENWIK8_NAMES:
        return _clean_enwik8(path)
    if path.is_file() and path.stat().st_size > LARGE_FILE and path.suffix not in (".gz", ".zip"):
        return _leave_on_disk(name, path)
    if path.is_file():
        return _gather(name, _read_file(path, path.name))
    if path.is_dir():
        below = sorted(item.relative_to(path) for item in path.rglob("*") if item.is_file())
        visible = [item for item in below if not any(part.startswith(".") for part in item.parts)]
        return _gather(name, (pair for item in visible for pair in _read_file(path / item, item.as_posix())))
    close = difflib.get_close_matches(name.lower(), CORPORA, n=1)
    guess = f" Did you mean {close[0]}?" if close else ""
    raise CorpusError(
        f"no corpus, file or folder is called {name!r}.{guess} Known: {', '.join(CORPORA)}; a file or folder; "
        "hf:DATASET[@CONFIG][:SPLIT[:COLUMN]]; - for standard input"
    )


def split_held_out(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """What the lab trains on, and what it holds out: every 50th document, or the last of fewer."""
    every = min(HELD_OUT_EVERY, len(corpus.documents))
    if every < 2:
        raise CorpusError(f"corpus {corpus.name} is one document; training holds documents out and needs at least two")
    titled = [(title, str(text)) for title, text in zip(corpus.titles, corpus.documents, strict=True)]
    kept = [pair for place, pair in enumerate(titled) if place % every != every - 1]
    held_out = titled[every - 1 :: every]
    return _gather(f"trained:{corpus.name}", kept), _gather(f"heldout:{corpus.name}", held_out, corpus.notes)


def _gather(name: str, texts: Iterable[tuple[str, str]], notes: tuple[str, ...] = ()) -> Corpus:
    """Keep the titled texts that are not blank, and hash them."""
    kept = [(title, text) for title, text in texts if text and not text.isspace()]
    if not kept:
        raise CorpusError(f"corpus {name} is empty: wanted at least one text that is not blank")
    digest = hashlib.sha256()
    for title, text in kept:
        _add_to_hash(digest, _encode(text, title, name))
    titles, documents = zip(*kept, strict=True)
    return Corpus(name=name, documents=documents, titles=titles, hash=digest.hexdigest(), notes=notes)


def _encode(text: str, title: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"{title} in corpus {name} holds half a surrogate pair at character {error.start}: not Unicode text"
        ) from error


def _add_to_hash(digest: Any, data: bytes) -> None:
    digest.update(b"%d:" % len(data))
    digest.update(data)


def _leave_on_disk(name: str, path: Path) -> Corpus:
    """The same documents, titles and hash as of a file that is read whole, in a small part of the memory."""
    digest = hashlib.sha256()
    if path.suffix == ".jsonl":
        lines = LinesRead(path)
        for number, text in lines:
            _add_to_hash(digest, _encode(text, f"{path.name}:{number}", name))
        documents, titles = lines.found(path.name)
        empty = not len(documents)
    else:
        text = LargeText(path)
        digest.update(b"%d:" % text.bytes)
        for _, data in text.blocks():
            digest.update(data)
        documents, titles, empty = (text,), (path.name,), text.is_blank
    if empty:
        raise CorpusError(f"corpus {name} is empty: wanted at least one text that is not blank")
    return Corpus(name=name, documents=documents, titles=titles, hash=digest.hexdigest())


def _decode(data: bytes, where: str, offset: int = 0) -> str:
    return decode(data, where, offset).removeprefix("\ufeff")


def _unpack(path: Path) -> bytes:
    """The bytes of a file, of a gzip file's content, or of a zip file's first member."""
    try:
        data = read_file(path, at_most=_FILE_BYTES, error=CorpusError)
        if path.suffix == ".gz":
            return gzip.decompress(data)
        if path.suffix == ".zip":
            with zipfile.ZipFile(BytesIO(data)) as archive:
                return archive.read(archive.namelist()[0])
    except (OSError, EOFError, IndexError, zlib.error, zipfile.BadZipFile) as error:
        raise CorpusError(f"{path} cannot be read: {error}") from error
    return data


def _read_file(path: Path, title: str) -> Iterator[tuple[str, str]]:
    text = _decode(_unpack(path), str(path))
    if not path.name.removesuffix(".gz").endswith(".jsonl"):
        yield title, text
        return
    # Not splitlines(): JSON strings may hold U+2028 and its like unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{title}:{number}", text_of_line(line, path, number)


# Parsing the standard library takes seconds, and it does not change while a program runs.
@functools.cache
def _read_pydoc(name: str) -> Corpus:
    """Docstrings of this Python's standard library, one document per module; always there, no network."""
    root = sysconfig.get_path("stdlib")
    texts = []
    for folder, below, files in os.walk(root):
        # Folders whose names are no identifiers hold no modules of the library: site-packages, config-3.x-...
        below[:] = sorted(part for part in below if part.isidentifier() and part not in ("test", "tests", "idle_test"))
        for path in (Path(folder, file) for file in sorted(files) if re.fullmatch(r"\w+\.py", file)):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, OSError):
                continue
            title = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            texts.append((title, SEPARATOR.join(filter(None, _docstrings(tree)))))
    note = f"pydoc: docstrings of {platform.python_implementation()} {platform.python_version()}"
    return _gather(name, texts, (note,))


def _docstrings(node: ast.AST) -> Iterator[str | None]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield ast.get_docstring(node)
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, block, ()):
            if not isinstance(child, ast.Expr | ast.Assign | ast.Return):
                yield from _docstrings(child)


def _read_dataset(name: str) -> Corpus:
    """Seeded random rows of a hub or local dataset, in row order, until they hold `HUB_CHARACTERS` characters."""
    try:
        import datasets
    except ImportError as error:
        raise MissingPackageError("datasets", extra="data", purpose=f"reading {name}") from error
    where, _, rest = name.removeprefix("hf:").partition(":")
    split, _, column = rest.partition(":")
    where, _, config = where.partition("@")
    try:
        saved = any((Path(where) / mark).is_file() for mark in ("dataset_dict.json", "state.json"))
        found: Any = datasets.load_from_disk(where) if saved else datasets.load_dataset(where, config or None)
    except Exception as error:
        raise CorpusError(f"dataset {where} cannot be loaded: {error}") from error
    if isinstance(found, dict):
        split = split or ("train" if "train" in found else next(iter(found)))
        if split not in found:
            raise CorpusError(f"dataset {where} has no split {split!r}; it has {', '.join(found)}")
        found = found[split]
    strings = [key for key, kind in found.features.items() if getattr(kind, "dtype", "") in ("string", "large_string")]
    column = column or ("text" if "text" in strings or len(strings) != 1 else strings[0])
    if column not in strings:
        raise CorpusError(f"dataset {where} has no text column {column!r}; it has {', '.join(strings) or 'none'}")
    found = found.select_columns([column])
    taken, characters = {}, 0
    order = np.random.default_rng(0).permutation(len(found))
    for start in range(0, len(order), 256):
        if characters < HUB_CHARACTERS:
            rows = order[start : start + 256].tolist()
            texts = [text or "" for text in found[rows][column]]
            taken.update(zip(rows, texts, strict=True))
            characters += sum(map(len, texts))
    note = f"{name}: {len(taken):,} of {len(found):,} rows"
    if len(taken) < len(found):
        note += f", drawn at random until {HUB_CHARACTERS:,} characters were reached"
    return _gather(name, ((f"row {row}", taken[row]) for row in sorted(taken)), (note,))


ENWIK8_NAMES = ("enwik8", "enwik8.gz", "enwik8.zip")


def _read_enwik8(name: str) -> Corpus:
    """First 100 MB of the English Wikipedia of 2006, markup removed; a local copy, or downloaded once (36 MB)."""
    cache = _cache_folder()
    folders = [Path(folder) for folder in (os.environ.get("ANISOSCOPE_DATA"), cache) if folder]
    for path in (folder / file for folder in folders for file in ENWIK8_NAMES):
        if path.is_file():
            return _clean_enwik8(path)
    target = cache / "enwik8.zip"
    try:
        with urllib.request.urlopen(ENWIK8_URL, timeout=30) as response:
            data = response.read()
        with zipfile.ZipFile(BytesIO(data)) as archive:
            arrived = hashlib.sha256(archive.read("enwik8")).hexdigest()
        if arrived != ENWIK8_SHA256:
            raise CorpusError(f"{ENWIK8_URL} gave a file that is not enwik8: SHA-256 {arrived}")
        write_file(target, data)
    except (OSError, http.client.HTTPException, KeyError, zipfile.BadZipFile) as error:
        raise CorpusError(
            f"{name} is not here, and fetching {ENWIK8_URL} into {cache} failed ({error}). Put enwik8, enwik8.gz or "
            "enwik8.zip there or into the folder $ANISOSCOPE_DATA, or give its path as enwik8:PATH"
        ) from error
    return _clean_enwik8(target)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anisoscope"


def _clean_enwik8(path: Path) -> Corpus:
    """Articles of a Wikipedia dump as plain text; the cleaned text is kept in the cache folder."""
    raw = _unpack(path)
    digest = hashlib.sha256(raw).hexdigest()
    cached = _cache_folder() / f"enwik8-{digest[:16]}-clean{CLEANING_VERSION}.json"
    try:
        articles = [(title, text) for title, text in json.loads(cached.read_bytes())]
    except (OSError, ValueError):
        articles = [
            (title, text)
            for title, text in read_articles(raw, lambda data, offset: _decode(data, str(path), offset))
            if text
        ]
        # A cache that cannot be written costs time, not results.
        with contextlib.suppress(OSError):
            write_file(cached, json.dumps(articles, ensure_ascii=False))
    before, after = _count_distinct(raw), _count_distinct("".join(text for _, text in articles).encode())
    note = (
        f"enwik8: {before} distinct bytes in the raw file, {after} after cleaning; "
        f"{sum(len(text) for _, text in articles):,} characters in {len(articles):,} articles"
    )
    if digest != ENWIK8_SHA256:
        note += f"; not the published file but another one of {len(raw):,} bytes, SHA-256 {digest}"
    return _gather("enwik8", articles, (note,))


def _count_distinct(data: bytes) -> int:
    return sum(bytes([value]) in data for value in range(256))


_READERS: dict[str, Callable[[str], Corpus]] = {"pydoc": _read_pydoc, "enwik8": _read_enwik8}
CORPORA: dict[str, str] = {name: (reader.__doc__ or "").partition("\n")[0] for name, reader in _READERS.items()}
"""Named corpora and what they are: the first line of their readers' docstrings."""
