"""The gradients of one place held against proxies: rows for energies, shares, bins of frequency, turns."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.gradients import Coupled
from anisoscope.metrics import Metric
from anisoscope.metrics.alignment import Enrichment, Removed, Trend, Turned
from anisoscope.probed import Probed, ProbeRow
from anisoscope.records import Site
from anisoscope.tangent.anisotropy import LED_DRAWS, AnisotropyShare, anisotropy_shares, leading_value
from anisoscope.tangent.controls import RandomSpaces, second_moment
from anisoscope.tangent.dynamics import random_distance, turn_between
from anisoscope.tangent.energies import (
    Alignment,
    coupled_alignments,
    local_alignment,
    row_squares,
    spaces_beside,
    uncoupled_alignments,
)
from anisoscope.tangent.frequency import ByFrequency, squares_by_frequency
from anisoscope.tangent.proxies import Proxy, fit_local
from anisoscope.tangent.windows import pair_windows

# Directions of a token's own tangent space: neighbours are too few for many.
LOCAL_RANK = 8
WITH_MEAN, WITHOUT_MEAN = "mean=in", "mean=out"
Candidate = tuple[str, Proxy, str]
"""The name of a proxy, the proxy and which variant of it this is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """States to fit on, and states with their gradients to test on, at one site and in one population."""

    site: Site
    population: str
    fitted: Float[Tensor, "m d"]
    fitted_types: Int[Tensor, " m"]
    here: Coupled
    keep: Bool[Tensor, " n"]
    """Tokens of the test half that are in the population."""


class Held:
    """The gradients of one place, with what every proxy shares computed once."""

    def __init__(self, probed: Probed, metrics: Mapping[str, Metric], place: Place, gradients: Sequence[str]) -> None:
        self.probed, self.place, self.seed = probed, place, probed.spec.seed
        self.metrics, self.shown = metrics, probed.gradients
        self.gradients = tuple(gradients)
        self.rows = place.here.gradients[place.keep]
        self.pairing = None
        self.moments: dict[str, Tensor] = {}
        self.points = int(place.keep.sum())
        self.excluded = len(place.keep) - self.points
        if {"virtual", "linear"} & set(self.gradients):
            windows = self.shown.windows
            self.pairing = pair_windows(
                place.here.values, place.here.gradients, windows, keep=place.keep, seed=self.seed
            )
        for name in self.gradients:
            coupled = name != "activation" and self.pairing is not None
            self.moments[name] = self.pairing.moment if coupled and self.pairing else second_moment(self.rows)
        self.shares = {name: leading_share(moment) for name, moment in self.moments.items()}
        self.spaces: dict[tuple[str, str], RandomSpaces | None] = {}

    def _columns(self, gradient: str, name: str, proxy: Proxy, variant: str) -> dict[str, Any]:
        return {"gradient": gradient, "proxy": name, "rank": proxy.rank, "variant": variant}

    def _row(self, metric: str, view: Any, **columns: Any) -> Iterator[ProbeRow]:
        """A row; about tokens, unless it names points of another kind."""
        place, note = self.place, columns.pop("note", None)
        excluded = 0 if "points" in columns else self.excluded
        if metric in self.metrics:
            yield ProbeRow.of(
                self.metrics[metric],
                view,
                site=place.site,
                population=place.population,
                points=columns.pop("points", self.points),
                dim=place.here.values.shape[1],
                excluded=excluded,
                note=note,
                **columns,
            )

    def enrichment(self, candidates: Sequence[Candidate]) -> Iterator[ProbeRow]:
        """Energy, its controls and the source's ratio, for each proxy and gradient."""
        place = self.place
        usable = [one for one in candidates if one[1].rank > 0]
        proxies = [proxy for _, proxy, _ in usable]
        found: dict[str, list[Alignment]] = {}
        led = [variant == WITH_MEAN and "tangent_anisotropy_share" in self.metrics for _, _, variant in usable]
        moments = list(self.moments.values())
        every = spaces_beside(moments, proxies, seed=self.seed, keep=LED_DRAWS, led=led)
        for gradient, moment, spaces in zip(self.moments, moments, every, strict=True):
            self.spaces |= {
                (gradient, name): one
                for (name, _, variant), one in zip(usable, spaces, strict=True)
                if variant == WITH_MEAN
            }
            if gradient == "activation":
                documents = self.shown.tokens.documents[place.keep]
                settings = {"documents": documents, "moment": moment, "spaces": spaces}
                found[gradient] = uncoupled_alignments(self.rows, proxies, seed=self.seed, **settings)
            else:
                assert self.pairing is not None
                found[gradient] = coupled_alignments(self.pairing, proxies, seed=self.seed, spaces=spaces)
        for number, (name, proxy, variant) in enumerate(usable):
            for gradient in self.gradients:
                yield from enrichment_rows(
                    self.metrics,
                    found[gradient][number],
                    # What the gradients are by themselves is told once.
                    self.shares[gradient] if variant == WITH_MEAN else math.nan,
                    site=place.site,
                    population=place.population,
                    points=self.points,
                    excluded=self.excluded,
                    columns=self._columns(gradient, name, proxy, variant),
                )

    def removal(self, proxies: Mapping[str, Proxy]) -> Iterator[ProbeRow]:
        """What is left of the gradients' anisotropy without each proxy, in four ways."""
        if "tangent_anisotropy_share" not in self.metrics:
            return
        zeta = self.probed.spec.isoscore_zeta
        for gradient in self.gradients:
            spaces = [self.spaces.get((gradient, name)) for name in proxies]
            every = anisotropy_shares(
                self.moments[gradient], list(proxies.values()), seed=self.seed, zeta=zeta, spaces=spaces
            )
            for (name, proxy), found in zip(proxies.items(), every, strict=True):
                yield from self._removed(gradient, name, proxy, found)

    def _removed(self, gradient: str, name: str, proxy: Proxy, found: AnisotropyShare) -> Iterator[ProbeRow]:
        ways = {
            "isoscore": found.isoscore_change,
            "leading": found.leading_drop,
            "spectral": found.spectral_share,
            "energy": found.anisotropic_energy,
        }
        for way, removal in ways.items():
            columns = self._columns(gradient, name, proxy, f"{WITH_MEAN};share={way}") | {"note": found.note}
            view = Removed(change=removal.tangent)
            for control, value, p in (
                ("normal", removal.normal, removal.p),
                ("next", removal.following, None),
            ):
                beside = {"control": control, "control_value": value, "p": p}
                yield from self._row("tangent_anisotropy_share", view, **columns, **beside)

    def by_frequency(self, proxies: Mapping[str, Proxy]) -> Iterator[ProbeRow]:
        """Energies of activation gradients by token frequency, and their trend over types."""
        if "activation" not in self.gradients or "tangent_frequency_trend" not in self.metrics:
            return
        types = self.shown.tokens.ids[self.place.keep].cpu()
        known = self.probed.log_frequency(types)
        squares = row_squares(self.rows, [proxy.basis for proxy in proxies.values()])
        for number, (name, proxy) in enumerate(proxies.items()):
            here = squares[:, [number, -1]]
            found = squares_by_frequency(here, (proxy.dim, proxy.rank), known, types, seed=self.seed)
            yield from self._by_frequency(name, proxy, found)

    def _by_frequency(self, name: str, proxy: Proxy, found: ByFrequency) -> Iterator[ProbeRow]:
        columns = self._columns("activation", name, proxy, WITH_MEAN)
        for number, one in enumerate(found.bins):
            frequency = f"{WITH_MEAN};log10_frequency={one.log_frequency / math.log(10):.2f}"
            view = Enrichment(energy=one.energy.value)
            beside = {"low": one.energy.low, "high": one.energy.high, "control": "normal", "control_value": one.normal}
            yield from self._row(
                "tangent_energy",
                view,
                **columns | {"variant": frequency, "bin": number, "points": one.tokens},
                **beside,
            )
        trend = found.spearman
        beside = {"low": trend.r.low, "high": trend.r.high, "p": trend.p, "points": trend.types}
        yield from self._row(
            "tangent_frequency_trend", Trend(spearman=trend.r.value), **columns, **beside, note=found.note
        )

    def turn(self, name: str, before: Proxy, now: Proxy, fit: str) -> Iterator[ProbeRow]:
        """How far the proxy of now is from an earlier one."""
        turn = turn_between(before.basis, now.basis)
        rank = min(before.rank, now.rank)
        beside = {"control": "haar", "control_value": random_distance(now.dim, rank), "note": before.notes[0]}
        columns = {"proxy": name, "rank": rank, "variant": f"fit={fit}"}
        yield from self._row("subspace_distance", Turned(distance=turn.grassmann), **columns, **beside)

    def local(self) -> Iterator[ProbeRow]:
        """Each token's gradient in its own tangent space, against those of other windows."""
        place = self.place
        rank = min(LOCAL_RANK, self.probed.spec.rank, place.fitted.shape[1] // 2)
        proxy = fit_local(place.fitted, rank=rank)
        keep = place.keep
        found = local_alignment(place.here.values[keep], self.rows, self.shown.windows[keep], proxy, seed=self.seed)
        columns = {"gradient": "activation", "proxy": "local_pca", "rank": proxy.rank, "variant": WITH_MEAN}
        yield from enrichment_rows(
            self.metrics,
            found,
            math.nan,
            site=place.site,
            population=place.population,
            points=self.points,
            excluded=self.excluded,
            columns=columns,
        )


def enrichment_rows(
    metrics: Mapping[str, Metric],
    found: Alignment,
    leading_share: float,
    *,
    site: Site,
    population: str,
    points: int,
    columns: dict[str, Any],
    excluded: int = 0,
) -> Iterator[ProbeRow]:
    """The rows of one alignment: each metric with the control that it is about."""
    view = Enrichment(
        energy=found.energy.value,
        chance=found.control_value,
        gain=found.gain,
        normal_ratio=found.normal_ratio,
        leading_share=leading_share,
    )
    normal = found.controls.get("normal")
    binding = {"control": found.control or None, "control_value": found.control_value, "p": found.p}
    by_normals = {
        "control": "normal",
        "control_value": math.nan if normal is None else normal.value,
        "p": found.normal_p,
    }
    beside: dict[str, dict[str, Any]] = {
        "tangent_energy": {"low": found.energy.low, "high": found.energy.high},
        "tangent_excess": binding,
        "tangent_gain": binding,
        "normal_ratio": by_normals,
        "gradient_leading_variance": {},
    }
    for name, more in beside.items():
        # A share that is not known here is another row's.
        if name in metrics and not (name == "gradient_leading_variance" and math.isnan(leading_share)):
            yield ProbeRow.of(
                metrics[name],
                view,
                site=site,
                population=population,
                points=points,
                dim=found.dim,
                excluded=excluded,
                note=found.note,
                **columns | more,
            )


def leading_share(moment: Float[Tensor, "d d"]) -> float:
    """λ₁ / Σλ of a second moment; NaN where it is zero."""
    total = float(moment.diagonal().sum())
    return leading_value(moment) / total if total > 0 else math.nan
