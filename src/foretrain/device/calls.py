"""Operator calls as data and as text: an operator, the metadata of its tensors, and its other arguments.

    {"call": "aten::addmm", "arguments": ["float32[512]", "float32[64, 256]", "float32[256, 512]:1,256", 1, 1]}

A tensor is its metadata, from which a kernel's memory traffic is counted without torch. It is written as its type and
shape, with its strides behind a colon unless it lies row by row, and with ``host`` before it if it is in the host's
memory while the operator runs on a GPU. Lists are lists, an absent argument is null. Numbers that are not whole tell
how an operator computes, not how long it takes: two calls that differ only in them are one (`OperatorCall.key`), since
a learning rate or Adam's corrections change with every step.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from foretrain.device.work import Format
from foretrain.errors import ConfigError
from foretrain.files import write_atomically

_SIZES = {
    "float64": 8, "complex64": 8, "int64": 8, "uint64": 8, "complex128": 16,
    "float32": 4, "int32": 4, "uint32": 4, "complex32": 4, "qint32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
}  # fmt: skip
"""Bytes of an element of those dtypes that have more than one."""

_FORMATS: dict[str, Format] = {
    "float64": "fp64",
    "complex128": "fp64",
    "float32": "fp32",
    "complex64": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "int8": "int8",
    "uint8": "int8",
    "float4_e2m1fn_x2": "fp4",
}


class Meta(NamedTuple):
    """A tensor without its values.

    Attributes:
        shape: elements along each dimension.
        stride: elements from one to the next; 0 along a broadcast dimension.
        dtype: as torch prints it, without ``torch.``.
        device: ``"cuda:0"``, ``"cpu"``.
        pinned: host memory whose pages cannot be swapped out.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str = "cuda:0"
    pinned: bool = False


def contiguous(shape: tuple[int, ...], dtype: str = "bfloat16", device: str = "cuda:0") -> Meta:
    """Return a tensor laid out row by row."""
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Meta(shape, stride, dtype, device)


def elements(tensor: Meta) -> int:
    """Return how many numbers the tensor shows."""
    return math.prod(tensor.shape)


def stored(tensor: Meta) -> int:
    """Return how many numbers a kernel that reads all of it fetches: broadcast ones once."""
    return math.prod(size for size, step in zip(tensor.shape, tensor.stride, strict=True) if step or size == 0)


def element_bytes(tensor: Meta) -> int:
    """Return the bytes of one element; two numbers of 4 bits are one element."""
    return _SIZES.get(tensor.dtype, 1)


def moved(*tensors: Meta | None) -> int:
    """Return the bytes that reading or writing each tensor once moves."""
    return sum(stored(tensor) * element_bytes(tensor) for tensor in tensors if tensor is not None)


def tensors_in(values: object) -> Iterator[Meta]:
    """Yield every tensor among arguments or results, also inside lists."""
    if isinstance(values, Meta):
        yield values
    elif isinstance(values, tuple):
        for value in values:
            yield from tensors_in(value)


def number_format(tensor: Meta) -> Format:
    """Return the number format that a matrix product with such factors is computed in."""
    return "fp8" if tensor.dtype.startswith("float8") else _FORMATS.get(tensor.dtype, "fp32")


VERSION: Final = 1
_TENSOR = re.compile(r"(host )?([a-z]\w*)\[((?:\d+(?:, ?\d+)*)?)\](?::(\d+(?:,\d+)*))?")
_RECORD = "record them with 'foretrain simulate --record-operators FILE -- train.py'"


@dataclass(frozen=True)
class OperatorCall:
    """An operator and what it is called with.

    Attributes:
        operator: with its namespace, without an overload, e.g. ``"aten::addmm"``; copies between host and GPU are
            called as traces call them, ``"Memcpy HtoD (Pageable -> Device)"``.
        arguments: in the schema's order: tensors as `Meta`, lists as tuples, an absent one as None.
    """

    operator: str
    arguments: tuple[Any, ...]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Return what its time depends on: equal for calls that take equally long."""
        return self.operator, _comparable(self.arguments)

    def to_json(self) -> dict[str, Any]:
        """Return the entry that `from_json` reads."""
        return {"call": self.operator, "arguments": [_written(argument) for argument in self.arguments]}

    @staticmethod
    def from_json(operator: object, arguments: object) -> OperatorCall:
        """Return the call of an entry; ConfigError names what is wrong in it."""
        if not isinstance(operator, str) or not operator:
            raise ConfigError("call", operator, "is not an operator", "write e.g. 'aten::mm'")
        if not isinstance(arguments, list):
            raise ConfigError("arguments", arguments, "is not a list", "write e.g. ['float32[64, 64]', 1]")
        return OperatorCall(operator, tuple(_read(argument) for argument in arguments))

    def __str__(self) -> str:
        return f"{self.operator.removeprefix('aten::')}({', '.join(map(str, self.to_json()['arguments']))})"


def dump(calls: Iterable[OperatorCall], path: str | os.PathLike[str]) -> None:
    """Write what `load` reads, one call a line."""
    lines = ",\n".join(f"  {json.dumps(call.to_json())}" for call in calls)
    write_atomically(path, f'{{"version": {VERSION}, "operators": [\n{lines}\n]}}\n')


def read_json(path: str | os.PathLike[str], field: str, remedy: str) -> Any:
    """Return the content of a JSON file; ConfigError on ``field`` where it cannot be read or is not JSON."""
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(field, os.fspath(path), f"cannot be read ({error.strerror or error})", remedy) from error
    except ValueError as error:
        raise ConfigError(field, os.fspath(path), f"is not JSON ({error})", remedy) from error


def load(path: str | os.PathLike[str]) -> tuple[OperatorCall, ...]:
    """Load the calls in a file, none twice; ConfigError says what is wrong with the file."""
    name, content = os.fspath(path), read_json(path, "operators", _RECORD)
    entries = content.get("operators") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ConfigError("operators", name, "has no list 'operators'", _RECORD)
    if content.get("version") != VERSION:
        problem = f"is of version {content.get('version')}, not {VERSION}"
        raise ConfigError("operators", name, problem, "record them anew with this version of foretrain")
    calls: dict[object, OperatorCall] = {}
    for row, entry in enumerate(entries):
        try:
            if not isinstance(entry, dict):
                raise ConfigError("entry", entry, "is not an object", "write {...}")
            call = OperatorCall.from_json(entry.get("call"), entry.get("arguments"))
        except ConfigError as error:
            raise error.at(f"operators[{row}]").at(name) from error
        calls.setdefault(call.key, call)
    return tuple(calls.values())


def _comparable(value: Any) -> Any:
    if isinstance(value, Meta):
        return _written(value)
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    return float if isinstance(value, float) else value


def _written(value: Any) -> Any:
    if isinstance(value, Meta):
        shape = ", ".join(map(str, value.shape))
        strides = "" if value.stride == contiguous(value.shape).stride else ":" + ",".join(map(str, value.stride))
        return f"{'host ' if value.device == 'cpu' else ''}{value.dtype}[{shape}]{strides}"
    if isinstance(value, tuple):
        return [_written(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}  # JSON has no word for it
    return value


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_read, value))
    if isinstance(value, dict):
        if set(value) == {"float"} and value["float"] in ("inf", "-inf", "nan"):
            return float(value["float"])
        raise ConfigError("arguments", value, "is no argument", "write a tensor, a number, a list, a text or null")
    if isinstance(value, str) and "[" in value:
        return _tensor(value)
    return value


def _tensor(text: str) -> Meta:
    found = _TENSOR.fullmatch(text)
    shape = tuple(map(int, found[3].split(","))) if found and found[3] else ()
    stride = tuple(map(int, found[4].split(","))) if found and found[4] else contiguous(shape).stride
    if found is None or len(shape) != len(stride):
        raise ConfigError("arguments", text, "is not a tensor", "write e.g. 'float32[64, 256]' or 'float32[8, 4]:1,8'")
    return Meta(shape, stride, found[2], "cpu" if found[1] else "cuda:0")
