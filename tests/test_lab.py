"""The lab: trainings that repeat, resume and say what they learned from."""

import json
import math
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import anisoscope as an
from anisoscope.baselines import count_baselines
from anisoscope.checkpoints import find_checkpoints, inspect_all
from anisoscope.corpora import load_corpus
from anisoscope.errors import CorpusError, SpecError, StoreError
from anisoscope.lab import Recipe, Trained, build_model, checkpoint_steps
from anisoscope.models import load_model
from anisoscope.penalties import PENALTIES, sum_penalties
from anisoscope.sampling import achieved_exponent, loss_weights, mask_rates, why_void
from anisoscope.tokens import Batches, prepare
from anisoscope.training import train

SMALL = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 400, "seq_len": 32, "batch_size": 8, "steps": 24}
QUICK = {"warmup": 4, "checkpoints": 5, "log_every": 10, "dropout": 0.1, "held_out_tokens": 1024}


@pytest.fixture(scope="module")
def recipe(corpus_file: Path) -> Recipe:
    return Recipe(corpus=str(corpus_file), **SMALL, **QUICK)


@pytest.fixture(scope="module")
def decoder(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(recipe, tmp_path_factory.mktemp("decoder"), device="cpu")


def weights_of(trained: Trained) -> dict[str, bytes]:
    return {path.name: (path / "model.safetensors").read_bytes() for path in trained.checkpoints}


def curve_of(trained: Trained) -> str:
    return (trained.output / "losses.jsonl").read_text()


@pytest.mark.parametrize("layout", ["gpt_neox", "bert", "eurobert"])
def test_the_same_recipe_gives_the_same_bits(recipe: Recipe, tmp_path: Path, layout: str) -> None:
    kind = "decoder" if layout == "gpt_neox" else "encoder"
    mine = replace(recipe, kind=kind, layout=layout, steps=12)
    first, second = (train(mine, tmp_path / name, device="cpu") for name in "ab")
    other = train(replace(mine, seed=1), tmp_path / "c", device="cpu")
    assert weights_of(first) == weights_of(second)
    assert curve_of(first) == curve_of(second)
    assert weights_of(first) != weights_of(other)
    assert first.losses[-1].held_out is not None
    assert first.losses[0].held_out is not None
    assert first.losses[-1].held_out < first.losses[0].held_out - 0.1
    model = load_model(str(first.checkpoints[-1]))
    assert (model.kind, model.head) == (kind, "causal" if kind == "decoder" else "masked")
    assert len(model.layout.stacks[0].blocks) == 2


def test_saved_tokenizers_name_a_class_that_older_transformers_know(decoder: Trained) -> None:
    for folder in (*decoder.checkpoints, decoder.output / "tokens"):
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    text = "states are points"
    one, other = (AutoTokenizer.from_pretrained(path) for path in (decoder.checkpoints[-1], decoder.output / "tokens"))
    assert one(text)["input_ids"] == other(text)["input_ids"] != []


def test_random_numbers_of_the_caller_are_left_alone(recipe: Recipe, tmp_path: Path) -> None:
    def seed() -> None:
        random.seed(5), np.random.seed(5), torch.manual_seed(5)  # noqa: NPY002

    seed()
    expected = float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002
    words = [random.getrandbits(32) for _ in range(1000)]
    seed()
    train(replace(recipe, steps=2), tmp_path / "run", device="cpu")
    assert (float(np.random.rand()), float(torch.rand(()))) == expected  # noqa: NPY002
    # The type checks of the tests draw some of Python's numbers themselves: the stream is the same, a little later.
    assert random.getrandbits(32) in words


def test_checkpoints_are_found_and_no_two_are_equal(decoder: Trained) -> None:
    found = find_checkpoints(str(decoder.output))
    assert [item.step for item in found] == [0, 1, 3, 8, 24]
    assert [item.tokens for item in found] == [step * 256 for step in (0, 1, 3, 8, 24)]
    assert not [item.suspect for item in inspect_all(found).checkpoints if item.suspect]
    # Step 1 differs from step 0: the learning rate of the first step is not 0.
    assert len(set(weights_of(decoder).values())) == 5


def test_the_loss_curve_has_a_held_out_loss_at_every_checkpoint(decoder: Trained) -> None:
    assert [row.step for row in decoder.losses] == [0, 1, 3, 8, 10, 20, 24]
    assert [row.step for row in decoder.losses if row.held_out is not None] == [0, 1, 3, 8, 24]
    assert [row.step for row in decoder.losses if row.train is None] == [0]
    assert [row.tokens for row in decoder.losses] == [row.step * 256 for row in decoder.losses]
    assert abs(decoder.losses[0].held_out - math.log(400)) < 0.2
    assert decoder.bigram < decoder.unigram < math.log(400)
    assert decoder.finished
    assert decoder.seconds > 0
    written = json.loads((decoder.output / "training.json").read_text())
    assert written["sampling_exponent"] == decoder.sampling_exponent
    assert json.loads((decoder.checkpoints[-1] / "training.json").read_text())["void"] is None


def test_a_structured_text_is_learned_below_its_unigram_entropy(recipe: Recipe, tmp_path: Path) -> None:
    mine = replace(recipe, steps=150, learning_rate=1e-2, dropout=0.0, checkpoints=2, log_every=150)
    trained = train(mine, tmp_path / "run", device="cpu")
    assert trained.losses[-1].held_out < trained.unigram - 0.1


CODE = """
import json, sys
from anisoscope.lab import Recipe
from anisoscope.training import train
train(Recipe(**json.loads(sys.argv[1])), sys.argv[2], device="cpu", save_every_seconds=0.0)
"""


def test_a_training_killed_twice_ends_with_the_bits_of_one_that_was_not(recipe: Recipe, tmp_path: Path) -> None:
    mine = replace(recipe, steps=150, log_every=7)
    whole = train(mine, tmp_path / "whole", device="cpu")
    torn = tmp_path / "torn"
    given = json.dumps({**SMALL, **QUICK, "corpus": mine.corpus, "steps": 150, "log_every": 7})
    for least in (12, 40):
        running = subprocess.Popen([sys.executable, "-c", CODE, given, str(torn)])
        while running.poll() is None and not any(
            int(path.parent.name.rpartition("-")[2]) >= least for path in torn.glob("state/*/whole")
        ):
            time.sleep(0.003)
        running.send_signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
        assert not (torn / "training.json").exists()
    resumed = train(mine, torn, device="cpu")
    assert weights_of(resumed) == weights_of(whole)
    assert curve_of(resumed) == curve_of(whole)
    assert resumed.sampling_exponent == whole.sampling_exponent
    kept = [path.name for path in (torn / "state").iterdir()]
    assert kept == ["checkpoint-150"]


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_a_training_goes_on_after_its_time_was_up(recipe: Recipe, tmp_path: Path, kind: str) -> None:
    mine = replace(recipe, kind=kind, steps=9, log_every=4)
    whole = train(mine, tmp_path / "whole", device="cpu")
    parts = [train(mine, tmp_path / "parts", device="cpu", max_seconds=0.0) for _ in range(4)]
    assert [part.step for part in parts] == [1, 2, 3, 4]
    assert not parts[-1].finished
    # What a kill in the middle of writing leaves: a newer state without its mark, rows and checkpoints beyond it.
    state = tmp_path / "parts" / "state"
    shutil.copytree(state / "checkpoint-4", state / "checkpoint-7")
    (state / "checkpoint-7" / "whole").unlink()
    (state / "checkpoint-7" / "optimizer.pt").write_bytes(b"half")
    shutil.copytree(whole.checkpoints[-1], tmp_path / "parts" / "checkpoint-9")
    (tmp_path / "parts" / "checkpoint-6.part").mkdir()
    with (tmp_path / "parts" / "losses.jsonl").open("a") as curve:
        curve.write(json.dumps({"step": 6, "tokens": 0, "train": 0.0, "held_out": None}) + '\n{"step": 7, "tok')
    last = train(mine, tmp_path / "parts", device="cpu")
    assert last.finished
    assert last.step == 9
    assert weights_of(last) == weights_of(whole)
    assert curve_of(last) == curve_of(whole)
    assert train(mine, tmp_path / "parts", device="cpu") == last
    # Killed after the last state and before the summary.
    (tmp_path / "parts" / "training.json").unlink()
    again = train(mine, tmp_path / "parts", device="cpu")
    assert replace(again, seconds=last.seconds) == last


def test_a_training_that_a_callback_stopped_can_go_on(recipe: Recipe, tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs) -> None:
            control.should_training_stop |= state.global_step == 5

    mine = replace(recipe, steps=9)
    stopped = train(mine, tmp_path / "stopped", device="cpu", callbacks=[Stop()])
    assert (stopped.step, stopped.finished) == (5, False)
    assert [path.name for path in (tmp_path / "stopped" / "state").iterdir()] == ["checkpoint-5"]
    whole = train(mine, tmp_path / "whole", device="cpu")
    assert weights_of(train(mine, tmp_path / "stopped", device="cpu")) == weights_of(whole)


def test_autocast_trains_float32_weights(recipe: Recipe, decoder: Trained, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    mine = replace(recipe, dtype="bfloat16", steps=6, checkpoints=3)
    half = train(mine, tmp_path / "half", device="cpu")
    train(mine, tmp_path / "parts", device="cpu", max_seconds=0.0)
    assert weights_of(train(mine, tmp_path / "parts", device="cpu")) == weights_of(half)
    assert {value.dtype for value in load_file(half.checkpoints[-1] / "model.safetensors").values()} == {torch.float32}
    # The same start, and losses that differ by no more than the rounding.
    assert weights_of(half)["checkpoint-0"] == weights_of(decoder)["checkpoint-0"]
    assert half.losses[0].held_out != decoder.losses[0].held_out
    assert half.losses[0].held_out == pytest.approx(decoder.losses[0].held_out, abs=1e-2)


def test_callbacks_see_the_model_and_its_tokenizer_at_every_step(recipe: Recipe, tmp_path: Path) -> None:
    class Watch(TrainerCallback):
        seen: list[tuple[int, int]] = []  # noqa: RUF012

        def on_step_end(self, args, state, control, *, model, processing_class, **kwargs) -> None:
            assert model.config.vocab_size == 400
            # Evaluating a checkpoint has not left its mode behind.
            assert model.training
            assert processing_class("baler")["input_ids"]
            self.seen.append((state.global_step, state.num_input_tokens_seen))

    train(replace(recipe, steps=3), tmp_path / "run", device="cpu", callbacks=[Watch()])
    assert Watch.seen == [(1, 256), (2, 512), (3, 768)]


def test_a_folder_takes_one_recipe(decoder: Trained, recipe: Recipe) -> None:
    with pytest.raises(SpecError, match=r"steps=24 \(now 25\)"):
        train(replace(recipe, steps=25), decoder.output, device="cpu")
    with pytest.raises(SpecError, match="holds a training already"):
        train(recipe, decoder.output, device="cpu", resume=False)
    assert train(recipe, decoder.output, device="cpu") == decoder


def test_two_processes_do_not_train_in_one_folder(recipe: Recipe, tmp_path: Path) -> None:
    from filelock import FileLock

    with FileLock(tmp_path / ".lock"), pytest.raises(StoreError, match="another process"):
        train(recipe, tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "both"}, r"kind \(--kind on the command line\) is decoder or encoder; came 'both'"),
        ({"layout": "bert"}, "one of gpt_neox"),
        ({"layers": 0}, r"--layers on the command line\) is a whole number of at least 1; came 0"),
        ({"layers": True}, "whole number"),
        ({"width": 0}, "--width.* at least 8; came 0"),
        ({"width": 12}, "multiple of 8.*--width 32 can"),
        ({"heads": 5}, "multiple of 8"),
        ({"heads": 0}, "--heads"),
        ({"vocabulary": 100}, "--vocabulary.* at least 261; came 100"),
        ({"batch_size": -1}, "--batch-size"),
        ({"steps": 0}, "--steps.* at least 1"),
        ({"warmup": -1}, "--warmup"),
        ({"learning_rate": -1.0}, "--learning-rate.* above 0, such as 0.001; came -1.0"),
        ({"learning_rate": 0.0}, "--learning-rate"),
        ({"learning_rate": math.nan}, "--learning-rate.* came nan"),
        ({"weight_decay": -0.1}, "^weight_decay is a number of at least 0"),
        ({"gradient_clip": math.inf}, "^gradient_clip is"),
        ({"dropout": 1.0}, "--dropout.* a share"),
        ({"mask_rate": 1.5}, "^mask_rate is a share"),
        ({"sampling_exponent": math.inf}, "--sampling-exponent.* finite"),
        ({"regularize": {"isoscore": math.nan}}, "--regularize.* finite"),
        ({"checkpoints": 1}, "--checkpoints.* at least 2"),
        ({"log_every": 0}, "^log_every is"),
        ({"held_out_tokens": 0}, "^held_out_tokens is"),
        ({"seed": -1}, "--seed.* from 0 to 4294967295"),
        ({"seed": 2**32}, "--seed"),
        ({"corpus": " "}, "--corpus.* such as pydoc"),
        ({"dtype": "int8"}, "auto or float32 or bfloat16"),
    ],
)
def test_an_impossible_recipe_is_refused(wrong: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Recipe(**wrong)


def test_every_field_of_a_recipe_has_its_type_checked() -> None:
    # In a process of its own, without the checks of types that tests switch on.
    code = """
import dataclasses
from anisoscope.errors import SpecError
from anisoscope.lab import Recipe
for field in dataclasses.fields(Recipe):
    for wrong in (object(), "3", 2.5j, [1]):
        try:
            Recipe(**{field.name: wrong})
        except SpecError as error:
            assert field.name in str(error), error
        else:
            assert (field.name, wrong) == ("corpus", "3"), field.name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_start_that_failed_takes_a_corrected_recipe(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="too few"):
        train(replace(recipe, seq_len=4096), tmp_path, device="cpu")

    class Refuse(TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            raise SpecError("nothing can be measured")

    with pytest.raises(SpecError, match="nothing can be measured"):
        train(replace(recipe, width=16, vocabulary=300), tmp_path, device="cpu", callbacks=[Refuse()])
    assert (tmp_path / "checkpoint-0").exists()
    done = train(replace(recipe, steps=1, checkpoints=2), tmp_path, device="cpu")
    assert done.finished
    assert load_model(str(done.checkpoints[0])).module.config.hidden_size == 32
    # One step was made: now the folder holds this training and no other.
    with pytest.raises(SpecError, match="steps=1"):
        train(recipe, tmp_path, device="cpu")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1.5 MB: tokens, tokenizer and the first checkpoints fit, not the states of a whole training."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_one_sentence_and_earlier_checkpoints_stay(recipe: Recipe, small_disk: Path) -> None:
    with pytest.raises(StoreError, match=f"cannot write to {small_disk}/run: no space left on its disk"):
        train(replace(recipe, checkpoints=20), small_disk / "run", device="cpu")
    kept = sorted(path for path in (small_disk / "run").glob("checkpoint-*") if path.suffix != ".part")
    assert kept
    for path in kept:
        load_model(str(path))
    # With room again, the same command goes on.
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert train(replace(recipe, checkpoints=20), small_disk / "run", device="cpu").finished


def test_a_file_in_the_place_of_the_folder_is_no_full_disk(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(StoreError, match=r"cannot write to .*Name a folder that can be written with -o$"):
            train(recipe, output, device="cpu")


def test_an_impossible_training_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="twonn cannot be a penalty"):
        train(replace(recipe, regularize={"twonn": 0.1}), tmp_path / "a")
    with pytest.raises(SpecError, match="no GPU"):
        train(recipe, tmp_path / "b", device="cuda")
    (tmp_path / "one.txt").write_text("one document " * 1000)
    with pytest.raises(CorpusError, match="one document"):
        train(replace(recipe, corpus=str(tmp_path / "one.txt")), tmp_path / "c", device="cpu")
    with pytest.raises(CorpusError, match="too few"):
        train(replace(recipe, seq_len=4096), tmp_path / "d", device="cpu")
    # What failed leaves a folder that can be used.
    assert train(replace(recipe, steps=1, checkpoints=2), tmp_path / "d", device="cpu").finished


def test_checkpoints_are_log_spaced() -> None:
    for steps, count in ((8000, 20), (300, 12), (20, 19), (7, 3), (5, 50), (1, 2)):
        found = checkpoint_steps(steps, count)
        assert (found[0], found[-1]) == (0, steps)
        assert len(found) == min(count, steps + 1)
        assert list(found) == sorted(set(found))
    assert 1 in checkpoint_steps(8000, 20)
    late = np.diff(np.log(checkpoint_steps(100_000, 20)[8:]))
    assert late.max() / late.min() < 1.2


def test_tied_heads_share_their_weights(recipe: Recipe, tmp_path: Path) -> None:
    tokenizer = prepare(recipe, tmp_path).tokenizer
    for tied in (True, False):
        model = build_model(replace(recipe, tied=tied), tokenizer)
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


def test_held_out_documents_are_not_trained_on(recipe: Recipe, tmp_path: Path) -> None:
    data, corpus = prepare(recipe, tmp_path), load_corpus(recipe.corpus)
    assert len(corpus.documents) == 40
    assert data.tokenizer.decode(data.held_out) == corpus.documents[39] + "<|endoftext|>"
    assert data.tokenizer.decode(data.train) == "".join(text + "<|endoftext|>" for text in corpus.documents[:39])


def test_every_pass_reads_every_window_once(recipe: Recipe, tmp_path: Path) -> None:
    batches = Batches(recipe, prepare(recipe, tmp_path))
    first, second = batches._pass(0), batches._pass(1)
    assert len(np.unique(first)) == len(first) == batches.windows
    assert np.ptp(first) == (batches.windows - 1) * 32
    assert max(first.max(), second.max()) + 33 <= len(batches.tokens)
    assert not np.array_equal(first, second)
    batch = batches[3]
    start = int(first[3 * 8])
    assert batch["input_ids"][0].tolist() == batches.tokens[start : start + 32].tolist()
    assert batch["targets"][0].tolist() == batches.tokens[start + 1 : start + 33].tolist()


def test_masks_hide_what_is_to_be_predicted(recipe: Recipe, tmp_path: Path) -> None:
    mine = replace(recipe, kind="encoder", batch_size=64, seq_len=128)
    data = prepare(mine, tmp_path)
    batches = Batches(mine, data)
    inputs, targets = (torch.cat([batches[step][name] for step in range(8)]) for name in ("input_ids", "targets"))
    chosen = targets != -100
    assert abs(chosen[:, 1:-1].double().mean() - 0.15) < 0.005
    assert (inputs[:, 0] == data.tokenizer.cls_token_id).all()
    assert (inputs[:, -1] == data.tokenizer.sep_token_id).all()
    hidden = (inputs == data.tokenizer.mask_token_id)[chosen].double().mean()
    kept = (inputs == targets)[chosen].double().mean()
    assert abs(hidden - 0.8) < 0.02
    assert 0.09 < kept < 0.13
    assert not torch.isin(targets[chosen], torch.tensor(data.tokenizer.all_special_ids)).any()
    assert not (inputs == data.tokenizer.mask_token_id)[~chosen].any()


def test_baselines_of_a_known_chain() -> None:
    # 0 -> 1 with probability .9, else 0; 1 -> 0 always. Stationary: 0 with 1/1.9.
    rng = np.random.default_rng(0)
    coins, chain = rng.random(200_000) < 0.9, [0]
    for coin in coins:
        chain.append(int(coin) if chain[-1] == 0 else 0)
    tokens = np.array(chain, dtype=np.uint16)
    pairs = np.stack([tokens[:-1], tokens[1:]]).astype(np.int64)
    found = count_baselines(tokens[:100_000], pairs[:, 100_000:], vocabulary=2)
    p = 1 / 1.9
    assert abs(found.unigram + p * math.log(p) + (1 - p) * math.log(1 - p)) < 0.01
    assert abs(found.bigram + p * (0.9 * math.log(0.9) + 0.1 * math.log(0.1))) < 0.01


def test_the_bigram_model_is_a_distribution() -> None:
    tokens = np.random.default_rng(0).integers(0, 6, 60).astype(np.uint16)
    # Token 7 never occurs; token 8 is only the last one, followed by nothing.
    tokens = np.append(tokens, np.uint16(8))
    for before in (0, 3, 7, 8):
        pairs = [np.array([[before], [after]]) for after in range(10)]
        total = sum(math.exp(-count_baselines(tokens, pair, vocabulary=10).bigram) for pair in pairs)
        assert abs(total - 1) < 1e-12


def zipf(types: int) -> np.ndarray:
    return np.round(1e7 / np.arange(1, types + 1)).astype(np.int64)


def test_weights_have_mean_one_and_the_mass_of_their_exponent() -> None:
    counts = zipf(1000)
    for exponent in (1.0, 0.5, 0.0, 1.5):
        weights = loss_weights(counts, exponent)
        assert abs(np.average(weights, weights=counts) - 1) < 1e-12
        assert abs(achieved_exponent(counts, weights * counts) - exponent) < 1e-8
    assert loss_weights(counts, 1.0).tolist() == pytest.approx([1.0] * 1000, abs=1e-12)


def test_mask_rates_keep_the_mean_and_stop_at_one() -> None:
    counts = np.append(zipf(500), [0])
    for exponent in (1.0, 0.8, 0.0, -0.5, 1.4):
        rates = mask_rates(counts, exponent, 0.15)
        assert abs((rates * counts).sum() / counts.sum() - 0.15) < 1e-12
        assert rates.min() == rates[-1] == 0
        assert rates.max() <= 1
        free = (rates > 0) & (rates < 1)
        slope = np.polyfit(np.log(counts[free]), np.log(rates[free]), 1)[0]
        assert abs(slope - (exponent - 1)) < 1e-6
    assert (mask_rates(counts, -0.5, 0.15) == 1).sum() > 10


def test_the_exponent_of_a_sample_is_not_biased_by_rare_types() -> None:
    counts, rng = zipf(2000), np.random.default_rng(0)
    for exponent in (1.0, 0.6):
        law = counts**exponent / (counts**exponent).sum()
        draws = [rng.multinomial(3000, law).astype(np.float64) for _ in range(60)]
        found = np.array([achieved_exponent(counts, draw) for draw in draws])
        error = found.std() / math.sqrt(len(found))
        assert abs(found.mean() - exponent) < 4 * error < 0.02
        # A line through the logarithms of what was seen is far off.
        lines = [np.polyfit(np.log(counts[draw > 0]), np.log(draw[draw > 0]), 1)[0] for draw in draws]
        assert abs(np.mean(lines) - exponent) > 0.1


def test_the_exponent_is_nan_where_nothing_can_be_said() -> None:
    assert math.isnan(achieved_exponent(zipf(10), np.zeros(10)))
    assert math.isnan(achieved_exponent(np.array([5, 5]), np.array([1.0, 2.0])))
    assert why_void(1.0, 1.09) is None
    assert "more than 0.1 off" in str(why_void(0.5, 0.65))


@pytest.mark.parametrize(("kind", "exponent"), [("decoder", 0.5), ("decoder", 0.0), ("encoder", 0.7)])
def test_a_training_has_the_sampling_exponent_asked_for(
    recipe: Recipe, tmp_path: Path, kind: str, exponent: float
) -> None:
    mine = replace(recipe, kind=kind, sampling_exponent=exponent, batch_size=32, checkpoints=2)
    trained = train(mine, tmp_path / "run", device="cpu")
    assert abs(trained.sampling_exponent - exponent) < 0.05
    assert trained.void is None


def test_an_exponent_that_masks_cannot_reach_voids_the_run(recipe: Recipe, tmp_path: Path) -> None:
    mine = replace(recipe, kind="encoder", sampling_exponent=-1.0, mask_rate=0.4, steps=10)
    trained = train(mine, tmp_path / "run", device="cpu")
    assert trained.sampling_exponent > -0.9
    assert trained.void is not None
    assert "was to be -1" in trained.void
    assert json.loads((trained.output / "training.json").read_text())["void"] == trained.void


def test_the_loss_is_weighted_by_the_frequency_of_its_target(recipe: Recipe, tmp_path: Path) -> None:
    mine = replace(recipe, sampling_exponent=0.3, dropout=0.0, steps=1, checkpoints=2)
    trained = train(mine, tmp_path, device="cpu")
    data = prepare(mine, tmp_path)
    batch, counts = Batches(mine, data)[0], np.bincount(data.train, minlength=400)
    shares = counts / counts.sum()
    model = AutoModelForCausalLM.from_pretrained(trained.checkpoints[0]).eval()
    with torch.no_grad():
        logs = model(batch["input_ids"]).logits.double().log_softmax(-1)
    losses = -logs.gather(-1, batch["targets"][..., None]).flatten().numpy()
    powers = shares[batch["targets"].flatten().numpy()] ** -0.7
    mean = sum(share**0.3 for share in shares if share > 0)
    assert trained.losses[1].train == pytest.approx((losses * powers).mean() / mean, rel=1e-5)
    assert trained.losses[1].train != pytest.approx(losses.mean(), rel=1e-3)


def cloud(n: int, d: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    scales = torch.linspace(0.3, 2.0, d, dtype=torch.float64)
    return torch.randn(n, d, generator=generator, dtype=torch.float64) * scales + 0.4


@pytest.mark.parametrize("name", sorted(PENALTIES))
def test_a_penalty_is_its_metric_and_has_its_gradient(name: str) -> None:
    points = cloud(500, 12)
    assert abs(float(PENALTIES[name](points)) - an.estimate(points, [name])[name].value) < 1e-6
    few = cloud(9, 4).requires_grad_()
    assert torch.autograd.gradcheck(PENALTIES[name], (few,))
    summed = sum_penalties(points.reshape(50, 10, 12), {name: -0.5})
    assert abs(float(summed + 0.5 * PENALTIES[name](points))) < 1e-12


@pytest.mark.parametrize(
    ("name", "weight", "layout"),
    [("leading_variance", 3.0, "gpt_neox"), ("mean_cosine", 3.0, "bert"), ("isoscore", -3.0, "eurobert")],
)
def test_training_with_a_penalty_moves_its_metric(
    recipe: Recipe, tmp_path: Path, name: str, weight: float, layout: str
) -> None:
    kind = "decoder" if layout == "gpt_neox" else "encoder"
    mine = replace(recipe, kind=kind, layout=layout, steps=20, checkpoints=2, learning_rate=3e-3)
    plain = train(mine, tmp_path / "plain", device="cpu")
    pressed = train(replace(mine, regularize={name: weight}), tmp_path / "pressed", device="cpu")
    values = []
    for trained in (plain, pressed):
        model = load_model(str(trained.checkpoints[-1])).module
        batch = Batches(mine, prepare(mine, trained.output))[0]["input_ids"]
        with torch.no_grad():
            states = model.base_model(batch).last_hidden_state
        values.append(an.estimate(states.flatten(0, 1), [name])[name].value)
    assert weight * (values[1] - values[0]) < -0.05
    assert plain.losses[-1].penalty is None
    assert pressed.losses[-1].penalty is not None
