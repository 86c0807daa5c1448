"""From text to records, on models built here."""

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shell import APART

import anisoscope as an
from anisoscope.cloud import Cloud, select_population
from anisoscope.corpora import load_corpus
from anisoscope.errors import CorpusError, ModelError, SpecError, StatesError
from anisoscope.estimates import deal
from anisoscope.metrics import all_metrics
from anisoscope.models import Model, load_model
from anisoscope.text import draw_windows, plan_pools
from anisoscope.walk import measure, resolve

SMALL = {"tokens": 4096, "seq_len": 64, "batch_points": 512}


@pytest.fixture(scope="module")
def decoder(saved_models: dict[str, Path]) -> Model:
    return load_model(str(saved_models["decoder"]), device="cpu")


@pytest.fixture(scope="module")
def encoder(saved_models: dict[str, Path]) -> Model:
    return load_model(str(saved_models["encoder"]), device="cpu")


def spec_for(corpus: Path, **changes: Any) -> an.Spec:
    return an.Spec(model="tiny", corpus=str(corpus), **{**SMALL, **changes})


@pytest.fixture(scope="module")
def unit(decoder: Model, corpus_file: Path) -> an.Unit:
    return measure(spec_for(corpus_file), model=decoder, progress=False)


def rows(unit: an.Unit, **wanted: Any) -> list[an.Record]:
    return [row for row in unit.records if all(getattr(row, name) == value for name, value in wanted.items())]


def test_default_metrics_populations_and_sites_are_those_promised(unit: an.Unit) -> None:
    found = {(row.metric, row.population) for row in unit.records}
    spectral = ("leading_variance", "mean_cosine", "isoscore", "participation_ratio")
    assert found == {
        *((name, population) for name in spectral for population in ("all", "typical")),
        *(("twonn", population) for population in ("all", "types", "matched")),
        ("loss", "all"),
    }
    sites = [row.site for row in rows(unit, metric="twonn", population="all")]
    assert sites == ["embed", *(f"block.{k}" for k in range(6)), "final_norm"]
    assert [row.depth for row in rows(unit, metric="twonn", population="all")] == [
        None,
        *((k + 1) / 6 for k in range(6)),
        None,
    ]
    assert [row.site for row in rows(unit, metric="loss")] == ["output"]


def test_every_number_carries_spread_null_and_population(unit: an.Unit) -> None:
    for row in unit.records:
        assert math.isfinite(row.value), row
        assert math.isfinite(row.spread), row
        assert row.batches == len(row.values) == 8
        assert row.population in ("all", "typical", "types", "matched")
        assert math.isfinite(row.null) or all_metrics()[row.metric].null == "none", row
        assert row.points + row.dropped + row.excluded == 4096
        assert row.value == pytest.approx(np.mean(row.values))
        assert row.spread == pytest.approx(np.std(row.values, ddof=1))


def test_values_are_those_of_the_states_themselves(unit: an.Unit, decoder: Model, corpus_file: Path) -> None:
    """The walk once more by hand: transformers' own hidden states, float64 algebra, the same deal."""
    corpus = load_corpus(str(corpus_file))
    windows = draw_windows(corpus, decoder.tokenizer, seq_len=64, count=64, seed=0)
    with torch.no_grad():
        states = decoder.module(torch.from_numpy(windows.token_ids), output_hidden_states=True).hidden_states
    values = []
    for pool in plan_pools(64, 64, 512):
        points = states[3][pool.start : pool.stop].flatten(0, 1).double()
        seed = int(np.random.SeedSequence((0, pool.first)).generate_state(1, np.uint32)[0])
        for hand in deal(len(points), pool.batches, seed):
            centred = points[hand] - points[hand].mean(0)
            squares = torch.linalg.svdvals(centred) ** 2
            values.append(float(squares[0] / squares.sum()))
    (row,) = rows(unit, metric="leading_variance", population="all", site="block.2")
    assert row.values == pytest.approx(values, rel=1e-5)


def test_loss_is_the_models_own(unit: an.Unit, decoder: Model, corpus_file: Path) -> None:
    windows = draw_windows(load_corpus(str(corpus_file)), decoder.tokenizer, seq_len=64, count=64, seed=0)
    ids = torch.from_numpy(windows.token_ids)
    with torch.no_grad():
        expected = float(decoder.module(ids, labels=ids).loss)
    (row,) = rows(unit, metric="loss")
    # The mean of batch means: batches hold nearly, not exactly, the same number of predicted tokens.
    assert row.value == pytest.approx(expected, rel=1e-3)
    assert row.points == 64 * 63


def test_an_encoder_without_final_norm_is_measured_and_its_masked_loss(encoder: Model, corpus_file: Path) -> None:
    unit = measure(spec_for(corpus_file), model=encoder, progress=False)
    assert {row.kind for row in unit.records} == {"encoder"}
    assert not rows(unit, site="final_norm")
    (loss,) = rows(unit, metric="loss")
    assert 6 < loss.value < 9
    assert 0.10 < loss.points / 4096 < 0.20
    (row,) = rows(unit, metric="leading_variance", population="typical", site="block.0")
    assert row.excluded >= 2 * 64  # [CLS] and [SEP] of every window
    (again,) = rows(measure(spec_for(corpus_file), model=encoder, progress=False, batch_size=3), metric="loss")
    assert again.values == pytest.approx(loss.values, rel=1e-5)  # the masks are those of the windows, not of the passes


def test_the_same_spec_gives_the_same_bits(unit: an.Unit, decoder: Model, corpus_file: Path) -> None:
    again = measure(spec_for(corpus_file), model=decoder, progress=False, batch_size=3)
    assert again.key == unit.key
    for one, two in zip(unit.records, again.records, strict=True):
        assert one.values == pytest.approx(two.values, rel=1e-5), one.metric
    other = measure(spec_for(corpus_file, seed=1), model=decoder, progress=False)
    assert other.key != unit.key
    assert other.records[0].values != unit.records[0].values


def test_pools_hold_at_least_four_batches_of_at_least_batch_points() -> None:
    for count, length, batch_points in (
        (128, 512, 4096),
        (164, 100, 4096),
        (150, 512, 4096),
        (40, 512, 4096),
        (37, 64, 512),
    ):
        pools = plan_pools(count, length, batch_points)
        assert [pool.start for pool in pools[1:]] == [pool.stop for pool in pools[:-1]]
        assert pools[-1].stop == count
        assert all(4 <= pool.batches < 8 for pool in pools)
        assert all((pool.stop - pool.start) * length // pool.batches >= batch_points for pool in pools)
        assert [pool.first for pool in pools] == list(np.cumsum([0, *(pool.batches for pool in pools)]))[:-1]
    assert len(plan_pools(128, 512, 4096)) == 4
    (small,) = plan_pools(3, 64, 512)
    assert small.batches == 1


def test_a_batch_holds_points_of_many_documents(decoder: Model, corpus_file: Path) -> None:
    windows = draw_windows(load_corpus(str(corpus_file)), decoder.tokenizer, seq_len=64, count=64, seed=0)
    pool = plan_pools(64, 64, 512)[0]
    documents = torch.from_numpy(windows.documents[pool.start : pool.stop]).flatten()
    in_pool = len(documents.unique())
    dealt = [len(documents[hand].unique()) for hand in deal(len(documents), pool.batches, 0)]
    # Shuffling inside a batch keeps the documents of its own windows: a quarter of what dealing gives.
    shuffled = [len(part.unique()) for part in documents.tensor_split(pool.batches)]
    assert min(dealt) >= 0.9 * in_pool
    assert max(shuffled) < 0.7 * in_pool


def test_populations_of_the_walk_are_those_of_the_batch(unit: an.Unit) -> None:
    (types,) = rows(unit, metric="twonn", population="types", site="block.3")
    (matched,) = rows(unit, metric="twonn", population="matched", site="block.3")
    assert types.points + types.dropped == matched.points + matched.dropped
    assert types.points < 0.9 * 4096
    excluded = {row.excluded for row in rows(unit, metric="twonn", population="types")}
    assert len(excluded) == 1  # the same tokens at every site


def test_sites_and_populations_can_be_chosen(decoder: Model, corpus_file: Path) -> None:
    spec = spec_for(corpus_file, sites=("block.[24]",), populations=("content",), metrics=("mean_cosine",))
    unit = measure(spec, model=decoder, progress=False)
    assert [(row.site, row.population, row.excluded) for row in unit.records] == [
        ("block.2", "content", 64),
        ("block.4", "content", 64),
    ]


def test_linearity_compares_neighbouring_sites(decoder: Model, corpus_file: Path) -> None:
    spec = spec_for(corpus_file, metrics=("linearity",), populations=("all",), batch_points=1024)
    unit = measure(spec, model=decoder, progress=False)
    order = ["embed", *(f"block.{k}" for k in range(6)), "final_norm"]
    metrics = {row.metric for row in unit.records}
    assert "procrustes_linearity" in metrics
    assert len(metrics) > 1
    assert sorted((row.metric, row.site) for row in unit.records) == sorted(itertools.product(metrics, order))
    for row in unit.records:
        if row.site == "embed":
            assert math.isnan(row.value)
            assert row.note == "there is no earlier site to compare with"
        else:
            assert 0.9 < row.value <= 1
            assert row.variant == f"from={order[order.index(row.site) - 1]}"
            assert row.null == pytest.approx(128 / 1023 if row.metric == "procrustes_linearity" else -128 / 382)


def test_owners_name_planted_tokens_and_coordinates(decoder: Model, corpus_file: Path) -> None:
    """The first position of every window gets one huge coordinate after block 1."""

    def plant(_: Any, __: Any, output: Any) -> Any:
        state = output[0] if isinstance(output, tuple) else output
        state = state.clone()
        state[:, 0, 17] += 1e4
        return (state, *output[1:]) if isinstance(output, tuple) else state

    handle = decoder.module.transformer.h[1].register_forward_hook(plant)
    try:
        unit = measure(spec_for(corpus_file), model=decoder, progress=False)
    finally:
        handle.remove()
    owner = next(entry for entry in unit.owners() if entry["site"] == "block.1")
    # One point in 64 at a distance leaves (1/64) of the axis to the mean that it moved away from the others.
    assert owner["first_position_share"] == pytest.approx(63 / 64, abs=0.002)
    assert all(token["position"] == 0 for token in owner["tokens"])
    assert owner["coordinates"][0]["coordinate"] == 17
    assert owner["coordinates"][0]["share"] > 0.99
    assert len(owner["tokens"]) == len(owner["coordinates"]) == 10
    (everyone,) = rows(unit, metric="leading_variance", population="all", site="block.1")
    (typical,) = rows(unit, metric="leading_variance", population="typical", site="block.1")
    assert everyone.value > 0.99
    assert typical.value < 0.3
    before = next(entry for entry in unit.owners() if entry["site"] == "block.0")
    assert before["first_position_share"] < 0.5


def test_owners_come_in_the_order_of_sites_also_from_a_store(unit: an.Unit, tmp_path: Path) -> None:
    store = an.Store(tmp_path)
    store.put(unit)
    sites = ["embed", *(f"block.{k}" for k in range(6)), "final_norm"]
    assert [entry["site"] for entry in unit.owners()] == sites
    assert store.get(unit.key).owners() == unit.owners()


def test_states_that_are_not_finite_name_site_and_count(decoder: Model, corpus_file: Path) -> None:
    def spoil(_: Any, __: Any, output: Any) -> Any:
        state = (output[0] if isinstance(output, tuple) else output).clone()
        state[0, 5, 7] = math.nan
        return (state, *output[1:]) if isinstance(output, tuple) else state

    handle = decoder.module.transformer.h[4].register_forward_hook(spoil)
    try:
        with pytest.raises(StatesError, match=r"block\.4: 1 of [\d,]+ values are NaN or infinite"):
            measure(spec_for(corpus_file, sites=("block.*",), tokens=512), model=decoder, progress=False)
    finally:
        handle.remove()


def test_constant_states_give_nan_with_a_note(decoder: Model, corpus_file: Path) -> None:
    def flatten(_: Any, __: Any, output: Any) -> Any:
        state = torch.full_like(output[0] if isinstance(output, tuple) else output, 0.1)
        return (state, *output[1:]) if isinstance(output, tuple) else state

    handle = decoder.module.transformer.h[5].register_forward_hook(flatten)
    try:
        unit = measure(spec_for(corpus_file, sites=("block.5",)), model=decoder, progress=False)
    finally:
        handle.remove()
    for row in rows(unit, site="block.5"):
        if row.metric == "mean_cosine":
            assert row.value == pytest.approx(1)
        else:
            assert math.isnan(row.value), row
            assert row.note, row
    (row,) = rows(unit, metric="twonn", population="all")
    assert row.note == "1 distinct points, and it needs 3"


def test_memory_running_out_halves_the_batch_and_says_so(decoder: Model, corpus_file: Path) -> None:
    def limited(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[0] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")

    handle = decoder.module.register_forward_pre_hook(limited, with_kwargs=True)
    try:
        unit = measure(spec_for(corpus_file), model=decoder, progress=False, batch_size=16)
    finally:
        handle.remove()
    assert "memory ran out: windows in a forward pass halved to 2" in unit.provenance["notes"]
    plain = measure(spec_for(corpus_file), model=decoder, progress=False)
    assert unit.records[0].values == pytest.approx(plain.records[0].values, rel=1e-5)


def test_memory_running_out_at_one_window_is_a_clear_error(decoder: Model, corpus_file: Path) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory (planted)")

    handle = decoder.module.register_forward_pre_hook(full)
    try:
        with pytest.raises(ModelError, match="memory ran out at one window of 64 tokens"):
            measure(spec_for(corpus_file), model=decoder, progress=False)
    finally:
        handle.remove()


def test_fewer_points_than_a_batch_are_measured_with_a_note(decoder: Model, corpus_file: Path) -> None:
    unit = measure(spec_for(corpus_file, tokens=128, batch_points=4096), model=decoder, progress=False)
    assert any("128 points in all, fewer than batch_points = 4096" in note for note in unit.provenance["notes"])
    (row,) = rows(unit, metric="leading_variance", population="all", site="block.0")
    assert row.batches == 1
    assert math.isnan(row.spread)


def test_bad_requests_are_clear(decoder: Model, corpus_file: Path) -> None:
    for changes, words in (
        ({"metrics": ("twonnn",)}, "did you mean twonn"),
        ({"populations": ("everyone",)}, "must be out of all, content, typical, types, matched; got 'everyone'"),
        ({"tokens": 0}, "must be a whole number between 1 and"),
        ({"batch_points": 1}, "must be a whole number between 2 and"),
        ({"discard_fraction": 1.0}, "must be a number between 0.0 and 0.99"),
        ({"seq_len": 1024}, "has 512 positions"),
        ({"sites": ("block.9",)}, "block.9"),
        ({"metrics": (("twonn", 99),)}, "asks for version 99 of twonn"),
        ({"gride_scales": (3,)}, "out of 2, 4, 8, 16, 32, 64; got 3"),
    ):
        with pytest.raises(SpecError, match=words):
            measure(spec_for(corpus_file, **changes), model=decoder, progress=False)
    with pytest.raises(CorpusError):
        measure(an.Spec(model="tiny", corpus=str(corpus_file / "nothing")), model=decoder, progress=False)


def test_a_module_and_tokenizer_can_be_handed_in(decoder: Model, corpus_file: Path, unit: an.Unit) -> None:
    handed = an.measure(spec_for(corpus_file), model=decoder.module, tokenizer=decoder.tokenizer, progress=False)
    assert handed.records[3].values == pytest.approx(unit.records[3].values, rel=1e-6)


def test_the_key_is_known_before_the_run(saved_models: dict[str, Path], corpus_file: Path) -> None:
    spec = replace(spec_for(corpus_file, tokens=512), model=str(saved_models["decoder"]))
    before = resolve(spec)
    unit = measure(spec, progress=False)
    assert unit.key == before.key == resolve(unit.spec).key
    assert unit.spec.weights
    assert unit.spec.corpus_hash
    assert unit.spec.metrics[0] == ("leading_variance", 1)
    assert resolve(replace(spec, dtype="bfloat16")).key != before.key
    with pytest.raises(SpecError, match="the Spec is about weights with hash"):
        resolve(replace(before, weights="other"))
    with pytest.raises(SpecError, match="the Spec is about corpus with hash"):
        resolve(replace(before, corpus_hash="other"))


def test_an_encoder_decoder_has_two_stacks_and_shifted_decoder_tokens(decoder: Model, corpus_file: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=2048, d_model=48, d_kv=12, d_ff=96, num_layers=3, num_decoder_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    module = T5ForConditionalGeneration(config).eval()
    unit = an.measure(
        spec_for(corpus_file, populations=("all", "content")), model=module, tokenizer=decoder.tokenizer, progress=False
    )
    assert {row.kind for row in unit.records} == {"encoder-decoder"}
    blocks = [(row.stack, row.site) for row in rows(unit, metric="twonn", population="all") if row.depth]
    assert blocks == [("encoder", f"block.{k}") for k in range(3)] + [("decoder", f"block.{k}") for k in range(2)]
    (loss,) = rows(unit, metric="loss")
    assert math.isnan(loss.value)
    assert loss.note == "the model has no language-model head"


def test_memory_does_not_grow_with_the_tokens(saved_models: dict[str, Path], corpus_file: Path, tmp_path: Path) -> None:
    code = """
import resource, sys
import anisoscope as an
for tokens in sys.argv[3:]:
    spec = an.Spec(
        model=sys.argv[1], corpus=sys.argv[2], tokens=int(tokens), seq_len=128, metrics=("mean_cosine",)
    )
    an.measure(spec, progress=False)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(path.read_text() for path in sorted(corpus_file.iterdir())) * 4)
    # Two pools, and then six by the same process: keeping the states of four more would add 270 MB to about 650.
    command = [*APART, sys.executable, "-c", code, str(saved_models["decoder"]), str(text), "32768", "98304"]
    told = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    first, peak = (int(line) for line in told.splitlines())
    assert peak < 1.1 * first


def test_estimate_takes_numpy_and_torch_and_deals_batches() -> None:
    points = np.random.default_rng(0).normal(size=(1000, 8))
    one = an.estimate(points, ["leading_variance", "twonn"], batch_points=250)
    two = an.estimate(torch.from_numpy(points), ["leading_variance", "twonn"], batch_points=250)
    assert one["twonn"] == two["twonn"]
    assert one["leading_variance"].batches == 4
    assert one["leading_variance"].points == 1000
    assert an.estimate(points, "twonn", batch_points=250)["twonn"] == one["twonn"]
    whole = an.estimate(points)["twonn"]
    assert whole.batches == 1
    assert math.isnan(whole.spread)
    assert whole.null == pytest.approx(7.9, abs=0.5)


def test_estimate_refuses_what_is_no_matrix_of_floats() -> None:
    for wrong in (np.zeros(5), np.zeros((5, 3), dtype=int), np.zeros((0, 3)), np.zeros((2, 3, 4))):
        with pytest.raises(SpecError, match="matrix of floats"):
            an.estimate(wrong)
    with pytest.raises(StatesError, match="points: 2 of 15 values are NaN or infinite"):
        an.estimate(np.array([[1.0, math.nan, 2.0], [1.0, math.inf, 3.0], *np.ones((3, 3))]))
    with pytest.raises(SpecError, match="needs a model"):
        an.estimate(np.zeros((5, 3)), ["loss"])


def test_types_do_not_depend_on_the_points() -> None:
    """So that the same tokens are compared at every site and checkpoint."""
    from anisoscope.cloud import Tokens

    ids = torch.randint(0, 30, (200,), generator=torch.Generator().manual_seed(0))
    tokens = Tokens(
        ids=ids,
        positions=torch.arange(200) % 50,
        documents=torch.zeros_like(ids),
        special=torch.zeros(200, dtype=torch.bool),
    )
    for name in ("types", "matched"):
        chosen = [
            select_population(name, Cloud(points=torch.randn(200, 5)).points, tokens, typical_k=6.0, seed=3)
            for _ in range(2)
        ]
        assert torch.equal(*chosen)


def test_weights_are_sites_of_their_own(decoder: Model, corpus_file: Path) -> None:
    spec = spec_for(corpus_file, sites=("*.weight", "block.1"), metrics=("mean_cosine", "participation_ratio", "twonn"))
    unit = measure(spec, model=decoder, progress=False)
    # The small decoder's matrices are tied: one of them is measured, raw and centred.
    found = rows(unit, site="embed.weight", metric="mean_cosine")
    assert [row.variant for row in found] == ["centred=no", "centred=yes"]
    assert {row.population for row in found} == {"rows"}
    assert {row.points for row in found} == {2048}
    assert "tied" in (found[0].note or "")
    matrix = decoder.module.get_input_embeddings().weight.detach().double()
    unit_rows = matrix / matrix.norm(dim=1, keepdim=True)
    products = unit_rows @ unit_rows.T
    brute = (products.sum() - products.trace()) / (2048 * 2047)
    assert found[0].value == pytest.approx(float(brute), abs=1e-9)
    assert {row.site for row in rows(unit, metric="twonn")} == {"block.1"}
    assert unit.attachments["weights/embed.weight.centred=no.coordinates"].shape == (2000, 2)
    alone = measure(
        spec_for(corpus_file, sites=("embed.weight",), metrics=("mean_cosine",)), model=decoder, progress=False
    )
    assert [row.value for row in alone.records] == [row.value for row in found]
    with pytest.raises(SpecError, match=r"embed\.weight, unembed\.weight"):
        measure(spec_for(corpus_file, sites=("head.weight",)), model=decoder, progress=False)
