"""Corpus name -> documents -> token windows; token frequencies.

    load_corpus(name) -> Corpus          whole documents, with a hash over them
    draw_windows(corpus, tokenizer, ...) windows of equal length, in seeded random order from the whole corpus
    token_frequencies(corpus, tokenizer) how often each token id occurs

Adding a named corpus: a reader here, and its line in `_READERS`.
"""

import ast
import contextlib
import difflib
import gzip
import hashlib
import html
import http.client
import itertools
import json
import os
import platform
import re
import sys
import sysconfig
import tempfile
import urllib.request
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from anisoscope.errors import CorpusError, MissingPackageError, SpecError

SEPARATOR = "\n\n"
"""Stands between two documents that share a window."""
HUB_CHARACTERS = 100_000_000
"""Random rows of a hub dataset are read until they hold this many characters: as many as enwik8 has bytes."""
CLEANING_VERSION = 1
"""Raised whenever the cleaned text of an unchanged enwik8 changes."""
ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
ENWIK8_SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts to measure on."""

    name: str
    """`pydoc`, `enwik8`, `stdin`, or a file, folder or `hf:` dataset as the user wrote it."""
    documents: tuple[str, ...]
    titles: tuple[str, ...]
    """One per document: module, article, file, line or row."""
    hash: str
    """SHA-256 over the documents, each preceded by its length."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Token sequences of equal length, no two of which overlap in the corpus."""

    token_ids: Int[np.ndarray, "w t"]
    documents: Int[np.ndarray, "w t"]
    """Index into `Corpus.documents`. A separator counts to the document before it, an added token to its neighbour."""
    special: Bool[np.ndarray, "w t"]
    """Tokens that the tokenizer added, or whose id is one of its special ids."""
    notes: tuple[str, ...] = ()


def load_corpus(name: str) -> Corpus:
    """Read the corpus that a name stands for.

    A name of `CORPORA` wins over a file of the same name (write `./pydoc` for the file); then `-` (standard input),
    `enwik8:PATH`, `hf:DATASET[@CONFIG][:SPLIT[:COLUMN]]` (hub or local), and a file or folder. `.gz` files are
    unpacked, each line of a `.jsonl` file is a document with a `text` field, and every other file is one document.
    """
    path = Path(name)
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


def _gather(name: str, texts: Iterable[tuple[str, str]], notes: tuple[str, ...] = ()) -> Corpus:
    """Keep the titled texts that are not blank, and hash them."""
    kept = [(title, text) for title, text in texts if text and not text.isspace()]
    if not kept:
        raise CorpusError(f"corpus {name} is empty: wanted at least one text that is not blank")
    digest = hashlib.sha256()
    for title, text in kept:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise CorpusError(
                f"{title} in corpus {name} holds half a surrogate pair at character {error.start}: not Unicode text"
            ) from error
        digest.update(b"%d:" % len(data))
        digest.update(data)
    titles, documents = zip(*kept, strict=True)
    return Corpus(name=name, documents=documents, titles=titles, hash=digest.hexdigest(), notes=notes)


def _decode(data: bytes, where: str, offset: int = 0) -> str:
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{where} is not UTF-8 at byte {offset + error.start}: {error.reason}. Convert it, e.g. with iconv"
        ) from error


def _unpack(path: Path) -> bytes:
    """The bytes of a file, of a gzip file's content, or of a zip file's first member."""
    try:
        data = path.read_bytes()
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
            try:
                # Adding "" refuses what is not a string.
                yield f"{title}:{number}", json.loads(line)["text"] + ""
            except (ValueError, KeyError, TypeError) as error:
                raise CorpusError(f'{path} line {number} is not a JSON object with a string "text"') from error


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
        _write_whole(target, data)
    except (OSError, http.client.HTTPException, KeyError, zipfile.BadZipFile) as error:
        raise CorpusError(
            f"{name} is not here, and fetching {ENWIK8_URL} into {cache} failed ({error}). Put enwik8, enwik8.gz or "
            "enwik8.zip there or into the folder $ANISOSCOPE_DATA, or give its path as enwik8:PATH"
        ) from error
    return _clean_enwik8(target)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anisoscope"


def _write_whole(path: Path, data: bytes) -> None:
    """Write under a temporary name and rename, so that nobody meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _clean_enwik8(path: Path) -> Corpus:
    """Articles of a Wikipedia dump as plain text; the cleaned text is kept in the cache folder."""
    raw = _unpack(path)
    digest = hashlib.sha256(raw).hexdigest()
    cached = _cache_folder() / f"enwik8-{digest[:16]}-clean{CLEANING_VERSION}.json"
    try:
        articles = [(title, text) for title, text in json.loads(cached.read_bytes())]
    except (OSError, ValueError):
        articles = [(title, text) for title, text in _read_articles(raw, path) if text]
        # A cache that cannot be written costs time, not results.
        with contextlib.suppress(OSError):
            _write_whole(cached, json.dumps(articles, ensure_ascii=False).encode())
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


def _read_articles(raw: bytes, path: Path) -> Iterator[tuple[str, str]]:
    for page in _PAGE.finditer(raw):
        title = html.unescape(_decode(page[1], str(path), page.start(1)))
        body = page[2] or b""
        if page[3] == b"":
            # The file ends inside this article: keep its whole lines.
            body = body[: body.rfind(b"\n") + 1]
        if not _REDIRECT.match(body) and not _NAMESPACE.match(title):
            yield title, _strip_markup(_decode(body, str(path), page.start(2)))


_PAGE = re.compile(rb"<title>(.*?)</title>.*?<text[^<>]*?(?:/>|>(.*?)(</text>|\Z))", re.DOTALL)
_REDIRECT = re.compile(rb"\s*#redirect", re.IGNORECASE)
_NAMESPACE = re.compile(r"(?:Talk|User|Wikipedia|Image|MediaWiki|Template|Help|Category|Portal)(?: talk)?:")


def _strip_markup(wikitext: str) -> str:
    """Prose of one article as it stands in the XML: no code, formulas, media, tables, templates, notes or tags."""
    text = wikitext.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")
    text = _DROPPED.sub("", text)
    for innermost in (_TEMPLATE, _TABLE):
        found = 1
        while found:
            text, found = innermost.subn("", text)
    found = 1
    while found:
        text, found = _LINK.subn(_show_link, text)
    for pattern, shown in _REWRITES:
        text = pattern.sub(shown, text)
    text = html.unescape(text).replace("\xa0", " ")
    text = re.sub(r"[ \t]{2,}|\t", " ", text).replace(" \n", "\n").replace("\n ", "\n")
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _show_link(match: re.Match[str]) -> str:
    """What a reader sees of a link: its label, or nothing for media, categories and other languages."""
    inside, label = match.groups()
    if inside is None:
        return label
    if _UNSEEN.match(inside):
        return ""
    target, _, label = inside.partition("|")
    return label or target.lstrip(": ")


# Patterns for what nests find the innermost one, and are used until none is left.
_DROPPED = re.compile(
    r"<!--.*?(?:-->|\Z)"
    r"|<(ref|math|code|pre|source|gallery|timeline|hiero|table)\b[^<>]*?(?:/>|>.*?</\1\s*>)",
    re.DOTALL | re.IGNORECASE,
)
_TEMPLATE = re.compile(r"\{\{(?:[^{}]|\{(?!\{)|\}(?!\}))*+\}\}")
_TABLE = re.compile(r"^[ \t:]*\{\|.*\n(?:(?![ \t:]*(?:\{\||\|\})).*\n)*+[ \t:]*\|\}", re.MULTILINE)
_LINK = re.compile(
    r"\[\[((?:[^\[\]]|\[(?!\[)|\](?!\]))*+)\]\]"
    r"|\[(?:(?:https?|ftp|irc|gopher)://|mailto:|news:)[^\s\[\]]*[ \t]*([^\[\]\n]*)\]",
    re.IGNORECASE,
)
_UNSEEN = re.compile(r"\s*(?i:image|file|media|category)\s*:|\s*(?:[a-z]{2,3}(?:-[a-z-]+)?|simple|tokipona)\s*:")
_REWRITES = [
    (re.compile(pattern, re.MULTILINE), shown)
    for pattern, shown in [
        (r"^ .*$", ""),  # Set as it stands: program text, drawings, columns.
        (r"''+", ""),
        (r"<sup>(?<=[\d)]<sup>|\b\w<sup>)(?=[-−+\d])", "^"),  # Ten to the sixth is not 106.
        (r"(?i)</?(?:br|p|div|li|ul|ol|dl|dd|dt|tr|td|th|hr|blockquote|center|h[1-6])\b[^<>]*>", "\n"),
        (r"</?[a-zA-Z][^<>]*>", ""),
        (r"^(?:\{?\||\[\[(?i:image|file|media|category):).*$", ""),  # Left of what was never closed.
        (r"([{}\[\]])\1|__[A-Z]+__", ""),
        (r"^=+[ \t]*(.*?)[ \t]*=+[ \t]*$", r"\1"),
        (r"^(?:[*#:;]+[ \t]*|-{4,})", ""),
        (r"\([\s,;:]*\)", ""),  # Left of brackets that held a template only.
    ]
]


_READERS: dict[str, Callable[[str], Corpus]] = {"pydoc": _read_pydoc, "enwik8": _read_enwik8}
CORPORA: dict[str, str] = {name: (reader.__doc__ or "").partition("\n")[0] for name, reader in _READERS.items()}
"""Named corpora and what they are: the first line of their readers' docstrings."""


class _Tape:
    """Documents end to end, without joining them in memory."""

    def __init__(self, documents: tuple[str, ...]) -> None:
        self.documents = documents
        self.starts = np.cumsum([0, *(len(text) + len(SEPARATOR) for text in documents)])
        self.length = int(self.starts[-1]) - len(SEPARATOR)

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, str]]:
        """The documents between two positions, each with its part of the text and of the separator after it."""
        first, past = np.searchsorted(self.starts, (begin, end - 1), side="right")
        for document in range(first - 1, past):
            text, start = self.documents[document], int(self.starts[document])
            low, high = max(begin - start, 0), end - start
            yield document, text[low:high] + SEPARATOR[max(low - len(text), 0) : max(high - len(text), 0)]

    def cut(self, begin: int, end: int) -> str:
        return "".join(text for _, text in self.pieces(begin, end))

    def span(self, index: int, spans: int) -> tuple[int, int]:
        """Begin and end of one of equally long spans, each moved behind the next whitespace where one is near."""
        begin, end = self.length * index // spans, self.length * (index + 1) // spans
        return self._behind_space(begin), self._behind_space(end)

    def _behind_space(self, position: int) -> int:
        if position in (0, self.length):
            return position
        space = re.search(r"\s+", self.cut(position, min(position + 200, self.length)))
        return position + space.end() if space else position


def draw_windows(
    corpus: Corpus, tokenizer: Any, *, seq_len: int, count: int, seed: int, special_tokens: bool = True
) -> Windows:
    """Draw windows of exactly `seq_len` tokens, in seeded random order, from the whole corpus; none overlap.

    The documents stand end to end, two newlines between them. That text is cut at whitespace into equal spans, half
    as long again as a window needs, and each span visited gives one window, built as the tokenizer builds one sequence
    (its special tokens are among the `seq_len`). A span with too few tokens is passed over; where that leaves too few
    windows, spans double. Where most of the corpus is asked for, all of it is tokenised and dealt out.

    A tokenizer that knows no offsets reads each document's part of a span by itself; merges over the border are lost.
    """
    if seq_len < 1 or count < 1:
        raise SpecError(f"windows need seq_len and count of at least 1; got seq_len={seq_len}, count={count}")
    added = tokenizer.num_special_tokens_to_add() if special_tokens else 0
    if seq_len <= added:
        raise SpecError(f"seq_len={seq_len} leaves no room for text: the tokenizer adds {added} special tokens")
    tape, rng, notes = _Tape(corpus.documents), np.random.default_rng(seed), []
    if seq_len > tokenizer.model_max_length:
        notes.append(f"windows of {seq_len} tokens exceed the tokenizer's limit of {tokenizer.model_max_length}")
    needed = (seq_len - added) * _characters_per_token(tape, tokenizer, rng)
    found, tokens = [], 0
    for stretch, kept in ((1.5, 1), (3.0, 1), (64.0, None)):
        spans = max(1, int(tape.length / (needed * stretch)))
        if kept and spans < count:
            continue
        found, tokens, passed = [], 0, 0
        for index in rng.permutation(spans).tolist():
            windows = _tokenise(tape, tokenizer, tape.span(index, spans), seq_len, special_tokens)
            tokens += sum(int((window[2] == 0).sum()) for window in windows)
            whole = [window for window in windows if window.shape[1] == seq_len]
            passed += not whole
            found += whole[:kept]
            if kept and len(found) == count:
                break
        if kept and len(found) == count:
            if passed:
                notes.append(f"{passed} of {passed + count} spans held fewer than {seq_len} tokens: passed over")
            break
    if not found:
        raise CorpusError(f"corpus {corpus.name} has {tokens} tokens: too few for one window of {seq_len}")
    if len(found) < count:
        notes.append(f"corpus {corpus.name} gives {len(found)} windows of {seq_len} tokens; {count} were asked for")
    dealt = rng.permutation(len(found))[:count]
    token_ids, documents, built = np.stack([found[index] for index in dealt], axis=1)
    special = (built == 1) | np.isin(token_ids, tokenizer.all_special_ids)
    return Windows(token_ids=token_ids, documents=documents, special=special, notes=tuple(notes))


def _characters_per_token(tape: _Tape, tokenizer: Any, rng: np.random.Generator) -> float:
    """From the whole of a small corpus, or sixteen random places of a large one."""
    size = min(tape.length, 4096)
    places = range(0, tape.length, size) if tape.length <= 16 * size else rng.integers(tape.length - size, size=16)
    texts = [tape.cut(int(place), min(int(place) + size, tape.length)) for place in places]
    tokens = sum(len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts)
    return sum(map(len, texts)) / max(tokens, 1)


def _tokenise(
    tape: _Tape, tokenizer: Any, span: tuple[int, int], seq_len: int, special_tokens: bool
) -> list[Int[np.ndarray, "3 _"]]:
    """Consecutive windows of one span, the last perhaps shorter; rows: token id, document, added by the tokenizer."""
    windows = []
    if tokenizer.is_fast:
        encoded = tokenizer(
            tape.cut(*span),
            add_special_tokens=special_tokens,
            truncation=True,
            max_length=seq_len,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,
        )
        keys = ("input_ids", "offset_mapping", "special_tokens_mask")
        for ids, offsets, added in zip(*(encoded[key] for key in keys), strict=True):
            first, past = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
            # The last character decides: a token may bring the separator before it along.
            place = span[0] + np.maximum(past - 1, first)
            windows.append(np.array([ids, np.searchsorted(tape.starts, place, side="right") - 1, added]))
    else:
        tokens, owners = [], []
        for document, text in tape.pieces(*span):
            tokens += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            owners += [document] * (len(tokens) - len(owners))
        room = seq_len - (tokenizer.num_special_tokens_to_add() if special_tokens else 0)
        for start in range(0, len(tokens), room):
            body = tokens[start : start + room]
            ids = tokenizer.build_inputs_with_special_tokens(body) if special_tokens else body
            lead = next(place for place in range(len(ids)) if ids[place : place + len(body)] == body)
            window = np.array([ids, ids, np.ones_like(ids)])
            window[1:, lead : lead + len(body)] = owners[start : start + room], np.zeros_like(body)
            windows.append(window)
    windows = [window for window in windows if (window[2] == 0).any()]
    for window in windows:
        text = np.flatnonzero(window[2] == 0)
        nearest = np.searchsorted(text, np.arange(window.shape[1])).clip(max=len(text) - 1)
        window[1] = window[1, text[nearest]]
    return windows


def token_frequencies(corpus: Corpus, tokenizer: Any, *, at_most: int | None = None) -> Int[np.ndarray, " vocab"]:
    """Count each token id over all documents; nothing the tokenizer would add is counted.

    `at_most` stops after that many tokens, documents taken in a fixed random order. Documents of more than 100,000
    characters are cut at whitespace, which may change a token or two at each cut.
    """
    if at_most is not None and at_most < 10_000_000:
        raise SpecError(f"at_most={at_most:,} tokens are too few to count rare ones; give 10,000,000 or more, or none")
    total = len(corpus.documents)
    order = range(total) if at_most is None else np.random.default_rng(0).permutation(total).tolist()
    texts = []
    for tape in (_Tape((corpus.documents[document],)) for document in order):
        spans = 1 + tape.length // 100_000
        texts += [tape.cut(*tape.span(index, spans)) for index in range(spans)]
    counts = np.zeros(max(len(tokenizer), 1 + max(tokenizer.get_vocab().values())), dtype=np.int64)
    for start in range(0, len(texts), 64):
        encoded = tokenizer(texts[start : start + 64], add_special_tokens=False, verbose=False)["input_ids"]
        ids = np.fromiter(itertools.chain.from_iterable(encoded), dtype=np.int64)
        if at_most is not None:
            ids = ids[: at_most - int(counts.sum())]
        counts += np.bincount(ids, minlength=len(counts))
    return counts
