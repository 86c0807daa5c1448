"""What is asked of weight matrices besides the estimators of spectrum.py and angles.py; states have it too."""

from jaxtyping import Float
from torch import Tensor

from anisoscope.kernels.gram import row_norms
from anisoscope.metrics.declaration import metric
from anisoscope.metrics.spectrum import log_partitions


@metric(
    family="anisotropy",
    needs="points",
    version=1,
    invariant_to="rotation",
    cite="machina2024anisotropy",
    null="none",
    reason="a length has a scale, and chance has none",
    populations=("all",),
    min_points=1,
    default=False,
)
def mean_norm(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """Mean length of the points.

        mean_norm = mean ‖xᵢ‖

    The scale that `partition_isotropy` depends on: its values compare only where this is the same.
    """
    return row_norms(points).mean()


@metric(
    family="isotropy",
    needs="points",
    version=1,
    invariant_to="rotation",
    bounds=(float("-inf"), 0.0),
    cite="mu2018all",
    null="none",
    reason="it depends on the scale of the points, and the isotropic value with it",
    default=False,
)
def log_partition_isotropy(points: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """Logarithm of `partition_isotropy`, which is there where the ratio itself is below the smallest number.

        log I(X) = min_c log Z(c) - max_c log Z(c),   Z(c) = Σᵢ exp(c · xᵢ),   c over ± the unit eigenvectors of XᵀX

    0 when Z is the same in every direction. At weights (population `rows`) the null of this and of `partition_isotropy`
    is the same matrix with its rows turned in random directions, their lengths kept: median of three draws.
    """
    partitions = log_partitions(points)
    return partitions.min() - partitions.max()
