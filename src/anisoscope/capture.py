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
from anisoscope.taps import widen
from anisoscope.trace import run_module, state_given, state_in

MASKED_SHARE = 0.15
"""Share of the tokens that are masked for a masked language model's loss, as in BERT's training."""

_STAGES = FINAL_NORM_SITES[:2]
# Positions whose logits are in float32 at one time: at a vocabulary of 256k, a quarter of a gigabyte.
_CHUNK = 256
# Bytes that the float32 logits of one pass may take before they are computed in chunks, on a CPU and elsewhere.
_LOGITS_BYTES = (2**29, 2**32)
# The graph of a backward pass holds about as many copies of the logits.
_GRAPH_COPIES = 4
# Bytes of the float32 logits of one chunk.
_CHUNK_BYTES = 2**27


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """What a forward pass predicts: logits, or the states before a large head, whose logits are computed in chunks."""

    rows: Tensor
    """Logits (b, t, v); where `head` is given, what the head reads (b, t, d)."""
    head: nn.Linear | None = None

    def losses(self, positions: Bool[Tensor, "b t"], targets: Int[Tensor, "b t"]) -> Float[Tensor, " n"]:
        """Cross entropy in nats at the chosen positions, in float32 or wider; gradients flow to `rows`."""
        rows, targets = self.rows[positions], targets[positions]
        if self.head is not None:
            return chunked_cross_entropy(rows, targets, self.head)
        return cross_entropy(widen(rows), targets, reduction="none")


def chunked_cross_entropy(
    states: Float[Tensor, "n d"], targets: Int[Tensor, " n"], head: nn.Linear
) -> Float[Tensor, " n"]:
    """Cross entropy of head(states), with the logits of one chunk of rows in memory at a time, backward included."""
    return _ChunkedCrossEntropy.apply(states, targets, head)  # pyright: ignore[reportReturnType]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The gradient of each row's loss is computed with the loss: the backward pass only scales it."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, targets: Tensor, head: nn.Linear) -> Tensor:
        size = max(1, _CHUNK_BYTES // (4 * head.out_features))
        differentiable = ctx.needs_input_grad[0]
        losses, gradients = [], []
        for part, target in zip(states.split(size), targets.split(size), strict=True):
            with torch.set_grad_enabled(differentiable):
                part = part.detach().requires_grad_(differentiable)
                loss = cross_entropy(widen(head(part)), target, reduction="none")
                if differentiable:
                    gradients.append(torch.autograd.grad(loss.sum(), part)[0])
            losses.append(loss.detach())
        if differentiable:
            ctx.save_for_backward(torch.cat(gradients))
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor, None, None]:
        (gradients,) = ctx.saved_tensors
        return gradients * upstream[0][:, None].to(gradients.dtype), None, None


def predict(
    model: Model, input_ids: Int[Tensor, "b t"], *, gradients: bool = False, whole: bool = False
) -> Predictions | None:
    """Run the model once; None where it has no language-model head. `whole` asks for logits whatever their size.

    Where the logits would be large and the head is proven to be a plain linear layer (`Model.plain_head`), the head
    is run on no position at all, and what it was given is returned with it.
    """
    too_large = input_ids.numel() > _positions_at_once(model, gradients=gradients)
    if model.plain_head is None or whole or not too_large:
        logits = logits_of(model, run_module(model.module, input_ids, gradients=gradients))
        return None if logits is None else Predictions(rows=logits)
    head = model.module.get_submodule(model.plain_head)
    assert isinstance(head, nn.Linear)
    given: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        given.append(args[0])
        return (args[0][:, :0],)

    handle = head.register_forward_pre_hook(keep)
    try:
        run_module(model.module, input_ids, gradients=gradients)
    finally:
        handle.remove()
    return None if model.head is None else Predictions(rows=given[-1], head=head)


def windows_per_pass(model: Model, length: int, tokens: int, *, gradients: bool = False) -> int:
    """Windows in a pass of about `tokens` tokens: fewer where the logits are large and cannot come in chunks."""
    if model.plain_head is None:
        tokens = min(tokens, _positions_at_once(model, gradients=gradients))
    return max(1, tokens // length)


def _positions_at_once(model: Model, *, gradients: bool) -> int:
    """Positions whose logits fit into what one pass may hold."""
    on_cpu = all(parameter.device.type in ("cpu", "meta") for parameter in model.module.parameters())
    most = _LOGITS_BYTES[0 if on_cpu else 1] // (_GRAPH_COPIES if gradients else 1)
    return most // (4 * max(1, model.logits_width))


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What one forward pass showed."""

    states: dict[Site, Float[Tensor, "b t _d"]]
    predictions: Predictions | None
    """None where the model has no language-model head."""

    @property
    def logits(self) -> Float[Tensor, "b t v"] | None:
        """All logits; those of a large head are computed here."""
        if self.predictions is None or self.predictions.head is None:
            return None if self.predictions is None else self.predictions.rows
        with torch.no_grad():
            return self.predictions.head(self.predictions.rows)


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
        predictions = predict(model, input_ids)
    finally:
        for handle in handles:
            handle.remove()
    missing = [site.name for site in wanted if site not in seen]
    if missing:
        raise LayoutError(f"{model.name}: no state was seen at {', '.join(missing)}")
    return Captured(states={site: states[site] for site in wanted if site in states}, predictions=predictions)


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
    found = captured.predictions
    if found is None:
        return None
    if model.head == "causal":
        targets = input_ids.to(found.rows.device).roll(-1, 1)
        if found.head is None and found.rows.is_cuda:
            # All at once, for a launch costs more than a window; what the last position seems to predict is taken out.
            losses = _cross_entropy(found.rows.flatten(0, 1), targets.flatten()).view(targets.shape)
            losses[:, -1] = torch.nan
            return losses
        predicting = torch.ones_like(targets, dtype=torch.bool)
        predicting[:, -1] = False
    else:
        mask_token = getattr(model.tokenizer, "mask_token_id", None)
        if mask_token is None:
            return None
        masked = draw_masked(input_ids, tuple(model.tokenizer.all_special_ids), seeds)
        found = predict(model, input_ids.masked_fill(masked, mask_token))
        assert found is not None
        targets, predicting = input_ids.to(found.rows.device), masked.to(found.rows.device)
    losses = torch.full(targets.shape, torch.nan, device=targets.device)
    if found.head is not None:
        with torch.no_grad():
            losses[predicting] = found.losses(predicting, targets).to(losses.dtype)
        return losses
    for row, target, loss, mask in zip(found.rows, targets, losses, predicting, strict=True):
        # By a slice where it can be: a mask copies the logits.
        where: Any = slice(-1) if model.head == "causal" else mask
        loss[where] = _cross_entropy(row[where], target[where])
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
