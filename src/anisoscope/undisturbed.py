"""A training that is looked at goes on as if nobody had looked: what is kept aside while a model is measured."""

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Whatever happens inside, outside it has left no trace, even where it raises.

    Kept and put back: random states (torch on every device, numpy, Python), the mode of every submodule, gradients and
    whether they are wanted, buffers and hooks. Switched off inside: autocast, compiled code, gradients.
    """
    with ExitStack() as after:
        after.enter_context(same_chance())
        for keep in (_modes, _gradients, _buffers, _hooks, _unpatched):
            after.enter_context(keep(module))
        devices = {"cpu", *(parameter.device.type for parameter in module.parameters())}
        for device in sorted(devices - {"meta"}):
            # The numbers are those of the weights, however the training step rounds; its cache of casts is not ours.
            after.enter_context(torch.autocast(device, enabled=False))
        if "torch._dynamo" in sys.modules:
            # Hooks added after a compiled call never fire in compiled code.
            after.enter_context(torch.compiler.set_stance("force_eager"))
        after.enter_context(torch.no_grad())
        yield


@contextmanager
def same_chance() -> Iterator[None]:
    """Random states of torch on every device, of numpy and of Python: outside as if nothing was drawn inside."""
    cpu, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        for number, state in enumerate(cuda):
            torch.cuda.set_rng_state(state, number)


@contextmanager
def _modes(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            # Only where it differs: compiled code watches these attributes.
            if part.training != training:
                part.training = training


@contextmanager
def _gradients(module: nn.Module) -> Iterator[None]:
    before = [(parameter, parameter.requires_grad, parameter.grad) for parameter in module.parameters()]
    try:
        yield
    finally:
        for parameter, wanted, gradient in before:
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)
            if parameter.grad is not gradient:
                parameter.grad = gradient


@contextmanager
def _buffers(module: nn.Module) -> Iterator[None]:
    """Some models write to their buffers in evaluation mode too: counters, running means, rotary tables."""
    before = [
        (part, name, buffer, None if buffer is None else (buffer._version, buffer.clone()))
        for part in module.modules()
        for name, buffer in part._buffers.items()
    ]
    try:
        yield
    finally:
        for part, name, buffer, copied in before:
            if part._buffers.get(name) is not buffer:
                part._buffers[name] = buffer
            if isinstance(buffer, Tensor) and copied is not None and buffer._version != copied[0]:
                buffer.copy_(copied[1])


@contextmanager
def _hooks(module: nn.Module) -> Iterator[None]:
    before = [
        (hooks, set(hooks))
        for part in module.modules()
        for hooks in map(part.__dict__.get, _HOOKS)
        if hooks is not None
    ]
    try:
        yield
    finally:
        for hooks, known in before:
            for stranger in hooks.keys() - known:
                del hooks[stranger]


@contextmanager
def _unpatched(module: nn.Module) -> Iterator[None]:
    """Accelerate lets a model's own `forward` switch autocast on; underneath is the one of the model."""
    kept: Any = module.__dict__.get("forward")
    if kept is None or "_original_forward" not in module.__dict__:
        yield
        return
    module.__dict__["forward"] = module.__dict__["_original_forward"]
    try:
        yield
    finally:
        module.__dict__["forward"] = kept


def unwrap(module: nn.Module) -> nn.Module:
    """The model inside torch.compile, DistributedDataParallel and DataParallel."""
    while True:
        if isinstance(inner := getattr(module, "_orig_mod", None), nn.Module) or (
            isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
            and isinstance(inner := module.module, nn.Module)
        ):
            module = inner
        else:
            return module


def why_unreadable(module: nn.Module) -> str | None:
    """Why this process does not hold the whole weights, or None where it does."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from torch.distributed.fsdp import FullyShardedDataParallel

        if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
            return "its weights are sharded by FSDP"
    for parameter in module.parameters():
        if hasattr(parameter, "placements"):
            return "its weights are sharded (FSDP2 or tensor parallel)"
        if hasattr(parameter, "ds_id"):
            return "its weights are sharded by DeepSpeed"
        if parameter.is_meta:
            return "some of its weights are offloaded"
    return None


def updates_of(module: nn.Module) -> int:
    """A number that grows with every change of the weights in place."""
    return sum(parameter._version for parameter in module.parameters() if parameter.requires_grad)


def fingerprint(module: nn.Module) -> str:
    """A few weights of a few parameters: cheap, and different for different trainings."""
    digest = hashlib.sha256()
    parameters = list(module.parameters())
    for parameter in parameters[:: max(1, len(parameters) // 8)]:
        some = parameter.detach().flatten()[:256].float().cpu().numpy()
        digest.update(some.tobytes())
    return digest.hexdigest()[:16]
