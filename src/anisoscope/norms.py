"""A final norm as numbers: f(x) = gain * n(x) + bias, found by asking the module and proven on fresh states.

Names decide nothing: the gain of Gemma is 1 + weight, and OLMo's norm has no parameters at all.
"""

from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anisoscope.errors import ModelError
from anisoscope.layout import Layout
from anisoscope.metrics.final_norm import Affine

NO_FINAL_NORM = "the stack ends with its last block: there is no final norm"

_PROBES = 16
# So large that no epsilon matters, and so small that it alone decides.
_LARGE, _TINY = 1e3, 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Norm:
    """The map of a norm: gain * n(x) + bias, n(x) = x / √(mean x² + epsilon), of centred x where it centres."""

    gain: Float[Tensor, " d"]
    bias: Float[Tensor, " d"]
    epsilon: float
    centres: bool
    """LayerNorm takes the mean of the coordinates away, RMSNorm does not."""
    has_gain: bool
    has_bias: bool

    def normalise(self, states: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
        """The states without gain and bias, in float64: no float32 overflows when it is squared."""
        exact = states.double()
        if self.centres:
            exact = exact - exact.mean(-1, keepdim=True)
        return exact / (exact.square().mean(-1, keepdim=True) + self.epsilon).sqrt()

    def gained(self, states: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
        """The states after the gain, in float64."""
        return self.normalise(states) * self.gain.to(states.device)

    def __call__(self, states: Float[Tensor, "*s d"]) -> Float[Tensor, "*s d"]:
        """The states after gain and bias, in float64."""
        return self.gained(states) + self.bias.to(states.device)

    def view(self, normed: Float[Tensor, "n d"]) -> Affine:
        """What the metrics of the final norm need of states that are normalised."""
        exact = normed.double()
        return Affine(
            gain=self.gain.to(normed.device),
            bias=self.bias.to(normed.device),
            has_gain=self.has_gain,
            has_bias=self.has_bias,
            mean=exact.mean(0),
            squares=exact.square().mean(0),
        )


def read_norms(module: nn.Module, layout: Layout) -> dict[str | None, Norm | str]:
    """Each stack's final norm, or the sentence that says why there is none."""
    found: dict[str | None, Norm | str] = {}
    for stack in layout.stacks:
        found[stack.name] = NO_FINAL_NORM
        if stack.final_norm is not None and stack.width is not None:
            try:
                found[stack.name] = read_norm(module.get_submodule(stack.final_norm), stack.width)
            except ModelError as error:
                found[stack.name] = str(error)
    return found


def read_norm(module: nn.Module, width: int) -> Norm:
    """The map of a norm, or a ModelError where it is no elementwise gain and bias after LayerNorm or RMSNorm.

    A copy in float64 is asked, so that the answers are those of the weights and not of the dtype; then the module
    itself must agree, within the rounding of its dtype.
    """
    weights = list(module.parameters())
    # Offloaded weights are not here to be copied; the module then speaks for itself.
    copied = not any(weight.is_meta for weight in weights)
    place = weights[0].device if weights and copied else torch.device("cpu")
    asked = deepcopy(module).double() if copied else module
    drawn = torch.randn(2, 1, _PROBES, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    probes, fresh = drawn.to(place)
    # Of mean 0 and mean square 1: LayerNorm and RMSNorm leave them as they are, but for the epsilon.
    probes -= probes.mean(-1, keepdim=True)
    probes /= probes.square().mean(-1, keepdim=True).sqrt()
    gain, bias = _fit(asked, probes)
    norm = Norm(
        gain=gain,
        bias=bias,
        epsilon=_find_epsilon(asked, probes, gain),
        centres=_near(_ask(asked, _LARGE * (probes + 1)), _ask(asked, _LARGE * probes)),
        has_gain=not _near(gain, torch.ones_like(gain)),
        has_bias=not _near(bias, torch.zeros_like(bias)),
    )
    dtype = next((weight.dtype for weight in weights), torch.float32)
    if _error(module, norm, fresh.to(dtype)) > 1:
        # The epsilon of torch's RMSNorm depends on the dtype, unless one is given.
        norm = replace(norm, epsilon=_find_epsilon(module, probes.to(dtype), gain))
    error = _error(module, norm, fresh.to(dtype))
    if not error <= 1:
        raise ModelError(
            f"the final norm ({type(module).__name__}) is no gain and bias on each coordinate after LayerNorm or "
            f"RMSNorm: it is {error:.2g} times as far from the best such map as rounding explains"
        )
    # A gain of ones and a bias of zeros count where a parameter can move them; those of the copy are ours to change.
    for weight in asked.parameters() if copied else ():
        weight.data.add_(1)
        other_gain, other_bias = _fit(asked, probes)
        norm = replace(
            norm,
            has_gain=norm.has_gain or not _near(other_gain, gain),
            has_bias=norm.has_bias or not _near(other_bias, bias),
        )
    return norm


def _ask(module: nn.Module, states: Float[Tensor, "1 p d"]) -> Float[Tensor, "1 p d"]:
    dtype = next((weight.dtype for weight in module.parameters()), states.dtype)
    try:
        with torch.no_grad():
            return module(states.to(dtype)).double()
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ModelError(f"the final norm cannot be asked about its gain: {type(error).__name__}: {error}") from error


def _near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= 1e-4 * other.abs().max().clamp_min(1e-4))


def _fit(module: nn.Module, probes: Float[Tensor, "1 p d"]) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
    """Gain and bias: n(-x) = -n(x), so half the difference of the answers is gain * n(x), and half their sum bias."""
    up, down = _ask(module, _LARGE * probes), _ask(module, -_LARGE * probes)
    gain = ((up - down) / 2 * probes).sum((0, 1)) / probes.square().sum((0, 1))
    return gain, ((up + down) / 2).mean((0, 1))


def _find_epsilon(module: nn.Module, probes: Float[Tensor, "1 p d"], gain: Float[Tensor, " d"]) -> float:
    """From how much shorter tiny states come out than large ones: r = s / √(s² + epsilon) for states of size s."""
    full, tiny = gain * probes, (_ask(module, _TINY * probes) - _ask(module, -_TINY * probes)) / 2
    ratio = (tiny * full).sum() / full.square().sum()
    return float((_TINY**2 * (ratio**-2 - 1)).clamp_min(0))


def _error(module: nn.Module, norm: Norm, states: Float[Tensor, "1 p d"]) -> float:
    """How far the module is from its map, in units of what rounding may do; at three sizes, off the origin."""
    # Some norms work in float32 whatever they are given. Two roundings, and sums over the width.
    rounding = 8 * max(torch.finfo(states.dtype).eps, torch.finfo(torch.float32).eps)
    errors = []
    for size in (0.1, 1.0, 100.0):
        given = size * (states + 0.5)
        allowed = rounding * (norm.gain.abs() * norm.normalise(given).abs().max() + norm.bias.abs())
        away = (_ask(module, given) - norm(given)).abs()
        errors.append((away / allowed.clamp_min(torch.finfo(states.dtype).tiny)).max())
    return float(torch.stack(errors).max())
