"""Metrics of directions seen from the origin: nothing here is centred."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels.gram import Directions, row_norms
from anisoscope.kernels.hull import HULL_INSIDE, hull_distance
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


def _margin(points: Float[Tensor, "n d"], signs: Float[Tensor, "n 1"] | float) -> Float[Tensor, ""]:
    exact = points.double()
    norms = row_norms(exact)
    if not bool((norms > 0).all()):
        return norms.new_tensor(torch.nan)
    low, high = hull_distance(signs * exact / norms[:, None])
    known = (high <= HULL_INSIDE) | (high - low <= 1e-4 * high)
    return torch.where(known, low.clamp(0, 1), torch.nan)


def _margin_with_random_signs(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    coins = torch.randint(2, (len(points), 1), generator=torch.Generator().manual_seed(0))
    return _margin(points, (2.0 * coins - 1).to(points.device, torch.float64))


@metric(
    family="isotropy",
    needs="points",
    version=1,
    invariant_to="rotation scale",
    bounds=(0.0, 1.0),
    cite="gao2019representation",
    null="control",
    control=_margin_with_random_signs,
    min_points=lambda d, k: 4 * d,
    undefined="some points are zero, or the search did not come to its bound",
    default=False,
)
def hull_margin(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """How far all points lie on one side of some hyperplane through the origin.

        hull_margin = max over unit v of minᵢ v · uᵢ,   uᵢ = xᵢ / ‖xᵢ‖;   0 where no v has them all on one side

    It is the distance from the origin to the convex hull of the directions: the cosine of the narrowest cap around all
    of them. The source derives degeneration from such a v. That there is one says nothing below 2d points, which lie in
    a half-space by counting alone; so NaN below 4d points, and the null is the margin of the same points with random
    signs, which have no common direction. The value is a lower bound that holds, within 1e-4 of an upper one; margins
    below 1e-4 may read 0. One point decides: compare `all` and `typical`. On request.

    >>> import torch, anisoscope as an
    >>> fan = torch.tensor([[1.0, 1.0], [2.0, -2.0], [3.0, 0.0]]).repeat(3, 1)  # 45 degrees to both sides
    >>> round(an.estimate(fan, ["hull_margin"])["hull_margin"].value, 6)
    0.707107
    """
    return _margin(points, 1.0)
