"""Live measuring where several processes train one model: real processes, talking through gloo."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from test_live import VOCABULARY, extra_metric, make_model, spec_for
from torch import Tensor, nn

import anisoscope as an
from anisoscope.corpora import load_corpus
from anisoscope.errors import AnisoscopeError, ModelError
from anisoscope.lab import train_tokenizer
from anisoscope.live import Scope
from anisoscope.schedules import every

PROCESSES = 2


def work(rank: int, folder: str, corpus: str) -> None:
    """One process: for each task it joins the others, trains, and writes down what it saw."""
    torch.set_num_threads(1)
    for name, task in TASKS.items():
        mine = Path(folder) / name
        mine.mkdir(exist_ok=True)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{mine}/meeting", rank=rank, world_size=PROCESSES
        )
        try:
            seen = task(rank, mine, Path(corpus))
            (mine / f"{rank}.json").write_text(json.dumps(seen))
            torch.distributed.barrier()
        finally:
            torch.distributed.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Together:
    """What the processes wrote down, task by task, and what ended them early."""

    folder: Path
    error: Exception | None

    def seen(self, task: str) -> list[dict[str, Any]]:
        places = [self.folder / task / f"{rank}.json" for rank in range(PROCESSES)]
        if self.error is not None and not all(place.exists() for place in places):
            raise self.error
        return [json.loads(place.read_text()) for place in places]

    def store(self, task: str) -> an.Store:
        return an.Store(self.folder / task / "run")


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> Together:
    """Every task by the same two processes: loading torch and transformers takes longer than all tasks."""
    folder, error = tmp_path_factory.mktemp("together"), None
    try:
        torch.multiprocessing.spawn(work, (str(folder), str(corpus_file)), nprocs=PROCESSES, join=True)
    except Exception as caught:
        # Tasks before the one that failed are judged by what they wrote.
        error = caught
    return Together(folder=folder, error=error)


def train(rank: int, model: nn.Module, scope: Scope | None, *, steps: int = 6) -> dict[str, Any]:
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    if scope is not None:
        scope.open()
    for step in range(steps):
        ids = torch.randint(0, VOCABULARY, (2, 16))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        if scope is not None:
            scope.step(step)
            if scope.should_stop:
                break
        optimizer.step()
        optimizer.zero_grad()
    if scope is not None:
        scope.close()
    weights = [float(weight.detach().double().sum()) for weight in model.parameters()]
    return {"losses": losses, "weights": weights, "summary": scope.summary if scope else None}


def open_scope(model: nn.Module, folder: Path, corpus: Path, **options: Any) -> Scope:
    tokenizer = train_tokenizer(load_corpus(str(corpus)), "decoder")
    given = {"tokenizer": tokenizer, "store": folder / "run", "when": every(2), "budget": 1e9, "run": "together"}
    return Scope(model, options.pop("spec", None) or spec_for(corpus), **{**given, **options})


def parallel() -> nn.Module:
    return nn.parallel.DistributedDataParallel(make_model())


def ddp_alone(rank: int, folder: Path, corpus: Path) -> dict[str, Any]:
    return train(rank, parallel(), None)


def ddp_watched(rank: int, folder: Path, corpus: Path) -> dict[str, Any]:
    model = parallel()
    return train(rank, model, open_scope(model, folder, corpus))


def ddp_waiting(rank: int, folder: Path, corpus: Path) -> dict[str, Any]:
    """The first process goes on measuring until the second has come back from its own `step`."""

    def wait(moments: Any) -> Tensor:
        deadline = time.monotonic() + 60
        while not (folder / "second came back").exists():
            assert time.monotonic() < deadline, "the second process waits for the first"
            time.sleep(0.01)
        return moments.leading

    with extra_metric("waiting", wait):
        model = parallel()
        scope = open_scope(model, folder, corpus, spec=spec_for(corpus, metrics=("waiting",)), run="waiting")
        scope.open()
        scope.step(0)
        if rank == 1:
            (folder / "second came back").touch()
        scope.close()
    values = scope.store.table()["value"].to_pylist() if rank == 0 else []
    return {"summary": scope.summary, "missing": sum(value != value for value in values), "values": len(values)}


def ddp_stopped(rank: int, folder: Path, corpus: Path) -> dict[str, Any]:
    model = parallel()
    gate = "leading_variance[embed] > 0 for 2"
    return train(rank, model, open_scope(model, folder, corpus, stop_if=gate, run="stopped"), steps=20)


def ddp_refused(rank: int, folder: Path, corpus: Path) -> dict[str, Any]:
    """Only the first process reads the probe; every one has to stop."""
    model = parallel()
    try:
        return train(rank, model, open_scope(model, folder, corpus, run="refused", probe="nowhere"))
    except AnisoscopeError as error:
        return {"losses": [], "error": str(error)}


def fsdp(wrap: Callable[[nn.Module], nn.Module], watched: bool) -> Callable[[int, Path, Path], dict[str, Any]]:
    def task(rank: int, folder: Path, corpus: Path) -> dict[str, Any]:
        model = wrap(make_model())
        scope = open_scope(model, folder, corpus, run="sharded") if watched else None
        try:
            return train(rank, model, scope) | {"weights": []}
        except ModelError as error:
            return {"losses": [], "error": str(error), "summary": scope.summary if scope else None}

    return task


def shard_old(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def shard_new(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (PROCESSES,)))  # pyright: ignore[reportReturnType]


TASKS: dict[str, Callable[[int, Path, Path], dict[str, Any]]] = {
    "ddp_alone": ddp_alone,
    "ddp_watched": ddp_watched,
    "ddp_waiting": ddp_waiting,
    "ddp_stopped": ddp_stopped,
    "ddp_refused": ddp_refused,
    "old_alone": fsdp(shard_old, watched=False),
    "old_watched": fsdp(shard_old, watched=True),
    "new_alone": fsdp(shard_new, watched=False),
    "new_watched": fsdp(shard_new, watched=True),
}


def test_processes_train_the_same_and_the_first_measures(together: Together) -> None:
    alone, watched = together.seen("ddp_alone"), together.seen("ddp_watched")
    for one, other in zip(alone, watched, strict=True):
        assert one["losses"] == other["losses"]
        assert one["weights"] == other["weights"]
    assert [seen["summary"]["measured"] for seen in watched] == [4, 0]
    assert sorted(set(together.store("ddp_watched").table()["step"].to_pylist())) == [0, 2, 4, 6]


def test_the_other_process_does_not_wait_for_the_one_that_measures(together: Together) -> None:
    first, second = together.seen("ddp_waiting")
    assert (first["summary"]["measured"], second["summary"]["measured"]) == (1, 0)
    assert first["values"] > 0
    assert first["missing"] == 0


def test_a_gate_stops_every_process_at_the_same_step(together: Together) -> None:
    first, second = together.seen("ddp_stopped")
    assert len(first["losses"]) == len(second["losses"]) == 3


def test_what_the_first_process_cannot_measure_ends_every_process(together: Together) -> None:
    first, second = together.seen("ddp_refused")
    assert "no corpus, file or folder is called 'nowhere'" in first["error"]
    assert "the first process, which measures, raised the reason" in second["error"]


@pytest.mark.parametrize("kind", ["old", "new"])
def test_sharded_weights_are_refused_in_every_process(kind: str, together: Together) -> None:
    alone, watched = together.seen(f"{kind}_alone"), together.seen(f"{kind}_watched")
    assert all(seen["losses"] for seen in alone)
    for seen in watched:
        assert seen["losses"] == []
        assert "sharded" in seen["error"]
    assert "sharded" in watched[0]["summary"]["unavailable"]
    store = together.store(f"{kind}_watched")
    assert not store.keys()
    (failure,) = store.failures()
    assert "unavailable" in failure["message"]
