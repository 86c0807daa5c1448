"""Loading, refusing, verifying and capturing, on models small enough to make here."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

from anisoscope.capture import MASKED_SHARE, capture, token_losses
from anisoscope.errors import LayoutError, MissingPackageError, ModelError, SpecError, StatesError
from anisoscope.models import (
    Layout,
    Stack,
    _computed_weights,
    adopt_model,
    discover_layout,
    load_model,
    select_sites,
    sites_of,
    verify_layout,
)
from anisoscope.sources import hash_weights
from anisoscope.trace import make_probe

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TEXT = ["the tower stands in the city", "a state is a point, and many points are a cloud", "rain fell on the old roof"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    raw = Tokenizer(models.BPE(unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=raw, **dict(zip(names, SPECIAL, strict=True)))


def gpt2(n_layer: int = 3, seed: int = 0, cls: type = GPT2LMHeadModel, **config: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"n_layer": n_layer, "n_embd": 32, "n_head": 4, "vocab_size": 320, "n_positions": 64}
    return cls(GPT2Config(**sizes, bos_token_id=2, eos_token_id=3, **config)).eval()


def bert(cls: type = BertForMaskedLM, **config: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    return cls(BertConfig(**sizes, vocab_size=320, max_position_embeddings=64, **config)).eval()


def save(module: Any, tokenizer: Any, folder: Path) -> Path:
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def gpt2_folder(tokenizer: Any, tmp_path: Path) -> Path:
    return save(gpt2(), tokenizer, tmp_path / "gpt2")


def token_ids(b: int = 4, t: int = 16, size: int = 300) -> Tensor:
    return torch.randint(5, size, (b, t), generator=torch.Generator().manual_seed(7))


def edit_weights(folder: Path, drop: str) -> None:
    file = folder / "model.safetensors"
    save_file(
        {key: value for key, value in load_file(file).items() if drop not in key}, file, metadata={"format": "pt"}
    )


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(self.norm(x)).cumsum(1))


class EditingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += torch.tanh(self.mix(self.norm(x)).cumsum(1))
        return x * 1


class Plain(nn.Module):
    """A causal model that knows nothing of transformers."""

    def __init__(self, d: int = 16, blocks: int = 4, block: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, d)
        self.steps = nn.ModuleList(block(d) for _ in range(blocks))
        self.last = nn.LayerNorm(d)
        self.other = nn.LayerNorm(d)
        self.out = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 50))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for step in self.steps:
            x = step(x)
        return self.out(self.other(self.last(x)))


class Listless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b, self.norm = nn.Embedding(50, 16), Block(16), Block(16), nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.b(self.a(self.table(tokens))))


class Noisy(Plain):
    """Adds something between its blocks, so that they are no chain."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for step in self.steps:
            x = step(x) + 1
        return self.last(x)


def layout_of(module: nn.Module) -> Layout:
    return discover_layout(module, make_probe(module))


def with_stack(layout: Layout, **changes: Any) -> Layout:
    (stack,) = layout.stacks
    return Layout(stacks=(Stack(**({"name": None, "blocks": stack.blocks, "final_norm": stack.final_norm} | changes)),))


def test_a_module_outside_transformers_is_adopted() -> None:
    module = Plain()
    model = adopt_model(module, None, name="plain")
    paths = tuple(f"steps.{k}" for k in range(4))
    assert model.layout.stacks == (Stack(name=None, blocks=paths, final_norm="last", width=16),)
    assert (model.kind, model.head) == ("decoder", None)
    ids = token_ids(size=50)
    states = {site.name: state for site, state in capture(model, ids, sites_of(model.layout)).states.items()}
    torch.testing.assert_close(states["embed"], module.table(ids))
    torch.testing.assert_close(states["block.0"], module.steps[0](module.table(ids)))
    torch.testing.assert_close(states["final_norm"], module.last(states["block.3"]))


def test_a_list_that_holds_one_module_many_times_gives_a_site_per_call() -> None:
    module = Plain()
    module.steps = nn.ModuleList([module.steps[0]] * 3)
    model = adopt_model(module, None, name="shared")
    assert model.layout.stacks[0].blocks == ("steps.0",) * 3
    states = list(capture(model, token_ids(size=50), select_sites(model.layout, ["block.*"])).states.values())
    torch.testing.assert_close(module.steps[0](states[0]), states[1])
    torch.testing.assert_close(module.steps[0](states[1]), states[2])


def test_sequential_containers_are_block_lists_too() -> None:
    module = Plain()
    module.steps = nn.Sequential(*module.steps)
    assert layout_of(module).stacks[0].blocks == tuple(f"steps.{k}" for k in range(4))


def test_adopting_leaves_the_training_mode_alone() -> None:
    module = gpt2().train()
    module.transformer.h[1].eval()
    modes = [part.training for part in module.modules()]
    model = adopt_model(module, None, name="training")
    first, second = (capture(model, token_ids(), sites_of(model.layout)).states for _ in range(2))
    assert all(torch.equal(first[site], second[site]) for site in first), "dropout was active"
    assert [part.training for part in module.modules()] == modes


def test_swapping_two_blocks_fails_the_check() -> None:
    module = gpt2()
    layout = layout_of(module)
    first, second, third = layout.stacks[0].blocks
    with pytest.raises(LayoutError, match="expected the calls"):
        verify_layout(module, with_stack(layout, blocks=(second, first, third)), make_probe(module))


def test_leaving_out_a_block_fails_the_check() -> None:
    module = gpt2()
    layout = layout_of(module)
    first, _, third = layout.stacks[0].blocks
    with pytest.raises(LayoutError, match="is not the output of"):
        verify_layout(module, with_stack(layout, blocks=(first, third)), make_probe(module))


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        ("other", "its input is not the output of steps.3"),
        ("steps.3.norm", "inside a block"),
        ("table", "its input is not"),
        ("out", "submodules"),
    ],
)
def test_a_wrong_final_norm_fails_the_check(norm: str, reason: str) -> None:
    module = Plain()
    with pytest.raises(LayoutError, match=reason):
        adopt_model(module, None, name="plain", final_norm=(norm,))


def test_a_linear_layer_is_no_norm() -> None:
    module = Plain()
    module.last = nn.Linear(16, 16)
    assert layout_of(module).stacks[0].final_norm is None
    with pytest.raises(LayoutError, match="does not normalise"):
        adopt_model(module, None, name="plain", final_norm=("last",))


def test_the_head_of_a_masked_model_is_not_taken_for_a_final_norm() -> None:
    assert layout_of(bert()).stacks[0].final_norm is None


def test_an_edit_in_place_is_detected_and_does_not_reach_captured_states() -> None:
    model = adopt_model(Plain(block=EditingBlock), None, name="editing")
    assert any("3 block outputs are edited in place" in check for check in model.checks)
    clean = adopt_model(Plain(), None, name="clean")
    assert any("No block output is edited in place" in check for check in clean.checks)
    ids = token_ids(size=50)
    ours, theirs = (list(capture(each, ids, sites_of(each.layout)).states.values()) for each in (model, clean))
    for state, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(state, expected)


def test_a_model_without_a_block_list_fails_loudly_and_paths_by_hand_help() -> None:
    with pytest.raises(LayoutError) as caught:
        adopt_model(Listless(), None, name="listless")
    message = str(caught.value)
    assert "Lists of modules found:\n  none" in message
    assert "norm: LayerNorm" in message
    assert "--blocks" in message
    with pytest.raises(LayoutError, match="1 list"):
        adopt_model(Listless(), None, name="listless", blocks=("a", "b"))


def test_blocks_that_are_no_chain_are_refused_with_what_was_found() -> None:
    with pytest.raises(LayoutError) as caught:
        adopt_model(Noisy(), None, name="noisy")
    assert "steps: 4 x Block, 4 calls" in str(caught.value)
    with pytest.raises(LayoutError, match=r"the input of steps\.1 is not the output of steps\.0"):
        adopt_model(Noisy(), None, name="noisy", blocks=("steps",))


def test_paths_by_hand_are_verified_like_found_ones() -> None:
    model = adopt_model(gpt2(), None, name="g", blocks=("transformer.h",), final_norm=("transformer.ln_f",))
    assert model.layout == layout_of(gpt2())
    without = adopt_model(gpt2(), None, name="g", blocks=("h.*",), final_norm=("none",))
    assert without.layout.stacks[0].final_norm is None
    assert len(without.layout.stacks[0].blocks) == 3
    with pytest.raises(LayoutError, match=r"near: transformer\.h"):
        adopt_model(gpt2(), None, name="g", blocks=("transformer.hh",))
    with pytest.raises(SpecError, match="one path"):
        adopt_model(gpt2(), None, name="g", final_norm=("transformer.ln_f", "none"))


def test_a_block_count_that_contradicts_the_config_is_refused() -> None:
    module = gpt2()
    module.config.n_layer = 5
    with pytest.raises(LayoutError, match=r"transformer\.h: 3 x GPT2Block"):
        layout_of(module)


def test_states_that_overflow_are_not_taken_for_a_wrong_layout() -> None:
    module = Plain()
    with torch.no_grad():
        module.table.weight.mul_(6e4)
    with pytest.raises(StatesError, match=r"steps\.0 returns states that are not finite"):
        adopt_model(module.half(), None, name="overflowing")


def test_the_head_of_a_subclass_is_that_of_its_parent() -> None:
    class Mine(GPT2LMHeadModel):
        pass

    assert adopt_model(gpt2(cls=Mine), None, name="mine").head == "causal"


def test_sites_follow_the_way_of_a_token() -> None:
    sites = sites_of(layout_of(gpt2()))
    assert [site.name for site in sites] == ["embed", "block.0", "block.1", "block.2", "final_norm"]
    assert [site.depth for site in sites] == [None, 1 / 3, 2 / 3, 1.0, None]


def test_patterns_select_sites_and_unknown_ones_are_refused() -> None:
    layout = layout_of(gpt2())
    assert [site.name for site in select_sites(layout, ["final_norm", "block.1"])] == ["block.1", "final_norm"]
    with pytest.raises(SpecError, match=r"Did you mean 'final_norm'.*block\.2"):
        select_sites(layout, ["finalnorm"])
    with pytest.raises(SpecError, match=r"no site matches 'block\.9'"):
        select_sites(layout, ["embed", "block.9"])
    post_norm = layout_of(bert())
    assert [site.name for site in select_sites(post_norm, ["embed", "final_norm"])] == ["embed"]


def test_a_saved_decoder_loads_with_its_kind_head_and_states(gpt2_folder: Path) -> None:
    model = load_model(str(gpt2_folder), device="cpu")
    assert (model.kind, model.head, model.notes) == ("decoder", "causal", ())
    assert model.weights == hash_weights(str(gpt2_folder))
    assert model.layout.stacks[0].final_norm == "transformer.ln_f"
    assert not model.module.training
    original, ids = adopt_model(gpt2(), None, name="original"), token_ids()
    loaded = capture(model, ids, sites_of(model.layout)).states
    for site, state in capture(original, ids, sites_of(original.layout)).states.items():
        torch.testing.assert_close(loaded[site], state, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "kind", "head"),
    [
        (bert, "encoder", "masked"),
        (lambda: gpt2(cls=GPT2Model), "decoder", None),
        (lambda: bert(BertLMHeadModel), "encoder", None),
        (lambda: bert(BertLMHeadModel, is_decoder=True), "decoder", "causal"),
        (lambda: T5ForConditionalGeneration(T5Config(**T5_SIZES)), "encoder-decoder", None),
        (lambda: T5EncoderModel(T5Config(**T5_SIZES)), "encoder", None),
    ],
    ids=["masked", "bare", "sees ahead", "causal BERT", "T5", "T5 encoder"],
)
def test_kind_and_head_follow_from_what_was_saved(
    make: Any, kind: str, head: str | None, tokenizer: Any, tmp_path: Path
) -> None:
    model = load_model(str(save(make(), tokenizer, tmp_path / "m")), device="cpu")
    assert (model.kind, model.head) == (kind, head)
    assert len(model.layout.stacks) == (2 if kind == "encoder-decoder" else 1)


T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 320}


def test_the_dtype_is_the_one_asked_for(gpt2_folder: Path) -> None:
    model = load_model(str(gpt2_folder), dtype="bfloat16", device="cpu")
    states = capture(model, token_ids(), sites_of(model.layout)).states
    assert {state.dtype for state in states.values()} == {torch.bfloat16}
    with pytest.raises(SpecError, match="must be one of float32, bfloat16, float16, float64; got 'int7'"):
        load_model(str(gpt2_folder), dtype="int7")
    with pytest.raises(SpecError, match="device 'nonsense'"):
        load_model(str(gpt2_folder), device="nonsense")


def test_one_changed_byte_changes_the_hash(gpt2_folder: Path) -> None:
    before = hash_weights(str(gpt2_folder))
    file = gpt2_folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert hash_weights(str(gpt2_folder)) != before
    assert len(before) == 64


def test_pickled_weights_are_refused_unless_asked_for(gpt2_folder: Path) -> None:
    (gpt2_folder / "model.safetensors").unlink()
    torch.save(gpt2().state_dict(), gpt2_folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="--allow-pickle"):
        load_model(str(gpt2_folder), device="cpu")
    assert load_model(str(gpt2_folder), device="cpu", allow_pickle=True).kind == "decoder"


def test_pickled_shards_in_an_index_of_safetensors_are_refused(gpt2_folder: Path) -> None:
    (gpt2_folder / "model.safetensors").unlink()
    torch.save(gpt2().state_dict(), gpt2_folder / "shard.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(gpt2().state_dict(), "shard.bin")}
    (gpt2_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="--allow-pickle"):
        load_model(str(gpt2_folder), device="cpu")


def test_safetensors_outside_the_folder_are_no_reason_to_advise_pickle(gpt2_folder: Path) -> None:
    module = gpt2()
    (gpt2_folder / "model.safetensors").rename(gpt2_folder.parent / "shard.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(module.state_dict(), "../shard.safetensors")}
    (gpt2_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = load_model(str(gpt2_folder), device="cpu").module.state_dict()
    assert all(torch.equal(value, loaded[key]) for key, value in module.state_dict().items())


def test_a_corrupt_or_cut_weight_file_is_named_as_such(gpt2_folder: Path) -> None:
    file = gpt2_folder / "model.safetensors"
    content = file.read_bytes()
    for broken in (content[: len(content) // 2], b"\xff" * 64):
        file.write_bytes(broken)
        with pytest.raises(ModelError, match="corrupt or cut short"):
            load_model(str(gpt2_folder), device="cpu")


def test_a_missing_shard_is_no_reason_to_advise_pickle(tokenizer: Any, tmp_path: Path) -> None:
    module = gpt2()
    module.save_pretrained(tmp_path, max_shard_size="50KB")
    tokenizer.save_pretrained(tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    shards[-1].unlink()
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load_model(str(tmp_path), device="cpu")
    assert shards[-1].name in str(caught.value)


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    for number, module in enumerate((gpt2(), bert(), LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES)))):
        module.save_pretrained(tmp_path / str(number))
        with pytest.raises(ModelError, match="no tokenizer"):
            load_model(str(tmp_path / str(number)), device="cpu")


LLAMA_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 320,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("lost", ["h.1.attn", "wte", "ln_f", "wpe"])
def test_missing_weights_behind_a_state_are_refused(lost: str, gpt2_folder: Path) -> None:
    edit_weights(gpt2_folder, drop=lost)
    with pytest.raises(ModelError, match=r"would be random \(.*" + lost):
        load_model(str(gpt2_folder), device="cpu")


def test_a_missing_head_costs_the_loss_but_not_the_states(tokenizer: Any, tmp_path: Path) -> None:
    folder = save(LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES)), tokenizer, tmp_path / "llama")
    assert load_model(str(folder), device="cpu").head == "causal"
    edit_weights(folder, drop="lm_head")
    model = load_model(str(folder), device="cpu")
    assert model.head is None
    assert "no loss" in model.notes[0]
    assert capture(model, token_ids(), sites_of(model.layout)).logits is None


def test_positions_that_are_computed_need_not_be_stored(tokenizer: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = MarianMTModel(MarianConfig(**MARIAN_SIZES)).eval()
    folder = save(module, tokenizer, tmp_path / "marian")
    assert not [key for key in load_file(folder / "model.safetensors") if "embed_positions" in key]
    model, ids = load_model(str(folder), device="cpu"), token_ids(size=299)
    assert model.kind == "encoder-decoder"
    original = adopt_model(module, tokenizer, name="original")
    states = capture(original, ids, sites_of(original.layout)).states
    loaded = capture(model, ids, sites_of(model.layout)).states
    assert len(states) == len(loaded) == 6
    for one, other in zip(states.values(), loaded.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


MARIAN_SIZES = {
    "vocab_size": 320,
    "d_model": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
}


class FrozenPositions(GPT2LMHeadModel):
    frozen, begins = True, 0.5

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.transformer.wpe.weight.requires_grad_(not self.frozen)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding) and module.num_embeddings == 64:
            with torch.no_grad():
                module.weight.normal_() if self.begins is None else module.weight.fill_(self.begins)


@pytest.mark.parametrize(
    ("frozen", "begins", "accepted"), [(True, 0.5, True), (True, None, False), (False, 0.5, False)]
)
def test_a_missing_weight_is_computed_if_it_is_frozen_and_begins_without_randomness(
    frozen: bool, begins: float | None, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrozenPositions, "frozen", frozen)
    monkeypatch.setattr(FrozenPositions, "begins", begins)
    module = gpt2(cls=FrozenPositions)
    # As loading leaves a weight that is missing: initialised, and no longer frozen.
    module._init_weights(module.transformer.wpe)
    module.requires_grad_(True)
    missing = {"transformer.wpe.weight", "transformer.ln_f.weight", "lm_head.weight", "no.such.weight"}
    assert _computed_weights(module, missing) == ({"transformer.wpe.weight"} if accepted else set())


def test_a_missing_pooler_is_no_loss(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import BertModel

    folder = save(bert(BertModel), tokenizer, tmp_path / "bert")
    edit_weights(folder, drop="pooler")
    assert load_model(str(folder), device="cpu").notes == ()


def test_unknown_models_are_refused_in_one_sentence(tmp_path: Path, gpt2_folder: Path) -> None:
    with pytest.raises(ModelError, match="neither a folder"):
        load_model(str(tmp_path / "not" / "there"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no weight files"):
        load_model(str(tmp_path / "empty"))
    with pytest.raises(ModelError, match="name the folder"):
        load_model(str(gpt2_folder / "model.safetensors"))
    config = gpt2_folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "unheard_of"}))
    with pytest.raises(ModelError, match="unheard_of"):
        load_model(str(gpt2_folder), device="cpu")


def test_an_unreachable_hub_is_named_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "model_info", offline)
    with pytest.raises(ModelError, match="hub cannot be reached"):
        load_model("nobody/such-a-model-is-not-there")


def test_a_hub_model_is_identified_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.hf_api import ModelInfo

    commit = "0123456789abcdef0123456789abcdef01234567"
    asked = []

    def info(name: str, *, revision: str | None, timeout: float) -> ModelInfo:
        asked.append((name, revision))
        return ModelInfo(id=name, sha=commit)

    monkeypatch.setattr(huggingface_hub, "model_info", info)
    assert hash_weights("somebody/model", revision="step3000") == commit
    assert asked == [("somebody/model", "step3000")]
    assert hash_weights("somebody/model", revision=commit) == commit
    assert len(asked) == 1, "a commit needs no asking"


def test_code_from_a_model_folder_runs_only_when_asked(gpt2_folder: Path) -> None:
    config = gpt2_folder / "config.json"
    remote = {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}, "model_type": "own"}
    config.write_text(json.dumps(json.loads(config.read_text()) | remote))
    (gpt2_folder / "own.py").write_text("raise SystemExit('code of the model ran')")
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load_model(str(gpt2_folder), device="cpu")


def edit_config(folder: Path, **changes: Any) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


@pytest.mark.parametrize(
    "asked",
    [
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation": "evil/kernel:attend"},
        {"_attn_implementation_internal": "evil/kernel"},
        {"attn_implementation": {"": "evil/kernel@main"}},
        {"attn_implementation": "paged|evil/kernel"},
        {"attn_implementation": "flash_attention_2"},
        {"experts_implementation": "sonicmoe"},
    ],
    ids=lambda asked: " ".join(map(str, *asked.items())),
)
def test_a_config_cannot_make_transformers_load_kernels(
    asked: dict[str, Any], gpt2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import modeling_flash_attention_utils, modeling_utils
    from transformers.integrations import hub_kernels

    loaded: list[Any] = []
    for module in (hub_kernels, modeling_utils):
        monkeypatch.setattr(module, "is_kernels_available", lambda *_: True)
    for module, name in (
        (hub_kernels, "get_kernel"),
        (hub_kernels, "load_and_register_attn_kernel"),
        (modeling_utils, "lazy_import_flash_attention"),
        (modeling_flash_attention_utils, "lazy_import_flash_attention"),
    ):
        monkeypatch.setattr(module, name, lambda *names, **_: loaded.append(names))
    plain = load_model(str(gpt2_folder), device="cpu")
    edit_config(gpt2_folder, **asked)
    model = load_model(str(gpt2_folder), device="cpu")
    assert not loaded
    assert model.module.config._attn_implementation == "sdpa"
    # Which other keys reach the config differs between versions of transformers.
    if "_attn_implementation" in asked:
        assert model.notes == (
            "The config asks for attn_implementation 'evil/kernel:attend'; the default of transformers was used.",
        )
    ids = token_ids()
    states = capture(model, ids, sites_of(model.layout)).states
    for site, state in capture(plain, ids, sites_of(plain.layout)).states.items():
        torch.testing.assert_close(states[site], state, rtol=0, atol=0)


def test_eager_attention_in_a_config_is_kept(gpt2_folder: Path) -> None:
    edit_config(gpt2_folder, attn_implementation="eager")
    model = load_model(str(gpt2_folder), device="cpu")
    assert (model.module.config._attn_implementation, model.notes) == ("eager", ())


def test_kernels_are_refused_whoever_asks_and_only_while_loading(
    gpt2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import hub_kernels

    def initialise(self: Any, *_: Any, **__: Any) -> None:
        hub_kernels.get_kernel("kernels-community/some")

    before = hub_kernels.get_kernel
    monkeypatch.setattr(GPT2Model, "post_init", initialise)
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load_model(str(gpt2_folder), device="cpu")
    assert hub_kernels.get_kernel is before


def test_a_folder_with_an_adapter_is_refused(gpt2_folder: Path) -> None:
    (gpt2_folder / "adapter_config.json").write_text('{"base_model_name_or_path": "other/model"}')
    with pytest.raises(ModelError, match="merge it"):
        load_model(str(gpt2_folder), device="cpu")


def test_a_tokenizer_larger_than_the_embedding_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    folder = save(gpt2(), tokenizer, tmp_path / "m")
    larger = PreTrainedTokenizerFast.from_pretrained(folder)
    larger.add_tokens([f"word{number}" for number in range(320 - len(larger) + 2)])
    larger.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"2 of the tokenizer's ids have no row .* 320: 'word\d+' \(320\)"):
        load_model(str(folder), device="cpu")
    with pytest.raises(ModelError, match="have no row"):
        adopt_model(gpt2(), larger, name="mine")


def test_a_special_token_without_a_row_is_noted_and_refused_where_the_text_has_it(
    tokenizer: Any, tmp_path: Path
) -> None:
    from anisoscope import Spec, measure

    folder = save(gpt2(), tokenizer, tmp_path / "m")
    larger = PreTrainedTokenizerFast.from_pretrained(folder)
    larger.add_tokens([f"word{number}" for number in range(320 - len(larger))])
    larger.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    larger.save_pretrained(folder)
    (note,) = load_model(str(folder), device="cpu").notes
    assert "1 of the tokenizer's ids have no row in the embedding, which has 320: '<|user|>' (320)" in note
    for text, refused in (("the tower stands in the city", False), ("<|user|> stands in the city", True)):
        corpus = tmp_path / "text.txt"
        corpus.write_text("\n\n".join([text * 20] * 20))
        spec = Spec(model=str(folder), corpus=str(corpus), tokens=256, seq_len=32, batch_points=64, metrics=("loss",))
        if refused:
            with pytest.raises(ModelError, match="token id 320"):
                measure(spec, device="cpu", progress=False)
        else:
            assert measure(spec, device="cpu", progress=False).records


def test_gguf_without_its_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("anisoscope.models.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"anisoscope\[gguf\]"):
        load_model(str(tmp_path / "model.gguf"), device="cpu")


def test_a_broken_gguf_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(b"not a gguf file at all")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(tmp_path / "model.gguf"), device="cpu")


def test_loading_leaves_the_settings_of_transformers_alone(gpt2_folder: Path) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(str(gpt2_folder), device="cpu")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_a_device_map_gives_the_same_states(gpt2_folder: Path) -> None:
    pytest.importorskip("accelerate")
    plain, mapped = load_model(str(gpt2_folder), device="cpu"), load_model(str(gpt2_folder), device_map="auto")
    ids = token_ids()
    theirs = capture(mapped, ids, sites_of(mapped.layout, stages=True)).states
    for site, state in capture(plain, ids, sites_of(plain.layout, stages=True)).states.items():
        torch.testing.assert_close(theirs[site].cpu(), state)


def test_blocks_offloaded_to_disk_give_the_same_states(gpt2_folder: Path) -> None:
    pytest.importorskip("accelerate")
    places = dict.fromkeys(("transformer.wte", "transformer.wpe", "transformer.h.0", "lm_head"), "cpu")
    places |= dict.fromkeys(("transformer.h.1", "transformer.h.2", "transformer.ln_f"), "disk")
    plain, mapped = load_model(str(gpt2_folder), device="cpu"), load_model(str(gpt2_folder), device_map=places)
    assert all(mapped.module.get_submodule(f"transformer.{part}").weight.is_meta for part in ("h.1.ln_1", "ln_f"))
    ids = token_ids()
    states = capture(mapped, ids, sites_of(mapped.layout, stages=True)).states
    for site, state in capture(plain, ids, sites_of(plain.layout, stages=True)).states.items():
        torch.testing.assert_close(states[site], state)
    with pytest.raises(ModelError, match="offloaded"):
        adopt_model(mapped.module, None, name="offloaded")


def test_hooks_are_gone_after_a_pass_and_after_an_exception() -> None:
    module = gpt2()
    model = adopt_model(module, None, name="gpt2")
    capture(model, token_ids(), sites_of(model.layout))

    def hooks() -> int:
        return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())

    assert hooks() == 0
    with pytest.raises(IndexError):
        capture(model, torch.full((1, 4), 10_000), sites_of(model.layout))
    assert hooks() == 0
    module.transformer.h[1].forward = None
    with pytest.raises(LayoutError, match="could not run"):
        adopt_model(module, None, name="broken")
    assert hooks() == 0


def test_states_of_one_window_do_not_depend_on_the_batch() -> None:
    for module in (gpt2(), bert()):
        model = adopt_model(module, None, name="any")
        ids, sites = token_ids(b=4), sites_of(model.layout)
        together = capture(model, ids, sites).states
        for row in range(4):
            alone = capture(model, ids[row : row + 1], sites).states
            for site in sites:
                torch.testing.assert_close(alone[site][0], together[site][row], rtol=1e-4, atol=1e-5)


def test_only_the_sites_asked_for_are_kept() -> None:
    model = adopt_model(gpt2(), None, name="gpt2")
    sites = select_sites(model.layout, ["block.1"])
    assert tuple(capture(model, token_ids(), sites).states) == sites
    (foreign,) = select_sites(layout_of(gpt2(n_layer=5)), ["block.4"])
    with pytest.raises(SpecError, match="has no site"):
        capture(model, token_ids(), [foreign])


def test_captured_states_need_no_gradients_and_no_cache() -> None:
    model = adopt_model(gpt2(), None, name="gpt2")
    captured = capture(model, token_ids(), sites_of(model.layout))
    assert not any(state.requires_grad or state.is_inference() for state in captured.states.values())


def test_encoder_decoders_read_the_window_shifted_right() -> None:
    torch.manual_seed(0)
    module = T5ForConditionalGeneration(T5Config(**T5_SIZES, decoder_start_token_id=0)).eval()
    model, ids = adopt_model(module, None, name="t5"), token_ids()
    sites = [site for site in select_sites(model.layout, ["embed"]) if site.stack == "decoder"]
    (state,) = capture(model, ids, sites).states.values()
    shifted = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], dim=1)
    torch.testing.assert_close(state, module.get_input_embeddings()(shifted))


def test_causal_losses_average_to_the_loss_of_transformers() -> None:
    module, ids = gpt2(), token_ids(b=3, t=48)
    model = adopt_model(module, None, name="gpt2")
    losses = token_losses(model, ids, capture(model, ids, ()), range(len(ids)))
    assert losses is not None
    assert losses.shape == ids.shape
    assert losses[:, -1].isnan().all()
    with torch.no_grad():
        assert losses.nanmean().item() == pytest.approx(module(ids, labels=ids).loss.item(), rel=1e-6)


def test_causal_losses_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = adopt_model(gpt2(), None, name="gpt2"), token_ids(t=20)
    captured = capture(model, ids, ())
    whole = token_losses(model, ids, captured, range(len(ids)))
    monkeypatch.setattr("anisoscope.capture._CHUNK", 7)
    torch.testing.assert_close(token_losses(model, ids, captured, range(len(ids))), whole, equal_nan=True)


def test_masked_losses_are_finite_on_masked_tokens_alone(tokenizer: Any) -> None:
    module = bert()
    model, ids = adopt_model(module, tokenizer, name="bert"), token_ids(b=16, t=60)
    ids[:, 0] = tokenizer.cls_token_id
    losses = token_losses(model, ids, capture(model, ids, ()), range(3, 3 + len(ids)))
    assert losses is not None
    masked = losses.isfinite()
    assert losses[~masked].isnan().all()
    assert not masked[:, 0].any(), "special tokens are never masked"
    assert masked.float().mean().item() == pytest.approx(MASKED_SHARE, abs=0.04)
    with torch.no_grad():
        labels = ids.masked_fill(~masked, -100)
        theirs = module(ids.masked_fill(masked, tokenizer.mask_token_id), labels=labels).loss.item()
    assert losses[masked].mean().item() == pytest.approx(theirs, rel=1e-5)
    again, other = (token_losses(model, ids, capture(model, ids, ()), range(seed, seed + len(ids))) for seed in (3, 4))
    torch.testing.assert_close(again, losses, equal_nan=True)
    assert other is not None
    assert not torch.equal(other.isfinite(), masked)


def test_models_without_a_fitting_head_have_no_loss() -> None:
    bare, masked = adopt_model(gpt2(cls=GPT2Model), None, name="bare"), adopt_model(bert(), None, name="no mask token")
    for model in (bare, masked):
        assert token_losses(model, token_ids(), capture(model, token_ids(), ()), range(len(token_ids()))) is None


def test_a_folder_of_sentence_transformers_loads_as_plain_bert(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import BertModel

    folder = save(bert(BertModel), tokenizer, tmp_path / "sentences")
    (folder / "modules.json").write_text('[{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]')
    (folder / "1_Pooling").mkdir()
    shutil.copy(folder / "config.json", folder / "1_Pooling" / "config.json")
    model = load_model(str(folder), device="cpu")
    assert (model.kind, model.head, model.layout.stacks[0].final_norm) == ("encoder", None, None)
