"""Model whose communication is scheduled, in two phases.

    observing     gradients are reduced after backward(), and steps are measured          `Warmup`, `StepObserver`
    scheduling    a schedule made from the measurements exchanges gradients               `ScheduledRuntime`

Hooks of the model and calls of its optimizers arrive here and go to the current phase. Subclasses exchange gradients:
`foretrain.plugins.torch.attached` over real links, `foretrain.live.device.simulated_ddp` in a simulation.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn, optim

from foretrain.comm.bounded.ledger import Ledger
from foretrain.comm.observation import StepObserver
from foretrain.comm.options import AttachOptions, BoundedLoss
from foretrain.comm.run_trace import RunTrace
from foretrain.errors import ConfigError
from foretrain.plugins.torch import access_guards
from foretrain.plugins.torch.bounded.backward_losses import BackwardLosses
from foretrain.plugins.torch.gradient_buffer import Warmup
from foretrain.plugins.torch.gradient_dispatcher import GradientDispatcher, UpdateSink
from foretrain.plugins.torch.hooks import Hook, after_forward, before_forward, hide_from_compiler, parameter_modules
from foretrain.plugins.torch.optimizers import OptimizerHooks
from foretrain.plugins.torch.process_groups import Buffers
from foretrain.schedule import Bound, Spec
from foretrain.units import Time
from foretrain.workload.recorder import stopwatch

_taken: set[int] = set()
"""Ids of all attached parameters."""


class ScheduledRuntime(Protocol):
    """Parts that exchange gradients and apply updates in the scheduling phase."""

    @property
    def scheduled(self) -> GradientDispatcher:
        """Return the dispatcher of the training thread."""
        ...

    @property
    def updates(self) -> UpdateSink:
        """Return the part that applies updates."""
        ...

    def close(self, reason: str | None = None) -> None:
        """Stop; a ``reason`` tells other ranks that work was given up."""
        ...


RuntimeT = TypeVar("RuntimeT", bound=ScheduledRuntime)


class AttachedModel(ABC, Generic[RuntimeT]):
    """Model that is observed, then scheduled. Use as a context manager, or call `close`.

    A subclass calls `_claim_parameters`, and `_begin` when the other ranks may begin, too.

    Args:
        model: what is trained.
        group: the ranks that train.
        options: attach's arguments.
        trace: keeps a timeline; None keeps none.

    Attributes:
        ledger: what this rank's sums have lost, by tensor and rank; None before, and but under `BoundedLoss`.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup | None, options: AttachOptions, trace: RunTrace | None = None
    ) -> None:
        self.model, self._options, self._trace = model, options, trace
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._schedule: Spec | None = None
        self._barrier = False
        self._bound: Bound | None = None
        self.ledger: Ledger | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._syncs = self._pass_syncs = True
        self._step_over = False
        self._warmup: Warmup | None = None
        self._runtime: RuntimeT | None = None
        self._losses: BackwardLosses | None = None
        """For the guard of an automatic tolerance."""
        self._unseen: list[int] = []
        """Ids of parameters with gradients that no module was seen to use."""
        self._hooks, self._gradient_hooks = ExitStack(), ExitStack()
        self._named: list[tuple[str, nn.Parameter]] = []
        self._frozen: list[nn.Parameter] = []
        self._attachments: list[OptimizerHooks] = []
        self._task_of: dict[int, int] = {}
        self._device = device_of([p for p in model.parameters() if p.requires_grad])
        self._own = {id(parameter) for parameter in model.parameters()}
        for name, parameter in model.named_parameters():
            if id(parameter) in _taken:
                raise ConfigError("model", name, "is attached already", "close() the other attachment first")

    # ── for scripts ──

    @property
    def schedule(self) -> Spec | None:
        """Return the policy and knobs in force; None while the first steps are observed."""
        return self._schedule

    @property
    def bound(self) -> Bound | None:
        """Return T* of the observed step on the measured network; None before, for one rank, and in a simulation."""
        return self._bound

    @property
    def forecast(self) -> Time | None:
        """Return the forecast time of an iteration, ps; None where `bound` is, and for asynchronous updates."""
        return None

    @property
    def asynchronous(self) -> bool:
        """Return whether ranks may be in different steps, so that nothing may wait for all of them."""
        return self._options.asynchronous

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside without sending them; use it for all but the last of several backward passes.

        As with DistributedDataParallel, forward and backward pass both belong inside, and all ranks enter alike.
        """
        if self._runtime is not None:
            self._runtime.scheduled.finish()
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def synchronize(self) -> None:
        """Wait until every gradient is summed and in ``.grad``, and every wanted update is applied."""
        self._raise_failure()
        self.gather()

    def share_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, as an evaluation on all of them needs it. Collective.

        Elastic jobs do nothing once steps are scheduled: each rank keeps its own buffers.
        """
        self._raise_failure()
        if not self._independent:
            self._buffers.share()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon(f"{type(error).__name__}: {error}")

    # ── calls of the optimizers' hooks ──

    def defer(self, place: int, optimizer: optim.Optimizer, tasks: dict[int, int]) -> bool:
        """Defer a step of the optimizer with index ``place``; if it must be done now, fetch gradients, return False."""
        self._raise_failure()
        if self._losses is not None:
            self._losses.step(self.ledger)
        if self._runtime is not None and self._options.updates == "servers":
            self._runtime.scheduled.step(place, optimizer, tasks)
            if self._barrier:
                self._runtime.updates.wait_wanted()
            return True
        if self._runtime is not None and not self._barrier:
            return self._runtime.scheduled.step(place, optimizer, tasks)
        self.gather()
        return False

    def stepped(self, took: Time) -> None:
        """Record that a whole step was done in ``took`` ps."""
        if self._runtime is None:
            self._observation.updated(took)
            self._step_over = True
            return
        self._runtime.scheduled.stepped()
        if self._trace is not None:
            self._trace.update(took)

    def gather(self) -> None:
        """Fetch all sums into ``.grad`` and apply every wanted update."""
        self._raise_failure()
        if (phase := self._phase) is not None:
            phase.fetch()

    def flush(self) -> None:
        """Apply every wanted update; gradients without a step() stay in flight."""
        if self._runtime is not None and not self._closed and self._failure is None:
            self._runtime.updates.wait_wanted()

    def gather_for_step(self, why: str) -> None:
        """Fetch all sums for a step that cannot be deferred; ConfigError if servers have applied them already."""
        if self._options.updates == "servers":
            raise ConfigError("optimizer", "step()", f"cannot run on servers: {why}", "write updates='workers'")
        self.gather()

    def regrouped(self) -> None:
        """Observe again after a parameter group was added: the tasks may have changed."""
        self._restart()

    def before_state_dict(self, place: int) -> None:
        """Apply wanted updates before the state of the optimizer with index ``place`` is read."""
        self.flush()

    def after_state_dict(self, place: int) -> None:
        """Do nothing: the state belongs to the optimizer."""

    def before_load_state_dict(self) -> None:
        """Apply wanted updates before the state of an optimizer is replaced."""
        self.flush()

    # ── the model's hooks ──

    def _claim_parameters(self) -> None:
        """Keep others from attaching these parameters, and guard accesses to them."""
        _taken.update(self._own)
        access_guards.install()

    def _begin(self, optimizers: Sequence[optim.Optimizer], gradients: dist.ProcessGroup, buffers: Buffers) -> None:
        """Observe steps; gradients are summed in the group ``gradients``, and ``buffers`` shared."""
        self._gradient_group, self._buffers = gradients, buffers
        for place, optimizer in enumerate(optimizers):
            self._attachments.append(OptimizerHooks(place, optimizer, self))
            for handle in (
                optimizer.register_state_dict_pre_hook(Hook(partial(self.before_state_dict, place))),
                optimizer.register_state_dict_post_hook(Hook(partial(self.after_state_dict, place))),
                optimizer.register_load_state_dict_pre_hook(Hook(self.before_load_state_dict)),
            ):
                self._hooks.callback(handle.remove)
        self._hook_model()
        if isinstance(self._options.transport, BoundedLoss) and self._options.transport.tolerance == "auto":
            self._losses = BackwardLosses()
            self._hooks.callback(self._losses.watch())
        self._observe()

    def _list_parameters(self) -> None:
        everything = list(self.model.named_parameters())
        # Tensors without elements have no bytes to order.
        self._named = [(name, p) for name, p in everything if p.requires_grad and p.numel()]
        self._frozen = [parameter for _, parameter in everything if not parameter.requires_grad]

    def _hook_model(self) -> None:
        flush = Hook(self.flush)
        for module in self.model.modules():
            self._hooks.callback(module.register_state_dict_pre_hook(flush).remove)
            self._hooks.callback(module.register_load_state_dict_pre_hook(flush).remove)
        # First of the root's hooks, so that the forward pass has begun before other hooks run.
        self._hooks.callback(before_forward(self.model, self._begin_forward))
        names = {module: name for name, module in self.model.named_modules()}
        for module, parameters in parameter_modules(self.model):
            keys, name = tuple(id(parameter) for parameter in parameters), names.get(module) or "(root)"
            self._hooks.callback(before_forward(module, lambda keys=keys, name=name: self._enter(keys, name)))
        self._hooks.callback(after_forward(self.model, self._end_forward))
        hide_from_compiler()

    def _observe(self) -> None:
        """Begin, or restart, the observing phase."""
        parameters = [parameter for _, parameter in self._named]
        self._observation = StepObserver(len(parameters), stopwatch({self._device}))
        self._warmup = Warmup(parameters, self._gradient_group, self._observation, self._check_peers)
        self._step_over = False
        task_of = {id(parameter): task for task, parameter in enumerate(parameters)}
        for attachment in self._attachments:
            attachment.assign(task_of)
        access_guards.watching.update(dict.fromkeys(task_of, lambda key: self._observation.use(task_of[key])))
        self._task_of = task_of
        for task, parameter in enumerate(parameters):
            hook = parameter.register_post_accumulate_grad_hook(lambda _, task=task: self._gradient(task))
            self._gradient_hooks.callback(hook.remove)

    def _enter(self, keys: Sequence[int], name: str) -> None:
        """Wait for the parameters with these ids, whose module begins its forward pass."""
        # A script may call only parts of the model: then their forward passes decide whether the backward pass
        # synchronises. Recomputation in a backward pass (checkpointing) does not: it belongs to an earlier forward.
        if self._pass_syncs is not self._syncs and torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0:
            self._pass_syncs = self._syncs
        entered = self._trace.now() if self._trace is not None else 0
        if access_guards.pending_updates or access_guards.watching:
            for key in keys:
                access_guards.touch(key)
        if self._trace is not None:
            self._trace.enter(name, entered)

    def _begin_forward(self) -> None:
        if self._failure is not None:
            self._raise_failure()
        trains = torch.is_grad_enabled()
        if trains and self._runtime is None:
            self._step_ends()
            if any(parameter.requires_grad for parameter in self._frozen):
                self._restart()
            self._observation.begin_forward()
        elif trains and self._frozen and any(parameter.requires_grad for parameter in self._frozen):
            self._restart()
        for key in self._unseen:
            access_guards.touch(key)
        if trains:
            if self._options.broadcast_buffers and not (self.asynchronous or self._independent):
                self._buffers.forward_begins(self._syncs)
            self._pass_syncs = self._syncs
        if self._trace is not None and trains:
            self._trace.begin_forward()

    def _end_forward(self) -> None:
        if not torch.is_grad_enabled():
            return
        if self._runtime is None:
            self._observation.end_forward()
        else:
            # The backward pass reads parameters that the forward pass did not wait for: finish their updates.
            self._runtime.updates.wait_wanted()
        if self._trace is not None:
            self._trace.end_forward()

    def _gradient(self, task: int) -> None:
        if self._failure is not None:
            self._raise_failure()
        if self._trace is not None:
            self._trace.gradient(task)
        if self._losses is not None:
            self._losses.gradient()
        if self._runtime is None:
            self._step_ends()
        if (phase := self._phase) is not None:
            phase.gradient(task, self._pass_syncs)

    # ── from observing to scheduling, and back ──

    @property
    def _phase(self) -> GradientDispatcher | Warmup | None:
        return self._warmup if self._runtime is None else self._runtime.scheduled

    @property
    def _independent(self) -> bool:
        """Return whether this rank waits for others only through the gradient exchange."""
        return self._options.elastic and self._runtime is not None

    def _step_ends(self) -> None:
        """End an observed step whose optimizers have stepped: the next forward pass or gradient has begun."""
        if not self._step_over:
            return
        self._step_over = False
        self._observation.end_step()
        if self._observation.steps >= self._options.warmup:
            self._schedule_from_now()

    def _schedule_from_now(self) -> None:
        self.gather()
        self._stop_observing()
        self._unseen = [id(self._named[task][1]) for task in self._observation.unseen()]
        self._runtime, views = self._assemble()
        if self._warmup is not None:
            self._warmup.hand_over(views)
            self._warmup = None

    def _restart(self) -> None:
        """Observe and schedule again with other parameters. Collective."""
        self.gather()
        self._stop_scheduling()
        self._stop_observing()
        self._list_parameters()
        self._connect()
        self._observe()

    def _stop_scheduling(self, reason: str | None = None) -> None:
        self._gradient_hooks.close()
        if self._runtime is not None:
            self._runtime.close(reason)
            self._runtime = None

    def _stop_observing(self) -> None:
        for key in self._task_of:
            access_guards.watching.pop(key, None)

    def _release_model(self) -> None:
        """Remove hooks and guards from model and optimizers."""
        for attachment in self._attachments:
            attachment.close()
        self._hooks.close()
        self._stop_observing()
        for key in self._task_of:
            access_guards.held.pop(key, None)
        _taken.difference_update(self._own)
        access_guards.remove()

    # ── methods of subclasses ──

    @abstractmethod
    def close(self) -> None:
        """Apply everything in flight and restore model and optimizers. Idempotent."""

    @abstractmethod
    def _assemble(self) -> tuple[RuntimeT, Sequence[torch.Tensor]]:
        """Return the runtime made from the observation, and its views of gradients by task."""

    @abstractmethod
    def _connect(self) -> None:
        """Begin to detect lost ranks."""

    @abstractmethod
    def _check_peers(self) -> None:
        """Raise the failure, or lost rank, that keeps a collective from completing."""

    @abstractmethod
    def _raise_failure(self) -> None:
        """Raise the error that has ended the job, if any."""

    @abstractmethod
    def _abandon(self, reason: str | None = None) -> None:
        """Close without waiting; a ``reason`` tells other ranks that work was given up."""


def device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """Return the one device of a model; ConfigError if there are several."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        shown = ", ".join(sorted(map(str, devices)))
        raise ConfigError("model", shown, "is on several devices", "attach one model per device")
    (device,) = devices
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("model", str(device), "is neither on a CPU nor on a CUDA device", "move the model first")
    return device
