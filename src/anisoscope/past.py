"""Tangent proxies of earlier checkpoints, kept as small arrays so that later gradients can be held against them.

untrained   the proxy of the first checkpoint: what training had no part in
rolling     that of the checkpoint before: fitted on past states, tested on the present gradient
frozen      of all checkpoints in the first 30 % of the training steps, pooled (the paper's way)
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anisoscope.errors import SpecError
from anisoscope.records import Site
from anisoscope.store import Store
from anisoscope.tangent.proxies import FROZEN_SHARE, Proxy

FITS = ("untrained", "rolling", "frozen")
# Checkpoints that are pooled at most; of more, as many as this are taken, evenly.
POOLED = 8
Arrays = Mapping[str, np.ndarray]
"""The attachments of a unit."""


def sketch(places: Iterable[tuple[Site, str]], fits: Iterable[Mapping[str, Proxy]]) -> dict[str, np.ndarray]:
    """What is kept of the proxies of sites: 2r principal axes with their shares of the variance, the cone's basis.

    Half precision: it turns a direction by about 1e-3. From a GPU in one copy.
    """
    shares: dict[str, np.ndarray] = {}
    kept: dict[str, list[Tensor]] = {}
    for (site, population), proxies in zip(places, fits, strict=True):
        main, prefix = proxies["pca"], _prefix(site, population)
        assert main.shares is not None
        kept[f"{prefix}.axes"] = [main.basis, main.following]
        shares[f"{prefix}.shares"] = main.shares.numpy().astype(np.float16)
        kept[f"{prefix}.mean"] = [main.mean / main.distance]
        if "seminmf" in proxies:
            kept[f"{prefix}.cone"] = [proxies["seminmf"].basis]
    every = [one for several in kept.values() for one in several]
    flat = torch.cat([one.flatten() for one in every]).half().cpu().numpy()
    parts = iter(np.split(flat, np.cumsum([one.numel() for one in every])[:-1]))
    joined = {name: [next(parts).reshape(one.shape) for one in several] for name, several in kept.items()}
    return shares | {name: np.concatenate(several, -1) for name, several in joined.items()}


def _prefix(site: Site, population: str) -> str:
    return f"proxy/{site.stack or ''}/{site.name}/{population}"


@dataclass(frozen=True, kw_only=True)
class Past:
    """The attachments of earlier units, by what they are for."""

    fits: Mapping[str, Sequence[Arrays]]
    steps: Mapping[str, str]
    """Where each comes from, for notes."""

    def proxies(self, site: Site, population: str, method: str, rank: int, like: Tensor) -> Iterator[tuple[str, Proxy]]:
        """The proxies of a site that there are, by fit; of a rank that they have."""
        for fit, units in self.fits.items():
            kept = [found for unit in units if (found := _read(unit, site, population, like))]
            if kept and (proxy := _pool(kept, method, rank, f"fitted at step {self.steps[fit]}")) is not None:
                yield fit, proxy


def choose_past(steps: Sequence[int | None], at: int, last_step: int | None) -> dict[str, tuple[int, ...]]:
    """Which earlier checkpoints, by place in the order of training, serve which fit for the checkpoint at a place.

    >>> choose_past([0, 1, 10, 100], 3, 100)
    {'untrained': (0,), 'rolling': (2,), 'frozen': (0, 1, 2)}
    """
    if at == 0:
        return {}
    found: dict[str, tuple[int, ...]] = {"rolling": (at - 1,)}
    if steps[0] == 0:
        found = {"untrained": (0,), **found}
    if last_step and all(step is not None for step in steps):
        early = tuple(place for place in range(at) if (steps[place] or 0) <= FROZEN_SHARE * last_step)
        if early and (steps[at] or 0) > FROZEN_SHARE * last_step:
            evenly = np.linspace(0, len(early) - 1, min(POOLED, len(early))).round().astype(int)
            found["frozen"] = tuple(early[place] for place in evenly)
    return found


def read_past(store: Store, keys: Mapping[str, Sequence[str]]) -> Past:
    """The proxies that earlier units of a store keep."""
    fits, steps = {}, {}
    for fit, named in keys.items():
        if missing := [key for key in named if key not in store]:
            raise SpecError(f"proxies are wanted of units that are not in {store.folder}: {', '.join(missing)}")
        units = [store.get(key) for key in named]
        fits[fit] = [unit.attachments for unit in units]
        steps[fit] = ", ".join(str(unit.spec.revision if unit.spec.step is None else unit.spec.step) for unit in units)
    return Past(fits=fits, steps=steps)


def write_reference(keys: Mapping[str, Sequence[str]]) -> str:
    """`proxy_from` of a Spec: `rolling=KEY;frozen=KEY,KEY`."""
    return ";".join(f"{fit}={','.join(units)}" for fit, units in sorted(keys.items()))


def read_reference(text: str) -> dict[str, tuple[str, ...]]:
    """The keys of units in a Spec's `proxy_from`."""
    pairs = [part.partition("=") for part in text.split(";")]
    if any(fit not in FITS or not keys for fit, _, keys in pairs):
        raise SpecError(f"proxy_from is FIT=KEY,KEY;..., with FIT one of {', '.join(FITS)}; came {text!r}")
    return {fit: tuple(keys.split(",")) for fit, _, keys in pairs}


def _read(unit: Arrays, site: Site, population: str, like: Tensor) -> dict[str, Tensor] | None:
    prefix = _prefix(site, population)
    names = [name for name in unit if name.startswith(f"{prefix}.")]
    return {name.removeprefix(f"{prefix}."): torch.from_numpy(unit[name]).to(like) for name in names} or None


def _pool(kept: Sequence[Mapping[str, Tensor]], method: str, rank: int, note: str) -> Proxy | None:
    """One proxy of several: axes of the mean covariance, each checkpoint with a variance of one.

    Of cones, axes of what each has of its checkpoint's states: their spans alone would be pooled by what they share,
    however little varies there. Only the 2r leading axes of each checkpoint are known: an approximation.
    """
    apart = [one["axes"].double() * one["shares"].double().clamp_min(0).sqrt() for one in kept]
    weighted = torch.cat(apart, 1)
    if (
        method not in ("pca", "seminmf")
        or weighted.shape[1] < 2 * rank
        or (method == "seminmf" and "cone" not in kept[0])
    ):
        return None
    axes = torch.linalg.svd(weighted, full_matrices=False).U
    if method == "pca":
        basis, following = axes[:, :rank], axes[:, rank : 2 * rank]
    else:
        cones = [torch.linalg.qr(one["cone"].double()).Q for one in kept]
        within = torch.cat([cone @ (cone.T @ axes) for cone, axes in zip(cones, apart, strict=True)], 1)
        basis = torch.linalg.svd(within, full_matrices=False).U[:, : min(rank, cones[0].shape[1])]
        rest = weighted - basis @ (basis.T @ weighted)
        following = torch.linalg.svd(rest, full_matrices=False).U[:, : basis.shape[1]]
    like = kept[0]["axes"]
    return Proxy(
        basis=basis.to(like),
        mean=torch.stack([one["mean"].double() for one in kept]).mean(0),
        following=following.to(like),
        last=like.new_empty(len(like), 0),
        explained=math.nan,
        method=method,
        centred=True,
        notes=(note,),
    )
