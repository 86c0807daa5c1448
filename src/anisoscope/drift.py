"""Follow the rows of the output embedding from checkpoint to checkpoint: a unit for each interval of a training."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anisoscope.capture import predict, windows_per_pass
from anisoscope.corpora import Corpus, load_corpus
from anisoscope.errors import ModelError
from anisoscope.estimates import answer_once
from anisoscope.metrics import all_metrics
from anisoscope.metrics.alignment import Enrichment
from anisoscope.metrics.updates import RowUpdates
from anisoscope.models import Model, load_model
from anisoscope.progress import show_progress
from anisoscope.records import Checkpoint, Record, Site, Spec, Unit
from anisoscope.store import Store
from anisoscope.tangent.dynamics import update_alignment
from anisoscope.tangent.energies import Alignment
from anisoscope.tangent.proxies import fit_global
from anisoscope.tangent.ranks import rank_within
from anisoscope.text import Windows, token_frequencies
from anisoscope.trace import state_given
from anisoscope.walk import FORWARD_TOKENS, draw, resolve
from anisoscope.weights import POPULATION, find_weights

SITE = "unembed.weight"
METRICS = ("common_drift", "common_drift_share", "rare_drift", "update_alignment")
# States that the proxy of updates is fitted on.
FITTED_STATES = 8192


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """What an interval needs of the checkpoint at one of its ends."""

    matrix: Float[Tensor, "v d"]
    states: Float[Tensor, "n d"]
    """Of what the matrix is given, evenly taken."""
    mean_state: Float[Tensor, " d"]
    kind: str


def follow_drift(
    checkpoints: Sequence[Checkpoint],
    spec: Spec,
    *,
    store: Store | None = None,
    corpus: Corpus | None = None,
    counts: Int[np.ndarray, " _"] | None = None,
    progress: bool = False,
    **loading: Any,
) -> list[Unit]:
    """One unit for each interval between consecutive checkpoints: drift of the rows, and their `update_alignment`.

    The unit is that of the later checkpoint; its variant names the earlier step. Each checkpoint is loaded at most
    once, and not at all where the store has both of its intervals. The mean state is that of the earlier one, on the
    windows of the Spec, as its output matrix is given it. `counts` are the frequencies of token types, by default those
    of the corpus; `loading` are options of `load_model`.
    """
    corpus = corpus or load_corpus(spec.corpus)
    windows: Windows | None = None
    held: dict[Checkpoint, _Rows] = {}

    def rows_of(checkpoint: Checkpoint) -> _Rows:
        nonlocal windows, counts
        if checkpoint not in held:
            hand = {"dtype": spec.dtype, "blocks": spec.blocks, "final_norm": spec.final_norm}
            model = load_model(checkpoint.model, revision=checkpoint.revision, **hand, **loading)
            windows = windows or draw(spec, model, corpus)
            counts = token_frequencies(corpus, model.tokenizer) if counts is None else counts
            states, mean = _output_states(model, windows)
            held[checkpoint] = _Rows(matrix=_output_rows(model), states=states, mean_state=mean, kind=model.kind)
        return held[checkpoint]

    units = []
    with show_progress("drift", total=max(len(checkpoints) - 1, 0), shown=progress) as advance:
        for earlier, later in pairwise(checkpoints):
            asked = _interval_spec(spec, corpus, earlier, later)
            if store is not None and asked.key in store:
                units.append(store.get(asked.key))
            else:
                start = time.time()
                before, after = rows_of(earlier), rows_of(later)
                assert counts is not None
                moved = RowUpdates.between(before.matrix, after.matrix, before.mean_state, torch.from_numpy(counts))
                aligned = _align_updates(moved, before.states, spec)
                units.append(_unit(asked, moved, aligned, earlier, later, after.kind, time.time() - start))
                if store is not None:
                    store.put(units[-1])
            held.pop(earlier, None)
            advance(1)
    return units


def _interval_spec(spec: Spec, corpus: Corpus, earlier: Checkpoint, later: Checkpoint) -> Spec:
    ends = [
        resolve(
            replace(spec, model=end.model, revision=end.revision, step=end.step, sites=(SITE,), metrics=METRICS),
            corpus=corpus,
        )
        for end in (earlier, later)
    ]
    return replace(ends[1], proxy_from=f"from={ends[0].weights}")


def _align_updates(rows: RowUpdates, states: Float[Tensor, "n d"], spec: Spec) -> Alignment:
    """The movement of rows against the tangent proxy of the states they meet."""
    proxy = fit_global(states, rank=rank_within(spec.rank, states.shape[1]), seed=spec.seed)
    return update_alignment(rows.updates.float(), proxy, seed=spec.seed).alignment


def _unit(
    spec: Spec,
    rows: RowUpdates,
    aligned: Alignment,
    earlier: Checkpoint,
    later: Checkpoint,
    kind: str,
    seconds: float,
) -> Unit:
    count, dim = rows.updates.shape
    records = []
    for metric in (all_metrics()[name] for name in METRICS):
        view, beside = rows, {}
        if metric.needs == "movement":
            view = Enrichment(energy=aligned.energy.value)
            beside = {"low": aligned.energy.low, "high": aligned.energy.high, "p": aligned.p, "gradient": "update"}
            beside |= {"control": aligned.control or None, "control_value": aligned.control_value}
            beside |= {"proxy": "pca", "rank": aligned.rank}
        answer = answer_once(metric, metric(view), count, dim)
        # A value of two checkpoints: what is wrong with either is wrong with it.
        place = replace(later, suspect=later.suspect or earlier.suspect)
        records.append(
            Record.from_estimate(
                answer,
                spec=spec,
                checkpoint=place,
                kind=kind,
                site=Site(name=SITE),
                population=POPULATION,
                metric=metric.name,
                metric_version=metric.version,
                variant=f"from={earlier.step}",
                **beside,
            )
        )
    return Unit(spec=spec, provenance={"seconds": round(seconds, 3), "notes": []}, records=tuple(records))


def _output_rows(model: Model) -> Float[Tensor, "v d"]:
    found = find_weights(model.module)
    matrix = found.get("unembed.weight", found["embed.weight"])
    if isinstance(matrix, str):
        raise ModelError(f"{model.name}: drift is about the output embedding, and {matrix}")
    return matrix.cpu()


def _output_states(model: Model, windows: Windows) -> tuple[Float[Tensor, "n d"], Float[Tensor, " d"]]:
    """Some of what the output matrix is given, and the mean over all tokens."""
    ids = torch.from_numpy(windows.token_ids)
    every = max(1, ids.numel() // FITTED_STATES)
    total: list[Tensor] = []
    some: list[Tensor] = []

    def add(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = state_given(args, kwargs, shape)
        assert state is not None
        total.append(state.double().sum((0, 1)).cpu())
        some.append(state.flatten(0, 1)[::every].float().cpu())

    head: Any = model.module
    handle = head.get_output_embeddings().register_forward_pre_hook(add, with_kwargs=True)
    try:
        for part in ids.split(windows_per_pass(model, ids.shape[1], FORWARD_TOKENS)):
            shape = tuple(part.shape)
            predict(model, part)
    finally:
        handle.remove()
    return torch.cat(some), torch.stack(total).sum(0) / ids.numel()
