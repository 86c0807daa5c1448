"""How curved the cloud of states is, and how much of that a sample by frequency shows.

Notation: around an anchor the cloud is a surface x(u) = x₀ + Tu + ½ N II(u, u) with r tangent directions, t² the
tangent variance per direction, and q = ⟨II₁, II₂⟩ the product of two fits to disjoint halves of the neighbours: its
mean is ‖II‖² where the halves err independently, whatever the noise. The computation is in `tangent/`; here is what is
reported.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from anisoscope.metrics.declaration import metric


@dataclass(frozen=True, kw_only=True)
class Curved:
    """What was read of a draw of points; NaN where it cannot be told."""

    visibility: float = math.nan
    form: float = math.nan
    attenuation: float = math.nan


_of_surfaces = partial(
    metric,
    family="curvature",
    needs="curved",
    # 2: windows of the probe share no document.
    version=2,
    cite="bernas2026revisiting",
    populations=("content",),
    undefined="the cloud cannot be told from one that is no surface of this rank",
)


def _number(value: float) -> Float[Tensor, ""]:
    return torch.tensor(value, dtype=torch.float64)


@_of_surfaces(bounds=(float("-inf"), float("inf")), null="exact", closed_form=lambda n, d: 0.0)
def curvature_visibility(found: Curved) -> Float[Tensor, ""]:
    """How much of the variance around a point is there because the cloud bends.

        curvature_visibility = V = Σ t⁴ q / (2 r Σ t²)   over anchors

    The normal variance that curvature makes, over the tangent variance: 0 for a flat cloud (the null: mean 0 whatever
    the noise, negative as often as positive), t² ‖II‖² / (2r) for a surface that bends the same everywhere. The
    expansion is about small V; near 1 and above, what is read is no surface of rank r. One row per draw: `exponent=a`
    takes points with type probability ~ f^a, from uniform over types (0) to as in text (1), at equal number of points,
    neighbours and rank. The interval is over types of anchors; p from one random sign per point. Rough types count as
    curvature: where all occurrences of a type share one displacement, both halves of the neighbours have it. Deviation
    from the source: its estimator is not known to us; fits are crossed because plain ones read noise as curvature.
    """
    return _number(found.visibility)


@_of_surfaces(invariant_to="translation rotation", null="exact", closed_form=lambda n, d: 0.0)
def second_fundamental_form(found: Curved) -> Float[Tensor, ""]:
    """Size of the second fundamental form: how fast the cloud bends away from its tangent space.

        second_fundamental_form = ‖II‖_F = √max(mean q, 0)   over anchors

    0 for a flat cloud, √r / R for a sphere of radius R: an inverse length, so scale matters. Noise along the tangent
    lowers it, large neighbourhoods raise it (docs/tangent.md). One row per draw, as for `curvature_visibility`.
    Deviation from the source: see there; rank 4 by default, because rank 16 would want 459 neighbours of each anchor.
    """
    return _number(found.form)


@_of_surfaces(bounds=(float("-inf"), float("inf")), null="exact", closed_form=lambda n, d: 1.0)
def frequency_attenuation(found: Curved) -> Float[Tensor, ""]:
    """Visible curvature in text over that in a sample uniform over types.

        frequency_attenuation = A = (Σ f t⁴q / Σ f t²) / (Σ t⁴q / Σ t²)   over anchors of the uniform draw

    The theory's quantity: neighbourhoods are those of the uniform draw, anchors weigh by the frequency f of their type.
    Below 1 frequency hides curvature, 1 where radius and curvature do not depend on frequency (the null), above 1 it
    shows it. `drawn` is V of a draw as in text over V of the uniform draw: what an analyst sees who takes k neighbours
    in text; it can exceed 1 where A does not, because neighbours reach farther where a draw is sparse. NaN where the
    uniform draw is not curved beyond doubt. Deviation from the source: not known, there may be one of the two.
    """
    return _number(found.attenuation)
