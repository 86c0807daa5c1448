"""Concepts as rows, attachments and a command: planted ones, noise, and a real decoder over its training."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import anisoscope as an
from anisoscope.cli import app
from anisoscope.concepts import Found, OtherHalf, find_concepts, rows_of_concepts
from anisoscope.corpora import load_corpus
from anisoscope.metrics import all_metrics
from anisoscope.printing import print_unit
from anisoscope.probed import ProbeRow
from anisoscope.records import Site
from anisoscope.tangent.energies import UNCOUPLED_CONTROLS
from anisoscope.tracks import match_directions, read_history

FAMILY = ("concept_replication", "concept_stability", "concept_energy")
N, DIM, PLANTED = 1500, 48, 6
RANK = PLANTED + 1
SITE = Site(name="block.1", depth=1.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def directions() -> Tensor:
    rows = normal(PLANTED, DIM)
    return rows / rows.norm(dim=1, keepdim=True)


def codes(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(N, PLANTED, generator=generator) * (torch.rand(N, PLANTED, generator=generator) < 0.2)


def found_in(first: Tensor, second: Tensor, gradients: Tensor) -> Found:
    documents = torch.arange(N) // 40
    test = OtherHalf(states=second, coupled_states=second, gradients=gradients, documents=documents)
    return find_concepts(first, test, RANK, seed=0, types=torch.arange(N) % 100)


def rows_for(found: Found | None) -> dict[str, ProbeRow]:
    place = {"site": SITE, "population": "typical", "points": N, "dim": DIM}
    return {row.metric.name: row for row in rows_of_concepts(found, [all_metrics()[name] for name in FAMILY], place)}


@pytest.fixture(scope="module")
def planted() -> Found:
    """Six concepts around a large mean, in both halves; gradients along the second of them, where it is."""
    mean, known = 3 * normal(1, DIM, seed=5), codes(300)
    first = codes(1) @ directions() + 0.05 * normal(N, DIM, seed=2) + mean
    second = known @ directions() + 0.05 * normal(N, DIM, seed=3) + mean
    return found_in(first, second, known[:, 1:2] * directions()[1] + 0.02 * normal(N, DIM, seed=4))


def test_planted_concepts_come_back_in_the_other_half(planted: Found) -> None:
    matched = match_directions(directions().numpy(), planted.table.directions)
    # Around the mean one direction more is needed, which leads back.
    assert matched.cosines.min() > 0.95
    rows = rows_for(planted)
    for name in ("concept_replication", "concept_stability"):
        assert rows[name].answer.value > 0.98
        assert rows[name].columns["control"] == "permuted"
        assert rows[name].columns["control_value"] == rows[name].answer.null
        assert rows[name].columns["rank"] == RANK
    assert rows["concept_replication"].answer.null < 0.5
    assert (planted.table.replication > planted.threshold).all()


def test_listed_tokens_are_those_that_a_concept_was_planted_in(planted: Found) -> None:
    """Codes without a price would list the same tokens for every concept: around a mean they are not unique."""
    matched = match_directions(directions().numpy(), planted.table.directions)
    for concept, place in zip(matched.first, matched.second, strict=True):
        listed = codes(1)[planted.table.tokens[place], concept]
        assert listed.min() > codes(1)[:, concept].quantile(0.9)
    assert planted.table.sparsity[matched.second].min() > 0.5


def test_gradients_along_a_concept_are_its_energy(planted: Found) -> None:
    concept = int(match_directions(directions().numpy(), planted.table.directions).second[1])
    assert planted.table.gradient_share.argmax() == concept
    assert planted.table.gradient_share[concept] > 0.85
    assert planted.table.coupled_share.argmax() == concept
    row = rows_for(planted)["concept_energy"]
    assert row.answer.value > 0.9
    assert row.columns["low"] <= row.answer.value <= row.columns["high"]
    assert row.answer.null < 0.3
    assert row.columns["p"] <= 0.02
    assert row.columns["gradient"] == "activation"
    assert row.columns["control"] in UNCOUPLED_CONTROLS


def test_noise_has_no_concepts_that_come_back_and_gradients_do_not_know_them() -> None:
    rows = rows_for(found_in(normal(N, DIM), normal(N, DIM, seed=1), normal(N, DIM, seed=2)))
    replication = rows["concept_replication"].answer
    assert replication.value == pytest.approx(replication.null, abs=0.12)
    assert replication.value < 0.4
    # A sample has a shape of its own: seeds alone do not tell.
    assert rows["concept_stability"].answer.value > 0.5
    assert rows["concept_stability"].answer.null > 0.5
    energy = rows["concept_energy"]
    assert energy.answer.value == pytest.approx(RANK / DIM, rel=0.1)
    assert energy.columns["p"] > 0.01


def test_too_few_states_have_no_concepts_and_say_so() -> None:
    for row in rows_for(None).values():
        assert math.isnan(row.answer.value)
        assert row.answer.note
        assert "too few states" in row.answer.note


# A real model, its store and the command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a decoder, measured and stored."""
    store, corpus = an.Store(tmp_path_factory.mktemp("run") / "pocket"), load_corpus("pydoc")
    for step in (1024, 4096):
        spec = an.Spec(
            model="pocket-decoder",
            revision=f"step{step}",
            step=step,
            tokens=4096,
            seq_len=64,
            rank=8,
            sites=("block.3",),
            metrics=("concepts",),
        )
        store.put(an.measure(spec, corpus=corpus, device="cpu", progress=False))
    return store.folder


def test_a_decoder_has_concepts_that_come_back_more_often_than_chance(run: Path) -> None:
    rows = an.Store(run).table().to_pylist()
    assert {(row["metric"], row["step"]) for row in rows} == {(name, step) for name in FAMILY for step in (1024, 4096)}
    for row in rows:
        assert row["population"] == "typical"
        assert row["rank"] == 8
        if row["metric"] == "concept_replication":
            assert row["value"] > row["null"] + 0.1
        if row["metric"] == "concept_energy":
            assert 8 / 112 < row["value"] < 1


def test_what_is_attached_needs_no_model(run: Path) -> None:
    store = an.Store(run)
    key = next(row["key"] for row in store.table().to_pylist() if row["step"] == 4096)
    arrays = store.attachment(key)
    assert arrays["concepts//block.3.directions"].dtype == np.float16
    assert arrays["concepts//block.3.directions"].shape == (8, 112)
    # Who reads owners by the ends of names finds none of these.
    assert store.get(key).owners() == []
    history = read_history([arrays], [4096], "concepts//block.3")
    tables = history.concepts()
    assert sum(row["share_of_codes"] for row in tables) == pytest.approx(1, abs=1e-3)
    for row in tables:
        assert row["top_tokens"]
        for token, context in zip(row["top_tokens"], row["contexts"], strict=True):
            assert f"⟦{token}⟧" in context
        assert len(set(row["top_tokens"])) == len(row["top_tokens"])


def test_numbers_of_concepts_are_printed_beside_each_other(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = an.Store(run)
    unit = store.get(store.table().to_pylist()[0]["key"])
    print_unit(unit)
    shown = capsys.readouterr().out
    # The energy is about gradients, and about no proxy: it is no line of theirs.
    assert "Gradients in tangent proxies" not in shown
    for row in unit.records:
        (line,) = [line for line in shown.splitlines() if line.startswith(f"{row.metric} ")]
        assert f"{row.value:.3g}" in line


def test_the_command_prints_tables_and_tracks(run: Path) -> None:
    done = CliRunner().invoke(app, ["concepts", str(run), "--site", "block.3"])
    assert done.exit_code == 0, done.output
    assert "pocket-decoder, block.3, pydoc: concepts at step 4096" in done.stdout
    assert "Tracks over 2 checkpoints, steps 1024 to 4096" in done.stdout
    assert "⟦" in done.stdout


def test_the_command_gives_machines_the_rows_of_a_figure(run: Path) -> None:
    done = CliRunner().invoke(app, ["concepts", str(run), "--json"])
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)
    assert (found["model"], found["site"], found["revisions"]) == (
        "pocket-decoder",
        "block.3",
        ["step1024", "step4096"],
    )
    rows = found["rows"]
    assert {row["step"] for row in rows} == {1024, 4096}
    assert {"step", "track", "cosine", "share_of_energy", "top_tokens"} <= rows[0].keys()
    assert sum(row["step"] == 4096 for row in rows) == 8
    lives = {life["track"]: life for life in found["tracks"]}
    continued = [row for row in rows if row["cosine"] is not None]
    for row in continued:
        life = lives[row["track"]]
        assert (life["birth"], life["death"], life["checkpoints"]) == (1024, None, 2)
        # It was seen twice, so the angle between first and last is that of the one interval.
        assert math.cos(math.radians(life["turned_degrees"])) == pytest.approx(row["cosine"], abs=1e-6)
    died = [life for life in found["tracks"] if life["death"] == 4096]
    assert len(died) + len(continued) == 8


def test_the_command_says_what_is_missing(run: Path) -> None:
    for extra in (["--site", "block.9"], ["--model", "other"]):
        done = CliRunner().invoke(app, ["concepts", str(run), *extra])
        assert done.exit_code == 2
        assert "measure with --metrics concepts" in done.stderr
    assert CliRunner().invoke(app, ["concepts", str(run / "nowhere")]).exit_code == 1
