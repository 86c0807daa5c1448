"""What if the final norm had another gain or bias? Isotropy and loss on the same tokens, weights untouched.

A hook on the norm's output adds what the other map would have given more: z + f'(x) - f(x). Where the two maps are one,
that is z, bit for bit.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anisoscope.capture import capture, windows_per_pass
from anisoscope.corpora import Corpus, load_corpus
from anisoscope.errors import ModelError, SpecError
from anisoscope.models import Model
from anisoscope.norms import NO_FINAL_NORM, Norm, read_norms
from anisoscope.records import Checkpoint, Site, Spec, Unit
from anisoscope.text import Windows
from anisoscope.trace import state_given
from anisoscope.walk import FORWARD_TOKENS, draw, load, measure

OWN = "norm=own"
METRICS = ("mean_cosine", "isoscore", "leading_variance", "loss")


def norm_of(model: Model) -> Norm:
    """The final norm of the stack that the model answers from."""
    norm = read_norms(model.module, model.layout)[model.layout.stacks[-1].name]
    if isinstance(norm, str):
        raise ModelError(f"{model.name}: {norm}")
    return norm


@contextmanager
def norm_replaced(model: Model, new: Norm, old: Norm | None = None) -> Iterator[None]:
    """Inside, the model runs as if its last stack's final norm were `new`; `old` is `norm_of(model)`, where known."""
    path = model.layout.stacks[-1].final_norm
    if path is None:
        raise ModelError(f"{model.name}: {NO_FINAL_NORM}")
    old = old or norm_of(model)
    if new.gain.shape != old.gain.shape:
        raise SpecError(f"a norm of width {len(new.gain)} cannot stand in for one of width {len(old.gain)}")

    def change(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        given = state_given(args, kwargs, tuple(output.shape[:2]))
        assert given is not None
        return (output.double() + (new(given) - old(given))).to(output.dtype)

    handle = model.module.get_submodule(path).register_forward_hook(change, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def variants_of(norm: Norm, mean: Float[Tensor, " d"]) -> dict[str, Norm]:
    """The norms that this one could have been, without those that change nothing; `mean` is that of normalised states.

    `gain=rms` keeps the length of the gain and forgets its shape: unlike `gain=1` it leaves the scale of the logits.
    """
    size = norm.gain.square().mean().sqrt()
    changed = {
        "bias=0": replace(norm, bias=torch.zeros_like(norm.bias)),
        "bias=-gain*mean": replace(norm, bias=-norm.gain * mean),
        "gain=1": replace(norm, gain=torch.ones_like(norm.gain)),
        "gain=rms": replace(norm, gain=torch.full_like(norm.gain, float(size))),
    }
    possible = {"bias=0": norm.has_bias, "gain=1": norm.has_gain, "gain=rms": norm.has_gain}
    return {name: other for name, other in changed.items() if possible.get(name, True)}


def measure_counterfactuals(
    spec: Spec,
    *,
    swaps: Mapping[str, Norm] | None = None,
    model: Any = None,
    tokenizer: Any = None,
    corpus: Corpus | None = None,
    checkpoint: Checkpoint | None = None,
    batch_size: int | None = None,
    progress: bool = True,
    **loading: Any,
) -> Unit:
    """Isotropy after the final norm, and loss, as the model is and with each changed norm: one variant a row.

    The mean that a bias is to cancel comes from the first half of the windows; everything is measured on the second,
    the same batches for every variant. `swaps` are the norms of other checkpoints (`norm_of`), by name; `loading` are
    options of `load_model`. Metrics and sites of the Spec are ours to choose; its `controls` name the variants.
    """
    corpus = corpus or load_corpus(spec.corpus)
    spec, loaded = load(replace(spec, metrics=METRICS, sites=("final_norm",)), corpus, model, tokenizer, **loading)
    norm = norm_of(loaded)
    windows = draw(spec, loaded, corpus)
    half = len(windows.token_ids) // 2
    if half == 0:
        raise SpecError("counterfactuals need two windows: one for the mean, one to measure on; raise --tokens")
    mean = _mean_normed(loaded, norm, windows.take(slice(0, half)), batch_size)
    norms = {OWN: norm, **variants_of(norm, mean), **{f"norm={name}": other for name, other in (swaps or {}).items()}}
    spec = replace(spec, controls=tuple(norms))
    records, seconds, provenance = [], 0.0, {}
    for variant, other in norms.items():
        with norm_replaced(loaded, other, norm):
            unit = measure(
                spec,
                model=loaded,
                corpus=corpus,
                windows=windows.take(slice(half, None)),
                checkpoint=checkpoint,
                batch_size=batch_size,
                progress=progress,
            )
        mine = (record for record in unit.records if record.stack in (None, loaded.layout.stacks[-1].name))
        records += [replace(record, variant=variant) for record in mine]
        seconds, provenance = seconds + unit.provenance["seconds"], dict(unit.provenance)
    notes = [*provenance["notes"], f"the mean was estimated on {half} other windows"]
    if not norm.has_bias:
        notes.append("the final norm has no bias: bias=0 would change nothing")
    provenance |= {"notes": notes, "seconds": round(seconds, 3), "cost": {}}
    return Unit(spec=spec, provenance=provenance, records=tuple(records))


def _mean_normed(model: Model, norm: Norm, windows: Windows, batch_size: int | None) -> Float[Tensor, " d"]:
    """m = E x̂ over all tokens of the windows."""
    stack = model.layout.stacks[-1].name
    site = Site(name="final_norm.normed", stack=stack)
    size = batch_size or windows_per_pass(model, windows.token_ids.shape[1], FORWARD_TOKENS)
    total = torch.zeros_like(norm.gain)
    for start in range(0, len(windows.token_ids), size):
        ids = torch.from_numpy(windows.token_ids[start : start + size])
        state = capture(model, ids, [site], norms={stack: norm}).states[site]
        total += state.double().sum((0, 1)).to(total.device)
    return total / windows.token_ids.size
