"""What training did to the rows of a matrix: gradients, steps without weight decay, observed differences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anisoscope.errors import SpecError


@dataclass(frozen=True, kw_only=True, eq=False)
class RowChanges:
    """What happened to some rows of a matrix over an interval of training; float32, or float64 where the matrix is."""

    rows: Int[Tensor, " m"]
    gradient: Float[Tensor, "m d"]
    """Sum of the gradients that the optimizer was given: unscaled, and after clipping where there is any."""
    step: Float[Tensor, "m d"]
    """Sum of the optimizer's own steps: the difference, with decoupled weight decay undone."""
    difference: Float[Tensor, "m d"]
    """The matrix at the end, less the matrix at the beginning."""
    steps: int


def undo_decay(
    before: Float[Tensor, "v d"],
    after: Float[Tensor, "v d"],
    *,
    learning_rates: Sequence[float],
    weight_decay: float,
) -> Float[Tensor, "v d"]:
    """The update between two snapshots without decoupled weight decay: after - Π (1 - ηₖλ) · before.

    `learning_rates` has one entry for each step between them. An early step of the interval has itself decayed by the
    later ones; `EmbeddingWatch`, which sees every step, adds steps up as they were made.
    """
    shrunk = 1.0
    for rate in learning_rates:
        shrunk *= 1 - rate * weight_decay
    return _exact(after) - shrunk * _exact(before)


def _exact(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


class EmbeddingWatch:
    """Reads a matrix and its gradient before each step of an optimizer, and writes nothing.

    `rows` are the token ids to watch, by default all. `decoupled` says whether the optimizer's weight decay acts on the
    weights and not through the gradient; it is known for torch's own optimizers. A step that a GradScaler skips is no
    step. It holds three float32 copies of the rows, however long the interval. Close it, or use it as a context.
    """

    def __init__(
        self,
        weight: Tensor,
        optimizer: Any,
        *,
        rows: Int[Tensor, " m"] | None = None,
        decoupled: bool | None = None,
    ) -> None:
        # Accelerate wraps the optimizer that makes the steps.
        inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        group = next((one for one in inner.param_groups if any(part is weight for part in one["params"])), None)
        if group is None:
            raise SpecError("the optimizer does not train this matrix: give the parameter itself and its optimizer")
        self.weight, self.group = weight, group
        if decoupled is None and group.get("weight_decay"):
            decoupled = _is_decoupled(inner, group)
        self.decoupled = bool(decoupled)
        self.rows = torch.arange(len(weight)) if rows is None else rows
        self.rows = self.rows.to(weight.device)
        self._begin()
        self._handle = inner.register_step_pre_hook(self._before_step)

    def _begin(self) -> None:
        self.start = self._now()
        self.gradient, self.decayed = torch.zeros_like(self.start), torch.zeros_like(self.start)
        self.steps = 0

    def _now(self) -> Tensor:
        return _exact(self.weight)[self.rows]

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.weight.grad is None:  # The optimizer passes it over, decay included.
            return
        # A GradScaler leaves both to optimizers that are fused: to unscale, and to skip what has overflowed.
        scale, overflow = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if overflow is not None and bool(overflow):
            return
        self.steps += 1
        gradient = _exact(self.weight.grad.to_dense())[self.rows]
        self.gradient += gradient if scale is None else gradient / scale.to(gradient)
        if self.decoupled:
            self.decayed += float(self.group["lr"]) * self.group["weight_decay"] * self._now()

    def take(self) -> RowChanges:
        """What happened since the last time, or since the beginning."""
        difference = self._now() - self.start
        changes = RowChanges(
            rows=self.rows,
            gradient=self.gradient,
            step=difference + self.decayed,
            difference=difference,
            steps=self.steps,
        )
        self._begin()
        return changes

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()

    def __enter__(self) -> "EmbeddingWatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_decoupled(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    if isinstance(optimizer, torch.optim.AdamW) or "decoupled_weight_decay" in group:
        return bool(group.get("decoupled_weight_decay", True))
    if type(optimizer).__module__.startswith("torch.optim"):
        return False
    raise SpecError(
        f"{type(optimizer).__name__} has weight decay: say decoupled=True where it shrinks the weights (AdamW), "
        "decoupled=False where it is part of the gradient (Adam with L2)"
    )
