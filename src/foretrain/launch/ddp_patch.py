"""Takes a script's models over: who stands in for DistributedDataParallel, which optimizers there are, what was done.

`DdpPatch` is a context manager around the script. Inside, every name that led to DistributedDataParallel leads to a
`ScheduledDataParallel`, every optimizer is noted as it is made, and process groups are destroyed only when nothing is
in flight. Afterwards rank 0 says in at most three lines what became of the models.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import sys
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from foretrain.launch import LaunchSettings
from foretrain.launch.scheduled_ddp import AgreedPlan, ModelRecord, ScheduledDataParallel, say, sharded
from foretrain.torch_version import require_torch

if TYPE_CHECKING:
    pass

_ROOM = 512
"""Bytes that a rank has in the agreement: a digest and its reason."""
_SHOWN = 3


class DdpPatch:
    """Use as a context manager around a script; see the module.

    Leaving it puts everything back and says what was done. It raises what the last flush raises.
    """

    parallel: ClassVar[type[ScheduledDataParallel]] = ScheduledDataParallel
    """What stands in for DistributedDataParallel."""
    recorded: Callable[[ScheduledDataParallel], ModelRecord] = ModelRecord
    """Makes the record of a model."""

    def __init__(self, settings: LaunchSettings) -> None:
        require_torch("foretrain run")
        self.settings = settings
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._records: list[ModelRecord] = []
        self._sharded = False
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> DdpPatch:
        # The name and home of the class it replaces: scripts compare them, and what is pickled must load without us.
        home = {"takeover": self, "__module__": DistributedDataParallel.__module__, "__doc__": None}
        self._replace(DistributedDataParallel, type("DistributedDataParallel", (self.parallel,), home))
        self._replace(dist.destroy_process_group, self._flushing(dist.destroy_process_group))
        for method in ("__init__", "add_param_group"):
            self._set(Optimizer, method, self._noting(getattr(Optimizer, method)))
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
            for line in self._summary():
                say(line)

    def _summary(self) -> list[str]:
        lines = [record.line() for record in self._records if record.steps]
        if len(lines) > _SHOWN:
            return [*lines[: _SHOWN - 1], f"and {len(lines) - _SHOWN + 1} models more"]
        if lines:
            return lines
        if self._records:
            return ["nothing was taken over: no DistributedDataParallel was trained"]
        why = ", and FSDP or tensor parallelism is not scheduled" if self._sharded else ""
        return [f"nothing was taken over: the script made no DistributedDataParallel{why}; it ran as it is"]

    # What `ScheduledDataParallel` asks for.

    def enter(self, wrapper: ScheduledDataParallel) -> ModelRecord:
        """Notes a model. All ranks make one at the same place, so models that are gone end here and not by chance."""
        if any(record.attached is not None for record in self._records):
            gc.collect()  # what a cycle keeps would be gone on some ranks and not on others, and ending is collective
        for record in self._records:
            if record.wrapper() is None and record.attached is not None:
                record.end()
        self._records.append(self.recorded(wrapper))
        return self._records[-1]

    def plan(self, wrapper: ScheduledDataParallel, reason: str | None) -> AgreedPlan:
        """How ``wrapper``, for which ``reason`` may speak against a schedule, is to train. Collective."""
        optimizers = ()
        if reason is None:
            optimizers = self._holders(wrapper.module)
            if _shared(optimizers):
                optimizers = ()
                gc.collect()  # one that a cycle kept may have been replaced by the other
                optimizers = self._holders(wrapper.module)
            reason = self._obstacle(wrapper, optimizers)
        digest = _digest(wrapper.module, optimizers)
        agreed = _agree(wrapper.process_group, wrapper.device, digest, reason)
        return AgreedPlan(optimizers, None) if agreed is None else AgreedPlan((), agreed)

    # Optimizers.

    def _holders(self, module: nn.Module) -> tuple[Optimizer, ...]:
        """The optimizers that hold a parameter of ``module``, in the order they were made."""
        wanted = set(module.parameters())
        living = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        return tuple(optimizer for optimizer in living if wanted.intersection(_parameters(optimizer)))

    def _obstacle(self, wrapper: ScheduledDataParallel, optimizers: tuple[Optimizer, ...]) -> str | None:
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

    def _note(self, optimizer: Optimizer) -> None:
        """An optimizer was made, or got parameters."""
        if not any(reference() is optimizer for reference in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer, self._optimizers.remove))
        self._sharded = self._sharded or any(map(sharded, _parameters(optimizer)))
        for record in self._records:
            wrapper = record.wrapper()
            if wrapper is not None and record.attached is not None and not wrapper.knows(optimizer):
                if set(_parameters(optimizer)).isdisjoint(wrapper.module.parameters()):
                    continue
                wrapper.leave_soon(f"{type(optimizer).__name__} was made, or given parameters, after training began")
                # Until then it must find gradients as DistributedDataParallel would have left them.
                optimizer.register_step_pre_hook(_Landing(wrapper))

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def noting(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = original(optimizer, *args, **kwargs)
            self._note(optimizer)
            return result

        return noting

    # Names.

    def _flushing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
            for record in self._records:
                wrapper = record.wrapper()
                if group in (None, dist.group.WORLD) or (wrapper is not None and wrapper.process_group == group):
                    record.end()
            original(group)

        return destroy_process_group

    def _replace(self, original: object, replacement: object) -> None:
        """Every module that knows ``original`` under some name knows ``replacement`` under it."""
        for home, module in list(sys.modules.items()):
            if not home.startswith("foretrain."):
                for name in [name for name, value in _names(module) if value is original]:
                    self._set(module, name, replacement)

    def _set(self, owner: object, name: str, value: object) -> None:
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)


class _Landing:
    """A step pre-hook that lets what is in flight land; holds the model weakly."""

    def __init__(self, wrapper: ScheduledDataParallel) -> None:
        self._wrapper = weakref.ref(wrapper)

    def __call__(self, *_: Any) -> None:
        wrapper = self._wrapper()
        if wrapper is not None:
            wrapper.land()


def _names(module: object) -> list[tuple[str, object]]:
    # Not by dir(): that would import what some modules load lazily.
    return list(getattr(module, "__dict__", {}).items())


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _shared(optimizers: tuple[Optimizer, ...]) -> tuple[str, str] | None:
    """The classes of two optimizers that hold the same parameter."""
    owner: dict[torch.Tensor, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            if (other := owner.setdefault(parameter, optimizer)) is not optimizer:
                return type(other).__name__, type(optimizer).__name__
    return None


def _digest(module: nn.Module, optimizers: tuple[Optimizer, ...]) -> bytes:
    """What all ranks must have in common before they attach: names, shapes, and who updates what."""
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
    """Return why not to attach, or None if no rank of ``group`` has a reason and all their digests are the same.

    One all-gather of a fixed size; all ranks return the same.
    """
    text = (reason or "").encode()[: _ROOM - len(digest)]
    mine = torch.tensor(list((digest + text).ljust(_ROOM, b"\0")), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(gathered, mine, group=group)
    said = [bytes(theirs.tolist()) for theirs in gathered]
    reasons = [each[len(digest) :].rstrip(b"\0").decode(errors="ignore") for each in said]
    given = [f"{text} (rank {rank})" for rank, text in enumerate(reasons) if text]
    if given:
        return reasons[0] if len(set(reasons)) == 1 else given[0]
    return None if len(set(said)) == 1 else "the ranks hold different models or optimizers"
