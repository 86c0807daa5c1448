"""A corpus as token ids on disk, tokenised once; and the batches of a training, each a function of its step alone."""

import json
import math
import os
import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from anisoscope.baselines import count_baselines
from anisoscope.corpora import load_corpus, split_held_out
from anisoscope.errors import CorpusError, SpecError
from anisoscope.lab import Recipe, save_tokenizer, train_tokenizer
from anisoscope.sampling import mask_rates

IGNORED = -100
"""The target of a position that is not predicted."""
# Documents that the tokenizer reads at once, on all cores; longer ones are cut at line ends into pieces of about this.
_AT_ONCE, _PIECE = 256, 100_000


@dataclass(frozen=True, kw_only=True)
class Tokenised:
    """Token ids of a corpus, memory-mapped: the documents end to end, a separator token after each."""

    train: Any
    held_out: Any
    tokenizer: Any
    facts: dict[str, Any]
    """Corpus, its hash, the tokenizer's size and kind, the baselines."""

    @property
    def separator(self) -> int:
        """The id between documents."""
        return _separator(self.tokenizer)


def _separator(tokenizer: Any) -> int:
    return tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id


def prepare(recipe: Recipe, output: Path) -> Tokenised:
    """Tokenise the corpus into `output/tokens`, or read what is there. A copy of that folder serves other runs."""
    from transformers import AutoTokenizer

    folder = output / "tokens"
    wanted = {name: getattr(recipe, name) for name in ("kind", "corpus", "vocabulary", "seq_len", "held_out_tokens")}
    if not folder.exists():
        half = output / "tokens.part"
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(parents=True)
        _tokenise(recipe, half, wanted)
        os.replace(half, folder)
    facts = json.loads((folder / "facts.json").read_text("utf-8"))
    for name, value in wanted.items():
        if facts[name] != value:
            raise SpecError(f"{folder} was made with {name}={facts[name]}; the recipe has {value}: use another folder")
    return Tokenised(
        train=np.load(folder / "train.npy", mmap_mode="r"),
        held_out=np.load(folder / "held_out.npy", mmap_mode="r"),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        facts=facts,
    )


def _tokenise(recipe: Recipe, folder: Path, wanted: dict[str, Any]) -> None:
    corpus = load_corpus(recipe.corpus)
    kind: Any = recipe.kind
    tokenizer = train_tokenizer(corpus, kind, vocabulary=recipe.vocabulary, seq_len=recipe.seq_len)
    parts = dict(
        zip(
            ("train", "held_out"),
            ([str(text) for text in part.documents] for part in split_held_out(corpus)),
            strict=True,
        )
    )
    arrays = {name: _encode(texts, tokenizer) for name, texts in parts.items()}
    for name, array in arrays.items():
        if len(array) <= 2 * recipe.seq_len:
            raise CorpusError(
                f"corpus {corpus.name} has {len(array)} {name} tokens: too few for windows of {recipe.seq_len}"
            )
        np.save(folder / f"{name}.npy", array)
    save_tokenizer(tokenizer, folder)
    windows = cut_held_out(recipe, arrays["held_out"])
    pairs = np.stack([windows[:, :-1].ravel(), windows[:, 1:].ravel()])
    baselines = count_baselines(arrays["train"], pairs, vocabulary=recipe.vocabulary)
    facts = wanted | {
        "corpus_hash": corpus.hash,
        "tokens": {name: len(array) for name, array in arrays.items()},
        "characters_per_token": sum(map(len, parts["train"])) / len(arrays["train"]),
        "unigram": baselines.unigram,
        "bigram": baselines.bigram,
    }
    (folder / "facts.json").write_text(json.dumps(facts, indent=1), "utf-8")


def _encode(texts: list[str], tokenizer: Any) -> np.ndarray:
    kind = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    separator = np.array([_separator(tokenizer)], dtype=kind)
    pieces = [piece for text in texts for piece in _cut(text)]
    found: list[np.ndarray] = []
    for start in range(0, len(pieces), _AT_ONCE):
        some = pieces[start : start + _AT_ONCE]
        encoded = tokenizer.backend_tokenizer.encode_batch_fast([text for text, _ in some], add_special_tokens=False)
        for (_, last), one in zip(some, encoded, strict=True):
            found.append(np.array(one.ids, dtype=kind))
            if last:
                found.append(separator)
    return np.concatenate(found)


def _cut(text: str) -> list[tuple[str, bool]]:
    """A document in pieces that end with a line where one does; and whether a piece is its last."""
    pieces, start = [], 0
    while len(text) - start > 2 * _PIECE:
        end = text.find("\n", start + _PIECE, start + 2 * _PIECE) + 1 or start + _PIECE
        pieces.append((text[start:end], False))
        start = end
    return [*pieces, (text[start:], True)]


def _window(recipe: Recipe) -> tuple[int, int]:
    """How many tokens of text a window reads, and how far the next one is."""
    # A decoder's last token needs its successor as target; an encoder's window has [CLS] and [SEP] around it.
    if recipe.kind == "decoder":
        return recipe.seq_len + 1, recipe.seq_len
    return recipe.seq_len - 2, recipe.seq_len - 2


def cut_held_out(recipe: Recipe, tokens: Any) -> Int[np.ndarray, "w t"]:
    """Windows spread evenly over the held-out tokens, without overlap."""
    length, stride = _window(recipe)
    available = (len(tokens) - length) // stride + 1
    count = min(available, math.ceil(recipe.held_out_tokens / recipe.seq_len))
    starts = stride * (np.arange(count) * available // count)
    return np.asarray(tokens)[starts[:, None] + np.arange(length)].astype(np.int64)


class Batches:
    """The batches of a training. Batch k depends on the recipe and on k alone, so resuming needs no state."""

    def __init__(self, recipe: Recipe, data: Tokenised) -> None:
        self.recipe, self.tokens, self.tokenizer = recipe, data.train, data.tokenizer
        self.length, self.stride = _window(recipe)
        # Each pass shifts the grid of windows by less than a window.
        self.windows = (len(self.tokens) - self.length) // self.stride
        self.counts: Int[np.ndarray, " v"] = np.bincount(self.tokens, minlength=recipe.vocabulary)
        """How often each type can be a target."""
        if recipe.kind == "encoder":
            self.counts[data.tokenizer.all_special_ids] = 0
            self.rates = mask_rates(self.counts, recipe.sampling_exponent, recipe.mask_rate)
        self._pass = lru_cache(maxsize=2)(self._shuffle)

    def _shuffle(self, number: int) -> Int[np.ndarray, " w"]:
        rng = np.random.default_rng([self.recipe.seed, 0, number])
        return rng.integers(self.stride) + self.stride * rng.permutation(self.windows)

    def __len__(self) -> int:
        return self.recipe.steps

    def __getitem__(self, step: int) -> dict[str, Any]:
        if not 0 <= step < len(self):
            raise IndexError(step)
        places = np.arange(step * self.recipe.batch_size, (step + 1) * self.recipe.batch_size)
        starts = np.empty_like(places)
        for number in np.unique(places // self.windows).tolist():
            mine = places // self.windows == number
            starts[mine] = self._pass(number)[places[mine] % self.windows]
        windows = self.tokens[starts[:, None] + np.arange(self.length)].astype(np.int64)
        return self.pose(windows, np.random.default_rng([self.recipe.seed, 1, step]))

    def pose(
        self, windows: Int[np.ndarray, "w t"], rng: np.random.Generator, *, natural: bool = False
    ) -> dict[str, Any]:
        """Windows as inputs and targets; `natural` masks every token at the same rate."""
        import torch

        if self.recipe.kind == "decoder":
            inputs, targets = windows[:, :-1], windows[:, 1:]
        else:
            inputs, targets = self._mask(windows, rng, natural)
        return {"input_ids": torch.tensor(inputs), "targets": torch.tensor(targets)}

    def _mask(self, windows: Int[np.ndarray, "w t"], rng: np.random.Generator, natural: bool) -> tuple[Any, Any]:
        rates = np.where(self.counts > 0, self.recipe.mask_rate, 0.0) if natural else self.rates
        chosen = rng.random(windows.shape) < rates[windows]
        fate, others = rng.random(windows.shape), rng.choice(np.flatnonzero(self.counts), windows.shape)
        inputs = np.where(chosen & (fate < 0.8), self.tokenizer.mask_token_id, windows)
        inputs = np.where(chosen & (fate >= 0.9), others, inputs)
        targets = np.where(chosen, windows, IGNORED)
        ends = ((0, 0), (1, 1))
        inputs = np.pad(inputs, ends)
        inputs[:, 0], inputs[:, -1] = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        return inputs, np.pad(targets, ends, constant_values=IGNORED)
