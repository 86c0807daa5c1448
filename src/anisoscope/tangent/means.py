"""The direction of the states' mean taken out of tangent proxies."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from anisoscope.tangent.proxies import Proxy, alike

# What is left of a direction after the mean is projected out: below this it was the mean, and what is left is noise.
LEFT_WITHOUT_MEAN = 0.1


def without_mean(proxies: Sequence[Proxy]) -> list[Proxy]:
    """The same proxies with the direction of the states' mean projected out of them and of their controls."""
    bases: dict[int, Tensor] = {}
    away: dict[int, Tensor] = {}
    for here in alike([one.basis for one in proxies]):
        axes = torch.stack([proxies[place].basis for place in here])
        mean = normalize(torch.stack([proxies[place].mean for place in here]), eps=1e-300)
        bases |= dict(zip(here, _without_directions(axes, mean), strict=True))
        # Controls are outside the basis already: what they may have of the mean is what the basis has not.
        exact = axes.double()
        rest = mean - (exact @ (exact.mT @ mean[..., None]))[..., 0]
        left = torch.linalg.vector_norm(rest, dim=1, keepdim=True)
        away |= dict(zip(here, torch.where(left > LEFT_WITHOUT_MEAN, rest / left, mean), strict=True))
    changed: dict[int, dict[str, Tensor]] = {place: {"basis": bases[place]} for place in bases}
    for name in ("following", "further", "last"):
        axes = [one.basis[:, :0] if getattr(one, name) is None else getattr(one, name) for one in proxies]
        cut = [one[:, : bases[place].shape[1] * (2 if name == "further" else 1)] for place, one in enumerate(axes)]
        for here in alike(cut):
            stacked = torch.stack([cut[place] for place in here]), torch.stack([away[place] for place in here])
            for place, one in zip(here, _without_directions(*stacked), strict=True):
                changed[place][name] = one
    found = []
    for place, proxy in enumerate(proxies):
        dropped = proxy.rank - bases[place].shape[1]
        note = "the mean direction is projected out" + (f", and with it {dropped} of the directions" if dropped else "")
        found.append(replace(proxy, **changed[place], explained=math.nan, shares=None, notes=(*proxy.notes, note)))
    return found


def _without_directions(axes: Float[Tensor, "s d q"], directions: Float[Tensor, "s d"]) -> list[Float[Tensor, "d _"]]:
    """An orthonormal basis of what orthonormal axes span outside a direction of length one, or outside nothing.

    (I - mmᵀ)Q has, for c = Qᵀm, the singular value √(1 - ‖c‖²) along c and else only ones: c is stretched, or left out.
    """
    if not axes.shape[2]:
        return list(axes)
    exact, directions = axes.double(), directions.double()[:, None]
    along = directions @ exact
    rest = exact - directions.mT @ along
    length = torch.linalg.vector_norm(along, dim=2, keepdim=True)
    left = (1 - length.square()).clamp_min(0).sqrt()
    unit = along / torch.where(length > 0, length, 1)
    stretched = (rest + (rest @ unit.mT) @ unit * (1 / left - 1)).to(axes)
    found = list(stretched)
    for place, one in enumerate(left.flatten().tolist()):
        if one <= LEFT_WITHOUT_MEAN:
            # A reflection that takes c to the first coordinate, which is dropped.
            mirror = unit[place, 0].clone()
            mirror[0] += 1.0 if float(mirror[0]) >= 0 else -1.0
            turned = rest[place] - torch.outer(rest[place] @ mirror, mirror) * (2 / mirror.square().sum())
            found[place] = turned[:, 1:].to(axes)
    return found
