"""Gradients at sites, linear modules and embedding rows against a plain loop; and nothing is disturbed."""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import checkpoint

from anisoscope.capture import capture
from anisoscope.errors import LayoutError, ModelError, SpecError
from anisoscope.gradients import Coupled, ProbeGradients, capture_gradients, mask_positions
from anisoscope.models import Model, adopt_model, sites_of
from anisoscope.taps import tapped
from anisoscope.text import Windows
from anisoscope.trace import state_in

VOCABULARY, T = 48, 10
MASK = 3


class Tokenizer:
    """All that is asked of one here."""

    all_special_ids = (0, 1, 2, MASK)
    mask_token_id = MASK

    def __len__(self) -> int:
        return VOCABULARY


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 2,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, **SPECIAL, num_key_value_heads=1)),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**SMALL)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**SMALL, **SPECIAL, head_dim=8, num_key_value_heads=1)),
    "albert": lambda: tf.AlbertForMaskedLM(tf.AlbertConfig(**SMALL, embedding_size=12)),
}
COMMON = ("gpt2", "llama", "bert")


def build(name: str, dtype: torch.dtype = torch.float64) -> Model:
    """A small model with random weights, gains and biases."""
    torch.manual_seed(0)
    module = FAMILIES[name]()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn(weight.shape) * 0.3)
    return adopt_model(module.to(dtype).eval(), Tokenizer(), name=name)


def windows_of(count: int = 5) -> Windows:
    rng = np.random.default_rng(0)
    # Few types, so that they repeat; token 0 is the padding, whose row has no gradient in some models.
    ids = rng.integers(0, VOCABULARY // 2, (count, T)).astype(np.int64)
    documents = np.repeat(np.arange(count), T).reshape(count, T)
    return Windows(token_ids=ids, documents=documents, special=np.isin(ids, [0, 1, 2, 3]), sentences=documents)


def plain_loss(model: Model, windows: Windows, shuffle: int | None = None) -> tuple[Tensor, Tensor]:
    """The summed loss by hand, with the graph to the parameters, and the ids that were read."""
    ids = torch.from_numpy(windows.token_ids)

    def deal(targets: Tensor) -> Tensor:
        if shuffle is None:
            return targets
        return targets[torch.randperm(len(targets), generator=torch.Generator().manual_seed(shuffle))]

    if model.head == "causal":
        logits = model.module(input_ids=ids, use_cache=False).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), deal(ids[:, 1:].flatten()), reduction="sum"), ids
    masked = mask_positions(torch.from_numpy(windows.special), 0)
    read = ids.masked_fill(masked, MASK)
    return cross_entropy(model.module(input_ids=read).logits[masked], deal(ids[masked]), reduction="sum"), read


def plain_loop(model: Model, windows: Windows, shuffle: int | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """States and gradients at sites by `retain_grad`, and `grad` of every parameter of a copy."""
    model = copy.copy(model)
    object.__setattr__(model, "module", copy.deepcopy(model.module).requires_grad_(True).eval())
    (stack,) = model.layout.stacks
    seen: list[tuple[str, Tensor]] = []

    def look(name: str, state: Any) -> None:
        state = state if isinstance(state, Tensor) else state[0]
        state.retain_grad()
        seen.append((name, state))

    part = model.module.get_submodule
    first = part(stack.blocks[0])
    first.register_forward_pre_hook(lambda _, args, kw: look("embed", args or kw["hidden_states"]), with_kwargs=True)
    for path in dict.fromkeys(stack.blocks):
        part(path).register_forward_hook(lambda _, __, out: look("block", out))
    if stack.final_norm:
        part(stack.final_norm).register_forward_hook(lambda _, __, out: look("final_norm", out))
    plain_loss(model, windows, shuffle)[0].backward()
    found, blocks = {}, 0
    for name, state in seen:
        if name == "block":
            name, blocks = f"block.{blocks}", blocks + 1
        found.setdefault(name, (state.detach().flatten(0, 1), state.grad.flatten(0, 1)))
    return found | {name: (weight.detach(), weight.grad) for name, weight in model.module.named_parameters()}


def close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    assert one.shape == other.shape
    return bool((one - other).abs().max() <= tolerance * other.abs().max())


def everything(model: Model, windows: Windows | None = None, **options: Any) -> ProbeGradients:
    settings = {"linears": ("*",), "embedding": True, "batch_size": 3} | options
    return capture_gradients(model, windows or windows_of(), sites_of(model.layout, stages=True), **settings)


def same(one: ProbeGradients, other: ProbeGradients, tolerance: float = 0.0) -> bool:
    def matrices(probe: ProbeGradients) -> list[Tensor]:
        assert probe.embedding is not None
        pairs = [*probe.sites.values(), *probe.linears.values()]
        rows = [probe.embedding.read, probe.embedding.predicted]
        return [m for pair in pairs for m in (pair.values, pair.gradients)] + [m for m in rows if m is not None]

    return all(close(a, b, tolerance) for a, b in zip(matrices(one), matrices(other), strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", FAMILIES)
def test_sites_linears_and_rows_are_those_of_a_plain_loop(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model, windows = build(name, dtype), windows_of()
    reference, probe = plain_loop(model, windows), everything(model)
    named = {site.name: pair for site, pair in probe.sites.items()}
    assert {"embed", "block.0", "block.1", "block.2"} <= set(named)
    for site, pair in named.items():
        assert pair.gradients.dtype == dtype
        if site not in ("final_norm.normed", "final_norm.gained"):
            states, gradients = reference[site]
            assert close(pair.values, states, tolerance), site
            assert close(pair.gradients, gradients, tolerance), site
            assert gradients.abs().max() > 0
    # Σ δ xᵀ over the calls of a module is its weight's gradient; a tied head's weight has the input's part as well.
    assert probe.embedding is not None
    table, head = model.module.get_input_embeddings(), model.module.get_output_embeddings()
    canonical = {weight: path for path, weight in model.module.named_parameters()}
    sums: dict[str, Tensor] = {}
    for path, pair in probe.linears.items():
        path = path.partition("@")[0]
        sums[path] = sums.get(path, torch.zeros(())) + pair.weight_gradient()
    assert len(sums) > 6
    for path, made in sums.items():
        part = model.module.get_submodule(path)
        if not (part is head and probe.embedding.tied):
            grad = reference[canonical[part.weight]][1]
            assert close(made, grad if isinstance(part, nn.Linear) else grad.T, tolerance), path
    # Embedding rows, both parts.
    rows, grad = probe.embedding, reference[canonical[table.weight]][1]
    assert rows.predicted is not None
    assert rows.tied == (head.weight is table.weight) == (name != "llama")
    assert torch.equal(rows.types, plain_loss(model, windows)[1].unique())
    assert close(rows.predicted, sums[next(p for p, m in model.module.named_modules() if m is head)][rows.types], 1e-5)
    if rows.tied:
        assert close(rows.read + rows.predicted, grad[rows.types], tolerance)
    else:
        assert close(rows.read, grad[rows.types], tolerance)
        assert close(rows.predicted, reference["lm_head.weight"][1][rows.types], tolerance)


@pytest.mark.parametrize("name", COMMON)
def test_targets_dealt_anew_are_those_of_a_plain_loop_and_change_no_state(name: str) -> None:
    model, windows = build(name), windows_of()
    reference, found, true = plain_loop(model, windows, shuffle=7), everything(model, shuffle=7), everything(model)
    assert same(everything(model, shuffle=7, batch_size=1), found, 1e-12)
    for site, pair in found.sites.items():
        assert close(pair.values, true.sites[site].values, 0.0)
        assert not close(pair.gradients, true.sites[site].gradients, 0.1), site.name
        if site.name in reference:
            assert close(pair.gradients, reference[site.name][1], 1e-12), site.name


@pytest.mark.parametrize("name", COMMON)
def test_each_row_is_one_token(name: str) -> None:
    model, windows = build(name, torch.float32), windows_of()
    probe = everything(model)
    ids = torch.from_numpy(windows.token_ids)
    read = plain_loss(model, windows)[1]
    logits, targets = model.module(input_ids=read).logits.detach(), ids.roll(-1, 1) if model.head == "causal" else ids
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(ids.shape)
    losses[read == ids if model.head == "masked" else torch.arange(T).expand_as(ids) == T - 1] = torch.nan
    torch.testing.assert_close(probe.tokens.losses, losses.flatten(), equal_nan=True)
    assert probe.predicted == int((~losses.isnan()).sum())
    assert probe.predicted == 5 * (T - 1) or model.head == "masked"
    assert torch.equal(probe.tokens.ids, ids.flatten())
    assert torch.equal(probe.tokens.positions, torch.arange(T).repeat(5))
    assert torch.equal(probe.windows, torch.arange(5).repeat_interleave(T))
    assert torch.equal(probe.tokens.documents, probe.windows)
    assert torch.equal(probe.tokens.sentences, probe.windows)
    assert torch.equal(probe.read, read.flatten())
    other = capture_gradients(model, windows, seed=1)
    assert torch.equal(other.read, probe.read) == (model.head == "causal")


def test_the_same_positions_are_masked_in_every_window_and_special_tokens_never() -> None:
    special = torch.zeros(6, 40, dtype=torch.bool)
    special[:, [0, -1]] = True
    special[2, 5:30] = True
    for seed in range(20):
        masked = mask_positions(special, seed)
        assert torch.equal(masked, mask_positions(special, seed))
        # Positions without a special token anywhere are enough for 15 %.
        assert (masked == masked[0]).all()
        assert int(masked[0].sum()) == 6
        assert not (masked & special).any()
    assert len({tuple(mask_positions(special, seed)[0].tolist()) for seed in range(20)}) > 15
    special[3] = True
    special[3, 7] = False
    crowded = mask_positions(special, 0)
    assert int(crowded.sum()) > 6
    assert not (crowded & special).any()
    # However short a window is, something is predicted.
    assert int(mask_positions(torch.zeros(2, 2, dtype=torch.bool), 0).sum()) == 2


def test_stages_of_the_final_norm_have_the_gradients_of_what_follows_them() -> None:
    model, windows = build("gpt2"), windows_of()
    named = {site.name: pair for site, pair in everything(model).sites.items()}
    norm, head = model.module.transformer.ln_f, model.module.lm_head
    ids = torch.from_numpy(windows.token_ids)
    for stage, after in {
        "final_norm.normed": lambda x: x * norm.weight + norm.bias,
        "final_norm.gained": lambda x: x + norm.bias,
    }.items():
        leaf = named[stage].values.clone().requires_grad_()
        logits = head(after(leaf)).view(5, T, -1)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        assert close(named[stage].gradients, torch.autograd.grad(loss, leaf)[0], 1e-10)
    assert not close(named["final_norm.normed"].gradients, named["final_norm"].gradients, 1e-2)


@pytest.mark.parametrize("name", COMMON)
def test_passes_of_any_size_give_the_same_numbers(name: str) -> None:
    model = build(name)
    whole = everything(model, batch_size=None)
    assert same(everything(model, batch_size=1), whole, 1e-12)
    pieces: dict[Any, list[tuple[slice, Tensor, Tensor]]] = {}
    handed = everything(model, batch_size=2, into=lambda place, *rest: pieces.setdefault(place, []).append(rest))
    assert not handed.sites
    assert not handed.linears
    for place, pair in (whole.sites | whole.linears).items():
        parts, values, gradients = zip(*pieces[place], strict=True)
        assert parts == (slice(0, 2), slice(2, 4), slice(4, 5))
        assert close(torch.cat(values).flatten(0, 1), pair.values, 1e-12)
        assert close(torch.cat(gradients).flatten(0, 1), pair.gradients, 1e-12)
    calls = []
    model.module.register_forward_hook(lambda *_: calls.append(any(w.requires_grad for w in model.module.parameters())))
    everything(model, batch_size=2)
    assert calls == [False] * 3, "one pass for all places, and weights are constants in it"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", COMMON)
def test_short_floats_give_the_gradients_of_a_float32_loop(name: str, dtype: torch.dtype) -> None:
    model, windows = build(name, dtype), windows_of()
    long = adopt_model(copy.deepcopy(model.module).float(), Tokenizer(), name=name)
    probe, rounded = everything(model), everything(model, upcast=False)
    assert same(probe, everything(long), 1e-6)
    reference = plain_loop(long, windows)
    for site, pair in probe.sites.items():
        assert pair.values.dtype == pair.gradients.dtype == torch.float32
        if site.name in reference:
            assert close(pair.gradients, reference[site.name][1], 1e-5)
        own = rounded.sites[site]
        assert own.gradients.dtype == torch.float32
        assert torch.cosine_similarity(own.gradients.flatten(), pair.gradients.flatten(), dim=0) > 0.99
        assert not torch.equal(own.gradients, pair.gradients)
    assert {weight.dtype for weight in model.module.parameters()} == {dtype}


def state_of(module: nn.Module) -> list[Any]:
    """All that a probe could disturb, as bytes and flags."""
    facts: list[Any] = [torch.get_rng_state().tolist(), checkpoint.CheckpointFunction, torch.is_grad_enabled()]
    for weight in [*module.parameters(), *module.buffers()]:
        grad = None if weight.grad is None else (id(weight.grad), weight.grad.tolist())
        facts.append((id(weight), weight.tolist(), weight.dtype, weight.requires_grad, grad, weight._version))
    for part in module.modules():
        facts.append((part.training, len(part._forward_hooks), len(part._forward_pre_hooks), id(part.forward.__func__)))
    return facts


def prepare(model: Model) -> None:
    """In the midst of training: dropout on, gradients there, one weight frozen, one part in evaluation mode."""
    model.module.train()
    plain_loss(model, windows_of())[0].backward()
    model.module.get_submodule(model.layout.stacks[0].blocks[0]).eval()
    next(model.module.parameters()).requires_grad_(False)


@pytest.mark.parametrize("name", COMMON)
def test_nothing_is_disturbed(name: str) -> None:
    model = build(name, torch.float32)
    expected = everything(model)
    prepare(model)
    model.module.register_forward_hook(lambda *_: torch.rand(1) and None)  # a model that draws in evaluation mode
    before = state_of(model.module)
    assert same(everything(model), expected)
    assert state_of(model.module) == before

    def fail(*_: Any) -> None:
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        everything(model, into=fail)
    assert state_of(model.module) == before


def test_edits_in_place_reach_neither_states_nor_gradients() -> None:
    model, ids = build("gpt2"), torch.from_numpy(windows_of().token_ids)
    block = model.module.transformer.h[1]
    handle = block.register_forward_pre_hook(lambda _, args: (args[0] * 3, *args[1:]))
    expected = everything(model)
    handle.remove()

    def triple(_: nn.Module, args: Any) -> None:
        args[0].mul_(3)

    block.register_forward_pre_hook(triple)
    block.mlp.register_forward_hook(lambda part, args, _: triple(part, args))
    probe = everything(model)
    assert same(probe, expected)
    states = capture(model, ids, probe.sites).states
    assert all(close(pair.values, states[site].flatten(0, 1), 1e-12) for site, pair in probe.sites.items())


class Handed(NamedTuple):
    """One of the things that modules return."""

    number: int
    state: Tensor


@pytest.mark.parametrize(
    "pack", [lambda x: x, lambda x: (x, 1), lambda x: [1, x], lambda x: {"a": 1, "b": x}, lambda x: Handed(1, x)]
)
def test_states_are_found_and_replaced_in_whatever_a_module_returns(pack: Callable[[Tensor], Any]) -> None:
    class Part(nn.Module):
        def forward(self, state: Tensor) -> Any:
            return pack(2 * state)

    part = nn.ModuleDict({"part": Part()})
    with tapped(part, (2, 3), [("part", True), ("part", False)]) as seen:
        output = part["part"](state=torch.ones(2, 3, 4))
        state = state_in(output, (2, 3))
        assert state is not None
        assert type(output) is type(pack(state))
        given, made = seen["part", True, 0], seen["part", False, 0]
        assert torch.equal(made.given, torch.ones(2, 3, 4))
        gradients = torch.autograd.grad((state**2).sum(), [given.source, made.source])
        assert [float(one[0, 0, 0]) for one in gradients] == [8.0, 4.0]
        seen.complete = True
        part["part"](state=torch.ones(2, 3, 4))
        assert len(seen) == 2
    assert not part["part"]._forward_hooks


@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize("around", ["frozen", "no_grad", "inference", "autocast"])
def test_what_is_in_force_outside_does_not_matter(name: str, around: str) -> None:
    model = build(name, torch.float32)
    expected = everything(model)
    if around == "frozen":
        model.module.requires_grad_(False)
        assert same(everything(model), expected)
    elif around == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert same(everything(model), expected)
            assert torch.is_autocast_enabled("cpu")
    else:
        with torch.no_grad() if around == "no_grad" else torch.inference_mode():
            assert same(everything(model), expected)
            assert not torch.is_grad_enabled()


def test_a_forward_that_accelerate_put_under_autocast_is_run_as_it_was_written() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = build("llama", torch.float32)
    expected = everything(model)
    try:
        patched = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model.module).forward
        assert not close(
            plain_loss(model, windows_of())[0] * torch.ones(1), expected.tokens.losses.nansum()[None], 1e-5
        )
        assert same(everything(model), expected)
        assert model.module.forward is patched
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("where", ["block", "inside", "model"])
def test_checkpointed_activations_give_the_same_gradients(where: str, frozen: bool, reentrant: bool) -> None:
    model = build("gpt2", torch.float32)
    expected = everything(model)
    # With dropout, that must stay off when activations are made again.
    model.module.train().requires_grad_(not frozen)
    trunk = model.module.transformer

    def rewind(part: nn.Module, method: str) -> None:
        plain = getattr(part, method)

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return checkpoint.checkpoint(functools.partial(plain, **kwargs), *args, use_reentrant=reentrant)

        setattr(part, method, forward)

    # Around the hooks of a part, inside them, or around everything.
    for block in trunk.h if where != "model" else (trunk,):
        rewind(block, "forward" if where == "inside" else "_call_impl")
    assert same(everything(model), expected)
    assert checkpoint.CheckpointFunction.__module__ == "torch.utils.checkpoint"


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_checkpointing_of_transformers_is_survived(reentrant: bool) -> None:
    model = build("llama", torch.float32)
    expected = everything(model)
    model.module.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.module.train()
    assert same(everything(model), expected)


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_modules_are_run_as_they_were_written(inside: bool) -> None:
    plain = build("gpt2", torch.float32)
    expected = everything(plain)
    if inside:
        plain.module.compile(backend="eager")
        for block in plain.module.transformer.h:
            block.compile(backend="eager")
        compiled, model = plain.module, plain
    else:
        compiled = torch.compile(plain.module, backend="eager")
        model = adopt_model(compiled, Tokenizer(), name="compiled")
    compiled(torch.from_numpy(windows_of().token_ids))
    assert same(everything(model), expected)
    torch._dynamo.reset()


def train(name: str, mode: str, look: Callable[[Model], Any] = lambda _: None) -> list[Tensor]:
    """Four steps with dropout, each of two batches; losses and weights. The look is inside autocast where that is."""
    model = build(name, torch.float32)
    module = model.module.train()
    if mode == "checkpointing":
        module.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=mode == "scaler")
    losses = []
    for _ in range(4):
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode in ("autocast", "scaler")):
                loss = plain_loss(model, windows_of())[0]
                look(model)
            scaler.scale(loss).backward()
            losses.append(loss.detach())
            look(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*losses, *(weight.detach() for weight in module.parameters())]


@pytest.mark.parametrize("mode", ["plain", "autocast", "scaler", "checkpointing"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_training_has_the_same_bits_with_and_without(name: str, mode: str) -> None:
    with_it, without = train(name, mode, everything), train(name, mode)
    assert all(torch.equal(one, other) for one, other in zip(with_it, without, strict=True))
    assert with_it[0] != with_it[1], "dropout is on"


@pytest.mark.parametrize("mode", ["plain", "autocast", "scaler", "checkpointing"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_numbers_inside_a_training_are_those_of_a_plain_float32_loop(name: str, mode: str) -> None:
    """Amid accumulated and scaled gradients, with dropout on and inside autocast; at every look anew."""
    looks: list[tuple[dict[str, Any], ProbeGradients]] = []

    def look(model: Model) -> None:
        found = everything(model)
        with torch.autocast("cpu", enabled=False):
            looks.append((plain_loop(model, windows_of()), found))

    train(name, mode, look)
    assert len(looks) == 16
    for expected, found in looks:
        for site, pair in found.sites.items():
            if site.name in expected:
                values, gradients = expected[site.name]
                assert close(pair.values, values, 1e-5), site.name
                assert close(pair.gradients, gradients, 1e-5), site.name
    # The weights moved, and the numbers with them.
    (first, _), *_, (last, _) = looks
    assert not close(first["block.1"][1], last["block.1"][1], 0.05)


class PlainForCausalLM(nn.Module):
    """A model that says nothing of its embeddings."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        return (self.inner(input_ids=input_ids).logits,)


def test_a_module_that_does_not_know_its_embeddings_still_shows_its_states() -> None:
    known = build("gpt2")
    model = adopt_model(PlainForCausalLM(known.module), Tokenizer(), name="plain")
    probe = capture_gradients(model, windows_of(), sites_of(model.layout))
    expected = capture_gradients(known, windows_of(), sites_of(known.layout))
    for one, other in zip(probe.sites.values(), expected.sites.values(), strict=True):
        assert close(one.gradients, other.gradients, 1e-12)
    with pytest.raises(ModelError, match="input embedding"):
        capture_gradients(model, windows_of(), embedding=True)


def test_requests_that_cannot_be_honoured_say_so() -> None:
    model, windows = build("gpt2", torch.float32), windows_of()
    with pytest.raises(SpecError, match=r"'transformer.h.0.mlp.fc'.*such as transformer.h.0.mlp.c_fc"):
        capture_gradients(model, windows, linears=("transformer.h.0.mlp.fc",))
    with pytest.raises(SpecError, match="batch_size is at least 1; came 0"):
        capture_gradients(model, windows, batch_size=0)
    with pytest.raises(SpecError, match="every token is special, and there is none to mask"):
        capture_gradients(build("bert"), replace(windows, special=np.ones_like(windows.special)))
    headless = adopt_model(model.module.transformer, Tokenizer(), name="headless")
    with pytest.raises(ModelError, match="no language-model head"):
        capture_gradients(headless, windows)
    flat = model.module.transformer.h[1].mlp.c_fc
    flat.register_forward_pre_hook(lambda _, args: (args[0].mean(1),))
    flat.register_forward_hook(lambda _, __, out: out[:, None].expand(-1, T, -1))
    with pytest.raises(LayoutError, match="no row per token"):
        capture_gradients(model, windows, linears=("*.1.mlp.c_fc",))
    model.module.transformer.h[0].mlp.to("meta")
    with pytest.raises(ModelError, match="offloaded"):
        capture_gradients(model, windows)


def test_coupled_gives_the_gradient_of_an_identity_map() -> None:
    model = build("llama")
    site = next(site for site in sites_of(model.layout) if site.name == "block.1")
    pair: Coupled = everything(model).sites[site]
    insert = torch.eye(16, dtype=torch.float64, requires_grad=True)
    block = model.module.get_submodule(model.layout.stacks[0].blocks[1])
    handle = block.register_forward_hook(lambda _, __, out: out @ insert.T)
    plain_loss(model, windows_of())[0].backward()
    handle.remove()
    assert insert.grad is not None
    assert close(pair.weight_gradient(), insert.grad, 1e-12)
