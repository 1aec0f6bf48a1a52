"""A model whose gradients a policy exchanges, on a simulated rank: the runtime's own code on simulated links.

What decides when a gradient is sent, when an optimizer's step may be deferred and who must wait for what is
`foretrain.runtime`, as on real GPUs; the steps that it watches first are watched in virtual time. Only its far ends are
others. Instead of telling a leader it writes ``READY`` into the rank's log, and the conductor runs the policy; and
updates are launched by step() at once, each behind the event that its gradients are back, where the real runtime has a
thread that waits for them.

# Note [Order of updates]
They stand on one stream in the order of first use, so that one that has come waits for those before it. Whoever needs
it waits for these anyhow, for a forward pass uses parameters in that order. Their launches cost the host no time, as
they are another thread's in the real runtime.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from foretrain.fakecuda.announcement import Announcement
from foretrain.launch import Compression
from foretrain.runtime import guards, setup
from foretrain.runtime.attached import Attached, _taken
from foretrain.runtime.buffers import Buffers
from foretrain.runtime.compression import wire_dtype
from foretrain.runtime.gradients import Gradients
from foretrain.runtime.hooks import remove_all
from foretrain.runtime.optimizers import Attachment
from foretrain.runtime.options import Options
from foretrain.runtime.scheduled import Scheduled
from foretrain.runtime.streams import HostStreams
from foretrain.runtime.updates import Update
from foretrain.schedule import POLICIES, Spec
from foretrain.timeline import Timeline
from foretrain.units import MILLISECOND, Time

_SMALL = 64 << 10
"""Bytes below which a parameter is updated with the one before it: a norm or a bias."""
WATCHED = 2
"""Steps to watch. The first pays for allocations; in virtual time one more is like any other."""


class Mark:
    """An event of the rank's log, forgotten when nobody can ask for it any more."""

    __slots__ = ("_forget", "number")

    def __init__(self, number: int, forget: Callable[[int], None]) -> None:
        self.number, self._forget = number, forget

    def __del__(self) -> None:
        self._forget(self.number)


class Updates:
    """Updates on a stream of their own, each behind the sums it needs; see Note [Order of updates].

    Args:
        device: the loaded extension.
        parameters: indexed by task.
        views: the gradients, indexed by task.
        order: task indices by first use.
        launch: ps the host spends on launching a kernel.
    """

    def __init__(
        self,
        device: ModuleType,
        parameters: Sequence[nn.Parameter],
        views: Sequence[torch.Tensor],
        order: Sequence[int],
        launch: Time,
    ) -> None:
        self._device, self._parameters, self._views = device, parameters, views
        self._order, self._launch = order, launch
        self._task_of = {id(parameter): task for task, parameter in enumerate(parameters)}
        self._stream = torch.cuda.Stream()
        self._home = torch.cuda.current_stream()
        self._marks: list[Mark | None] = [None] * len(parameters)
        """Behind the last write to each task's sum or parameter."""
        self._used = [True] * len(parameters)
        self.by_id = {id(parameter): view for parameter, view in zip(parameters, views, strict=True)}

    def sent(self, task: int) -> None:
        """`promised` says it."""

    def promised(self, task: int, event: int, used: bool) -> None:
        """The sum of ``task`` is there when ``event`` happens; ``used`` if this rank has a part in it."""
        self._marks[task], self._used[task] = Mark(event, self._device.forget), used

    def was_used(self, task: int) -> bool:
        """Whether there is a gradient for ``task``; ranks are taken to use the same parameters."""
        return self._used[task]

    def want(self, update: Update) -> None:
        """Launches ``update``, task by task, behind their sums and all that was launched before step()."""
        device = self._device
        asked = Mark(device.record(), device.forget)
        self._home = torch.cuda.current_stream()
        device.set_launch(0)
        try:
            with torch.cuda.stream(self._stream):
                device.wait(asked.number)
                for batch in self._batches([task for task in self._order if task in update.group_of]):
                    self._apply(update, batch)
        finally:
            device.set_launch(self._launch)

    def wait(self, key: int) -> None:
        """The current stream may use the parameter with id ``key`` from here on."""
        task = self._task_of[key]
        self._acquire((task,))
        if torch.cuda.current_stream() == self._home:
            guards.blocked.pop(key, None)

    def wait_free(self, task: int) -> None:
        """The current stream may write the buffer of ``task`` from here on."""
        self._acquire((task,))

    def wait_all(self) -> None:
        """The current stream may use all sums and parameters from here on."""
        self._acquire(range(len(self._marks)))
        self.unblock()

    def wait_wanted(self) -> None:
        """The same."""
        if any(id(parameter) in guards.blocked for parameter in self._parameters):
            self.wait_all()

    def pending(self) -> list[str]:
        """Nobody waits here on the host."""
        return []

    def unblock(self) -> None:
        """Nobody need wait for a parameter any more."""
        for parameter in self._parameters:
            guards.blocked.pop(id(parameter), None)

    def _acquire(self, tasks: Iterable[int]) -> None:
        for mark in dict.fromkeys(self._marks[task] for task in tasks):
            if mark is not None:
                self._device.wait(mark.number)

    def _batches(self, tasks: Sequence[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        for task in tasks:
            if batch and self._views[task].nbytes >= _SMALL:
                yield batch
                batch = []
            batch.append(task)
        if batch:
            yield batch

    def _apply(self, update: Update, batch: list[int]) -> None:
        self._acquire(batch)
        used = [task for task in batch if self._used[task]]
        if used:
            _narrowed(update, [(task, self._parameters[task]) for task in used])
        mark = Mark(self._device.record(), self._device.forget)
        for task in batch:
            self._marks[task] = mark
            guards.blocked[id(self._parameters[task])] = self.wait


class Announcing:
    """An exchange by records of the rank's log; see `foretrain.runtime.exchange.Exchange`."""

    def __init__(
        self,
        device: ModuleType,
        number: int,
        updates: Updates,
        views: Sequence[torch.Tensor],
        wire: torch.dtype | None,
    ) -> None:
        self._device, self._number, self._updates = device, number, updates
        self._views, self._wire = views, wire

    def open(self, step: int, again: bool) -> None:
        """A round begins: not before all of the last is back."""
        self._updates.wait_all()
        self._device.begin(self._number)

    def ready(self, task: int, used: bool) -> None:
        """``task`` may be sent; where it is sent as another type, once that is made."""
        if self._wire is not None:
            self._views[task].to(self._wire)
        self._updates.promised(task, self._device.ready(self._number, task), used)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self, reason: str | None = None) -> None:
        """There is nothing to end."""


@dataclass(frozen=True, slots=True)
class Machinery:
    """The parts of a scheduled model; as `foretrain.runtime.assembly.Machinery`."""

    scheduled: Scheduled
    exchange: Announcing
    updates: Updates

    def close(self, reason: str | None = None) -> None:
        """Lets go of parameters and gradients."""
        self.scheduled.close()
        self.updates.unblock()


class Simulated(Attached):
    """`foretrain.runtime.attached.Attached` without other ranks to agree with, links, threads and measurements.

    Args:
        device: the loaded extension.
        model: what is trained.
        optimizers: its parameters' own.
        group: among whom gradients are summed.
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
        self._extension, self._launch, self._wanted, self._group = device, launch, schedule, group
        self._lane = device.new_stream()
        self._began: torch.cuda.Event | None = None
        self._told = False
        self.model = model
        self._options = Options(schedule, compression, "coordinator", False, WATCHED, 60.0, 60.0, 0, None, False)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.workload = self.cost = None
        self._schedule = self._bound = self._failure = self._trace = self._pulse = None
        self._barrier = self._closed = False
        self._until = math.inf
        self._syncs = self._syncs_now = True
        self._warmup = self._machinery = None
        self._past_steps, self._past_log, self._past_timeline = 0, (), Timeline()
        self._unseen, self._hooks, self._gradient_hooks, self._named = [], [], [], []
        self._attachments, self._task_of = [], {}
        self._device = setup.device_of([p for p in model.parameters() if p.requires_grad])
        self._own = {id(parameter) for parameter in model.parameters()}
        self._refuse_taken()
        self._groups: Any = SimpleNamespace(gradients=group)
        self._buffers = Buffers(model, group, lambda: None)
        _taken.update(self._own)
        guards.install()
        self._list_parameters()
        self._attachments += [Attachment(place, optimizer, self) for place, optimizer in enumerate(optimizers)]
        self._watch_model()
        self._observe()

    # ── from the optimizers ──

    def defer(self, place: int, optimizer: optim.Optimizer, tasks: dict[int, int]) -> bool:
        """Launches a step's updates each behind its gradients; False where the step must be done as a whole."""
        if self._machinery is None or self._barrier:
            self.gather()
            return False
        guards.updating[threading.get_ident()] = self._machinery.updates.by_id
        try:
            for hook in tuple(_global_optimizer_pre_hooks.values()):
                hook(optimizer, (), {})
            deferred = self._machinery.scheduled.step(place, optimizer, tasks)
        finally:
            del guards.updating[threading.get_ident()]
        if not deferred:
            self._tell_of_barrier()
        else:
            for hook in tuple(_global_optimizer_post_hooks.values()):
                hook(optimizer, (), {})
        return deferred

    def _tell_of_barrier(self) -> None:
        """Warns, once, that this policy cannot do here what it is for."""
        if not self._told:
            self._told = True
            text = (
                f"--schedule: {type(self.model).__name__}: optimizer.step() waits for all gradients, since the script "
                "looks at them before (GradScaler, clipping); nothing crosses into the next forward pass"
            )
            self._extension.note(self._extension.WARNING, 0, 0, text.encode())

    def gather(self) -> None:
        """Has the current stream wait for all gradients and updates."""
        super().gather()
        if self._machinery is None and not self._closed:
            self._began = torch.cuda.Event(enable_timing=True)
            self._began.record()

    def stepped(self, took: Time) -> None:
        """A whole step was launched; how long it takes is asked of the device, as the host only launches it."""
        if self._machinery is None and self._began is not None:
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
            ended.synchronize()
            took = round(self._began.elapsed_time(ended) * MILLISECOND)
        super().stepped(took)

    def share_buffers(self) -> None:
        """The first rank's buffers, on all ranks, now."""
        self._buffers.share()

    # ── from watching to scheduling ──

    def _connect(self) -> None:
        """There is nobody to connect with."""

    def _together(self) -> None:
        """Nobody is missed here: the conductor sees to it."""

    def _schedule_from_now(self) -> None:
        super().gather()
        self._stop_watching()
        device, parameters = self._extension, [parameter for _, parameter in self._named]
        self._unseen = [id(parameters[task]) for task in self._observation.unseen()]
        # How busy this machine is has nothing to do with the simulated one.
        seen = msgspec.structs.replace(self._observation.observed(), crowding=0)
        wire = wire_dtype(self._options.compression)
        gradients = Gradients(parameters, seen.order, wire.itemsize if wire else None)
        device.retag(gradients.flat, device.GRADIENT)
        self._schedule, self._barrier = self._wanted, POLICIES[self._wanted.name].barrier
        number = next(self._numbers)
        announcement = Announcement(
            type(self.model).__name__,
            str(self._wanted),
            tuple(dist.get_process_group_ranks(self._group)),
            tuple(name for name, _ in self._named),
            tuple(gradients.size(task) for task in range(len(parameters))),
            seen,
        )
        device.tasks(number, self._lane, announcement.encode())
        updates = Updates(device, parameters, gradients.views, seen.order, self._launch)
        exchange = Announcing(device, number, updates, gradients.views, wire)
        scheduled: Any = Scheduled(
            parameters,
            gradients,
            seen.fires,
            seen.passes,
            exchange,
            updates,  # pyright: ignore[reportArgumentType] what it asks of them is there
            HostStreams(),
            self.ranks,
        )
        self._machinery: Any = Machinery(scheduled, exchange, updates)
        assert self._warmup is not None
        self._warmup.hand_over(gradients.views)
        self._warmup = None

    # ── ends ──

    def _abandon(self, reason: str | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self._stop_scheduling(reason)
        for attachment in self._attachments:
            attachment.close()
        remove_all(self._hooks)
        self._stop_watching()
        for key in self._task_of:
            guards.held.pop(key, None)
        _taken.difference_update(self._own)
        guards.remove()

    def close(self) -> None:
        """Has the current stream wait for everything under way and gives model and optimizers back."""
        if not self._closed:
            super().gather()
            self._abandon()


def _narrowed(update: Update, members: Sequence[tuple[int, nn.Parameter]]) -> None:
    """One step of the optimizer on ``members`` alone, without the hooks of a whole step."""
    twin = object.__new__(type(update.optimizer))
    twin.__dict__.update(update.optimizer.__dict__)
    by_group: dict[int, list[nn.Parameter]] = {}
    for task, parameter in members:
        by_group.setdefault(update.group_of[task], []).append(parameter)
    twin.param_groups = [{**update.groups[place], "params": these} for place, these in sorted(by_group.items())]
    step: Any = type(update.optimizer).step
    getattr(step, "__wrapped__", step)(twin)
