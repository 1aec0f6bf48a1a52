"""Patch of PyTorch around a script, which schedules the script's models.

Inside of `DdpPatch` every name of DistributedDataParallel refers to a `ScheduledDataParallel`, every optimizer is
recorded as it is made, and models are closed before their process groups are destroyed. Afterwards rank 0 prints a
summary of at most three lines.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import sys
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from foretrain.files import write_json
from foretrain.launch import NOT_ADVISED, LaunchSettings, session_used
from foretrain.launch.scheduled_ddp import AgreedPlan, ModelRecord, ScheduledDataParallel, report, reports, sharded
from foretrain.torch_version import require_torch

_AGREEMENT_SIZE = 512
"""Bytes of each rank in the agreement: a digest and its reason."""
_SUMMARY_LINES = 3


class DdpPatch:
    """Context manager around a script; see the module. Leaving it restores PyTorch and closes all models."""

    parallel: ClassVar[type[ScheduledDataParallel]] = ScheduledDataParallel
    """Replacement of DistributedDataParallel."""
    recorded: Callable[[ScheduledDataParallel], ModelRecord] = ModelRecord
    """Maker of a model's record."""

    def __init__(self, settings: LaunchSettings) -> None:
        require_torch("foretrain run")
        self.settings = settings
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._records: list[ModelRecord] = []
        self._sharded = False
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> DdpPatch:
        # Name and module of the replaced class: scripts compare them, and pickled models must load without foretrain.
        body = {"takeover": self, "__module__": DistributedDataParallel.__module__, "__doc__": None}
        self._replace(DistributedDataParallel, type("DistributedDataParallel", (self.parallel,), body))
        self._replace(dist.destroy_process_group, self._closing_models(dist.destroy_process_group))
        for method in ("__init__", "add_param_group"):
            self._set(Optimizer, method, self._tracking(getattr(Optimizer, method)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()
        done = isinstance(error, SystemExit) and error.code in (None, 0)
        try:
            for record in self._records:
                record.end(None if done else error)
        finally:
            for line in () if self.settings.quiet else self._summary():
                report(line)
            if self.settings.numbers is not None and reports():
                told = [record.adviser or record for record in self._records if record.steps or record.adviser]
                write_json(self.settings.numbers, {"models": [one.to_dict() for one in told]})

    def _summary(self) -> list[str]:
        lines = [record.line() for record in self._records if record.steps]
        if len(lines) > _SUMMARY_LINES:
            return [*lines[: _SUMMARY_LINES - 1], f"and {len(lines) - _SUMMARY_LINES + 1} models more"]
        if lines:
            return lines
        if session_used():
            return [NOT_ADVISED] if self.settings.advise else []
        if self._records:
            return ["nothing was taken over: no DistributedDataParallel was trained"]
        why = ", and FSDP or tensor parallelism is not scheduled" if self._sharded else ""
        return [f"nothing was taken over: the script made no DistributedDataParallel{why}; it ran as it is"]

    # ── calls of `ScheduledDataParallel` ──

    def enter(self, wrapper: ScheduledDataParallel) -> ModelRecord:
        """Record a model, and close models that are gone: all ranks come here at the same place."""
        if any(record.attached is not None for record in self._records):
            gc.collect()  # closing is collective, and a cycle may keep a model alive on some ranks only
        for record in self._records:
            if record.wrapper() is None and record.attached is not None:
                record.end()
        self._records.append(self.recorded(wrapper))
        return self._records[-1]

    def plan(self, wrapper: ScheduledDataParallel, reason: str | None) -> AgreedPlan:
        """Return how all ranks train ``wrapper``; a ``reason`` prevents a schedule. Collective."""
        optimizers = ()
        if reason is None:
            optimizers = self._optimizers_of(wrapper.module)
            if _shared(optimizers):
                optimizers = ()
                gc.collect()  # a cycle may keep an optimizer that was replaced
                optimizers = self._optimizers_of(wrapper.module)
            reason = self._reason_against(wrapper, optimizers)
        digest = _digest(wrapper.module, optimizers)
        agreed = _agree(wrapper.process_group, wrapper.device, digest, reason)
        return AgreedPlan(optimizers, None) if agreed is None else AgreedPlan((), agreed)

    # ── optimizers ──

    def _optimizers_of(self, module: nn.Module) -> tuple[Optimizer, ...]:
        """Return the optimizers that hold a parameter of ``module``, in the order they were made."""
        wanted = set(module.parameters())
        living = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        return tuple(optimizer for optimizer in living if wanted.intersection(_parameters(optimizer)))

    def _reason_against(self, wrapper: ScheduledDataParallel, optimizers: tuple[Optimizer, ...]) -> str | None:
        if not optimizers:
            return "no optimizer held its parameters when training began"
        if names := _shared(optimizers):
            return f"two optimizers hold the same parameter ({names[0]} and {names[1]})"
        held = {parameter for optimizer in optimizers for parameter in _parameters(optimizer)}
        for record in self._records:
            other = record.wrapper()
            if other is not None and other is not wrapper and held.intersection(other.module.parameters()):
                return f"its optimizer also holds parameters of another DistributedDataParallel ({record.name})"
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in held):
            return "its optimizer runs inside the backward pass"
        return None

    def _track(self, optimizer: Optimizer) -> None:
        """Record an optimizer that was made or given parameters; a model in training must fall back."""
        if not any(reference() is optimizer for reference in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer, self._optimizers.remove))
        self._sharded = self._sharded or any(map(sharded, _parameters(optimizer)))
        for record in self._records:
            wrapper = record.wrapper()
            if wrapper is not None and record.attached is not None and not wrapper.trains_with(optimizer):
                if set(_parameters(optimizer)).isdisjoint(wrapper.module.parameters()):
                    continue
                wrapper.fall_back_later(
                    f"{type(optimizer).__name__} was made, or given parameters, after training began"
                )
                # Until then it must find reduced gradients.
                synchronize = weakref.WeakMethod(wrapper.synchronize)
                optimizer.register_step_pre_hook(lambda *_, method=synchronize: (call := method()) and call())

    def _tracking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def noting(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = original(optimizer, *args, **kwargs)
            self._track(optimizer)
            return result

        return noting

    # ── replaced names ──

    def _closing_models(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
            for record in self._records:
                wrapper = record.wrapper()
                if group in (None, dist.group.WORLD) or (wrapper is not None and wrapper.process_group == group):
                    record.end()
            original(group)

        return destroy_process_group

    def _replace(self, original: object, replacement: object) -> None:
        """Replace ``original`` in all modules, under whatever names they have it."""
        for home, module in list(sys.modules.items()):
            if not home.startswith("foretrain."):
                # Not dir(), which would import what some modules load lazily.
                names = [name for name, value in list(getattr(module, "__dict__", {}).items()) if value is original]
                for name in names:
                    self._set(module, name, replacement)

    def _set(self, owner: object, name: str, value: object) -> None:
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _shared(optimizers: tuple[Optimizer, ...]) -> tuple[str, str] | None:
    """Return the classes of two optimizers that hold the same parameter, if any."""
    owner: dict[torch.Tensor, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            if (other := owner.setdefault(parameter, optimizer)) is not optimizer:
                return type(other).__name__, type(optimizer).__name__
    return None


def _digest(module: nn.Module, optimizers: tuple[Optimizer, ...]) -> bytes:
    """Return a hash of what all ranks must have in common: parameters, and the optimizers that hold them."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    model = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for p, name in names.items()]
    updates = [
        (
            type(optimizer).__qualname__,
            [[names.get(p, "") for p in group["params"]] for group in optimizer.param_groups],
        )
        for optimizer in optimizers
    ]
    return hashlib.sha256(repr((model, updates)).encode()).digest()


def _agree(group: dist.ProcessGroup, device: torch.device, digest: bytes, reason: str | None) -> str | None:
    """Return why not to attach, or None if no rank of ``group`` has a reason and all digests are equal.

    One all-gather of a fixed size; all ranks return the same.
    """
    text = (reason or "").encode()[: _AGREEMENT_SIZE - len(digest)]
    own = torch.tensor(list((digest + text).ljust(_AGREEMENT_SIZE, b"\0")), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    rows = [bytes(row.tolist()) for row in gathered]
    reasons = [row[len(digest) :].rstrip(b"\0").decode(errors="ignore") for row in rows]
    given = [f"{text} (rank {rank})" for rank, text in enumerate(reasons) if text]
    if given:
        return reasons[0] if len(set(reasons)) == 1 else given[0]
    return None if len(set(rows)) == 1 else "the ranks hold different models or optimizers"
