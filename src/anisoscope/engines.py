"""Where jobs run: in this process, in processes of this host, on a Ray cluster, as a Slurm array.

An engine takes jobs and yields outcomes as they come. It survives the death of whoever runs a job. Adding one: a
function here, and its line in `ENGINES`.
"""

import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, TypeVar

from anisoscope.errors import MissingPackageError
from anisoscope.fetch import Fetched, fetch
from anisoscope.jobs import Job, Orders, Outcome, run_job
from anisoscope.store import Store
from anisoscope.validation import check_setting

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What jobs may use."""

    workers: int | None = None
    """Jobs side by side; None: as many as there is room for."""
    gpus: float = 0.0
    cpus: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    """For the engine itself, such as a Slurm partition."""


Engine = Callable[[Sequence[Job], Orders, Resources], Iterator[Outcome]]


def run_local(jobs: Sequence[Job], orders: Orders, resources: Resources) -> Iterator[Outcome]:
    """One job after another in this process; the next checkpoint is fetched while this one is measured."""
    ahead = _FetchedAhead(jobs, orders)
    for place, job in enumerate(jobs):
        yield from run_job(job, orders, ahead.take(place))


def run_processes(jobs: Sequence[Job], orders: Orders, resources: Resources) -> Iterator[Outcome]:
    """Several processes on this host, one GPU each where jobs want one; a process that dies is replaced."""
    workers = min(resources.workers or _room_here(resources), len(jobs))
    ahead, places = _FetchedAhead(jobs, orders), itertools.count()
    outcomes: queue.Queue[list[Outcome] | BaseException | None] = queue.Queue()

    def serve(slot: int) -> None:
        try:
            with _Worker(slot, workers, resources) as worker:
                # next() on a count is one step of the interpreter: no two slots get the same job.
                while (place := next(places)) < len(jobs):
                    outcomes.put(worker.run(jobs[place], orders, ahead.take(place)))
        except BaseException as error:
            outcomes.put(error)
        finally:
            outcomes.put(None)

    for slot in range(workers):
        threading.Thread(target=serve, args=(slot,), daemon=True).start()
    finished = 0
    while finished < workers:
        some = outcomes.get()
        if isinstance(some, BaseException):
            raise some
        finished += some is None
        yield from some or ()


def run_ray(jobs: Sequence[Job], orders: Orders, resources: Resources) -> Iterator[Outcome]:
    """One Ray task per checkpoint: on the cluster that RAY_ADDRESS names, or on one that is started here.

    Ray runs a task again when its worker or node dies. Files are fetched by a task of their own, and measured where
    they were fetched to, or, should that node be gone, fetched again elsewhere.
    """
    ray = _need("ray", "ray", "the ray engine")
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ours = not ray.is_initialized()
    if ours:
        # Not by itself: without an address Ray joins whatever cluster it finds on this host.
        alone = {"address": "local", "include_dashboard": False, "num_cpus": os.cpu_count()}
        ray.init(log_to_driver=False, **({} if os.environ.get("RAY_ADDRESS") else alone))
    retries = {"max_retries": orders.max_retries}
    remote, wanted = ray.remote(run_job), {"num_cpus": resources.cpus, "num_gpus": resources.gpus, **retries}
    measure = remote.options(**wanted)
    bring = ray.remote(_fetch_on_node).options(num_cpus=0, scheduling_strategy="SPREAD", **retries)
    room = resources.workers or _room_on_cluster(ray, resources)
    waiting, running = list(jobs), {}
    try:
        while waiting or running:
            # One more than can run: its files are on their way while the others are measured.
            while waiting and len(running) < room + 1:
                job = waiting.pop(0)
                start = bring if job.checkpoint.commit is not None else measure
                running[start.remote(job, orders)] = (job, start is bring)
            done, _ = ray.wait(list(running), num_returns=1)
            job, fetched_only = running.pop(done[0])
            try:
                answer = ray.get(done[0])
            except ray.exceptions.RayError as error:
                reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                yield from (Outcome(spec=task.spec, error=reason) for task in job.tasks)
                continue
            if not fetched_only:
                yield from answer
                continue
            node, fetched = answer
            there = NodeAffinitySchedulingStrategy(node, soft=True)
            running[remote.options(**wanted, scheduling_strategy=there).remote(job, orders, fetched)] = (job, False)
    finally:
        if ours:
            ray.shutdown()


def run_slurm(jobs: Sequence[Job], orders: Orders, resources: Resources) -> Iterator[Outcome]:
    """A Slurm array by submitit: each of its tasks works off a share of the jobs as the local engine does.

    Shares that die are submitted again with what is left of them. Where there is no Slurm, submitit runs them here.
    """
    submitit = _need("submitit", "slurm", "the slurm engine")

    options = dict(resources.options)
    executor = submitit.AutoExecutor(folder=orders.store / "slurm" / "%j", cluster=options.pop("cluster", None))
    executor.update_parameters(
        name="anisoscope",
        cpus_per_task=resources.cpus,
        **({"gpus_per_node": int(resources.gpus)} if resources.gpus else {}),
        **({"slurm_array_parallelism": resources.workers} if resources.workers else {}),
        **options,
    )
    left, workers = list(jobs), resources.workers or 8
    for attempt in range(orders.max_retries + 1):
        shares = [left[start::workers] for start in range(min(workers, len(left)))]
        array = executor.map_array(_run_share, shares, [orders] * len(shares))
        left = []
        for share, task in zip(shares, array, strict=True):
            try:
                yield from task.result()
            except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError) as error:
                if attempt == orders.max_retries:
                    yield from _give_up(share, orders, str(error).strip().splitlines()[0])
                left += share
            except BaseException:
                for other in array:
                    other.cancel(check=False)
                raise
        if not left:
            return


ENGINES: dict[str, Engine] = {
    "local": run_local,
    "processes": run_processes,
    "ray": run_ray,
    "slurm": run_slurm,
}


def find_engine(name: str) -> Engine:
    """An engine by name."""
    check_setting("engine", name)
    return ENGINES[name]


class _FetchedAhead:
    """Fetches the next checkpoint while one is measured; never more than one ahead of what was taken."""

    def __init__(self, jobs: Sequence[Job], orders: Orders) -> None:
        self._jobs, self._orders = jobs, orders
        self._futures: list[Future[Fetched]] = []
        self._lock = threading.Lock()

    def take(self, place: int) -> Fetched | None:
        """The files of a job; None where fetching failed, so that the job tries itself and says why."""
        with self._lock:
            while len(self._futures) <= min(place + 1, len(self._jobs) - 1):
                job = self._jobs[len(self._futures)]
                self._futures.append(_in_background(lambda job=job: fetch(job.checkpoint, self._orders.fetching)))
        with contextlib.suppress(Exception):
            return self._futures[place].result()
        return None


def _in_background(call: Callable[[], T]) -> Future[T]:
    """Run on a thread that does not keep an interrupted program alive."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


class _Worker:
    """A process that runs jobs, and its successors when it dies."""

    def __init__(self, slot: int, workers: int, resources: Resources) -> None:
        self._settings = (slot, max(1, (os.cpu_count() or 1) // workers), resources.gpus)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def run(self, job: Job, orders: Orders, fetched: Fetched | None) -> list[Outcome]:
        """Run a job in the process, and again in a new one where the process dies."""
        import multiprocessing

        for _ in range(orders.max_retries + 1):
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(1, context, initializer=_start_worker, initargs=self._settings)
            try:
                return self._pool.submit(run_job, job, orders, fetched).result()
            except BrokenProcessPool:
                self._pool.shutdown(wait=False)
                self._pool = None
        return list(_give_up([job], orders, "the worker process died"))


def _start_worker(slot: int, threads: int, gpus: float) -> None:
    """In a new process: its GPU, its share of the cores, and an end when its parent ends."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    if gpus:
        visible = (
            os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if "CUDA_VISIBLE_DEVICES" in os.environ else None
        )
        first = int(slot * gpus)
        mine = [visible[number] if visible else str(number) for number in range(first, first + max(1, int(gpus)))]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    import torch

    torch.set_num_threads(threads)


def _give_up(jobs: Sequence[Job], orders: Orders, reason: str) -> Iterator[Outcome]:
    """Failures of what is not stored."""
    store = Store(orders.store)
    for task in (task for job in jobs for task in job.tasks):
        yield Outcome(spec=task.spec, error=None if task.spec.key in store else reason)


def _room_here(resources: Resources) -> int:
    if resources.gpus:
        import torch

        return max(1, int(torch.cuda.device_count() // resources.gpus))
    return max(1, (os.cpu_count() or 1) // resources.cpus)


def _room_on_cluster(ray: Any, resources: Resources) -> int:
    have = ray.cluster_resources()
    by_gpu = int(have.get("GPU", 0) // resources.gpus) if resources.gpus else None
    return max(1, by_gpu if by_gpu is not None else int(have.get("CPU", 1) // resources.cpus))


def _fetch_on_node(job: Job, orders: Orders) -> tuple[str, Fetched | None]:
    import ray

    try:
        fetched = fetch(job.checkpoint, orders.fetching)
    except Exception:
        # The job fetches again where it runs, and notes why that fails.
        fetched = None
    return ray.get_runtime_context().get_node_id(), fetched


def _run_share(jobs: Sequence[Job], orders: Orders) -> list[Outcome]:
    return list(run_local(jobs, orders, Resources()))


def _need(package: str, extra: str, purpose: str) -> Any:
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError as error:
        raise MissingPackageError(package, extra=extra, purpose=purpose) from error
