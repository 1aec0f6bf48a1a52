"""Session: the scheduler as a library for any framework, over plain buffers on the host.

    with ft.Session(schedule="bytescheduler", transport="ps") as session:
        tasks = session.declare([("conv1.weight", nbytes, "float32"), …])      # in the order of first use
        for batch in data:
            for task, layer in zip(tasks, model):
                task.wait()                     # the mean over all ranks is in the buffer: update, compute forward
            session.begin_step()
            for task, layer in reversed(…):
                task.ready(layer.gradient)      # as soon as the backward pass has computed it

In the words of ByteScheduler (SOSP'19, §3): a `CommTask` is a tensor of one step. ``notify_ready`` is `CommTask.ready`;
``partition`` is the policy's, ``start`` the executor's, and ``notify_finish`` returns credit to the policy, none of
which a caller sees. The dependency proxy is `CommTask.wait` before the layer's next forward pass: with it a step goes
on across the global barrier, and a call of it for every task after the backward pass is that barrier.

first steps     gradients are exchanged in the order in which they are ready, and times observed       `StepObserver`
one agreement   times of the slowest rank, measured network, knobs at their best                       `HostRuntime`
all others      tasks → exchange → executor → `CommTask.wait`
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from foretrain.comm.bounded.ledger import Ledger
from foretrain.comm.buffers import declared, elements
from foretrain.comm.control_plane import LinkControl
from foretrain.comm.coordinator.link import BODY_LIMIT
from foretrain.comm.coordinator.protocol import remade
from foretrain.comm.exchange import RuntimeContext
from foretrain.comm.host_runtime import HostRuntime, TasksInFlight
from foretrain.comm.observation import StepObserver
from foretrain.comm.options import (
    SCHEDULE,
    TRANSPORT,
    AttachOptions,
    Compression,
    ParameterServer,
    Timeouts,
    Transport,
    TransportKind,
    as_transport,
    check_watching,
    refuse_torch_only,
)
from foretrain.comm.ps.placement import Dtype
from foretrain.comm.rendezvous import agree_on_settings, hash_of, join, membership
from foretrain.comm.run_trace import RunTrace
from foretrain.comm.runtime_plan import forecast, outcome
from foretrain.engine import Decision
from foretrain.errors import ConfigError, ForetrainError, unknown
from foretrain.network import Cluster
from foretrain.planner import SavedPlan, requested_schedule
from foretrain.schedule import Bound, CostModel, Spec
from foretrain.trace import Timeline
from foretrain.units import SECOND, Time
from foretrain.workload.recorder import HostStopwatch
from foretrain.workload.step import Workload

if TYPE_CHECKING:
    from foretrain.planner import ScheduleRequest

logger = logging.getLogger("foretrain")

_DEFAULT_TIMEOUTS = Timeouts()
_TOTALS_WAIT = 5.0
"""Seconds for which rank 0 waits, when it closes, for what the others have lost."""
_KEPT, _FEWEST = 200, 5
"""Iterations whose times are kept, and how many a median needs."""


class CommTask:
    """Gradient of one tensor in the present step. Any thread may call it, one at a time.

    Attributes:
        name: of the tensor.
        count: elements.
        dtype: their type.
    """

    def __init__(self, session: Session, index: int, name: str, count: int, dtype: Dtype) -> None:
        self.name, self.count = name, count
        self.dtype: Dtype = dtype
        self._session, self._index = session, index
        self._values: NDArray[Any] | None = None

    def ready(self, buffer: Any, landed: Callable[[], None] | None = None) -> Self:
        """Hand the gradient in ``buffer`` over; its content is copied before this returns.

        Args:
            buffer: what `foretrain.comm.buffers.elements` reads.
            landed: called once, when `read` will not wait, or raises because the job has failed or ended; by a thread
                of the runtime, which it must not hold up.

        Raises:
            ConfigError: the buffer is not what was declared, or the task is ready already in this step.
            ForetrainError: the job has failed.
        """
        values = elements(buffer, self.name, self.count, self.dtype)
        self._session._ready(self._index, values, landed)
        self._values = values if values.flags.writeable else None
        return self

    def wait(self) -> NDArray[Any]:
        """Wait for the sum, or mean, of all ranks, and copy it to the buffer of `ready` if that can be written.

        Returns:
            It, flat and read-only, until the task is `ready` again; zeros before the first step.

        Raises:
            ForetrainError: the job has failed; the message says why.
        """
        found = self._session._wait(self._index)
        if self._values is not None:
            self._values[:] = found
            self._values = None
        return found

    def read(self) -> NDArray[Any]:
        """Return what `wait` does, but copy nothing, and do not say that the model uses it now."""
        return self._session._read(self._index)


class Session:
    """Scheduled exchange of one job's gradients. Use as a context manager, or call `close`.

    Args:
        schedule: as of `foretrain.plugins.torch.attach`; None is that of ``foretrain run``, or bytescheduler.
        transport: `AllReduce` by an own ring over TCP or by MPI, `BoundedLoss` over UDP, or `ParameterServer`, whose
            servers then sum; None is that of ``foretrain run``, or all-reduce.
        rank: of this process; by default as torchrun, mpirun, srun or FORETRAIN's launcher says.
        ranks: N; by default likewise.
        address: ``"host:port"`` of rank 0; by default FORETRAIN_ADDRESS, or MASTER_ADDR and the port after MASTER_PORT.
        timeouts: how long a rank may be silent, and how long there may be no progress.
        average: whether sums are divided by N.
        tune: whether open knobs are searched as the job runs.
        warmup: steps to observe before scheduling begins, at least 1.
        interface: where this rank listens, e.g. "eth0".
        trace: whether to keep a timeline.
        compression: "fp16" or "bf16": the type that gradients are sent as, with error feedback; None is their own, or
            that of a plan file.

    All ranks have the same FORETRAIN_SECRET.

    Raises:
        ConfigError: an argument is wrong, or rank, ranks or address are not known.
        LinkError: another rank cannot be reached.

    Attributes:
        rank, ranks: as above.
        workload: the observed step; None while it is being observed.
        cost: the measured network; None while it is not.
        cluster: it, for the simulator.
        bound: T* of the observed step on it.
        steps: begun so far.
        used: whether this process has made one.
    """

    used: ClassVar[bool] = False

    def __init__(
        self,
        schedule: str | os.PathLike[str] | ScheduleRequest | None = None,
        transport: Transport | TransportKind | None = None,
        *,
        rank: int | None = None,
        ranks: int | None = None,
        address: str | None = None,
        timeouts: Timeouts = _DEFAULT_TIMEOUTS,
        average: bool = True,
        tune: bool = False,
        warmup: int = 3,
        interface: str | None = None,
        trace: bool = False,
        compression: Compression | None = None,
    ) -> None:
        check_watching(warmup, timeouts, average=average, tune=tune, trace=trace)
        schedule = schedule or os.environ.get(SCHEDULE) or "bytescheduler"
        transport = as_transport(transport or os.environ.get(TRANSPORT) or "all_reduce")
        type(self).used = True
        refuse_torch_only(transport)
        servers = transport.endpoints() if isinstance(transport, ParameterServer) else ()
        wanted = requested_schedule(schedule)
        compressed = compression or (wanted.compression if isinstance(wanted, SavedPlan) else None)
        if compressed not in (None, *get_args(Compression)):
            raise unknown("compression", compressed, get_args(Compression))
        self._options = AttachOptions(
            *(wanted, compressed, transport, timeouts, servers, tune, False, warmup, interface, trace)
        )
        member = membership(rank, ranks, address)
        self.rank, self.ranks = member.rank, member.ranks
        self._share = 1.0 / self.ranks if average else 1.0
        self._origin = time.perf_counter_ns()
        self._trace = RunTrace(self._origin) if trace else None
        self._exchange_lock, self._use_lock, self._failing = threading.Lock(), threading.Lock(), threading.Lock()
        self._failure: BaseException | None = None
        self._closed = False
        self._settle: list[Callable[[], None]] = []
        self._tasks: list[CommTask] = []
        self._landed: dict[int, Callable[[], None]] = {}
        """Functions that `CommTask.ready` was asked to call, by task."""
        self._runtime: HostRuntime | None = None
        self._in_flight = TasksInFlight(0, self.check)
        self._towards = member.address
        self._begun: deque[float] = deque(maxlen=_KEPT + 1)
        """Times at which scheduled steps began."""
        self.workload: Workload | None = None
        self.cost: CostModel | None = None
        self.cluster: Cluster | None = None
        self.bound: Bound | None = None
        self.steps = 0
        self._links = join(member, self._options.peer_timeout)
        self._control = LinkControl(self.rank, self.ranks, self._links, self._options.stall_timeout, self.check)
        atexit.register(self.close)
        try:
            settings = msgspec.structs.asdict(self._options) | {"average": average}
            agree_on_settings(self._control, settings)
        except BaseException:
            self._abandon("its settings were refused")
            raise

    # ── for callers ──

    def declare(
        self, tensors: Sequence[tuple[str, int, Dtype]], *, ordered: bool = True, reliable: Collection[str] = ()
    ) -> tuple[CommTask, ...]:
        """Declare the gradients of the model, once, before the first step. Collective.

        Args:
            tensors: name, bytes and type of each.
            ordered: whether they are listed in the order of their first use; else that order is observed, from the
                calls of `CommTask.wait` in the first steps.
            reliable: names of tensors of which `BoundedLoss` loses nothing, whatever their size: biases and norms.

        Returns:
            Their tasks, in the same order.

        Raises:
            ConfigError: a tensor is declared twice, has another type than these, or no whole number of elements; or
                one that is to be reliable is not declared.
            Disagreement: the ranks' tensors differ.
        """
        if self._tasks:
            raise ConfigError("tensors", len(tensors), "are declared already", "declare all of them at once")
        tasks = [CommTask(self, k, *declared(*each)) for k, each in enumerate(tensors)]
        names = [task.name for task in tasks]
        if not names or len(set(names)) < len(names):
            twice = next((name for name in names if names.count(name) > 1), "")
            raise ConfigError("tensors", twice, "is declared twice" if twice else "are none", "name each tensor once")
        if missing := set(reliable).difference(names):
            raise ConfigError("reliable", min(missing), "is no declared tensor", "name tensors that are declared")
        kept = ["reliable " * (task.name in reliable) for task in tasks]
        shown = zip(tasks, kept, strict=True)
        self.must_agree("tensor", [f"{task.name} {task.count} {word}{task.dtype}" for task, word in shown])
        self._tasks, count = tasks, len(tasks)
        self._ordered = ordered
        self._in_flight = TasksInFlight(count, self.check)
        self._pending: set[int] = set()
        """Tasks of the present step that are not ready yet."""
        self._open = self._forward = False
        self._observer: StepObserver | None = StepObserver(count, HostStopwatch(1))
        self._observer.begin_forward()
        if self._trace is not None:
            self._trace.begin_forward()
        context = RuntimeContext(self._control, self._options, self._origin, self._fail, self.check)
        known: dict[str, tuple[int, Dtype]] = {task.name: (task.count, task.dtype) for task in tasks}
        chosen = {k for k, task in enumerate(tasks) if task.name in reliable}
        self._runtime = HostRuntime(context, self._control, self._towards, known, self._land, chosen)
        self._runtime.begin()
        return tuple(self._tasks)

    @property
    def ledger(self) -> Ledger | None:
        """Return what this rank's sums have lost, by tensor and rank; None before, and but under `BoundedLoss`."""
        return self._runtime.ledger if self._runtime is not None else None

    def begin_step(self) -> None:
        """Begin a step: the gradients that become ready from now on belong to it. All ranks begin equally many.

        A task that was not ready in the step before had no gradient on this rank.

        Raises:
            ForetrainError: the job has failed; the message says why.
        """
        self.check()
        if self._runtime is None:
            raise ConfigError("session", "begin_step()", "comes before there are tensors", "declare() them first")
        self.end_step()
        if self._observer is not None:
            self._end_observed_step()
            if self.steps == self._options.warmup:
                for index in range(len(self._tasks)):
                    self._in_flight.wait(index)
                profile, self._observer = self._observer.observed(), None
                plan = self._runtime.schedule(profile, ordered=self._ordered)
                self.workload, self.cost, self.cluster, self.bound = plan.workload, plan.cost, plan.cluster, plan.bound
        if self._observer is not None:
            self._observer.end_forward()
        if self._trace is not None:
            self._trace.end_forward()
        self._pending = set(range(len(self._tasks)))
        self._open, self._forward = True, False
        with self._exchange_lock:
            self._runtime.exchange.open(self._runtime.rounds, False)
        self._runtime.rounds += 1
        self.steps += 1
        if self._observer is None:
            self._begun.append(time.perf_counter())

    def flush(self) -> None:
        """Send what waits for other gradients to be sent with; `CommTask.wait` and `end_step` do so, too."""
        self._flush()

    def end_step(self) -> None:
        """Say that tasks that are not ready have no gradient in this step. `begin_step` and `close` do so, too."""
        if not self._open:
            return
        self._open = False
        for index in sorted(self._pending):
            self._in_flight.wait(index)
            assert self._runtime is not None
            self._runtime.gradients.views[index][:] = 0
            self._hand_over(index, False)
        self._flush()

    def wait_all(self) -> None:
        """Wait for all tasks: the global barrier."""
        for task in self._tasks:
            task.wait()

    def broadcast(self, data: bytes) -> bytes:
        """Return rank 0's ``data``, as initial weights, on all ranks; the lengths are equal. Collective.

        Raises:
            ForetrainError: the job has failed; the message says why.
        """
        return b"".join(self._control.share(data[at : at + BODY_LIMIT]) for at in range(0, len(data), BODY_LIMIT))

    def must_agree(self, what: str, described: Sequence[str]) -> None:
        """Raise Disagreement, on all ranks, if the texts ``described`` differ; ``what`` each of them is. Collective."""
        self._control.must_agree(what, described, [hash_of(text) for text in described])

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the means of ``values``, as metrics, over all ranks. Collective.

        Raises:
            ForetrainError: the job has failed; the message says why.
        """
        rows = self._control.gather(np.asarray(values, np.float64).view(np.int64).tolist())
        return np.asarray(rows, np.int64).view(np.float64).mean(0).tolist()

    def check(self) -> None:
        """Raise the error that has ended the job, or ConfigError if the session is closed; else do nothing."""
        if (error := self._failure) is not None:
            known = isinstance(error, ForetrainError)
            waits = self._in_flight.first_missing()
            about = f" (rank {self.rank} waits for {self._tasks[waits].name!r})" if waits is not None else ""
            text = f"{error}{about}" if known else f"communication failed: {error!r}{about}"
            raise remade(type(error) if isinstance(error, ForetrainError) else ForetrainError, text) from error
        if self._closed:
            raise ConfigError("session", "closed", "exchanges nothing any more", "make another")

    @property
    def schedule(self) -> Spec | None:
        """Return the policy and knobs in force; None before tensors are declared."""
        return self._runtime.exchange.spec if self._runtime else None

    @property
    def forecast(self) -> Time | None:
        """Return the forecast time of an iteration, ps; None where `bound` is."""
        return forecast(self.workload, self.cluster, self.schedule)

    @property
    def log(self) -> tuple[Decision, ...]:
        """Return rank 0's latest decisions; with parameter servers this rank's."""
        return tuple(self._runtime.exchange.log) if self._runtime else ()

    @property
    def timeline(self) -> Timeline:
        """Return the timeline since the session began, ps; ConfigError without ``trace``."""
        if self._trace is None:
            raise ConfigError("trace", False, "kept no timeline", "Session(..., trace=True)")
        if self._runtime is None or self.workload is None:
            return Timeline()
        return self._trace.timeline(self.workload, self._runtime.executor.records, (), self.ledger)

    def before_close(self, settle: Callable[[], None]) -> None:
        """Call ``settle`` before `close` waits for what is in flight: a framework may still compute gradients.

        It may raise why some of them were lost.
        """
        self._settle.append(settle)

    def close(self) -> None:
        """Wait for what is in flight, and end all threads and connections. Idempotent.

        Rank 0 logs what an iteration took, beside its forecast and T*, and under `BoundedLoss` what all ranks have
        lost, for whose counts it waits 5 s at most.
        """
        if self._closed:
            return
        try:
            for settle in self._settle:
                settle()
            if self._runtime is not None and self._failure is None:
                self.end_step()
                for index in range(len(self._tasks)):
                    self._in_flight.wait(index)
        except BaseException as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise
        if self.ledger is not None and self._failure is None:
            self.ledger.gathered(self._control.collect(self.ledger.totals(), _TOTALS_WAIT))
        if self.rank == 0 and self._failure is None and len(self._begun) > _FEWEST and self.bound is not None:
            took = round(median(after - before for before, after in pairwise(self._begun)) * SECOND)
            said = outcome(took, self.forecast, self.bound)
            lost = f", {self.ledger.line()}" if self.ledger is not None else ""
            logger.info("%s: %d steps, %s%s", self.schedule, self.steps, said, lost)
        self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon(f"{type(error).__name__}: {error}")

    # ── calls of tasks ──

    def _ready(self, index: int, values: NDArray[Any], landed: Callable[[], None] | None) -> None:
        self.check()
        task, runtime = self._tasks[index], self._runtime
        if index not in self._pending or not self._open or runtime is None:
            remedy = "call begin_step() before the first gradient of each step"
            raise ConfigError(task.name, "ready()", "was called twice in a step, or outside of one", remedy)
        self._pending.discard(index)
        self._in_flight.wait(index)
        runtime.write(index, values, self._share)
        if self._trace is not None:
            self._trace.gradient(index)
        if self._observer is not None:
            with self._exchange_lock:
                self._observer.gradient(index, self.steps)
                if not self._pending:
                    self._end_computation()
        if landed is not None:
            with self._failing:
                self.check()  # else a failure since would not find it
                self._landed[index] = landed
        self._hand_over(index, True)

    def _wait(self, index: int) -> NDArray[Any]:
        self.check()
        asked = self._trace.now() if self._trace is not None else 0
        if self._runtime is None:
            raise ConfigError(self._tasks[index].name, "wait()", "was called before declare()", "declare() it first")
        self._flush()
        with self._use_lock:
            if self._observer is not None and not self._forward:
                with self._exchange_lock:
                    self._end_computation()
                # While steps are observed nothing of the forward pass may wait: its times would be the network's.
                for each in range(len(self._tasks)):
                    if each not in self._pending:
                        self._in_flight.wait(each)
                self._end_observed_step()
        self._in_flight.wait(index)
        with self._use_lock:
            if self._observer is not None:
                self._observer.use(index)
            if self._trace is not None:
                self._trace.enter(self._tasks[index].name, asked)
        return self._runtime.read(index)

    def _read(self, index: int) -> NDArray[Any]:
        self.check()
        assert self._runtime is not None
        self._in_flight.wait(index)
        return self._runtime.read(index)

    def _end_observed_step(self) -> None:
        """End an observed step: its backward pass is over, and a forward pass begins."""
        if self._forward or not self.steps or self._observer is None:
            return
        with self._exchange_lock:
            self._end_computation()
        self._forward = True
        self._observer.end_step()
        self._observer.begin_forward()
        if self._trace is not None:
            self._trace.begin_forward()

    def _end_computation(self) -> None:
        """Note that an observed step computes no more until its next forward pass: it only waits for sums. With the
        exchange locked.
        """
        if self._observer is not None and self.steps and not self._forward:
            self._observer.reduced()

    def _hand_over(self, index: int, used: bool) -> None:
        assert self._runtime is not None
        with self._exchange_lock:
            self._in_flight.expect(index)
            self._runtime.exchange.ready(index, used)

    def _flush(self) -> None:
        assert self._runtime is not None
        with self._exchange_lock:
            self._runtime.exchange.flush()

    def _land(self, index: int, used: bool) -> None:
        """Record that the sum of a task has arrived. Called by the executor's thread."""
        landed = self._landed.pop(index, None)  # before anybody who waits for the sum can be ready again
        self._in_flight.note(index)
        if landed is not None:
            landed()

    # ── failures ──

    def _fail(self, error: BaseException) -> None:
        """Keep the first ``error``, which every later call raises, and end what is in flight."""
        with self._failing:
            if self._failure is not None or self._closed:
                return
            self._failure = error
        self._in_flight.wake()
        logger.error("rank %d: %s", self.rank, error)
        try:
            if self._runtime is not None:
                self._runtime.abort()
        finally:
            self._tell_all()

    def _abandon(self, reason: str | None = None) -> None:
        with self._failing:
            if self._closed:
                return
            self._closed = True
        if reason is not None and self.rank == 0 and self.ledger is not None:
            logger.info("%s, until it failed: %s", self.schedule, self.ledger.line())
        atexit.unregister(self.close)
        try:
            if self._runtime is not None:
                with contextlib.suppress(ForetrainError):
                    self._runtime.close(reason)
            for link in self._links.values():
                link.close()
        finally:
            self._tell_all()

    def _tell_all(self) -> None:
        """Call what waits for sums that will not come."""
        while self._landed:
            with contextlib.suppress(KeyError):
                _, landed = self._landed.popitem()
                landed()
