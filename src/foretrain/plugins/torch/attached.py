"""Attached: a model whose communication is scheduled, on real links.

    hooks → Exchange → Carrier → Updates → the next forward

See `foretrain.plugins.torch.attached_model` for when.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn, optim

from foretrain.comm.coordinator.heartbeat import Heartbeat
from foretrain.comm.coordinator.protocol import remade
from foretrain.comm.observation import StepProfile
from foretrain.comm.options import AllReduce, AttachOptions, ParameterServer
from foretrain.comm.run_trace import RunTrace
from foretrain.comm.tuned_exchange import TunedExchange
from foretrain.engine import Decision
from foretrain.errors import ConfigError, Disagreement, ForetrainError, PeerLost
from foretrain.network import Cluster
from foretrain.planner.online import Tuner
from foretrain.plugins.torch import rendezvous
from foretrain.plugins.torch.attached_model import AttachedModel
from foretrain.plugins.torch.builder import RuntimeContext, RuntimeParts, assemble, assemble_served
from foretrain.plugins.torch.control_group import Buffers, ControlGroup, share_all
from foretrain.plugins.torch.process_groups import Groups, close_before_exit, forget_closed
from foretrain.plugins.torch.runtime_plan import RuntimePlan, runtime_plan
from foretrain.plugins.torch.static_order import StaticOrder
from foretrain.schedule import POLICIES, CostModel, Spec, spec
from foretrain.trace import Timeline
from foretrain.units import Time
from foretrain.workload.step import Workload

if TYPE_CHECKING:
    from foretrain.comm.ps.client.connection import Links

logger = logging.getLogger("foretrain")

_served: set[tuple[tuple[str, int], ...]] = set()
"""Servers that this process trains a model with."""


class Attached(AttachedModel[RuntimeParts]):
    """A scheduled model. Use as a context manager, or call `close`; both apply everything that is under way.

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
        """What servers call this job, and how many declarations they had from it."""
        self._links: Links | None = None
        self._until = math.inf
        """When waiting for the other ranks ends, of the monotonic clock."""
        self._knobs_set: dict[str, float] = {}
        self._past_steps = 0
        self._past_log: tuple[Decision, ...] = ()
        self._past_timeline = Timeline()
        if options.servers in _served:
            remedy = "start other servers for it, or all-reduce"
            raise ConfigError("transport", "ps", "is taken: the job's servers serve one model", remedy)
        self._groups = Groups(group, options.stall_timeout, self._device)
        self._sideband = ControlGroup(self._groups.side, self._device, self._together)
        self._pulse: Heartbeat | None = None
        if options.servers:
            _served.add(options.servers)
        self._take()
        try:
            self._list_parameters()
            rendezvous.agree_on_model(self._sideband, model, options)
            rendezvous.refuse_blocking_waits(self._sideband)
            self._connect()
            share_all(model, self._groups.side, options.broadcast_buffers, self._together)
            self._begin(optimizers, self._groups.gradients, Buffers(model, self._groups.side, self._together))
        except (ConfigError, Disagreement):
            # Raised by all ranks alike: nobody is waited for in vain.
            self._abandon()
            self._groups.part(self._options.peer_timeout)
            raise
        except BaseException as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise
        close_before_exit(self)

    # ── for people ──

    @property
    def schedule(self) -> Spec | None:
        """The policy and knobs in force; None while the first steps are observed."""
        return (self._machinery and self._machinery.exchange.spec) or self._schedule

    @property
    def cluster(self) -> Cluster | None:
        """The measured network as the simulator takes it; None before, and for a single rank."""
        return self._cluster

    @property
    def steps(self) -> int:
        """Scheduled rounds begun."""
        return self._machinery.scheduled.rounds if self._machinery else self._past_steps

    @property
    def tuner(self) -> Tuner | None:
        """What searches for knobs, and has tried: of rank 0, with ``tune``; None elsewhere."""
        return (
            exchange.tuner
            if self._machinery and isinstance(exchange := self._machinery.exchange, TunedExchange)
            else None
        )

    @property
    def log(self) -> tuple[Decision, ...]:
        """The latest decisions: rank 0's, or with a parameter server this rank's own; under "replay" nothing."""
        return tuple(self._machinery.exchange.log) if self._machinery else self._past_log

    @property
    def timeline(self) -> Timeline:
        """What happened since `attach`, in ps from then; ConfigError unless it was asked for."""
        if self._trace is None:
            raise ConfigError("trace", False, "kept no timeline", "attach(..., trace=True)")
        if self.workload is None or self._machinery is None:
            return self._past_timeline
        return self._trace.timeline(self.workload, self._machinery.carrier.records, self._machinery.updates.applied)

    @property
    def begins(self) -> tuple[Time, ...]:
        """When each scheduled round's backward pass began, ps since `attach`; only with ``trace``."""
        return tuple(self._trace.begins) if self._trace else ()

    def set(self, knob: str, value: float | str) -> None:
        """Changes a knob of the policy from the next step on, on all ranks at once. Rank 0's call counts.

        With a parameter server each rank has an engine of its own, and its call counts for it alone.

        Args:
            knob: its name.
            value: as in a schedule's notation (``"2MB"``), or the number: bytes, ps, or what the knob counts.

        Raises ConfigError for an unknown knob or value, and where the order is replayed.
        """
        if self.schedule is None:
            raise ConfigError("knob", knob, "cannot change yet", "wait for the first scheduled step")
        if self._machinery is None or isinstance(self._machinery.exchange, StaticOrder):
            raise ConfigError("knob", knob, "is fixed where the order is replayed", "attach with the coordinator")
        name = self.schedule.name
        changed = spec(f"{name}({knob}={value})") if isinstance(value, str) else Spec(name, {knob: value})
        # What was set a moment ago is not in force yet.
        self._knobs_set.update(changed.knobs)
        self._machinery.exchange.retune(Spec(changed.name, {**self.schedule.settings, **self._knobs_set}))

    def close(self) -> None:
        """Applies everything under way and gives model and optimizers back as they were. Idempotent."""
        if self._closed:
            return
        alone = self._by_itself
        try:
            if self._failure is None:
                self.gather()
                # At exit nobody looks any more.
                if math.isinf(self._until):
                    self._take_back()
        except BaseException as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise
        self._abandon()
        if alone:
            self._groups.keep_for_ever()  # others may be lost, and would be waited for
        elif self._failure is None:
            self._part()

    # ── where servers update ──

    def saves(self, place: int) -> None:
        """An optimizer's state is to be read, and the servers may have it."""
        self.flush()
        if self._machinery is not None and self._machinery.remote is not None:
            self._machinery.scheduled.settled()
            self._machinery.remote.collect([place])

    def saved(self, place: int) -> None:
        """It was read, and will be another when it is read again."""
        if self._machinery is not None and self._machinery.remote is not None:
            self._machinery.remote.forget(place)

    def loads(self, place: int) -> None:
        """It is to be replaced: not where the servers have it."""
        self.flush()
        if self._machinery is not None and self._machinery.remote is not None:
            remedy = "load it before training begins, or close() and attach again"
            raise ConfigError("optimizer", "load_state_dict()", "comes when servers have its state", remedy)

    def _take_back(self) -> None:
        """What servers have comes back: optimizers' state and, where ranks are apart, the parameters as they are."""
        if self._machinery is not None and self._machinery.remote is not None:
            self._machinery.remote.collect(range(len(self._attachments)), adopt=self.apart)

    def _restart(self) -> None:
        if self.apart:
            what = "lets each rank go its own way, and all would have to begin again with other parameters"
            raise ConfigError("transport", self._options.transport, what, "unfreeze and add_param_group() before")
        self.gather()
        self._take_back()
        if self._links is not None:
            self._links.returns = True
        super()._restart()

    def _part(self) -> None:
        self._groups.part(self._options.peer_timeout, together=not self.apart)

    # ── the ends of others, see `process_groups` ──

    def within(self, group: dist.ProcessGroup | None) -> bool:
        """Return whether the model trains in ``group``; None is all of them."""
        return self._groups.within(group)

    def leave(self, error: BaseException | None) -> None:
        """At exit: like `close`, but for at most ``timeout``; the others are told where it is no end of training."""
        error = self._failure or error
        reason = f"{type(error).__name__}: {error}" if error else None
        if self._machinery is not None and self._machinery.scheduled.partly_sent:
            reason = reason or "it exits in the middle of a step"
        if reason or self._machinery is None:
            self._abandon(reason)
            if self._failure is None and reason is None:
                self._part()
            return
        self._until = time.monotonic() + self._options.peer_timeout
        try:
            self.close()
        except ForetrainError as lost:
            logger.error("rank %d: its last update is lost: %s", self.rank, lost)

    # ── from watching to scheduling, and back ──

    def _doing(self) -> str:
        return self._machinery.carrier.last() if self._machinery else "the first steps are being watched"

    def _begun(self) -> int:
        machinery = self._machinery
        return machinery.scheduled.rounds if machinery else 0

    def _connect(self) -> None:
        if self._pulse is not None:
            return
        links = rendezvous.connect_ranks(self._sideband, self._options.interface) if self.ranks > 1 else {}
        if links is not None:
            self._pulse = Heartbeat(links, self._options.peer_timeout, self._fail, self._doing, self._begun)
        elif self.rank == 0:
            logger.warning(
                "the coordinator cannot be reached by all ranks: a fixed order is replayed instead, and a rank that is "
                "lost shows only as a failed collective"
            )

    def _assemble(self) -> tuple[RuntimeParts, Sequence[torch.Tensor]]:
        around = RuntimeContext(
            self._groups.gradients,
            self._sideband,
            self._device,
            self._options,
            self._origin,
            self._fail,
            self._raise_failure,
        )
        parameters = [parameter for _, parameter in self._named]
        if self._options.server is not None:
            return self._assemble_served(around, parameters, self._options.server)
        found = self._adopt(runtime_plan(*self._observed()))
        links, transport = None, self._options.transport
        if self._pulse is not None and isinstance(transport, AllReduce) and transport.order == "coordinator":
            links, self._pulse = self._pulse.release(), None
            # Nobody may speak on a link on which a pulse still listens.
            self._sideband.all_true(True)
        return assemble(around, parameters, found, links), found.gradients.views

    def _assemble_served(
        self, around: RuntimeContext, parameters: Sequence[nn.Parameter], server: ParameterServer
    ) -> tuple[RuntimeParts, Sequence[torch.Tensor]]:
        from foretrain.comm.ps.client.connection import Links
        from foretrain.comm.ps.client.probing import PushProbe, beside, served_cluster

        options = self._options
        secret = rendezvous.secret_for_servers(self._sideband)
        self._job = self._job or self._sideband.share(secrets.token_hex(8).encode()).decode()
        self._links = links = Links(options.servers, secret, self._job, self.rank)
        try:
            links.establish(options.peer_timeout)

            def measure() -> tuple[CostModel, Cluster]:
                probe = PushProbe(links, self.ranks, self._job, self._epoch, options.peer_timeout)
                measured = probe.cost()

                def hear() -> None:
                    self._together()
                    probe.hear()

                # Nobody goes on before all have measured: a server that is started anew asks everybody again.
                ControlGroup(self._groups.side, self._device, hear).all_true(True)
                shared = beside(options.servers, self.ranks)
                return measured, served_cluster(measured, self.ranks, len(options.servers), beside=shared)

            found = self._adopt(runtime_plan(*self._observed(), measure))
            self._epoch += 2
            # Who is lost from here on the servers notice.
            if self._pulse is not None:
                self._sideband.all_true(True)
                self._pulse.close(None)
                self._pulse = None
        except BaseException:
            links.close()
            raise
        remote = None
        if options.updates == "servers":
            from foretrain.plugins.torch.ps.remote_optimizer import RemoteOptimizer

            remote = RemoteOptimizer(parameters, self._attachments, server.consistency, self._observation.backwards())
        made = assemble_served(around, parameters, found, links, self._job, self._epoch - 1, remote)
        return made, found.gradients.views

    def _observed(self) -> tuple[ControlGroup, StepProfile, list[tuple[str, nn.Parameter]], str, AttachOptions]:
        return self._sideband, self._observation.observed(), self._named, type(self.model).__name__, self._options

    def _adopt(self, found: RuntimePlan) -> RuntimePlan:
        self.workload, self.cost, self._cluster = found.workload, found.cost, found.cluster
        self._schedule, self._bound = found.schedule, found.bound
        self._knobs_set.clear()
        self._barrier = POLICIES[found.schedule.name].barrier
        return found

    def _stop_scheduling(self, reason: str | None = None) -> None:
        if self._machinery is not None:
            self._past_steps, self._past_log, self._schedule = self.steps, self.log, self.schedule
            if self._trace is not None:
                self._past_timeline = self.timeline
        super()._stop_scheduling(reason)

    # ── ends ──

    def _fail(self, error: BaseException) -> None:
        """The first failure is the one that is told, on every later call."""
        if self._failure is None and not self._closed:
            self._failure = error
            logger.error("rank %d: %s", self.rank, error)
            # At once, and not when the training thread comes by: it may be waiting for the device.
            self._groups.abort()
        if self._machinery is not None:
            self._machinery.updates.wake()

    def _raise_failure(self) -> None:
        error = self._failure
        if error is None:
            if time.monotonic() > self._until:
                waited = f"{self._options.peer_timeout:g} s after rank {self.rank} came to its end"
                raise PeerLost(f"the other ranks have not summed its last gradients {waited}")
            return
        waiting = self._machinery.updates.pending() if self._machinery else []
        about = f" (rank {self.rank} waits for task {waiting[0]!r})" if waiting else ""
        text = f"{error}{about}" if isinstance(error, ForetrainError) else f"communication failed: {error!r}{about}"
        kind = type(error) if isinstance(error, ForetrainError) else ForetrainError
        raise remade(kind, text) from error

    def _together(self) -> None:
        """For whoever waits for all ranks: raises what keeps them from coming."""
        self._raise_failure()
        if self._pulse is not None:
            self._pulse.miss()

    def _abandon(self, reason: str | None = None) -> None:
        """Ends threads and connections, and lets go of model and optimizers, without waiting for anything."""
        if self._closed:
            return
        self._closed = True
        if self._failure is not None or reason is not None:
            self._groups.keep_for_ever()
        if self._pulse is not None:
            self._pulse.close(reason)
        self._stop_scheduling(reason)
        if self._failure is None and reason is not None:
            # After the others have been told: a broken communicator says less.
            self._groups.abort()
        _served.discard(self._options.servers)
        self._let_go()
        forget_closed(self)
