"""Updates of embedding rows, told from weight decay."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anisoscope.errors import SpecError
from anisoscope.updates import EmbeddingWatch, undo_decay


def close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    assert one.shape == other.shape
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


def steps(optimizer_of: Callable[[list[Tensor]], torch.optim.Optimizer], count: int = 3) -> Any:
    """A matrix, its snapshots and gradients over some steps with a falling learning rate, and what was watched."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))
    optimizer = optimizer_of([weight])
    rows = torch.tensor([1, 5, 6])
    snapshots, gradients, rates = [weight.detach().clone()], [], []
    with EmbeddingWatch(weight, optimizer, rows=rows) as watch:
        for number in range(count):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            rates.append(0.1 / (1 + number))
            weight.grad = torch.randn_like(weight)
            gradients.append(weight.grad.clone())
            optimizer.step()
            snapshots.append(weight.detach().clone())
        changes = watch.take()
        assert watch.take().steps == 0
    return rows, snapshots, gradients, rates, changes


def test_updates_are_told_from_weight_decay() -> None:
    decay = 0.5
    rows, snapshots, gradients, rates, changes = steps(lambda w: torch.optim.AdamW(w, weight_decay=decay))
    assert changes.steps == 3
    assert close(changes.gradient, sum(gradients)[rows], 1e-12)
    assert close(changes.difference, (snapshots[-1] - snapshots[0])[rows], 1e-12)
    # Adam's own step: it depends on the gradients alone.
    first, second, made = 0.0, 0.0, []
    for number, gradient in enumerate(gradients, 1):
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        scale = (second / (1 - 0.999**number)).sqrt() + 1e-8
        made.append(-rates[number - 1] * first / (1 - 0.9**number) / scale)
    assert close(changes.step, sum(made)[rows], 1e-10)
    assert not close(changes.difference, changes.step, 0.05)
    for number, own in enumerate(made):
        pair = snapshots[number : number + 2]
        undone = undo_decay(*pair, learning_rates=[rates[number]], weight_decay=decay)
        assert close(undone, own, 1e-10)
    later = [np.prod([1 - rate * decay for rate in rates[number + 1 :]]) for number in range(3)]
    whole = undo_decay(snapshots[0], snapshots[-1], learning_rates=rates, weight_decay=decay)
    assert close(whole, sum(float(f) * own for f, own in zip(later, made, strict=True)), 1e-10)


def test_decay_inside_the_gradient_is_part_of_the_step() -> None:
    *_, changes = steps(lambda w: torch.optim.Adam(w, weight_decay=0.5))
    assert torch.equal(changes.step, changes.difference)

    class Foreign(torch.optim.SGD):
        """Of another package."""

    with pytest.raises(SpecError, match="decoupled=True"):
        steps(lambda w: Foreign(w, lr=0.1, weight_decay=0.5))
    with pytest.raises(SpecError, match="does not train this matrix"):
        EmbeddingWatch(torch.zeros(2, 2), torch.optim.SGD([nn.Parameter(torch.zeros(2, 2))], lr=0.1))


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_are_no_steps_and_gradients_are_unscaled(fused: bool) -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with EmbeddingWatch(weight, optimizer) as watch:
        for factor in (2.0, float("inf")):
            optimizer.zero_grad()
            scaler.scale((factor * weight).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        changes = watch.take()
        assert changes.steps == 1
        assert torch.equal(changes.gradient, torch.full((4, 3), 2.0))
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    assert watch.steps == 0, "closed"
