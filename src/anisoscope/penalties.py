"""Metrics that a gradient can flow through, as penalties on the states of a training batch.

The definitions are those of `metrics`; the arithmetic there is fast and exact but does not keep a graph.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.errors import SpecError


def leading_variance(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """λ₁ / Σλ of the centred covariance."""
    covariance = _covariance(points)
    return torch.linalg.eigvalsh(covariance)[-1] / covariance.trace()


def participation_ratio(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """(Σλ)² / Σλ² of the centred covariance; no eigenvalue is needed."""
    covariance = _covariance(points)
    return covariance.trace().square() / covariance.square().sum()


def isoscore(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """(PR - 1) / (d - 1), PR the participation ratio."""
    return (participation_ratio(points) - 1) / (points.shape[1] - 1)


def mean_cosine(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """(‖Σ uᵢ‖² - n) / (n (n - 1)), uᵢ the directions of the points."""
    n = len(points)
    total = torch.nn.functional.normalize(points, dim=1, eps=0.0).sum(0)
    return (total.square().sum() - n) / (n * (n - 1))


def mean_offset(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """‖mean x‖ / √(mean ‖x‖²)."""
    return torch.linalg.vector_norm(points.mean(0)) / points.square().sum(1).mean().sqrt()


def _covariance(points: Float[Tensor, "n d"]) -> Float[Tensor, "d d"]:
    centred = points - points.mean(0)
    return centred.T @ centred / len(points)


PENALTIES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "leading_variance": leading_variance,
    "participation_ratio": participation_ratio,
    "isoscore": isoscore,
    "mean_cosine": mean_cosine,
    "mean_offset": mean_offset,
}


def find_penalties(weights: Mapping[str, float]) -> dict[str, Callable[[Tensor], Tensor]]:
    """The penalties of these names."""
    unknown = sorted(set(weights) - set(PENALTIES))
    if unknown:
        raise SpecError(f"{', '.join(unknown)} cannot be a penalty; these can: {', '.join(PENALTIES)}")
    return {name: PENALTIES[name] for name in weights}


def sum_penalties(states: Float[Tensor, "... d"], weights: Mapping[str, float]) -> Float[Tensor, ""]:
    """Weighted sum of penalties on the states of a batch, in float32 at least, whatever autocast does around it."""
    with torch.autocast(states.device.type, enabled=False):
        points = states.flatten(0, -2)
        points = points if points.dtype == torch.float64 else points.float()
        terms = [weights[name] * penalty(points) for name, penalty in find_penalties(weights).items()]
        return torch.stack(terms).sum()
