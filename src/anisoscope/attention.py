"""Queries, keys and attention weights of each block: a few windows, one forward pass each.

Projections are found by name and proven as far as that goes: query and key must read the same state (those of cross
attention do not), and their widths must be what the config's heads say. How a fused projection lies in memory cannot be
seen from outside; the families in _STACKED and _GROUPED are known, and tests/test_drift.py proves them against the
models' own attention weights. Where nothing is found there is no number, and a sentence that says why.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anisoscope.estimates import Evaluated, judge, summarize
from anisoscope.metrics import Metric, all_metrics
from anisoscope.metrics.drift import AttentionRows, Heads
from anisoscope.models import Model
from anisoscope.records import Estimate, Site
from anisoscope.trace import run_module, state_given, state_in

VIEWS = ("heads", "attention")
# Each window is a batch; a few tell mean and spread, for passes that nothing else needs.
WINDOWS = 8

_QUERIES = ("q_proj", "query", "query_proj", "q", "q_lin")
_KEYS = ("k_proj", "key", "key_proj", "k", "k_lin")
_FUSED = ("c_attn", "query_key_value", "qkv_proj", "Wqkv")
# All queries, all keys, all values.
_STACKED = ("gpt2", "phi3", "mpt", "modernbert")
# Group by group: the queries that share a key, the key, the value. GPT-NeoX and BLOOM have a group for each head.
_GROUPED = ("gpt_neox", "bloom", "falcon")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a block's self-attention showed on one window, or the sentence that says why it showed nothing."""

    heads: Heads | str
    attention: AttentionRows | str


@dataclass(kw_only=True)
class _Notes:
    """What hooks wrote down while one block ran: (given, returned) of the projections, weights and mask."""

    projected: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=lambda: defaultdict(list))
    weights: Tensor | None = None
    mask: Any = None


def attention_records(
    model: Model, token_ids: Int[Tensor, "w t"], sites: Iterable[Site], names: Collection[str]
) -> Iterator[tuple[Site, Metric, Estimate]]:
    """The metrics of attention among `names`, at those of the sites that are blocks, over the first windows."""
    asked = [metric for metric in all_metrics().values() if metric.needs in VIEWS and metric.name in names]
    blocks = [site for site in sites if site.name.startswith("block.")]
    if not asked or not blocks:
        return
    results: dict[tuple[Site, Metric], list[Evaluated]] = defaultdict(list)
    missing, dims = dict[tuple[Site, Metric], str](), dict[Site, int]()
    points = token_ids.shape[1]

    def measure(site: Site, seen: Seen) -> None:
        dims[site] = seen.heads.queries.shape[-1] if isinstance(seen.heads, Heads) else 0
        for metric in asked:
            view = getattr(seen, metric.needs)
            if isinstance(view, str):
                missing[site, metric] = view
            else:
                results[site, metric].append(judge(metric, metric(view), points, 0, dims[site], {}))

    with ExitStack() as stack:
        if any(metric.needs == "attention" for metric in asked):
            stack.enter_context(eager_attention(model.module))
        for window in token_ids[:WINDOWS]:
            look_at_attention(model, window[None], blocks, measure)
    for site, metric in product(blocks, asked):
        if (site, metric) in missing:
            note = missing[site, metric]
            yield site, metric, Estimate.from_values((), null=math.nan, points=0, dropped=0, dim=0, note=note)
        else:
            yield site, metric, summarize(results[site, metric], metric, dims[site], {})


@contextmanager
def eager_attention(module: nn.Module) -> Iterator[None]:
    """Inside, attention is computed step by step, where the model can: other ways never make the weights."""
    before = getattr(getattr(module, "config", None), "_attn_implementation", None)
    switch: Any = getattr(module, "set_attn_implementation", None)
    if switch is None or before in (None, "eager"):
        yield
        return
    switch("eager")
    try:
        yield
    finally:
        switch(before)


def look_at_attention(
    model: Model, window: Int[Tensor, "1 t"], sites: Collection[Site], into: Callable[[Site, Seen], None]
) -> None:
    """Hand over queries, keys and attention weights of each block when it is done; weights come only when eager.

    One block at a time: the weights of all blocks together are often larger than the model.
    """
    stacks = {stack.name: stack for stack in model.layout.stacks}
    # A shared layer is called once per block: its n-th call is its n-th site.
    wanted: dict[tuple[str, int], Site] = {}
    for site in sites:
        blocks, k = stacks[site.stack].blocks, int(site.name.partition(".")[2])
        wanted[blocks[k], blocks[:k].count(blocks[k])] = site
    calls, shape, config = Counter[str](), tuple(window.shape), getattr(model.module, "config", None)
    notes = _Notes()

    def enter(*_: Any) -> None:
        nonlocal notes
        notes = _Notes()

    def leave(path: str, *_: Any) -> None:
        site = wanted.get((path, calls[path]))
        calls[path] += 1
        if site is not None:
            causal = model.kind == "decoder" or site.stack == "decoder"
            into(site, Seen(heads=_heads(notes, config, site.stack), attention=_rows(notes, causal=causal)))

    def project(name: str, _: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        given, returned = state_given(args, kwargs, shape), state_in(output, shape)
        if given is not None and returned is not None:
            # Copies: positions may be worked in where the projection lies.
            notes.projected[name].append((given.clone(), returned.clone()))

    def attend(_: nn.Module, __: Any, kwargs: dict[str, Any], output: Any) -> None:
        # Self-attention comes first: the weights of cross attention are not looked at.
        if notes.weights is None and isinstance(output, tuple):
            found = (item for item in output if isinstance(item, Tensor) and _are_weights(item, shape[1]))
            notes.weights, notes.mask = next(found, None), kwargs.get("attention_mask")

    with ExitStack() as stack:
        for path in dict.fromkeys(path for path, _ in wanted):
            block = model.module.get_submodule(path)
            handles: list[Any] = [block.register_forward_pre_hook(enter)]
            for inner, part in block.named_modules():
                name = inner.rpartition(".")[2]
                if name in (*_QUERIES, *_KEYS, *_FUSED):
                    handles.append(part.register_forward_hook(partial(project, name), with_kwargs=True))
                elif inner and next(part.children(), None) is not None:
                    handles.append(part.register_forward_hook(attend, with_kwargs=True))
            handles.append(block.register_forward_hook(partial(leave, path)))
            for handle in handles:
                stack.callback(handle.remove)
        run_module(model.module, window)


def _are_weights(item: Tensor, length: int) -> bool:
    """Whether these are distributions over positions, one a row: position biases have the same shape."""
    if item.ndim != 4 or tuple(item.shape[-2:]) != (length, length) or not item.is_floating_point():
        return False
    sums = item.sum(-1, dtype=torch.float32)
    return bool((item >= 0).all() and (sums - 1).abs().max() < 0.02)


def _rows(seen: _Notes, *, causal: bool) -> AttentionRows | str:
    if seen.weights is None:
        return "no attention weights that add up to 1 were seen: none are made, or not by eager attention"
    weights = seen.weights[0].double().cpu()
    everything = torch.ones_like(weights[0], dtype=torch.bool)
    candidates = [everything.tril() if causal else everything]
    mask = seen.mask
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-2:] == everything.shape:
        # What the model itself lets through: windows of local attention are in it. But some say True for hidden.
        mask = mask[0, 0].cpu()
        candidates.insert(0, mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)
    for allowed in candidates:
        if not weights[:, ~allowed].any():
            return AttentionRows(weights=weights, visible=allowed.sum(-1))
    return "which positions the attention may look at could not be found out"


def _heads(seen: _Notes, config: Any, stack: str | None) -> Heads | str:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, f"{stack}_attention_heads", None) or getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        return "the config does not say how many attention heads there are"
    stated = getattr(text, "head_dim", None)
    fused = [pair for name in _FUSED for pair in seen.projected.get(name, ())]
    pairs = [
        (queries, keys)
        for (read, queries), (also, keys) in product(
            *([one for name in names for one in seen.projected.get(name, ())] for names in (_QUERIES, _KEYS))
        )
        if torch.equal(read, also)
    ]
    if len(pairs) + len(fused) != 1:
        return f"wanted one pair of query and key projections in the block; found {len(pairs) + len(fused)}"
    if fused:
        kind = getattr(text, "model_type", None)
        if kind not in (*_STACKED, *_GROUPED):
            return f"how the fused projection of {kind} holds queries and keys is not known"
        return _split(fused[0][1], heads, stated or text.hidden_size // heads, grouped=kind in _GROUPED)
    queries, keys = pairs[0]
    size = stated or queries.shape[-1] // heads
    if queries.shape[-1] != heads * size or keys.shape[-1] % size or heads % max(1, keys.shape[-1] // size):
        return f"queries {queries.shape[-1]} and keys {keys.shape[-1]} wide do not fit {heads} heads of {size}"
    return Heads(queries=_by_head(queries, size), keys=_by_head(keys, size))


def _split(fused: Float[Tensor, "1 t w"], heads: int, size: int, *, grouped: bool) -> Heads | str:
    """Queries and keys out of h heads of queries, g of keys and g of values, each `size` wide."""
    groups = (fused.shape[-1] // size - heads) // 2
    if groups < 1 or heads % groups or fused.shape[-1] != (heads + 2 * groups) * size:
        return f"a fused projection {fused.shape[-1]} wide does not fit {heads} heads of {size}"
    if grouped:
        parts = fused.unflatten(-1, (groups, heads // groups + 2, size))
        queries, keys = parts[..., :-2, :].flatten(-3), parts[..., -2, :].flatten(-2)
    else:
        queries, keys, _ = fused.split([heads * size, groups * size, groups * size], -1)
    return Heads(queries=_by_head(queries, size), keys=_by_head(keys, size))


def _by_head(vectors: Float[Tensor, "1 t w"], size: int) -> Float[Tensor, "h t e"]:
    return vectors[0].double().cpu().unflatten(-1, (-1, size)).transpose(0, 1)
