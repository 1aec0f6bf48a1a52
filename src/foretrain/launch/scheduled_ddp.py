"""DistributedDataParallel that a script gets under ``foretrain run``.

    # Note [Scheduled or stock]
    A script may keep the object, hand it on and ask isinstance, and whether it can be scheduled is known only when
    training begins: the optimizer usually comes after the wrapper. So the object *is* a DistributedDataParallel, built
    as always but for the reducer, which reduces gradients. At the first training forward either a runtime is attached
    to the module inside, or the reducer is built after all, and from then on every method does what it does in
    PyTorch. Code that needs the reducer earlier, PyTorch's own private methods included, finds no attribute
    ``reducer``, and this lookup makes the model fall back to PyTorch's.

All ranks must do the same, so they agree once, by one small collective. Later reasons to fall back (an optimizer made
in the middle of training, ``join()``) are in the script, and so come on all ranks at the same place; a rank that fell
back alone would be reported as lost by the others.
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
from foretrain.plugins.torch.process_groups import prevent_destruction
from foretrain.units import SECOND, Time, format_time, to_seconds

if TYPE_CHECKING:
    from foretrain.launch import LaunchSettings
    from foretrain.launch.ddp_adviser import DdpAdviser
    from foretrain.plugins.torch.attached_model import AttachedModel

_STOCK = "PyTorch's own DistributedDataParallel"
_KEPT = 1000
"""Most steps in the median."""
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
    """State of a wrapper: scheduled or stock; see Note [Scheduled or stock].

    Attributes:
        reason: why it must be stock; None as long as it can be scheduled.
        reducer: arguments of PyTorch's reducer; None once it is built.
        deferred: functions to call when there is a reducer.
        compression: of the communication hooks that were registered.
        agreed: whether the ranks have decided.
        optimizers: those it was attached with, weakly.
        no_sync_context: the runtime's `no_sync`, entered while the script does not synchronise.
    """

    reason: str | None = None
    reducer: tuple[Any, ...] | None = None
    deferred: list[Callable[[DistributedDataParallel], None]] = field(default_factory=list)
    compression: Compression | None = None
    agreed: bool = False
    optimizers: list[weakref.ref[Optimizer]] = field(default_factory=list)
    no_sync_context: AbstractContextManager[None] | None = None


@dataclass(frozen=True, slots=True)
class AgreedPlan:
    """Agreement of the ranks on one model.

    Attributes:
        optimizers: those that hold the model's parameters, in the order they were made.
        reason: why the model stays with the stock DistributedDataParallel; None if it is scheduled.
    """

    optimizers: tuple[Optimizer, ...] = ()
    reason: str | None = None


class ModelRecord:
    """Record of one model for the summary; outlives the model and owns its runtime.

    Attributes:
        name: the model's class.
        wrapper: the model, weakly.
        attached: the runtime while it schedules.
        adviser: observes it under ``foretrain run --advise``.
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
        self.adviser: DdpAdviser | None = None
        self._last: float | None = None
        self._scheduled = False
        self._line: str | None = None
        self._numbers: dict[str, Any] | None = None

    def tick(self) -> None:
        """Record the beginning of a step."""
        now = time.perf_counter()
        scheduled = self.attached is not None and self.attached.schedule is not None
        if scheduled != self._scheduled:
            # Steps that were only observed report nothing about the schedule, nor scheduled ones about the stock way.
            self._scheduled = scheduled
            self._intervals.clear()
        elif self._last is not None:
            self._intervals.append(now - self._last)
        self._last = now
        self.steps += 1

    def stock(self, reason: str) -> None:
        """Close the runtime, if any, and report the ``reason`` for PyTorch's own."""
        self.reason = reason
        attached, self.attached = self.attached, None
        if attached is not None:
            attached.close()
        report(f"{self.name} runs with {_STOCK}: {reason}")

    def end(self, error: BaseException | None = None) -> None:
        """Close the runtime; after an ``error`` without waiting for other ranks."""
        if self._line is None:
            self._line, self._numbers = self._described(), self._measured()
        if self.adviser is not None:
            self.adviser.close()
        attached, self.attached = self.attached, None
        if attached is not None and error is not None:
            attached.__exit__(type(error), error, error.__traceback__)
        elif attached is not None:
            attached.close()

    def line(self) -> str:
        """Return a line with schedule, steps, median, and gap from T*; of all ranks after `end`."""
        return self._line if self._line is not None else self._described()

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON, times in seconds; under PyTorch's own there is no schedule, and a reason."""
        return self._numbers if self._numbers is not None else self._measured()

    def _median(self) -> Time | None:
        return round(statistics.median(self._intervals) * SECOND) if self._intervals else None

    def _measured(self) -> dict[str, Any]:
        median, attached = self._median(), self.attached
        scheduled = attached if attached is not None and attached.schedule is not None else None
        forecast = None if scheduled is None else scheduled.forecast
        bound = None if scheduled is None else scheduled.bound
        return {
            "model": self.name,
            "schedule": None if scheduled is None else str(scheduled.schedule),
            "reason": self.reason,
            "steps": self.steps,
            "iteration_time": None if median is None else to_seconds(median),
            "forecast": None if forecast is None else to_seconds(forecast),
            "optimum": None if bound is None else to_seconds(bound.time),
            "gap": None if median is None or bound is None else median / bound.time - 1,
        }

    def _described(self) -> str:
        times = [f"{self.steps} step{'s' if self.steps != 1 else ''}"]
        median = self._median()
        if self.attached is None:
            if median is not None:
                times.append(f"median {format_time(median)}")
            if self.adviser is not None and self.adviser.advice is None:
                times.append("too few steps to be advised")
            return f"{self.name} with {_STOCK}: {', '.join(times)}"
        if self.attached.schedule is None:
            return f"{self.name} was only observed, it ended before its schedule began: {', '.join(times)}"
        if median is not None:
            from foretrain.comm.runtime_plan import outcome  # it loads the simulator

            times.append(outcome(median, self.attached.forecast, self.attached.bound))
        return f"{self.name} under {self.attached.schedule}: {', '.join(times)}"


class Takeover(Protocol):
    """Owner of a script's models, which decides with all ranks which are scheduled; `DdpPatch` is one."""

    settings: LaunchSettings

    def enter(self, wrapper: ScheduledDataParallel) -> ModelRecord:
        """Return the record of a new wrapper."""
        ...

    def plan(self, wrapper: ScheduledDataParallel, reason: str | None) -> AgreedPlan:
        """Return how all ranks train ``wrapper``; a ``reason`` prevents a schedule. Collective."""
        ...


class ScheduledDataParallel(DistributedDataParallel):
    """DistributedDataParallel whose gradients are exchanged by foretrain's schedule if possible.

    Takes all of its arguments, raises its errors, has its attributes and state_dict keys (``module.…``), and does its
    initial synchronisation when it is made. See Note [Scheduled or stock].

    Attributes:
        takeover: its owner; set in the subclass that `DdpPatch` puts in DistributedDataParallel's place.
    """

    takeover: ClassVar[Takeover]
    process_group: dist.ProcessGroup
    _role: _Role
    _record: ModelRecord

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        given = _SIGNATURE.bind(self, module, *args, **options).arguments
        observed = "foretrain run --advise only observes it" if self.takeover.settings.advise else None
        self._role = _Role(reason=observed or _unsupported(given))
        super().__init__(module, *args, **options)
        self._record = self.takeover.enter(self)

    # ── public methods ──

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module's forward; the first call with gradients enabled decides how they will be reduced."""
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
        # Like PyTorch's own forward: whether the next one shares buffers.
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        return output

    @torch.compiler.disable(recursive=True)
    def _share_buffers(self) -> None:
        attached = self._record.attached
        if attached is None:
            self._sync_buffers()
        elif not attached.asynchronous:
            attached.share_buffers()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Take PyTorch's fp16, bf16 and plain hooks as the schedule's compression; for others fall back."""
        self._check_comm_hook(hook)
        known = state is None or state is self.process_group
        self._hook(hook, known, lambda ddp: DistributedDataParallel.register_comm_hook(ddp, state, hook))

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        register = DistributedDataParallel._register_builtin_comm_hook
        self._hook(comm_hook_type, True, lambda ddp: register(ddp, comm_hook_type))

    def _hook(self, hook: object, known: bool, register: Callable[[DistributedDataParallel], None]) -> None:
        role = self._role
        if role.reducer is None:
            register(self)
            return
        role.deferred.append(register)
        if self._record.attached is not None or hook not in _COMPRESSIONS or not known:
            self.fall_back(f"the communication hook {getattr(hook, '__name__', hook)} needs PyTorch's reducer")
        else:
            role.compression = _COMPRESSIONS[hook]

    def join_hook(self, **kwargs: Any) -> Any:
        """Fall back: with uneven inputs the reducer of a rank without any left mirrors the others' collectives."""
        # Agree here, where all ranks come by: a rank without any input has no first forward.
        if self._record.adviser is not None:
            self._record.adviser.close()  # from now on some ranks may have no forward pass
        self._role.reason = self._role.reason or "join() needs PyTorch's reducer"
        self.fall_back(self._role.reason)
        if not self._role.agreed:
            self._decide()
        return super().join_hook(**kwargs)

    # ── the decision ──

    @torch.compiler.disable(recursive=True)
    def _before_training(self) -> None:
        if not self._role.agreed:
            self._decide()
        elif self._record.attached is not None and self._role.reason:
            self.fall_back(self._role.reason)
        if self._record.attached is not None:
            self._follow(self._record.attached)
        if self.require_backward_grad_sync:
            self._record.tick()
        adviser = self._record.adviser
        if adviser is not None and adviser.ready():
            for line in adviser.advise():
                report(line)

    def _follow(self, attached: AttachedModel[Any]) -> None:
        """Apply the wrapper's flag, set by `no_sync` or by the script, to the next backward pass, as PyTorch does."""
        role = self._role
        if not self.require_backward_grad_sync and role.no_sync_context is None:
            role.no_sync_context = attached.no_sync()
            role.no_sync_context.__enter__()
        elif self.require_backward_grad_sync and role.no_sync_context is not None:
            role.no_sync_context.__exit__(None, None, None)
            role.no_sync_context = None

    def _decide(self) -> None:
        """Attach a runtime or build the reducer, as the ranks agree."""
        role = self._role
        plan = self.takeover.plan(self, role.reason)
        role.agreed = True
        if plan.reason is None:
            try:
                self._attach(plan.optimizers)
                role.optimizers = list(map(weakref.ref, plan.optimizers))
                return
            except ConfigError as error:
                # All ranks raise it: they agreed on equal models and optimizers.
                role.reason = str(error)
        else:
            role.reason = plan.reason
        self._build_reducer()
        self._record.stock(role.reason)
        if self.takeover.settings.advise:
            from foretrain.launch.ddp_adviser import DdpAdviser

            self._record.adviser = DdpAdviser(self)

    def _attach(self, optimizers: tuple[Optimizer, ...]) -> None:
        from foretrain.plugins.torch.api import attach

        settings = self.takeover.settings
        self._record.attached = attach(
            self.module,
            list(optimizers),
            schedule=settings.schedule,
            group=None if self.process_group is dist.group.WORLD else self.process_group,
            compression=settings.compression or self._role.compression,
            # Buffers are shared when the wrapper is called, as in PyTorch: `model.module(x)` must not be collective.
            broadcast_buffers=False,
            transport=settings.transport,
            timeouts=settings.timeouts,
            tune=settings.tune,
        )

    def fall_back(self, reason: str) -> None:
        """Use PyTorch's reducer from here on, unless it is used already."""
        role = self._role
        if role.reducer is None:
            return
        role.reason = role.reason or reason
        if self._record.attached is not None:
            self._record.stock(role.reason)
            role.no_sync_context = None
        self._build_reducer()

    def fall_back_later(self, reason: str) -> None:
        """Fall back at the next training forward: a backward pass under way keeps the hooks it began with."""
        if self._record.attached is not None:
            self._role.reason = reason

    def trains_with(self, optimizer: Optimizer) -> bool:
        """Return whether the model was attached with ``optimizer``."""
        return any(reference() is optimizer for reference in self._role.optimizers)

    def synchronize(self) -> None:
        """Wait until gradients are reduced and parameters updated."""
        if self._record.attached is not None:
            self._record.attached.synchronize()

    def _build_reducer(self) -> None:
        role = self._role
        if role.reducer is None:
            return
        needed, role.reducer = role.reducer, None
        self._init_reducer(*needed)
        for act in role.deferred:
            act(self)

    def _init_reducer(self, *needed: Any) -> None:
        super()._ddp_init_helper(*needed)
        if "gloo" in dist.get_backend_config(self.process_group):
            prevent_destruction(self.process_group)

    # ── overridden private methods ──

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
            self._init_reducer(*needed)

    def _set_static_graph(self) -> None:
        # A schedule treats every graph as dynamic; a reducer that is built later must know.
        if self._role.reducer is None:
            super()._set_static_graph()
        else:
            self._role.deferred.append(DistributedDataParallel._set_static_graph)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.fall_back("PyTorch's replicate() drives it by private methods")
        return super()._pre_forward(*inputs, **kwargs)

    def _register_buffer_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        self.fall_back("a buffer communication hook needs PyTorch's reducer")
        super()._register_buffer_comm_hook(*args, **kwargs)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        if self._role.reducer is None:
            return super()._get_ddp_logging_data()
        # Often called by one rank alone, which must not fall back alone.
        return {
            "module_name": type(self.module).__name__,
            "world_size": self.process_group.size(),
            "rank": self.process_group.rank(),
            "backend_name": dist.get_backend(self.process_group),
        }

    def __getattr__(self, name: str) -> Any:
        if name == "reducer" and self._role.reducer is not None:
            self.fall_back("the script uses PyTorch's reducer")
            return self.reducer
        return super().__getattr__(name)

    def __getstate__(self) -> Any:
        self._check_default_group()
        state = self.__dict__.copy()
        for name in ("process_group", "reducer", "logger", "_role", "_record"):
            state.pop(name, None)
        return state | {"broadcast_buffers": self.forward_sync_buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy decides anew if it is trained.
        self._role = _Role()
        self.logger = None
        super().__setstate__(state)
        self._record = self.takeover.enter(self)


def _unsupported(given: Mapping[str, Any]) -> str | None:
    """Return why a wrapper made with these arguments cannot be scheduled; None if it can."""
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
    for parameter in module.parameters():
        if parameter.is_meta:
            return "it has parameters on the meta device"
        if sharded(parameter):
            return "its parameters are sharded (FSDP or tensor parallel)"
        if parameter.is_complex():
            return "it has complex parameters"
    return None


def sharded(parameter: Tensor) -> bool:
    """Return whether each rank holds a part of ``parameter``, as under FSDP or tensor parallelism."""
    return isinstance(parameter, DTensor) or hasattr(parameter, "_fsdp_flattened")


def reports() -> bool:
    """Return whether this is rank 0, which speaks for all."""
    # Not every trainer that starts processes sets RANK.
    return dist.get_rank() == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"


def report(text: str) -> None:
    """Write one line to stderr, on rank 0."""
    if reports():
        sys.stderr.write(f"foretrain: {text}\n")
        sys.stderr.flush()
