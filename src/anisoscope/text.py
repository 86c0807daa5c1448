"""Documents -> token windows -> pools; token frequencies."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from anisoscope.corpora import SEPARATOR, Corpus
from anisoscope.errors import CorpusError, SpecError
from anisoscope.large_files import lengths_of

# The points of this many batches are pooled and dealt out again, so that a batch holds points of many documents.
POOLED_BATCHES = 4
# How many spans are visited for each window in search of windows without a document in common.
VISITED_SPANS = 8
SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*\s+|\n+")


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Token sequences of equal length, no two of which overlap in the corpus."""

    token_ids: Int[np.ndarray, "w t"]
    documents: Int[np.ndarray, "w t"]
    """Index into `Corpus.documents`. A separator counts to the document before it, an added token to its neighbour."""
    special: Bool[np.ndarray, "w t"]
    """Tokens that the tokenizer added, or whose id is one of its special ids (an unknown word is not special)."""
    sentences: Int[np.ndarray, "w t"]
    """Where in the corpus, in characters, the sentence of a token begins; its document, where offsets are not known."""
    notes: tuple[str, ...] = ()

    def take(self, part: slice) -> "Windows":
        """Some of the windows."""
        rows = {item.name: getattr(self, item.name)[part] for item in fields(self) if item.name != "notes"}
        return replace(self, **rows)


class _Tape:
    """Documents end to end, without joining them in memory."""

    def __init__(self, documents: Sequence[Any]) -> None:
        self.documents = documents
        self.starts = np.cumsum(np.concatenate([[0], lengths_of(documents) + len(SEPARATOR)]))
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
    corpus: Corpus,
    tokenizer: Any,
    *,
    seq_len: int,
    count: int,
    seed: int,
    special_tokens: bool = True,
    documents_apart: bool = False,
) -> Windows:
    """Draw windows of exactly `seq_len` tokens, in seeded random order, from the whole corpus; none overlap.

    The documents stand end to end, two newlines between them. That text is cut at whitespace into equal spans, half
    as long again as a window needs, and each span visited gives one window, built as the tokenizer builds one sequence
    (its special tokens are among the `seq_len`). A span with too few tokens is passed over; where that leaves too few
    windows, spans double. Where most of the corpus is asked for, all of it is tokenised and dealt out.

    With `documents_apart` no two windows share a document, as far as the corpus has enough of them; a note says how
    many do where it has not.

    A tokenizer that knows no offsets reads each document's part of a span by itself; merges over the border are lost.
    """
    if seq_len < 1 or count < 1:
        raise SpecError(f"windows need seq_len and count of at least 1; got seq_len={seq_len}, count={count}")
    frame = _frame(tokenizer, special_tokens)
    room = seq_len - len(frame[0]) - len(frame[1])
    if room < 1:
        raise SpecError(
            f"seq_len={seq_len} leaves no room for text: the tokenizer adds {seq_len - room} special tokens"
        )
    tape, rng, notes = _Tape(corpus.documents), np.random.default_rng(seed), []
    if seq_len > tokenizer.model_max_length:
        notes.append(f"windows of {seq_len} tokens exceed the tokenizer's limit of {tokenizer.model_max_length}")
    needed = room * _characters_per_token(tape, tokenizer, rng)
    found, tokens, apart = [], 0, list[bool]()
    for stretch, kept in ((1.5, 1), (3.0, 1), (64.0, None)):
        spans = max(1, int(tape.length / (needed * stretch)))
        if kept and spans < count:
            continue
        found, tokens, passed, apart, used = [], 0, 0, list[bool](), set[int]()
        for visited, index in enumerate(rng.permutation(spans).tolist(), 1):
            windows = _tokenise(tape, tokenizer, tape.span(index, spans), room, frame)
            tokens += sum(int((window[3] == 0).sum()) for window in windows)
            whole = [window for window in windows if window.shape[1] == seq_len]
            passed += not whole
            found += whole[:kept]
            for window in whole[:kept]:
                apart.append(used.isdisjoint(held := window[1].tolist()))
                used.update(held if apart[-1] else ())
            enough = not documents_apart or sum(apart) >= count or visited >= VISITED_SPANS * count
            if kept and len(found) >= count and enough:
                break
        if kept and len(found) >= count:
            if passed:
                notes.append(f"{passed} of {passed + len(found)} spans held fewer than {seq_len} tokens: passed over")
            break
    if not found:
        raise CorpusError(f"corpus {corpus.name} has {tokens} tokens: too few for one window of {seq_len}")
    if len(found) < count:
        notes.append(f"corpus {corpus.name} gives {len(found)} windows of {seq_len} tokens; {count} were asked for")
    dealt = rng.permutation(len(found)).tolist()
    if documents_apart:
        dealt.sort(key=lambda index: not apart[index])
        if sum(apart) < min(count, len(found)):
            notes.append(f"{sum(apart)} of {min(count, len(found))} windows share no document with another")
    dealt = dealt[:count]
    token_ids, documents, sentences, built = np.stack([found[index] for index in dealt], axis=1)
    special = (built == 1) | np.isin(token_ids, _special_ids(tokenizer))
    held = {"token_ids": token_ids, "documents": documents, "special": special, "sentences": sentences}
    return Windows(**held, notes=tuple(notes))


def _special_ids(tokenizer: Any) -> list[int]:
    """The tokenizer's special ids; the one for unknown words stands for content, unless it serves as another too."""
    named = ("bos_token_id", "eos_token_id", "sep_token_id", "pad_token_id", "cls_token_id", "mask_token_id")
    others = {getattr(tokenizer, name, None) for name in named}
    unknown = getattr(tokenizer, "unk_token_id", None)
    ids: list[int] = tokenizer.all_special_ids
    return [number for number in ids if number != unknown or number in others]


def _characters_per_token(tape: _Tape, tokenizer: Any, rng: np.random.Generator) -> float:
    """From the whole of a small corpus, or sixteen random places of a large one."""
    size = min(tape.length, 4096)
    places = range(0, tape.length, size) if tape.length <= 16 * size else rng.integers(tape.length - size, size=16)
    texts = [tape.cut(int(place), min(int(place) + size, tape.length)) for place in places]
    tokens = sum(len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts)
    return sum(map(len, texts)) / max(tokens, 1)


def _frame(tokenizer: Any, special_tokens: bool) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after one sequence."""
    if not special_tokens:
        return [], []
    built = tokenizer("a", return_special_tokens_mask=True, verbose=False)
    ids, text = built["input_ids"], [place for place, added in enumerate(built["special_tokens_mask"]) if not added]
    return (ids[: text[0]], ids[text[-1] + 1 :]) if text else (ids, [])


def _tokenise(
    tape: _Tape, tokenizer: Any, span: tuple[int, int], room: int, frame: tuple[list[int], list[int]]
) -> list[Int[np.ndarray, "4 _"]]:
    """Consecutive windows of one span, `room` tokens of text in a frame, the last perhaps shorter.

    Rows: token id, document, sentence, added by the tokenizer. Cut here and not by the tokenizer's own truncation,
    whose overflow some versions lose.
    """
    if tokenizer.is_fast:
        text = tape.cut(*span)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = encoded["input_ids"]
        first, past = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        # The last character decides: a token may bring the separator before it along.
        last = np.maximum(past - 1, first)
        owners = np.searchsorted(tape.starts, span[0] + last, side="right") - 1
        begins = np.array([0, *(found.end() for found in SENTENCE_END.finditer(text))])
        sentences = span[0] + begins[np.searchsorted(begins, last, side="right") - 1]
    else:
        pieces = [
            (document, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            for document, text in tape.pieces(*span)
        ]
        ids = [token for _, tokens in pieces for token in tokens]
        owners = np.array([document for document, tokens in pieces for _ in tokens], dtype=np.int64)
        sentences = tape.starts[owners]
    before, after = frame
    windows = []
    for start in range(0, len(ids), room):
        body = [*before, *ids[start : start + room], *after]
        documents, places = (
            np.pad(rows[start : start + room], (len(before), len(after)), mode="edge") for rows in (owners, sentences)
        )
        added = np.ones(len(body), dtype=np.int64)
        added[len(before) : len(body) - len(after)] = 0
        windows.append(np.array([body, documents, places, added]))
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
    texts = (
        tape.cut(*tape.span(index, spans))
        for tape in (_Tape((corpus.documents[document],)) for document in order)
        for spans in (1 + tape.length // 100_000,)
        for index in range(spans)
    )
    counts = np.zeros(max(len(tokenizer), 1 + max(tokenizer.get_vocab().values())), dtype=np.int64)
    while some := list(itertools.islice(texts, 64)):
        encoded = tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]
        ids = np.fromiter(itertools.chain.from_iterable(encoded), dtype=np.int64)
        if at_most is not None:
            ids = ids[: at_most - int(counts.sum())]
        counts += np.bincount(ids, minlength=len(counts))
    return counts


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Windows whose points are pooled and dealt into `batches` batches, the first of which is number `first`."""

    start: int
    stop: int
    batches: int
    first: int


def plan_pools(windows: int, seq_len: int, batch_points: int) -> list[Pool]:
    """Cut the windows into equal pools of at least four batches of at least `batch_points` points each.

    Fewer than four batches in all make one pool; fewer points than a batch make one batch.
    """
    count = max(1, windows // math.ceil(POOLED_BATCHES * batch_points / seq_len))
    pools, first = [], 0
    for number in range(count):
        start, stop = number * windows // count, (number + 1) * windows // count
        batches = max(1, (stop - start) * seq_len // batch_points)
        pools.append(Pool(start=start, stop=stop, batches=batches, first=first))
        first += batches
    return pools
