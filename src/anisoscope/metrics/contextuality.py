"""How much the occurrences of one token have in common, beyond what any two points have. Nothing here is centred but
the occurrences of a type where their variance is meant.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels.groups import Explained, GroupSums, Passages
from anisoscope.metrics.declaration import metric

NO_TYPES = "some points are zero, or there is only one type"
NO_REPEATS = "some points are zero, or no type occurs twice"


@metric(
    family="contextuality",
    needs="types",
    version=1,
    invariant_to="rotation scale",
    bounds=(-1.0, 1.0),
    cite="cai2021isotropy",
    null="exact",
    closed_form=lambda n, d: 0.0,
    min_points=3,
    undefined=NO_TYPES,
)
def inter_similarity(types: GroupSums) -> Float[Tensor, ""]:
    """Mean cosine of two occurrences of different types.

        inter_similarity = (‖Σₜ Sₜ‖² - Σₜ ‖Sₜ‖²) / (n² - Σₜ nₜ²),   Sₜ = Σ x/‖x‖ over the nₜ occurrences of type t

    All pairs of different types, in O(nd); the sums add up over batches. It is the anisotropy that the other
    similarities are adjusted by, so it has no adjusted form. Deviation from the source: every pair of occurrences,
    where the source draws one occurrence of each type; frequent types weigh more.

    >>> import torch, anisoscope as an
    >>> points = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [3.0, 4.0]])
    >>> found = an.estimate(points, ["contextuality"], token_ids=[7, 7, 8, 8], sentences=[0, 0, 1, 1])
    >>> round(found["inter_similarity"].value, 6)  # 0, 0, .6, .6
    0.3
    >>> round(found["intra_similarity"].value, 6)  # 1 and .8
    0.9
    """
    counts = types.counts
    return (types.units.sum(0).square().sum() - types.units.square().sum()) / (
        counts.sum().square() - counts.square().sum()
    )


@metric(
    family="contextuality",
    needs="types",
    version=1,
    invariant_to="rotation scale",
    bounds=(-1.0, 1.0),
    cite="ethayarajh2019contextual",
    null="control",
    control=inter_similarity,
    min_points=3,
    undefined=NO_REPEATS,
)
def intra_similarity(types: GroupSums) -> Float[Tensor, ""]:
    """Mean cosine of two occurrences of one type, then the mean over types with at least two.

        intra_similarity = meanₜ (‖Sₜ‖² - nₜ) / (nₜ (nₜ - 1)),   nₜ ≥ 2,   Sₜ = Σ x/‖x‖ over the occurrences of t

    1 where context changes nothing, as at `embed` without positions. All pairs, in O(nd); the sums add up over batches.
    The null is `inter_similarity` of the same points: what occurrences of different types have in common. Deviation
    from the source: all pairs instead of at most 1,000, and token ids instead of words.
    """
    repeated = types.counts >= 2
    counts = types.counts[repeated]
    return ((types.units[repeated].square().sum(1) - counts) / (counts * (counts - 1))).mean()


@metric(
    family="contextuality",
    needs="types",
    version=1,
    invariant_to="rotation scale",
    bounds=(-2.0, 2.0),
    cite="ethayarajh2019contextual",
    null="exact",
    closed_form=lambda n, d: 0.0,
    min_points=3,
    undefined=f"{NO_REPEATS}, or there is only one type",
)
def intra_similarity_adjusted(types: GroupSums) -> Float[Tensor, ""]:
    """How much nearer two occurrences of one type are than two of different types.

        intra_similarity_adjusted = intra_similarity - inter_similarity

    0 where the type says nothing. Deviation from the source: the baseline is over all pairs of different types.
    """
    return intra_similarity(types) - inter_similarity(types)


def _similarity_to_passage(sums: GroupSums) -> Float[Tensor, ""]:
    several = sums.counts >= 2
    totals = sums.totals[several]
    largest = totals.abs().amax(1, keepdim=True)
    means = torch.nn.functional.normalize(totals / torch.where(largest > 0, largest, 1), dim=1, eps=0)
    return (sums.units[several] * means).sum() / sums.counts[several].sum()


@metric(
    family="contextuality",
    needs="passages",
    version=2,
    invariant_to="rotation scale",
    bounds=(-1.0, 1.0),
    cite="ethayarajh2019contextual",
    null="control",
    control=lambda passages: _similarity_to_passage(passages.dealt),
    undefined="some points are zero, or no sentence has two of them",
)
def intra_sentence_similarity(passages: Passages) -> Float[Tensor, ""]:
    """Mean cosine of a token with the mean of its sentence.

        intra_sentence_similarity = mean over tokens of cos(x, m),   m = mean of the batch's points from x's sentence

    A sentence ends behind . ! ? and a blank, or with its line. What the batch holds of it counts, where that is at
    least two tokens: batches are dealt from whole windows, so it is a random part of what was read. A token is part of
    its own mean: k independent isotropic points read 1/√k. The null therefore is the same number for sentences of the
    same sizes, dealt at random from the same points. Deviation from the source: a mean over tokens instead of over
    sentences.
    """
    return _similarity_to_passage(passages.own)


@metric(
    family="contextuality",
    needs="passages",
    version=2,
    invariant_to="rotation scale",
    bounds=(-2.0, 2.0),
    cite="ethayarajh2019contextual",
    null="exact",
    closed_form=lambda n, d: 0.0,
    undefined="some points are zero, or no sentence has two of them",
)
def intra_sentence_similarity_adjusted(passages: Passages) -> Float[Tensor, ""]:
    """How much nearer a token is to the mean of its sentence than to that of a random one.

        intra_sentence_similarity_adjusted = intra_sentence_similarity - the same for sentences dealt at random

    One seeded deal of the same points into sentences of the same sizes. Deviation from the source: it subtracts the
    mean cosine of two words, which leaves 1/√k where there is nothing; subtract `inter_similarity` to have its number.
    """
    return _similarity_to_passage(passages.own) - _similarity_to_passage(passages.dealt)


@metric(
    family="contextuality",
    needs="explained",
    version=1,
    bounds=(0.0, 1.0),
    cite="ethayarajh2019contextual",
    null="control",
    control=lambda explained: explained.dealt.nanmean(),
    min_points=6,
    undefined="no type with five occurrences varies",
)
def max_explainable_variance(explained: Explained) -> Float[Tensor, ""]:
    """Share of the variance among the occurrences of one type that lies along one axis; the mean over types.

        max_explainable_variance = meanₜ λ₁(t) / Σᵢ λᵢ(t),   λ(t) of the centred occurrences of t,   nₜ ≥ 5

    How well one direction could stand for the type's contexts. Few points always have a large share: k of them at least
    1/(k - 1). The null is the same number for random points in sets of the same sizes. Types that do not vary, as at
    `embed` without positions, are left out. Deviation from the source: its code centres the occurrences of a word but
    not the random words they are compared with; we centre both.
    """
    return explained.own.nanmean()


@metric(
    family="contextuality",
    needs="explained",
    version=1,
    bounds=(-1.0, 1.0),
    cite="ethayarajh2019contextual",
    null="exact",
    closed_form=lambda n, d: 0.0,
    min_points=6,
    undefined="no type with five occurrences varies",
)
def max_explainable_variance_adjusted(explained: Explained) -> Float[Tensor, ""]:
    """How much more one axis explains among the occurrences of a type than among random points.

        max_explainable_variance_adjusted = meanₜ (λ₁(t) / Σᵢ λᵢ(t) - the same for as many random points)

    One seeded deal of the same points into sets of the same sizes. Deviation from the source: see
    `max_explainable_variance`.
    """
    return (explained.own - explained.dealt).nanmean()
