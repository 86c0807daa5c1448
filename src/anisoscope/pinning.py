"""Token types at every site: how tightly they are held, how far they lie and how far they move, against frequency.

States are those of the fit half of the probe, from a forward pass alone: gradients play no part here. Frequencies are
counted in the documents outside the test half, those of the fit half among them.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.metrics import Metric, all_metrics
from anisoscope.metrics.pinning import Pinned
from anisoscope.probed import Probed, ProbeRow
from anisoscope.records import Site
from anisoscope.tangent.pinning import Pinning, follow_centroids, log_trend, pin_types

VIEWS = ("pinned",)
# Centroids that are kept for later checkpoints: of the most frequent types, in the population FOLLOWED.
ATTACHED_TYPES = 256
FOLLOWED = "content"
PREFIX = "centroids/"
# Occurrences that differ by no more than this share of the states' size are the same.
ROUNDING = 1e-6
# Half precision ends here; a site with larger centroids keeps more.
LARGEST_HALF = 6e4

LogFrequency = Callable[[Int[Tensor, " v"]], Float[Tensor, " v"]]


def pinning_rows(probed: Probed, names: Collection[str]) -> Iterator[ProbeRow]:
    """Every metric of pinning among `names`, at every site and in every population."""
    asked = [item for item in all_metrics().values() if item.needs in VIEWS and item.name in names]
    wanted = [*probed.spec.populations] or list(dict.fromkeys(name for item in asked for name in item.populations))
    for site in probed.sites if asked else ():
        for population in wanted:
            here = [item for item in asked if probed.spec.populations or population in item.populations]
            yield from rows_of_types(
                *probed.fit_cloud(site, population),
                probed.log_frequency,
                here,
                site=site,
                population=population,
                seed=probed.spec.seed,
            )


def rows_of_types(
    states: Float[Tensor, "n d"],
    types: Int[Tensor, " n"],
    log_frequency: LogFrequency,
    metrics: Sequence[Metric],
    *,
    site: Site,
    population: str,
    seed: int,
) -> Iterator[ProbeRow]:
    """The rows of one cloud of tokens. One checkpoint has no trajectories: that row is NaN, and says so."""
    pinned = pin_types(states, types, seed=seed)
    known = log_frequency(pinned.types)
    place = {"site": site, "population": population, "dim": states.shape[1]}
    for metric in metrics:
        if metric.name == "trajectory_variance":
            nothing = torch.full_like(known, math.nan)
            # How many types there are is not what is missing.
            view = Pinned(log_frequency=known, quantity=nothing)
            yield ProbeRow.of(metric, view, points=max(len(known), metric.min_points(1, 0)), **place)
            continue
        quantity, note = _quantity(metric, pinned)
        yield from _trend_rows(metric, known, quantity, seed=seed, note=note, **place)


def _quantity(metric: Metric, pinned: Pinning) -> tuple[Float[Tensor, " v"], str]:
    counted = f"{pinned.occurrences} occurrences of each type"
    if metric.name == "type_dispersion":
        scale = (pinned.centroids.square().sum(1) + pinned.dispersion.square()).mean().sqrt()
        return torch.where(pinned.dispersion > ROUNDING * scale, pinned.dispersion, 0.0), counted
    noisy = int(pinned.distance.isnan().sum())
    return pinned.distance, counted + (f"; {noisy} types are as near to the centre as sampling noise" if noisy else "")


def _trend_rows(
    metric: Metric,
    log_frequency: Float[Tensor, " v"],
    quantity: Float[Tensor, " v"],
    *,
    seed: int,
    of: str | None = None,
    **place: Any,
) -> Iterator[ProbeRow]:
    """How a quantity goes with frequency, and its mean; of another quantity than the metric's own only the first."""
    found = log_trend(log_frequency, quantity, seed=seed)
    view = Pinned(log_frequency=log_frequency, quantity=quantity)
    columns = {"p": found.p_two_sided, "low": found.r.low, "high": found.r.high}
    # Where no type has a logarithm, as at embeddings, it is not types that are missing.
    points = found.types or len(log_frequency)
    yield ProbeRow.of(metric, view, points=points, variant=of and f"of={of}", **columns, **place)
    if of is None:
        mean = ProbeRow.of(
            metric, replace(view, mean=True), points=int(quantity.isfinite().sum()), variant="of=mean", **place
        )
        # The null of a correlation is not that of a length.
        yield mean._replace(answer=replace(mean.answer, null=math.nan))


def pinning_attachments(probed: Probed) -> dict[str, np.ndarray]:
    """Centroids of the most frequent types at each site, from which `follow` makes trajectories.

    They are means of as many occurrences each, of the same tokens at every checkpoint that is probed with this text.
    """
    kept: dict[str, np.ndarray] = {}
    for site in probed.sites:
        pinned = pin_types(*probed.fit_cloud(site, FOLLOWED), seed=probed.spec.seed)
        kept |= attach_centroids(pinned, probed.log_frequency, site)
    return kept


def attach_centroids(pinned: Pinning, log_frequency: LogFrequency, site: Site) -> dict[str, np.ndarray]:
    """Small arrays of one site; none where no type occurs often enough."""
    if not len(pinned.types):
        return {}
    known = log_frequency(pinned.types)
    most = known.argsort(descending=True, stable=True)[:ATTACHED_TYPES].sort().values
    centroids = pinned.centroids[most].cpu().numpy()
    half = float(np.abs(centroids).max()) < LARGEST_HALF
    prefix = f"{PREFIX}{site.stack or ''}/{site.name}"
    return {
        f"{prefix}.types": pinned.types[most].cpu().numpy().astype(np.int32),
        f"{prefix}.centroids": centroids.astype(np.float16 if half else np.float32),
        f"{prefix}.log_frequency": known[most].cpu().numpy().astype(np.float32),
    }


def follow(
    attachments_in_order: Sequence[Mapping[str, np.ndarray]],
    names: Collection[str] = ("trajectory_variance",),
    *,
    sites: Collection[Site] = (),
    seed: int = 0,
) -> Iterator[ProbeRow]:
    """How far types moved over checkpoints, from the centroids that each has attached, in the order of training.

    Types and sites that every checkpoint has are followed. `sites` say at what depth their namesakes stand.
    """
    metric = all_metrics()["trajectory_variance"]
    if metric.name not in names or len(attachments_in_order) < 2:
        return
    ending = ".centroids"
    shared = reduce(lambda one, other: one & other, (set(arrays) for arrays in attachments_in_order))
    for name in sorted(name for name in shared if name.startswith(PREFIX) and name.endswith(ending)):
        prefix = name.removesuffix(ending)
        stack, _, place = prefix.removeprefix(PREFIX).partition("/")
        plain = Site(name=place, stack=stack or None)
        site = next((one for one in sites if (one.name, one.stack) == (plain.name, plain.stack)), plain)
        yield from _follow_site(attachments_in_order, prefix, metric, site, seed)


def _follow_site(
    checkpoints: Sequence[Mapping[str, np.ndarray]], prefix: str, metric: Metric, site: Site, seed: int
) -> Iterator[ProbeRow]:
    types = reduce(np.intersect1d, [one[f"{prefix}.types"] for one in checkpoints])
    rows = [np.searchsorted(one[f"{prefix}.types"], types) for one in checkpoints]
    pairs = list(zip(checkpoints, rows, strict=True))
    stacked = np.stack([one[f"{prefix}.centroids"][row].astype(np.float64) for one, row in pairs])
    last, row = pairs[-1]
    known = torch.from_numpy(last[f"{prefix}.log_frequency"][row].astype(np.float64))
    moved = follow_centroids(torch.from_numpy(stacked))
    note = f"{len(checkpoints)} checkpoints; the most frequent types that all of them have"
    place = {"site": site, "population": FOLLOWED, "dim": stacked.shape[2], "seed": seed, "note": note}
    yield from _trend_rows(metric, known, moved.variance, **place)
    yield from _trend_rows(metric, known, moved.length, of="length", **place)
