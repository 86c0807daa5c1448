"""One forward pass, watched: how any module is run, and what each of its submodules took and returned."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from anisoscope.errors import LayoutError

PROBE_SEED = 0
PROBE_SHAPE = (2, 8)


@dataclass(kw_only=True)
class Call:
    """One call of one submodule during the probe; states are copies made at that moment."""

    path: str
    entered: int
    """How many calls began before it."""
    given: Tensor | None
    returned: Tensor | None = None
    original: Tensor | None = None
    """The returned tensor itself: it differs from the copy if it was edited later."""

    @property
    def keeps_shape(self) -> bool:
        """Whether it took and returned a state, and both have one shape."""
        return self.given is not None and self.returned is not None and self.given.shape == self.returned.shape


@dataclass(kw_only=True)
class Trace:
    """Every call of every submodule in one forward pass, in the order in which they began."""

    calls: list[Call] = field(default_factory=list)

    def of(self, paths: Iterable[str]) -> list[Call]:
        """The calls of these submodules."""
        wanted = set(paths)
        return [call for call in self.calls if call.path in wanted]


def state_in(value: Any, shape: tuple[int, ...]) -> Tensor | None:
    """The state in what a block takes or returns: the first floating tensor whose leading axes are `shape`.

    Blocks return a tensor, a tuple, a list or a mapping (ModelOutput).
    """
    if isinstance(value, Tensor):
        fits = value.ndim == 3 and tuple(value.shape[:2]) == tuple(shape) and value.is_floating_point()
        return value if fits else None
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if not isinstance(value, tuple | list):
        return None
    # Nested tuples are caches and rotary tables, never the state.
    found = (state_in(item, shape) for item in value if isinstance(item, Tensor))
    return next((state for state in found if state is not None), None)


def state_given(args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: tuple[int, ...]) -> Tensor | None:
    """The state a block was called with, by position or by keyword."""
    state = state_in(args, shape)
    return state if state is not None else state_in(kwargs, shape)


def run_module(module: nn.Module, input_ids: Int[Tensor, "b t"], *, gradients: bool = False) -> Any:
    """One forward pass without cache or padding, by default without gradients; the input moves to the module's device.

    Encoder-decoders read the same window twice: in the encoder, and shifted right by one in the decoder.
    """
    ids = input_ids.to(_device_of(module))
    accepted = inspect.signature(module.forward).parameters
    with torch.set_grad_enabled(gradients), evaluating(module):
        if "input_ids" not in accepted:
            return module(ids)
        # No attention mask: windows have no padding, and looking through one of ones would wait for the GPU each time.
        offered: dict[str, Any] = {"use_cache": False, "return_dict": True}
        if is_encoder_decoder(module):
            config: Any = module.config
            starts = (getattr(config, f"{name}_token_id", None) for name in ("decoder_start", "bos", "pad"))
            start = next((token for token in starts if isinstance(token, int)), 0)
            offered["decoder_input_ids"] = torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)
        return module(input_ids=ids, **{name: value for name, value in offered.items() if name in accepted})


def is_encoder_decoder(module: nn.Module) -> bool:
    """Whether its config says so and it takes a second input: a T5 encoder on its own is just an encoder."""
    declared = bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))
    return declared and "decoder_input_ids" in inspect.signature(module.forward).parameters


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, each submodule's own mode again outside."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _device_of(module: nn.Module) -> torch.device:
    # Offloaded weights are on `meta`; accelerate's own hooks then move the input on.
    devices = (weight.device for weight in module.parameters() if weight.device.type != "meta")
    return next(devices, torch.device("cpu"))


def make_probe(module: nn.Module, tokenizer: Any = None) -> Int[Tensor, "b t"]:
    """Two different windows of eight seeded random tokens, none of them special as far as is known."""
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes = [getattr(text, "vocab_size", None), len(tokenizer) if hasattr(tokenizer, "__len__") else None]
    embedded = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    size = min((size for size in sizes if size), default=max(embedded, default=PROBE_SHAPE[1]))
    declared = config.to_dict() if hasattr(config, "to_dict") else {}
    special = {
        declared[key] for key in declared if key.endswith(("token_id", "token_index")) and declared[key] in range(size)
    }
    special |= set(getattr(tokenizer, "all_special_ids", ()))
    usable = torch.tensor([token for token in range(size) if token not in special] or list(range(size)))
    generator = torch.Generator().manual_seed(PROBE_SEED)
    return usable[torch.randint(len(usable), PROBE_SHAPE, generator=generator)]


def trace_module(module: nn.Module, probe_ids: Int[Tensor, "b t"]) -> Trace:
    """Run the probe with a hook on every submodule."""
    trace, open_calls, handles = Trace(), [], []
    shape = tuple(probe_ids.shape)

    def enter(path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = Call(path=path, entered=len(trace.calls), given=copy_of(state_given(args, kwargs, shape)))
        trace.calls.append(call)
        open_calls.append(call)

    def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        call = open_calls.pop()
        call.original = state_in(output, shape)
        call.returned = copy_of(call.original)

    try:
        for path, part in module.named_modules():
            if path:
                handles.append(part.register_forward_pre_hook(partial(enter, path), with_kwargs=True))
                handles.append(part.register_forward_hook(leave))
        run_module(module, probe_ids)
    except Exception as error:
        raise LayoutError(
            f"{type(module).__name__} could not run on a probe of {shape[0]} x {shape[1]} token ids: "
            f"{type(error).__name__}: {error}. anisoscope measures models that read token ids."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return trace


def copy_of(state: Tensor | None) -> Tensor | None:
    """A copy in main memory that nothing else can reach."""
    return None if state is None else state.detach().to("cpu", copy=True)
