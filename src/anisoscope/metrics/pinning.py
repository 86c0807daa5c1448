"""Pinning: whether frequent token types are held more tightly than rare ones.

Notation: v a type (a token id) with m occurrences h, μ_v their mean, μ the mean over all tokens, f_v its frequency in
other documents than the test half. Each row is Pearson's r over types of log f with the log of a quantity; the
quantity's own mean stands beside it (variant `of=mean`).
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.metrics.declaration import metric

LEAST_TYPES = 3


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """One quantity of types; NaN where a type's is not known."""

    log_frequency: Float[Tensor, " v"]
    quantity: Float[Tensor, " v"]
    mean: bool = False
    """Whether the quantity's own mean is asked for, and not how it goes with frequency."""


def usable(found: Pinned) -> tuple[Float[Tensor, " w"], Float[Tensor, " w"]]:
    """log f and log of the quantity, for the types that have both; float64."""
    logs = torch.where(found.quantity > 0, found.quantity.double(), torch.nan).log()
    known = logs.isfinite() & found.log_frequency.isfinite()
    return found.log_frequency[known].double(), logs[known]


def _read(found: Pinned) -> Float[Tensor, ""]:
    if found.mean:
        return found.quantity.double().nanmean()
    x, y = (one - one.mean() for one in usable(found))
    # 0/0 = NaN where either does not vary.
    return (x @ y) / (x.norm() * y.norm())


_of_types = partial(
    metric,
    family="pinning",
    needs="pinned",
    # 2: windows of the probe share no document.
    version=2,
    cite="bernas2026revisiting",
    # A correlation ends at 1; the means of the variants do not.
    bounds=(-1.0, float("inf")),
    null="exact",
    closed_form=lambda n, d: 0.0,
    min_points=LEAST_TYPES,
)


@_of_types(
    populations=("content", "typical"),
    undefined="too few types occur often enough, or their occurrences do not differ",
)
def type_dispersion(found: Pinned) -> Float[Tensor, ""]:
    """How the spread of a type's occurrences around their centroid goes with its frequency.

        type_dispersion = Pearson r over types (log f_v, log s_v),   s_v = mean ‖h - μ_v‖ · √(m / (m - 1))

    -1 where frequent types are the tighter ones, 0 where frequency does not matter (the null: f permuted over types,
    which gives p), 1 where frequent types are the wider ones. Every type has the same number m of occurrences, drawn at
    random, so that rare types are not wider for being rare. `of=mean` is the mean of s_v: a length, in the units of the
    states. Deviation from the source: its text speaks of one "centroid distance" of about -.5 in decoders, which may be
    this or `centroid_distance`; a type is a token id, and the correction by m is ours.
    """
    return _read(found)


@_of_types(
    populations=("content", "typical"),
    undefined="too few types occur often enough, or lie farther from the centre than sampling noise",
)
def centroid_distance(found: Pinned) -> Float[Tensor, ""]:
    """How the distance of a type's centroid from the centre of all tokens goes with its frequency.

        centroid_distance = Pearson r over types (log f_v, log d_v),   d_v² = ‖μ_v - μ‖² - Σ‖h - μ_v‖² / (m (m - 1))

    -1 where frequent types lie near the centre, 0 where frequency does not matter, 1 where they lie far out. The centre
    is the mean over tokens, so frequent types pull it towards themselves: part of a negative r is that. What sampling m
    occurrences adds to the squared distance is taken off; a type whose centroid is nearer than that is left out.
    `of=mean` is the mean of d_v. Deviation from the source: see `type_dispersion`.
    """
    return _read(found)


@_of_types(
    populations=("content",),
    undefined="it follows the same types over two checkpoints at least: sweep --follow",
)
def trajectory_variance(found: Pinned) -> Float[Tensor, ""]:
    """How far a type's centroid moves over training, against its frequency.

        trajectory_variance = Pearson r over types (log f_v, log T_v),   T_v = Σ_τ ‖μ_v(τ) - mean over τ‖² / (c - 1)

    over c checkpoints τ; centroids are around the mean of all tokens of their checkpoint, so a drift common to all
    types does not count. -1 where frequent types stay and rare ones move, 0 where frequency does not matter. `of=mean`
    is the mean of T_v, `of=length` reads the length of the path Σ ‖μ_v(τ + 1) - μ_v(τ)‖ in place of T_v. Over the most
    frequent types that are attached to every checkpoint, and the same tokens at each. One checkpoint has no trajectory:
    NaN. Deviation from the source: not known; which checkpoints are taken matters, and is in the note.
    """
    return _read(found)
