"""Points in groups: the occurrences of a type of token, the tokens of a sentence."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.kernels.gram import center, eigenvalues, row_norms


@dataclass(frozen=True, kw_only=True)
class GroupSums:
    """Sums over the points of each group, in float64: all that similarities within and between groups need.

    Points with no length have no direction, and their group's `units` are NaN.
    """

    labels: Int[Tensor, " g"]
    counts: Float[Tensor, " g"]
    totals: Float[Tensor, "g d"]
    """Σ x"""
    units: Float[Tensor, "g d"]
    """Σ x/‖x‖"""

    def merge(self, other: "GroupSums") -> "GroupSums":
        """The sums over the points of both."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("labels", "counts", "totals", "units"))
        return _add_up(*(torch.cat(pair) for pair in pairs))


@dataclass(frozen=True, kw_only=True)
class Passages:
    """Sums by sentence, and over groups of the same sizes dealt at random."""

    own: GroupSums
    dealt: GroupSums


@dataclass(frozen=True, kw_only=True)
class Explained:
    """Share of the variance along the leading axis, group by group, and for random points in groups of the same sizes.

    NaN where the points of a group do not vary.
    """

    own: Float[Tensor, " g"]
    dealt: Float[Tensor, " g"]


def sum_groups(points: Float[Tensor, "n d"], labels: Int[Tensor, " n"]) -> GroupSums:
    """The sums of every group, in O(nd)."""
    exact = points.double()
    units = exact / row_norms(exact)[:, None]
    return _add_up(labels, torch.ones_like(exact[:, 0]), exact, units)


def _add_up(
    labels: Int[Tensor, " n"], counts: Float[Tensor, " n"], totals: Float[Tensor, "n d"], units: Float[Tensor, "n d"]
) -> GroupSums:
    found, place = labels.unique(return_inverse=True)

    def add(values: Tensor) -> Tensor:
        return values.new_zeros(len(found), *values.shape[1:]).index_add_(0, place, values)

    return GroupSums(labels=found, counts=add(counts), totals=add(totals), units=add(units))


def deal_labels(labels: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """The same labels in an order drawn at random, always the same draw: groups of the same sizes, of anybody."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return labels[order.to(labels.device)]


def sum_passages(points: Float[Tensor, "n d"], sentences: Int[Tensor, " n"]) -> Passages:
    """Sums by sentence, its own and dealt."""
    return Passages(own=sum_groups(points, sentences), dealt=sum_groups(points, deal_labels(sentences)))


def explain(points: Float[Tensor, "n d"], labels: Int[Tensor, " n"], least: int) -> Explained:
    """Leading shares of all groups of at least `least` points, one by one, each about its own mean."""
    own = _leading_shares(points, labels, least)
    dealt = _leading_shares(points, deal_labels(labels), least)
    return Explained(own=own, dealt=torch.where(own.isnan(), torch.nan, dealt))


def _leading_shares(points: Float[Tensor, "n d"], labels: Int[Tensor, " n"], least: int) -> Float[Tensor, " g"]:
    counts = labels.unique(return_counts=True)[1]
    groups = labels.argsort(stable=True).split(counts.tolist())
    spectra = (eigenvalues(center(points[group].double())) for group in groups if len(group) >= least)
    shares = [spectrum[-1] / spectrum.sum() for spectrum in spectra]
    return torch.stack(shares) if shares else points.new_empty(0, dtype=torch.float64)
