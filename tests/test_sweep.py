"""Sweeps: the same table whatever is killed, on real processes, a real Ray cluster and submitit."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hub import Hub
from shell import Shell
from test_store import write_version_1
from typer.testing import CliRunner

from anisoscope.checkpoints import find_checkpoints
from anisoscope.cli import app
from anisoscope.errors import CheckpointError, SpecError
from anisoscope.records import Spec
from anisoscope.status import survey
from anisoscope.store import Store
from anisoscope.sweep import Swept, plan_specs, run_sweep

SETTINGS: dict[str, Any] = {
    "tokens": 1024,
    "seq_len": 64,
    "batch_points": 256,
    "metrics": ("leading_variance", "twonn", "loss"),
}
FLAGS = [
    *("--tokens", "1024", "--seq-len", "64", "--batch-points", "256"),
    *("--metrics", "leading_variance,twonn,loss", "--device", "cpu"),
]
STEPS = (0, 1, 2, 4, 8, 16)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> Path:
    """Six checkpoints of a tiny decoder."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from anisoscope.corpora import load_corpus
    from anisoscope.lab import VOCABULARY, train_tokenizer

    folder = tmp_path_factory.mktemp("training")
    tokenizer = train_tokenizer(load_corpus(str(corpus_file)), "decoder")
    for step in STEPS:
        torch.manual_seed(step)
        module = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_layer=2, n_embd=32, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0
            )
        )
        module.save_pretrained(folder / f"checkpoint-{step}")
        tokenizer.save_pretrained(folder / f"checkpoint-{step}")
    return folder


@pytest.fixture(scope="session")
def specs(run_folder: Path, corpus_file: Path) -> list[Spec]:
    return plan_specs(find_checkpoints(str(run_folder)), [str(corpus_file)], SETTINGS)


@pytest.fixture(scope="session")
def undisturbed_store(specs: list[Spec], tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("undisturbed"))
    swept = run_sweep(specs, store, device="cpu", progress=False)
    assert len(swept.measured) == len(STEPS)
    assert not swept.failed
    return store


@pytest.fixture(scope="session")
def undisturbed(undisturbed_store: Store) -> pa.Table:
    return undisturbed_store.table()


def assert_same(one: pa.Table, two: pa.Table) -> None:
    """Equal in every column but the seconds, to the last bit: every engine gives a job one thread here."""
    for name in one.column_names:
        if name != "seconds":
            # As text, since two NaNs are not equal.
            assert str(one[name].to_pylist()) == str(two[name].to_pylist()), name


def sweep_command(run_folder: Path, corpus: Path, store: Path, *more: str) -> list[str]:
    start = [sys.executable, "-m", "anisoscope", "sweep", str(run_folder), "--corpus", str(corpus)]
    return [*start, *FLAGS, "-o", str(store), *more]


def resume(specs: list[Spec], store: Path, engine: str = "local", **options: Any) -> Swept:
    return run_sweep(specs, store, engine, device="cpu", progress=False, **options)


def test_a_sweep_measures_each_checkpoint_once(specs: list[Spec], undisturbed: pa.Table, tmp_path: Path) -> None:
    assert undisturbed["step"].unique().to_pylist() == list(STEPS)
    assert set(undisturbed["revision"].to_pylist()) == {f"checkpoint-{step}" for step in STEPS}
    assert len(set(undisturbed["model"].to_pylist())) == 1
    assert set(undisturbed["suspect"].to_pylist()) == {None}
    resume(specs[:2], tmp_path)
    again = resume(specs, tmp_path)
    assert (len(again.measured), len(again.stored_before)) == (4, 2)
    assert resume(specs, tmp_path).measured == ()
    assert_same(Store(tmp_path).table(), undisturbed)


def test_several_corpora_share_a_loaded_checkpoint(
    run_folder: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anisoscope import models

    loaded = []
    load = models.load_model
    monkeypatch.setattr(models, "load_model", lambda *names, **rest: loaded.append(names) or load(*names, **rest))
    second = tmp_path / "second.txt"
    second.write_text((corpus_file / "document00.txt").read_text() * 3)
    grid = plan_specs(find_checkpoints(str(run_folder))[:2], [str(corpus_file), str(second)], SETTINGS)
    assert len(resume(grid, tmp_path / "run").measured) == 4
    assert len(loaded) == 2


def test_unknown_engines_and_stdin_on_other_hosts_are_refused(specs: list[Spec], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="must be one of local, processes, ray, slurm"):
        run_sweep(specs, tmp_path, "dask")
    with pytest.raises(SpecError, match="standard input"):
        run_sweep([Spec(model="m", corpus="-")], tmp_path, "processes")


def test_processes_give_the_table_of_one(specs: list[Spec], undisturbed: pa.Table, tmp_path: Path) -> None:
    assert len(resume(specs, tmp_path, "processes", workers=2).measured) == len(STEPS)
    assert_same(Store(tmp_path).table(), undisturbed)


@pytest.mark.parametrize("moment", [0.0, 0.4])
def test_a_killed_sweep_loses_one_unit_at_most(
    run_folder: Path, corpus_file: Path, specs: list[Spec], undisturbed: pa.Table, tmp_path: Path, moment: float
) -> None:
    kill_and_resume(run_folder, corpus_file, specs, undisturbed, tmp_path, moment)


@pytest.mark.slow(reason="twenty random moments take minutes")
@pytest.mark.parametrize("seed", range(20))
def test_a_sweep_killed_at_any_moment_is_resumed(
    run_folder: Path, corpus_file: Path, specs: list[Spec], undisturbed: pa.Table, tmp_path: Path, seed: int
) -> None:
    kill_and_resume(run_folder, corpus_file, specs, undisturbed, tmp_path, random.Random(seed).uniform(0.0, 1.5))


def kill_and_resume(
    run_folder: Path, corpus: Path, specs: list[Spec], undisturbed: pa.Table, store: Path, moment: float
) -> None:
    """SIGKILL a sweep some time after it began to measure; then do what is left."""
    started = subprocess.Popen(
        sweep_command(run_folder, corpus, store), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    begun = wait_for(lambda: any(store.glob("*.running.json")) or any(store.glob("*.parquet")), started)
    time.sleep(moment if begun else 0)
    started.kill()
    started.communicate()
    survived = len(Store(store).keys())
    assert Store(store).table().num_rows == survived * (undisturbed.num_rows // len(STEPS))
    again = resume(specs, store)
    assert len(again.stored_before) == survived
    assert_same(Store(store).table(), undisturbed)


def wait_for(event: Any, process: subprocess.Popen[bytes] | None = None, seconds: float = 120) -> bool:
    """Whether something came to pass before the process ended."""
    end = time.time() + seconds
    while time.time() < end:
        if event():
            return True
        if process is not None and process.poll() is not None:
            return False
        time.sleep(0.005)
    raise AssertionError("waited in vain")


def kill_workers_while(store: Path, seconds: list[float]) -> threading.Thread:
    """A thread that kills whoever is measuring, some time after they began: so often as there are times given."""

    killed: set[int] = set()

    def measuring() -> set[int]:
        """Processes that were not killed before: the marks of those stay for a while."""
        return {who["pid"] for who in Store(store).running().values()} - killed

    def hunt() -> None:
        for pause in seconds:
            wait_for(measuring)
            time.sleep(pause)
            for process in measuring():
                killed.add(process)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    thread = threading.Thread(target=hunt, daemon=True)
    thread.start()
    return thread


def test_killed_workers_are_replaced(specs: list[Spec], undisturbed: pa.Table, tmp_path: Path) -> None:
    sweep_with_killed_workers(specs, undisturbed, tmp_path, [0.0, 0.1])


@pytest.mark.slow(reason="twenty random moments take minutes")
@pytest.mark.parametrize("seed", range(20))
def test_workers_killed_at_any_moment_are_replaced(
    specs: list[Spec], undisturbed: pa.Table, tmp_path: Path, seed: int
) -> None:
    sweep_with_killed_workers(specs, undisturbed, tmp_path, [random.Random(seed).uniform(0.0, 0.8)])


def sweep_with_killed_workers(specs: list[Spec], undisturbed: pa.Table, store: Path, moments: list[float]) -> None:
    hunter = kill_workers_while(store, moments)
    swept = resume(specs, store, "processes", workers=2, max_retries=4)
    hunter.join(60)
    assert len(swept.measured) == len(STEPS)
    assert_same(Store(store).table(), undisturbed)


def test_a_worker_that_always_dies_is_a_failure_with_its_reason(specs: list[Spec], tmp_path: Path) -> None:
    hunter = kill_workers_while(tmp_path, [0.0, 0.0])
    swept = resume(specs[:1], tmp_path, "processes", workers=1, max_retries=1)
    hunter.join(60)
    assert not hunter.is_alive()
    assert len(swept.failed) == 1
    assert "the worker process died" in Store(tmp_path).failures()[0]["message"]
    assert survey(Store(tmp_path)).count("failed") == 1
    assert len(resume(specs[:1], tmp_path).measured) == 1


def test_workers_end_with_a_killed_driver(run_folder: Path, corpus_file: Path, tmp_path: Path) -> None:
    started = subprocess.Popen(
        sweep_command(run_folder, corpus_file, tmp_path, "--engine", "processes", "--workers", "2"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert wait_for(lambda: Store(tmp_path).running(), started)
    pids = [who["pid"] for who in Store(tmp_path).running().values()]
    started.kill()
    started.wait()
    assert pids
    assert wait_for(lambda: not any(_is_alive(pid) for pid in pids))


def _is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """A Ray cluster of two nodes on this host, each with one core."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.filterwarnings("default")
class TestRay:
    """A real cluster: one node of it dies."""

    def test_a_node_that_dies_in_the_middle_of_a_task_costs_nothing(
        self, two_nodes: Any, specs: list[Spec], undisturbed: pa.Table, tmp_path: Path
    ) -> None:
        self.sweep_and_kill_node(two_nodes, specs, undisturbed, tmp_path, 0.0)

    @pytest.mark.slow(reason="twenty random moments take minutes")
    @pytest.mark.parametrize("seed", range(20))
    def test_a_node_may_die_at_any_moment(
        self, two_nodes: Any, specs: list[Spec], undisturbed: pa.Table, tmp_path: Path, seed: int
    ) -> None:
        self.sweep_and_kill_node(two_nodes, specs, undisturbed, tmp_path, random.Random(seed).uniform(0.0, 0.8))

    def sweep_and_kill_node(
        self, cluster: Any, specs: list[Spec], undisturbed: pa.Table, store: Path, moment: float
    ) -> None:
        node = cluster.add_node(num_cpus=1)
        gone = threading.Event()

        def kill_node() -> None:
            # Both nodes have a task: one of the two is on the node that goes.
            wait_for(lambda: len(Store(store).running()) >= 2)
            time.sleep(moment)
            cluster.remove_node(node, allow_graceful=False)
            gone.set()

        killer = threading.Thread(target=kill_node, daemon=True)
        killer.start()
        swept = resume(specs, store, "ray", max_retries=3)
        killer.join(120)
        assert gone.is_set()
        assert len(swept.measured) == len(STEPS)
        assert not swept.failed
        assert_same(Store(store).table(), undisturbed)

    def test_a_killed_worker_is_replaced(
        self, two_nodes: Any, specs: list[Spec], undisturbed: pa.Table, tmp_path: Path
    ) -> None:
        hunter = kill_workers_while(tmp_path, [0.05])
        swept = resume(specs[:3], tmp_path, "ray", max_retries=3)
        hunter.join(60)
        assert len(swept.measured) == 3

    def test_units_come_home_from_nodes_that_do_not_see_the_store(
        self, two_nodes: Any, specs: list[Spec], undisturbed: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # As on a node without the shared disk: the plan's file is not where it was announced.
        import anisoscope.sweep

        orders = anisoscope.sweep.Orders
        monkeypatch.setattr(
            anisoscope.sweep, "Orders", lambda **given: orders(**{**given, "plan": "nowhere.plan.json"})
        )
        assert len(resume(specs, tmp_path, "ray").measured) == len(STEPS)
        assert_same(Store(tmp_path).table(), undisturbed)


@pytest.mark.filterwarnings("default")
def test_slurm_arrays_run_through_submitit(specs: list[Spec], undisturbed: pa.Table, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    swept = resume(specs, tmp_path, "slurm", workers=2, engine_options={"cluster": "local"})
    assert len(swept.measured) == len(STEPS)
    assert_same(Store(tmp_path).table(), undisturbed)


@pytest.mark.filterwarnings("default")
def test_a_killed_share_of_a_slurm_array_is_submitted_again(
    specs: list[Spec], undisturbed: pa.Table, tmp_path: Path
) -> None:
    pytest.importorskip("submitit")
    hunter = kill_workers_while(tmp_path, [0.0])
    swept = resume(specs[:4], tmp_path, "slurm", workers=2, engine_options={"cluster": "local"})
    hunter.join(60)
    assert len(swept.measured) == 4


def test_identical_steps_are_caught_before_anything_is_measured(
    run_folder: Path, corpus_file: Path, tmp_path: Path
) -> None:
    import shutil

    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    shutil.copy(run / "checkpoint-1" / "model.safetensors", run / "checkpoint-4" / "model.safetensors")
    grid = plan_specs(find_checkpoints(str(run)), [str(corpus_file)], SETTINGS)
    store = Store(tmp_path / "store")
    with pytest.raises(CheckpointError, match="2 of 6 checkpoints are not what their names say"):
        run_sweep(grid, store, progress=False)
    assert not store.keys()
    swept = run_sweep(grid, store, verify=False, device="cpu", progress=False)
    assert len(swept.findings) == 2
    marked = {(row["step"], row["suspect"]) for row in store.table().select(["step", "suspect"]).to_pylist()}
    assert (1, "it has the same weights as checkpoint-4") in marked
    assert (0, None) in marked


def test_failures_are_stored_and_tried_again(run_folder: Path, corpus_file: Path, tmp_path: Path) -> None:
    import shutil

    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    whole = (run / "checkpoint-2" / "model.safetensors").read_bytes()
    (run / "checkpoint-2" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    store = tmp_path / "store"
    done = subprocess.run(sweep_command(run, corpus_file, store), capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "5 measured, 0 stored before, 1 failed" in done.stdout
    assert "Traceback" not in done.stderr
    assert "about" in done.stderr
    failure = Store(store).failures()[0]
    assert failure["error"] == "ModelError"
    # As it was raised where it happened, not once more wrapped.
    assert "corrupt or cut short" in failure["message"]
    assert not failure["message"].startswith("ModelError")
    (run / "checkpoint-2" / "model.safetensors").write_bytes(whole)
    again = call(*sweep_command(run, corpus_file, store, "--json")[3:])
    assert again.exit_code == 0, again.stderr
    told = json.loads(again.stdout)
    assert (len(told["measured"]), len(told["stored_before"])) == (1, 5)


def call(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_claims_are_printed_and_gates_decide_the_exit_code(undisturbed_store: Store) -> None:
    folder = str(undisturbed_store.folder)
    told = call("claims", folder)
    assert told.exit_code == 0
    assert "a claim about training needs 3 seeds, and has 1" in " ".join(told.stdout.split())
    rows = json.loads(call("claims", folder, "--json").stdout)
    assert {row["claim"] for row in rows} >= {"bell", "flat", "grows then stabilises", "rises then falls"}
    assert all(row["holds"] is None for row in rows if row["claim"] == "rises then falls")
    closed = call("claims", folder, "--fail-if", "leading_variance[block.*] > 0")
    assert closed.exit_code == 1
    assert f"step {STEPS[-1]}" in closed.stderr
    assert call("claims", folder, "--fail-if", "leading_variance[block.*] > 1").exit_code == 0
    assert call("claims", folder, "--fail-if", "leading_varianz[block.*] > 0").exit_code == 2
    assert call("claims", folder, "--fail-if", "nonsense").exit_code == 2


def test_drift_is_followed_with_a_sweep_and_judged(run_folder: Path, corpus_file: Path, tmp_path: Path) -> None:
    words = ["sweep", str(run_folder), "--corpus", str(corpus_file), *FLAGS, "--every", "3", "--drift"]
    told = call(*words, "-o", str(tmp_path))
    assert told.exit_code == 0, told.stderr
    rows = [row for row in Store(tmp_path).table().to_pylist() if row["site"] == "unembed.weight"]
    assert [(row["step"], row["variant"]) for row in rows[::4]] == [(4, "from=0"), (16, "from=4")]
    assert {row["metric"] for row in rows} == {"common_drift", "common_drift_share", "rare_drift", "update_alignment"}
    # Each of these checkpoints was drawn by itself: nothing is common.
    assert all(row["value"] < 0.1 for row in rows if row["metric"] == "common_drift_share")
    verdicts = json.loads(call("claims", str(tmp_path), "--json").stdout)
    assert {"rows drift together", "rare rows drift farther"} <= {one["claim"] for one in verdicts}


def test_status_and_checkpoints_are_listed(undisturbed_store: Store, run_folder: Path) -> None:
    told = call("status", str(undisturbed_store.folder))
    assert told.exit_code == 0
    assert "6 done" in told.stdout
    seen = json.loads(call("status", str(undisturbed_store.folder), "--json").stdout)
    assert [row["step"] for row in seen["units"]] == list(STEPS)
    assert {row["state"] for row in seen["units"]} == {"done"}
    listed = json.loads(call("ls", "checkpoints", str(run_folder), "--json").stdout)
    assert [row["step"] for row in listed] == list(STEPS)
    assert call("ls", "checkpoints").exit_code == 2
    assert call("ls", "metrics", "some-model").exit_code == 2


def test_a_sweep_without_a_folder_or_a_model_is_a_usage_error(run_folder: Path) -> None:
    assert call("sweep", str(run_folder)).exit_code == 2
    assert call("sweep", "-o", "somewhere").exit_code == 2
    assert call("sweep", str(run_folder), "--slurm", "partition", "-o", "somewhere").exit_code == 2


def test_a_config_file_gives_any_flag_of_a_sweep(run_folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "sweep.toml"
    config.write_text(f'models = ["{run_folder}"]\nevery = 5\ndry-run = true\njson = true\n')
    told = call("sweep", "--config", str(config))
    assert [row["step"] for row in json.loads(told.stdout)] == [0, 16]
    told = call("sweep", "--config", str(config), "--every", "2")
    assert [row["step"] for row in json.loads(told.stdout)] == [0, 2, 8, 16]


def test_a_glob_on_local_folders_names_a_run(run_folder: Path) -> None:
    told = call("sweep", "--checkpoints", f"{run_folder}/checkpoint-1*", "--dry-run", "--json")
    assert [row["step"] for row in json.loads(told.stdout)] == [1, 16]


def test_the_same_sweep_measures_again_what_was_damaged_or_deleted(
    specs: list[Spec], undisturbed: pa.Table, undisturbed_store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(undisturbed_store.folder, tmp_path / "run")
    store = Store(tmp_path / "run")
    short, flipped, deleted, copied, empty, _ = sorted(store.folder / f"{key}.parquet" for key in store.results())
    short.write_bytes(short.read_bytes()[:-900])
    data = bytearray(flipped.read_bytes())
    data[len(data) // 3] ^= 4
    flipped.write_bytes(data)
    deleted.unlink()
    shutil.copy(copied, store.folder / f"{copied.stem} (copy).parquet")
    empty.write_bytes(b"")
    pq.write_table(pa.table({"other": [1]}), store.folder / "foreign.parquet")
    os.mkfifo(store.folder / "pipe.parquet")
    assert store.table().num_rows == undisturbed.num_rows // 3
    swept = resume(specs, store.folder)
    assert set(swept.measured) == {path.stem for path in (short, flipped, deleted, empty)}
    assert (len(swept.stored_before), swept.failed) == (2, ())
    assert_same(Store(store.folder).table(), undisturbed)
    assert [problem.split()[0] for problem in Store(store.folder).problems()] == [
        copied.stem,
        "foreign.parquet",
        "pipe.parquet",
    ]
    for path in (short, flipped, empty, store.folder / "foreign.parquet", store.folder / "pipe.parquet"):
        assert sum(path.name in message for message in caplog.messages) == 1
    assert survey(Store(store.folder)).sentence() == "6 done"


def test_a_sweep_over_a_store_of_version_1_measures_nothing(
    specs: list[Spec], undisturbed: pa.Table, undisturbed_store: Store, tmp_path: Path
) -> None:
    for key in undisturbed_store.results():
        write_version_1(tmp_path, undisturbed_store.get(key))
    assert not {path.stem for path in tmp_path.glob("*.parquet")} & undisturbed_store.keys()
    swept = resume(specs, tmp_path)
    assert (swept.measured, len(swept.stored_before), swept.failed) == ((), 6, ())
    assert_same(Store(tmp_path).table(), undisturbed)
    assert survey(Store(tmp_path)).sentence() == "6 done"


def test_time_left_is_told_from_the_pace(undisturbed_store: Store, tmp_path: Path) -> None:
    store = Store(tmp_path)
    keys = sorted(undisturbed_store.keys())
    entries = [{"key": key, "model": "m", "revision": key, "step": None, "corpus": "c"} for key in keys]
    store.plan(entries)
    assert survey(store).sentence() == "0 done, 6 waiting"
    for key in keys[:2]:
        store.put(undisturbed_store.get(key))
    plan = next(tmp_path.glob("*.plan.json"))
    os.utime(plan, (time.time() - 600,) * 2)
    store.put_failure(undisturbed_store.get(keys[2]).spec, ValueError("no luck"))
    with store.working_on(keys[3]):
        seen = survey(store)
        assert seen.sentence() == "2 done, 1 running, 1 failed, 2 waiting, about 15 min left"
        assert seen.seconds_left == pytest.approx(900, rel=0.05)


class Series:
    """Checkpoints under a name of their own, on a hub that several tests share."""

    def __init__(self, hub: Hub, shell: Shell, home: Path, folder: Path, name: str) -> None:
        self.hub, self._shell, self._home = hub, shell, home
        self.name, self.run = f"lab/{name}", folder / "run"

    def words(self, corpus: Path, *more: str) -> list[str]:
        return ["sweep", self.name, "--corpus", str(corpus), *FLAGS, "-o", str(self.run), *more]

    def sweep(self, corpus: Path, *more: str) -> subprocess.CompletedProcess[str]:
        return self._shell.run(*self.words(corpus, *more))

    def sweep_anew(self, corpus: Path, *more: str) -> subprocess.CompletedProcess[str]:
        """The same in a process that knows of nothing."""
        command = [sys.executable, "-m", "anisoscope", *self.words(corpus, *more)]
        return subprocess.run(command, env=variables(self.hub, self._home), capture_output=True, text=True)

    def downloads(self) -> list[str]:
        return self.hub.downloads(f"*{self.name}/*.safetensors")

    def kept(self) -> list[Path]:
        """Weights that are still in the cache of the client."""
        return [path for path in self._home.rglob("*.safetensors") if self.name.replace("/", "--") in str(path)]

    def scratch(self) -> list[Path]:
        return list((self._home / "scratch").rglob("*.safetensors"))


def variables(hub: Hub, home: Path) -> dict[str, str]:
    return {**os.environ, **hub.environment(home / "home"), "ANISOSCOPE_SCRATCH": str(home / "scratch")}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, Shell, Path]]:
    """A hub, and one process that sweeps from it."""
    home = tmp_path_factory.mktemp("fetching")
    with Hub(home / "hub") as hub, Shell(variables(hub, home)) as shell:
        yield hub, shell, home


@pytest.fixture
def series(
    shared: tuple[Hub, Shell, Path], run_folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Series]:
    series = Series(*shared, tmp_path, request.node.name)
    for step in STEPS[:4]:
        files = {path.name: path for path in (run_folder / f"checkpoint-{step}").iterdir()}
        series.hub.add(series.name, f"step{step}", files, kind="tag" if step == 1 else "branch")
    yield series
    series.hub.heal()


class TestHub:
    """Checkpoints that have to be fetched, through the normal client, from a hub on this machine."""

    def test_a_hub_series_is_fetched_measured_and_deleted(
        self, series: Series, corpus_file: Path, undisturbed: pa.Table
    ) -> None:
        # Reset connections, which the client does not try again.
        series.hub.break_once(f"{series.name}/resolve/*/model.safetensors", after_bytes=1000, reset=True)
        done = series.sweep(corpus_file)
        assert done.returncode == 0, done.stderr
        table = Store(series.run).table()
        assert table["step"].unique().to_pylist() == list(STEPS[:4])
        specs = [Store(series.run).spec(key) for key in sorted(Store(series.run).keys())]
        assert all(len(spec["weights"]) == 40 for spec in specs)
        ours = {(row["step"], row["site"], row["metric"], row["population"]): row["value"] for row in table.to_pylist()}
        for row in undisturbed.to_pylist():
            if row["step"] in STEPS[:4]:
                place = (row["step"], row["site"], row["metric"], row["population"])
                assert ours[place] == pytest.approx(row["value"], rel=1e-4, nan_ok=True)
        assert not series.scratch()
        assert not series.kept()
        before = len(series.downloads())
        # Each was cut off once.
        assert before == 8
        assert series.sweep_anew(corpus_file).returncode == 0
        assert len(series.downloads()) == before

    def test_the_next_checkpoint_is_fetched_while_this_one_is_measured(self, series: Series, corpus_file: Path) -> None:
        # Downloads take about as long as measuring.
        series.hub.slow("*.safetensors", 500_000)
        asked: list[float] = []
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(0.001):
                asked.extend([time.time()] * (len(series.downloads()) - len(asked)))

        watcher = threading.Thread(target=look)
        watcher.start()
        done = series.sweep(corpus_file)
        stop.set()
        watcher.join()
        assert done.returncode == 0, done.stderr
        stored = sorted(path.stat().st_mtime for path in series.run.glob("*.parquet"))
        assert len(stored) == len(asked) == 4
        assert all(later < earlier for later, earlier in zip(asked[1:], stored[:-1], strict=True))

    def test_files_are_kept_where_that_is_asked_for(self, series: Series, corpus_file: Path) -> None:
        done = series.sweep(corpus_file, "--keep-cache")
        assert done.returncode == 0, done.stderr
        assert len(series.kept()) == 4

    def test_wrong_bytes_are_a_failure_and_never_a_number(self, series: Series, corpus_file: Path) -> None:
        series.hub.corrupt(f"{series.name}/resolve/*/model.safetensors")
        done = series.sweep(corpus_file, "--max-retries", "0", "--every", "3")
        assert done.returncode == 1
        assert not Store(series.run).keys()
        assert "not the file that the hub announced" in Store(series.run).failures()[0]["message"]
        series.hub.heal()
        assert series.sweep(corpus_file, "--every", "3").returncode == 0

    def test_steps_that_share_a_blob_are_refused_before_any_download(
        self, series: Series, run_folder: Path, corpus_file: Path
    ) -> None:
        series.hub.add(series.name, "step3", {path.name: path for path in (run_folder / "checkpoint-1").iterdir()})
        done = series.sweep(corpus_file)
        assert done.returncode == 1
        assert f"{series.name}@step3: it has the same weights as step1" in done.stderr
        assert not series.downloads()
        assert not Store(series.run).keys()
        assert series.sweep(corpus_file, "--no-verify").returncode == 0
        rows = Store(series.run).table().select(["revision", "suspect", "value"]).to_pylist()
        assert {row["revision"] for row in rows if row["suspect"]} == {"step1", "step3"}

    def test_on_ray_files_are_fetched_by_tasks_of_their_own(self, series: Series, corpus_file: Path) -> None:
        pytest.importorskip("ray")
        done = series.sweep_anew(corpus_file, "--engine", "ray", "--workers", "1")
        assert done.returncode == 0, done.stderr
        table = Store(series.run).table()
        assert table["step"].unique().to_pylist() == list(STEPS[:4])
        assert len(series.downloads()) == 4
        assert not series.scratch()

    def test_a_dry_run_says_what_would_be_downloaded(self, series: Series, corpus_file: Path) -> None:
        done = series.sweep(corpus_file, "--dry-run", "--json")
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)
        assert [row["revision"] for row in rows] == ["step0", "step1", "step2", "step4"]
        assert all(row["bytes"] > 100_000 and len(row["commit"]) == 40 for row in rows)
        assert not series.downloads()
        assert not series.run.exists()
