"""Parameters of a shard, the optimizers that update them part by part, and their encoding as frames, without pickle.

Each optimizer is PyTorch's own, and sees one part at a time as if it were a whole parameter. The bits are the same,
because servers only run optimizers that treat each element by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import optim

from foretrain.comm.ps.consistency import Group
from foretrain.comm.ps.frames import Malformed
from foretrain.comm.ps.placement import WIDTHS, Declared, Optimized, ShardPart
from foretrain.errors import ForetrainError

_IMPLEMENTATION: Final = {"foreach": False, "capturable": False, "differentiable": False}
"""Options of optimizers here, whatever they are on the workers: the same arithmetic, for one tensor on a CPU."""


class ParameterStore:
    """Parameters and optimizers of a shard's parts.

    Args:
        parts: of this shard.
        tasks: of the whole job.
        optimized: the optimizer of each task.
    """

    def __init__(self, parts: Iterable[ShardPart], tasks: Sequence[Declared], optimized: Optimized) -> None:
        self._parts = {part.number: part for part in parts}
        self._tasks, self._optimized = tasks, optimized
        self._optimizers: list[optim.Optimizer] = [
            getattr(optim, name)([torch.nn.Parameter(torch.empty(0))]) for name in optimized.classes
        ]
        for optimizer in self._optimizers:
            optimizer.state.clear()
        self._parameters: dict[int, torch.nn.Parameter] = {}
        self._begun: dict[int, _Begun] = {}
        """Parts of which some elements are a step ahead of the others."""
        self._answers: dict[int, memoryview] = {}
        """Copies of the current bytes of parts, so that a message in flight never changes."""

    def group_of(self, part: int) -> int:
        """Return the index of the parameter group of ``part``; −1 if it has none."""
        return self._optimized.group_of[self._parts[part].task]

    def dtype(self, part: int) -> torch.dtype:
        """Return the type of the parameters of ``part``."""
        return getattr(torch, self._optimized.dtypes[self._parts[part].task])

    def seeded(self, part: int) -> bool:
        """Return whether the initial state of ``part`` is known."""
        return part in self._parameters

    def load(self, part: int, found: PartState) -> None:
        """Set the state of ``part``; `Malformed` if it has another size or type."""
        here = self._parts.get(part)
        group = self.group_of(part) if here is not None else -1
        if here is None or group < 0:
            raise Malformed("part", f"the state of part {part}, which is not updated here")
        declared = self._tasks[here.task]
        kind = self.dtype(part)
        count = here.size // WIDTHS[declared.dtype]
        if found.parameter.dtype != kind or len(found.parameter) != count:
            raise Malformed("state", f"{len(found.parameter)} {found.parameter.dtype} for {count} {kind}")
        optimizer = self._optimizers[group]
        if (before := self._parameters.pop(part, None)) is not None:
            optimizer.state.pop(before, None)
        parameter = self._parameters[part] = torch.nn.Parameter(found.parameter)
        if found.state:
            optimizer.state[parameter] = dict(found.state)
        self._answers.pop(part, None)

    def contents(self, part: int) -> PartState:
        """Return the state of ``part``; not a copy."""
        parameter = self._parameters[part]
        return contents(parameter.detach(), self._optimizers[self.group_of(part)].state.get(parameter, {}))

    def update(self, part: int, gradient: torch.Tensor, groups: Sequence[Group]) -> None:
        """Run one step of the optimizer of ``part`` with ``gradient`` and the hyperparameters in ``groups``.

        Raises:
            ForetrainError: the optimizer did.
        """
        self._step(part, self._parameters[part], gradient, groups)
        self._answers.pop(part, None)

    def update_slice(self, part: int, elements: slice, gradient: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        """Run `update` on some ``elements`` of ``part`` alone, and return these; every step updates each once.

        Counters of the optimizer, such as Adam's step, advance with a step's last elements.
        """
        whole, optimizer = self._parameters[part], self._optimizers[self.group_of(part)]
        begun = self._begun.get(part) or _Begun(optimizer.state.pop(whole, {}), {}, 0)
        piece = torch.nn.Parameter(whole.detach()[elements])
        optimizer.state[piece] = {
            name: value.clone() if name in SCALARS else value[elements] for name, value in begun.before.items()
        }
        self._step(part, piece, gradient, groups)
        for name, value in optimizer.state.pop(piece, {}).items():
            if name in SCALARS:
                begun.after[name] = value
            elif value is not None:
                if name not in begun.after:
                    known = begun.before.get(name)
                    begun.after[name] = torch.zeros(len(whole), dtype=value.dtype) if known is None else known
                begun.after[name][elements] = value
        begun = begun._replace(updated=begun.updated + len(piece))
        self._begun[part] = begun
        if begun.updated == len(whole):
            del self._begun[part]
            optimizer.state[whole] = begun.after
        return piece.detach()

    def _step(self, part: int, parameter: torch.nn.Parameter, gradient: torch.Tensor, groups: Sequence[Group]) -> None:
        group = self.group_of(part)
        optimizer = self._optimizers[group]
        known = optimizer.defaults
        settings = {name: value for name, value in (groups[group] | _IMPLEMENTATION).items() if name in known}
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.param_groups = [{**known, **settings, "params": [parameter]}]
        try:
            optimizer.step()
        except Exception as error:
            name = self._tasks[self._parts[part].task].name
            raise ForetrainError(f"the optimizer of {name!r} failed on its server: {error!r}") from error
        finally:
            parameter.grad = None

    def answer(self, part: int, start: int, end: int) -> memoryview:
        """Return a copy of the parameters of gradient bytes ``[start, end)`` of ``part``."""
        if part not in self._answers:
            self._answers[part] = memoryview(bytes_of(self._parameters[part]))
        here = self._parts[part]
        wide, narrow = WIDTHS[self._optimized.dtypes[here.task]], WIDTHS[self._tasks[here.task].dtype]
        return self._answers[part][start // narrow * wide : end // narrow * wide]

    def state(self) -> dict[int, dict[str, Any]]:
        """Return the parameters and optimizer state of each part; not copies."""
        return {
            part: {
                "parameter": to_plain(found.parameter),
                "state": {name: to_plain(value) for name, value in found.state.items()},
            }
            for part in sorted(self._parameters)
            for found in (self.contents(part),)
        }

    def restore(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore the state that `state` returned."""
        for part, found in state.items():
            tensors = {name: from_plain(value) for name, value in found["state"].items()}
            self.load(part, PartState(from_plain(found["parameter"]), tensors))


SCALARS: Final = frozenset(("step", "mu_product", "eta", "mu"))
"""Names of optimizer state that is one number for a tensor of any shape."""
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)
}


class _Begun(NamedTuple):
    """Part some of whose elements a step has updated.

    Attributes:
        before: the optimizer's state before the step; its tensors change where elements are updated.
        after: the state after the step.
        updated: elements.
    """

    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    updated: int


class PartState(NamedTuple):
    """Parameters of a part and the state of its optimizer.

    Attributes:
        parameter: one-dimensional, on the host.
        state: the optimizer's: a number for each of `SCALARS`, else a tensor as long as ``parameter``.
    """

    parameter: torch.Tensor
    state: dict[str, torch.Tensor]


class _Described(msgspec.Struct, frozen=True):
    dtype: str
    scalars: dict[str, tuple[str, float]]
    tensors: tuple[tuple[str, str], ...]


def contents(parameter: torch.Tensor, state: Mapping[str, Any]) -> PartState:
    """Return ``parameter``, one-dimensional, and its optimizer state; None values are left out."""
    kept = {
        name: torch.as_tensor(value, dtype=None if isinstance(value, torch.Tensor) else torch.float32)
        for name, value in state.items()
        if value is not None
    }
    return PartState(parameter, kept)


def encode(found: PartState) -> list[bytes]:
    """Return the frames of a part."""
    tensors = {name: tensor for name, tensor in found.state.items() if name not in SCALARS}
    scalars = {name: (_name(value), float(value)) for name, value in found.state.items() if name in SCALARS}
    described = _Described(_name(found.parameter), scalars, tuple((name, _name(t)) for name, t in tensors.items()))
    return [msgspec.json.encode(described), *(bytes_of(tensor) for tensor in (found.parameter, *tensors.values()))]


def decode(frames: Sequence[bytes]) -> PartState:
    """Return a part from its frames, at least one; `Malformed` if they cannot be parsed."""
    try:
        described = msgspec.json.decode(frames[0], type=_Described)
    except msgspec.MsgspecError as error:
        raise Malformed("state", f"a part's state that does not read: {error}") from None
    if len(frames) != 2 + len(described.tensors):
        raise Malformed("state", f"{len(frames)} frames of a part with {len(described.tensors)} tensors")
    parameter = _tensor(frames[1], described.dtype)
    state = {name: torch.tensor(value, dtype=_dtype(kind)) for name, (kind, value) in described.scalars.items()}
    for (name, kind), frame in zip(described.tensors, frames[2:], strict=True):
        state[name] = _tensor(frame, kind)
        if len(state[name]) != len(parameter):
            raise Malformed("state", f"{len(state[name])} elements of {name!r} for {len(parameter)} parameters")
    return PartState(parameter, state)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a copy of the memory of ``tensor``, one-dimensional and on the host."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def to_plain(tensor: torch.Tensor) -> dict[str, Any]:
    """Return ``tensor`` as snapshots take it: its dtype, its shape, and its bytes as a numpy array."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return {"dtype": _name(tensor), "shape": list(tensor.shape), "bytes": raw}


def from_plain(plain: Mapping[str, Any]) -> torch.Tensor:
    """Return a copy of the tensor from which `to_plain` made ``plain``."""
    return _tensor(plain["bytes"].tobytes(), plain["dtype"]).reshape(plain["shape"])


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise Malformed("state", f"elements of type {name!r}")
    return _DTYPES[name]


def _tensor(frame: bytes, kind: str) -> torch.Tensor:
    dtype = _dtype(kind)
    if len(frame) % dtype.itemsize:
        raise Malformed("state", f"{len(frame)} bytes of {kind}")
    return torch.frombuffer(bytearray(frame), dtype=dtype) if frame else torch.empty(0, dtype=dtype)
