"""How well one linear map takes the states of a site's predecessor to its own."""

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels.gram import Pair
from anisoscope.metrics.declaration import metric


@metric(
    family="linearity",
    needs="pair",
    version=1,
    bounds=(0.0, 1.0),
    cite="razzhigaev2024linear",
    null="independent",
    closed_form=lambda n, d: d / (n - 1),
    min_points=lambda d, k: 2 * d,
    undefined="the points do not vary",
)
def procrustes_linearity(pair: Pair) -> Float[Tensor, ""]:
    """Share of this site's variance that the best linear map from the previous site explains.

        procrustes_linearity = 1 - min_A ‖XA - Y‖²_F,   X, Y centred, each of unit Frobenius norm

    1 when Y is a linear image of X. Fitted and scored on the same points, so even an independent Y scores d/(n - 1),
    the null; NaN below 2d points. `procrustes_linearity_heldout` has no such floor. Deviation from the source: none.
    """
    span = _orthonormal_span(pair.source)
    return _if_varying(pair.source, (span.T @ pair.target).square().sum() / pair.target.square().sum())


@metric(
    family="linearity",
    needs="pair",
    version=1,
    bounds=(float("-inf"), 1.0),
    cite="razzhigaev2024linear",
    null="independent",
    closed_form=lambda n, d: -d / (n // 2 - d - 2),
    min_points=lambda d, k: max(4 * d, 2 * d + 6),
    undefined="the points do not vary",
)
def procrustes_linearity_heldout(pair: Pair) -> Float[Tensor, ""]:
    """The same share, with the map fitted on one half of the points and scored on the other.

        1 - ‖X₂A - Y₂‖²_F / ‖Y₂‖²_F,   A = argmin ‖X₁A - Y₁‖²_F,   both halves centred by the means of the first

    The points of a batch are dealt in random order, so the halves are random. An independent Y scores
    -d/(n/2 - d - 2), the null, for Gaussian X: predictions from noise are worse than the mean. NaN below 4d points.
    """
    half = pair.source.shape[0] // 2
    x1, y1 = pair.source[:half], pair.target[:half]
    x_mean, y_mean = x1.mean(0), y1.mean(0)
    u, s, vt = torch.linalg.svd(x1 - x_mean, full_matrices=False)
    kept = s > s[0] * max(x1.shape) * torch.finfo(s.dtype).eps
    fit = vt[kept].T @ ((u[:, kept].T @ (y1 - y_mean)) / s[kept, None])
    rest = pair.target[half:] - y_mean
    lost = ((pair.source[half:] - x_mean) @ fit - rest).square().sum() / rest.square().sum()
    return _if_varying(pair.source, 1 - lost)


def _if_varying(source: Float[Tensor, "n d"], share: Float[Tensor, ""]) -> Float[Tensor, ""]:
    return torch.where(source.any(), share, torch.nan)


def _orthonormal_span(source: Float[Tensor, "n d"]) -> Float[Tensor, "n r"]:
    u, s, _ = torch.linalg.svd(source, full_matrices=False)
    return u[:, s > s[0] * max(source.shape) * torch.finfo(s.dtype).eps]
