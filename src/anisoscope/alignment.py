"""Gradients against tangent proxies at every site: a probe in, rows out.

The proxy is fitted on one half of the probe's documents and tested on the gradients of the other. Rows are told apart
by their columns:

    gradient  `virtual` (coupled), `activation` (uncoupled), `embedding` (rows of the embedding), `linear` (of a module)
    proxy     `pca`, `seminmf`, `svd`, `local_pca`
    variant   `mean=in` or `mean=out` (the direction of the states' mean projected out of the proxy);
              `fit=untrained`, `fit=rolling`, `fit=frozen` where the proxy is one of earlier checkpoints (past.py);
              `split=types` where the proxy saw other token types than those it is tested on
    bin       of token frequency, rarest first, at equal token mass
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anisoscope.errors import SpecError
from anisoscope.gradients import Coupled, capture_gradients
from anisoscope.metrics import Metric, all_metrics
from anisoscope.metrics.alignment import Enrichment, Removed, Trend, Turned
from anisoscope.past import Past, sketch
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
from anisoscope.tangent.proxies import Proxy, fit_globals, fit_local, without_mean
from anisoscope.tangent.windows import pair_windows

VIEWS = ("enrichment", "removal", "trend", "turn")
GRADIENTS = ("virtual", "activation")
PROXIES = ("pca", "seminmf")
POPULATIONS = ("all", "typical")
CONTROLS = ("type_disjoint",)
# Directions of a token's own tangent space: neighbours are too few for many.
LOCAL_RANK = 8
WITH_MEAN, WITHOUT_MEAN = "mean=in", "mean=out"
Candidate = tuple[str, Proxy, str]
"""The name of a proxy, the proxy and which variant of it this is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Aligned:
    """Rows, and what later checkpoints need of the proxies."""

    rows: list[ProbeRow]
    attachments: dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Place:
    """States to fit on, and states with their gradients to test on, at one site and in one population."""

    site: Site
    population: str
    fitted: Float[Tensor, "m d"]
    fitted_types: Int[Tensor, " m"]
    here: Coupled
    keep: Bool[Tensor, " n"]
    """Tokens of the test half that are in the population."""


def align(probed: Probed, names: Collection[str], past: Past | None = None) -> Aligned:
    """Every metric of alignment among `names`, at every site, for each gradient, proxy, population and variant.

    With a `past`, also against proxies of earlier checkpoints; only against them where the Spec names them.
    """
    found = {item.name: item for item in all_metrics().values() if item.needs in VIEWS and item.name in names}
    analysis = _Analysis(probed, found)
    aligned = Aligned(rows=[], attachments={})
    own = probed.spec.proxy_from is None
    for site in probed.sites if found else ():
        for population in probed.spec.populations or POPULATIONS:
            place = analysis.place(site, population)
            proxies, held = analysis.fit(place), _Held(analysis, place)
            if own:
                aligned.rows.extend(analysis.at(held, proxies))
                aligned.attachments.update(sketch(site, population, place.fitted, proxies))
            if past is not None and held.in_depth:
                aligned.rows.extend(analysis.against_past(held, proxies, past))
    if own and found:
        aligned.rows.extend(analysis.of_modules())
    return aligned


class _Analysis:
    """One probe, and which numbers of it are wanted."""

    def __init__(self, probed: Probed, metrics: Mapping[str, Metric]) -> None:
        spec = probed.spec
        self.probed, self.metrics, self.seed = probed, metrics, spec.seed
        asked = spec.gradients or GRADIENTS
        self.gradients = [name for name in asked if name in GRADIENTS]
        self.linears = [name.partition(":")[2] for name in asked if name.startswith("linear:")]
        self.embedding = "embedding" in asked
        if unknown := [name for name in asked if name not in (*GRADIENTS, "embedding") and ":" not in name]:
            raise SpecError(
                f"gradients are {', '.join(GRADIENTS)}, embedding or linear:PATH of a module; came {', '.join(unknown)}"
            )
        if unknown := set(spec.controls) - set(CONTROLS):
            raise SpecError(f"controls are {', '.join(CONTROLS)}; came {', '.join(sorted(unknown))}")
        self.type_disjoint = "type_disjoint" in spec.controls
        self.proxies = tuple(dict.fromkeys((spec.proxy, *PROXIES)))

    def place(self, site: Site, population: str) -> _Place:
        probed = self.probed
        states, here = probed.fit_states[site], probed.gradients.sites[site]
        tokens = probed.fit_tokens(states.device)
        index = probed.members(population, states, tokens)
        keep = torch.zeros(len(here.values), dtype=torch.bool, device=here.values.device)
        keep[probed.members(population, here.values, probed.gradients.tokens)] = True
        return _Place(
            site=site,
            population=population,
            fitted=states[index],
            fitted_types=tokens.ids[index],
            here=here,
            keep=keep,
        )

    def rank_in(self, width: int) -> int:
        return min(self.probed.spec.rank, width // 2)

    def fit(self, place: _Place) -> dict[str, Proxy]:
        """The proxies that are one space for all tokens."""
        rank = self.rank_in(place.fitted.shape[1])
        methods = [name for name in self.proxies if name != "local_pca"]
        return fit_globals(place.fitted, methods=methods, rank=rank, seed=self.seed)

    def at(self, held: "_Held", proxies: Mapping[str, Proxy]) -> Iterator[ProbeRow]:
        """Everything of one place, with the proxies of this checkpoint."""
        variants = ((WITH_MEAN, lambda proxy: proxy), (WITHOUT_MEAN, without_mean))
        yield from held.enrichment(
            [(n, make(one), variant) for n, one in proxies.items() for variant, make in variants]
        )
        if held.in_depth:
            yield from held.removal(proxies)
            yield from held.by_frequency(proxies)
        if "local_pca" in self.proxies:
            yield from held.local()
        if self.type_disjoint:
            yield from self._type_disjoint(held.place)

    def against_past(self, held: "_Held", proxies: Mapping[str, Proxy], past: Past) -> Iterator[ProbeRow]:
        """Energies in the proxies of earlier checkpoints, and how far this one's proxy is from them."""
        place = held.place
        earlier: list[Candidate] = []
        for name in PROXIES:
            rank = self.rank_in(place.fitted.shape[1])
            for fit, before in past.proxies(place.site, place.population, name, rank, place.fitted):
                earlier.append((name, before, f"{WITH_MEAN};fit={fit}"))
                yield from held.turn(name, before, proxies[name], fit)
        yield from held.enrichment(earlier)

    def _type_disjoint(self, place: _Place) -> Iterator[ProbeRow]:
        """Half of the token types to fit on, the other half to test on."""
        first = (
            torch.rand(len(self.probed.probe.log_frequency), generator=torch.Generator().manual_seed(self.seed)) < 0.5
        )
        first = first.to(place.fitted.device)
        mine = first[place.fitted_types]
        keep = place.keep & ~first[self.probed.gradients.tokens.ids]
        other = replace(place, fitted=place.fitted[mine], fitted_types=place.fitted_types[mine], keep=keep)
        held = _Held(self, other)
        yield from held.enrichment([(n, one, f"{WITH_MEAN};split=types") for n, one in self.fit(other).items()])

    def of_modules(self) -> Iterator[ProbeRow]:
        """Gradients of linear modules and of embedding rows, where they are asked for; the proxy is of their inputs."""
        if not self.linears and not self.embedding:
            return
        probed, seeds = self.probed, None
        model, probe = probed.model, probed.probe
        fit, test = (
            capture_gradients(
                model,
                windows,
                (),
                linears=self.linears,
                embedding=self.embedding,
                seeds=seeds,
                batch_size=probed.batch_size,
            )
            for windows in (probe.fit, probe.test)
        )
        for path, here in test.linears.items():
            fitted = fit.linears[path].values
            keep = torch.ones(len(here.values), dtype=torch.bool, device=here.values.device)
            place = _Place(
                site=Site(name=path),
                population="all",
                fitted=fitted,
                fitted_types=fit.tokens.ids,
                here=here,
                keep=keep,
            )
            held = _Held(self, place, gradients=("linear",))
            yield from held.enrichment([(name, proxy, WITH_MEAN) for name, proxy in self.fit(place).items()])
        if test.embedding is not None:
            yield from self._embedding(test.embedding.read, test.embedding.types, "embed")
            if test.embedding.predicted is not None:
                yield from self._embedding(test.embedding.predicted, test.embedding.types, "final_norm")

    def _embedding(self, rows: Float[Tensor, "v d"], types: Int[Tensor, " v"], name: str) -> Iterator[ProbeRow]:
        """Gradient rows of the input embedding against the states at `embed`, of the output one at `final_norm`."""
        for site in self.probed.sites:
            if site.name != name or self.probed.fit_states[site].shape[1] != rows.shape[1]:
                continue
            rank = self.rank_in(rows.shape[1])
            proxies = fit_globals(self.probed.fit_states[site], methods=PROXIES, rank=rank, seed=self.seed)
            every = uncoupled_alignments(rows, list(proxies.values()), seed=self.seed)
            for (method, proxy), found in zip(proxies.items(), every, strict=True):
                columns = {"gradient": "embedding", "proxy": method, "rank": proxy.rank, "variant": WITH_MEAN}
                yield from enrichment_rows(
                    self.metrics, found, math.nan, site=site, population="types", points=len(types), columns=columns
                )


class _Held:
    """The gradients of one place, with what every proxy shares computed once."""

    def __init__(self, analysis: _Analysis, place: _Place, gradients: tuple[str, ...] | None = None) -> None:
        self.analysis, self.place, self.seed = analysis, place, analysis.seed
        self.metrics, self.shown = analysis.metrics, analysis.probed.gradients
        self.gradients = gradients or tuple(analysis.gradients)
        # Sink tokens own what `all` tokens show: what is beyond the headline is about typical ones, or those asked for.
        self.in_depth = place.population != "all" or bool(analysis.probed.spec.populations)
        self.rows = place.here.gradients[place.keep]
        self.pairing = None
        self.moments: dict[str, Tensor] = {}
        self.points = int(place.keep.sum())
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
        place, note = self.place, columns.pop("note", None)
        if metric in self.metrics:
            yield ProbeRow.of(
                self.metrics[metric],
                view,
                site=place.site,
                population=place.population,
                points=columns.pop("points", self.points),
                dim=place.here.values.shape[1],
                note=note,
                **columns,
            )

    def enrichment(self, candidates: Sequence[Candidate]) -> Iterator[ProbeRow]:
        """Energy, its controls and the source's ratio, for each proxy and gradient."""
        place = self.place
        usable = [one for one in candidates if one[1].rank > 0]
        proxies = [proxy for _, proxy, _ in usable]
        found: dict[str, list[Alignment]] = {}
        for gradient in self.gradients:
            moment, keep = self.moments[gradient], LED_DRAWS if self.in_depth else 0
            spaces = spaces_beside(moment, proxies, seed=self.seed, keep=keep)
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
                    columns=self._columns(gradient, name, proxy, variant),
                )

    def removal(self, proxies: Mapping[str, Proxy]) -> Iterator[ProbeRow]:
        """What is left of the gradients' anisotropy without each proxy, in four ways."""
        if "tangent_anisotropy_share" not in self.metrics:
            return
        zeta = self.analysis.probed.spec.isoscore_zeta
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
        known = self.analysis.probed.log_frequency(types)
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
        proxy = fit_local(place.fitted, rank=min(LOCAL_RANK, self.analysis.rank_in(place.fitted.shape[1])))
        keep = place.keep
        found = local_alignment(place.here.values[keep], self.rows, self.shown.windows[keep], proxy, seed=self.seed)
        columns = {"gradient": "activation", "proxy": "local_pca", "rank": proxy.rank, "variant": WITH_MEAN}
        yield from enrichment_rows(
            self.metrics,
            found,
            math.nan,
            site=place.site,
            population=place.population,
            points=int(keep.sum()),
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
                note=found.note,
                **columns | more,
            )


def leading_share(moment: Float[Tensor, "d d"]) -> float:
    """λ₁ / Σλ of a second moment; NaN where it is zero."""
    total = float(moment.diagonal().sum())
    return leading_value(moment) / total if total > 0 else math.nan
