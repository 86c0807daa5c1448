"""What a model that only counts would lose per token: the unigram and bigram cross-entropies."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, UInt


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """Cross-entropies of counting models on the held-out tokens, in nats per token."""

    unigram: float
    bigram: float


def count_baselines(train: UInt[np.ndarray, " n"], pairs: Int[np.ndarray, "2 m"], *, vocabulary: int) -> Baselines:
    """Learn from the training tokens, evaluate on pairs of a held-out token's predecessor and the token.

        unigram  p(w) = (c(w) + 1) / (N + V)
        bigram   p(w | u) = max(c(u, w) - D, 0) / c(u) + D n(u ·) / c(u) · p(w)   (interpolated Kneser-Ney)
                 p(w) = (n(· w) + 1) / (n(· ·) + V),   D = n₁ / (n₁ + 2 n₂)

    c: counts; n(u ·), n(· w): different tokens seen after u and before w; n₁, n₂: pairs seen once and twice.
    """
    before, after = pairs
    unigrams = np.bincount(train, minlength=vocabulary)
    logs = np.log((unigrams + 1) / (unigrams.sum() + vocabulary))
    keys, counts = np.unique(train[:-1].astype(np.int64) * vocabulary + train[1:], return_counts=True)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    discount = once / (once + 2 * twice) if once else 0.5
    followed = np.bincount(keys // vocabulary, weights=counts, minlength=vocabulary)
    followers = np.bincount(keys // vocabulary, minlength=vocabulary)
    continuation = (np.bincount(keys % vocabulary, minlength=vocabulary) + 1) / (len(keys) + vocabulary)
    asked = before.astype(np.int64) * vocabulary + after
    places = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    seen = np.where(keys[places] == asked, counts[places] - discount, 0.0)
    total = np.maximum(followed[before], 1)
    # A predecessor never followed by anything leaves all of its mass to the lower order.
    left = np.where(followed[before] > 0, discount * followers[before] / total, 1.0)
    bigram = seen / total + left * continuation[after]
    return Baselines(unigram=float(-logs[after].mean()), bigram=float(-np.log(bigram).mean()))
