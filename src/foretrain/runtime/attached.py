"""Attached: a model whose communication is scheduled, and the two phases of its life.

    watching      everything is reduced after backward(), and observed             `Warmup`, `Observation`
    scheduling    hooks → Exchange → Carrier → Updates → the next forward    `Machinery`

Hooks of the model and calls of its optimizers arrive here and go on to the phase in hand.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn, optim

from foretrain.engine import Decision
from foretrain.errors import ConfigError, Disagreement, ForetrainError, PeerLost
from foretrain.network import Cluster
from foretrain.runtime import ending, guards, setup
from foretrain.runtime.assembly import Machinery, Surroundings, assemble
from foretrain.runtime.buffers import Buffers, share_all
from foretrain.runtime.exchange import remade
from foretrain.runtime.follower import Follower
from foretrain.runtime.groups import Groups
from foretrain.runtime.hooks import (
    Handle,
    Hook,
    after_forward,
    before_forward,
    entrances,
    hide_from_compiler,
    remove_all,
)
from foretrain.runtime.leader import Leader
from foretrain.runtime.observation import Observation
from foretrain.runtime.optimizers import Attachment
from foretrain.runtime.options import Options
from foretrain.runtime.plan import cluster_of, plan
from foretrain.runtime.pulse import Pulse
from foretrain.runtime.replayer import Replayer
from foretrain.runtime.scheduled import Scheduled
from foretrain.runtime.sideband import Sideband
from foretrain.runtime.trace import Trace
from foretrain.runtime.warmup import Warmup
from foretrain.schedule import POLICIES, Bound, Cost, Spec, spec
from foretrain.timeline import Timeline
from foretrain.units import Time
from foretrain.workload.step import Workload
from foretrain.workload.stopwatch import stopwatch

logger = logging.getLogger("foretrain")

_taken: set[int] = set()
"""Ids of all parameters that are attached."""


class Attached:
    """A scheduled model. Use as a context manager, or call `close`; both apply everything that is under way.

    Attributes:
        model: what is trained.
        rank: this process's in the group.
        ranks: N.
        workload: the observed step; None while it is being observed.
        cost: the measured network; None while it is not.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[optim.Optimizer], group: dist.ProcessGroup | None, options: Options
    ) -> None:
        self.model, self._options = model, options
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.workload: Workload | None = None
        self.cost: Cost | None = None
        self._schedule: Spec | None = None
        self._barrier = False
        self._bound: Bound | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._until = math.inf
        """When waiting for the other ranks ends, of the monotonic clock."""
        self._syncs = self._syncs_now = True
        self._warmup: Warmup | None = None
        self._machinery: Machinery | None = None
        self._past_steps = 0
        self._past_log: tuple[Decision, ...] = ()
        self._past_timeline = Timeline()
        self._unseen: list[int] = []
        """Ids of parameters that no module is seen to use, though gradients come for them."""
        self._hooks: list[Handle] = []
        self._gradient_hooks: list[Handle] = []
        self._origin = time.perf_counter_ns()
        self._trace = Trace(self._origin) if options.trace else None
        self._device = setup.device_of([p for p in model.parameters() if p.requires_grad])
        self._own = {id(parameter) for parameter in model.parameters()}
        self._refuse_taken()
        self._groups = Groups(group, options.patience, self._device)
        self._sideband = Sideband(self._groups.side, self._device, self._together)
        self._buffers = Buffers(model, self._groups.side, self._together)
        self._pulse: Pulse | None = None
        self._named: list[tuple[str, nn.Parameter]] = []
        self._attachments: list[Attachment] = []
        self._task_of: dict[int, int] = {}
        _taken.update(self._own)
        guards.install()
        try:
            self._list_parameters()
            setup.agree_on_model(self._sideband, model, options)
            setup.refuse_blocking_waits(self._sideband)
            self._connect()
            share_all(model, self._groups.side, options.broadcast_buffers, self._together)
            self._attachments += [Attachment(place, optimizer, self) for place, optimizer in enumerate(optimizers)]
            self._watch_model()
            self._observe()
        except (ConfigError, Disagreement):
            # Raised by all ranks alike: nobody is waited for in vain.
            self._abandon()
            self._groups.part(self._options.timeout)
            raise
        except BaseException as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise
        ending.enter(self)

    # ── for people ──

    @property
    def schedule(self) -> Spec | None:
        """The policy and knobs in force; None while the first steps are observed."""
        exchange = self._machinery.exchange if self._machinery else None
        return exchange.spec if isinstance(exchange, Leader | Follower) else self._schedule

    @property
    def bound(self) -> Bound | None:
        """T* of the observed step on the measured network; None before, and for a single rank."""
        return self._bound

    @property
    def cluster(self) -> Cluster | None:
        """The measured network as the simulator takes it; None before, and for a single rank."""
        return cluster_of(self.cost, self.ranks) if self.cost and self.ranks > 1 else None

    @property
    def steps(self) -> int:
        """Scheduled rounds begun."""
        return self._machinery.scheduled.rounds if self._machinery else self._past_steps

    @property
    def log(self) -> tuple[Decision, ...]:
        """The latest decisions, on rank 0; elsewhere, and under "replay", nothing."""
        leader = self._leader
        return leader.log if leader else self._past_log

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

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients accumulate here and are not sent; use it for all but the last of several backward passes.

        As with DistributedDataParallel, forward and backward pass both belong inside, and all ranks enter alike.
        """
        if self._machinery is not None:
            self._machinery.scheduled.finish()
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def synchronize(self) -> None:
        """Waits until every gradient is summed and in ``.grad``, and every update asked for is applied."""
        self._raise_failure()
        self.gather()

    def share_buffers(self) -> None:
        """Rank 0's buffers, on all ranks, now: what all need for the same evaluation. Collective."""
        self._raise_failure()
        self._buffers.share()

    def set(self, knob: str, value: float | str) -> None:
        """Changes a knob of the policy from the next step on, on all ranks at once. Rank 0's call counts.

        Raises ConfigError for an unknown knob or value, and where the order is replayed.
        """
        if self.schedule is None:
            raise ConfigError("knob", knob, "cannot change yet", "wait for the first scheduled step")
        if self._machinery is None or isinstance(self._machinery.exchange, Replayer):
            raise ConfigError("knob", knob, "is fixed where the order is replayed", "attach with the coordinator")
        changed = spec(f"{self.schedule.name}({knob}={value})")
        if leader := self._leader:
            leader.retune(Spec(changed.name, {**self.schedule.settings, **changed.knobs}))

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Applies everything under way and gives model and optimizers back as they were. Idempotent."""
        if self._closed:
            return
        try:
            if self._failure is None:
                self.gather()
        except BaseException as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise
        self._abandon()
        if self._failure is None:
            self._groups.part(self._options.timeout)

    # ── the ends of others, see `ending` ──

    def within(self, group: dist.ProcessGroup | None) -> bool:
        """Whether the model trains in ``group``; None is all of them."""
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
                self._groups.part(self._options.timeout)
            return
        self._until = time.monotonic() + self._options.timeout
        try:
            self.close()
        except ForetrainError as lost:
            logger.error("rank %d: its last update is lost: %s", self.rank, lost)

    # ── from the optimizers ──

    def defer(self, place: int, optimizer: optim.Optimizer, tasks: dict[int, int]) -> bool:
        """Defers a step; False where it must be done now, all gradients being back."""
        self._raise_failure()
        if self._machinery is not None and not self._barrier:
            return self._machinery.scheduled.step(place, optimizer, tasks)
        self.gather()
        return False

    def stepped(self, took: Time) -> None:
        """A whole step was done in ``took`` ps."""
        if self._machinery is None:
            self._observation.updated(took)
            self._step_over = True
            return
        self._machinery.scheduled.stepped()
        if self._trace is not None:
            self._trace.update(took)

    def gather(self) -> None:
        """Brings gradients back and applies everything asked for."""
        self._raise_failure()
        if (phase := self._phase) is not None:
            phase.fetch()

    def flush(self) -> None:
        """Applies every update asked for; gradients that wait for step() stay under way."""
        if self._machinery is not None and not self._closed and self._failure is None:
            self._machinery.updates.wait_wanted()

    def regrouped(self) -> None:
        """A parameter group was added: the tasks may be others now."""
        self._restart()

    # ── the model's hooks ──

    def _list_parameters(self) -> None:
        everything = list(self.model.named_parameters())
        # What has no elements has nothing to send, and an order of bytes has no place for it.
        self._named = [(name, p) for name, p in everything if p.requires_grad and p.numel()]
        self._frozen = [parameter for _, parameter in everything if not parameter.requires_grad]

    def _refuse_taken(self) -> None:
        for name, parameter in self.model.named_parameters():
            if id(parameter) in _taken:
                raise ConfigError("model", name, "is attached already", "close() the other attachment first")

    def _watch_model(self) -> None:
        flush = Hook(self.flush)
        for module in self.model.modules():
            self._hooks.append(module.register_state_dict_pre_hook(flush))
            self._hooks.append(module.register_load_state_dict_pre_hook(flush))
        # The root's come first among its own, so that a forward pass has begun when the others see it.
        self._hooks.append(before_forward(self.model, self._begin_forward))
        names = {module: name for name, module in self.model.named_modules()}
        for module, parameters in entrances(self.model):
            keys, name = tuple(id(parameter) for parameter in parameters), names.get(module) or "(root)"
            self._hooks.append(before_forward(module, lambda keys=keys, name=name: self._enter(keys, name)))
        self._hooks.append(after_forward(self.model, self._end_forward))
        hide_from_compiler()

    def _observe(self) -> None:
        """Begins, or begins again, with steps that are watched."""
        parameters = [parameter for _, parameter in self._named]
        self._observation = Observation(len(parameters), stopwatch({self._device}))
        self._warmup = Warmup(parameters, self._groups.gradients, self._observation, self._together)
        self._step_over = False
        task_of = {id(parameter): task for task, parameter in enumerate(parameters)}
        for attachment in self._attachments:
            attachment.assign(task_of)
        guards.watching.update(dict.fromkeys(task_of, self._use))
        self._task_of = task_of
        for task, parameter in enumerate(parameters):
            hook = parameter.register_post_accumulate_grad_hook(lambda _, task=task: self._gradient(task))
            self._gradient_hooks.append(hook)

    def _enter(self, keys: Sequence[int], name: str) -> None:
        """A module that owns the parameters with these ids begins its forward pass."""
        # The model may be trained by its parts alone: then none but they say whether the backward pass synchronises.
        # What is computed once more for a backward pass (checkpointing) says nothing: it belongs to an earlier one.
        if self._syncs_now is not self._syncs and torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0:
            self._syncs_now = self._syncs
        asked = self._trace.now() if self._trace is not None else 0
        if guards.blocked or guards.watching:
            for key in keys:
                guards.touch(key)
        if self._trace is not None:
            self._trace.enter(name, asked)

    def _use(self, key: int) -> None:
        self._observation.use(self._task_of[key])

    def _begin_forward(self) -> None:
        if self._failure is not None:
            self._raise_failure()
        trains = torch.is_grad_enabled()
        if trains and self._machinery is None:
            self._step_ends()
            if any(parameter.requires_grad for parameter in self._frozen):
                self._restart()
            self._observation.begin_forward()
        elif trains and self._frozen and any(parameter.requires_grad for parameter in self._frozen):
            self._restart()
        for key in self._unseen:
            guards.touch(key)
        if trains:
            if self._options.broadcast_buffers:
                self._buffers.forward_begins(self._syncs)
            self._syncs_now = self._syncs
        if self._trace is not None and trains:
            self._trace.begin_forward()

    def _end_forward(self) -> None:
        if not torch.is_grad_enabled():
            return
        if self._machinery is None:
            self._observation.end_forward()
        else:
            # What the forward pass did not ask for must not be written any more while gradients are made from it.
            self._machinery.updates.wait_wanted()
        if self._trace is not None:
            self._trace.end_forward()

    def _gradient(self, task: int) -> None:
        if self._failure is not None:
            self._raise_failure()
        if self._trace is not None:
            self._trace.gradient(task)
        if self._machinery is None:
            self._step_ends()
        if (phase := self._phase) is not None:
            phase.gradient(task, self._syncs_now)

    # ── from watching to scheduling, and back ──

    def _doing(self) -> str:
        return self._machinery.carrier.last() if self._machinery else "the first steps are being watched"

    def _begun(self) -> int:
        machinery = self._machinery
        return machinery.scheduled.rounds if machinery else 0

    def _connect(self) -> None:
        """Who is lost is noticed from here on."""
        links = setup.connect_ranks(self._sideband, self._options.interface) if self.ranks > 1 else {}
        if links is not None:
            self._pulse = Pulse(links, self._options.timeout, self._fail, self._doing, self._begun)
        elif self.rank == 0:
            logger.warning(
                "the coordinator cannot be reached by all ranks: a fixed order is replayed instead, and a rank that is "
                "lost shows only as a failed collective"
            )

    @property
    def _phase(self) -> Scheduled | Warmup | None:
        return self._warmup if self._machinery is None else self._machinery.scheduled

    @property
    def _leader(self) -> Leader | None:
        exchange = self._machinery.exchange if self._machinery else None
        return exchange if isinstance(exchange, Leader) else None

    def _step_ends(self) -> None:
        """After the last optimizer of a watched step: the next forward pass, or gradient, tells."""
        if not self._step_over:
            return
        self._step_over = False
        self._observation.end_step()
        if self._observation.steps >= self._options.warmup:
            self._schedule_from_now()

    def _schedule_from_now(self) -> None:
        self.gather()
        self._stop_watching()
        self._unseen = [id(self._named[task][1]) for task in self._observation.unseen()]
        found = plan(
            self._sideband, self._observation.observed(), self._named, type(self.model).__name__, self._options
        )
        self.workload, self.cost, self._schedule, self._bound = found.workload, found.cost, found.schedule, found.bound
        self._barrier = POLICIES[found.schedule.name].barrier
        around = Surroundings(
            self._groups.gradients,
            self._sideband,
            self._device,
            self._options,
            self._origin,
            self._fail,
            self._raise_failure,
        )
        links = None
        if self._pulse is not None and self._options.agreement == "coordinator":
            links, self._pulse = self._pulse.release(), None
            # Nobody may speak on a link on which a pulse still listens.
            self._sideband.everywhere(True)
        self._machinery = assemble(around, [parameter for _, parameter in self._named], found, links)
        if self._warmup is not None:
            self._warmup.hand_over(found.gradients.views)
            self._warmup = None

    def _restart(self) -> None:
        """Other parameters take part from now on: watch again, then schedule again. Collective."""
        self.gather()
        self._stop_scheduling()
        self._stop_watching()
        self._list_parameters()
        if self._pulse is None:
            self._connect()
        self._observe()

    def _stop_scheduling(self, reason: str | None = None) -> None:
        remove_all(self._gradient_hooks)
        self._gradient_hooks.clear()
        if self._machinery is not None:
            self._past_steps, self._past_log, self._schedule = self.steps, self.log, self.schedule
            if self._trace is not None:
                self._past_timeline = self.timeline
            self._machinery.close(reason)
            self._machinery = None

    def _stop_watching(self) -> None:
        for key in self._task_of:
            guards.watching.pop(key, None)

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
                waited = f"{self._options.timeout:g} s after rank {self.rank} came to its end"
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
        for attachment in self._attachments:
            attachment.close()
        remove_all(self._hooks)
        self._stop_watching()
        for key in self._task_of:
            guards.held.pop(key, None)
        _taken.difference_update(self._own)
        guards.remove()
        ending.left(self)
