"""What gain and bias of the final norm do to the mean of its states: z = g * x̂ + b, with m = E x̂ over the tokens."""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, linalg

from anisoscope.metrics.declaration import metric


@dataclass(frozen=True, kw_only=True)
class Affine:
    """A final norm's affine map and the moments of what it is applied to, in float64."""

    gain: Float[Tensor, " d"]
    """1 where the norm has none of its own."""
    bias: Float[Tensor, " d"]
    """0 where the norm has none of its own."""
    has_gain: bool
    has_bias: bool
    mean: Float[Tensor, " d"]
    """m_j = E x̂_j"""
    squares: Float[Tensor, " d"]
    """E x̂_j²"""

    def only_if(self, known: bool, value: Tensor) -> Tensor:
        """NaN in place of a number about a part that the norm does not have."""
        return value if known else value.new_tensor(torch.nan)


_of_the_norm = partial(metric, family="final_norm", needs="norm", version=1, cite="machina2024anisotropy", min_points=1)


@_of_the_norm(
    null="none",
    reason="a gain is compared with other checkpoints, not with chance",
    populations=("all",),
    undefined="the final norm has no gain",
)
def norm_gain(norm: Affine) -> Float[Tensor, ""]:
    """Length of the final norm's effective gain.

        norm_gain = ‖g‖

    g is what the module does, found by probing it: 1 + weight in Gemma. At site `final_norm`.
    """
    return norm.only_if(norm.has_gain, linalg.vector_norm(norm.gain))


@_of_the_norm(
    null="none",
    reason="a bias is compared with other checkpoints, not with chance",
    populations=("all",),
    undefined="the final norm has no bias",
)
def norm_bias(norm: Affine) -> Float[Tensor, ""]:
    """Length of the final norm's bias.

        norm_bias = ‖b‖

    0 for a bias that is zero; NaN where there is none (RMSNorm).
    """
    return norm.only_if(norm.has_bias, linalg.vector_norm(norm.bias))


@_of_the_norm(
    null="none",
    reason="a ratio of weights is compared with other checkpoints, not with chance",
    populations=("all",),
    undefined="the final norm has no bias, or no gain, or a gain of zero",
)
def norm_bias_ratio(norm: Affine) -> Float[Tensor, ""]:
    """The source's indicator: length of the bias over length of the gain.

        norm_bias_ratio = ρ = ‖b‖ / ‖g‖

    Where m = 0 and every E x̂_j² = 1, the mean cosine of the final states is ρ² / (1 + ρ²). Both fail on real states:
    see `norm_bias_ratio_effective` and `residual_drift`.
    """
    length = linalg.vector_norm(norm.gain)
    return norm.only_if(norm.has_bias and norm.has_gain and bool(length > 0), linalg.vector_norm(norm.bias) / length)


@_of_the_norm(
    invariant_to="",
    null="none",
    reason="a ratio of weights is compared with other checkpoints, not with chance",
    undefined="the final norm has no bias, or a gain of zero",
)
def norm_bias_ratio_effective(norm: Affine) -> Float[Tensor, ""]:
    """Length of the bias over the length that the gain really gives to the states.

        ρ = ‖b‖ / ‖g‖_eff,   ‖g‖_eff² = Σⱼ g_j² E x̂_j²

    A norm fixes the mean of the E x̂_j², not each of them: a gain that damps a few large coordinates is shorter in
    effect than on paper. Where m = 0, the mean cosine of the final states is ρ² / (1 + ρ²) with this ρ. Deviation from
    the source: it has ‖g‖.
    """
    length = (norm.gain.square() * norm.squares).sum().sqrt()
    return norm.only_if(norm.has_bias and bool(length > 0), linalg.vector_norm(norm.bias) / length)


@_of_the_norm(
    invariant_to="rotation scale",
    bounds=(0.0, 1.0),
    null="exact",
    closed_form=lambda n, d: n**-0.5,
    undefined="all final states are zero",
)
def residual_drift(norm: Affine) -> Float[Tensor, ""]:
    """What is left of the common drift after gain and bias, in units of the states' size.

        residual_drift = ‖g * m + b‖ / √(E ‖z‖²),   z = g * x̂ + b

    0 when the bias cancels the drift (b = -g * m), however long it is: a short bias alone is no isotropy. Its square is
    close to the mean cosine where lengths vary little. It is `mean_offset` of the final states, from the parts; for n
    independent isotropic points its root mean square is 1/√n, the null.
    """
    drift = norm.gain * norm.mean + norm.bias
    size = norm.gain.square() * norm.squares + 2 * norm.gain * norm.bias * norm.mean + norm.bias.square()
    return linalg.vector_norm(drift) / size.sum().sqrt()


@_of_the_norm(
    invariant_to="",
    bounds=(-1.0, 1.0),
    null="exact",
    closed_form=lambda n, d: 0.0,
    undefined="the final norm has no bias, or its bias or the drift is zero",
)
def drift_cancellation(norm: Affine) -> Float[Tensor, ""]:
    """How far the bias points against the drift.

        drift_cancellation = cos(b, -g * m)

    1 when the bias opposes the drift g * m exactly, -1 when it adds to it, 0 on average for a bias that knows nothing
    of it (the null). It says nothing of lengths: `residual_drift` does.
    """
    drift = -norm.gain * norm.mean
    lengths = linalg.vector_norm(norm.bias) * linalg.vector_norm(drift)
    return norm.only_if(norm.has_bias and bool(lengths > 0), norm.bias @ drift / lengths)
