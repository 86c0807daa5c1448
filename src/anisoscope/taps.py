"""A forward and backward pass that shows gradients anywhere inside a module, and leaves no trace in it."""

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import checkpoint

from anisoscope.errors import LayoutError, ModelError, SpecError
from anisoscope.trace import evaluating, state_given, state_in
from anisoscope.undisturbed import undisturbed, why_unreadable


class Tap(NamedTuple):
    """One call of one module."""

    given: Tensor
    """A copy of the first tensor it was called with."""
    source: Tensor
    """What it returned (or was given, where tapped before): the tensor whose gradient can be asked for."""


Key = tuple[str, bool, int]
"""Path of a module, whether before the call, number of the call."""


class Seen(dict[Key, Tap]):
    """What the calls of a forward pass showed."""

    complete = False
    """To be set after it: a checkpointed module is called again in the backward pass."""


def run_apart(module: nn.Module, run: Callable[[], None], *, upcast: bool) -> None:
    """Call `run` while the module's weights are constants, so that no backward pass in it reaches a parameter.

    Dropout, autocast and compiled code are off; flags, mode, random state and `grad` are afterwards as they were.
    `upcast` makes constants of bfloat16 and float16 float32.
    """
    if (why := why_unreadable(module)) is not None:
        raise ModelError(f"gradients need the whole model, and {why}")
    held = [*module.named_parameters(), *module.named_buffers()]
    floats = {f"module.{name}": value.detach() for name, value in held if value.is_floating_point()}
    constants = {name: widen(value) if upcast else value for name, value in floats.items()}
    with _ready(module):
        # As the forward of a module around it: checkpointed activations are made again in the backward pass.
        functional_call(_Around(module), constants, (run,))


def widen(value: Tensor) -> Tensor:
    """The same numbers in float32, where they have fewer bits."""
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


class _Around(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[], None]) -> None:
        run()


class _Plainly:
    """Stands in for checkpointing of the reentrant kind, which hides its states from hooks and refuses `grad`."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args)


@contextmanager
def _ready(module: nn.Module) -> Iterator[None]:
    """As in a forward pass of evaluation, but with gradients, and for the backward pass as well."""
    kind = checkpoint.CheckpointFunction
    with undisturbed(module), torch.enable_grad(), evaluating(module):
        setattr(checkpoint, "CheckpointFunction", _Plainly)  # noqa: B010
        try:
            yield
        finally:
            setattr(checkpoint, "CheckpointFunction", kind)  # noqa: B010


@contextmanager
def tapped(module: nn.Module, shape: tuple[int, ...], places: Iterable[tuple[str, bool]]) -> Iterator[Seen]:
    """Hooks on modules, by path and whether before the call; what they see of each call, in the order of calls."""
    seen = Seen()
    calls = Counter[tuple[str, bool]]()

    def tap(place: tuple[str, bool], _: nn.Module, args: Any, kwargs: dict[str, Any], output: Any = None) -> Any:
        number, calls[place] = calls[place], calls[place] + 1
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        state = state_given(args, kwargs, shape) if place[1] else output
        state = state if isinstance(state, Tensor) else state_in(state, shape)
        if state is None or given is None:
            return None
        if not torch.is_grad_enabled():
            raise LayoutError(f"{place[0]} runs without gradients: switch its checkpointing off")
        source = state if state.requires_grad else state.detach().requires_grad_()
        if not seen.complete:
            seen[(*place, number)] = Tap(given.detach().clone(), source)
        # The model goes on with a copy, so that no edit in place reaches the source.
        copy = source.clone()
        return _swap((args, kwargs), state, copy) if place[1] else _swap(output, state, copy)

    with ExitStack() as handles:
        for path, before in places:
            part = module.get_submodule(path)
            register = part.register_forward_pre_hook if before else part.register_forward_hook
            handles.callback(register(partial(tap, (path, before)), with_kwargs=True).remove)
        yield seen


def _swap(value: Any, old: Tensor, new: Tensor) -> Any:
    """The same value with another tensor in it."""
    if value is old:
        return new
    if isinstance(value, dict):
        for key in value:
            value[key] = _swap(value[key], old, new)
        return value
    if type(value) in (tuple, list):
        return type(value)(_swap(item, old, new) for item in value)
    if isinstance(value, tuple):
        return type(value)(*(_swap(item, old, new) for item in value))
    return value


def find_linears(module: nn.Module, patterns: Iterable[str]) -> tuple[str, ...]:
    """Paths of the linear modules (torch's, and the Conv1D of transformers) that any pattern matches."""
    from transformers.pytorch_utils import Conv1D

    known = [path for path, part in module.named_modules() if isinstance(part, nn.Linear | Conv1D)]
    patterns = tuple(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in known):
            near = difflib.get_close_matches(pattern, known, n=3) or known[:3]
            raise SpecError(f"no linear module matches {pattern!r}; there are {len(known)}, such as {', '.join(near)}")
    return tuple(path for path in known if any(fnmatchcase(path, pattern) for pattern in patterns))


def path_of(module: nn.Module, getter: str) -> str | None:
    """The path of the module's input or output embedding, where it says which that is."""
    try:
        found = getattr(module, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return next((path for path, part in module.named_modules() if part is found), None)
