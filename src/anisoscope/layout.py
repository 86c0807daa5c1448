"""Where the states of a module are: its blocks in call order and its final norm, found by running it.

A probe of a few tokens goes through the module with a hook on every submodule. Blocks are a list whose members pass
states on to one another; the final norm is what reads exactly the last block's output and forgets its scale. Names
decide nothing: `final_layer_norm` is the last norm of GPT-NeoX and a norm inside every block of OPT.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from anisoscope.errors import LayoutError, SpecError, StatesError
from anisoscope.records import FINAL_NORM_SITES, Site
from anisoscope.trace import Call, Trace, copy_of, is_encoder_decoder, trace_module

FAMILIES = {
    "encoder": (
        *("BERT", "RoBERTa", "XLM-R", "ALBERT", "DistilBERT", "ELECTRA", "DeBERTa", "DeBERTa-v2", "MPNet"),
        *("ModernBERT", "EuroBERT"),
    ),
    "decoder": (
        *("GPT-2", "GPT-Neo", "GPT-J", "GPT-NeoX", "GPT-NeoX sequential", "OPT", "OPT-350m", "Bloom", "Falcon-7b"),
        *("Falcon-40b", "Falcon-rw", "MPT", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3-MoE", "Gemma"),
        *("Gemma-2", "Gemma-3", "Phi", "Phi-3", "StableLM", "StarCoder2", "OLMo", "OLMo-2", "Cohere", "Granite"),
        *("SmolLM3", "Nemotron", "Mamba", "Mamba-2"),
    ),
    "encoder-decoder": ("T5", "mT5", "BART", "mBART", "Pegasus"),
}
"""Families whose sites are tested, by kind. It decides nothing: others work where the probe finds their blocks."""

# Families whose blocks are no list of distinct modules: model_type -> the end of their blocks' paths.
EXCEPTIONS = {
    "albert": "encoder.albert_layer_groups.*.albert_layers.*",
}

NO_NORM = "none"
"""What is passed by hand for a stack without a final norm."""

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One chain of blocks."""

    name: str | None
    """`encoder` or `decoder` in encoder-decoder models, else None."""
    blocks: tuple[str, ...]
    """Module paths in call order; a layer that is shared stands as often as it is called."""
    final_norm: str | None
    width: int | None = None
    """Coordinates of what the last block returns; unknown where a layout was written by hand."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The stacks of a model, in call order."""

    stacks: tuple[Stack, ...]


def _same(made: Tensor | None, read: Tensor | None) -> bool:
    # Exact; but a norm may be handed a state already cast to its own dtype, and states that are not finite are told
    # apart from a wrong layout later.
    if made is None or read is None:
        return False
    return torch.equal(made.to(read.dtype).nan_to_num(), read.nan_to_num())


def discover_layout(
    module: nn.Module, probe_ids: Int[Tensor, "b t"], *, blocks: tuple[str, ...] = (), final_norm: tuple[str, ...] = ()
) -> Layout:
    """The layout that the probe shows, or the one given by hand; `verify_layout` is still to prove it.

    `blocks`: one path of a list, or one glob over block paths, per stack. `final_norm`: one path per stack, or "none".
    """
    trace = trace_module(module, probe_ids)
    config = getattr(module, "config", None)
    names = ("encoder", "decoder") if is_encoder_decoder(module) else (None,)
    exception = EXCEPTIONS.get(getattr(config, "model_type", ""))
    if blocks:
        chains = [_expand(module, trace, path) for path in blocks]
    elif exception:
        chains = [_expand(module, trace, exception)]
    else:
        chains = _choose(module, trace, len(names))
    if len(chains) != len(names) or not all(chains):
        raise _layout_error(module, trace, f"{len(names)} list(s) of blocks that hand states on to one another")
    if final_norm and len(final_norm) != len(names):
        raise SpecError(f"final_norm needs one path (or {NO_NORM!r}) per stack: {len(names)}, got {len(final_norm)}")
    given = (None if path == NO_NORM else path for path in final_norm)
    norms = tuple(given) if final_norm else tuple(_find_norm(module, trace, chain) for chain in chains)
    widths = [_width_after(trace, chain) for chain in chains]
    stacks = zip(names, chains, norms, widths, strict=True)
    return Layout(
        stacks=tuple(
            Stack(name=name, blocks=chain, final_norm=norm, width=width) for name, chain, norm, width in stacks
        )
    )


def _width_after(trace: Trace, blocks: tuple[str, ...]) -> int | None:
    states = [call.returned for call in trace.of(blocks[-1:]) if call.returned is not None]
    return states[-1].shape[-1] if states else None


def _expand(module: nn.Module, trace: Trace, path: str) -> tuple[str, ...]:
    """Block paths behind a path given by hand: the members of a list, or what a glob matches, in call order."""
    if "*" in path:
        return tuple(call.path for call in trace.calls if _ends_like(call.path, path))
    parts = dict(module.named_modules())
    if path not in parts:
        near = difflib.get_close_matches(path, parts, n=3)
        raise _layout_error(module, trace, f"a module at {path!r}" + (f" (near: {', '.join(near)})" if near else ""))
    part = parts[path]
    return _members(module, part) if isinstance(part, nn.ModuleList | nn.Sequential) else (path,)


def _ends_like(path: str, pattern: str) -> bool:
    # Name by name, since an asterisk must not reach over a dot, and from the end, since heads add a prefix.
    names, patterns = path.split("."), pattern.split(".")
    pairs = zip(names[-len(patterns) :], patterns, strict=False)
    return len(names) >= len(patterns) and all(fnmatchcase(name, one) for name, one in pairs)


def _members(module: nn.Module, parts: nn.ModuleList | nn.Sequential) -> tuple[str, ...]:
    # A module that is listed twice has one canonical path, the one its calls are recorded under.
    canonical = {part: path for path, part in module.named_modules()}
    return tuple(canonical[part] for part in parts)


def _lists(module: nn.Module) -> dict[str, tuple[str, ...]]:
    lists = {path: part for path, part in module.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential)}
    return {path: _members(module, part) for path, part in lists.items() if len(part)}


def _choose(module: nn.Module, trace: Trace, wanted: int) -> list[tuple[str, ...]]:
    """The longest chains, in call order; where the config counts blocks, only chains of that length."""
    chains = {path: members for path, members in _lists(module).items() if not _broken_link(trace, members)}
    with_weights = {
        path: members
        for path, members in chains.items()
        if all(next(module.get_submodule(member).parameters(), None) is not None for member in members)
    }
    outermost = {
        path: members
        for path, members in with_weights.items()
        if not any(path.startswith(f"{member}.") for others in with_weights.values() for member in others)
    }
    counts = _expected_counts(getattr(module, "config", None))
    fitting = [path for path in outermost if not counts or len(outermost[path]) in counts]

    def rank(path: str) -> tuple[bool, int, int]:
        part = module.get_submodule(path)
        return isinstance(part, nn.ModuleList), len(outermost[path]), sum(w.numel() for w in part.parameters())

    chosen = [outermost[path] for path in sorted(fitting, key=rank, reverse=True)[:wanted]]
    return sorted(chosen, key=lambda members: trace.of(members)[0].entered)


def _expected_counts(config: Any) -> set[int]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = (*_COUNTS, "num_decoder_layers")
    found = (getattr(source, name, None) for source in (config, text) for name in names)
    return {count for count in found if isinstance(count, int) and not isinstance(count, bool)}


def _broken_link(trace: Trace, blocks: tuple[str, ...]) -> str | None:
    """What keeps these paths from being a chain of blocks, or None."""
    calls = trace.of(blocks)
    if tuple(call.path for call in calls) != blocks:
        seen = ", ".join(call.path for call in calls) or "none"
        return f"expected the calls {', '.join(blocks)}; seen: {seen}"
    for call in calls:
        if not call.keeps_shape:
            return f"{call.path} does not take and return states of one shape (batch, position, width)"
    for before, after in pairwise(calls):
        if not _same(before.returned, after.given):
            return f"the input of {after.path} is not the output of {before.path}"
    return None


def _find_norm(module: nn.Module, trace: Trace, blocks: tuple[str, ...]) -> str | None:
    last = trace.of(blocks)[-1]
    after = (call for call in trace.calls[last.entered :] if not _inside(call.path, blocks))
    return next((call.path for call in after if not _broken_norm(module, call, last)), None)


def _broken_norm(module: nn.Module, call: Call, last: Call) -> str | None:
    """What keeps a call from being that of the final norm after `last`, or None."""
    part = module.get_submodule(call.path)
    # The heads of masked language models (dense, activation, norm) forget scale too, but are no leaves.
    if next(part.children(), None) is not None:
        return "it has submodules"
    if not call.keeps_shape or not _same(last.returned, call.given):
        return f"its input is not the output of {last.path}"
    return (
        None if _forgets_scale(part, call) else "it does not normalise: its output changes with the scale of its input"
    )


def _forgets_scale(part: nn.Module, call: Call) -> bool:
    """f(4x) = f(x) for an x so large that no epsilon matters, and f(-x) differs (else f would be constant)."""
    assert call.given is not None
    assert call.original is not None
    state = call.given.to(call.original.device)
    large = state / state.float().pow(2).mean().sqrt().clamp_min(1e-6).to(state.dtype) * 64
    try:
        with torch.no_grad():
            once, four_times, negative = (part(factor * large).float() for factor in (1, 4, -1))
    except TypeError:  # it wants more than a state
        return False
    tolerance = 1e-2 * once.abs().max()
    return bool((four_times - once).abs().max() <= tolerance < (negative - once).abs().max())


def _inside(path: str, blocks: Sequence[str]) -> bool:
    return any(path == block or path.startswith(f"{block}.") for block in blocks)


def verify_layout(module: nn.Module, layout: Layout, probe_ids: Int[Tensor, "b t"]) -> tuple[str, ...]:
    """Run the probe again and prove the layout: one sentence per fact, or a LayoutError that says what was found."""
    trace, facts = trace_module(module, probe_ids), []
    for stack in layout.stacks:
        label = f"{stack.name}: " if stack.name else ""
        broken = _broken_link(trace, stack.blocks) if stack.blocks else "no blocks"
        if broken:
            raise _layout_error(module, trace, f"{label}a chain of {len(stack.blocks)} blocks, but {broken}")
        calls = trace.of(stack.blocks)
        for call in calls:
            if call.returned is None or not call.returned.isfinite().all():
                raise StatesError(f"{call.path} returns states that are not finite: try dtype bfloat16 or float32")
        assert calls[0].given is not None
        width = calls[0].given.shape[-1]
        shared = "" if len(set(stack.blocks)) == len(calls) else f" (of {len(set(stack.blocks))} shared module(s))"
        facts.append(f"{label}{len(calls)} block calls{shared} in the expected order, {calls[0].path} first.")
        facts.append(f"{label}Each block's input is exactly the output of the one before; all states are {width} wide.")
        facts.append(label + _check_norm(module, trace, stack))
        edited = sum(not _same(copy_of(call.original), call.returned) for call in calls)
        facts.append(
            f"{label}{edited} block outputs are edited in place after they are returned: states are copied at once."
            if edited
            else f"{label}No block output is edited in place after it is returned."
        )
    return tuple(facts)


def _check_norm(module: nn.Module, trace: Trace, stack: Stack) -> str:
    if stack.final_norm is None:
        return "There is no final norm after the last block."
    last = trace.of(stack.blocks)[-1]
    calls = trace.of([stack.final_norm])
    broken = "it is inside a block" if _inside(stack.final_norm, stack.blocks) else f"it was called {len(calls)} times"
    if len(calls) == 1 and not _inside(stack.final_norm, stack.blocks):
        broken = _broken_norm(module, calls[0], last)
    if broken:
        raise _layout_error(module, trace, f"the final norm at {stack.final_norm!r}, but {broken}")
    return f"The final norm {stack.final_norm} reads exactly the output of {last.path} and forgets its scale."


def _layout_error(module: nn.Module, trace: Trace, wanted: str) -> LayoutError:
    lists = _lists(module)
    lines = [f"{type(module).__name__}: wanted {wanted}.", "Lists of modules found:"]
    for path, members in lists.items():
        kind = type(module.get_submodule(members[0])).__name__
        lines.append(f"  {path}: {len(members)} x {kind}, {len(trace.of(members))} calls")
    lines.append("Norms outside them:" if lists else "  none\nNorms found:")
    outside = (call for call in trace.calls if not any(_inside(call.path, members) for members in lists.values()))
    leaves = (call for call in outside if next(module.get_submodule(call.path).children(), None) is None)
    norms = {call.path for call in leaves if call.keeps_shape and _forgets_scale(module.get_submodule(call.path), call)}
    lines += [f"  {path}: {type(module.get_submodule(path)).__name__}" for path in sorted(norms)] or ["  none"]
    lines.append("Pass the paths by hand: blocks=(LIST,) and final_norm=(PATH,), or --blocks LIST --final-norm PATH.")
    return LayoutError("\n".join(lines))


def is_causal(module: nn.Module, layout: Layout, probe_ids: Int[Tensor, "b t"]) -> bool:
    """Whether the first half of a window is blind to its second half, in the states after the last block.

    Two windows that begin alike go through in one pass: routed experts see both in one batch, so sums round alike.
    """
    half = probe_ids.shape[1] // 2
    alike = torch.cat([probe_ids[:1, :half].expand(len(probe_ids), -1), probe_ids[:, half:]], dim=1)
    states = trace_module(module, alike).of(layout.stacks[-1].blocks[-1:])[-1].returned
    assert states is not None
    apart = (states[0].double() - states[1].double()).abs()
    tolerance = max(1e-5, torch.finfo(states.dtype).eps / 8)
    return bool(apart[:half].mean() <= tolerance * apart[half:].mean())


def sites_of(layout: Layout, *, stages: bool = False) -> tuple[Site, ...]:
    """Every site, in the order a token meets them; `stages`: also inside the final norm."""
    sites = []
    for stack in layout.stacks:
        count = len(stack.blocks)
        sites.append(Site(name="embed", stack=stack.name))
        sites += [Site(name=f"block.{k}", stack=stack.name, depth=(k + 1) / count) for k in range(count)]
        if stack.final_norm is not None:
            sites += [Site(name=name, stack=stack.name) for name in FINAL_NORM_SITES if stages or name == "final_norm"]
    return tuple(sites)


def select_sites(layout: Layout, patterns: Iterable[str], *, stages: bool = False) -> tuple[Site, ...]:
    """The sites that any pattern (`embed`, `block.*`, `block.3`) matches, in the order of `sites_of`.

    `stages` adds what leads from the last block through each final norm. Patterns reach its inside by its name alone:
    `*` is every state that the model hands on.
    """
    sites = sites_of(layout, stages=True)
    patterns = tuple(patterns)
    names = list(dict.fromkeys(site.name for site in sites))
    for pattern in patterns:
        # The default patterns name the final norm, and post-norm encoders have none.
        known = pattern == "final_norm.*" or pattern in FINAL_NORM_SITES
        if not known and not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise SpecError(f"no site matches {pattern!r}.{hint} This model has: {', '.join(names)}")
    ends = {stack.name for stack in layout.stacks if stages and stack.final_norm is not None}

    def wanted(site: Site) -> bool:
        if site.stack in ends and (site.depth == 1 or site.name in FINAL_NORM_SITES):
            return True
        inside = site.name.startswith("final_norm.")
        return any(fnmatchcase(site.name, one) for one in patterns if not inside or one.startswith("final_norm"))

    return tuple(site for site in sites if wanted(site))
