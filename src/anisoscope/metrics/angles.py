"""Metrics of directions seen from the origin: nothing here is centred."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels.gram import Directions
from anisoscope.metrics.declaration import metric


@metric(
    family="anisotropy",
    needs="directions",
    version=1,
    invariant_to="rotation scale",
    bounds=(-1.0, 1.0),
    cite="ethayarajh2019contextual",
    null="exact",
    closed_form=lambda n, d: 0.0,
    undefined="some points are zero and have no direction",
    stacked=True,
)
def mean_cosine(directions: Directions) -> Float[Tensor, "*s"]:
    """Mean cosine of the angle between two different points.

        mean_cosine = (‖Σᵢ uᵢ‖² - n) / (n (n - 1)),   uᵢ = xᵢ / ‖xᵢ‖

    Exactly the mean over all ordered pairs i ≠ j, in O(nd). 1 when all points share one direction, 0 for a cloud
    without a common direction (the null, exactly), at least -1/(n - 1). Deviation from the source: all pairs, where
    the source samples 1,000 of them.

    >>> import torch, anisoscope as an
    >>> corner = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])  # pairs: 0, 1, 0
    >>> round(an.estimate(corner, ["mean_cosine"])["mean_cosine"].value, 6)
    0.333333
    """
    n = directions.count
    return (directions.total.square().sum(-1) - n) / (n * (n - 1))


@metric(
    family="anisotropy",
    needs="points",
    version=1,
    invariant_to="rotation scale",
    bounds=(0.0, 1.0),
    cite="machina2024anisotropy",
    null="exact",
    closed_form=lambda n, d: 1 / math.sqrt(n),
    undefined="all points are zero",
)
def mean_offset(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """How far the cloud sits from the origin, in units of its size.

        mean_offset = ‖mean x‖ / √(mean ‖x‖²)

    0 when centred on the origin, 1 when all points coincide. For n independent isotropic points its root mean square
    is 1/√n, the null.
    """
    exact = points.double()
    scaled = exact / exact.abs().max()
    return torch.linalg.vector_norm(scaled.mean(0)) / scaled.square().sum(1).mean().sqrt()
