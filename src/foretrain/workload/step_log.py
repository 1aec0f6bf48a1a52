"""Log of one training step, kept by the hooks of `foretrain.workload.recorder`, and the model's parts it refers to.

# Note [Rounds]
A *round* is a forward pass and the backward calls that follow it, up to the next forward pass. A step that
accumulates gradients has several; a step with two losses and no forward between their backward calls has one, which
spans both. The last round in which gradients were released counts, as it is the one after which they are exchanged.
Recorded times are of that round alone, so that the forward passes before it are not part of the workload.

What a checkpoint computes again inside the backward pass is backward time; what runs in evaluation is no time at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from foretrain.errors import RecordError
from foretrain.units import Time

if TYPE_CHECKING:
    import torch


_WRAPPERS = {
    "DataParallel": "record the module inside it, without communication",
    "DistributedDataParallel": "record the module inside it, without communication",
    "FullyShardedDataParallel": "record the model before it is sharded",
    "FSDPModule": "record the model before it is sharded",
    "OptimizedModule": "record the model before torch.compile, which melts layers together",
}


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Parts of a model, by number.

    Attributes:
        modules: qualified names; the model itself is number 0 and carries its class's name.
        parents: of each module, the module that contains it; 0 for the model itself.
        parameters: qualified names, in registration order; a shared parameter once, under its first name.
        owners: of each parameter, the modules that own it directly; more than one when it is shared.
        frozen: parameters that ask for no gradient.
    """

    modules: tuple[str, ...]
    parents: tuple[int, ...]
    parameters: tuple[str, ...]
    owners: tuple[tuple[int, ...], ...]
    frozen: frozenset[int]


def dissect(model: torch.nn.Module) -> Anatomy:
    """Return the anatomy of ``model``; RecordError when its steps could not be recorded."""
    _check(model)
    number = {name: index for index, (name, _) in enumerate(model.named_modules())}
    owners: dict[int, list[int]] = {}
    for index, module in enumerate(model.modules()):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(index)
    named = dict(model.named_parameters())
    return Anatomy(
        modules=tuple(name or type(model).__name__ for name in number),
        parents=tuple(number[name.rpartition(".")[0]] for name in number),
        parameters=tuple(named),
        owners=tuple(tuple(owners[id(parameter)]) for parameter in named.values()),
        frozen=frozenset(index for index, parameter in enumerate(named.values()) if not parameter.requires_grad),
    )


def _check(model: torch.nn.Module) -> None:
    from torch.nn.parameter import is_lazy

    for name, module in model.named_modules():
        for kind in (kind.__name__ for kind in type(module).__mro__):
            if kind in _WRAPPERS:
                raise RecordError(f"{name or 'the model'} is a {kind}; {_WRAPPERS[kind]}")
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise RecordError(f"{name or 'the model'} is compiled; {_WRAPPERS['OptimizedModule']}")
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise RecordError("the model has lazy parameters without a shape; run one batch through it first")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecordError("no parameter of the model requires a gradient, so there is nothing to exchange")


Kind: TypeAlias = Literal["begin", "call", "pause", "resume", "backward", "returned", "release", "update", "updated"]
"""Kinds of events: the step begins, a module is called, evaluation begins and ends, a backward call begins and returns,
a gradient is accumulated, an optimizer's step begins and ends."""


class HookEvent(NamedTuple):
    """Event of a hook. ``subject`` is a module in a call and a parameter in a release."""

    kind: Kind
    subject: int
    time: Time


@dataclass(frozen=True, slots=True)
class StepLog:
    """Log of one step.

    Attributes:
        segments: (module, time) in the order of calls; they add up to the forward pass.
        backward: the whole backward pass.
        releases: of each parameter, the time from the start of the backward pass to its last accumulation.
        update: all optimizer steps together; None when there was none.
        rounds: how many backward passes with a forward pass before them, see Note [Rounds].
    """

    segments: tuple[tuple[int, Time], ...]
    backward: Time
    releases: Mapping[int, Time]
    update: Time | None
    rounds: int


@dataclass(slots=True)
class _Round:
    segments: list[tuple[int, Time]] = field(default_factory=list)
    releases: dict[int, Time] = field(default_factory=dict)
    begin: Time | None = None
    end: Time = 0


class _Reading:
    """Reader of a log of one step; it has a method for each kind of event."""

    def __init__(self) -> None:
        self.rounds = [_Round()]
        self.update_time: Time | None = None
        self._running: tuple[int, Time] | None = None  # the module whose segment is open, and since when
        self._paused: int | None = None
        self._depth = 0  # backward calls one inside another: a reentrant checkpoint calls backward in backward
        self._updates: list[Time] = []

    def begin(self, subject: int, time: Time) -> None:
        """Only the origin of the stopwatch."""

    def call(self, module: int, time: Time) -> None:
        if self._depth:  # a checkpoint computes again what it did not keep
            return
        if self.rounds[-1].begin is not None:
            self.rounds.append(_Round())
        self._close(time)
        self._running = (module, time)

    def pause(self, subject: int, time: Time) -> None:
        self._paused = self._running[0] if self._running else None
        self._close(time)

    def resume(self, subject: int, time: Time) -> None:
        if self._paused is not None:
            self._running = (self._paused, time)

    def backward(self, subject: int, time: Time) -> None:
        if self._updates:
            raise RecordError(
                "a backward pass ran inside optimizer.step, as with a closure (LBFGS); "
                "call backward first and optimizer.step() without a closure after it"
            )
        if not self._depth:
            self._close(time)
            if self.rounds[-1].begin is None:
                self.rounds[-1].begin = time
        self._depth += 1

    def returned(self, subject: int, time: Time) -> None:
        self._depth -= 1
        self.rounds[-1].end = time

    def release(self, parameter: int, time: Time) -> None:
        if not self._depth:
            raise RecordError(
                "gradients arrived, but no call of torch.autograd.backward was seen; "
                "call loss.backward() in the step, and no reference to backward that was taken before recording"
            )
        self.rounds[-1].releases[parameter] = time

    def update(self, subject: int, time: Time) -> None:
        if self._depth:
            raise RecordError(
                "optimizer.step ran inside the backward pass; record the step with the optimizer after backward: "
                "foretrain decides itself what overlaps"
            )
        self._close(time)
        self._updates.append(time)

    def updated(self, subject: int, time: Time) -> None:
        since = self._updates.pop()
        if not self._updates:
            self.update_time = (self.update_time or 0) + time - since

    def _close(self, time: Time) -> None:
        if self._running:
            module, since = self._running
            self.rounds[-1].segments.append((module, time - since))
        self._running = None


def observe(log: Iterable[HookEvent]) -> StepLog:
    """Return the observation of a step from its log; RecordError when it was not a training step."""
    reading = _Reading()
    for entry in log:
        getattr(reading, entry.kind)(entry.subject, entry.time)
    rounds = [one for one in reading.rounds if one.begin is not None]
    if not rounds:
        raise RecordError("no backward pass was seen; the step must run forward, loss.backward() and optimizer.step()")
    rounds = [one for one in rounds if one.releases]
    if not rounds:
        raise RecordError(
            "a backward pass was seen, but it gave none of the model's parameters a gradient; "
            "pass the very model that the step trains"
        )
    last = rounds[-1]
    if not last.segments:
        raise RecordError(
            "the backward pass was seen, but no module was called before it with gradients enabled; "
            "the step must call model(...), and the model must be the very one that is recorded"
        )
    begin = last.begin or 0
    return StepLog(
        segments=tuple(last.segments),
        backward=last.end - begin,
        releases={parameter: time - begin for parameter, time in last.releases.items()},
        update=reading.update_time,
        rounds=len(rounds),
    )
