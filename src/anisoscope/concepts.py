"""Concepts at every site: found in one half of the probe, looked for again in the other, held against its gradients.

Directions, codes and listed tokens are of the fit half, as the model reads plain text. The test half tells whether the
directions come back (without the tokens that a masked model did not see) and what its gradients have of them. States
are centred, and at most POINTS of each half are taken. Around their mean, k concepts with codes above 0 take k + 1
directions: one leads back. A rank that is too small by that one loses a concept.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.metrics import Metric, all_metrics
from anisoscope.metrics.concepts import ConceptSet
from anisoscope.probed import Probed, ProbeRow
from anisoscope.records import Site
from anisoscope.scratch import return_free_memory
from anisoscope.tangent.concepts import (
    centred_product,
    describe_concepts,
    energy_shares,
    fit_concepts,
    shuffle_coordinates,
    sparse_codes,
)
from anisoscope.tangent.energies import Alignment, uncoupled_alignment
from anisoscope.tangent.proxies import Proxy, fit_global
from anisoscope.tangent.ranks import rank_within
from anisoscope.tracks import PREFIX, Concepts, match_threshold, partner_cosines, render_context

VIEWS = ("concepts",)
# Of each half: seven fits then take some four seconds a site on one core, at width 112 and rank 16.
POINTS = 4096
REFITS, SHUFFLES = 2, 2
# Fewer states than so many for each concept say nothing of it.
LEAST_PER_CONCEPT = 8
_WHITESPACE = {"Ġ": " ", "▁": " ", "Ċ": "⏎", "\n": "⏎", "ĉ": " ", "\t": " "}


@dataclass(frozen=True, kw_only=True, eq=False)
class OtherHalf:
    """What the other half of the documents shows at a site."""

    states: Float[Tensor, "m d"]
    """Of tokens that the model saw."""
    coupled_states: Float[Tensor, "k d"]
    """Of every token in the population: those of the gradients."""
    gradients: Float[Tensor, "k d"]
    documents: Int[Tensor, " k"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """The concepts of one cloud."""

    table: Concepts
    view: ConceptSet
    energy: Alignment
    threshold: np.ndarray
    """For each concept the largest cosine with its partner in shuffled states: below it a match is none."""
    note: str | None


def concept_rows(
    probed: Probed, names: Collection[str], decode: Callable[[int], str]
) -> tuple[list[ProbeRow], dict[str, np.ndarray]]:
    """Every metric of concepts among `names` at every site, and the concepts themselves as small arrays.

    `decode` names a token. Of several populations the first is attached.
    """
    asked = [item for item in all_metrics().values() if item.needs in VIEWS and item.name in names]
    rows: list[ProbeRow] = []
    attachments: dict[str, np.ndarray] = {}
    for site in probed.sites if asked else ():
        for number, population in enumerate(probed.spec.populations or asked[0].populations):
            index, found = _at(probed, site, population)
            dim = probed.fit_states.width(site)
            place = {"site": site, "population": population, "points": len(index), "dim": dim}
            rows += rows_of_concepts(found, asked, place)
            if found is not None and number == 0:
                attachments |= _attach(found, index.cpu().numpy(), site, probed, decode)
    return rows, attachments


def _at(probed: Probed, site: Site, population: str) -> tuple[Int[Tensor, " n"], Found | None]:
    shown, seed = probed.gradients, probed.spec.seed
    states, here = probed.fit_states[site], shown.sites[site]
    return_free_memory(states.device)
    tokens = probed.fit_tokens(states.device)
    index = _some(probed.members(population, states, tokens), seed)
    kept = probed.members(population, here.values, shown.tokens)
    seen = _some(kept[shown.read[kept] == shown.tokens.ids[kept]], seed)
    rank = rank_within(probed.spec.rank, states.shape[1])
    rank = fit_global(states[index], rank=rank).rank if isinstance(rank, str) else rank
    if min(len(index), len(seen)) < LEAST_PER_CONCEPT * rank:
        return index, None
    test = OtherHalf(
        states=here.values[seen],
        coupled_states=here.values[kept],
        gradients=here.gradients[kept],
        documents=shown.tokens.documents[kept],
    )
    fitted = states[index]
    # Of all tokens; what is needed of them is copied.
    del here, states
    return index, find_concepts(fitted, test, rank, seed=seed, types=tokens.ids[index])


def _some(index: Int[Tensor, " n"], seed: int) -> Int[Tensor, " m"]:
    """At most POINTS of the rows, in their order."""
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))[:POINTS]
    return index[order.sort().values.to(index.device)]


def find_concepts(
    states: Float[Tensor, "n d"], test: OtherHalf, rank: int, *, seed: int, types: Int[Tensor, " n"] | None = None
) -> Found:
    """Concepts of the fit half's states, whether they come back, and what the test half's gradients have of them."""
    fitted, tested = (one.float() - one.float().mean(0) for one in (states, test.states))
    fit = fit_concepts(fitted, rank, seed=seed)
    refits = [fit_concepts(fitted, rank, seed=seed + number).directions for number in range(1, REFITS + 1)]
    again = fit_concepts(tested, rank, seed=seed).directions
    coded = replace(fit, codes=sparse_codes(fitted, fit.directions))
    table = describe_concepts(coded, fitted, refits=refits, halves=[(fit.directions, again)], types=types)
    directions = torch.from_numpy(table.directions).to(states.device).double()
    virtual = centred_product(test.gradients, test.coupled_states)
    table = replace(
        table,
        gradient_share=energy_shares(test.gradients, directions),
        coupled_share=energy_shares(virtual, directions),
    )
    chance = _chance(tested, rank, table.directions, seed)
    energy = uncoupled_alignment(test.gradients, _span(fitted, directions), documents=test.documents, seed=seed)
    view = ConceptSet(
        replication=torch.from_numpy(table.replication),
        permuted_replication=torch.from_numpy(chance.replication).flatten(),
        stability=torch.from_numpy(table.stability),
        permuted_stability=torch.from_numpy(chance.stability),
        energy=energy.energy.value,
        chance_energy=energy.control_value,
    )
    note = None if fit.converged else "directions still turned a little when sharpening ended"
    return Found(table=table, view=view, energy=energy, threshold=match_threshold(chance.replication), note=note)


@dataclass(frozen=True, kw_only=True)
class _Chance:
    replication: np.ndarray
    """(fits, r)"""
    stability: np.ndarray


def _chance(states: Float[Tensor, "n d"], rank: int, directions: np.ndarray, seed: int) -> _Chance:
    """Both numbers for states whose coordinates were shuffled; the first shuffle is fitted from two seeds."""
    fits = []
    for number in range(SHUFFLES):
        shuffled = shuffle_coordinates(states, seed=seed + number)
        for start in (seed, seed + 1)[: 2 if number == 0 else 1]:
            fits.append(fit_concepts(shuffled, rank, seed=start).directions.double().cpu().numpy())
    return _Chance(
        replication=np.stack([partner_cosines(directions, one) for one in fits]),
        stability=partner_cosines(fits[0], fits[1]),
    )


def _span(states: Float[Tensor, "n d"], directions: Float[Tensor, "r d"]) -> Proxy:
    """The span of the concepts as a tangent proxy, with the principal directions that come next."""
    basis = torch.linalg.qr(directions[directions.norm(dim=1) > 0].T).Q.to(states)
    rest = states - (states @ basis) @ basis.T
    axes = torch.linalg.eigh((rest.T @ rest).double()).eigenvectors.flip(1).to(states)
    total = float(states.double().square().sum())
    return Proxy(
        basis=basis,
        mean=states.new_zeros(len(basis), dtype=torch.float64),
        following=axes[:, : min(basis.shape[1], len(basis) - basis.shape[1])],
        last=basis.new_empty(len(basis), 0),
        explained=1 - float(rest.double().square().sum()) / total if total > 0 else math.nan,
        method="concepts",
        centred=True,
    )


def rows_of_concepts(found: Found | None, metrics: Collection[Metric], place: dict[str, Any]) -> Iterator[ProbeRow]:
    """The rows of one cloud; NaN where there were too few states to look for concepts."""
    nothing = torch.tensor([math.nan], dtype=torch.float64)
    empty = ConceptSet(
        replication=nothing,
        permuted_replication=nothing,
        stability=nothing,
        permuted_stability=nothing,
        energy=math.nan,
        chance_energy=math.nan,
    )
    view = empty if found is None else found.view
    for metric in metrics:
        assert metric.control is not None
        chance = float(metric.control(view))
        columns: dict[str, Any] = {}
        if found is not None:
            columns = {"rank": len(found.table.directions), "control": "permuted", "control_value": chance}
        if found is not None and metric.name == "concept_energy":
            of_gradients = {"gradient": "activation", "control": found.energy.control or None, "p": found.energy.p}
            columns |= of_gradients | {"low": found.energy.energy.low, "high": found.energy.energy.high}
        row = ProbeRow.of(metric, view, note=None if found is None else found.note, **columns, **place)
        yield row._replace(answer=replace(row.answer, null=chance))


def _attach(
    found: Found, index: np.ndarray, site: Site, probed: Probed, decode: Callable[[int], str]
) -> dict[str, np.ndarray]:
    """The table, thresholds for matching, and the texts of the listed tokens as UTF-8 JSON."""
    listed = np.where(found.table.tokens >= 0, index[found.table.tokens], -1)
    prefix = f"{PREFIX}{site.stack or ''}/{site.name}"
    arrays = replace(found.table, tokens=listed).attach(prefix) | {f"{prefix}.threshold": found.threshold}
    texts = json.dumps(_texts(listed, probed, decode), ensure_ascii=False)
    return {
        **{name: one.astype(np.int32 if one.dtype.kind == "i" else np.float32) for name, one in arrays.items()},
        f"{prefix}.directions": found.table.directions.astype(np.float16),
        f"{prefix}.texts": np.frombuffer(texts.encode(), dtype=np.uint8).copy(),
    }


def _texts(listed: np.ndarray, probed: Probed, decode: Callable[[int], str]) -> list[list[tuple[str, str]]]:
    """For each concept its tokens, each by itself and in its context; strongest first."""
    ids = probed.probe.fit.token_ids
    known = {int(one): _readable(decode(int(one))) for one in np.unique(ids)}
    pieces = [known[one] for one in ids.flatten().tolist()]
    windows, positions = (one.flatten() for one in np.indices(ids.shape))
    return [
        [(pieces[row], render_context(pieces, windows, positions, row)) for row in rows if row >= 0]
        for rows in listed.tolist()
    ]


def _readable(piece: str) -> str:
    """A token without the signs that tokenizers write for white space."""
    return "".join(_WHITESPACE.get(letter, letter) for letter in piece)
