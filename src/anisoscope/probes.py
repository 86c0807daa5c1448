"""The probe: text that stays the same through a training, in two halves that share no document."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float

from anisoscope.corpora import Corpus
from anisoscope.large_files import LargeText, lengths_of, take
from anisoscope.records import Spec
from anisoscope.text import Windows, draw_windows, token_frequencies

# Characters of text in which tokens are counted: about a million tokens, in a second or two.
COUNTED_CHARACTERS = 4_000_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """Windows of a corpus, dealt once and for good."""

    corpus: Corpus
    tokenizer: Any
    windows: Windows
    """Both halves, taken in turn."""
    fit: Windows
    test: Windows

    @cached_property
    def log_frequency(self) -> Float[np.ndarray, " vocab"]:
        """Log of each token's share of the text outside the documents of the test half.

        A token that does not occur there counts as half a one. A corpus of one document is counted whole.
        """
        tested = set(np.unique(self.test.documents).tolist())
        others = [index for index in range(len(self.corpus.documents)) if index not in tested]
        chosen, size = [], 0
        for index in np.random.default_rng(0).permutation(others or [0]).tolist():
            if size >= COUNTED_CHARACTERS:
                break
            chosen.append(self.corpus.documents[index])
            size += len(chosen[-1])
        counts = token_frequencies(replace(self.corpus, documents=tuple(chosen)), self.tokenizer)
        return np.log(np.maximum(counts, 0.5) / max(counts.sum(), 1))


def draw_probe(spec: Spec, tokenizer: Any, corpus: Corpus) -> Probe:
    """Half of the windows from one half of the documents, half from the other; each window from documents of its own.

    Windows of one document are not exchangeable with those of others, and nulls that permute windows take them for so.
    Which document goes where is drawn by `spec.seed`. A corpus of one document is cut in the middle.
    """
    count = max(1, math.ceil(spec.tokens / spec.seq_len / 2))
    notes = ("the corpus is one document: its halves are two parts of it",) if len(corpus.documents) == 1 else ()
    halves = []
    for owners, documents in _halve(corpus.documents, spec.seed):
        part = replace(corpus, documents=documents, titles=take(corpus.titles, owners))
        drawn = draw_windows(
            part,
            tokenizer,
            seq_len=spec.seq_len,
            count=count,
            seed=spec.seed,
            special_tokens=spec.special_tokens,
            documents_apart=True,
        )
        halves.append(replace(drawn, documents=np.array(owners)[drawn.documents], notes=drawn.notes + notes))
    fit, test = halves
    return Probe(corpus=corpus, tokenizer=tokenizer, windows=_in_turn(fit, test), fit=fit, test=test)


def _halve(documents: Sequence[Any], seed: int) -> list[tuple[tuple[int, ...], Sequence[Any]]]:
    """Twice: indices of documents, and their texts; about as many characters in each."""
    if len(documents) == 1:
        text, middle = documents[0], len(documents[0]) // 2
        if isinstance(text, LargeText):
            return [((0,), (text.view(0, middle),)), ((0,), (text.view(middle, len(text)),))]
        return [((0,), (text[:middle],)), ((0,), (text[middle:],))]
    halves: tuple[list[int], list[int]] = ([], [])
    sizes, lengths = [0, 0], lengths_of(documents)
    for index in np.random.default_rng(seed).permutation(len(documents)).tolist():
        lighter = int(sizes[1] < sizes[0])
        halves[lighter].append(index)
        sizes[lighter] += int(lengths[index])
    return [(tuple(sorted(half)), take(documents, sorted(half))) for half in halves]


def _in_turn(fit: Windows, test: Windows) -> Windows:
    """One window of each half after the other, so that every batch of points has both."""
    both = min(len(fit.token_ids), len(test.token_ids))

    def mix(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        paired = np.stack([one[:both], other[:both]], axis=1).reshape(-1, one.shape[1])
        return np.concatenate([paired, one[both:], other[both:]])

    # Sentences are told apart by where they begin, and both halves begin at 0.
    test = replace(test, sentences=test.sentences + 1 + fit.sentences.max())
    mixed = {
        name: mix(getattr(fit, name), getattr(test, name))
        for name in ("token_ids", "documents", "special", "sentences")
    }
    return Windows(**mixed, notes=tuple(dict.fromkeys(fit.notes + test.notes)))
