"""Execution of a sweep through joblib: in processes here, or on a Dask or Ray cluster.

# Note [Batches]
A batch costs a message and a pickle, some milliseconds, so it should take about a second; how many scenarios that are
is measured as results arrive. Towards the end batches shrink, so that all workers end together. Each second what has
arrived becomes an entry of the journal, so a kill loses that second and the batches under way, and nothing else.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

from foretrain.errors import ConfigError, MissingExtra, unknown
from foretrain.experiments.evaluation import Evaluated, Scenario, evaluate
from foretrain.experiments.result_store import ResultStore, ScenarioResult
from foretrain.parent_death import end_with_parent

if TYPE_CHECKING:
    from joblib import Parallel

Backend: TypeAlias = Literal["processes", "dask", "ray"]
"""Place where scenarios are simulated: processes on this machine, or the workers of a cluster."""
_BATCH = 1.0
"""Seconds that a batch should take."""
_FIRST = 4
"""Scenarios of a batch before any has been measured."""
_FLUSH = 1.0
"""Seconds after which results become an entry."""
_WAVE = 4
"""Batches for each worker of a backend that returns all at once."""


def run(
    scenarios: Iterable[Scenario],
    journal: ResultStore[ScenarioResult],
    *,
    jobs: int | None = None,
    backend: Backend = "processes",
    address: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Simulate those of ``scenarios`` whose results are not in ``journal``, and add them there.

    Whatever ends it early, Ctrl-C included: results that have arrived are kept, and no process stays behind.

    Args:
        scenarios: each once.
        journal: entered.
        jobs: workers on this machine; as many as it has cores where None. A cluster with an address has its own.
        backend: what simulates.
        address: of a running cluster; where None, ``"dask"`` and ``"ray"`` start one on this machine.
        progress: told after each batch how many are done, and of how many.

    Returns:
        How many were simulated.

    Raises:
        ConfigError: an argument is wrong.
        MissingExtra: joblib, dask.distributed or ray is not installed.
    """
    todo = [one for one in scenarios if one.id not in journal.found]
    check_workers(jobs, backend, address)
    progress(0, len(todo))
    if not todo:
        return 0
    done, pending, written = 0, [], time.monotonic()
    with ExitStack() as stack:
        stack.callback(lambda: journal.add(pending))
        pool = stack.enter_context(workers(jobs, backend, address))
        queue = _Queue(todo, pool.count)
        for made in stack.enter_context(pool.results(evaluate, queue.batches())):
            queue.learn(made)
            pending.extend(made.results)
            done += len(made.results)
            if time.monotonic() - written >= _FLUSH:
                journal.add(pending)
                pending, written = [], time.monotonic()
            progress(done, len(todo))
    return done


def check_workers(jobs: int | None, backend: Backend, address: str | None) -> None:
    """Raise ConfigError for a number of workers, a backend or an address that cannot be."""
    if jobs is not None and not (isinstance(jobs, int) and jobs >= 1):
        raise ConfigError("jobs", jobs, "is no number of workers", "write 1 or more")
    if backend not in get_args(Backend):
        raise unknown("backend", backend, get_args(Backend))
    if address is not None and backend == "processes":
        raise ConfigError("address", address, "is of no cluster", "add --backend dask or --backend ray")


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers that run functions.

    Attributes:
        parallel: joblib's.
        count: how many there are.
    """

    parallel: Parallel
    count: int

    @contextmanager
    def results(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Generator[Any]]:
        """Yield a generator of ``work(item)`` as they are done, in any order; ``items`` are taken as workers are free.

        What is under way when the block ends is abandoned.
        """
        with _closed(_results(self, work, items)) as results:
            yield results


@contextmanager
def workers(jobs: int | None, backend: Backend, address: str | None) -> Iterator[Pool]:
    """Start workers, or connect to those of a cluster; end what was started. Arguments and errors as of `run`."""
    with _BACKENDS[backend](jobs, address) as (parallel, count):
        yield Pool(parallel, count)


@contextmanager
def _closed(results: Generator[Any]) -> Iterator[Generator[Any]]:
    """Close ``results`` at the end, so that joblib abandons what is under way; its warning about that is ignored."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\d+ tasks", UserWarning, r"joblib\.")
        with closing(results):
            yield results


class _Queue:
    """Queue of batches of scenarios; see Note [Batches]. Threads of joblib take them, one at a time."""

    def __init__(self, todo: Sequence[Scenario], workers: int) -> None:
        self._todo = todo
        self._workers = workers
        self._taken = 0
        self._seconds = 0.0
        self._measured = 0
        self._lock = threading.Lock()

    def learn(self, made: Evaluated) -> None:
        """Record the duration of a batch; older batches count less and less."""
        with self._lock:
            self._seconds = self._seconds / 2 + made.seconds
            self._measured = self._measured / 2 + len(made.results)

    def batches(self) -> Iterator[tuple[Scenario, ...]]:
        """Yield batches until no scenario is left."""
        while True:
            with self._lock:
                left = len(self._todo) - self._taken
                size = int(_BATCH * self._measured / self._seconds) if self._seconds else _FIRST
                size = max(1, min(size, left // (2 * self._workers)))
                batch = tuple(self._todo[self._taken : self._taken + size])
                self._taken += len(batch)
            if not batch:
                return
            yield batch


def _results(pool: Pool, work: Callable[[Any], Any], items: Iterable[Any]) -> Generator[Any]:
    """Yield the workers' results as they arrive: one by one, or wave by wave where a backend can do no more."""
    from joblib import delayed

    calls = (delayed(work)(item) for item in items)
    if pool.parallel.return_generator:
        with ExitStack() as stack:
            with _deaf():  # joblib starts its processes now, which ignore Ctrl-C only once they run
                made = stack.enter_context(closing(cast("Generator[Any]", pool.parallel(calls))))
            yield from made
        return
    while wave := list(islice(calls, _WAVE * pool.count)):
        yield from cast("list[Any]", pool.parallel(wave))


@contextmanager
def _processes(jobs: int | None, address: str | None) -> Iterator[tuple[Parallel, int]]:
    joblib = _joblib()
    count = jobs or joblib.cpu_count()
    hook = threading.excepthook

    def told(error: threading.ExceptHookArgs) -> None:
        # Joblib's thread may look for work that was cancelled as it was handed over: it ends, as it should.
        if not (error.exc_type is KeyError and error.thread and error.thread.name == "ExecutorManagerThread"):
            hook(error)

    with joblib.parallel_config(backend="loky", n_jobs=count, initializer=_as_worker, initargs=(os.getpid(),)):
        threading.excepthook = told
        try:
            yield joblib.Parallel(batch_size=1, return_as="generator_unordered"), count
        finally:
            if count > 1:
                # joblib keeps its processes for a next loop, for five minutes.
                from joblib.externals.loky import get_reusable_executor

                get_reusable_executor(reuse=cast("str", True)).shutdown(wait=True, kill_workers=True)
            threading.excepthook = hook


def _as_worker(parent: int) -> None:
    """End this worker when ``parent``, which started it, ends in any way; leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A handler of Python's runs after the current call, which may wait for the parent's next batch for minutes.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)  # it ended before this one had asked to be told


@contextmanager
def _deaf() -> Iterator[None]:
    """Keep Ctrl-C from processes and threads that start inside, for good; this thread is interrupted afterwards."""
    from joblib.externals.loky.backend import resource_tracker as joblib_tracker

    for tracker in (resource_tracker, joblib_tracker):
        tracker.ensure_running()  # which unblocks signals when it starts
    heard: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    # What is blocked here is delivered to another thread, and Python would still interrupt this one.
    handler = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number)) if main else None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if heard:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _dask(jobs: int | None, address: str | None) -> Iterator[tuple[Parallel, int]]:
    joblib = _joblib()
    try:
        from distributed import Client, LocalCluster
    except ModuleNotFoundError as error:
        raise MissingExtra("dask[distributed]", "dask", "--backend dask") from error
    with ExitStack() as stack:
        if address is None:
            count = jobs or joblib.cpu_count()
            with _deaf():
                # Without an address Dask takes port 8787, and fails where another cluster has it.
                local = LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address="127.0.0.1:0")
            stack.enter_context(local)
            client = stack.enter_context(Client(local))
        else:
            try:
                client = stack.enter_context(Client(address, timeout=10))
            except (OSError, ValueError) as error:
                remedy = "write the scheduler's, e.g. tcp://10.0.0.5:8786"
                raise ConfigError("address", address, f"is where no Dask scheduler answers ({error})", remedy) from None
        count = sum(cast("dict[str, int]", client.ncores()).values())
        if not count:
            raise ConfigError("address", address, "is a Dask cluster without workers", "start some with dask worker")
        with joblib.parallel_config(backend="dask", n_jobs=count):
            yield joblib.Parallel(batch_size=1, return_as="generator_unordered"), count


@contextmanager
def _ray(jobs: int | None, address: str | None) -> Iterator[tuple[Parallel, int]]:
    joblib = _joblib()
    try:
        import ray  # pyright: ignore[reportMissingImports]
        from ray.util.joblib import register_ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise MissingExtra("ray", "ray", "--backend ray") from error
    local: dict[str, Any] = {} if address else {"num_cpus": jobs or joblib.cpu_count(), "include_dashboard": False}
    try:
        ray.init(address=address, log_to_driver=False, **local)
    except ConnectionError as error:
        remedy = "write that of its head, e.g. ray://10.0.0.5:10001"
        raise ConfigError("address", address, f"is where no Ray cluster answers ({error})", remedy) from None
    try:
        register_ray()
        count = int(ray.cluster_resources()["CPU"])
        with joblib.parallel_config(backend="ray", n_jobs=count):
            yield joblib.Parallel(batch_size=1), count
    finally:
        ray.shutdown()


_BACKENDS = {"processes": _processes, "dask": _dask, "ray": _ray}


def _joblib() -> Any:
    try:
        import joblib
    except ModuleNotFoundError as error:
        raise MissingExtra("joblib", "sweep", "foretrain sweep") from error
    return joblib
