"""How sampling by frequency hides curvature: the same cloud drawn with f^exponent, from uniform to as in text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import SpecError
from anisoscope.tangent.curvature import (
    Bounded,
    Curvature,
    CurvatureSettings,
    LocalFits,
    bound,
    overlap,
    read_curvature,
    resample_types,
    visibility,
)

EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, kw_only=True)
class FrequencyResponse:
    """Curvature of draws in which a type of frequency f has the mass f^exponent."""

    exponents: tuple[float, ...]
    curvatures: tuple[Curvature, ...]
    frequency_attenuation: Bounded
    """V(1) / V(0) at equal n, k and r. Below 1: frequency bias hides curvature."""
    reweighted_attenuation: Bounded
    """The same with the neighbourhoods of the draw at 0, its anchors weighted by f: the closed form of the theory."""
    note: str | None = None


def measure_frequency_response(
    points: Float[Tensor, "n d"],
    types: Int[Tensor, " n"],
    frequencies: Float[Tensor, " m"],
    *,
    draw_points: int,
    exponents: Sequence[float] = EXPONENTS,
    settings: CurvatureSettings = CurvatureSettings(),  # noqa: B008
) -> FrequencyResponse:
    """The resampling experiment: curvature of draws of equal size, from uniform over types to proportional to f.

    `frequencies` are those of each point's type, best from another text. Exponents must hold 0 and 1.
    """
    if not {0.0, 1.0} <= set(exponents):
        raise SpecError(f"attenuation compares the exponents 0 and 1; came {tuple(exponents)}")
    readings = {}
    for exponent in exponents:
        drawn = draw_by_frequency(types, frequencies, exponent, draw_points, seed=settings.seed)
        readings[exponent] = read_curvature(points[drawn], types[drawn], frequencies[drawn], settings)
    attenuation, note = _compare(readings[0.0], readings[1.0], settings)
    return FrequencyResponse(
        exponents=tuple(exponents),
        curvatures=tuple(reading for reading, _ in readings.values()),
        frequency_attenuation=attenuation,
        reweighted_attenuation=_reweighted(readings[0.0], settings),
        note=note,
    )


def draw_by_frequency(
    types: Int[Tensor, " n"], frequencies: Float[Tensor, " m"], exponent: float, count: int, *, seed: int
) -> Int[Tensor, " count"]:
    """Occurrences without repetition, each draw's type with probability ~ f^exponent (Gumbel's trick).

    A type that has run out is drawn no more, so the exponent is reached only where `count` leaves plenty behind.
    """
    if not 0 < count <= len(types):
        raise SpecError(f"a draw without repetition takes 1 to {len(types)} points; came {count}")
    if len(frequencies) != len(types) or not bool((frequencies > 0).all()):
        raise SpecError("every point needs the frequency of its type, above 0; count on a text that has all types")
    _, which, occurrences = torch.unique(types, return_inverse=True, return_counts=True)
    logits = exponent * frequencies.double().log() - occurrences[which].double().log()
    uniform = torch.rand(len(types), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (logits - (-uniform.to(logits.device).log()).log()).topk(count).indices


def _compare(
    uniform: tuple[Curvature, LocalFits | None], biased: tuple[Curvature, LocalFits | None], settings: CurvatureSettings
) -> tuple[Bounded, str | None]:
    """V(1) / V(0), the same types drawn in numerator and denominator."""
    for exponent, (reading, fits) in ((0, uniform), (1, biased)):
        if fits is None:
            return Bounded(), f"exponent {exponent}: {reading.note}"
    if not uniform[0].curved:
        return Bounded(), "cannot tell: no curvature was found in the draw that is uniform over types"
    assert uniform[1] is not None
    assert biased[1] is not None
    types = np.union1d(uniform[1].types, biased[1].types)
    below, above = (_spread_visibility(fits, types, settings) for fits in (uniform[1], biased[1]))
    value = float(visibility(biased[1]) / visibility(uniform[1]))
    return bound(value, np.where(below > 0, above / below, np.nan), 1.0, settings), None


def _spread_visibility(fits: LocalFits, types: np.ndarray, settings: CurvatureSettings) -> np.ndarray:
    value, dealt = float(visibility(fits)), resample_types(fits, types, settings)
    # A resample may miss all types of the anchors.
    draws = np.full(len(dealt), np.nan)
    some = dealt.any(1)
    draws[some] = visibility(fits, dealt[some])
    return value + math.sqrt(overlap(fits, 2)) * (draws - value)


def _reweighted(uniform: tuple[Curvature, LocalFits | None], settings: CurvatureSettings) -> Bounded:
    """Σ f t⁴q / Σ f t²  over  Σ t⁴q / Σ t²  for the anchors of the draw that is uniform over types."""
    fits = uniform[1]
    if fits is None or not uniform[0].curved:
        return Bounded()
    dealt = resample_types(fits, np.unique(fits.types), settings)
    draws = visibility(fits, dealt * fits.frequencies) / visibility(fits, dealt)
    value = float(visibility(fits, fits.frequencies) / visibility(fits))
    return bound(value, draws, overlap(fits, 2), settings)
