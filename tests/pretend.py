"""A GPU that is none: tensors that lie on the CPU and are treated as if they did not.

Under `Pretend` a tensor that was sent to DEVICE says that it is there. Whatever a GPU would refuse is refused: products
with tensors that were not sent, `numpy()`, draws from a generator of the CPU. Whatever makes a CPU wait for a GPU, or
copies to it, is counted by where it was asked for.
"""

import collections
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

# Not the first: results kept by device must not meet those of a real one.
DEVICE = torch.device("cuda:7")
# What may take tensors from both places.
MIXING = {"to", "__getitem__", "__setitem__"}
# What no tensor of the CPU goes with, not even a single number.
STRICT = {"cat", "stack", "matmul", "__matmul__", "bmm", "baddbmm"}
WAITING = {
    "__bool__", "__float__", "__int__", "__index__", "item", "tolist", "cpu", "nonzero", "unique", "equal", "bincount"
}  # fmt: skip


class There(Tensor):
    """A tensor that says it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore


class Pretend(TorchFunctionMode):
    """Run what is inside as if DEVICE were a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[str] = collections.Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        every = tree_flatten((args, kwargs))[0]
        there = any(isinstance(one, There) for one in every)
        if name == "__get__" and there:
            attribute = getattr(func, "__self__", None)
            if attribute is Tensor.device:
                return DEVICE
            if attribute is Tensor.is_cuda:
                return True
            if attribute is Tensor.is_cpu:
                return False
        plain = [one for one in every if isinstance(one, Tensor) and not isinstance(one, There)]
        if there and name not in MIXING and any(one.dim() > 0 or name in STRICT for one in plain):
            raise RuntimeError(f"{name}: a tensor of the CPU met one of the GPU")
        if name in ("__getitem__", "__setitem__") and not isinstance(args[0], There):
            if any(isinstance(one, There) for one in tree_flatten(args[1])[0]):
                raise RuntimeError(f"{name}: an index of the GPU into a tensor of the CPU")
            there = False
        wanted = _device_of(name, args, kwargs)
        ends_there = there if wanted is None else wanted
        if name == "numpy" and there:
            raise TypeError("numpy() of a tensor on the GPU")
        if ends_there and kwargs.get("generator") is not None:
            raise RuntimeError(f"{name}: a generator of the CPU cannot draw on the GPU")
        self._count(name, args, kwargs, there, ends_there)
        args, kwargs = tree_map(_here, (args, kwargs))
        found = func(*args, **kwargs)
        if name == "__iter__":
            found = list(found)
        if ends_there:
            found = tree_map(lambda one: one.as_subclass(There) if isinstance(one, Tensor) else one, found)
        return iter(found) if name == "__iter__" else found

    def _count(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], there: bool, ends_there: bool) -> None:
        waits = there and (name in WAITING or not ends_there)
        if name == "__getitem__" and there:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            # A mask has to be counted, and a list of numbers or an index of the CPU to be copied.
            waits = any(
                isinstance(one, list) or (isinstance(one, Tensor) and one.dim() and not isinstance(one, There))
                or (isinstance(one, There) and one.dtype == torch.bool)
                for one in indices
            )  # fmt: skip
        if name == "repeat_interleave" and there:
            waits = "output_size" not in kwargs
        if ends_there and not there and name in ("to", "tensor", "as_tensor", "cuda"):
            waits = True
        if waits:
            frames = [one for one in traceback.extract_stack() if f"{os.sep}anisoscope{os.sep}" in one.filename]
            self.waits[" < ".join(f"{os.path.basename(one.filename)}:{one.lineno}" for one in frames[:-4:-1])] += 1


def _here(one: Any) -> Any:
    if isinstance(one, There):
        return one.as_subclass(Tensor)
    return torch.device("cpu") if isinstance(one, torch.device) or (isinstance(one, str) and one == "cuda") else one


def _device_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
    """Whether a device is asked for, and then whether it is the GPU."""
    if name in ("cpu", "cuda"):
        return name == "cuda"
    if name == "to":
        for one in (*args[1:], *kwargs.values()):
            if isinstance(one, Tensor):
                return isinstance(one, There)
            if isinstance(one, (torch.device, str)):
                return torch.device(one).type == "cuda"
        return None
    asked = kwargs.get("device")
    return None if asked is None else torch.device(asked).type == "cuda"
