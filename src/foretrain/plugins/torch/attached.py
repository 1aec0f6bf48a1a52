"""Handle of a model whose communication is scheduled over real links; see `foretrain.plugins.torch.attached_model`."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn, optim

from foretrain.comm.bounded.ledger import Ledger
from foretrain.comm.collectives.executor import Collectives, series
from foretrain.comm.coordinator.heartbeat import Heartbeat
from foretrain.comm.coordinator.protocol import remade
from foretrain.comm.exchange import RuntimeContext, TunedExchange, established_servers, measured_servers
from foretrain.comm.options import AllReduce, AttachOptions, BoundedLoss, ParameterServer
from foretrain.comm.rendezvous import connect_collectives, connect_ranks
from foretrain.comm.run_trace import RunTrace
from foretrain.comm.runtime_plan import RuntimePlan, forecast, runtime_plan
from foretrain.engine import Decision
from foretrain.errors import ConfigError, Disagreement, ForetrainError, PeerLost
from foretrain.network import Cluster
from foretrain.planner.online import Tuner
from foretrain.plugins.torch.attached_model import AttachedModel
from foretrain.plugins.torch.builder import RuntimeParts, assemble, assemble_served
from foretrain.plugins.torch.gradient_buffer import GradientBuffer, wire_dtype
from foretrain.plugins.torch.process_groups import (
    Buffers,
    ControlGroup,
    Groups,
    agree_on_model,
    close_before_exit,
    forget_closed,
    refuse_blocking_waits,
    share_all,
)
from foretrain.plugins.torch.static_order import StaticOrder
from foretrain.schedule import POLICIES, CostModel, Spec, spec
from foretrain.trace import Timeline
from foretrain.units import Time
from foretrain.workload.step import Workload

if TYPE_CHECKING:
    from foretrain.comm.ps.client.connection import Links

logger = logging.getLogger("foretrain")

_GPU_MEMORY = 500e9
"""Bytes/s of a GPU's memory, a low estimate, for the cost of compression."""
_served: set[tuple[tuple[str, int], ...]] = set()
"""Addresses of the servers that already train a model of this process."""


class Attached(AttachedModel[RuntimeParts]):
    """Scheduled model. Use as a context manager, or call `close`; both apply everything in flight.

    Attributes:
        model: what is trained.
        rank: this process's in the group.
        ranks: N.
        workload: the observed step; None while it is being observed.
        cost: the measured network; None while it is not.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[optim.Optimizer],
        group: dist.ProcessGroup | None,
        options: AttachOptions,
    ) -> None:
        self._origin = time.perf_counter_ns()
        super().__init__(model, group, options, RunTrace(self._origin) if options.trace else None)
        self.workload: Workload | None = None
        self.cost: CostModel | None = None
        self._cluster: Cluster | None = None
        self._job, self._epoch = "", 0
        """The job's name on the servers, and the number of its declarations there."""
        self._links: Links | None = None
        self._collectives: Collectives | None = None
        """Of a backend that is not the process group's."""
        self._exit_deadline = math.inf
        """Monotonic time at which waiting for other ranks ends."""
        self._knobs_set: dict[str, float] = {}
        self._past_steps = 0
        self._past_log: tuple[Decision, ...] = ()
        self._past_timeline = Timeline()
        if options.servers in _served:
            remedy = "start other servers for it, or all-reduce"
            raise ConfigError("transport", "ps", "is taken: the job's servers serve one model", remedy)
        self._groups = Groups(group, options.stall_timeout, self._device)
        self._control = ControlGroup(self._groups.control, self._device, self._check_peers)
        self._heartbeat: Heartbeat | None = None
        if options.servers:
            _served.add(options.servers)
        self._claim_parameters()
        try:
            self._list_parameters()
            agree_on_model(self._control, model, options)
            refuse_blocking_waits(self._control)
            self._connect()
            share_all(model, self._groups.control, options.broadcast_buffers, self._check_peers)
            self._begin(optimizers, self._groups.gradients, Buffers(model, self._groups.control, self._check_peers))
        except (ConfigError, Disagreement):
            # All ranks raise it, so all come to the barrier of `Groups.release`.
            self._abandon()
            self._groups.release(self._options.peer_timeout)
            raise
        except BaseException as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise
        close_before_exit(self)

    # ── results ──

    @property
    def schedule(self) -> Spec | None:
        """Return the policy and knobs in force; None while the first steps are observed."""
        return (self._runtime and self._runtime.exchange.spec) or self._schedule

    @property
    def cluster(self) -> Cluster | None:
        """Return the measured network as a cluster for the simulator; None before, and for a single rank."""
        return self._cluster

    @property
    def forecast(self) -> Time | None:
        """Return the forecast time of an iteration, ps; None where `bound` is, and for asynchronous updates."""
        return None if self.asynchronous else forecast(self.workload, self._cluster, self.schedule)

    @property
    def steps(self) -> int:
        """Return the number of scheduled rounds begun."""
        return self._runtime.scheduled.rounds if self._runtime else self._past_steps

    @property
    def tuner(self) -> Tuner | None:
        """Return the online tuner of rank 0 with all it has tried; None on other ranks and without ``tune``."""
        exchange = self._runtime and self._runtime.exchange
        return exchange.tuner if isinstance(exchange, TunedExchange) else None

    @property
    def log(self) -> tuple[Decision, ...]:
        """Return rank 0's latest decisions; with a parameter server this rank's; empty under "replay"."""
        return tuple(self._runtime.exchange.log) if self._runtime else self._past_log

    @property
    def timeline(self) -> Timeline:
        """Return the timeline since `attach`, in ps from then; ConfigError without ``trace``."""
        if self._trace is None:
            raise ConfigError("trace", False, "kept no timeline", "attach(..., trace=True)")
        if self.workload is None or self._runtime is None:
            return self._past_timeline
        return self._trace.timeline(
            self.workload, self._runtime.executor.records, self._runtime.updates.applied, self.ledger
        )

    @property
    def begins(self) -> tuple[Time, ...]:
        """Return when the backward pass of each scheduled round began, ps since `attach`; empty without ``trace``."""
        return tuple(self._trace.begins) if self._trace else ()

    def set(self, knob: str, value: float | str) -> None:
        """Change a knob of the policy from the next step on, on all ranks at once. Only rank 0's call counts.

        With a parameter server each rank has an engine of its own, and its call counts for it alone.

        Args:
            knob: its name.
            value: as in a schedule's notation (``"2MB"``), or the number: bytes, ps, or what the knob counts.

        Raises ConfigError for an unknown knob or value, and where the order is replayed.
        """
        if self.schedule is None:
            raise ConfigError("knob", knob, "cannot change yet", "wait for the first scheduled step")
        if self._runtime is None or isinstance(self._runtime.exchange, StaticOrder):
            raise ConfigError("knob", knob, "is fixed where the order is replayed", "attach with the coordinator")
        name = self.schedule.name
        changed = spec(f"{name}({knob}={value})") if isinstance(value, str) else Spec(name, {knob: value})
        # Knobs set earlier may not be in force yet.
        self._knobs_set.update(changed.knobs)
        self._runtime.exchange.retune(Spec(changed.name, {**self.schedule.settings, **self._knobs_set}))

    def close(self) -> None:
        """Apply everything in flight and restore model and optimizers. Idempotent."""
        if self._closed:
            return
        independent = self._independent
        try:
            if self._failure is None:
                self.gather()
                # At exit nothing reads the optimizers' state.
                if math.isinf(self._exit_deadline):
                    self._collect_state()
        except BaseException as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise
        self._abandon()
        if independent:
            self._groups.prevent_destruction()  # it would wait for ranks that may be lost
        elif self._failure is None:
            self._release_groups()

    # ── optimizers on servers ──

    def before_state_dict(self, place: int) -> None:
        """Apply wanted updates, and fetch the optimizer's state if servers have it."""
        self.flush()
        if self._runtime is not None and self._runtime.remote is not None:
            self._runtime.scheduled.check_stepped()
            self._runtime.remote.collect([place])

    def after_state_dict(self, place: int) -> None:
        """Discard the fetched copy of the optimizer's state."""
        if self._runtime is not None and self._runtime.remote is not None:
            self._runtime.remote.forget(place)

    def before_load_state_dict(self) -> None:
        """Apply wanted updates; ConfigError if servers have the optimizers' state."""
        self.flush()
        if self._runtime is not None and self._runtime.remote is not None:
            remedy = "load it before training begins, or close() and attach again"
            raise ConfigError("optimizer", "load_state_dict()", "comes when servers have its state", remedy)

    def flush(self) -> None:
        """Apply every wanted update, and fetch what pulls of parameters have lost.

        ConfigError if the server may have gone on with gradients for which step() was not called.
        """
        super().flush()
        runtime = self._runtime
        if runtime is None or runtime.remote is None or self._closed or self._failure is not None:
            return
        if runtime.remote.lossy:
            runtime.scheduled.check_stepped()
            runtime.remote.recover()

    def _collect_state(self) -> None:
        """Fetch the optimizers' state from the servers, and parameters where they may be others than here."""
        if self._runtime is not None and (remote := self._runtime.remote) is not None:
            remote.collect(range(len(self._attachments)), adopt=self.asynchronous or remote.lossy)
            if remote.lossy:
                self._control.all_true(True)  # rank 0 ends the server when it goes on

    def _restart(self) -> None:
        if self.asynchronous:
            what = "updates each rank asynchronously, and all would have to restart together with other parameters"
            raise ConfigError("transport", self._options.transport, what, "unfreeze and add_param_group() before")
        self.gather()
        self._collect_state()
        if self._links is not None:
            self._links.returns = True
        super()._restart()

    def _release_groups(self) -> None:
        if self.ledger is not None:
            rows = self._groups.gathered(self.ledger.totals(), self._options.peer_timeout)
            self.ledger.gathered(rows)
            if self.rank == 0:
                logger.info("%s: %s", self.schedule, self.ledger.line())
            if rows is None:
                return  # no barrier would come to its end, either
        self._groups.release(self._options.peer_timeout, together=not self.asynchronous)

    # ── calls of `process_groups` ──

    def depends_on(self, group: dist.ProcessGroup | None) -> bool:
        """Return whether the model trains in ``group``; None is all groups."""
        return self._groups.depends_on(group)

    def close_at_exit(self, error: BaseException | None) -> None:
        """Close within the peer timeout; tell the other ranks if ``error`` or an unfinished step ends training."""
        error = self._failure or error
        reason = f"{type(error).__name__}: {error}" if error else None
        if self._runtime is not None and self._runtime.scheduled.partly_sent:
            reason = reason or "it exits in the middle of a step"
        if reason or self._runtime is None:
            self._abandon(reason)
            if self._failure is None and reason is None:
                self._release_groups()
            return
        self._exit_deadline = time.monotonic() + self._options.peer_timeout
        try:
            self.close()
        except ForetrainError as lost:
            logger.error("rank %d: its last update is lost: %s", self.rank, lost)

    # ── from observing to scheduling, and back ──

    def _activity(self) -> str:
        return self._runtime.executor.last() if self._runtime else "the first steps are being watched"

    def _connect(self) -> None:
        if self._heartbeat is not None:
            return
        lossy = isinstance(self._options.transport, BoundedLoss)
        links = connect_ranks(self._control, self._options.interface, lossy=lossy) if self.ranks > 1 else {}
        if links is not None:
            rounds = lambda: self._runtime.scheduled.rounds if self._runtime else 0  # noqa: E731
            self._heartbeat = Heartbeat(links, self._options.peer_timeout, self._fail, self._activity, rounds)
        elif self.rank == 0:
            logger.warning(
                "the coordinator cannot be reached by all ranks: a fixed order is replayed instead, and a rank that is "
                "lost shows only as a failed collective"
            )

    def _assemble(self) -> tuple[RuntimeParts, Sequence[torch.Tensor]]:
        context = RuntimeContext(self._control, self._options, self._origin, self._fail, self._raise_failure)
        parameters = [parameter for _, parameter in self._named]
        if self._options.server is not None:
            return self._assemble_served(context, parameters, self._options.server)
        links, transport = None, self._options.transport
        if self._options.on_host:
            known = (transport, self._options.interface, self._options.peer_timeout)
            self._collectives = connect_collectives(self._control, *known)
            self._control.timed = partial(series, self._control, self._collectives)
        plan = self._adopt(self._plan())
        if self._heartbeat is not None and not (isinstance(transport, AllReduce) and transport.order == "replay"):
            links, self._heartbeat = self._heartbeat.release(), None
            # All ranks must have stopped their heartbeats before anything else is sent on these links.
            self._control.all_true(True)
        gradients = self._flat_buffers(plan)
        # Biases and norms, of whatever size: there is no other sign of them that all models have.
        reliable = {task for task, parameter in enumerate(parameters) if parameter.ndim <= 1}
        self.ledger = Ledger.of(
            *(transport, gradients, plan.job, plan.schedule, self.ranks),
            reliable=reliable,
            rank=self.rank,
            past=self.ledger,
        )
        remote = None
        if self._options.updates == "servers":
            from foretrain.comm.bounded.collectives import BoundedCollectives
            from foretrain.plugins.torch.bounded.pulls import PulledOptimizer

            assert isinstance(self._collectives, BoundedCollectives)
            known = (parameters, self._attachments, self._observation.backwards())
            remote = PulledOptimizer(*known, self._collectives, plan.profile.order)
        known = (links, self._collectives, self.ledger, remote)
        parts = assemble(context, parameters, gradients, plan, self._groups.gradients, *known)
        return parts, gradients.views

    def _assemble_served(
        self, context: RuntimeContext, parameters: Sequence[nn.Parameter], server: ParameterServer
    ) -> tuple[RuntimeParts, Sequence[torch.Tensor]]:
        self._job = self._job or self._control.share(secrets.token_hex(8).encode()).decode()
        self._links = links = established_servers(self._control, self._options, self._job)
        try:

            def measure() -> tuple[CostModel, Cluster]:
                known = (self._options, self._job, self._epoch, self._check_peers)
                return measured_servers(links, self._control, *known)

            plan = self._adopt(self._plan(measure))
            self._epoch += 2
            # From here on the servers detect lost workers.
            if self._heartbeat is not None:
                self._control.all_true(True)
                self._heartbeat.close(None)
                self._heartbeat = None
        except BaseException:
            links.close()
            raise
        remote = None
        if self._options.updates == "servers":
            from foretrain.plugins.torch.ps.remote_optimizer import RemoteOptimizer

            remote = RemoteOptimizer(parameters, self._attachments, server.consistency, self._observation.backwards())
        gradients = self._flat_buffers(plan)
        parts = assemble_served(
            *(context, parameters, gradients, plan, links, self._job, self._epoch - 1), remote=remote
        )
        return parts, gradients.views

    def _plan(self, measure: Callable[[], tuple[CostModel, Cluster]] | None = None) -> RuntimePlan:
        dtype = wire_dtype(self._options.compression)
        sizes = {name: p.numel() * (dtype or p.dtype).itemsize for name, p in self._named}
        observed, model = self._observation.observed(), type(self.model).__name__
        memory = _GPU_MEMORY if self._device.type == "cuda" else None
        return runtime_plan(self._control, observed, sizes, model, self._device.type, self._options, measure, memory)

    def _flat_buffers(self, plan: RuntimePlan) -> GradientBuffer:
        dtype = wire_dtype(self._options.compression)
        parameters = [parameter for _, parameter in self._named]
        return GradientBuffer(parameters, plan.profile.order, dtype.itemsize if dtype else None)

    def _adopt(self, plan: RuntimePlan) -> RuntimePlan:
        self.workload, self.cost, self._cluster = plan.workload, plan.cost, plan.cluster
        self._schedule, self._bound = plan.schedule, plan.bound
        self._knobs_set.clear()
        self._barrier = POLICIES[plan.schedule.name].barrier
        return plan

    def _stop_scheduling(self, reason: str | None = None) -> None:
        if self._runtime is not None:
            self._past_steps, self._past_log, self._schedule = self.steps, self.log, self.schedule
            if self._trace is not None:
                self._past_timeline = self.timeline
        super()._stop_scheduling(reason)
        if self._collectives is not None:
            self._collectives.close()
            self._collectives = None

    # ── failures ──

    def _fail(self, error: BaseException) -> None:
        """Keep the first ``error``, which every later call raises, and abort collectives."""
        if self._failure is None and not self._closed:
            self._failure = error
            logger.error("rank %d: %s", self.rank, error)
            # On this thread: the training thread may be blocked on the device.
            self._groups.abort()
            if (collectives := self._collectives) is not None:  # the training thread may close them, too
                collectives.close()
        if self._runtime is not None:
            self._runtime.updates.wake()

    def _raise_failure(self) -> None:
        error = self._failure
        if error is None:
            if time.monotonic() > self._exit_deadline:
                waited = f"{self._options.peer_timeout:g} s after rank {self.rank} came to its end"
                raise PeerLost(f"the other ranks have not summed its last gradients {waited}")
            return
        waiting = self._runtime.updates.pending() if self._runtime else []
        about = f" (rank {self.rank} waits for task {waiting[0]!r})" if waiting else ""
        text = f"{error}{about}" if isinstance(error, ForetrainError) else f"communication failed: {error!r}{about}"
        kind = type(error) if isinstance(error, ForetrainError) else ForetrainError
        raise remade(kind, text) from error

    def _check_peers(self) -> None:
        self._raise_failure()
        if self._heartbeat is not None:
            self._heartbeat.miss()

    def _abandon(self, reason: str | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        if reason is not None and self.rank == 0 and self.ledger is not None:
            logger.info("%s, until it failed: %s", self.schedule, self.ledger.line())
        if self._failure is not None or reason is not None:
            self._groups.prevent_destruction()
        if self._heartbeat is not None:
            self._heartbeat.close(reason)
        self._stop_scheduling(reason)
        if self._failure is None and reason is not None:
            # After the other ranks got the reason: a broken communicator gives none.
            self._groups.abort()
        _served.discard(self._options.servers)
        self._release_model()
        forget_closed(self)
