"""Worker's side of optimizers that run on the servers, and the dispatcher of its gradients.

attach ─ `refuse`: only optimizers that servers can run
first scheduled step ─ `RemoteOptimizer.begin`: rank 0 sends parameters and optimizer state, all ranks drop theirs
each round ─ `RemoteOptimizer.hyperparameters`: sent before gradients; `RemoteOptimizer.adopt`: parameters come back
state_dict(), close() ─ `RemoteOptimizer.collect`: the state comes back
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import nn, optim

from foretrain.comm.ps.client.exchange import ServedExchange
from foretrain.comm.ps.client.inflight import Messages, StateTransfer
from foretrain.comm.ps.consistency import Setting, encode_groups, finite
from foretrain.comm.ps.frames import FrameKind, Header
from foretrain.comm.ps.placement import ELEMENTWISE, Optimized, ShardPart, dtype_name
from foretrain.errors import ConfigError
from foretrain.plugins.torch.deferred_optimizer import Update, why_not_separable
from foretrain.plugins.torch.gradient_buffer import GradientBuffer
from foretrain.plugins.torch.gradient_dispatcher import GradientDispatcher, GradientLocation
from foretrain.plugins.torch.optimizers import OptimizerHooks
from foretrain.plugins.torch.ps.server.parameter_store import SCALARS, PartState, contents, decode, encode

_MIN_PART: Final = 256 << 10
"""Least bytes of a part: an optimizer's call takes 0.1 ms, in which it could have updated as many."""
_MAX_PART: Final = 1 << 20
"""Most bytes of a part: with wide parameters and narrow gradients, a message has four times as many."""
_COMPARED_ROUNDS: Final = 3
"""Rounds in which every element is compared: scripts that write to parameters do so from the start."""
_IMPLEMENTATION_OPTIONS: Final = frozenset(("foreach", "capturable", "differentiable"))
"""Options of an optimizer that do not change its results."""
_REMEDY: Final = "write updates='workers'"


def refuse(optimizers: Sequence[optim.Optimizer], model: nn.Module) -> None:
    """Raise ConfigError for optimizers that servers cannot run."""
    own = {id(parameter) for parameter in model.parameters()}
    taken: set[int] = set()
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if (reason := why_not_separable(optimizer)) is not None:
            remedy = f"{_REMEDY}, or one of {', '.join(ELEMENTWISE)}"
            raise ConfigError("optimizer", name, f"cannot run on servers: {reason}", remedy)
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if id(parameter) not in own and parameter.numel():
                what = "has parameters that are none of the model's, and servers have only those"
                raise ConfigError("optimizer", name, what, f"give them an optimizer of their own, or {_REMEDY}")
            if id(parameter) in taken:
                raise ConfigError("optimizer", name, "has a parameter that another has, too", "give it to one")
            taken.add(id(parameter))
        _settings(optimizer)


def updated_part_limit(knobs: Mapping[str, float], shards: int) -> int:
    """Return the most bytes of a part: as a policy with these ``knobs`` cuts tensors, or less, where each of its pieces
    is to be on all of ``shards``. So each is updated and returned alone."""
    cut = knobs["slice"] if "slice" in knobs else knobs.get("partition", _MAX_PART) / shards
    return int(min(max(cut, _MIN_PART), _MAX_PART))


class RemoteOptimizer:
    """Optimizers on the servers: sends their hyperparameters, fetches their state.

    Args:
        parameters: indexed by task.
        attachments: of the optimizers, with their tasks.
        consistency: of the workers, e.g. "bsp".
        passes: backward passes of a step: all of them are one round, since pushed gradients are applied.

    Attributes:
        optimized: for the declaration to the servers.
        tasks: of each optimizer.
        lossy: whether parameters here may be others than the servers', of which some is lost on the way.
    """

    lossy = False

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
        self._compared_rounds = _COMPARED_ROUNDS
        self._announced = [_settings(optimizer) for optimizer in self._optimizers]

    # ── each round ──

    def hyperparameters(self) -> bytes:
        """Return the encoded hyperparameters of the round that begins: the current ones."""
        return encode_groups(self._announce())

    def _announce(self) -> list[dict[str, Setting]]:
        """Return the current hyperparameters of all groups, which hold from now on."""
        self._announced = [_settings(optimizer) for optimizer in self._optimizers]
        return [group for groups in self._announced for group in groups]

    def begin_round(self) -> None:
        """Do nothing: the exchange asks for `hyperparameters` when a round begins."""

    def check_hyperparameters(self, place: int) -> None:
        """Raise ConfigError if hyperparameters of an optimizer have changed since the round began."""
        for before, now in zip(self._announced[place], _settings(self._optimizers[place]), strict=True):
            for name, value in now.items():
                if before[name] != value:
                    what = f"was {before[name]} when backward() began, and servers have updated with that"
                    raise ConfigError(f"optimizer.{name}", value, what, f"change it before backward(), or {_REMEDY}")

    def check_parameters(self) -> None:
        """Raise ConfigError if the script has written to a parameter that servers update.

        Writes to ``.data`` change no version, so the first rounds compare values.
        """
        adopted, self._adopted = (self._adopted if self._compared_rounds else set()), set()
        self._compared_rounds -= bool(self._compared_rounds)
        for task, parameter in enumerate(self._parameters):
            known = parameter._version == self._versions[task]
            if known and task in adopted:
                known = torch.allclose(parameter.detach(), self._views[task], 0, 0, equal_nan=True)
            if self._owner[task] >= 0 and not known:
                what = f"of shape {tuple(parameter.shape)} was written to, and servers do not know"
                remedy = f"load a model before attach(), or close() and attach it again; else {_REMEDY}"
                raise ConfigError("parameter", f"task {task}", what, remedy)

    def adopt(self, update: Update, members: Sequence[tuple[int, nn.Parameter]]) -> None:
        """Set ``members``, each with its task, to the servers' parameters."""
        with torch.no_grad():
            for task, parameter in members:
                parameter.copy_(self._views[task])
                self._versions[task] = parameter._version
                self._adopted.add(task)

    # ── state ──

    def begin(
        self, exchange: ServedExchange, views: Sequence[torch.Tensor], check: Callable[[], None], *, seeds: bool
    ) -> None:
        """Use ``exchange`` from now on; parameters come back in ``views``.

        ``check`` raises the error that has ended the job, if any. One worker ``seeds`` the servers: it sends the
        initial state.
        """
        self._views, self._exchange, self._check = views, exchange, check
        self._parts = [part for part in exchange.placement.parts if self._owner[part.task] >= 0]
        if seeds:
            sizes = Counter[int]()
            for part in self._parts:
                sizes[part.task] += part.size
            # Parts of a task follow each other.
            whole = lru_cache(1)(self._task_state)
            self._ask(lambda part: _seed(part, _cut(whole(part.task), part, sizes[part.task])), self._parts)

    def _ask(self, messages: Messages, parts: Sequence[ShardPart]) -> dict[int, list[bytes]]:
        transfer = StateTransfer(parts, messages)
        self._exchange.ask(transfer)
        return transfer.wait(self._check)

    def forget(self, *places: int) -> None:
        """Drop the local state of these optimizers, or of all, which the servers have."""
        for place in places or range(len(self.tasks)):
            for task in self.tasks[place]:
                self._optimizers[place].state.pop(self._parameters[task], None)

    def collect(self, places: Iterable[int], *, adopt: bool = False) -> None:
        """Fetch the state of these optimizers, and with ``adopt`` the parameters."""
        tasks = {task: place for place in places for task in self.tasks[place]}
        for task, found in self._fetched(list(tasks)):
            self._restore(task, tasks[task], found, adopt=adopt)

    def recover(self) -> None:
        """Do nothing: all that servers sent has arrived."""

    def _fetched(self, tasks: Collection[int]) -> Iterator[tuple[int, PartState]]:
        """Yield each of ``tasks`` with its parameters and state on the servers."""
        parts = [part for part in self._parts if part.task in tasks]
        frames = self._ask(lambda part: [(Header(FrameKind.GET_STATE, part=part.number), b"")], parts)
        found: dict[int, list[PartState]] = {task: [] for task in tasks}
        for part in parts:
            found[part.task].append(decode(frames.pop(part.number)))
        for task in tasks:
            yield task, _joined(found.pop(task))

    def _task_state(self, task: int) -> PartState:
        """Return the state of a whole task, flat."""
        parameter = self._parameters[task]
        state = self._optimizers[self._owner[task]].state.get(parameter, {})
        flat = {
            name: value if name in SCALARS or value is None else _flat(parameter, value)
            for name, value in state.items()
        }
        return contents(_flat(parameter, parameter.detach()), flat)

    def _restore(self, task: int, place: int, found: PartState, *, adopt: bool) -> None:
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
            self._set_parameter(task, found)

    def _set_parameter(self, task: int, found: PartState) -> None:
        parameter = self._parameters[task]
        with torch.no_grad():
            parameter.copy_(_shaped(parameter, found.parameter))
        self._versions[task] = parameter._version


def _settings(optimizer: optim.Optimizer) -> list[dict[str, Setting]]:
    """Return the settings of each parameter group for the servers."""
    return [
        {name: _to_setting(name, group[name]) for name in optimizer.defaults if name not in _IMPLEMENTATION_OPTIONS}
        for group in optimizer.param_groups
    ]


def _to_setting(name: str, value: Any) -> Setting:
    if isinstance(value, torch.Tensor):
        value = value.item()
    elif isinstance(value, tuple | list):
        value = tuple(each.item() if isinstance(each, torch.Tensor) else each for each in value)
    numbers = value if isinstance(value, tuple) else (0 if value is None else value,)
    if not all(isinstance(each, bool | int | float) for each in numbers) or not finite(value):
        raise ConfigError(f"optimizer.{name}", value, "is nothing that servers can be told", _REMEDY)
    return value


def _flat(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, of the shape of ``parameter``, on the host and in the order in which it is exchanged."""
    buffer = _buffer(parameter, tensor.dtype, tensor.device)
    buffer.views[0].copy_(tensor)
    return buffer.flat[0].cpu()


def _shaped(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Return the inverse of `_flat`, on the device of ``parameter``."""
    buffer = _buffer(parameter, flat.dtype, parameter.device)
    buffer.flat[0].copy_(flat)
    return buffer.views[0]


def _buffer(parameter: torch.Tensor, dtype: torch.dtype, device: torch.device) -> GradientBuffer:
    """Return a buffer for one tensor with the shape and layout of ``parameter``."""
    return GradientBuffer([torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype, device=device)], [0])


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


class _AppliedGradients:
    """`access_guards.GradientOwner` of gradients that servers have applied, and that cannot be fetched."""

    def __init__(self, scheduled: RemoteDispatcher) -> None:
        self._scheduled = scheduled

    def fetch(self) -> None:
        """Raise ConfigError: the script reads ``.grad``."""
        what = "is read (to clip or log its norm, or by a GradScaler?), and servers have updated with it already"
        raise ConfigError("gradient", ".grad", what, f"do without, or {_REMEDY}")

    def drop(self, key: int, zeros: bool) -> None:
        """Record that the gradient was cleared."""
        self._scheduled.drop(key, zeros)


class RemoteDispatcher(GradientDispatcher):
    """`GradientDispatcher` for servers that update. Every round is one step, and parameters come back in the buffers.

    Args:
        remote: the optimizers.
        arguments: of `GradientDispatcher`.
    """

    def __init__(self, remote: RemoteOptimizer, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._remote = remote
        self._everything = dict.fromkeys(self._everything, _AppliedGradients(self))
        self._places = {place for place, tasks in enumerate(remote.tasks) if tasks}

    def fetch(self) -> None:
        """Wait until all pushed parameters have come back and are adopted."""
        self.finish()
        self._updates.wait_all()
        self.check_stepped()

    def _begin(self) -> None:
        self.check_stepped()
        for tasks in self._remote.tasks:
            for task in tasks:
                self._check_cleared(task)
        self._updates.wait_wanted()
        self._remote.check_parameters()
        self._remote.begin_round()
        super()._begin()

    def _recall(self, task: int) -> None:
        self._check_cleared(task)
        super()._recall(task)

    def _check_cleared(self, task: int) -> None:
        if self._location[task] is not GradientLocation.GRAD:
            what = "was not cleared, and the sum to add to is gone: servers have updated with it"
            raise ConfigError("gradient", f"task {task}", what, f"call zero_grad() in every step, or {_REMEDY}")

    @property
    def all_stepped(self) -> bool:
        """Return whether step() was called for all gradients with which servers may have updated."""
        nothing_sent = self._open and not any(self._sent)  # gradients are accumulated first
        return not self.rounds or self._stepped == self._places or nothing_sent

    def check_stepped(self) -> None:
        """Raise ConfigError if servers have updated with gradients for which step() was not called."""
        if not self.all_stepped:
            rule = "all optimizers step once after each backward(), or after as many as in the first steps"
            what = "was not called for gradients with which servers have updated"
            raise ConfigError("optimizer.step()", "", what, f"see to it that {rule}; or {_REMEDY}")

    def step(self, place: int, optimizer: optim.Optimizer, tasks: dict[int, int]) -> bool:
        """Use the parameters that come back from here on; return True, since nothing is left to do here."""
        self._remote.check_hyperparameters(place)
        return super().step(place, optimizer, tasks)

    def _step_now(self) -> bool:
        what = "steps with other gradients than the last backward() has made: they were cleared, or put there"
        raise ConfigError("optimizer", "step()", what, f"call backward(), step() and zero_grad() in turn, or {_REMEDY}")
