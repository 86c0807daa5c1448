"""Queries, keys and attention weights against the models' own; rows of the output embedding on the move."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.bloom import modeling_bloom
from transformers.models.mpt import modeling_mpt

import anisoscope as an
from anisoscope.attention import Seen, attention_records, eager_attention, look_at_attention
from anisoscope.capture import capture
from anisoscope.corpora import load_corpus
from anisoscope.drift import follow_drift
from anisoscope.errors import SpecError
from anisoscope.metrics import all_metrics
from anisoscope.metrics.drift import AttentionRows, Heads, attention_entropy, key_drift, query_drift, query_key_drift
from anisoscope.metrics.updates import RowUpdates, common_drift, common_drift_share, rare_drift
from anisoscope.models import Model, adopt_model, load_model, sites_of
from anisoscope.records import Checkpoint, Site
from anisoscope.store import Store
from anisoscope.walk import draw, measure

NAMES = ("query_drift", "key_drift", "query_key_drift", "attention_entropy")
DRIFTS = NAMES[:3]
H, E, T = 4, 8, 12
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": H * E,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FEW_KEYS: dict[str, Any] = {"num_key_value_heads": 2}
OLD: dict[str, Any] = {"vocab_size": 64, "hidden_size": H * E, "initializer_range": 0.3}
CAUSAL, MASKED, BOTH = tf.AutoModelForCausalLM, tf.AutoModelForMaskedLM, tf.AutoModelForSeq2SeqLM
FALCON: dict[str, Any] = {**OLD, "num_hidden_layers": 2, "num_attention_heads": H}
GPT2: dict[str, Any] = {
    "n_embd": H * E,
    "n_layer": 2,
    "n_head": H,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
DISTILBERT: dict[str, Any] = {
    "vocab_size": 64,
    "dim": 32,
    "n_layers": 2,
    "n_heads": H,
    "hidden_dim": 48,
    "initializer_range": 0.3,
}
BART: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "init_std": 0.3,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "gpt2": (CAUSAL, lambda: tf.GPT2Config(vocab_size=64, initializer_range=0.3, **GPT2)),
    "distilbert": (MASKED, lambda: tf.DistilBertConfig(**DISTILBERT)),
    "gpt_neox": (CAUSAL, lambda: tf.GPTNeoXConfig(**SMALL)),
    "llama": (CAUSAL, lambda: tf.LlamaConfig(**SMALL, **FEW_KEYS)),
    "mistral": (CAUSAL, lambda: tf.MistralConfig(**SMALL, **FEW_KEYS, sliding_window=4)),
    "phi3": (CAUSAL, lambda: tf.Phi3Config(**SMALL, **FEW_KEYS)),
    "opt": (CAUSAL, lambda: tf.OPTConfig(**FALCON, ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=32)),
    "bloom": (CAUSAL, lambda: tf.BloomConfig(**OLD, n_layer=2, n_head=H)),
    "mpt": (CAUSAL, lambda: tf.MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=H, max_seq_len=64)),
    "falcon": (CAUSAL, lambda: tf.FalconConfig(**FALCON, multi_query=True)),
    "falcon, new": (CAUSAL, lambda: tf.FalconConfig(**FALCON, num_kv_heads=2, new_decoder_architecture=True)),
    "bert": (MASKED, lambda: tf.BertConfig(**SMALL)),
    "modernbert": (MASKED, lambda: tf.ModernBertConfig(**SMALL, local_attention=4, cls_token_id=1, sep_token_id=2)),
    "bart": (BOTH, lambda: tf.BartConfig(**BART)),
}
IDS = torch.randint(3, 64, (3, T), generator=torch.Generator().manual_seed(1))


def build(family: str, **options: Any) -> Model:
    loader, config = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = loader.from_config(config(), **options).double().eval()
        for weight in module.parameters():
            # Biases that are not zero, so that one that is forgotten shows.
            weight.data += 0.05 * torch.randn_like(weight)
    return adopt_model(module, None, name=family)


def seen_by(model: Model, ids: Tensor = IDS[:1]) -> dict[Site, Seen]:
    found: dict[Site, Seen] = {}
    blocks = [site for site in sites_of(model.layout) if site.name.startswith("block.")]
    with eager_attention(model.module):
        look_at_attention(model, ids, blocks, found.__setitem__)
    assert list(found) == blocks
    return found


def records_of(model: Model, names: tuple[str, ...] = NAMES, ids: Tensor = IDS) -> dict[tuple[str, str], an.Estimate]:
    found = attention_records(model, ids, sites_of(model.layout), names)
    return {(site.name, metric.name): answer for site, metric, answer in found}


def without_positions(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary angles and biases for distance become zero: attention is then a function of queries and keys alone."""
    for name, buffer in module.named_buffers():
        if name.endswith("inv_freq"):
            buffer.zero_()
    monkeypatch.setattr(modeling_bloom, "_get_alibi_slopes", lambda heads, device: torch.zeros(heads))
    build = modeling_mpt.build_mpt_alibi_tensor
    monkeypatch.setattr(modeling_mpt, "build_mpt_alibi_tensor", lambda *args: torch.zeros_like(build(*args)))


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_and_keys_are_those_that_the_models_attention_is_made_of(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Falcon chooses its attention when it is built.
    options = {"attn_implementation": "eager"} if family.startswith("falcon") else {}
    model = build(family, **options)
    without_positions(model.module, monkeypatch)
    for site, seen in seen_by(model).items():
        assert isinstance(seen.heads, Heads), seen.heads
        assert isinstance(seen.attention, AttentionRows), seen.attention
        queries, keys = seen.heads.queries, seen.heads.keys
        keys = keys.repeat_interleave(len(queries) // len(keys), 0)
        logits = queries @ keys.mT / queries.shape[-1] ** 0.5
        visible = seen.attention.weights.amax(0) > 0
        expected = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        # Some families take the softmax in float32.
        torch.testing.assert_close(seen.attention.weights, expected, rtol=1e-4, atol=1e-6)
        assert (expected - 1 / expected.shape[-1]).abs().max() > 0.05, site
        assert seen.attention.visible.tolist() == visible.sum(-1).tolist()


def test_what_rows_may_see_is_what_the_model_lets_through() -> None:
    for family, expected in {
        "gpt2": [k + 1 for k in range(T)],
        "mistral": [min(k + 1, 4) for k in range(T)],
        "bert": [T] * T,
    }.items():
        for seen in seen_by(build(family)).values():
            assert isinstance(seen.attention, AttentionRows)
            assert seen.attention.visible.tolist() == expected


def first_input(model: Model, ids: Tensor) -> Tensor:
    site = Site(name="embed")
    return capture(model, ids[None], [site]).states[site][0]


def by_hand(model: Model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (t, h, e) and keys (t, g, e) of the first block, from its weights."""
    module: Any = model.module
    state = first_input(model, ids)
    if model.name == "gpt2":
        block = module.transformer.h[0]
        out = block.ln_1(state) @ block.attn.c_attn.weight + block.attn.c_attn.bias
        return out[:, :32].reshape(T, H, E), out[:, 32:64].reshape(T, H, E)
    if model.name == "gpt_neox":
        block = module.gpt_neox.layers[0]
        projection = block.attention.query_key_value
        weight, bias = projection.weight.reshape(H, 3, E, 32), projection.bias.reshape(H, 3, E)
        out = torch.einsum("td,hped->thpe", block.input_layernorm(state), weight) + bias
        return out[:, :, 0], out[:, :, 1]
    if model.name == "llama":
        block = module.model.layers[0]
        state = block.input_layernorm(state)
        parts = [state @ getattr(block.self_attn, name).weight.T for name in ("q_proj", "k_proj")]
        return parts[0].reshape(T, H, E), parts[1].reshape(T, 2, E)
    parts = module.bert.encoder.layer[0].attention.self
    return parts.query(state).reshape(T, H, E), parts.key(state).reshape(T, H, E)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "bert"])
def test_drifts_are_those_of_the_weights_by_hand(family: str) -> None:
    model = build(family)
    expected = {name: [] for name in DRIFTS}
    with torch.no_grad():
        for ids in IDS:
            queries, keys = by_hand(model, ids)
            for name, vectors in (("query_drift", queries), ("key_drift", keys)):
                ratios = [
                    vectors[:, head].mean(0).norm() / vectors[:, head].pow(2).sum(1).mean().sqrt()
                    for head in range(vectors.shape[1])
                ]
                expected[name].append(float(sum(ratios) / len(ratios)))
            cosines = []
            for head in range(H):
                one, two = queries[:, head].mean(0), keys[:, head * keys.shape[1] // H].mean(0)
                cosines.append(float(one @ two / (one.norm() * two.norm())))
            expected["query_key_drift"].append(sum(cosines) / H)
    found = records_of(model)
    for name in DRIFTS:
        answer = found["block.0", name]
        assert answer.values == pytest.approx(expected[name], rel=1e-6)
        assert answer.value == pytest.approx(np.mean(expected[name]), rel=1e-6)
        assert (answer.batches, answer.points, answer.dim, answer.note) == (3, 3 * T, E, None)
        assert answer.null == (0.0 if name == "query_key_drift" else pytest.approx(T**-0.5))


def test_self_attention_is_told_from_cross_attention() -> None:
    model = build("bart")
    decoder: Any = model.module.model.decoder.layers[0]  # pyright: ignore
    state: list[Tensor] = []
    handle = decoder.self_attn.q_proj.register_forward_hook(lambda *call: state.append(call[-1]))
    seen = seen_by(model)[Site(name="block.0", stack="decoder", depth=0.5)]
    handle.remove()
    assert isinstance(seen.heads, Heads)
    torch.testing.assert_close(seen.heads.queries, state[0][0].reshape(T, 2, 16).transpose(0, 1))


@pytest.mark.parametrize(("family", "names"), [("gpt2", "c_attn"), ("bert", "query"), ("llama", "q_proj")])
def test_attention_without_queries_is_uniform(family: str, names: str) -> None:
    model = build(family)
    for path, part in model.module.named_modules():
        if path.endswith(f".{names}"):
            for weight in part.parameters():
                weight.data[..., : H * E] = 0
    found = records_of(model)
    for block in ("block.0", "block.1"):
        assert found[block, "attention_entropy"].value == pytest.approx(1)
        assert math.isnan(found[block, "query_drift"].value)
        assert found[block, "query_drift"].note == "all queries of a head are zero"
        assert found[block, "key_drift"].note is None


def test_sharp_attention_has_little_entropy() -> None:
    model = build("gpt2")
    usual = records_of(model)["block.0", "attention_entropy"].value
    model.module.transformer.h[0].attn.c_attn.weight.data[:, :32] *= 1000  # pyright: ignore
    assert records_of(model)["block.0", "attention_entropy"].value < 0.05 < usual


def test_known_answers_of_the_metrics() -> None:
    one = torch.tensor([1.0, 0.0]).double()
    same = one.expand(2, 2, 2)
    opposite = torch.stack([one, -one]).expand(1, 2, 2)
    assert float(query_drift(Heads(queries=same, keys=opposite))) == 1
    assert float(key_drift(Heads(queries=same, keys=opposite))) == 0
    assert math.isnan(float(query_key_drift(Heads(queries=same, keys=opposite))))
    assert float(query_key_drift(Heads(queries=same, keys=-3 * same[:1]))) == pytest.approx(-1)
    half = torch.tensor([[[1.0, 1.0], [1.0, -1.0]]]).double()
    assert float(query_drift(Heads(queries=half, keys=half))) == pytest.approx(2**-0.5)
    # Head 0 and 1 share the first key, 2 and 3 the second: 1, 0, -1, 0.
    queries = torch.tensor([[1.0, 0], [0, 1], [0, 1], [1, 0]]).double()[:, None]
    keys = torch.tensor([[1.0, 0], [0, -1]]).double()[:, None]
    assert float(query_key_drift(Heads(queries=queries, keys=keys))) == pytest.approx(0)
    assert float(query_key_drift(Heads(queries=queries[:2], keys=keys[:1]))) == pytest.approx(0.5)
    causal = torch.arange(1, 7)
    uniform = torch.ones(3, 6, 6).double().tril() / causal[:, None]
    assert float(attention_entropy(AttentionRows(weights=uniform, visible=causal))) == pytest.approx(1)
    onto_itself = torch.eye(6).double().expand(3, 6, 6)
    assert float(attention_entropy(AttentionRows(weights=onto_itself, visible=causal))) == 0
    mixed = torch.cat([uniform[:1], onto_itself[:1]])
    assert float(attention_entropy(AttentionRows(weights=mixed, visible=causal))) == pytest.approx(0.5)
    alone = AttentionRows(weights=torch.ones(1, 1, 1).double(), visible=torch.ones(1).long())
    assert math.isnan(float(attention_entropy(alone)))


def test_the_null_is_what_isotropic_queries_give() -> None:
    draws = torch.randn(400, 1, 50, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    squares = [float(query_drift(Heads(queries=one, keys=one))) ** 2 for one in draws]
    null = all_metrics()["query_drift"].closed_form
    assert null is not None
    assert np.mean(squares) ** 0.5 == pytest.approx(null(50, 16), rel=0.03)
    pairs = zip(draws, draws.roll(1, 0), strict=True)
    cosines = [float(query_key_drift(Heads(queries=one, keys=two))) for one, two in pairs]
    assert abs(np.mean(cosines)) < 0.05


def test_what_is_not_understood_is_nan_with_a_note() -> None:
    strange = build("gpt2")
    strange.module.config.model_type = "something else"  # pyright: ignore
    found = records_of(strange)
    assert math.isnan(found["block.0", "query_drift"].value)
    assert found["block.0", "query_drift"].note == (
        "how the fused projection of something else holds queries and keys is not known"
    )
    assert found["block.0", "attention_entropy"].note is None
    # As where queries and gates come out of one projection.
    gated = build("llama")
    gated.module.config.head_dim = E // 2  # pyright: ignore
    assert "do not fit 4 heads of 4" in str(records_of(gated)["block.1", "key_drift"].note)
    config = tf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
    mamba = adopt_model(CAUSAL.from_config(config), None, name="mamba")
    for (_, name), answer in records_of(mamba).items():
        assert math.isnan(answer.value)
        assert math.isnan(answer.null)
        wanted = "no attention weights" if name == "attention_entropy" else "does not say how many attention heads"
        assert wanted in str(answer.note)


class Plain(nn.Module):
    """Blocks with no attention, of nobody's library."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embed(ids)
        for block in self.blocks:
            states = block(states)
        return states


def test_a_module_without_config_is_nan_with_a_note() -> None:
    found = records_of(adopt_model(Plain(), None, name="plain"))
    assert len(found) == 12
    assert all(math.isnan(answer.value) and answer.note for answer in found.values())


def test_everything_is_left_as_it_was() -> None:
    model = build("gpt2")
    model.module.train()
    model.module.transformer.h[1].eval()  # pyright: ignore
    modes = [part.training for part in model.module.modules()]
    assert model.module.config._attn_implementation == "sdpa"  # pyright: ignore
    records_of(model)

    def fail(site: Site, seen: Seen) -> None:
        assert model.module.config._attn_implementation == "eager"  # pyright: ignore
        raise ValueError(site.name)

    with pytest.raises(ValueError, match=r"block\.0"), eager_attention(model.module):
        look_at_attention(model, IDS[:1], [Site(name="block.0", depth=0.5)], fail)
    assert model.module.config._attn_implementation == "sdpa"  # pyright: ignore
    assert [part.training for part in model.module.modules()] == modes
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.module.modules())


# In the walk


@pytest.fixture(scope="module")
def decoder(saved_models: dict[str, Path]) -> Model:
    return load_model(str(saved_models["decoder"]), device="cpu")


def spec_for(corpus: Path, **changes: Any) -> an.Spec:
    return an.Spec(model="tiny", corpus=str(corpus), **{"tokens": 1024, "seq_len": 64, "batch_points": 512, **changes})


def test_the_walk_measures_attention_at_the_blocks_asked_for(decoder: Model, corpus_file: Path) -> None:
    spec = spec_for(corpus_file, metrics=(*NAMES, "mean_cosine"), sites=("block.1", "block.4", "final_norm"))
    unit = measure(spec, model=decoder, progress=False)
    rows = {(row.site, row.metric): row for row in unit.records if row.metric in NAMES}
    assert set(rows) == {(f"block.{k}", name) for k in (1, 4) for name in NAMES}
    windows = torch.from_numpy(draw(spec, decoder, load_corpus(str(corpus_file))).token_ids)
    expected = records_of(decoder, ids=windows)
    for key, row in rows.items():
        assert row.values == expected[key].values
        assert (row.batches, row.points, row.excluded, row.population) == (8, 8 * 64, 8 * 64, "all")
        assert row.depth is not None
    assert "attention was looked at in the first 8 windows" in unit.provenance["notes"]
    assert len([row for row in unit.records if row.metric == "mean_cosine" and row.batches == 2]) == 6


def test_attention_alone_takes_no_other_pass(
    decoder: Model, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anisoscope.running.capture", None)
    unit = measure(spec_for(corpus_file, metrics=NAMES), model=decoder, progress=False)
    assert {row.metric for row in unit.records} == set(NAMES)
    assert all(math.isfinite(row.value) for row in unit.records)


def test_the_family_does_not_bring_them_along_and_a_matrix_has_none() -> None:
    from anisoscope.metrics import find_metrics

    assert not {metric.name for metric in find_metrics(["drift"])} & set(NAMES)
    for name in NAMES:
        with pytest.raises(SpecError, match="needs a model, not a matrix of points"):
            an.estimate(np.eye(4), [name])


# Rows of the output embedding


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moved(before: Tensor, after: Tensor, state: Tensor, counts: np.ndarray | None = None) -> RowUpdates:
    known = np.ones(len(before), int) if counts is None else counts
    return RowUpdates.between(before, after, state, torch.from_numpy(known))


def test_common_drift_known_answers() -> None:
    before, state = normal(100, 8), normal(8, seed=1)
    against = moved(before, before - 0.1 * state, state)
    assert float(common_drift(against)) == pytest.approx(1)
    assert float(common_drift_share(against)) == pytest.approx(1)
    assert float(common_drift(moved(before, before + 0.1 * state, state))) == pytest.approx(-1)
    # Half of the rows move by 3a, the others by -a: mean a, mean length 2a.
    moves = torch.where(torch.arange(100) < 50, 3.0, -1.0)[:, None] * state
    assert float(common_drift_share(moved(before, before - moves, state))) == pytest.approx(0.5)
    still = moved(before, before, state)
    assert math.isnan(common_drift(still))
    assert math.isnan(common_drift_share(still))
    random = [moved(torch.zeros(400, 64), normal(400, 64, seed=seed), normal(64)) for seed in range(50)]
    assert np.mean([float(common_drift_share(one)) ** 2 for one in random]) ** 0.5 == pytest.approx(400**-0.5, rel=0.05)
    assert abs(np.mean([float(common_drift(one)) for one in random])) < 4 * (64 * 50) ** -0.5


def test_common_drift_is_that_of_a_sum_by_hand_whatever_the_dtype() -> None:
    before, after, state = normal(50, 6).float(), normal(50, 6, seed=1).float(), normal(6, seed=2).float()
    updates = [[float(after[v, j]) - float(before[v, j]) for j in range(6)] for v in range(50)]
    mean = [math.fsum(update[j] for update in updates) / 50 for j in range(6)]
    opposite = [-float(item) for item in state]
    cosine = math.fsum(a * b for a, b in zip(mean, opposite, strict=True)) / (math.hypot(*mean) * math.hypot(*opposite))
    rows = moved(before, after, state)
    assert float(common_drift(rows)) == pytest.approx(cosine, rel=1e-12)
    share = math.hypot(*mean) / np.mean([math.hypot(*u) for u in updates])
    assert float(common_drift_share(rows)) == pytest.approx(share, rel=1e-12)
    with pytest.raises(SpecError, match="cannot be compared"):
        moved(before, after[:9], state)


def test_rare_drift_known_answers() -> None:
    counts = np.arange(200)[::-1].copy()  # row 199 never occurs, row 0 most often
    directions, none, state = normal(200, 4), torch.zeros(200, 4), normal(4)
    directions /= directions.norm(dim=1, keepdim=True)
    lengths = torch.ones(200, 1).double()
    lengths[170:] = 3
    lengths[199] = 1000
    assert float(rare_drift(moved(none, lengths * directions, state, counts))) == pytest.approx(3)
    lengths = 1 + normal(200, 1, seed=3).abs()
    # 199 types occur: tenths of 19.
    expected = float(lengths[180:199].mean() / lengths[:19].mean())
    assert float(rare_drift(moved(none, lengths * directions, state, counts))) == pytest.approx(expected)
    longer = moved(none, lengths * directions, state, np.append(counts, 0))
    assert float(rare_drift(longer)) == pytest.approx(expected)
    with pytest.raises(SpecError, match="tokens are counted that have no row"):
        moved(none, lengths * directions, state, np.append(counts, 1))
    assert math.isnan(rare_drift(moved(none, lengths * directions, state, counts.clip(max=1) * (counts < 9))))
    assert math.isnan(rare_drift(moved(none, none, state, counts)))


def test_a_run_is_followed_interval_by_interval(
    saved_models: dict[str, Path], corpus_file: Path, tmp_path: Path
) -> None:
    spec = spec_for(corpus_file)
    site = Site(name="final_norm")
    steps = (0, 10, 30)
    model = load_model(str(saved_models["decoder"]), device="cpu")
    module: Any = model.module
    for number, step in enumerate(steps):
        folder = tmp_path / f"checkpoint-{step}"
        module.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)
        ids = torch.from_numpy(draw(spec, model, load_corpus(str(corpus_file))).token_ids)
        mean = capture(model, ids, [site]).states[site].mean((0, 1))
        # First against the mean state, then along it.
        module.lm_head.weight.data += (-0.1 if number == 0 else 0.1) * mean
    run = [Checkpoint(model=str(tmp_path), revision=f"checkpoint-{step}", step=step) for step in steps]
    store = Store(tmp_path / "run")
    units = follow_drift(run, spec, store=store, device="cpu")
    values = [{record.metric: record.value for record in unit.records} for unit in units]
    assert [one["common_drift"] for one in values] == pytest.approx([1, -1], abs=1e-4)
    for one in values:
        assert (one["common_drift_share"], one["rare_drift"]) == (pytest.approx(1, 1e-4), pytest.approx(1, 1e-4))
    assert [(unit.records[0].step, unit.records[0].variant) for unit in units] == [(10, "from=0"), (30, "from=10")]
    assert store.keys() == {unit.spec.key for unit in units}
    # What is stored is not measured again: nothing could be loaded on such a device.
    again = follow_drift(run, spec, store=store, device="nowhere")
    assert [repr(unit.records) for unit in again] == [repr(unit.records) for unit in units]
    assert follow_drift(run[:1], spec, device="cpu") == []
    with pytest.raises(SpecError, match="compares two checkpoints"):
        an.measure(replace(spec, metrics=("common_drift",)), model=model.module, tokenizer=model.tokenizer)
