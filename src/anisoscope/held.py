"""The gradients of places held against proxies: rows for energies, shares, bins of frequency, turns."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from anisoscope.tangent.anisotropy import AnisotropyShare, Leading, Removal, find_leading
from anisoscope.tangent.clouds import stack_clouds
from anisoscope.tangent.controls import PAPER_DRAWS, second_moments
from anisoscope.tangent.dynamics import random_distance, turn_between
from anisoscope.tangent.energies import (
    Alignment,
    row_squares,
    with_few_normals,
)
from anisoscope.tangent.frequency import ByFrequency, Dealt, deal_tokens
from anisoscope.tangent.inference import same_rows
from anisoscope.tangent.local import local_alignment
from anisoscope.tangent.proxies import Proxy, fit_local
from anisoscope.tangent.ranks import rank_within
from anisoscope.tangent.share_controls import ShareControls
from anisoscope.tangent.windows import pair_each

# Directions of a token's own tangent space: neighbours are too few for many.
LOCAL_RANK = 8
WITH_MEAN, WITHOUT_MEAN = BOTH_WAYS = "mean=in", "mean=out"
Candidate = tuple[str, Proxy, str]
"""The name of a proxy, the proxy and which variant of it this is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """States to fit on, and states with their gradients to test on, at one site and in one population.

    `fitted` and `here` are read anew each time: hold on to them only while they are in use.
    """

    site: Site
    population: str
    read_fitted: Callable[[], Float[Tensor, "_ d"]]
    """States of the fit half, of all tokens,"""
    read_here: Callable[[], Coupled]
    """and states of the test half with their gradients."""
    keep: Bool[Tensor, " n"]
    """Tokens of the test half that are in the population,"""
    fit_rows: Int[Tensor, " m"]
    """and those of the other half."""

    @property
    def fitted(self) -> Float[Tensor, "m d"]:
        """States of the fit half, of the tokens in the population."""
        return self.read_fitted()[self.fit_rows]

    @property
    def here(self) -> Coupled:
        """States and gradients of the test half, of all tokens."""
        return self.read_here()


class Held:
    """The gradients of places of one width and of the same tokens, with what every proxy shares computed once."""

    def __init__(
        self, probed: Probed, metrics: Mapping[str, Metric], places: Sequence[Place], gradients: Sequence[str]
    ) -> None:
        self.probed, self.places, self.seed = probed, places, probed.spec.seed
        self.metrics, self.shown = metrics, probed.gradients
        self.gradients, self.zeta = tuple(gradients), probed.spec.isoscore_zeta
        self.share_controls = "shares" in probed.spec.controls
        self.keep = torch.stack([place.keep for place in places])
        # On the CPU, now: later a copy would wait for all that a GPU has been given to do.
        self.kept, self.types = self.keep.cpu(), self.shown.tokens.ids.cpu()
        self.points = self.kept.sum(1).tolist()
        self.excluded = [self.kept.shape[1] - mine for mine in self.points]
        self.pairing, self.rows = None, None
        self.leading: Leading | None = None
        pairs = [place.here for place in places]
        self.dim = pairs[0].values.shape[1]
        here = stack_clouds([pair.gradients for pair in pairs])
        if "activation" in self.gradients:
            self.rows = torch.where(self.keep[..., None], here, 0)
        if set(self.gradients) - {"activation"}:
            values = stack_clouds([pair.values for pair in pairs])
            self.pairing = pair_each(
                values,
                here,
                self.shown.windows,
                keep=self.keep,
                documents=self.shown.tokens.documents,
                seed=self.seed,
            )

    @property
    def of_frequency(self) -> bool:
        """Whether numbers by token frequency are wanted."""
        return "activation" in self.gradients and "tangent_frequency_trend" in self.metrics

    @property
    def of_removal(self) -> bool:
        """Whether it is wanted what is left of anisotropy without a proxy."""
        return bool(self.gradients) and "tangent_anisotropy_share" in self.metrics

    @cached_property
    def dealt(self) -> list[tuple[list[int], Dealt]]:
        """Tokens by frequency, of places that keep the same ones."""
        found = []
        for places in same_rows(self.kept):
            among = self.kept[places[0]].nonzero().flatten()
            types = self.types[among]
            dealt = deal_tokens(self.probed.log_frequency(types), types, seed=self.seed)
            found.append((places, dealt.of(among, self.keep.device)))
        return found

    def leading_of(self, rank: int) -> Leading:
        """The leading axes of each place and gradient, as many as a rank at least."""
        if self.leading is None or self.leading.rank < rank:
            self.leading = find_leading(self.moments.flatten(0, 1), rank)
        return self.leading

    @cached_property
    def moments(self) -> Float[Tensor, "s g d d"]:
        """Of each place and gradient."""
        found = []
        for name in self.gradients:
            if self.pairing is not None and name != "activation":
                found.append(self.pairing.moments)
            else:
                assert self.rows is not None
                # The pairing has looked at them too.
                found.append(second_moments(self.rows, finite=self.pairing is not None))
        return torch.stack(found, 1)

    def _row(
        self,
        at: int,
        metric: str,
        view: Any,
        columns: dict[str, Any],
        *,
        points: int | None = None,
        note: str | None = None,
    ) -> ProbeRow:
        """A row of a place; about tokens, unless it comes with points of another kind."""
        place = self.places[at]
        apart = points is not None
        return ProbeRow.of(
            self.metrics[metric],
            view,
            site=place.site,
            population=place.population,
            points=points if apart else self.points[at],
            dim=self.dim,
            excluded=0 if apart else self.excluded[at],
            note=note,
            **columns,
        )

    def project(self, bases: Float[Tensor, "s k d r"]) -> Float[Tensor, "s n _"] | None:
        """‖Qᵀa‖² of the activation gradients for each basis and, last, ‖a‖²."""
        return None if self.rows is None else row_squares(self.rows, bases)

    def enrichment(
        self, at: int, gradient: str, candidates: Sequence[Candidate], found: Sequence[Alignment], share: float
    ) -> Iterator[ProbeRow]:
        """Energy of a gradient at a place, its controls and the source's ratio, for each proxy; its leading share."""
        place = self.places[at]
        for (name, proxy, variant), one in zip(candidates, found, strict=True):
            yield from enrichment_rows(
                self.metrics,
                one,
                # What the gradients are by themselves is told once.
                share if variant == WITH_MEAN else math.nan,
                site=place.site,
                population=place.population,
                points=self.points[at],
                excluded=self.excluded[at],
                columns=_columns(gradient, name, proxy, variant),
            )
            if "paper_normals" in self.probed.spec.controls and "normal_ratio" in self.metrics:
                few = with_few_normals(one)
                columns = _columns(gradient, name, proxy, f"{variant};normals={PAPER_DRAWS}")
                columns |= {"control": "normal", "control_value": few.controls["normal"].value, "p": few.normal_p}
                view = Enrichment(energy=one.energy.value, normal_ratio=few.normal_ratio)
                yield self._row(at, "normal_ratio", view, columns, note=one.note)

    def removal(
        self,
        at: int,
        gradient: str,
        candidates: Sequence[Candidate],
        found: Sequence[AnisotropyShare],
        controls: Sequence[ShareControls],
    ) -> Iterator[ProbeRow]:
        """What is left of a gradient's anisotropy at a place without each proxy, in several ways; a row a control."""
        traces = {"isoscore": "isoscore_change", "energy": "anisotropic_energy"}
        axes = {"leading": "leading_drop", "spectral": "spectral_share"}
        for (name, proxy, variant), share, drawn in zip(candidates, found, controls, strict=True):
            # Axes of what is left are looked for once: without the mean too it would cost as much again.
            for way, field in (traces | axes if variant == WITH_MEAN else traces).items():
                removal: Removal = getattr(share, field)
                columns = _columns(gradient, name, proxy, f"{variant};share={way}")
                controls_of = [("normal", removal.normal, removal.p), ("next", removal.following, None)]
                controls_of += [(control, one.value, one.p) for control, one in drawn.get(field, {}).items()]
                row = self._row(
                    at, "tangent_anisotropy_share", Removed(change=removal.tangent), columns, note=share.note
                )
                for control, value, p in controls_of:
                    yield row.beside({**columns, "control": control, "control_value": value, "p": p})

    def by_frequency(self, at: int, candidate: Candidate, found: ByFrequency) -> Iterator[ProbeRow]:
        """Energies of activation gradients at a place by token frequency, and their trend over types."""
        name, proxy, variant = candidate
        columns = _columns("activation", name, proxy, variant)
        for number, one in enumerate(found.bins if "tangent_energy" in self.metrics else ()):
            energy = one.energy
            beside = {
                **columns,
                "variant": f"{variant};log10_frequency={one.log_frequency / math.log(10):.2f}",
                "low": energy.low,
                "high": energy.high,
                "control": "normal",
                "control_value": one.normal,
                "bin": number,
            }
            yield self._row(at, "tangent_energy", Enrichment(energy=energy.value), beside, points=one.tokens)
        trend = found.spearman
        beside = {**columns, "low": trend.r.low, "high": trend.r.high, "p": trend.p}
        view = Trend(spearman=trend.r.value)
        yield self._row(at, "tangent_frequency_trend", view, beside, points=trend.types, note=found.note)

    def turn(self, at: int, name: str, before: Proxy, now: Proxy, fit: str) -> Iterator[ProbeRow]:
        """How far the proxy of now is from an earlier one."""
        if "subspace_distance" not in self.metrics:
            return
        turn = turn_between(before.basis, now.basis)
        rank = min(before.rank, now.rank)
        columns = {"proxy": name, "rank": rank, "variant": f"fit={fit}"}
        columns |= {"control": "haar", "control_value": random_distance(now.dim, rank)}
        view = Turned(distance=turn.grassmann)
        yield self._row(at, "subspace_distance", view, columns, note=before.notes[0])

    def local(self, at: int) -> Iterator[ProbeRow]:
        """Each token's gradient in its own tangent space, against those of other windows."""
        place = self.places[at]
        asked = rank_within(self.probed.spec.rank, self.dim)
        rank = LOCAL_RANK if isinstance(asked, str) else min(LOCAL_RANK, asked)
        proxy, here = fit_local(place.fitted, rank=rank), place.here
        yield from enrichment_rows(
            self.metrics,
            local_alignment(
                here.values,
                here.gradients,
                self.shown.windows,
                proxy,
                keep=place.keep,
                documents=self.shown.tokens.documents,
                seed=self.seed,
            ),
            math.nan,
            site=place.site,
            population=place.population,
            points=self.points[at],
            excluded=self.excluded[at],
            columns={"gradient": "activation", "proxy": "local_pca", "rank": proxy.rank, "variant": WITH_MEAN},
        )


def _columns(gradient: str, name: str, proxy: Proxy, variant: str) -> dict[str, Any]:
    return {"gradient": gradient, "proxy": name, "rank": proxy.rank, "variant": variant}


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
        variance_gain=found.variance_gain,
        signal_to_noise=found.signal_to_noise,
    )
    normal = found.controls.get("normal")
    binding = {"control": found.control or None, "control_value": found.control_value, "p": found.p}
    # What the gain is over: of uncoupled gradients what all subspaces have on average.
    uniform = found.controls.get("haar")
    coupled = "permuted" in found.controls
    over = {"control": "haar", "control_value": found.rank / found.dim, "p": None if uniform is None else uniform.p}
    by_normals = {
        "control": "normal",
        "control_value": math.nan if normal is None else normal.value,
        "p": found.normal_p,
    }
    shuffled = found.controls.get("shuffled")
    dealt = {} if shuffled is None else {"control": "shuffled", "control_value": shuffled.value}
    beside: dict[str, dict[str, Any]] = {
        "tangent_energy": {"low": found.energy.low, "high": found.energy.high} | dealt,
        "tangent_excess": binding,
        "tangent_gain": binding if coupled else over,
        "normal_ratio": by_normals,
        "gradient_leading_variance": {},
        "variance_gain": {},
        "gradient_signal_to_noise": {},
    }
    # Another row has it, or it is about coupled gradients alone.
    apart = {
        "gradient_leading_variance": leading_share,
        "variance_gain": found.variance_gain,
        "gradient_signal_to_noise": found.signal_to_noise,
    }
    for name, more in beside.items():
        if name in metrics and not math.isnan(apart.get(name, 0.0)):
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


def leading_shares(moments: Float[Tensor, "s d d"]) -> list[float]:
    """λ₁ / Σλ of each second moment; NaN where it is zero."""
    totals = moments.diagonal(dim1=1, dim2=2).double().sum(1).cpu()
    return torch.where(totals > 0, leading_values(moments) / totals, math.nan).tolist()


def proxies_of(candidates: Sequence[Sequence[Candidate]]) -> list[list[Proxy]]:
    """Those of each place."""
    return [[proxy for _, proxy, _ in mine] for mine in candidates]
