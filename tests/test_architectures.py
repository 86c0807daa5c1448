"""Our sites against what each family is documented to hand out, and against hooks on paths written down by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from anisoscope import layout
from anisoscope.capture import capture, token_losses
from anisoscope.models import Model, adopt_model, select_sites, sites_of
from anisoscope.norms import NO_FINAL_NORM, Norm, read_norms

pytestmark = [
    # DeBERTa decorates its functions with torch.jit.script, which torch 2.13 calls deprecated.
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]

L, D, VOCAB = 3, 48, 97

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
GROUPED = TEXT | {"num_key_value_heads": 2, "pad_token_id": 0}
GPT: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": D, "n_layer": L, "n_head": 4, "n_positions": 64}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": D,
    "encoder_layers": L,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
}
T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": D,
    "d_kv": 12,
    "d_ff": 64,
    "num_layers": L,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
FALCON = {k: v for k, v in TEXT.items() if k not in ("intermediate_size", "max_position_embeddings")}


@dataclass(frozen=True)
class Family:
    """One tiny model: how it is made, where its blocks and final norm are, what `hidden_states` means in it."""

    name: str
    model_type: str
    config: dict[str, Any]
    kind: str
    blocks: tuple[str, ...]
    norms: tuple[str | None, ...]
    states: str
    """`normed`: the last hidden state is the final norm's; `raw`: the last block's; `shifted`: no embeddings, then as
    `normed`; `projected`: the last one is another space."""
    prefix: str = ""
    """What the language-model class puts before the paths; empty where that class is not tried."""


def encoder(name: str, model_type: str, blocks: str, prefix: str, config: dict[str, Any] = TEXT, **rest: Any) -> Family:
    rest = {"norm": None, "states": "raw"} | rest
    return Family(
        name, model_type, config, "encoder", (blocks,), (rest.pop("norm"),), rest.pop("states"), prefix, **rest
    )


def decoder(
    name: str, model_type: str, blocks: str, norm: str | None, prefix: str, config: dict[str, Any], **rest: Any
) -> Family:
    return Family(name, model_type, config, "decoder", (blocks,), (norm,), rest.pop("states", "normed"), prefix, **rest)


def like_llama(name: str, model_type: str, norm: str = "norm", **config: Any) -> Family:
    return decoder(name, model_type, "layers", norm, "model", GROUPED | config)


def pair(name: str, model_type: str, blocks: str, norm: str | None, prefix: str, config: dict[str, Any]) -> Family:
    stacks = ("encoder", "decoder")
    norms = tuple(f"{stack}.{norm}" if norm else None for stack in stacks)
    states = "normed" if norm else "raw"
    return Family(
        name, model_type, config, "encoder-decoder", tuple(f"{s}.{blocks}" for s in stacks), norms, states, prefix
    )


DEBERTA = TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
ROTARY = {"head_dim": 12}
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SSM: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": D, "num_hidden_layers": L, "state_size": 8}

# Families whose final norm takes the mean away (LayerNorm).
CENTRING = (
    *("ModernBERT", "GPT-2", "GPT-Neo", "GPT-J", "GPT-NeoX", "GPT-NeoX sequential", "OPT", "Bloom", "Falcon-7b"),
    *("Falcon-40b", "Falcon-rw", "MPT", "Phi", "StableLM", "StarCoder2", "OLMo", "Cohere", "Nemotron", "mBART"),
    "Pegasus",
)

FAMILIES = [
    encoder("BERT", "bert", "encoder.layer", "bert"),
    encoder("RoBERTa", "roberta", "encoder.layer", "roberta"),
    encoder("XLM-R", "xlm-roberta", "encoder.layer", "roberta"),
    encoder(
        "ALBERT",
        "albert",
        "encoder.albert_layer_groups.0.albert_layers.0",
        "albert",
        TEXT | {"embedding_size": 24},
    ),
    encoder(
        "DistilBERT",
        "distilbert",
        "transformer.layer",
        "distilbert",
        {"vocab_size": VOCAB, "dim": D, "n_layers": L, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64},
    ),
    encoder("ELECTRA", "electra", "encoder.layer", "electra", TEXT | {"embedding_size": 24}),
    encoder("DeBERTa", "deberta", "encoder.layer", "deberta", DEBERTA),
    encoder("DeBERTa-v2", "deberta-v2", "encoder.layer", "deberta", DEBERTA),
    encoder("MPNet", "mpnet", "encoder.layer", "mpnet"),
    encoder(
        "ModernBERT",
        "modernbert",
        "layers",
        "model",
        TEXT | {"pad_token_id": 0, "reference_compile": False},
        norm="final_norm",
        states="normed",
    ),
    encoder("EuroBERT", "eurobert", "layers", "model", GROUPED, norm="norm", states="normed"),
    decoder("GPT-2", "gpt2", "h", "ln_f", "transformer", GPT),
    decoder(
        "GPT-Neo",
        "gpt_neo",
        "h",
        "ln_f",
        "transformer",
        {
            "vocab_size": VOCAB,
            "hidden_size": D,
            "num_layers": L,
            "num_heads": 4,
            "max_position_embeddings": 64,
            "attention_types": [[["global"], L]],
        },
    ),
    decoder("GPT-J", "gptj", "h", "ln_f", "transformer", GPT | {"rotary_dim": 8}),
    decoder("GPT-NeoX", "gpt_neox", "layers", "final_layer_norm", "gpt_neox", TEXT),
    decoder(
        "GPT-NeoX sequential",
        "gpt_neox",
        "layers",
        "final_layer_norm",
        "gpt_neox",
        TEXT | {"use_parallel_residual": False},
    ),
    decoder(
        "OPT",
        "opt",
        "decoder.layers",
        "decoder.final_layer_norm",
        "model",
        TEXT | {"ffn_dim": 64, "word_embed_proj_dim": D},
    ),
    decoder(
        "OPT-350m",
        "opt",
        "decoder.layers",
        None,
        "model",
        TEXT | {"ffn_dim": 64, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
        states="projected",
    ),
    decoder("Bloom", "bloom", "h", "ln_f", "transformer", GPT),
    decoder("Falcon-7b", "falcon", "h", "ln_f", "transformer", FALCON | {"multi_query": True, "parallel_attn": True}),
    decoder(
        "Falcon-40b",
        "falcon",
        "h",
        "ln_f",
        "transformer",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 2},
    ),
    decoder(
        "Falcon-rw",
        "falcon",
        "h",
        "ln_f",
        "transformer",
        FALCON | {"alibi": True, "parallel_attn": False, "multi_query": False},
    ),
    decoder(
        "MPT",
        "mpt",
        "blocks",
        "norm_f",
        "transformer",
        {"vocab_size": VOCAB, "d_model": D, "n_layers": L, "n_heads": 4, "max_seq_len": 64},
    ),
    like_llama("Llama", "llama"),
    like_llama("Mistral", "mistral"),
    like_llama("Mixtral", "mixtral", **MOE),
    like_llama("Qwen2", "qwen2"),
    like_llama("Qwen3", "qwen3", **ROTARY),
    like_llama("Qwen3-MoE", "qwen3_moe", **ROTARY, **MOE),
    like_llama("Gemma", "gemma", **ROTARY),
    like_llama("Gemma-2", "gemma2", **ROTARY),
    like_llama("Gemma-3", "gemma3_text", **ROTARY),
    like_llama("Phi", "phi", norm="final_layernorm"),
    like_llama("Phi-3", "phi3"),
    like_llama("StableLM", "stablelm", partial_rotary_factor=0.5),
    like_llama("StarCoder2", "starcoder2"),
    like_llama("OLMo", "olmo"),
    like_llama("OLMo-2", "olmo2"),
    like_llama("Cohere", "cohere"),
    like_llama("Granite", "granite"),
    like_llama("SmolLM3", "smollm3"),
    like_llama("Nemotron", "nemotron"),
    pair("T5", "t5", "block", "final_layer_norm", "transformer", T5),
    pair("mT5", "mt5", "block", "final_layer_norm", "transformer", T5),
    pair("BART", "bart", "layers", None, "model", SEQ2SEQ),
    pair("mBART", "mbart", "layers", "layer_norm", "model", SEQ2SEQ),
    pair("Pegasus", "pegasus", "layers", "layer_norm", "model", SEQ2SEQ),
    decoder("Mamba", "mamba", "layers", "norm_f", "backbone", SSM | {"time_step_rank": 4}, states="shifted"),
    decoder(
        "Mamba-2",
        "mamba2",
        "layers",
        "norm_f",
        "backbone",
        SSM | {"num_heads": 12, "head_dim": 8, "n_groups": 2, "expand": 2, "chunk_size": 4},
        states="shifted",
    ),
]


def build(family: Family, loader: Any = AutoModel) -> nn.Module:
    torch.manual_seed(0)
    module = loader.from_config(AutoConfig.for_model(family.model_type, **family.config)).eval()
    with torch.no_grad():
        for part in module.modules():
            # At init every norm is the identity after normalising; before and after could then coincide.
            if "norm" in type(part).__name__.lower():
                for weight in part.parameters(recurse=False):
                    weight.add_(0.3 * torch.randn_like(weight))
    return module


def token_ids(b: int = 3, t: int = 12) -> Tensor:
    return torch.randint(5, VOCAB, (b, t), generator=torch.Generator().manual_seed(1))


def hook_by_hand(module: nn.Module, paths: list[str], run: Callable[[], Any]) -> tuple[dict[str, list[Tensor]], Any]:
    seen: dict[str, list[Tensor]] = {path: [] for path in paths}

    def note(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            seen[path].append((output if isinstance(output, Tensor) else output[0]).clone())

        return hook

    handles = [module.get_submodule(path).register_forward_hook(note(path)) for path in paths]
    try:
        with torch.no_grad():
            return seen, run()
    finally:
        for handle in handles:
            handle.remove()


def run_by_hand(module: nn.Module, family: Family, ids: Tensor) -> Any:
    inputs: dict[str, Any] = {"input_ids": ids, "output_hidden_states": True}
    if family.kind == "encoder-decoder":
        config: Any = module.config
        start = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
        inputs["decoder_input_ids"] = torch.cat([torch.full((len(ids), 1), start), ids[:, :-1]], dim=1)
    return module(**inputs)


def block_paths(module: nn.Module, path: str) -> list[str]:
    found = module.get_submodule(path)
    return [f"{path}.{i}" for i in range(len(found))] if isinstance(found, nn.ModuleList) else [path]


def by_name(model: Model, ids: Tensor, stack: str | None) -> dict[str, Tensor]:
    captured = capture(model, ids, sites_of(model.layout))
    return {site.name: state for site, state in captured.states.items() if site.stack == stack}


def assert_identical(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert torch.equal(ours, theirs), f"largest difference {(ours - theirs).abs().max()}"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_sites_agree_with_hidden_states_and_with_hooks_by_hand(family: Family) -> None:
    module, ids = build(family), token_ids()
    model = adopt_model(module, None, name=family.name)
    assert model.kind == family.kind
    assert model.head is None

    lists = [block_paths(module, path) for path in family.blocks]
    norms = [path for path in family.norms if path]
    paths = [path for members in lists for path in members]
    by_hand, output = hook_by_hand(module, [*paths, *norms], lambda: run_by_hand(module, family, ids))
    names = ("encoder", "decoder") if family.kind == "encoder-decoder" else (None,)
    for name, paths, norm in zip(names, lists, family.norms, strict=True):
        ours = by_name(model, ids, name)
        blocks = [state for path in paths for state in by_hand[path]]
        hidden = output[f"{name}_hidden_states" if name else "hidden_states"]
        assert len(hidden) == len(blocks) + 1
        assert list(ours) == ["embed", *(f"block.{k}" for k in range(len(blocks))), *(["final_norm"] if norm else [])]
        for k, block in enumerate(blocks):
            assert_identical(ours[f"block.{k}"], block)
        if norm:
            assert_identical(ours["final_norm"], by_hand[norm][0])
            assert not torch.allclose(ours["final_norm"], blocks[-1])

        expected = [ours["embed"], *blocks]
        if family.states == "shifted":
            expected = [*blocks, ours["final_norm"]]
        elif family.states == "normed":
            expected[-1] = ours["final_norm"]
        elif family.states == "projected":
            assert hidden[-1].shape[-1] != D
            expected.pop()
        for state, theirs in zip(expected, hidden, strict=False):
            assert_identical(state, theirs)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_final_norm_is_understood_by_what_it_does(family: Family) -> None:
    module, ids = build(family), token_ids()
    model = adopt_model(module, None, name=family.name)
    for name, norm in read_norms(module, model.layout).items():
        stack = next(stack for stack in model.layout.stacks if stack.name == name)
        if stack.final_norm is None:
            assert norm == NO_FINAL_NORM
            continue
        assert isinstance(norm, Norm)
        part = module.get_submodule(stack.final_norm)
        # `build` makes every parameter random, so none can hide.
        assert norm.has_gain + norm.has_bias == len(list(part.parameters()))
        assert norm.centres == (family.name in CENTRING)
        sites = [site for site in select_sites(model.layout, ["final_norm*"]) if site.stack == name]
        normed, gained, final = capture(model, ids, sites).states.values()
        torch.testing.assert_close(normed.double() * norm.gain, gained.double(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gained.double() + norm.bias, final.double(), rtol=1e-5, atol=1e-5)


def test_the_published_list_of_families_is_the_tested_one() -> None:
    tested = {kind: [family.name for family in FAMILIES if family.kind == kind] for kind in layout.FAMILIES}
    assert {kind: sorted(names) for kind, names in layout.FAMILIES.items()} == {k: sorted(v) for k, v in tested.items()}


HEADED = {"encoder": AutoModelForMaskedLM, "decoder": AutoModelForCausalLM, "encoder-decoder": AutoModelForSeq2SeqLM}
HEADS = {"encoder": "masked", "decoder": "causal", "encoder-decoder": None}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_language_model_head_changes_paths_but_not_sites(family: Family) -> None:
    module, ids = build(family, HEADED[family.kind]), token_ids()
    model = adopt_model(module, None, name=family.name)
    assert model.kind == family.kind
    assert model.head == HEADS[family.kind]
    prefix = "" if family.model_type in ("t5", "mt5") else f"{family.prefix}."
    for stack, blocks, norm in zip(model.layout.stacks, family.blocks, family.norms, strict=True):
        assert stack.blocks[0].startswith(prefix + blocks)
        assert stack.final_norm == (prefix + norm if norm else None)
    bare = adopt_model(module.get_submodule(family.prefix) if prefix else module, None, name="bare")
    headed = capture(model, ids, sites_of(model.layout))
    assert (headed.logits is None) == (model.head is None)
    for site, state in capture(bare, ids, sites_of(bare.layout)).states.items():
        assert_identical(headed.states[site], state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama", "Qwen3-MoE", "T5", "Mamba"])
def test_low_precision_is_discovered_and_proven_as_well(name: str, dtype: torch.dtype) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    model = adopt_model(build(family).to(dtype), None, name=name)
    assert model.kind == family.kind
    states = capture(model, token_ids(), sites_of(model.layout)).states
    assert all(state.isfinite().all() for state in states.values())


def test_gemma_scales_its_embeddings_before_the_first_block() -> None:
    module = build(next(family for family in FAMILIES if family.name == "Gemma"))
    model, ids = adopt_model(module, None, name="gemma"), token_ids()
    (site,) = select_sites(model.layout, ["embed"])
    raw = nn.functional.embedding(ids, module.get_input_embeddings().weight)
    torch.testing.assert_close(capture(model, ids, [site]).states[site], raw * D**0.5)


def test_the_shared_layer_of_albert_gives_one_site_per_call() -> None:
    module = build(next(family for family in FAMILIES if family.name == "ALBERT"))
    (stack,) = adopt_model(module, None, name="albert").layout.stacks
    assert stack.blocks == ("encoder.albert_layer_groups.0.albert_layers.0",) * L


def test_decoder_losses_are_defined_for_every_causal_family() -> None:
    for family in (family for family in FAMILIES if family.name in ("GPT-2", "OPT-350m", "Bloom", "Gemma-2", "Mamba")):
        module, ids = build(family, AutoModelForCausalLM), token_ids()
        model = adopt_model(module, None, name=family.name)
        losses = token_losses(model, ids, capture(model, ids, ()), range(len(ids)))
        assert losses is not None
        with torch.no_grad():
            assert losses[:, :-1].mean() == pytest.approx(module(ids, labels=ids).loss.item(), rel=1e-5), family.name
