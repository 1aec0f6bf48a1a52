"""``foretrain simulate --schedule``: a simulated rank's DistributedDataParallel under a policy.

`foretrain.launch.ddp_patch` and `foretrain.launch.scheduled_ddp` decide which models can be scheduled, as they do for
real jobs; a model that stays with PyTorch's own DistributedDataParallel becomes a warning of the forecast.

When a gradient is sent, when an optimizer's step may be deferred and who must wait for what is decided by
`foretrain.plugins.torch`, as on real GPUs; the steps that it watches first are watched in virtual time. Instead of
telling a coordinator a rank writes ``READY`` into its log, and the executor runs the policy; and updates are launched
by step() at once, each behind the event that its gradients are back, where the real runtime has a thread that waits
for them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import cast

import msgspec
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from foretrain.comm.options import AttachOptions, Compression
from foretrain.launch import LaunchSettings
from foretrain.launch.ddp_patch import DdpPatch
from foretrain.launch.scheduled_ddp import AgreedPlan, ModelRecord, ScheduledDataParallel
from foretrain.live.device.settings import WATCHED
from foretrain.live.device.simulated_updates import SimulatedUpdates
from foretrain.live.event_log import ModelAnnouncement
from foretrain.plugins.torch import access_guards
from foretrain.plugins.torch.attached_model import AttachedModel
from foretrain.plugins.torch.gradient_buffer import GradientBuffer, wire_dtype
from foretrain.plugins.torch.gradient_dispatcher import GradientDispatcher
from foretrain.plugins.torch.process_groups import Buffers
from foretrain.plugins.torch.streams import HostStreams
from foretrain.schedule import POLICIES, Spec, spec
from foretrain.units import MILLISECOND, Time


class SimulatedParallel(ScheduledDataParallel):
    """A DistributedDataParallel whose gradients the executor's policy exchanges where that is possible."""

    def _attach(self, optimizers: tuple[Optimizer, ...]) -> None:
        takeover = cast("SimulatedTakeover", self.takeover)
        self._record.attached = SimulatedAttached(
            takeover.device,
            self.module,
            optimizers,
            self.process_group,
            spec(takeover.settings.schedule),
            self._role.compression,
            takeover.launch,
        )


class SimulatedTakeover(DdpPatch):
    """Context manager around the script, whose DistributedDataParallel a policy schedules.

    Args:
        device: the loaded extension.
        schedule: a policy with its knobs.
        launch: ps the host spends on launching a kernel.
    """

    parallel = SimulatedParallel

    def __init__(self, device: ModuleType, schedule: str, launch: Time) -> None:
        super().__init__(LaunchSettings(schedule=schedule))
        self.device, self.launch = device, launch

    def recorded(self, wrapper: ScheduledDataParallel) -> ModelRecord:
        """Return a record that sends its warnings to the executor."""
        return _Record(wrapper, self)

    def warn(self, text: str) -> None:
        """Tell the user, as a warning of the forecast."""
        self.device.note(self.device.WARNING, 0, 0, text.encode())

    def plan(self, wrapper: ScheduledDataParallel, reason: str | None) -> AgreedPlan:
        """Plan as for real jobs; one rank alone has nothing to exchange."""
        if wrapper.process_group.size() < 2:
            reason = reason or "one rank alone exchanges nothing"
        return super().plan(wrapper, reason)

    def _summary(self) -> list[str]:
        lines = super()._summary()
        if not any(record.steps for record in self._records):
            for line in lines:
                self.warn(f"--schedule: {line}")
        return []


class _Record(ModelRecord):
    def __init__(self, wrapper: ScheduledDataParallel, takeover: SimulatedTakeover) -> None:
        super().__init__(wrapper)
        self._takeover = takeover

    def end(self, error: BaseException | None = None) -> None:
        if self.attached is not None and self.attached.schedule is None:
            self._takeover.warn(
                f"--schedule: {self.name} was only watched: the policy begins after {WATCHED} steps, give it more"
            )
        super().end(error)

    def stock(self, reason: str) -> None:
        self.reason = reason
        attached, self.attached = self.attached, None
        if attached is not None:
            attached.close()
        self._takeover.warn(f"--schedule: {self.name} runs with PyTorch's own DistributedDataParallel: {reason}")


class LoggedExchange:
    """Exchange by records of the rank's log; see `foretrain.comm.coordinator.protocol.CoordinatedExchange`."""

    def __init__(
        self,
        device: ModuleType,
        number: int,
        updates: SimulatedUpdates,
        views: Sequence[torch.Tensor],
        wire: torch.dtype | None,
    ) -> None:
        self._device, self._number, self._updates = device, number, updates
        self._views, self._wire = views, wire

    def open(self, step: int, again: bool) -> None:
        """Begin a round, not before all gradients of the last are back."""
        self._updates.wait_all()
        self._device.begin(self._number)

    def ready(self, task: int, used: bool) -> None:
        """Announce that ``task`` may be sent; if it is sent as another type, after the conversion."""
        if self._wire is not None:
            self._views[task].to(self._wire)
        self._updates.promised(task, self._device.ready(self._number, task), used)

    def flush(self) -> None:
        """Do nothing: no gradient is held back."""

    def close(self, reason: str | None = None) -> None:
        """Do nothing: there are no links to close."""


@dataclass(frozen=True, slots=True)
class LoggedRuntime:
    """Parts of a scheduled model; as `foretrain.plugins.torch.builder.RuntimeParts`."""

    scheduled: GradientDispatcher
    exchange: LoggedExchange
    updates: SimulatedUpdates

    def close(self, reason: str | None = None) -> None:
        """Release parameters and gradients."""
        self.scheduled.close()
        self.updates.unblock()


class SimulatedAttached(AttachedModel[LoggedRuntime]):
    """Attached model of a simulated rank: without links, threads, measurements, or other ranks to agree with.

    Args:
        device: the loaded extension.
        model: what is trained.
        optimizers: its parameters' own.
        group: the ranks whose gradients are summed.
        schedule: the policy.
        compression: what gradients are sent as; None sends them as they are.
        launch: ps the host spends on launching a kernel.
    """

    _numbers = itertools.count(1)

    def __init__(
        self,
        device: ModuleType,
        model: nn.Module,
        optimizers: Sequence[optim.Optimizer],
        group: dist.ProcessGroup,
        schedule: Spec,
        compression: Compression | None,
        launch: Time,
    ) -> None:
        # The forecast measures the step and the executor sees lost ranks: options for both are not used.
        super().__init__(
            model,
            group,
            AttachOptions(schedule, compression, broadcast_buffers=False, warmup=WATCHED),
        )
        self._extension, self._launch, self._policy = device, launch, schedule
        self._lane = device.new_stream()
        self._began: torch.cuda.Event | None = None
        self._warned = False
        self._claim_parameters()
        self._list_parameters()
        self._begin(optimizers, group, Buffers(model, group, self._check_peers))

    def close(self) -> None:
        """Make the current stream wait for all gradients and updates; then PyTorch goes on alone."""
        if not self._closed:
            super().gather()
            self._abandon()

    # ── from the optimizers ──

    def defer(self, place: int, optimizer: optim.Optimizer, tasks: dict[int, int]) -> bool:
        """Launch a step's updates each behind its gradients; False where the step must be done as a whole."""
        if self._runtime is None or self._barrier:
            self.gather()
            return False
        access_guards.updating[threading.get_ident()] = self._runtime.updates.by_id
        try:
            for hook in tuple(_global_optimizer_pre_hooks.values()):
                hook(optimizer, (), {})
            deferred = self._runtime.scheduled.step(place, optimizer, tasks)
        finally:
            del access_guards.updating[threading.get_ident()]
        if not deferred:
            self._warn_of_barrier()
        else:
            for hook in tuple(_global_optimizer_post_hooks.values()):
                hook(optimizer, (), {})
        return deferred

    def _warn_of_barrier(self) -> None:
        """Warn, once, that the policy cannot defer updates into the next forward pass."""
        if not self._warned:
            self._warned = True
            text = (
                f"--schedule: {type(self.model).__name__}: optimizer.step() waits for all gradients, since the script "
                "looks at them before (GradScaler, clipping); nothing crosses into the next forward pass"
            )
            self._extension.note(self._extension.WARNING, 0, 0, text.encode())

    def gather(self) -> None:
        """Make the current stream wait for all gradients and updates."""
        super().gather()
        if self._runtime is None and not self._closed:
            self._began = torch.cuda.Event(enable_timing=True)
            self._began.record()

    def stepped(self, took: Time) -> None:
        """Ask the device how long the launched step takes, as the host only launches it."""
        if self._runtime is None and self._began is not None:
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
            ended.synchronize()
            took = round(self._began.elapsed_time(ended) * MILLISECOND)
        super().stepped(took)

    # ── from watching to scheduling ──

    def _connect(self) -> None:
        """Do nothing: there are no links."""

    def _check_peers(self) -> None:
        """Do nothing: the executor notices a lost rank."""

    def _raise_failure(self) -> None:
        """Do nothing: a failure ends the script at once."""

    def _assemble(self) -> tuple[LoggedRuntime, Sequence[torch.Tensor]]:
        device, parameters = self._extension, [parameter for _, parameter in self._named]
        # How busy this machine is has nothing to do with the simulated one.
        seen = msgspec.structs.replace(self._observation.observed(), crowding=0)
        wire = wire_dtype(self._options.compression)
        gradients = GradientBuffer(parameters, seen.order, wire.itemsize if wire else None)
        device.retag(gradients.flat, device.GRADIENT)
        self._schedule, self._barrier = self._policy, POLICIES[self._policy.name].barrier
        number = next(self._numbers)
        announcement = ModelAnnouncement(
            type(self.model).__name__,
            str(self._policy),
            tuple(dist.get_process_group_ranks(self._gradient_group)),
            tuple(name for name, _ in self._named),
            tuple(gradients.size(task) for task in range(len(parameters))),
            seen,
        )
        device.tasks(number, self._lane, announcement.encode())
        updates = SimulatedUpdates(device, parameters, gradients.views, seen.order, self._launch)
        exchange = LoggedExchange(device, number, updates, gradients.views, wire)
        scheduled = GradientDispatcher(
            parameters, gradients, seen.fires, seen.passes, exchange, updates, HostStreams(), self.ranks
        )
        return LoggedRuntime(scheduled, exchange, updates), gradients.views

    def _abandon(self, reason: str | None = None) -> None:
        if not self._closed:
            self._closed = True
            self._stop_scheduling(reason)
            self._release_model()
