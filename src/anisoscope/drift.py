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

from anisoscope.corpora import Corpus, load_corpus
from anisoscope.errors import ModelError
from anisoscope.estimates import judge, summarize
from anisoscope.metrics import all_metrics
from anisoscope.metrics.updates import RowUpdates
from anisoscope.models import Model, load_model
from anisoscope.progress import show_progress
from anisoscope.records import Checkpoint, Record, Site, Spec, Unit
from anisoscope.store import Store
from anisoscope.text import Windows, token_frequencies
from anisoscope.trace import run_module, state_given
from anisoscope.walk import FORWARD_TOKENS, draw, resolve
from anisoscope.weights import POPULATION, find_weights

SITE = "unembed.weight"
METRICS = ("common_drift", "common_drift_share", "rare_drift")


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """What an interval needs of the checkpoint at one of its ends."""

    matrix: Float[Tensor, "v d"]
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
    """One unit for each interval between consecutive checkpoints: `common_drift`, `common_drift_share`, `rare_drift`.

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
            held[checkpoint] = _Rows(
                matrix=_output_rows(model), mean_state=_mean_output_state(model, windows), kind=model.kind
            )
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
                units.append(_unit(asked, moved, earlier, later, after.kind, time.time() - start))
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
    return replace(ends[1], controls=(f"from={ends[0].weights}",))


def _unit(spec: Spec, rows: RowUpdates, earlier: Checkpoint, later: Checkpoint, kind: str, seconds: float) -> Unit:
    count, dim = rows.updates.shape
    records = []
    for metric in (all_metrics()[name] for name in METRICS):
        answer = summarize([judge(metric, metric(rows), count, 0, dim, {})], metric, dim, {})
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
            )
        )
    return Unit(spec=spec, provenance={"seconds": round(seconds, 3), "notes": []}, records=tuple(records))


def _output_rows(model: Model) -> Float[Tensor, "v d"]:
    found = find_weights(model.module)
    matrix = found.get("unembed.weight", found["embed.weight"])
    if isinstance(matrix, str):
        raise ModelError(f"{model.name}: drift is about the output embedding, and {matrix}")
    return matrix.cpu()


def _mean_output_state(model: Model, windows: Windows) -> Float[Tensor, " d"]:
    """Mean over all tokens of what the output matrix is given."""
    ids = torch.from_numpy(windows.token_ids)
    total: list[Tensor] = []

    def add(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = state_given(args, kwargs, shape)
        assert state is not None
        total.append(state.double().sum((0, 1)).cpu())

    head: Any = model.module
    handle = head.get_output_embeddings().register_forward_pre_hook(add, with_kwargs=True)
    try:
        for part in ids.split(max(1, FORWARD_TOKENS // ids.shape[1])):
            shape = tuple(part.shape)
            run_module(model.module, part)
    finally:
        handle.remove()
    return torch.stack(total).sum(0) / ids.numel()
