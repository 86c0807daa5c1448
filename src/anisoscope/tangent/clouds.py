"""Clouds of one width side by side, each around its own mean and with squares that add up to one.

A GPU hardly needs longer for many than for one, as long as nothing is asked of each alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anisoscope.errors import StatesError
from anisoscope.kernels.gram import MEAN_LEFT, SAFE_RANGE, for_products, power_of_two, squared_norms, working_dtype

# Rows in which columns are looked at first: few that are not constant are constant there.
FIRST_ROWS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Clouds:
    """Points, with zeros for rows that do not count; times `size`, and with the mean, they are those that came."""

    points: Float[Tensor, "s n d"]
    mean: Float[Tensor, "s d"]
    """Float64."""
    size: Float[Tensor, " s"]
    """√Σ‖x - x̄‖², float64; 0 where the points are all equal. √Σ‖x‖² where they were not centred."""


def stack_clouds(clouds: Sequence[Float[Tensor, "n d"]]) -> Float[Tensor, "s n d"]:
    """Clouds of one size in one stack; one by itself is not copied."""
    return torch.stack(list(clouds)) if len(clouds) > 1 else clouds[0][None]


def pad_clouds(clouds: Sequence[Float[Tensor, "_ d"]]) -> tuple[Float[Tensor, "s n d"], Bool[Tensor, "s n"]]:
    """Clouds of one width in one stack, and which of its rows are theirs."""
    stacked = pad_sequence(list(clouds), batch_first=True) if len(clouds) > 1 else clouds[0][None]
    rows = torch.tensor([len(one) for one in clouds], device=stacked.device)
    return stacked, torch.arange(stacked.shape[1], device=stacked.device) < rows[:, None]


def center_clouds(points: Float[Tensor, "s n d"], keep: Bool[Tensor, "s n"], *, centred: bool = True) -> Clouds:
    """Each without its mean, as exact as `gram.center` has it, or as it is; rows that are not kept do not count."""
    kept = keep[..., None]
    raw = torch.where(kept, points, 0).to(working_dtype(points.dtype))
    weights = (keep.double() / keep.sum(1, keepdim=True)).to(raw)[:, None]
    largest = _largest(raw)
    low, high = _ends(raw[:, :FIRST_ROWS], kept[:, :FIRST_ROWS])
    least, most, suspects = torch.stack([largest.amin(), largest.amax(), (low >= high).any().double()]).tolist()
    if not math.isfinite(most):
        raise StatesError("states and gradients must be finite, and some are NaN or infinite; drop those tokens first")
    scale = torch.ones_like(largest)
    if not SAFE_RANGE[0] <= least <= most <= SAFE_RANGE[1]:
        scale = power_of_two(largest)
        raw = raw / scale.to(raw.dtype)[:, None, None]
    mean = weights @ raw
    if suspects:
        # The mean of equal numbers may round to another number, and that residue would later be taken for variation.
        low, high = _ends(raw, kept)
        mean = torch.where(low == high, low, mean)
    mean, around = mean.double(), raw
    if centred:
        # `raw` is a copy already.
        around = raw.sub_(mean.to(raw)).mul_(kept)
        rest, widest = weights @ around, _largest(around)
        left = rest[:, 0].double().norm(dim=1) > MEAN_LEFT * _size(around) / keep.sum(1).sqrt()
        least, most, again = torch.stack([widest.amin(), widest.amax(), left.any().double()]).tolist()
        if again or not SAFE_RANGE[0] <= least <= most <= SAFE_RANGE[1]:
            # A common offset sets the first scale; the variation may be many orders below it.
            second = power_of_two(widest)
            around = around.div_(second.to(raw.dtype)[:, None, None])
            rest = weights @ around
            around = around.sub_(rest).mul_(kept)
            mean, scale = mean / second[:, None, None] + rest, scale * second
    size = _size(around)
    unit = around.div_(torch.where(size > 0, size, 1).to(around.dtype)[:, None, None])
    return Clouds(points=for_products(unit), mean=mean[:, 0] * scale[:, None], size=size * scale)


def _largest(points: Float[Tensor, "s n d"]) -> Float[Tensor, " s"]:
    """Largest absolute value of each, in float64, without a copy of the absolute values."""
    return torch.maximum(points.amax((1, 2)), -points.amin((1, 2))).double()


def _ends(rows: Float[Tensor, "s n d"], kept: Bool[Tensor, "s n 1"]) -> tuple[Tensor, Tensor]:
    """The least and the largest number of each column."""
    low, high = (torch.where(kept, rows, end) for end in (math.inf, -math.inf))
    return low.amin(1, keepdim=True), high.amax(1, keepdim=True)


def _size(points: Float[Tensor, "s n d"]) -> Float[Tensor, " s"]:
    return squared_norms(points.flatten(0, 1)).view(len(points), -1).sum(1).sqrt()
