"""Gradients against tangent proxies at every site: probe halves in, rows out.

The proxy is fitted on one half of the probe's documents and tested on the gradients of the other. Rows are told apart
by their gradient (`virtual`, `activation`), proxy (`pca`, `seminmf`), population and variant (`mean=in`, `mean=out`:
with the direction of the states' mean projected out of the proxy).
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anisoscope.capture import capture
from anisoscope.cloud import Tokens, select_population
from anisoscope.errors import SpecError
from anisoscope.estimates import judge, summarize
from anisoscope.gauge import seed_for
from anisoscope.gradients import Coupled, ProbeGradients, capture_gradients, tokens_of
from anisoscope.metrics import Metric, all_metrics
from anisoscope.metrics.alignment import Enrichment
from anisoscope.models import Model
from anisoscope.probes import Probe
from anisoscope.records import Estimate, Site, Spec
from anisoscope.tangent.controls import second_moment
from anisoscope.tangent.energies import Alignment, coupled_alignment, uncoupled_alignment
from anisoscope.tangent.proxies import Proxy, fit_global, without_mean
from anisoscope.tangent.windows import pair_windows
from anisoscope.text import Windows

VIEWS = ("enrichment",)
GRADIENTS = ("virtual", "activation")
PROXIES = ("pca", "seminmf")
POPULATIONS = ("all", "typical")
FORWARD_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class AlignmentRow:
    """One number, and the columns that tell it from others."""

    site: Site
    population: str
    metric: Metric
    answer: Estimate
    columns: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Half:
    """The fit half at one site."""

    states: Float[Tensor, "n d"]
    tokens: Tokens


def alignment_rows(
    model: Model,
    probe: Probe,
    sites: Iterable[Site],
    names: Collection[str],
    spec: Spec,
    *,
    batch_size: int | None = None,
) -> Iterator[AlignmentRow]:
    """Every metric of alignment among `names`, at every site, for each gradient, proxy, population and variant."""
    asked = [metric for metric in all_metrics().values() if metric.needs in VIEWS and metric.name in names]
    sites = tuple(sites)
    if not asked or not sites:
        return
    gradients = spec.gradients or GRADIENTS
    if unknown := set(gradients) - set(GRADIENTS):
        raise SpecError(f"gradients are {' and '.join(GRADIENTS)}; came {', '.join(sorted(unknown))}")
    proxies = dict.fromkeys((spec.proxy, *PROXIES))
    seeds = [seed_for(spec.seed, window, 2) for window in range(len(probe.test.token_ids))]
    shown = capture_gradients(model, probe.test, sites, seeds=seeds, batch_size=batch_size)
    for site, states in _fit_states(model, probe.fit, sites, batch_size):
        half = _Half(states=states, tokens=tokens_of(probe.fit, states.device))
        for population in spec.populations or POPULATIONS:
            yield from _at_site(site, population, half, shown, asked, gradients, tuple(proxies), spec)


def _fit_states(
    model: Model, windows: Windows, sites: tuple[Site, ...], batch_size: int | None
) -> Iterator[tuple[Site, Float[Tensor, "n d"]]]:
    """The states of the fit half, site after site, all from one pass."""
    ids = torch.from_numpy(windows.token_ids)
    size = batch_size or max(1, FORWARD_TOKENS // ids.shape[1])
    parts: dict[Site, list[Tensor]] = {site: [] for site in sites}
    for part in ids.split(size):
        for site, state in capture(model, part, sites).states.items():
            parts[site].append(state.flatten(0, 1).float())
    for site in sites:
        yield site, torch.cat(parts.pop(site))


def _at_site(
    site: Site,
    population: str,
    half: _Half,
    shown: ProbeGradients,
    asked: list[Metric],
    gradients: Iterable[str],
    proxies: Iterable[str],
    spec: Spec,
) -> Iterator[AlignmentRow]:
    here = shown.sites[site]
    fitted = half.states[_members(population, half.states, half.tokens, spec)]
    keep = torch.zeros(len(here.values), dtype=torch.bool, device=here.values.device)
    keep[_members(population, here.values, shown.tokens, spec)] = True
    # One pairing serves every proxy: what is permuted does not depend on it.
    pairing = pair_windows(here.values, here.gradients, shown.windows, keep=keep, seed=spec.seed)
    moments = {"virtual": pairing.gradient, "activation": here.gradients[keep]}
    shares = {gradient: _leading_share(second_moment(moments[gradient])) for gradient in gradients}
    for name in proxies:
        rank = min(spec.rank, here.values.shape[1] // 2)
        proxy = fit_global(fitted, method=name, rank=rank, seed=spec.seed)
        for variant, used in (("mean=in", proxy), ("mean=out", without_mean(proxy))):
            for gradient in gradients:
                if used.rank == 0:
                    continue
                if gradient == "virtual":
                    found = coupled_alignment(pairing, used, seed=spec.seed)
                else:
                    found = _uncoupled(here, keep, shown, used, spec)
                columns = {"gradient": gradient, "proxy": name, "rank": used.rank, "variant": variant}
                yield from _rows(site, population, found, shares[gradient], asked, columns, keep)


def _uncoupled(here: Coupled, keep: Bool[Tensor, " n"], shown: ProbeGradients, proxy: Proxy, spec: Spec) -> Alignment:
    return uncoupled_alignment(
        here.gradients[keep],
        proxy,
        documents=shown.tokens.documents[keep],
        states=here.values[keep],
        seed=spec.seed,
    )


def _members(population: str, states: Float[Tensor, "n d"], tokens: Tokens, spec: Spec) -> Tensor:
    return select_population(population, states, tokens, typical_k=spec.typical_k, seed=spec.seed)


def _leading_share(moment: Float[Tensor, "d d"]) -> float:
    total = float(moment.diagonal().sum())
    return float(torch.linalg.eigvalsh(moment.double())[-1]) / total if total > 0 else math.nan


def _rows(
    site: Site,
    population: str,
    found: Alignment,
    leading_share: float,
    asked: list[Metric],
    columns: dict[str, Any],
    keep: Bool[Tensor, " n"],
) -> Iterator[AlignmentRow]:
    view = Enrichment(
        energy=found.energy.value,
        chance=found.control_value,
        gain=found.gain,
        normal_ratio=found.normal_ratio,
        leading_share=leading_share,
    )
    points = int(keep.sum())
    for metric in asked:
        answer = summarize([judge(metric, metric(view), points, 0, found.dim, {})], metric, found.dim, {})
        note = "; ".join(part for part in (answer.note if math.isnan(answer.value) else None, found.note) if part)
        beside: dict[str, Any] = {}
        if metric.name == "tangent_energy":
            beside = {"low": found.energy.low, "high": found.energy.high}
        elif metric.name in ("tangent_excess", "tangent_gain"):
            beside = {"control": found.control or None, "control_value": found.control_value, "p": found.p}
        elif metric.name == "normal_ratio":
            normal = found.controls.get("normal")
            value = math.nan if normal is None else normal.value
            beside = {"control": "normal", "control_value": value, "p": found.normal_p}
        answer = replace(answer, note=note or None)
        yield AlignmentRow(site=site, population=population, metric=metric, answer=answer, columns=columns | beside)
