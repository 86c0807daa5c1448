"""Losses and gradients of a large vocabulary: computed in chunks, equal to those of whole logits, in bounded memory."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shell import APART
from torch import Tensor, nn

from anisoscope import capture as capturing
from anisoscope.capture import capture, predict, token_losses, windows_per_pass
from anisoscope.gradients import capture_gradients
from anisoscope.models import Model, load_model, sites_of
from anisoscope.text import Windows

MEMORY = """
import resource, sys
import torch
import transformers
import anisoscope as an
from anisoscope.models import load_model

torch.set_num_threads(1)
kind, cap, sites = sys.argv[1], float(sys.argv[2]), ("embed", "block.0")
tokenizer = load_model("pocket-" + ("encoder" if kind == "bert" else "decoder")).tokenizer
sizes = dict(vocab_size=300_000, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
torch.manual_seed(0)
if kind == "bert":
    module = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
else:
    config = transformers.Gemma2Config(**sizes, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)
    config.final_logit_softcapping = cap or None
    module = transformers.Gemma2ForCausalLM(config)
spec = an.Spec(
    model="large", corpus=sys.argv[3], tokens=int(sys.argv[4]), seq_len=256, sites=sites,
    metrics=("mean_cosine", "loss", "alignment"),
    populations=("all",), controls=(),
)
unit = an.measure(spec, model=module, tokenizer=tokenizer, progress=False)
loss = [record for record in unit.records if record.metric == "loss"]
assert loss and loss[0].points > 500, loss
assert any(record.gradient for record in unit.records)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << (20 if sys.platform == "darwin" else 10)))
"""


@pytest.mark.parametrize(
    ("kind", "cap", "tokens", "limit"),
    [("gemma2", 0.0, 4096, 1200), ("bert", 0.0, 4096, 1200), ("gemma2", 30.0, 1024, 2600)],
)
def test_a_vocabulary_of_300_000_is_measured_in_bounded_memory(
    kind: str, cap: float, tokens: int, limit: float, corpus_file: Any
) -> None:
    # The logits of 4,096 tokens are 4.9 GB. Capped logits come whole, one window at a time.
    command = [*APART, sys.executable, "-c", MEMORY, kind, str(cap), str(corpus_file), str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < limit


# In chunks and whole


@pytest.fixture(params=["decoder", "encoder"])
def model(request: pytest.FixtureRequest) -> Model:
    return load_model(f"pocket-{request.param}", device="cpu")


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four positions a chunk, and logits of any size too large."""
    with monkeypatch.context() as patch:
        patch.setattr(capturing, "_LOGITS_BYTES", (4, 4))
        patch.setattr(capturing, "_CHUNK_BYTES", 4 * 4 * 2048)
        yield


def windows(model: Model, count: int = 5, length: int = 24) -> Windows:
    ids = torch.randint(20, 400, (count, length), generator=torch.Generator().manual_seed(1)).numpy()
    return Windows(token_ids=ids, documents=0 * ids, special=ids < 0, sentences=0 * ids, notes=())


def measured(model: Model) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of the state pass; losses and gradients of the gradient pass."""
    given, sites = windows(model), sites_of(model.layout)
    ids = torch.from_numpy(given.token_ids)
    losses = token_losses(model, ids, capture(model, ids, sites), range(len(ids)))
    assert losses is not None
    found = capture_gradients(model, given, sites)
    assert found.tokens.losses is not None
    return losses, found.tokens.losses, torch.stack([found.sites[site].gradients for site in sites])


def test_losses_and_gradients_in_chunks_equal_those_of_whole_logits(model: Model, monkeypatch: Any) -> None:
    assert model.plain_head is not None
    whole = measured(model)
    heads: list[int] = []
    head = model.module.get_submodule(model.plain_head)
    handle = head.register_forward_hook(lambda _, __, output: heads.append(output.shape[:-1].numel()))
    monkeypatch.setattr(capturing, "_LOGITS_BYTES", (4, 4))
    monkeypatch.setattr(capturing, "_CHUNK_BYTES", 4 * 7 * model.logits_width)
    pieces = measured(model)
    handle.remove()
    # The model itself ran its head on nothing; every chunk had seven positions at most.
    assert 0 in heads
    assert max(heads) == 7
    for one, other in zip(whole, pieces, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert (~one.isnan()).any()
        known = ~one.isnan()
        assert (one - other)[known].norm() < 1e-6 * one[known].norm()


def test_logits_that_fit_come_whole(model: Model) -> None:
    found = predict(model, torch.from_numpy(windows(model).token_ids))
    assert found is not None
    assert found.head is None
    assert found.rows.shape == (5, 24, model.logits_width)


def test_captured_logits_of_a_large_head_are_those_of_the_model(model: Model, chunked: None) -> None:
    ids = torch.from_numpy(windows(model).token_ids)
    found = capture(model, ids, ())
    assert found.predictions is not None
    assert found.predictions.head is not None
    expected = predict(model, ids, whole=True)
    assert expected is not None
    assert found.logits is not None
    torch.testing.assert_close(found.logits, expected.rows, rtol=1e-6, atol=1e-6)


def scale(_: nn.Module, __: Any, output: Any) -> Any:
    output.logits = output.logits * 0.5
    return output


def scale_in_place(_: nn.Module, __: Any, output: Any) -> None:
    output.logits *= 0.5


@pytest.mark.parametrize("change", [scale, scale_in_place])
def test_logits_that_are_changed_after_the_head_come_whole_one_window_at_a_time(
    model: Model, change: Any, chunked: None
) -> None:
    from anisoscope.models import adopt_model

    handle = model.module.register_forward_hook(change)
    capped = adopt_model(model.module, model.tokenizer, name="capped")
    assert model.plain_head is not None
    assert capped.plain_head is None
    assert windows_per_pass(capped, 24, 4096) == 1
    losses = measured(capped)[0].nan_to_num()
    handle.remove()
    assert not torch.allclose(losses, measured(model)[0].nan_to_num(), rtol=0.1)


def test_gradients_of_the_head_itself_are_those_of_whole_logits(chunked: None, monkeypatch: Any) -> None:
    decoder = load_model("pocket-decoder", device="cpu")
    pieces = capture_gradients(decoder, windows(decoder), (), embedding=True)
    monkeypatch.setattr(capturing, "_LOGITS_BYTES", (2**29, 2**32))
    whole = capture_gradients(decoder, windows(decoder), (), embedding=True)
    assert pieces.embedding is not None
    assert whole.embedding is not None
    assert pieces.embedding.predicted is not None
    assert whole.embedding.predicted is not None
    torch.testing.assert_close(pieces.embedding.predicted, whole.embedding.predicted, rtol=1e-5, atol=1e-6)
