"""The command line as a user meets it: what is printed where, and the exit codes."""

import inspect
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import anisoscope as an
from anisoscope.cli import app
from anisoscope.errors import CorpusError
from anisoscope.flags import spec_flags
from anisoscope.printing import sparkline
from anisoscope.store import Store

COMMAND = [sys.executable, "-c", "from anisoscope.cli import main; main()"]
SMALL = ("--tokens", "2048", "--seq-len", "64", "--batch-points", "512")


def call(*arguments: object, stdin: str | None = None) -> Result:
    """The command in this process, as a terminal-less shell would see it."""
    return CliRunner().invoke(app, [str(word) for word in arguments], input=stdin)


@pytest.fixture(scope="module")
def measured(
    saved_models: dict[str, Path], corpus_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result]:
    run = tmp_path_factory.mktemp("runs") / "one"
    return run, call("measure", saved_models["decoder"], "--corpus", corpus_file, *SMALL, "--owners", "-o", run)


def test_measure_prints_a_table_with_profile_spread_null_and_population(
    measured: tuple[Path, Result],
) -> None:
    _, done = measured
    assert done.exit_code == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("leading_variance") and "typical" in line)
    assert re.search(r"[▁▂▃▄▅▆▇█]{6}", line)
    assert line.count("±") == 5
    assert "4 × " in line
    for word in ("estimator", "population", "null", "embed", "final_norm", "twonn", "matched", "loss"):
        assert word in done.stdout
    assert "first positions of the windows own" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_unit_is_stored_and_not_measured_twice(
    measured: tuple[Path, Result], saved_models: dict[str, Path], corpus_file: Path
) -> None:
    run, _ = measured
    assert len(Store(run).keys()) == 1
    before = {path: path.stat().st_mtime_ns for path in run.iterdir()}
    again = call("measure", saved_models["decoder"], "--corpus", corpus_file, *SMALL, "-o", run)
    assert again.exit_code == 0
    assert "already in" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in run.iterdir()} == before


def test_json_is_an_array_of_records_and_nothing_else(saved_models: dict[str, Path], corpus_file: Path) -> None:
    done = call(
        "measure", saved_models["encoder"], "--corpus", corpus_file, *SMALL, "--metrics", "leading_variance,linearity",
        "--json",
    )  # fmt: skip
    records = json.loads(done.stdout)
    costs = {part: records[0][f"seconds_{part}"] for part in ("forward", "neighbours", "spectrum", "rest")}
    assert costs["forward"] > 0
    assert costs["spectrum"] > 0
    assert all({part: row[f"seconds_{part}"] for part in costs} == costs for row in records)
    assert {row["metric"] for row in records} == {
        "leading_variance",
        "procrustes_linearity",
        "procrustes_linearity_heldout",
    }
    embed = next(row for row in records if row["site"] == "embed" and row["metric"] == "procrustes_linearity")
    assert embed["value"] is None
    assert embed["note"]
    assert done.stderr == ""


def test_full_prints_every_record(saved_models: dict[str, Path], corpus_file: Path) -> None:
    done = call(
        "measure", saved_models["decoder"], "--corpus", corpus_file, *SMALL, "--metrics", "mean_cosine", "--full"
    )
    assert len([line for line in done.stdout.splitlines() if re.match(r"(embed|block\.\d|final_norm)\s", line)]) == 16


def test_rows_that_differ_in_more_than_their_site_are_told_apart(tmp_path: Path) -> None:
    config = tmp_path / "more.toml"
    config.write_text('controls = ["shuffled_targets"]\ncurvature_rank = 3\n')
    small = ("--tokens", "2048", "--seq-len", "32", "--sites", "block.2", "--rank", "4", "--config", config)
    done = call("measure", "pocket-decoder", *small, "--metrics", "tangent_energy,tangent_frequency_trend", "--full")
    assert done.exit_code == 0, done.stderr
    header, *lines = (line for line in done.stdout.splitlines() if re.match(r"(site|block\.2)\s", line))
    assert {"gradient", "proxy", "variant", "bin", "control", "control_value"} <= set(header.split())
    assert len(lines) == len(set(lines)) > 20
    assert sum(" shuffled " in line for line in lines) == 8
    done = call("measure", "pocket-decoder", *small, "--metrics", "alignment")
    (title,) = (line for line in done.stdout.splitlines() if line.startswith("gradient "))
    assert "shuffled" in title.split()
    lines = [line.split() for line in done.stdout.splitlines() if re.match("(virtual|activation) ", line)]
    # Tokens, not types: half of those that were asked for, less what is not typical.
    assert len(lines) == 8
    assert all(900 < int(words[-1]) <= 1024 for words in lines)


def test_words_that_mean_nothing_are_usage_errors() -> None:
    small = ("measure", "pocket-decoder", "--tokens", "512", "--seq-len", "32")
    for flags, told in (
        (("--controls", "foo"), "must be out of type_disjoint, shuffled_targets, paper_normals, shares; got 'foo'"),
        (("--controls", "shares", "--metrics", "tangent_excess"), "is about tangent_anisotropy_share"),
        (("--rank", "foo"), "rank (--rank) must be a whole number of at least 1 or one of variance:SHARE"),
    ):
        done = call(*small, *flags)
        assert done.exit_code == 2
        assert told in done.stderr


def test_every_setting_has_a_flag() -> None:
    known = set(inspect.signature(spec_flags).parameters)
    # What a model is and where it comes from is said otherwise; earlier proxies are found by --follow.
    others = {"model", "revision", "weights", "run", "step", "corpus_hash", "proxy_from", "unknown_fields"}
    assert {item.name for item in fields(an.Spec)} == known | others


def test_text_can_come_from_standard_input(saved_models: dict[str, Path], corpus_file: Path) -> None:
    text = "\n\n".join(path.read_text() for path in sorted(corpus_file.iterdir()))
    arguments = ("measure", saved_models["decoder"], "--corpus", "-", *SMALL, "--metrics", "mean_cosine", "--json")
    done = call(*arguments, stdin=text)
    assert done.exit_code == 0, done.stderr
    assert {row["corpus"] for row in json.loads(done.stdout)} == {"stdin"}


def test_config_file_takes_flags_as_keys_and_flags_win(
    tmp_path: Path, saved_models: dict[str, Path], corpus_file: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'model = "{saved_models["decoder"]}"\ncorpus = "{corpus_file}"\ntokens = 2048\nseq-len = 64\n'
        'batch_points = 512\nmetrics = ["mean_cosine"]\nsites = ["block.1", "block.2"]\n'
    )
    done = call("measure", "--config", config, "--sites", "block.2", "--json")
    assert done.exit_code == 0, done.stderr
    assert {row["site"] for row in json.loads(done.stdout)} == {"block.2"}
    config.write_text("tokenz = 3\n")
    wrong = call("measure", "m", "--config", config)
    assert wrong.exit_code == 2
    assert "tokenz" in wrong.stderr


def test_one_bad_model_among_good_ones_is_exit_three_and_nothing_is_lost(
    tmp_path: Path, saved_models: dict[str, Path], corpus_file: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(saved_models["decoder"], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    run = tmp_path / "run"
    done = call(
        "measure",
        broken,
        saved_models["decoder"],
        "--corpus",
        corpus_file,
        *SMALL,
        "--metrics",
        "mean_cosine",
        "-o",
        run,
    )
    assert done.exit_code == 3
    assert "Traceback" not in done.stderr
    store = Store(run)
    assert len(store.keys()) == 1
    assert [row["error"] for row in store.failures()] == ["ModelError"]
    told = call("status", run)
    assert "1 done, 1 failed" in told.stdout
    assert "ModelError" in told.stdout
    units = json.loads(call("status", run, "--json").stdout)["units"]
    assert sorted(row["state"] for row in units) == ["done", "failed"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("measure", "{decoder}", "--metrics", "twonnn"), 2, "did you mean twonn"),
        (
            ("measure", "{decoder}", "--populations", "most"),
            2,
            "must be out of all, content, typical, types, matched; got 'most'",
        ),
        (("measure", "{decoder}", "--dtype", "float99"), 2, "float99"),
        (("measure", "{decoder}", "--sites", "block.77"), 2, "block.77"),
        (("measure", "{decoder}", "--batch-size", "none"), 2, "--batch-size"),
        (("measure", "{decoder}", "--protocol", "razzhigaev2024"), 2, "did you mean"),
        (("measure", "{decoder}", "--tokens", "many"), 2, "--tokens"),
        (("measure",), 2, "at least one MODEL"),
        (("measure", "{decoder}", "--corpus", "pydok"), 1, "Did you mean pydoc"),
        (("measure", "{decoder}", "--corpus", "{empty}"), 1, "empty"),
        (("measure", "{decoder}", "--corpus", "{binary}"), 1, "not UTF-8 at byte 4"),
        (("measure", "no/such-model"), 1, "no/such-model"),
        (("measure", "{decoder}", "-o", "{empty}"), 1, "cannot write to the run folder"),
        (("measure", "{notokenizer}"), 1, "tokenizer"),
        (("status", "nowhere"), 1, "no run folder"),
        (("ls", "everything"), 2, "ls lists metrics"),
        (("doctor", "no/such-model"), 1, "no/such-model"),
        (("frobnicate",), 2, "frobnicate"),
    ],
)
def test_bad_input_is_one_sentence_and_the_right_exit_code(
    arguments: tuple[str, ...],
    code: int,
    words: str,
    tmp_path: Path,
    saved_models: dict[str, Path],
    corpus_file: Path,
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"good\xff\xfe")
    bare = tmp_path / "bare"
    shutil.copytree(saved_models["decoder"], bare)
    for path in bare.glob("*token*"):
        path.unlink()
    places = {
        "{decoder}": str(saved_models["decoder"]),
        "{empty}": str(tmp_path / "empty.txt"),
        "{binary}": str(tmp_path / "binary.txt"),
        "{notokenizer}": str(bare),
    }
    filled = [places.get(word, word) for word in arguments]
    if filled[0] == "measure" and "--corpus" not in filled:
        filled += ["--corpus", str(corpus_file)]
    done = call(*filled)
    assert done.exit_code == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_debug_shows_the_traceback() -> None:
    done = call("measure", "m", "--corpus", "pydok", "--debug")
    assert isinstance(done.exception, CorpusError)
    command = [*COMMAND, "measure", "m", "--corpus", "pydok", "--debug"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 1
    assert "Traceback" in process.stderr


def test_an_interrupted_run_keeps_its_finished_units(
    tmp_path: Path, saved_models: dict[str, Path], corpus_file: Path
) -> None:
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    run = tmp_path / "run"
    # The first is soon measured, and the second is not.
    sizes = {"vocab_size": 2048, "n_layer": 1, "n_embd": 8, "n_head": 1, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(saved_models["decoder"]).save_pretrained(tmp_path / "small")
    models = [str(tmp_path / "small"), str(saved_models["decoder"])]
    amount = ("--tokens", "28672", "--seq-len", "64", "--batch-points", "512")
    process = subprocess.Popen(
        [*COMMAND, "measure", *models, "--corpus", str(corpus_file), *amount, "-o", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background inherits an ignored SIGINT, and would pass it on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.time() + 120
    while not Store(run).keys() and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "interrupted; what was finished is kept" in errors
    assert "Traceback" not in errors
    (key,) = Store(run).keys()
    assert Store(run).get(key).records


def test_ls_lists_metrics_models_corpora_and_protocols() -> None:
    metrics = json.loads(call("ls", "metrics", "--json").stdout)
    assert {row["family"] for row in metrics} == {
        "alignment",
        "anisotropy",
        "concepts",
        "contextuality",
        "curvature",
        "drift",
        "final_norm",
        "isotropy",
        "intrinsic_dimension",
        "linearity",
        "output",
        "pinning",
    }
    assert {"gride_64", "levina_bickel", "near_duplicate_rate", "loss"} <= {row["metric"] for row in metrics}
    assert "razzhigaev2024-code" in call("ls", "protocols").stdout
    assert "enwik8" in call("ls", "corpora").stdout
    assert "Mamba" in call("ls", "models").stdout


def test_doctor_shows_what_is_installed_and_proves_a_models_sites(saved_models: dict[str, Path]) -> None:
    assert "transformers" in call("doctor").stdout
    done = call("doctor", saved_models["decoder"])
    assert done.exit_code == 0, done.stderr
    assert "output of transformer.h.5" in done.stdout
    assert "output of transformer.ln_f" in done.stdout
    assert done.stdout.count("proven:") >= 3
    wrong = call("doctor", saved_models["decoder"], "--final-norm", "transformer.h.0.ln_1")
    assert wrong.exit_code == 1
    assert "transformer.h.0.ln_1" in wrong.stderr


def test_without_torch_what_measures_says_so() -> None:
    hidden = (
        "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['ls', 'metrics']\n"
        "from anisoscope.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: this needs torch, which is not installed here: pip install torch\n"


def test_version_and_help() -> None:
    assert call("--version").stdout.startswith("anisoscope ")
    assert "--owners" in call("measure", "--help").stdout
    for command in app.registered_commands:
        assert command.callback
        name = command.name or command.callback.__name__
        assert f"Example: anisoscope {name} " in (command.callback.__doc__ or ""), name


def test_a_profile_line_starts_at_zero() -> None:
    assert sparkline([1.0, 1.01, 0.99]) == "███"
    assert sparkline([0.0, math.nan, 1.0]) == "▁ █"
    assert sparkline([-1.0, 0.0, 1.0]) == "▁▅█"
    assert sparkline([math.nan]) == ""


def test_counterfactuals_change_the_final_norm_and_name_each_variant(
    saved_models: dict[str, Path], corpus_file: Path, tmp_path: Path
) -> None:
    folder, small = saved_models["decoder"], ("--tokens", "2048", "--seq-len", "64", "--batch-points", "256")
    words = ("measure", folder, "--corpus", corpus_file, *small, "--counterfactuals", "--swap-norm", folder)
    done = call(*words, "-o", tmp_path / "run", "--json")
    assert done.exit_code == 0, done.stderr
    rows = json.loads(done.stdout)
    losses = {row["variant"]: row["value"] for row in rows if row["metric"] == "loss"}
    assert {"norm=own", "bias=0", "bias=-gain*mean", "gain=1", f"norm={folder}"} <= set(losses)
    # Its own norm in place of its own norm is no change at all.
    assert losses["norm=own"] == losses[f"norm={folder}"]
    assert losses["bias=-gain*mean"] != losses["norm=own"]
    assert len(Store(tmp_path / "run").keys()) == 1
    encoder = call("measure", saved_models["encoder"], "--corpus", corpus_file, *small, "--counterfactuals")
    assert encoder.exit_code == 1
    assert "there is no final norm" in encoder.stderr
