"""States and gradients of your own: `estimate` with `grads`, `windows`, `documents`, `token_ids` and `frequencies`.

The proxy is fitted on half of the documents, drawn by the seed, and tested on the other half. Without documents every
window is a document of its own, and without windows every row, which neighbouring tokens of a text are not; a coupled
gradient then has no null that holds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope import curvature, pinning
from anisoscope.alignment import GRADIENTS
from anisoscope.errors import SpecError
from anisoscope.held import enrichment_rows, leading_shares
from anisoscope.metrics import Metric
from anisoscope.metrics.alignment import Removed, Trend
from anisoscope.probed import ProbeRow
from anisoscope.records import Estimate, Site, Spec
from anisoscope.tangent.anisotropy import anisotropy_share
from anisoscope.tangent.controls import second_moment
from anisoscope.tangent.energies import coupled_alignment, uncoupled_alignment
from anisoscope.tangent.frequency import energy_by_frequency
from anisoscope.tangent.proxies import fit_global
from anisoscope.tangent.windows import pair_windows

_PLACE = {"site": Site(name="points"), "population": "all"}


def estimate_handed(
    metrics: Sequence[Metric],
    points: Float[Tensor, "n d"],
    *,
    grads: Float[Tensor, "_ d"] | None,
    token_ids: Int[Tensor, " _"] | None,
    frequencies: Float[Tensor, " _"] | None,
    windows: Int[Tensor, " _"] | None,
    documents: Int[Tensor, " _"] | None,
    rank: int,
    proxy: str,
    gradient: str,
    seed: int,
) -> dict[str, Estimate]:
    """One Estimate for each metric: of rows that differ by variant, the plain one."""
    if gradient not in GRADIENTS:
        raise SpecError(f"gradient is {' or '.join(GRADIENTS)}; came {gradient!r}")
    rows: list[ProbeRow] = []
    of_gradients = [metric for metric in metrics if metric.needs in ("enrichment", "removal", "trend")]
    if of_gradients:
        if grads is None:
            raise SpecError(f"{of_gradients[0].name} is about gradients; give grads=, one row per point")
        rows += _of_gradients(
            of_gradients, points, grads, token_ids, frequencies, windows, documents, rank, proxy, gradient, seed
        )
    of_types = [metric for metric in metrics if metric.needs in ("pinned", "curved")]
    if of_types:
        if token_ids is None or frequencies is None:
            raise SpecError(f"{of_types[0].name} is about token types; give token_ids= and frequencies=, one per point")
        rows += _of_types(of_types, points, token_ids, frequencies, seed)
    found: dict[str, Estimate] = {}
    for row in rows:
        beside = {name: row.columns[name] for name in ("control", "p") if name in row.columns}
        found.setdefault(row.metric.name, replace(row.answer, **beside))
    return found


def _of_gradients(
    metrics: Sequence[Metric],
    points: Float[Tensor, "n d"],
    grads: Float[Tensor, "_ d"],
    token_ids: Int[Tensor, " _"] | None,
    frequencies: Float[Tensor, " _"] | None,
    windows: Int[Tensor, " _"] | None,
    documents: Int[Tensor, " _"] | None,
    rank: int,
    proxy: str,
    gradient: str,
    seed: int,
) -> Iterator[ProbeRow]:
    if windows is None and gradient == "virtual":
        raise SpecError("a coupled gradient is compared with permuted windows; give windows=, one per point")
    groups = torch.arange(len(points), device=points.device) if windows is None else windows
    owners = groups if documents is None else documents
    known = owners.unique()
    if len(known) < 2:
        name = "windows" if documents is None else "documents"
        raise SpecError(f"half of the {name} are fitted on and half tested, and {name}= names one only")
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed)).to(known.device)
    fitting = torch.isin(owners, known[order[: len(known) // 2]])
    fitted = fit_global(points[fitting], method=proxy, rank=rank, seed=seed)
    states, rows, tested, owners = points[~fitting], grads[~fitting], groups[~fitting], owners[~fitting]
    named = {metric.name: metric for metric in metrics}
    if gradient == "virtual":
        pairing = pair_windows(states, rows, tested, documents=owners, seed=seed)
        found, moment = coupled_alignment(pairing, fitted, seed=seed), pairing.moments[0]
    else:
        found, moment = (
            uncoupled_alignment(rows, fitted, documents=owners, states=states, seed=seed),
            second_moment(rows),
        )
    place = {**_PLACE, "points": len(rows)}
    yield from enrichment_rows(named, found, leading_shares(moment[None])[0], columns={}, **place)
    if "tangent_anisotropy_share" in named:
        share = anisotropy_share(moment, fitted, seed=seed)
        removal = share.isoscore_change
        yield ProbeRow.of(
            named["tangent_anisotropy_share"],
            Removed(change=removal.tangent),
            dim=fitted.dim,
            note=share.note,
            control="normal",
            p=removal.p,
            **place,
        )
    if "tangent_frequency_trend" in named:
        if token_ids is None or frequencies is None:
            raise SpecError("tangent_frequency_trend needs token_ids= and frequencies=, one per point")
        logs = frequencies[~fitting].double().log()
        trend = energy_by_frequency(rows, fitted.basis, logs, token_ids[~fitting], seed=seed).spearman
        view = Trend(spearman=trend.r.value)
        yield ProbeRow.of(named["tangent_frequency_trend"], view, dim=fitted.dim, p=trend.p, **place)


def _of_types(
    metrics: Sequence[Metric],
    points: Float[Tensor, "n d"],
    token_ids: Int[Tensor, " n"],
    frequencies: Float[Tensor, " n"],
    seed: int,
) -> Iterator[ProbeRow]:
    types, place = token_ids.unique(return_inverse=True)
    # Whatever a type's points say; they should all say the same.
    of_type = torch.zeros(len(types), dtype=torch.float64, device=points.device)
    of_type[place] = frequencies.double()

    def log_frequency(asked: Tensor) -> Tensor:
        return of_type[torch.searchsorted(types, asked)].log()

    pinned = [metric for metric in metrics if metric.needs in pinning.VIEWS]
    if pinned:
        yield from pinning.rows_of_types(points, token_ids, log_frequency, pinned, **_PLACE, seed=seed)
    curved = [metric for metric in metrics if metric.needs in curvature.VIEWS]
    if curved:
        yield from curvature.rows_of_surface(
            points, token_ids, of_type[place], curved, **_PLACE, rank=Spec.curvature_rank, seed=seed
        )
