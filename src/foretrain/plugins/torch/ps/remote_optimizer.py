"""Optimizers that run on the servers, as a worker sees them, and the dispatcher of its gradients.

attach ─ `refuse`: only what can be run there is
first scheduled step ─ `RemoteOptimizer.begin`: rank 0's parameters and optimizer state go up, all forget theirs
each round ─ `RemoteOptimizer.rules`: hyperparameters go up before gradients;  `RemoteOptimizer.adopt`: parameters come
back state_dict(), close() ─ `RemoteOptimizer.collect`: the state comes back
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import nn, optim

from foretrain.comm.coordinator.protocol import CoordinatedExchange
from foretrain.comm.ps.client.inflight import Messages, StateTransfer
from foretrain.comm.ps.frames import FrameKind, Header
from foretrain.comm.ps.hyperparameters import Setting, finite
from foretrain.comm.ps.hyperparameters import encode as encode_rules
from foretrain.comm.ps.placement import ELEMENTWISE, Optimized, ShardPart, dtype_name
from foretrain.errors import ConfigError
from foretrain.plugins.torch.deferred_optimizer import DeferredOptimizer, Update, why_not_separable
from foretrain.plugins.torch.gradient_buffer import GradientBuffer
from foretrain.plugins.torch.gradient_dispatcher import GradientDispatcher, GradientLocation
from foretrain.plugins.torch.optimizers import OptimizerHooks
from foretrain.plugins.torch.ps.exchange import ServedExchange
from foretrain.plugins.torch.ps.server.parameter_store import SCALARS, PartState, contents, decode, encode
from foretrain.plugins.torch.streams import HostStreams
from foretrain.schedule import Spec

_LEAST: Final = 256 << 10
"""Bytes of a part at least: an optimizer's call takes 0.1 ms, in which it could have updated as many."""
_MOST: Final = 1 << 20
"""At most: of wide parameters and narrow gradients four times as much is one message."""
_LOOKS: Final = 3
"""Rounds in which every element is compared: what a script does to parameters besides, it does from the start."""
_OWN: Final = frozenset(("foreach", "capturable", "differentiable"))
"""How an optimizer computes, and not what."""
_INSTEAD: Final = "write updates='workers' (--updates workers)"


def refuse(optimizers: Sequence[optim.Optimizer], model: nn.Module) -> None:
    """Raise ConfigError for optimizers that servers cannot run."""
    own = {id(parameter) for parameter in model.parameters()}
    taken: set[int] = set()
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if (reason := why_not_separable(optimizer)) is not None:
            raise ConfigError("optimizer", name, f"cannot run on servers: {reason}", f"{_INSTEAD}, or one of {_KNOWN}")
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if id(parameter) not in own and parameter.numel():
                what = "has parameters that are none of the model's, and servers have only those"
                raise ConfigError("optimizer", name, what, f"give them an optimizer of their own, or {_INSTEAD}")
            if id(parameter) in taken:
                raise ConfigError("optimizer", name, "has a parameter that another has, too", "give it to one")
            taken.add(id(parameter))
        _settings(optimizer)


_KNOWN = ", ".join(ELEMENTWISE)


def part_limit(schedule: Spec) -> int:
    """Return the bytes of a part: as the policy cuts tensors, so that each piece is updated and returned by itself."""
    knobs = schedule.settings
    cut = knobs.get("slice", knobs.get("partition", _MOST))
    return int(min(max(cut, _LEAST), _MOST))


class RemoteOptimizer:
    """Optimizers on the servers: their hyperparameters, and their state when it is asked for.

    Args:
        parameters: indexed by task.
        attachments: of the optimizers, with their tasks.
        consistency: how far workers go apart.
        passes: backward passes of a step: all of them are one round, as what was pushed is applied.

    Attributes:
        optimized: what to declare.
        tasks: of each optimizer.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], attachments: Sequence[OptimizerHooks], consistency: str, passes: int
    ) -> None:
        self.passes = passes
        self._parameters = parameters
        self._optimizers = [attachment.optimizer for attachment in attachments]
        self.tasks = [dict(attachment.tasks) for attachment in attachments]
        self._first = [sum(len(o.param_groups) for o in self._optimizers[:k]) for k in range(len(self._optimizers))]
        owner = {task: place for place, tasks in enumerate(self.tasks) for task in tasks}
        self._owner = [owner.get(task, -1) for task in range(len(parameters))]
        self.optimized = Optimized(
            classes=tuple(type(o).__name__ for o in self._optimizers for _ in o.param_groups),
            group_of=tuple(
                self._first[place] + self.tasks[place][task] if place >= 0 else -1
                for task, place in enumerate(self._owner)
            ),
            dtypes=tuple(dtype_name(parameter.dtype) for parameter in parameters),
            consistency=consistency,
        )
        self._views: Sequence[torch.Tensor] = ()
        self._parts: list[ShardPart] = []
        self._versions = [parameter._version for parameter in parameters]
        self._adopted: set[int] = set()
        self._looks = _LOOKS
        self._announced = [_settings(optimizer) for optimizer in self._optimizers]

    # ── each round ──

    def rules(self) -> bytes:
        """Return the hyperparameters as they are now: those of the round that begins."""
        self._announced = [_settings(optimizer) for optimizer in self._optimizers]
        return encode_rules([group for groups in self._announced for group in groups])

    def check_rules(self, place: int) -> None:
        """Raise ConfigError if hyperparameters of an optimizer have changed since the round began."""
        for before, now in zip(self._announced[place], _settings(self._optimizers[place]), strict=True):
            for name, value in now.items():
                if before[name] != value:
                    what = f"was {before[name]} when backward() began, and servers have updated with that"
                    raise ConfigError(f"optimizer.{name}", value, what, f"change it before backward(), or {_INSTEAD}")

    def check_parameters(self) -> None:
        """Raise ConfigError if the script has written to a parameter that servers update.

        What goes by ``.data`` has no version; that is seen by the values, in the first rounds.
        """
        adopted, self._adopted = (self._adopted if self._looks else set()), set()
        self._looks -= bool(self._looks)
        for task, parameter in enumerate(self._parameters):
            known = parameter._version == self._versions[task]
            if known and task in adopted:
                known = torch.allclose(parameter.detach(), self._views[task], 0, 0, equal_nan=True)
            if self._owner[task] >= 0 and not known:
                what = f"of shape {tuple(parameter.shape)} was written to, and servers do not know"
                remedy = f"load a model before attach(), or close() and attach it again; else {_INSTEAD}"
                raise ConfigError("parameter", f"task {task}", what, remedy)

    def adopt(self, update: Update, members: Sequence[tuple[int, nn.Parameter]]) -> None:
        """Set ``members``, each with its task, to what the servers have made of them."""
        with torch.no_grad():
            for task, parameter in members:
                parameter.copy_(self._views[task])
                self._versions[task] = parameter._version
                self._adopted.add(task)

    # ── beginning and end ──

    def begin(self, exchange: ServedExchange, views: Sequence[torch.Tensor], check: Check, *, seeds: bool) -> None:
        """Send rounds over ``exchange`` from now on; what comes back is in ``views``.

        ``check`` raises what has ended the job, if anything has. Of all workers one ``seeds`` the servers: tells them
        what to begin with.
        """
        self._views, self._exchange, self._check = views, exchange, check
        self._parts = [part for part in exchange.placement.parts if self._owner[part.task] >= 0]
        if seeds:
            sizes = _sizes(self._parts)
            # Parts of a task are neighbours.
            whole = lru_cache(1)(self._contents)
            self._ask(lambda part: _seed(part, _cut(whole(part.task), part, sizes[part.task])), self._parts)

    def _ask(self, messages: Messages, parts: Sequence[ShardPart]) -> dict[int, list[bytes]]:
        transfer = StateTransfer(parts, messages)
        self._exchange.ask(transfer)
        return transfer.wait(self._check)

    def forget(self, *places: int) -> None:
        """Drop the local state of these optimizers, or of all: the servers have it."""
        for place in places or range(len(self.tasks)):
            for task in self.tasks[place]:
                self._optimizers[place].state.pop(self._parameters[task], None)

    def collect(self, places: Iterable[int], *, adopt: bool = False) -> None:
        """Fetch the state of these optimizers; with ``adopt`` the parameters as well, as they are now."""
        tasks = {task: place for place in places for task in self.tasks[place]}
        parts = [part for part in self._parts if part.task in tasks]
        frames = self._ask(lambda part: [(Header(FrameKind.GET_STATE, part=part.number), b"")], parts)
        found: dict[int, list[PartState]] = {task: [] for task in tasks}
        for part in parts:
            found[part.task].append(decode(frames.pop(part.number)))
        for task, place in tasks.items():
            self._give_back(task, place, _joined(found[task]), adopt=adopt)

    def _contents(self, task: int) -> PartState:
        """Return the state of a whole task, flat."""
        parameter = self._parameters[task]
        state = self._optimizers[self._owner[task]].state.get(parameter, {})
        flat = {
            name: value if name in SCALARS or value is None else _flat(parameter, value)
            for name, value in state.items()
        }
        return contents(_flat(parameter, parameter.detach()), flat)

    def _give_back(self, task: int, place: int, found: PartState, *, adopt: bool) -> None:
        parameter, optimizer = self._parameters[task], self._optimizers[place]
        group = optimizer.param_groups[self.tasks[place][task]]
        there = group.get("capturable") or group.get("fused") or isinstance(optimizer, optim.ASGD)
        device = parameter.device if there else torch.device("cpu")
        state: dict[str, Any] = {
            name: value.to(device) if name in SCALARS else _shaped(parameter, value)
            for name, value in found.state.items()
        }
        if state:
            optimizer.state[parameter] = state
        if adopt:
            with torch.no_grad():
                parameter.copy_(_shaped(parameter, found.parameter))
            self._versions[task] = parameter._version


Check = Callable[[], None]
"""Raises what has ended the job, if anything has."""


def _settings(optimizer: optim.Optimizer) -> list[dict[str, Setting]]:
    """Return the settings of each parameter group for the servers."""
    return [
        {name: _plain(name, group[name]) for name in optimizer.defaults if name not in _OWN}
        for group in optimizer.param_groups
    ]


def _plain(name: str, value: Any) -> Setting:
    if isinstance(value, torch.Tensor):
        value = value.item()
    elif isinstance(value, tuple | list):
        value = tuple(each.item() if isinstance(each, torch.Tensor) else each for each in value)
    numbers = value if isinstance(value, tuple) else (0 if value is None else value,)
    if not all(isinstance(each, bool | int | float) for each in numbers) or not finite(value):
        raise ConfigError(f"optimizer.{name}", value, "is nothing that servers can be told", _INSTEAD)
    return value


def _flat(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, of the shape of ``parameter``, on the host and in the order in which it is exchanged."""
    like = torch.empty_strided(parameter.shape, parameter.stride(), dtype=tensor.dtype, device=tensor.device)
    buffers = GradientBuffer([like], [0])
    buffers.views[0].copy_(tensor)
    return buffers.flat[0].cpu()


def _shaped(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Return the inverse of `_flat`, on the device of ``parameter``."""
    like = torch.empty_strided(parameter.shape, parameter.stride(), dtype=flat.dtype, device=parameter.device)
    buffers = GradientBuffer([like], [0])
    buffers.flat[0].copy_(flat)
    return buffers.views[0]


def _sizes(parts: Iterable[ShardPart]) -> dict[int, int]:
    """Return the bytes of each task."""
    sizes: dict[int, int] = {}
    for part in parts:
        sizes[part.task] = sizes.get(part.task, 0) + part.size
    return sizes


def _cut(whole: PartState, part: ShardPart, size: int) -> PartState:
    """Return the elements of ``part`` of a task of ``size`` bytes on the wire."""
    width = size // len(whole.parameter)
    place = slice(part.offset // width, (part.offset + part.size) // width)
    state = {name: value if name in SCALARS else value[place] for name, value in whole.state.items()}
    return PartState(whole.parameter[place], state)


def _joined(parts: Sequence[PartState]) -> PartState:
    """Return a task made of its parts, in order; counters are the first's."""
    first = parts[0]
    state = {
        name: value if name in SCALARS else torch.cat([part.state[name] for part in parts])
        for name, value in first.state.items()
        if all(name in part.state for part in parts)
    }
    return PartState(torch.cat([part.parameter for part in parts]), state)


def _seed(part: ShardPart, found: PartState) -> list[tuple[Header, bytes]]:
    frames = encode(found)
    return [
        (Header(FrameKind.INIT, part=part.number, step=number, offset=len(frames), size=len(frame)), frame)
        for number, frame in enumerate(frames)
    ]


_SERVER_REMEDY: Final = "write updates='workers' (--updates workers)"


class _Gone:
    """A `guards.Holder` of gradients that nobody can have back."""

    def __init__(self, scheduled: RemoteDispatcher) -> None:
        self._scheduled = scheduled

    def fetch(self) -> None:
        """Refuse that the script reads ``.grad``."""
        what = "is read (to clip or log its norm, or by a GradScaler?), and servers have updated with it already"
        raise ConfigError("gradient", ".grad", what, f"do without, or {_SERVER_REMEDY}")

    def drop(self, key: int, zeros: bool) -> None:
        """Note that the gradient was cleared."""
        self._scheduled.drop(key, zeros)


class RemoteDispatcher(GradientDispatcher):
    """`GradientDispatcher` for servers that update. Every round is one step.

    Args:
        parameters: indexed by task.
        gradients: their flat buffers; parameters come back in them.
        fires: per task, how often its gradient accumulates in one backward pass before it is complete.
        passes: backward passes per step, to begin with.
        exchange: told what is ready.
        updates: puts parameters in their places.
        streams: of the model's device.
        ranks: by how much gradients are divided: N, or 1 where each worker's are an update of their own.
        remote: the optimizers.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: GradientBuffer,
        fires: Sequence[int],
        passes: int,
        exchange: CoordinatedExchange,
        updates: DeferredOptimizer,
        streams: HostStreams,
        ranks: int,
        remote: RemoteOptimizer,
    ) -> None:
        super().__init__(parameters, gradients, fires, passes, exchange, updates, streams, ranks)
        self._remote = remote
        self._everything = dict.fromkeys(self._everything, _Gone(self))
        self._places = {place for place, tasks in enumerate(remote.tasks) if tasks}

    def fetch(self) -> None:
        """Wait until everything that was pushed has come back and is in its place."""
        self.finish()
        self._updates.wait_all()
        self.settled()

    def _begin(self) -> None:
        self.settled()
        for tasks in self._remote.tasks:
            for task in tasks:
                self._check_cleared(task)
        self._updates.wait_wanted()
        self._remote.check_parameters()
        super()._begin()

    def _recall(self, task: int) -> None:
        self._check_cleared(task)
        super()._recall(task)

    def _check_cleared(self, task: int) -> None:
        if self._held[task] is not GradientLocation.NO:
            what = "was not cleared, and the sum to add to is gone: servers have updated with it"
            raise ConfigError("gradient", f"task {task}", what, f"call zero_grad() in every step, or {_SERVER_REMEDY}")

    def settled(self) -> None:
        """Raise ConfigError if servers have updated with gradients for which step() was not called."""
        if self.rounds and self._stepped != self._places:
            again = "all optimizers step once after each backward(), or after as many as in the first steps"
            what = "was not called for gradients with which servers have updated"
            raise ConfigError("optimizer.step()", "", what, f"see to it that {again}; or {_SERVER_REMEDY}")

    def step(self, place: int, optimizer: optim.Optimizer, tasks: dict[int, int]) -> bool:
        """Use parameters as they come back from here on; return True, as nothing is left to do here."""
        self._remote.check_rules(place)
        return super().step(place, optimizer, tasks)

    def _step_now(self) -> bool:
        what = "steps with other gradients than the last backward() has made: they were cleared, or put there"
        raise ConfigError(
            "optimizer", "step()", what, f"call backward(), step() and zero_grad() in turn, or {_SERVER_REMEDY}"
        )
