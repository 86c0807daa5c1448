"""Reproductions: claims become verdicts and never more than the data say; models come from a real local hub."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hub import Hub
from shell import Shell
from typer.testing import CliRunner

from anisoscope.claims import judge
from anisoscope.cli import app
from anisoscope.columns import SCHEMA
from anisoscope.protocols import load_protocol
from anisoscope.reproductions import PAPERS, Outcome, find_paper, judge_paper
from anisoscope.reproductions.judging import _combined
from anisoscope.reproductions.nouns import Claimed, Paper, Reading, View
from anisoscope.reproductions.plans import plan_recipes, plan_settings, published
from anisoscope.reproductions.showing import print_listed, print_outcomes
from anisoscope.store import Store

BLOCKS, BATCHES = 8, 16
BELL = 0.1 + 0.5 * np.sin(np.linspace(0, np.pi, BLOCKS))
FLAT = np.full(BLOCKS, 0.1)
SMALL = ["--tokens", "512", "--seq-len", "64", "--batch-points", "128", "--device", "cpu", "--json"]


def rows(shape: np.ndarray, model: str, kind: str, seed: int, **rest: Any) -> list[dict[str, Any]]:
    """A profile of leading variance, in `all` and `typical`."""
    values = shape + 0.01 * np.random.default_rng(seed).normal(size=(BATCHES, BLOCKS))
    given = {"metric": "leading_variance", "corpus": "text", "key": f"{model}{rest}", **rest}
    return [
        {
            **given,
            "model": model,
            "kind": kind,
            "population": population,
            "site": f"block.{block}",
            "depth": (block + 1) / BLOCKS,
            "value": float(values[:, block].mean()),
            "values": values[:, block].tolist(),
        }
        for population in ("all", "typical")
        for block in range(BLOCKS)
    ]


def table(*parts: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist([row for part in parts for row in part], schema=SCHEMA)


def kinds(decoder: np.ndarray, encoder: np.ndarray) -> pa.Table:
    decoders = [rows(decoder, f"decoder{number}", "decoder", number) for number in range(4)]
    encoders = [rows(encoder, f"encoder{number}", "encoder", 10 + number) for number in range(4)]
    return table(*decoders, *encoders)


def verdict_of(outcomes: list[Outcome], claim: str, view: str, population: str = "all") -> str:
    (found,) = [one for one in outcomes if (one.claim, one.view, one.population) == (claim, view, population)]
    return found.verdict


def test_bells_and_flat_profiles_are_reproduced_and_their_opposites_are_not() -> None:
    paper = find_paper("razzhigaev2024")
    as_printed = judge_paper(paper, kinds(BELL, FLAT))
    reversed_ = judge_paper(paper, kinds(FLAT, BELL))
    for claim in ("decoders are bells", "encoders are flat"):
        for view in ("the kind", "each model"):
            assert verdict_of(as_printed, claim, view) == "reproduced", (claim, view)
            assert verdict_of(reversed_, claim, view) == "not reproduced", (claim, view)
    assert verdict_of(as_printed, "encoders and decoders differ", "the kinds", "typical") == "reproduced"


def test_too_few_models_are_never_a_verdict_about_their_kind() -> None:
    one = table(rows(BELL, "decoder0", "decoder", 0), rows(FLAT, "encoder0", "encoder", 1))
    outcomes = judge_paper(find_paper("razzhigaev2024"), one)
    assert verdict_of(outcomes, "decoders are bells", "the kind") == "inconclusive"
    assert verdict_of(outcomes, "decoders are bells", "each model") == "reproduced"
    (found,) = [
        o for o in outcomes if o.view == "the kind" and o.claim == "encoders are flat" and o.population == "all"
    ]
    assert "needs 3 models" in found.reason


def test_one_model_that_fails_outweighs_those_that_hold_and_encoders_do_not_speak_for_decoders() -> None:
    mixed = table(
        *(rows(BELL, f"decoder{number}", "decoder", number) for number in range(3)),
        rows(0.7 - BELL, "decoder3", "decoder", 3),
        rows(FLAT, "encoder0", "encoder", 4),
    )
    outcomes = judge_paper(find_paper("razzhigaev2024"), mixed)
    (found,) = [o for o in outcomes if (o.claim, o.view, o.population) == ("decoders are bells", "each model", "all")]
    assert found.verdict == "not reproduced"
    assert found.reason.startswith("3 hold, 1 do not, 0 are inconclusive")
    assert {one.subject for one in found.evidence} == {f"decoder{number}" for number in range(4)}


def test_units_of_other_requests_in_the_run_are_left_out() -> None:
    both = table(rows(BELL, "decoder0", "decoder", 0), rows(FLAT, "decoder1", "decoder", 1))
    outcomes = judge_paper(find_paper("razzhigaev2024"), both, keys={"decoder0{}"})
    assert verdict_of(outcomes, "decoders are bells", "each model") == "reproduced"


def test_a_claim_without_a_test_says_so_and_shows_numbers() -> None:
    claim = Claimed(
        name="large models are isotropic",
        predicts="they are",
        where="the abstract",
        untested="no test of it is known",
        readings=(Reading(metric="leading_variance", site="last", population="typical"),),
    )
    paper = made_up(claim)
    early = rows(FLAT, "decoder0", "decoder", 0, step=1)
    late = rows(BELL, "decoder0", "decoder", 0, step=9000)
    (found,) = judge_paper(paper, table(early, late))
    assert (found.verdict, found.population, found.evidence) == ("not tested here", None, ())
    assert found.reason == "no test of it is known"
    (reading,) = found.readings
    assert reading.startswith("decoder0 at step 9,000, text: leading_variance[block.7, typical] = 0.1")
    assert found.as_json()["effect"] is None


def made_up(*claims: Claimed) -> Paper:
    return Paper(
        name="made up",
        title="",
        protocols={"": "razzhigaev2024-print"},
        claims=claims,
        models=(),
        followed=(),
        corpora=(),
        kinds=("decoder",),
    )


def test_a_claim_is_picked_up_once_its_test_has_a_name() -> None:
    unknown = Claimed(name="a", predicts="", where="", views=(View(name="", tests=("a test to come",)),))
    known = Claimed(name="a", predicts="", where="", views=(View(name="", tests=("bell",)),))
    data = table(rows(BELL, "decoder0", "decoder", 0))
    assert [one.verdict for one in judge_paper(made_up(unknown), data)] == ["not tested here"]
    assert [one.verdict for one in judge_paper(made_up(known), data)] == ["reproduced", "reproduced"]


def test_what_a_paper_denies_is_reproduced_where_it_fails() -> None:
    bell = View(name="", tests=("bell",))
    denied = made_up(Claimed(name="a", predicts="", where="", views=(bell,), negated=True))
    there_is_one = made_up(Claimed(name="a", predicts="", where="", views=(bell,), negated=True, existential=True))
    with_bell, without = (table(rows(shape, "decoder0", "decoder", 0)) for shape in (BELL, FLAT))
    assert {one.verdict for one in judge_paper(denied, with_bell)} == {"not reproduced"}
    assert {one.verdict for one in judge_paper(denied, without)} == {"reproduced"}
    assert {one.verdict for one in judge_paper(there_is_one, with_bell)} == {"inconclusive"}
    assert {one.verdict for one in judge_paper(there_is_one, without)} == {"reproduced"}


def aligned(metric: str, value: float, p: float, **rest: Any) -> list[dict[str, Any]]:
    given = {"gradient": "virtual", "proxy": "pca", "variant": "mean=in", "corpus": "text", "kind": "decoder"}
    return [
        {
            **given,
            "key": "k",
            "model": "m",
            "metric": metric,
            "population": "all",
            "site": f"block.{block}",
            "depth": (block + 1) / 4,
            "value": value,
            "p": p,
            "values": [],
            **rest,
        }
        for block in range(4)
    ]


def test_our_control_and_the_papers_are_told_apart() -> None:
    """Gradients without a signal pass the paper's control alone, and the table says what that is worth."""
    outcomes = judge_paper(
        find_paper("bernas2026"), table(aligned("tangent_excess", 0.0, 0.6), aligned("normal_ratio", 30.0, 0.005))
    )
    assert verdict_of(outcomes, "tangent enrichment", "our control") == "inconclusive"
    assert verdict_of(outcomes, "tangent enrichment", "the paper's control") == "reproduced"
    (weak,) = [o for o in outcomes if o.view == "the paper's control" and o.claim == "tangent enrichment"]
    assert "without any signal pass this control too" in weak.reason


def test_only_the_gradient_and_proxy_named_beforehand_are_judged() -> None:
    others = [
        aligned("tangent_excess", 0.5, 0.005, gradient="activation"),
        aligned("tangent_excess", 0.5, 0.005, proxy="seminmf"),
        aligned("tangent_excess", 0.5, 0.005, variant="mean=out"),
    ]
    outcomes = judge_paper(find_paper("bernas2026"), table(aligned("tangent_excess", 0.2, 0.005), *others))
    (found,) = [o for o in outcomes if (o.claim, o.view) == ("tangent enrichment", "our control")]
    assert found.effect == pytest.approx(0.2)
    how = {"control": "permuted", "control_value": 0.1}
    shares = [
        aligned("tangent_anisotropy_share", value, 0.005, variant=f"mean={mean};share=energy", **how)
        for mean, value in (("in", 0.4), ("out", 0.9))
    ]
    outcomes = judge_paper(find_paper("bernas2026"), table(*shares))
    (found,) = [o for o in outcomes if (o.claim, o.view) == ("share of gradient anisotropy", "our control")]
    assert found.effect == pytest.approx(0.3)


@pytest.mark.parametrize("paper", PAPERS.values(), ids=PAPERS)
def test_every_claim_says_what_was_predicted_where_and_how_it_is_tested(paper: Paper) -> None:
    assert len({claim.name for claim in paper.claims}) == len(paper.claims)
    for claim in paper.claims:
        assert claim.predicts
        assert claim.where
        assert claim.views or claim.untested
    for variant, protocol in paper.protocols.items():
        assert set(paper.pocket[variant]) <= set(load_protocol(protocol).spec) | {"tokens", "sites"}
    # Every published model of the protocol is measured, and no other.
    protocol = load_protocol(paper.protocol(None))
    named = {item if isinstance(item, str) else item.model.replace("*", "1431k-3T") for item in published(paper)}
    assert named == {*protocol.models, *protocol.dynamics}


def test_print_and_code_measure_as_the_text_and_as_the_released_code() -> None:
    paper = find_paper("razzhigaev2024")
    printed, released = (plan_settings(paper, "paper", name, {}).every[0] for name in ("print", "code"))
    assert (printed["discard_fraction"], released["discard_fraction"]) == (0.1, 0.8)
    assert released["batch_points"] == released["tokens"]
    pocket = plan_settings(paper, "pocket", "code", {}).every[0]
    assert (pocket["discard_fraction"], pocket["batch_points"]) == (0.8, pocket["tokens"])


def test_the_pocket_suite_is_measured_judged_and_not_measured_twice(tmp_path: Path, corpus_file: Path) -> None:
    command = ["reproduce", "razzhigaev2024", "--corpus", str(corpus_file), *SMALL, "-o", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    outcomes = json.loads(done.stdout)
    assert {one["claim"] for one in outcomes} == {claim.name for claim in find_paper("razzhigaev2024").claims}
    assert {one["verdict"] for one in outcomes if one["claim"].startswith("anisotropy grows")} == {"inconclusive"}
    assert all(one["reason"] for one in outcomes)
    measured = Store(tmp_path).table()
    # Only decoders are followed over training.
    steps = {(row["model"], row["step"]) for row in measured.select(["model", "step"]).to_pylist()}
    assert len(steps) == 7
    again = CliRunner().invoke(app, command)
    assert json.loads(again.stdout) == outcomes
    assert "0 units measured, 7 stored before" in again.stderr
    assert json.loads((tmp_path / "reproduction.json").read_text())["protocol"] == "razzhigaev2024-print"


@pytest.mark.parametrize("paper", PAPERS.values(), ids=PAPERS)
def test_small_models_read_windows_as_long_as_those_to_be_measured(paper: Paper, tmp_path: Path) -> None:
    for variant in paper.protocols:
        for given in ({}, {"seq_len": 300}):
            settings = plan_settings(paper, "small", variant, given)
            recipes = plan_recipes(paper, tmp_path, seq_len=settings.longest, seeds=1, steps=None, corpus=None)
            assert len(recipes) == len(paper.kinds)
            for recipe in recipes.values():
                assert recipe.seq_len == max(one["seq_len"] for one in (*settings.every, *settings.last))
                assert recipe.seq_len * recipe.batch_size <= 2048


def test_a_run_in_which_nothing_could_be_measured_is_judged_all_the_same() -> None:
    outcomes = judge_paper(find_paper("razzhigaev2024"), table(rows(BELL, "decoder0", "decoder", 0)), keys=[])
    assert {one.verdict for one in outcomes} == {"not tested here"}


@pytest.mark.slow(reason="trains six models")
def test_small_models_are_trained_in_several_seeds_and_followed(tmp_path: Path, corpus_file: Path) -> None:
    flags = ["--size", "small", "--seeds", "3", "--steps", "4", "--corpus", str(corpus_file), *SMALL]
    listed = CliRunner().invoke(app, ["reproduce", "razzhigaev2024", *flags, "--dry-run", "-o", str(tmp_path)])
    assert len(json.loads(listed.stdout)) == 6
    assert not list(tmp_path.iterdir())
    done = CliRunner().invoke(app, ["reproduce", "razzhigaev2024", *flags, "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    outcomes = [one for one in json.loads(done.stdout) if one["claim"].startswith("anisotropy grows")]
    # Three seeds of five checkpoints: a claim about the training, not about one run.
    assert {one["evidence"][0]["subject"].rpartition("/")[2] for one in outcomes} == {"small-decoder-seed*"}
    assert {one["evidence"][0]["replicates"] for one in outcomes} == {3}


def test_a_list_says_what_is_known_of_sizes_and_what_was_chosen_here(capsys: pytest.CaptureFixture[str]) -> None:
    known = {"model": "a/b", "revision": "main", "bytes": 1_500_000_000, "note": ""}
    unknown = {"model": "a/c", "revision": "step1", "bytes": None, "note": "size unknown: hub not reachable"}
    print_listed(find_paper("bernas2026"), "paper", [known, unknown], ["hf:some/dataset"])
    told = " ".join(capsys.readouterr().out.split())
    assert "2 entries, 1.5 GB in 1 of them; corpora: hf:some/dataset" in told
    assert "evenly spaced in log step" in told
    assert "downloaded whole" in told


def test_the_table_names_each_claim_once_and_says_whose_models_these_are(capsys: pytest.CaptureFixture[str]) -> None:
    paper = find_paper("razzhigaev2024")
    print_outcomes(paper, "pocket", judge_paper(paper, kinds(BELL, FLAT)))
    told = capsys.readouterr().out
    assert "not the paper's: a verdict is about them" in " ".join(told.split())
    head, _, words = told.partition("\n\n")
    head, _, words = words.partition("\n\n") if "claim of the paper" not in head else (head, "", words)
    for claim in paper.claims:
        assert sum(line.startswith(claim.name) for line in head.splitlines()) == 1, claim.name
        assert claim.predicts in " ".join(words.split())


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (["shape2024"], "unknown paper"),
        (["razzhigaev2024", "--size", "huge"], "sizes are pocket, small, paper"),
        (["bernas2026", "--variant", "code"], "what is known of it is reconstructed"),
        (["machina2024"], "-o RUN"),
    ],
)
def test_requests_that_cannot_be_honoured_are_refused(request_: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["reproduce", *request_])
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> dict[str, Path]:
    return save_tiny(tmp_path_factory.mktemp("tiny"), corpus_file)


@pytest.fixture(scope="module")
def hub(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """The papers' names, with tiny random models under them; most of the models are not there."""
    with Hub(tmp_path_factory.mktemp("hub")) as hub:
        for name, folder in tiny.items():
            repo, _, revision = name.partition("@")
            hub.add(repo, revision or "main", {path.name: path for path in folder.iterdir()})
        yield hub


def variables(hub: Hub, home: Path) -> dict[str, str]:
    return {**os.environ, **hub.environment(home / "home"), "ANISOSCOPE_SCRATCH": str(home / "scratch")}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("papers")


@pytest.fixture(scope="module")
def shell(hub: Hub, home: Path) -> Iterator[Shell]:
    with Shell(variables(hub, home)) as shell:
        yield shell


@pytest.fixture(scope="module")
def reproduced(shell: Shell, home: Path, corpus_file: Path) -> dict[str, Any]:
    """Every paper at its own size, and the last one a second time."""
    flags = ["--size", "paper", "--corpus", str(corpus_file), *SMALL]
    asked = {**{paper: paper for paper in PAPERS}, "again": "bernas2026"}
    return {name: shell.run("reproduce", paper, *flags, "-o", str(home / paper)) for name, paper in asked.items()}


@pytest.mark.parametrize("paper", PAPERS)
def test_a_paper_is_measured_from_the_hub(paper: str, reproduced: dict[str, Any], home: Path) -> None:
    done = reproduced[paper]
    # Models that this hub lacks are named, and the rest is measured.
    assert done.returncode == 3, done.stderr
    assert "not measured: " in done.stderr
    outcomes = json.loads(done.stdout)
    assert {one["claim"] for one in outcomes} == {claim.name for claim in find_paper(paper).claims}
    store = Store(home / paper)
    assert not store.failures()
    places = {(row["model"], row["revision"]) for row in store.table().select(["model", "revision"]).to_pylist()}
    assert places == EXPECTED[paper]
    assert not list((home / "scratch").rglob("*.safetensors"))


def test_the_same_command_goes_on_where_it_ended(hub: Hub, reproduced: dict[str, Any], home: Path) -> None:
    assert "\n0 units measured" in reproduced["again"].stderr
    assert json.loads(reproduced["again"].stdout) == json.loads(reproduced["bernas2026"].stdout)
    smollm = len(hub.downloads("*HuggingFaceTB/*.safetensors"))
    # Once for the checkpoint, once more where its gradients are held against earlier proxies.
    assert 2 <= smollm <= 3
    # The proxies of early checkpoints, which the paper freezes, are held against later gradients.
    assert "mean=in;fit=rolling" in Store(home / "bernas2026").table()["variant"].to_pylist()


def test_a_dry_run_lists_models_revisions_and_bytes(hub: Hub, shell: Shell, tmp_path: Path) -> None:
    command = ["reproduce", "machina2024", "--size", "paper", "--dry-run"]
    before = len(hub.downloads("*.safetensors"))
    listed = {(row["model"], row["revision"]): row for row in json.loads(shell.run(*command, "--json").stdout)}
    assert listed["EleutherAI/pythia-70m", "step7000"]["bytes"] > 10_000
    assert listed["tiiuae/falcon-7b", "main"]["bytes"] > 10_000
    missing = listed["EleutherAI/gpt-neox-20b", "main"]
    assert missing["bytes"] is None
    assert "no hub model" in missing["note"]
    assert len(hub.downloads("*.safetensors")) == before
    hub.stop()
    try:
        with Shell(variables(hub, tmp_path)) as other:
            gone = other.run(*command)
    finally:
        hub.start()
    assert gone.returncode == 0
    assert gone.stdout.count("size unknown: hub not reachable") == 8 * 21 + 3


_STEPS = [f"step{step}" for step in (0, 7000, 143000)]
EXPECTED: dict[str, set[tuple[str, str | None]]] = {
    "razzhigaev2024": {
        *(
            (name, None)
            for name in ("google-bert/bert-base-uncased", "FacebookAI/roberta-base", "albert/albert-base-v2")
        ),
        *((name, None) for name in ("facebook/opt-125m", "meta-llama/Llama-2-7b-hf", "openai-community/gpt2")),
        *((name, None) for name in ("EleutherAI/gpt-j-6b", "tiiuae/falcon-7b")),
        *(("bigscience/bloom-3b-intermediate", f"global_step{step}") for step in (1000, 10000)),
        *(("TinyLlama/TinyLlama-1.1B-intermediate-step-*", name) for name in ("50K-105b", "1431k-3T")),
    },
    "machina2024": {
        ("tiiuae/falcon-7b", None),
        *(("EleutherAI/pythia-70m", step) for step in _STEPS),
    },
    "bernas2026": {
        ("EuroBERT/EuroBERT-210m", "step10000"),
        ("EuroBERT/EuroBERT-210m", "step20000"),
        ("almanach/moderncamembert-base", None),
        ("HuggingFaceTB/SmolLM2-360M-intermediate-checkpoints", "step-160000"),
        ("HuggingFaceTB/SmolLM2-360M-intermediate-checkpoints", "step-320000"),
    },
}


def save_tiny(folder: Path, corpus_file: Path) -> dict[str, Path]:
    """A random model of each family, under the name it has on the hub."""
    import torch
    import transformers as tf

    from anisoscope.corpora import load_corpus
    from anisoscope.lab import train_tokenizer

    corpus = load_corpus(str(corpus_file))
    tokenizers = {kind: train_tokenizer(corpus, kind) for kind in ("decoder", "encoder")}
    size: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    wide: dict[str, Any] = {**size, "intermediate_size": 64, "max_position_embeddings": 128}
    gpt: dict[str, Any] = {"vocab_size": 2048, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128}
    opt: dict[str, Any] = {**size, "ffn_dim": 64, "max_position_embeddings": 128, "word_embed_proj_dim": 64}
    marks: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}
    bloom: dict[str, Any] = {"vocab_size": 2048, "hidden_size": 32, "n_layer": 2, "n_head": 2}
    llama = tf.LlamaForCausalLM, tf.LlamaConfig(**wide), "decoder"
    built: dict[str, tuple[Any, Any, str]] = {
        "google-bert/bert-base-uncased": (tf.BertForMaskedLM, tf.BertConfig(**wide), "encoder"),
        "FacebookAI/roberta-base": (tf.RobertaForMaskedLM, tf.RobertaConfig(**wide), "encoder"),
        "albert/albert-base-v2": (tf.AlbertForMaskedLM, tf.AlbertConfig(**wide, embedding_size=32), "encoder"),
        "facebook/opt-125m": (tf.OPTForCausalLM, tf.OPTConfig(**opt), "decoder"),
        "meta-llama/Llama-2-7b-hf": llama,
        "openai-community/gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config(**gpt), "decoder"),
        "EleutherAI/gpt-j-6b": (tf.GPTJForCausalLM, tf.GPTJConfig(**gpt, rotary_dim=8), "decoder"),
        "tiiuae/falcon-7b": (tf.FalconForCausalLM, tf.FalconConfig(**size), "decoder"),
        "almanach/moderncamembert-base": (
            tf.ModernBertForMaskedLM,
            tf.ModernBertConfig(**wide, pad_token_id=0, cls_token_id=1, sep_token_id=2),
            "encoder",
        ),
    }
    for step in (1000, 10000):
        name = f"bigscience/bloom-3b-intermediate@global_step{step}"
        built[name] = tf.BloomForCausalLM, tf.BloomConfig(**bloom), "decoder"
    for name in ("50K-105b", "1431k-3T"):
        built[f"TinyLlama/TinyLlama-1.1B-intermediate-step-{name}"] = llama
    for step in _STEPS:
        built[f"EleutherAI/pythia-70m@{step}"] = tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig(**wide), "decoder"
    for step in (10000, 20000):
        name = f"EuroBERT/EuroBERT-210m@step{step}"
        built[name] = tf.EuroBertForMaskedLM, tf.EuroBertConfig(**wide, **marks), "encoder"
    for step in (160000, 320000):
        built[f"HuggingFaceTB/SmolLM2-360M-intermediate-checkpoints@step-{step}"] = llama
    saved = {}
    for number, (name, (build, config, kind)) in enumerate(built.items()):
        torch.manual_seed(number)
        saved[name] = folder / str(number)
        build(config).save_pretrained(saved[name])
        tokenizers[kind].save_pretrained(saved[name])
    return saved


def test_models_that_pass_before_training_are_named() -> None:
    claim = Claimed(name="a", predicts="", where="")
    first, second = (replace(one, holds=True) for one in judge(kinds(BELL, FLAT))[:2])
    assert _combined(claim, [first, second])[0] == "reproduced"
    some = _combined(claim, [first, replace(second, subject="model-b", before_training=True)])
    assert some[0] == "present before training"
    assert "Untrained, model-b (step 0) passes the same test: training did not bring it there." in some[1]
    every = [replace(one, before_training=True) for one in (first, second)]
    assert "The untrained model (step 0)" in _combined(claim, every)[1]
