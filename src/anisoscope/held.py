"""The gradients of places held against proxies: rows for energies, shares, bins of frequency, turns."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.gradients import Coupled
from anisoscope.kernels.leading import leading_values
from anisoscope.metrics import Metric
from anisoscope.metrics.alignment import Enrichment, Removed, Trend, Turned
from anisoscope.probed import Probed, ProbeRow
from anisoscope.records import Site
from anisoscope.tangent.anisotropy import LED_DRAWS, AnisotropyShare, anisotropy_shares
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
        self.squares: dict[str, Tensor] = {}
        """‖Qᵀa‖² and ‖a‖² of the activation gradients, for each proxy they were held against."""
        self.points = len(self.rows)
        self.excluded = len(place.keep) - self.points
        if {"virtual", "linear"} & set(self.gradients):
            windows = self.shown.windows
            self.pairing = pair_windows(
                place.here.values, place.here.gradients, windows, keep=place.keep, seed=self.seed
            )
        for name in self.gradients:
            coupled = name != "activation" and self.pairing is not None
            self.moments[name] = self.pairing.moment if coupled and self.pairing else second_moment(self.rows)

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

    def enrichment(
        self, candidates: Sequence[Candidate], spaces: Sequence[Sequence[RandomSpaces | None]], shares: Sequence[float]
    ) -> Iterator[ProbeRow]:
        """Energy, its controls and the source's ratio, for each proxy and gradient.

        With the random spaces of each gradient and proxy, and the leading share of each gradient.
        """
        place = self.place
        proxies = [proxy for _, proxy, _ in candidates]
        found: dict[str, list[Alignment]] = {}
        for (gradient, moment), beside in zip(self.moments.items(), spaces, strict=True):
            if gradient == "activation":
                squares = row_squares(self.rows, [proxy.basis for proxy in proxies])
                for number, (name, _, variant) in enumerate(candidates):
                    if variant == WITH_MEAN:
                        self.squares[name] = squares[:, [number, -1]]
                documents = self.shown.tokens.documents[place.keep]
                settings = {"documents": documents, "moment": moment, "squares": squares, "spaces": beside}
                found[gradient] = uncoupled_alignments(self.rows, proxies, seed=self.seed, **settings)
            else:
                assert self.pairing is not None
                found[gradient] = coupled_alignments(self.pairing, proxies, seed=self.seed, spaces=beside)
        for number, (name, proxy, variant) in enumerate(candidates):
            for gradient, share in zip(self.gradients, shares, strict=True):
                yield from enrichment_rows(
                    self.metrics,
                    found[gradient][number],
                    # What the gradients are by themselves is told once.
                    share if variant == WITH_MEAN else math.nan,
                    site=place.site,
                    population=place.population,
                    points=self.points,
                    excluded=self.excluded,
                    columns=self._columns(gradient, name, proxy, variant),
                )

    def removal(
        self, gradient: str, candidates: Sequence[Candidate], found: Sequence[AnisotropyShare]
    ) -> Iterator[ProbeRow]:
        """What is left of a gradient's anisotropy without each proxy, in four ways."""
        for (name, proxy, _), share in zip(candidates, found, strict=True):
            yield from self._removed(gradient, name, proxy, share)

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

    def by_frequency(self, name: str, proxy: Proxy, found: ByFrequency) -> Iterator[ProbeRow]:
        """Energies of activation gradients by token frequency, and their trend over types."""
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


def leading_shares(moments: Sequence[Float[Tensor, "d d"]]) -> list[float]:
    """λ₁ / Σλ of each second moment, all of one size; NaN where it is zero."""
    stacked = torch.stack(list(moments))
    totals = stacked.diagonal(dim1=1, dim2=2).double().sum(1).cpu()
    return torch.where(totals > 0, leading_values(stacked) / totals, math.nan).tolist()


def hold_against(
    helds: Sequence[Held], candidates: Sequence[Sequence[Candidate]], *, removal: bool = False
) -> list[list[ProbeRow]]:
    """Rows of each place for its candidates; of places of one width, whose searches and draws are made side by side.

    With `removal` also what is left of anisotropy without the candidates that are plain proxies.
    """
    metrics, spec = helds[0].metrics, helds[0].probed.spec
    if not helds[0].gradients:
        return [[] for _ in helds]
    usable = [[one for one in mine if one[1].rank > 0] for mine in candidates]
    proxies = [[proxy for _, proxy, _ in mine] for mine in usable]
    plain = [[variant == WITH_MEAN for _, _, variant in mine] for mine in usable]
    removal = removal and "tangent_anisotropy_share" in metrics
    led = plain if removal else [[False] * len(mine) for mine in plain]
    moments = [list(held.moments.values()) for held in helds]
    spaces = spaces_beside(moments, proxies, seed=spec.seed, keep=LED_DRAWS, led=led)
    # What gradients are by themselves is told with plain proxies only.
    told = any(itertools.chain.from_iterable(plain))
    every = iter(leading_shares(list(itertools.chain.from_iterable(moments)))) if told else itertools.repeat(math.nan)
    shares = [list(itertools.islice(every, len(mine))) for mine in moments]
    rows = [
        list(held.enrichment(mine, beside, leading))
        for held, mine, beside, leading in zip(helds, usable, spaces, shares, strict=True)
    ]
    if removal:
        cases = [(at, number) for at, mine in enumerate(moments) for number in range(len(mine))]
        kept = [list(itertools.compress(mine, chosen)) for mine, chosen in zip(proxies, plain, strict=True)]
        found = anisotropy_shares(
            [moments[at][number] for at, number in cases],
            [kept[at] for at, _ in cases],
            [list(itertools.compress(spaces[at][number], plain[at])) for at, number in cases],
            leading_shares=[shares[at][number] for at, number in cases],
            zeta=spec.isoscore_zeta,
        )
        for (at, number), mine in zip(cases, found, strict=True):
            named = itertools.compress(usable[at], plain[at])
            rows[at].extend(helds[at].removal(helds[at].gradients[number], list(named), mine))
    return rows


def split_by_frequency(helds: Sequence[Held], fits: Sequence[Mapping[str, Proxy]]) -> list[list[ProbeRow]]:
    """Rows by token frequency of places that were held against their proxies; of the same tokens side by side."""
    rows: list[list[ProbeRow]] = [[] for _ in helds]
    if "activation" not in helds[0].gradients or "tangent_frequency_trend" not in helds[0].metrics:
        return rows
    probed, every = helds[0].probed, helds[0].shown.tokens.ids.cpu()
    kept = torch.stack([held.place.keep for held in helds]).cpu()
    alike: dict[bytes, list[int]] = {}
    for at, keep in enumerate(kept):
        alike.setdefault(keep.numpy().tobytes(), []).append(at)
    for places in alike.values():
        types = every[kept[places[0]]]
        cases = [(at, name, proxy) for at in places for name, proxy in fits[at].items() if name in helds[at].squares]
        above, below = torch.stack([helds[at].squares[name] for at, name, _ in cases], 1).unbind(2)
        shapes = [(proxy.dim, proxy.rank) for _, _, proxy in cases]
        found = squares_by_frequency(above, below, shapes, probed.log_frequency(types), types, seed=probed.spec.seed)
        for (at, name, proxy), one in zip(cases, found, strict=True):
            rows[at].extend(helds[at].by_frequency(name, proxy, one))
    return rows
