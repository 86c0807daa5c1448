"""A training that is watched is the same to the bit; and the comparison fails where something is left behind."""

import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_live import (
    STEPS,
    VOCABULARY,
    Open,
    Trained,
    extra_metric,
    make_model,
    spec_for,
    states_of_chance,
    steps_in,
    train,
)
from test_live import tokenizer as tokenizer
from test_live import watch as watch
from torch import Tensor, nn

import anisoscope as an
from anisoscope import live
from anisoscope.undisturbed import undisturbed


def freeze(module: nn.Module) -> nn.Module:
    for part in ("transformer.wte", "transformer.h.0"):
        module.get_submodule(part).requires_grad_(False)
    return module


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "frozen weights": {"prepare": freeze},
    "accumulation": {"micro_batches": 3},
    "bfloat16": {"autocast": torch.bfloat16},
    "float16 and a scaler": {"autocast": torch.float16},
    "inside autocast": {"autocast": torch.bfloat16, "inside_autocast": True},
}


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_training_is_the_same_to_the_bit(mode: str, watch: Any) -> None:
    alone, watched = train(None, **MODES[mode]), train(watch(), **MODES[mode])
    assert watched.same_bits(alone)
    assert steps_in(watched.scope) == [0, 2, 4, 6]
    assert watched.scope is not None
    assert watched.scope.summary["failed"] == 0
    # The comparison can fail: one random number more changes the losses.
    disturbed = train(lambda *_: _Drawing(), **MODES[mode])
    assert not disturbed.same_bits(alone)


class _Drawing(contextlib.nullcontext):
    def step(self, step: int) -> None:
        torch.rand(1)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_do_not_depend_on_autocast(autocast: torch.dtype, watch: Any) -> None:
    for inside in (False, True):
        scope = train(watch(run=f"{inside}"), autocast=autocast, inside_autocast=inside, steps=1).scope
        plain = train(watch(run="plain"), steps=1).scope
        assert scope is not None
        assert plain is not None
        one, two = (it.store.get(replace(it.spec, step=0).key) for it in (scope, plain))
        assert [row.values for row in one.records] == [row.values for row in two.records]


@pytest.mark.parametrize("mode", ["accumulation", "float16 and a scaler", "inside autocast"])
def test_alignment_inside_a_loop_is_that_of_the_same_weights_outside_it(
    mode: str, watch: Any, corpus_file: Path
) -> None:
    kept: dict[int, dict[str, Tensor]] = {}
    model = make_model()
    metrics = ("tangent_energy", "tangent_excess", "normal_ratio")
    opening = watch(spec=spec_for(corpus_file, metrics=metrics, tokens=1024, rank=4), when=lambda step: step in (0, 4))

    def keeping(module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def keep(*_: Any) -> None:
            kept[len(kept)] = {name: value.clone() for name, value in module.state_dict().items()}

        keep()
        optimizer.register_step_post_hook(keep)
        return opening(module, optimizer)

    scope = train(keeping, model=model, **MODES[mode]).scope
    assert scope is not None
    assert scope.summary["failed"] == 0
    seen = []
    for step in (0, 4):
        model.load_state_dict(kept[step])
        model.zero_grad()
        plain = replace(scope.spec, run=None, weights=None, step=None)
        outside = an.measure(
            plain, model=model.eval(), tokenizer=scope._tokenizer, probe=scope._drawn(), progress=False
        )
        inside = scope.store.get(replace(scope.spec, step=step).key)
        mine = [row for row in inside.records if "fit=" not in (row.variant or "")]
        # NaN where a text of so few documents has no permuted control.
        np.testing.assert_array_equal([row.value for row in mine], [row.value for row in outside.records])
        assert {row.gradient for row in mine} == {"virtual", "activation"}
        seen.append([row.value for row in mine if not math.isnan(row.value)])
    assert len(seen[0]) > 10
    assert seen[0] != seen[1]


def draw_numbers(moments: Any) -> Tensor:
    np.random.rand()  # noqa: NPY002
    random.random()
    return moments.leading + 0 * torch.rand(1).squeeze()


@pytest.mark.parametrize("fault", ["random", "mode", "gradient", "buffer", "hook", "requires_grad"])
def test_what_a_measurement_leaves_behind_is_put_right(
    fault: str, watch: Any, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault shows in the training where nothing guards it, and does not where `undisturbed` does."""
    model = make_model()
    model.register_buffer("factor", torch.ones(()))
    # Makes the model depend on its buffer, as one with running statistics does.
    model.get_submodule("transformer.wte").register_forward_hook(lambda _, __, states: states * model.factor)
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def commit(moments: Any) -> Tensor:
        first = next(model.parameters())
        if fault == "random":
            return draw_numbers(moments)
        if fault == "mode":
            model.eval()
        elif fault == "gradient":
            first.grad = torch.ones_like(first)
        elif fault == "buffer":
            model.factor.mul_(1.5)
        elif fault == "requires_grad":
            first.requires_grad_(False)
        else:
            model.get_submodule("transformer.ln_f").register_forward_hook(lambda _, __, states: states * 1.5)
        return moments.leading

    def once(guarded: bool | None) -> Trained:
        model.load_state_dict(start)
        model.requires_grad_(True).train()
        opening = None if guarded is None else watch(spec=spec_for(corpus_file, metrics=("faulty",)), run=str(guarded))
        with monkeypatch.context() as patch:
            if guarded is False:
                patch.setattr(live, "undisturbed", lambda _: contextlib.nullcontext())
                patch.setattr(torch, "set_rng_state", lambda _: None)
            return train(opening, model=model)

    with extra_metric("faulty", commit):
        alone = once(None)
        assert once(True).same_bits(alone)
        assert not once(False).same_bits(alone)


def test_modes_grads_and_settings_are_as_before(watch: Any) -> None:
    model = make_model()
    model.get_submodule("transformer.h.0").eval()
    model.get_parameter("transformer.wpe.weight").requires_grad_(False)
    config = model.config.to_dict()
    ids = torch.randint(0, VOCABULARY, (2, 16))
    model(ids, labels=ids).loss.backward()
    before = [(part.training, len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()]
    weights = [(it, it.data_ptr(), it._version, it.grad, it.requires_grad, it.stride()) for it in model.parameters()]
    versions = [it.grad._version for it in model.parameters() if it.grad is not None]
    opening = watch()
    threads, dtype, chance = torch.get_num_threads(), torch.get_default_dtype(), states_of_chance()
    with opening(model, None) as scope:
        scope.step(0)
    assert str(states_of_chance()) == str(chance)
    assert steps_in(scope) == [0]
    assert [
        (part.training, len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()
    ] == before
    for weight, place, version, gradient, wanted, stride in weights:
        assert (weight.data_ptr(), weight._version, weight.stride()) == (place, version, stride)
        assert weight.grad is gradient
        assert weight.requires_grad == wanted
    assert [it.grad._version for it in model.parameters() if it.grad is not None] == versions
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, dtype)
    assert model.config.to_dict() == config
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


def test_all_is_put_back_after_an_exception() -> None:
    model = make_model()
    chance = torch.get_rng_state()

    def break_off() -> None:
        with undisturbed(model):
            torch.rand(3)
            model.eval()
            model.lm_head.register_forward_hook(print)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        break_off()
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(part.training for part in model.modules())
    assert not model.lm_head._forward_hooks
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_is_not_disturbed(reentrant: bool, watch: Any) -> None:
    def prepare(module: Any) -> nn.Module:
        module.gradient_checkpointing_enable({"use_reentrant": reentrant})
        module.enable_input_require_grads()
        return module

    alone, watched = train(None, prepare=prepare), train(watch(), prepare=prepare)
    assert watched.same_bits(alone)
    assert steps_in(watched.scope) == [0, 2, 4, 6]


class Checkpointed(nn.Module):
    """Checkpoints its blocks in training and in evaluation, without asking."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = make_model()
        self.config = self.inner.config
        self.calls = 0
        for block in self.inner.get_submodule("transformer.h"):
            block.forward = self._checkpointed(block.forward, reentrant)

    def _checkpointed(self, forward: Any, reentrant: bool) -> Any:
        from torch.utils.checkpoint import checkpoint

        def again(states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(lambda given: forward(given, *args, **kwargs), states, use_reentrant=reentrant)

        return again

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        self.calls += 1
        return self.inner(input_ids, labels=labels, use_cache=False)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_that_always_checkpoints_is_seen_once_per_step(
    reentrant: bool, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anisoscope.rooms import Rooms

    kept: list[str] = []
    keep = Rooms.keep
    monkeypatch.setattr(Rooms, "keep", lambda self, site, *rest: (kept.append(site.name), keep(self, site, *rest))[1])
    alone = train(None, model=Checkpointed(reentrant))
    watched = train(watch(), model=Checkpointed(reentrant))
    assert watched.same_bits(alone)
    assert steps_in(watched.scope) == [0, 2, 4, 6]
    # One pass of the whole probe per measured step, and every site seen once in it.
    assert {site: kept.count(site) for site in kept} == dict.fromkeys(("embed", "block.0", "block.1", "final_norm"), 4)


def compile_whole(backend: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda module: torch.compile(module, backend=backend)  # pyright: ignore


def compile_in_place(backend: Any) -> Callable[[nn.Module], nn.Module]:
    def prepare(module: nn.Module) -> nn.Module:
        module.compile(backend=backend)
        return module

    return prepare


def compile_blocks(backend: Any) -> Callable[[nn.Module], nn.Module]:
    def prepare(module: nn.Module) -> nn.Module:
        for block in module.get_submodule("transformer.h"):
            block.compile(backend=backend)
        return module

    return prepare


@pytest.mark.filterwarnings("ignore")  # of the compiler itself
@pytest.mark.parametrize("prepare", [compile_whole, compile_in_place, compile_blocks])
def test_compiled_models_are_measured_eagerly_and_not_compiled_again(prepare: Any, watch: Any) -> None:
    compiled = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    alone = train(None, prepare=prepare(backend))
    expected = len(compiled)
    assert expected >= 1
    torch._dynamo.reset()
    compiled.clear()
    model = make_model()
    watched = train(watch(), model=model, prepare=prepare(backend))
    assert len(compiled) == expected
    assert watched.same_bits(alone)
    scope = watched.scope
    assert scope is not None
    assert steps_in(scope) == [0, 2, 4, 6]
    eager = make_model()
    eager.load_state_dict(watched.weights)
    offline = an.measure(
        replace(scope.spec, run=None, weights=None, step=None),
        model=eager,
        tokenizer=scope._tokenizer,
        windows=scope.windows,
        progress=False,
    )
    unit = scope.store.get(replace(scope.spec, step=6).key)
    assert [row.values for row in unit.records] == [row.values for row in offline.records]
    torch._dynamo.reset()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_training_on_a_gpu_is_the_same_to_the_bit(watch: Any) -> None:
    def on_gpu(open_scope: Open | None) -> tuple[list[float], Tensor, Tensor]:
        model = make_model(attn_implementation="eager").cuda()
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with open_scope(model, optimizer) if open_scope else contextlib.nullcontext() as opened:
            for step in range(STEPS):
                ids = torch.randint(0, VOCABULARY, (2, 16), device="cuda")
                loss = model(ids, labels=ids).loss
                loss.backward()
                losses.append(loss.item())
                if opened:
                    opened.step(step)
                optimizer.step()
                optimizer.zero_grad()
        return losses, model.get_parameter("transformer.wte.weight").detach().clone(), torch.cuda.get_rng_state()

    alone, again, watched = on_gpu(None), on_gpu(None), on_gpu(watch())
    if alone[0] != again[0]:
        pytest.skip("this GPU does not train the same twice, watched or not")
    assert watched[0] == alone[0]
    assert torch.equal(watched[1], alone[1])
    assert torch.equal(watched[2], alone[2])
