"""What a part is where servers update it, and as frames: its parameters and its optimizer's state. Never pickled.

frame 0    JSON: names and types of what follows; counters of steps and the like, as numbers
frame 1    the parameters' bytes
frame 2…   the bytes of each tensor of the optimizer's state, as long as the parameters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import torch

from foretrain.comm.ps.frames import Malformed

SCALARS: Final = frozenset(("step", "mu_product", "eta", "mu"))
"""What optimizers keep once for a tensor, whatever its shape."""
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)
}


class PartState(NamedTuple):
    """A part.

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
    """``parameter``, one-dimensional, and what an optimizer keeps for it; what is None it does not keep."""
    kept = {
        name: torch.as_tensor(value, dtype=None if isinstance(value, torch.Tensor) else torch.float32)
        for name, value in state.items()
        if value is not None
    }
    return PartState(parameter, kept)


def encode(found: PartState) -> list[bytes]:
    """Frames of a part."""
    tensors = {name: tensor for name, tensor in found.state.items() if name not in SCALARS}
    scalars = {name: (_name(value), float(value)) for name, value in found.state.items() if name in SCALARS}
    described = _Described(_name(found.parameter), scalars, tuple((name, _name(t)) for name, t in tensors.items()))
    return [msgspec.json.encode(described), *(bytes_of(tensor) for tensor in (found.parameter, *tensors.values()))]


def decode(frames: Sequence[bytes]) -> PartState:
    """A part from its frames, of which the first is there; `Malformed` where they do not read."""
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
    """A copy of the memory of ``tensor``, one-dimensional and on the host."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def to_plain(tensor: torch.Tensor) -> dict[str, Any]:
    """Return ``tensor`` as snapshots take it: its dtype, its shape, and its bytes as a numpy array."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return {"dtype": _name(tensor), "shape": list(tensor.shape), "bytes": raw}


def from_plain(plain: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor of which `to_plain` made ``plain``, as a copy."""
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
