"""The DistributedDataParallel that a script gets under ``foretrain run``.

    # Note [One object, two ways]
    A script may keep the object, hand it on and ask isinstance, and whether it can be scheduled is known only when
    training begins: the optimizer usually comes after the wrapper. So the object *is* a DistributedDataParallel, built
    as always but for the reducer, the part that reduces gradients. At the first training forward either a runtime is
    attached to the module inside, or the reducer is built after all, and from then on every method does what it does
    in PyTorch. Whatever needs the reducer before, PyTorch's own private methods included, finds no attribute
    ``reducer``, and asking for it decides for the second way.

All ranks must go the same way, so they agree once, by one small collective. What makes a rank leave the schedule later
(an optimizer made in the middle of training, ``join()``) is the script's doing and happens on all ranks at the same
place; a rank that left alone would be reported as lost by the others.
"""

from __future__ import annotations

import inspect
import os
import statistics
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from foretrain.comm.options import Compression
from foretrain.errors import ConfigError
from foretrain.units import SECOND, format_time

if TYPE_CHECKING:
    from foretrain.launch import LaunchSettings
    from foretrain.plugins.torch.attached_model import AttachedModel

_STOCK = "PyTorch's own DistributedDataParallel"
_KEPT = 1000
"""Steps whose times count for the median."""
_SIGNATURE = inspect.signature(DistributedDataParallel.__init__)
_COMPRESSIONS: Mapping[object, Compression | None] = {
    allreduce_hook: None,
    fp16_compress_hook: "fp16",
    bf16_compress_hook: "bf16",
    BuiltinCommHookType.ALLREDUCE: None,
    BuiltinCommHookType.FP16_COMPRESS: "fp16",
}


@dataclass(slots=True)
class _Role:
    """Which of the two ways an object goes; see Note [One object, two ways].

    Attributes:
        reason: why it must be the stock one; None while nothing speaks against a schedule.
        reducer: what PyTorch builds the reducer from; None once it is built.
        later: what to do once there is a reducer.
        compression: what those hooks send gradients as.
        agreed: whether the ranks have decided.
        optimizers: those it was attached with, weakly.
        quiet: the runtime's `no_sync`, while forward passes begin that shall not be reduced.
    """

    reason: str | None = None
    reducer: tuple[Any, ...] | None = None
    later: list[Callable[[DistributedDataParallel], None]] = field(default_factory=list)
    compression: Compression | None = None
    agreed: bool = False
    optimizers: list[weakref.ref[Optimizer]] = field(default_factory=list)
    quiet: AbstractContextManager[None] | None = None


@dataclass(frozen=True, slots=True)
class AgreedPlan:
    """What the ranks agreed on.

    Attributes:
        optimizers: those that hold the model's parameters, in the order they were made.
        reason: why the model stays with the stock DistributedDataParallel; None if it does not.
    """

    optimizers: tuple[Optimizer, ...] = ()
    reason: str | None = None


class ModelRecord:
    """What became of one model, for the summary; outlives the model and owns its runtime.

    Attributes:
        name: the model's class.
        wrapper: the model, weakly.
        attached: the runtime while it schedules.
        reason: why the model runs, or ended, with the stock DistributedDataParallel.
        steps: forward passes whose backward pass reduces gradients.
    """

    def __init__(self, wrapper: ScheduledDataParallel) -> None:
        self.name = type(wrapper.module).__name__
        self.wrapper = weakref.ref(wrapper)
        self.attached: AttachedModel[Any] | None = None
        self.reason: str | None = None
        self.steps = 0
        self._intervals: deque[float] = deque(maxlen=_KEPT)
        self._last: float | None = None
        self._scheduled = False
        self._line: str | None = None

    def tick(self) -> None:
        """A step begins."""
        now = time.perf_counter()
        scheduled = self.attached is not None and self.attached.schedule is not None
        if scheduled != self._scheduled:
            # Steps that were only observed say nothing about the schedule, nor scheduled ones about the stock way.
            self._scheduled = scheduled
            self._intervals.clear()
        elif self._last is not None:
            self._intervals.append(now - self._last)
        self._last = now
        self.steps += 1

    def stock(self, reason: str) -> None:
        """The model goes the stock way, and rank 0 says why; a runtime is flushed and ended."""
        self.reason = reason
        attached, self.attached = self.attached, None
        if attached is not None:
            attached.close()
        say(f"{self.name} runs with {_STOCK}: {reason}")

    def end(self, error: BaseException | None = None) -> None:
        """Ends the runtime: flushed, or after an error without waiting for ranks that may not come."""
        self._line = self.line()
        attached, self.attached = self.attached, None
        if attached is not None and error is not None:
            attached.__exit__(type(error), error, error.__traceback__)
        elif attached is not None:
            attached.close()

    def line(self) -> str:
        """Schedule, steps, median and distance from T*."""
        if self._line is not None:
            return self._line
        times = [f"{self.steps} step{'s' if self.steps != 1 else ''}"]
        median = statistics.median(self._intervals) * SECOND if self._intervals else None
        if median is not None:
            times.append(f"median {format_time(median)}")
        if self.attached is None:
            return f"{self.name} with {_STOCK}: {', '.join(times)}"
        if self.attached.schedule is None:
            return f"{self.name} was only observed, it ended before its schedule began: {', '.join(times)}"
        if (bound := self.attached.bound) is not None:  # one rank alone has none
            gap = f", gap {median / bound.time - 1:.1%}" if median is not None else ""
            times.append(f"T* {format_time(bound.time)}{gap}")
        return f"{self.name} under {self.attached.schedule}: {', '.join(times)}"


class Takeover(Protocol):
    """Decides for a script which of its models are scheduled; `foretrain.launch.ddp_patch.DdpPatch` is one."""

    settings: LaunchSettings

    def enter(self, wrapper: ScheduledDataParallel) -> ModelRecord:
        """Return the record of a model that was wrapped just now."""
        ...

    def plan(self, wrapper: ScheduledDataParallel, reason: str | None) -> AgreedPlan:
        """Return how all ranks train ``wrapper``; ``reason`` speaks against a schedule. Collective."""
        ...


class ScheduledDataParallel(DistributedDataParallel):
    """A DistributedDataParallel whose gradients travel by foretrain's schedule where that is possible.

    Takes all of its arguments, raises its errors, has its attributes and state_dict keys (``module.…``), and does its
    initial synchronisation when it is made. See Note [One object, two ways].

    Attributes:
        takeover: what it reports to; set in the subclass that `DdpPatch` puts in DistributedDataParallel's place.
    """

    takeover: ClassVar[Takeover]
    process_group: dist.ProcessGroup
    _role: _Role
    _record: ModelRecord

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        given = _SIGNATURE.bind(self, module, *args, **options).arguments
        self._role = _Role(reason=_unsupported(given))
        super().__init__(module, *args, **options)
        self._record = self.takeover.enter(self)

    # What is asked of it while it trains.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; the first one with gradients enabled decides how they will be reduced."""
        if torch.is_grad_enabled():
            self._before_training()
        if self._role.reducer is None:
            return super().forward(*inputs, **kwargs)
        if self._check_sync_bufs_pre_fwd():
            self._share_buffers()
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            (inputs,), (kwargs,) = _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)
        output = self.module(*inputs, **kwargs)
        # As PyTorch's own forward leaves it: whether the next one shares buffers.
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        return output

    @torch.compiler.disable(recursive=True)
    def _share_buffers(self) -> None:
        attached = self._record.attached
        if attached is None:
            self._sync_buffers()
        elif not attached.apart:
            attached.share_buffers()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """PyTorch's fp16, bf16 and plain hooks become the schedule's compression; any other needs the reducer."""
        self._check_comm_hook(hook)
        ours = state is None or state is self.process_group
        self._hook(hook, ours, lambda ddp: DistributedDataParallel.register_comm_hook(ddp, state, hook))

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        register = DistributedDataParallel._register_builtin_comm_hook
        self._hook(comm_hook_type, True, lambda ddp: register(ddp, comm_hook_type))

    def _hook(self, hook: object, ours: bool, register: Callable[[DistributedDataParallel], None]) -> None:
        role = self._role
        if role.reducer is None:
            register(self)
            return
        role.later.append(register)
        if self._record.attached is not None or hook not in _COMPRESSIONS or not ours:
            self.leave(f"the communication hook {getattr(hook, '__name__', hook)} needs PyTorch's reducer")
        else:
            role.compression = _COMPRESSIONS[hook]

    def join_hook(self, **kwargs: Any) -> Any:
        """Uneven inputs are the reducer's business: a rank that has none left must mirror what the others send."""
        # Agreed here and not at the first forward: a rank without any input has none, and all ranks come by here.
        self._role.reason = self._role.reason or "join() needs PyTorch's reducer"
        self.leave(self._role.reason)
        if not self._role.agreed:
            self._decide()
        return super().join_hook(**kwargs)

    # How it goes one way or the other.

    @torch.compiler.disable(recursive=True)
    def _before_training(self) -> None:
        if not self._role.agreed:
            self._decide()
        elif self._record.attached is not None and self._role.reason:
            self.leave(self._role.reason)
        if self._record.attached is not None:
            self._follow(self._record.attached)
        if self.require_backward_grad_sync:
            self._record.tick()

    def _follow(self, attached: AttachedModel[Any]) -> None:
        """As in PyTorch, what the flag says now holds for the backward pass; `no_sync` and some scripts set it."""
        role = self._role
        if not self.require_backward_grad_sync and role.quiet is None:
            role.quiet = attached.no_sync()
            role.quiet.__enter__()
        elif self.require_backward_grad_sync and role.quiet is not None:
            role.quiet.__exit__(None, None, None)
            role.quiet = None

    def _decide(self) -> None:
        """Attaches a runtime or builds the reducer, as the ranks agree."""
        role = self._role
        plan = self.takeover.plan(self, role.reason)
        role.agreed = True
        if plan.reason is None:
            try:
                self._attach(plan.optimizers)
                return
            except ConfigError as error:
                # On all ranks alike: they agreed that what they attach has the same shape everywhere.
                role.reason = str(error)
        else:
            role.reason = plan.reason
        self._build()
        self._record.stock(role.reason)

    def _attach(self, optimizers: tuple[Optimizer, ...]) -> None:
        from foretrain.plugins.torch.api import attach

        settings = self.takeover.settings
        self._record.attached = attach(
            self.module,
            list(optimizers),
            schedule=settings.schedule,
            group=None if self.process_group is dist.group.WORLD else self.process_group,
            compression=settings.compression or self._role.compression,
            # Where PyTorch does it, when the wrapper is called: `model.module(x)` must not wait for other ranks.
            broadcast_buffers=False,
            transport=settings.transport,
            timeouts=settings.timeouts,
            tune=settings.tune,
        )
        self._note(optimizers)

    def _note(self, optimizers: tuple[Optimizer, ...]) -> None:
        """It trains with these."""
        self._role.optimizers = list(map(weakref.ref, optimizers))

    def leave(self, reason: str) -> None:
        """From here on the stock way, whatever was decided; nothing happens where it is the stock way already."""
        role = self._role
        if role.reducer is None:
            return
        role.reason = role.reason or reason
        if self._record.attached is not None:
            self._record.stock(role.reason)
            role.quiet = None
        self._build()

    def leave_soon(self, reason: str) -> None:
        """The same at the next training forward: a backward pass under way still finds the hooks it began with."""
        if self._record.attached is not None:
            self._role.reason = reason

    def knows(self, optimizer: Optimizer) -> bool:
        """Return whether it trains with ``optimizer`` as it stands."""
        return any(reference() is optimizer for reference in self._role.optimizers)

    def land(self) -> None:
        """Afterwards nothing is in flight: gradients are reduced and parameters updated."""
        if self._record.attached is not None:
            self._record.attached.synchronize()

    def _build(self) -> None:
        role = self._role
        if role.reducer is None:
            return
        needed, role.reducer = role.reducer, None
        super()._ddp_init_helper(*needed)
        for act in role.later:
            act(self)

    # What PyTorch's own methods come by.

    def _ddp_init_helper(
        self, parameters: Any, expect_sparse_gradient: list[bool], param_to_name_mapping: Any, static_graph: bool
    ) -> None:
        needed = (parameters, expect_sparse_gradient, param_to_name_mapping, static_graph)
        if any(expect_sparse_gradient):
            self._role.reason = self._role.reason or "it has sparse gradients"
        if self._role.reason is None:
            self._passing_sync_batchnorm_handle(self.module)  # its errors belong here
            self._role.reducer = needed
        else:
            super()._ddp_init_helper(*needed)

    def _set_static_graph(self) -> None:
        # To a schedule every graph is dynamic; a reducer built later still wants to know.
        if self._role.reducer is None:
            super()._set_static_graph()
        else:
            self._role.later.append(DistributedDataParallel._set_static_graph)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.leave("PyTorch's replicate() drives it by private methods")
        return super()._pre_forward(*inputs, **kwargs)

    def _register_buffer_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        self.leave("a buffer communication hook needs PyTorch's reducer")
        super()._register_buffer_comm_hook(*args, **kwargs)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        if self._role.reducer is None:
            return super()._get_ddp_logging_data()
        # Often asked for by one rank alone, which must not leave because of it.
        return {
            "module_name": type(self.module).__name__,
            "world_size": self.process_group.size(),
            "rank": self.process_group.rank(),
            "backend_name": dist.get_backend(self.process_group),
        }

    def __getattr__(self, name: str) -> Any:
        if name == "reducer" and self._role.reducer is not None:
            self.leave("the script uses PyTorch's reducer")
            return self.reducer
        return super().__getattr__(name)

    def __getstate__(self) -> Any:
        self._check_default_group()
        state = self.__dict__.copy()
        for name in ("process_group", "reducer", "logger", "_role", "_record"):
            state.pop(name, None)
        return state | {"broadcast_buffers": self.forward_sync_buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy decides for itself, should it ever train.
        self._role = _Role()
        self.logger = None
        super().__setstate__(state)
        self._record = self.takeover.enter(self)


def _unsupported(given: Mapping[str, Any]) -> str | None:
    """Why a wrapper made with these arguments cannot be scheduled, or None."""
    for option in ("delay_all_reduce_named_params", "mixed_precision", "skip_all_reduce_unused_params"):
        if given.get(option):
            return f"its option {option} needs PyTorch's reducer"
    mesh = given.get("device_mesh")
    if mesh is not None and mesh._get_root_mesh() != mesh:
        return "its device mesh is part of a larger one"
    module: nn.Module = given["module"]
    if getattr(module, "_ddp_params_and_buffers_to_ignore", None):
        return "it has parameters that DistributedDataParallel is told to ignore"
    if any(isinstance(inner, DistributedDataParallel) for inner in module.modules()):
        return "it contains another DistributedDataParallel"
    return next(filter(None, map(_unfit, module.parameters())), None)


def _unfit(parameter: Tensor) -> str | None:
    if parameter.is_meta:
        return "it has parameters on the meta device"
    if sharded(parameter):
        return "its parameters are sharded (FSDP or tensor parallel)"
    if parameter.is_complex():
        return "it has complex parameters"
    return None


def sharded(parameter: Tensor) -> bool:
    """Return whether each rank holds a part of it, as under FSDP or tensor parallelism."""
    return isinstance(parameter, DTensor) or hasattr(parameter, "_fsdp_flattened")


def say(text: str) -> None:
    """One line to stderr, from rank 0."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"foretrain: {text}\n")
        sys.stderr.flush()
