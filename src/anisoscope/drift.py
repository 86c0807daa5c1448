"""How the rows of the output embedding move from checkpoint to checkpoint: together, and rare tokens against frequent.

Cross entropy moves row v by Σₜ (yₜᵥ - pₜᵥ) hₜ. Where v is not the target that is -Σ pₜᵥ hₜ, along minus the mean final
state for every row: a common drift (Biś et al. 2021), largest in relation for rare tokens (Gao et al. 2019).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, linalg, nn

from anisoscope.corpora import Corpus, load_corpus
from anisoscope.errors import ModelError, SpecError
from anisoscope.models import Model, load_model
from anisoscope.records import Checkpoint, Spec
from anisoscope.text import Windows, token_frequencies
from anisoscope.trace import run_module, state_given
from anisoscope.walk import FORWARD_TOKENS, draw
from anisoscope.weights import find_weights

# Rarest and most frequent: this part of the token types each.
PART = 0.1


@dataclass(frozen=True, kw_only=True)
class CommonDrift:
    """How the rows of an output embedding moved together."""

    cosine: float
    """cos(mean update, -mean final state): 1 where they moved as the theory says."""
    share: float
    """‖mean update‖ / mean ‖update‖: 1 where all rows moved alike; 1/√n for n rows that moved independently."""


@dataclass(frozen=True, kw_only=True)
class RareDrift:
    """How far rows of rare tokens moved, against those of frequent ones."""

    rare_over_frequent: float
    low: float
    high: float


def common_drift(
    before: Float[Tensor, "v d"], after: Float[Tensor, "_ d"], mean_state: Float[Tensor, " d"]
) -> CommonDrift:
    """Direction and share of what all rows did between two checkpoints (Biś et al. 2021); in float64.

    cosine = cos(ū, -h̄),  share = ‖ū‖ / mean ‖u_v‖,  with u_v the update of row v, ū its mean over rows, and h̄ the mean
    of the states that the rows are multiplied with. NaN where nothing moved, or where ū or h̄ is zero.
    """
    update, state = _update(before, after), mean_state.double()
    mean, lengths = update.mean(0), linalg.vector_norm(update, dim=1)
    cosine = -(mean @ state) / (linalg.vector_norm(mean) * linalg.vector_norm(state))
    return CommonDrift(cosine=float(cosine), share=float(linalg.vector_norm(mean) / lengths.mean()))


def rare_drift(
    before: Float[Tensor, "v d"],
    after: Float[Tensor, "_ d"],
    counts: Int[np.ndarray, " _"],
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> RareDrift:
    """Mean update length of the rarest tenth of the token types over that of the most frequent tenth.

    Types that never occur are left out: they may be padding of the matrix. The interval is a percentile bootstrap over
    types, each tenth by itself. NaN where a tenth has fewer than two types, or the frequent ones did not move.
    """
    if counts[len(before) :].any():
        raise SpecError(f"tokens are counted that have no row: {len(counts)} frequencies for {len(before)} rows")
    lengths = linalg.vector_norm(_update(before, after), dim=1).numpy()
    # Stable: ties go by token id, and the answer does not depend on the sorting.
    order = np.argsort(counts, kind="stable")
    order = order[counts[order] > 0]
    size = int(PART * len(order))
    if size < 2:
        return RareDrift(rare_over_frequent=math.nan, low=math.nan, high=math.nan)
    rng = np.random.default_rng(seed)
    parts = [lengths[order[:size]], lengths[order[-size:]]]
    rare, frequent = ([part.mean(), *(rng.choice(part, size).mean() for _ in range(resamples))] for part in parts)
    ratios = np.divide(rare, frequent, out=np.full(resamples + 1, math.nan), where=np.asarray(frequent) > 0)
    low, high = np.quantile(ratios[1:], [(1 - level) / 2, (1 + level) / 2])
    return RareDrift(rare_over_frequent=float(ratios[0]), low=float(low), high=float(high))


def _update(before: Float[Tensor, "v d"], after: Float[Tensor, "_ d"]) -> Float[Tensor, "v d"]:
    if before.shape != after.shape:
        raise SpecError(f"rows of {tuple(before.shape)} cannot be compared with rows of {tuple(after.shape)}")
    return after.double().cpu() - before.double().cpu()


def follow_drift(
    checkpoints: Sequence[Checkpoint],
    spec: Spec,
    *,
    corpus: Corpus | None = None,
    counts: Int[np.ndarray, " _"] | None = None,
    **loading: Any,
) -> list[dict[str, Any]]:
    """One row for each interval between consecutive checkpoints: `common_drift` and `rare_drift` from one to the next.

    Each checkpoint is loaded once. The mean state is that of the earlier one, on the windows of the Spec, as its output
    matrix is given it. `counts` are the frequencies of token types, by default those of the corpus; `loading` are
    options of `load_model`.
    """
    corpus = corpus or load_corpus(spec.corpus)
    rows: list[dict[str, Any]] = []
    windows = before = None
    for checkpoint in checkpoints:
        hand = {"dtype": spec.dtype, "blocks": spec.blocks, "final_norm": spec.final_norm}
        model = load_model(checkpoint.model, revision=checkpoint.revision, **hand, **loading)
        windows = windows or draw(spec, model, corpus)
        counts = token_frequencies(corpus, model.tokenizer) if counts is None else counts
        matrix, state = _output_rows(model), _mean_output_state(model, windows)
        if before is not None:
            earlier, old, mean_state = before
            drifts = (common_drift(old, matrix, mean_state), rare_drift(old, matrix, counts, seed=spec.seed))
            row = {"from_step": earlier.step, "to_step": checkpoint.step}
            rows.append(row | asdict(drifts[0]) | asdict(drifts[1]))
        before = checkpoint, matrix, state
    return rows


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
