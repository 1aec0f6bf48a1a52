"""Calls of operators as text: an operator, the shapes and types of its tensors, and its other arguments.

    {"call": "aten::addmm", "arguments": ["float32[512]", "float32[64, 256]", "float32[256, 512]:1,256", 1, 1]}

A tensor is written as its type and shape, with its strides behind a colon unless it lies row by row, and with ``host``
before it if it is in the host's memory while the operator runs on a GPU. Lists are lists, an absent argument is null.
Numbers that are not whole tell how an operator computes, not how long it takes: two calls that differ only in them are
one (`OperatorCall.key`), since a learning rate or Adam's corrections change with every step.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from foretrain.device.tensors import Meta, contiguous
from foretrain.errors import ConfigError
from foretrain.files import write_atomically

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
        """What its time depends on: equal for calls that take equally long."""
        return self.operator, _comparable(self.arguments)

    def to_json(self) -> dict[str, Any]:
        """For `from_json`."""
        return {"call": self.operator, "arguments": [_written(argument) for argument in self.arguments]}

    @staticmethod
    def from_json(operator: object, arguments: object) -> OperatorCall:
        """The call of an entry; ConfigError names what is wrong in it."""
        if not isinstance(operator, str) or not operator:
            raise ConfigError("call", operator, "is not an operator", "write e.g. 'aten::mm'")
        if not isinstance(arguments, list):
            raise ConfigError("arguments", arguments, "is not a list", "write e.g. ['float32[64, 64]', 1]")
        return OperatorCall(operator, tuple(_read(argument) for argument in arguments))

    def __str__(self) -> str:
        return f"{self.operator.removeprefix('aten::')}({', '.join(map(str, self.to_json()['arguments']))})"


def dump(calls: Iterable[OperatorCall], path: str | os.PathLike[str]) -> None:
    """Writes what `load` reads, one call a line."""
    lines = ",\n".join(f"  {json.dumps(call.to_json())}" for call in calls)
    write_atomically(path, f'{{"version": {VERSION}, "operators": [\n{lines}\n]}}\n')


def load(path: str | os.PathLike[str]) -> tuple[OperatorCall, ...]:
    """The calls in a file, none twice; ConfigError says what is wrong with the file."""
    name = os.fspath(path)
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError("operators", name, f"cannot be read ({error.strerror or error})", _RECORD) from error
    except ValueError as error:
        raise ConfigError("operators", name, f"is not JSON ({error})", _RECORD) from error
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
