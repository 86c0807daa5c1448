"""Repairs for anisotropic points: plain functions from a matrix of points to another, numpy or torch as given.

Each takes what it removes from `fit`, another matrix of the same coordinates, where one is given: fitted on one set of
points, applied to another. Arithmetic is float64; the answer has the dtype and device of the points.
"""

import math
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import SpecError

Points = TypeVar("Points", np.ndarray, Tensor)


def center(points: Points, *, fit: Points | None = None) -> Points:
    """Take the mean away.

        x - mean

    >>> center(np.array([[1.0, 2.0], [3.0, 6.0]])).tolist()
    [[-1.0, -2.0], [1.0, 2.0]]
    """
    exact, sample = _read(points, fit)
    return _like(points, exact - _mean_of(sample))


def remove_top(points: Points, count: int | None = None, *, fit: Points | None = None) -> Points:
    """All but the top: take the mean and the leading principal axes away (Mu and Viswanath 2018).

        y - Σ_{k ≤ count} (y · a_k) a_k,   y = x - mean,   a_k the principal axes

    `count` is ⌈d/100⌉ unless given. Deviation from the source: it projects x and not y on the axes, which leaves a mean
    behind; Biś et al. (2021) corrected that.
    """
    exact, sample = _read(points, fit)
    d = exact.shape[1]
    count = math.ceil(d / 100) if count is None else count
    if not 0 <= count <= d:
        raise SpecError(f"of {d} principal axes between 0 and {d} can be removed; came {count}")
    mean = _mean_of(sample)
    axes = _principal_axes(sample - mean)[1][:, d - count :]
    centred = exact - mean
    return _like(points, centred - (centred @ axes) @ axes.T)


def whiten(points: Points, *, floor: float = 1e-6, fit: Points | None = None) -> Points:
    """Principal components, each of variance 1.

        (x - mean) · a_k / √max(λ_k, floor · λ₁),   λ₁ ≥ λ₂ ≥ ... the variances along the principal axes a_k

    The floor keeps axes on which the points hardly vary from being blown up: they come out with variance below 1. Axes
    come in falling order, each with its largest coordinate positive.
    """
    exact, sample = _read(points, fit)
    mean = _mean_of(sample)
    variances, axes = _principal_axes(sample - mean)
    variances, axes = variances.flip(0), axes.flip(1)
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
    scales = torch.maximum(variances, floor * variances[0]).sqrt()
    return _like(points, (exact - mean) @ axes / torch.where(scales > 0, scales, 1))


def standardize(points: Points, *, fit: Points | None = None) -> Points:
    """Each coordinate with mean 0 and standard deviation 1, so that no rogue dimension decides (Timkey and van
    Schijndel 2021).

        (x_k - mean_k) / std_k

    With n - 1; a coordinate that does not vary becomes 0.

    >>> standardize(np.array([[1.0, 5.0], [3.0, 5.0], [5.0, 5.0]])).tolist()
    [[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
    """
    exact, sample = _read(points, fit)
    mean = _mean_of(sample)
    spread = (sample - mean).square().sum(0).div(len(sample) - 1).sqrt()
    return _like(points, (exact - mean) / torch.where(spread > 0, spread, 1))


def _mean_of(sample: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """The mean; that of equal numbers may round to another number, which would be taken for variation."""
    return torch.where((sample == sample[0]).all(0), sample[0], sample.mean(0))


def _principal_axes(centred: Float[Tensor, "n d"]) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
    """Variances, ascending, and the axes they lie along, as columns."""
    variances, axes = torch.linalg.eigh(centred.T @ centred / max(len(centred) - 1, 1))
    return variances.clamp_min(0), axes


def _read(points: Any, fit: Any) -> tuple[Float[Tensor, "n d"], Float[Tensor, "m d"]]:
    """The points and what to fit on, in float64."""
    exact, sample = (torch.as_tensor(matrix).detach().double() for matrix in (points, points if fit is None else fit))
    if exact.ndim != 2 or sample.ndim != 2 or sample.shape[1] != exact.shape[1] or len(sample) < 2:
        raise SpecError(
            "a repair takes a matrix of points, one per row, and at least two to fit on, of the same coordinates; "
            f"came {tuple(exact.shape)} and {tuple(sample.shape)}"
        )
    return exact, sample.to(exact.device)


def _like(points: Any, repaired: Float[Tensor, "n d"]) -> Any:
    if isinstance(points, Tensor):
        return repaired.to(points.dtype)
    return repaired.numpy().astype(points.dtype)
