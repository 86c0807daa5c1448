"""How often each token is learned from: the sampling exponent, asked for and achieved.

In ordinary training a token is learned from as often as it occurs: the mass of a type of frequency f is f. With a
sampling exponent a its mass is f^a: a = 1 is ordinary training, a = 0 gives every type the same mass. It changes the
frequencies that the gradients see and leaves the text as it is.
"""

import math

import numpy as np
from jaxtyping import Float, Int

TOLERANCE = 0.1
"""A run whose achieved exponent is farther from the one asked for says nothing about it: it is void."""


def loss_weights(counts: Int[np.ndarray, " v"], exponent: float) -> Float[np.ndarray, " v"]:
    """What the loss of each target is multiplied by in a causal model.

        w(v) = f(v)^(a-1) / Σ_u f(u) f(u)^(a-1)

    f: share of a type among the tokens of the corpus. The mean over the corpus is 1. Types that do not occur have 0.

    >>> import numpy as np
    >>> loss_weights(np.array([8, 2, 0]), 0.0).tolist()  # each of two types has half of the mass
    [0.625, 2.5, 0.0]
    """
    shares, tilt = _tilt(counts, exponent)
    return tilt / (shares * tilt).sum()


def mask_rates(counts: Int[np.ndarray, " v"], exponent: float, rate: float) -> Float[np.ndarray, " v"]:
    """The probability with which a token of each type is masked; `counts` is 0 for types that never are.

        q(v) = min(1, c f(v)^(a-1)),   c such that Σ_v f(v) q(v) = rate

    Types clipped at 1 have less mass than the exponent asks for: `achieved_exponent` tells.

    >>> import numpy as np
    >>> mask_rates(np.array([90, 10]), 0.0, 0.18).round(6).tolist()
    [0.1, 0.9]
    >>> mask_rates(np.array([90, 10]), 0.0, 0.28).round(6).tolist()  # the rare type is masked wherever it occurs
    [0.2, 1.0]
    """
    shares, tilt = _tilt(counts, exponent)
    order = np.argsort(-tilt, kind="stable")[: np.count_nonzero(counts)]
    # With the k most tilted types clipped, the others share what is left of the rate: the first k that clips no more.
    clipped = np.concatenate([[0.0], np.cumsum(shares[order])[:-1]])
    rest = np.cumsum((shares * tilt)[order][::-1])[::-1]
    scales = (rate - clipped) / rest
    return np.minimum(1.0, scales[np.argmax(scales * tilt[order] <= 1)] * tilt)


def _tilt(counts: Int[np.ndarray, " v"], exponent: float) -> tuple[Float[np.ndarray, " v"], Float[np.ndarray, " v"]]:
    """Shares, and f^(a-1) up to a factor, largest 1: powers of small shares would overflow."""
    shares = counts / counts.sum()
    powers = (exponent - 1) * np.log(np.where(counts > 0, shares, 1.0))
    tilt = np.where(counts > 0, np.exp(powers - powers[counts > 0].max()), 0.0)
    return shares, tilt


def achieved_exponent(counts: Int[np.ndarray, " v"], mass: Float[np.ndarray, " v"]) -> float:
    """The exponent that training had: of the law mass ∝ f^α, the α that is most likely.

        Σ_v m(v) log f(v) / Σ_v m(v)  =  Σ_v f(v)^α log f(v) / Σ_v f(v)^α

    m: weights of the targets (or numbers of masked positions) of each type, summed over training. This is the
    maximum of the multinomial likelihood; α solves it exactly where m ∝ f^α, and on average where m counts a sample.
    Types met rarely or never need no threshold, which a line through log m would: E[log m] < log E[m], and log 0 is
    not there. NaN where nothing was counted or all types are equally frequent.
    """
    present = counts > 0
    logs, weights = np.log(counts[present] / counts[present].sum()), mass[present]
    if not weights.sum() > 0 or np.ptp(logs) == 0:
        return math.nan
    wanted = float(np.average(logs, weights=weights))

    def surplus(exponent: float) -> float:
        return float(np.average(logs, weights=np.exp(exponent * (logs - logs.max())))) - wanted

    from scipy.optimize import brentq

    low, high = -8.0, 8.0
    if not surplus(low) < 0 < surplus(high):
        return math.nan
    return float(brentq(surplus, low, high, xtol=1e-10))  # pyright: ignore[reportArgumentType]


def why_void(wanted: float, achieved: float) -> str | None:
    """The sentence that voids a run whose achieved exponent is off, or None."""
    if abs(achieved - wanted) <= TOLERANCE:
        return None
    return f"its sampling exponent was to be {wanted:g} and is {achieved:.3f}: more than {TOLERANCE:g} off"
