"""Token batches in, states at sites and losses per token out: one forward pass with hooks."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from anisoscope.errors import LayoutError, ModelError, SpecError
from anisoscope.kernels import has_triton
from anisoscope.models import Model, sites_of
from anisoscope.norms import Norm, read_norms
from anisoscope.records import FINAL_NORM_SITES, Site
from anisoscope.trace import run_module, state_given, state_in

MASKED_SHARE = 0.15
"""Share of the tokens that are masked for a masked language model's loss, as in BERT's training."""

_STAGES = FINAL_NORM_SITES[:2]
# Positions whose logits are in float32 at one time: at a vocabulary of 256k, a quarter of a gigabyte.
_CHUNK = 256


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What one forward pass showed."""

    states: dict[Site, Float[Tensor, "b t _d"]]
    logits: Float[Tensor, "b t v"] | None
    """None where the model has no language-model head."""


def capture(
    model: Model,
    input_ids: Int[Tensor, "b t"],
    sites: Iterable[Site],
    into: Callable[[Site, Float[Tensor, "b t _d"]], None] | None = None,
    norms: Mapping[str | None, Norm | str] | None = None,
) -> Captured:
    """States at `sites` for one batch of windows of equal length, in the model's dtype and on its device.

    `into` is handed each state the moment it is made and must copy what it keeps; without it, copies are returned.

    `embed` is what the first block is given, `block.k` what the k-th block call returns, `final_norm` what the final
    norm returns. Each state is copied the moment it is made, so that no later edit in place reaches it. The stages
    inside the final norm are computed from what it is given; `norms` are those of `read_norms`, where they are known.
    """
    wanted = tuple(sites)
    shape = tuple(input_ids.shape)
    states: dict[Site, Tensor] = {}
    seen: set[Site] = set()
    calls = Counter[tuple[str, bool]]()
    handles: list[Any] = []
    hooks = hooks_for(model, wanted)
    if norms is None and any(site.name in _STAGES for site in wanted):
        norms = read_norms(model.module, model.layout)

    def keep(place: tuple[str, bool], _: nn.Module, args: Any, kwargs: dict[str, Any], output: Any = None) -> None:
        # A shared layer is called once per block: its n-th call is its n-th site.
        for site in hooks[place].get(calls[place], ()):
            state = state_given(args, kwargs, shape) if place[1] else state_in(output, shape)
            if state is None:
                raise LayoutError(
                    f"{site.name} showed no state of shape (batch, position, width) for an input of {shape}"
                )
            if site.name in _STAGES and norms is not None:
                state = _inside_norm(site, state, norms[site.stack])
            if into is None:
                states[site] = state.detach().clone()
            else:
                into(site, state.detach())
            seen.add(site)
        calls[place] += 1

    try:
        for path, before in hooks:
            part = model.module.get_submodule(path)
            register = part.register_forward_pre_hook if before else part.register_forward_hook
            handles.append(register(partial(keep, (path, before)), with_kwargs=True))
        output = run_module(model.module, input_ids)
    finally:
        for handle in handles:
            handle.remove()
    missing = [site.name for site in wanted if site not in seen]
    if missing:
        raise LayoutError(f"{model.name}: no state was seen at {', '.join(missing)}")
    return Captured(states={site: states[site] for site in wanted if site in states}, logits=logits_of(model, output))


def _inside_norm(site: Site, state: Float[Tensor, "b t d"], norm: Norm | str) -> Float[Tensor, "b t d"]:
    if isinstance(norm, str):
        raise ModelError(f"{site.name}: {norm}")
    # In the dtype of the other sites: what changes from stage to stage is then not the rounding.
    return (norm.normalise(state) if site.name == "final_norm.normed" else norm.gained(state)).to(state.dtype)


def hooks_for(model: Model, sites: tuple[Site, ...]) -> dict[tuple[str, bool], dict[int, list[Site]]]:
    """Which call of which module shows which sites: (path, before the call?) -> number of the call -> sites."""
    known = set(sites_of(model.layout, stages=True))
    unknown = [site for site in sites if site not in known]
    if unknown:
        raise SpecError(f"{model.name} has no site {unknown[0]}")
    hooks: dict[tuple[str, bool], dict[int, list[Site]]] = {}
    stacks = {stack.name: stack for stack in model.layout.stacks}
    for site in sites:
        stack = stacks[site.stack]
        kind, _, number = site.name.partition(".")
        if kind == "block":
            k = int(number)
            place, call = (stack.blocks[k], False), stack.blocks[:k].count(stack.blocks[k])
        elif kind == "embed":
            place, call = (stack.blocks[0], True), 0
        else:
            assert stack.final_norm is not None
            place, call = (stack.final_norm, site.name in _STAGES), 0
        hooks.setdefault(place, {}).setdefault(call, []).append(site)
    return hooks


def logits_of(model: Model, output: Any) -> Tensor | None:
    """The logits in what a model returns; None where it has no language-model head."""
    if model.head is None:
        return None
    return output.logits if hasattr(output, "logits") else output[0]


def token_losses(
    model: Model, input_ids: Int[Tensor, "b t"], captured: Captured, seeds: Sequence[int]
) -> Float[Tensor, "b t"] | None:
    """Cross entropy in nats per token, in float32; NaN where it is undefined, None where the model has no head for it.

    Causal models: loss of the next token, at the position that predicts it (the last position predicts nothing).
    Masked models: a second pass in which 15 % of the tokens that are not special (drawn by each window's seed) are
    replaced by the mask token; the loss is defined at these alone.
    """
    if captured.logits is None:
        return None
    if model.head == "causal":
        targets = input_ids.to(captured.logits.device)
        losses = torch.full(targets.shape, torch.nan, device=targets.device)
        following = targets.roll(-1, 1)
        if captured.logits.is_cuda:
            # All at once, for a launch costs more than a window; what the last position seems to predict is taken out.
            losses = _cross_entropy(captured.logits.flatten(0, 1), following.flatten()).view(targets.shape)
            losses[:, -1] = torch.nan
            return losses
        for row, target, loss in zip(captured.logits, following, losses, strict=True):
            loss[:-1] = _cross_entropy(row[:-1], target[:-1])
        return losses
    mask_token = getattr(model.tokenizer, "mask_token_id", None)
    if mask_token is None:
        return None
    masked = draw_masked(input_ids, tuple(model.tokenizer.all_special_ids), seeds)
    logits = logits_of(model, run_module(model.module, input_ids.masked_fill(masked, mask_token)))
    assert logits is not None
    losses = torch.full(input_ids.shape, torch.nan, device=logits.device)
    for row, target, loss, hidden in zip(
        logits, input_ids.to(logits.device), losses, masked.to(logits.device), strict=True
    ):
        loss[hidden] = _cross_entropy(row[hidden], target[hidden])
    return losses


def draw_masked(
    input_ids: Int[Tensor, "b t"], special_ids: tuple[int, ...], seeds: Sequence[int]
) -> Bool[Tensor, "b t"]:
    """Which tokens are masked: each that is not special, with probability 0.15, by its window's seed alone."""
    length = input_ids.shape[1]
    chances = [torch.rand(length, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    drawn = torch.stack(chances).to(input_ids.device) < MASKED_SHARE
    return drawn & ~torch.isin(input_ids, input_ids.new_tensor(special_ids))


def _cross_entropy(logits: Float[Tensor, "n v"], targets: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    if logits.is_cuda and has_triton():
        from anisoscope.kernels.fused import lose_tokens

        return lose_tokens(logits, targets)
    # In chunks: a float32 copy of all logits is often larger than the model.
    pieces = zip(logits.split(_CHUNK), targets.split(_CHUNK), strict=True)
    return torch.cat([cross_entropy(part.float(), target, reduction="none") for part, target in pieces])
