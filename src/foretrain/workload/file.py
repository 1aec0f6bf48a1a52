"""Workloads as TOML files a person can edit: times and sizes with units, layers referred to by name.

    name = "vgg16"
    batch = 32
    unit = "images"
    source = "measured on a V100"

    layers = [
      { name = "features.0", forward = "1.5ms", backward = "2ms", update = "7us" },
    ]
    gradients = [
      { name = "features.0.weight", size = "6912B", layer = "features.0", release = "96ms" },
    ]

``update``, ``unit`` and ``source`` may be left out. A gradient's ``layer`` is a name, or a number from 0 where two
layers share a name. `load` after `save` gives back exactly the same workload.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from foretrain import errors
from foretrain.errors import ConfigError
from foretrain.files import write_atomically
from foretrain.units import exact_size, exact_time, parse_size, parse_time
from foretrain.workload.step import Gradient, Layer, Workload

_Row = TypeVar("_Row")
_Table = Mapping[str, Any]  # Any: what a file holds is checked key by key below


def save(workload: Workload, path: str | os.PathLike[str]) -> None:
    """Write ``workload`` to ``path``; an existing file is replaced in one step or not at all."""
    write_atomically(path, _dumps(workload))


def load(path: str | os.PathLike[str]) -> Workload:
    """Read a workload. Raises ConfigError that names the file, the key, what stood there and what to write."""
    try:
        return _workload(_parse(_read(path)))
    except ConfigError as error:
        field = f"{os.fspath(path)}: {error.field}" if error.field else os.fspath(path)
        raise ConfigError(field, error.value, error.problem, error.remedy) from error.__cause__


# Writing.


def _dumps(workload: Workload) -> str:
    names = Counter(layer.name for layer in workload.layers)

    def reference(index: int) -> str:
        name = workload.layers[index].name
        return _quoted(name) if names[name] == 1 else str(index)

    lines = [f"{key} = {_quoted(getattr(workload, key))}" for key in ("name", "unit", "source")]
    lines.insert(1, f"batch = {workload.batch}")
    lines += ["", "# In forward order.", "layers = ["]
    lines += [
        f"  {{ name = {_quoted(layer.name)}, forward = {_quoted(exact_time(layer.forward))}, "
        f"backward = {_quoted(exact_time(layer.backward))}, update = {_quoted(exact_time(layer.update))} }},"
        for layer in workload.layers
    ]
    lines += ["]", "", "# In registration order; release counts from the start of the backward pass.", "gradients = ["]
    lines += [
        f"  {{ name = {_quoted(gradient.name)}, size = {_quoted(exact_size(gradient.size))}, "
        f"layer = {reference(gradient.layer)}, release = {_quoted(exact_time(gradient.release))} }},"
        for gradient in workload.gradients
    ]
    return "\n".join([*lines, "]", ""])


def _quoted(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML also wants DEL escaped, and neither can hold half a surrogate pair.
    quoted = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    try:
        quoted.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("name", text, "is not valid Unicode", "rename it before saving") from error
    return quoted


# Reading.


def _read(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"line {line}", error.object[error.start], "is no UTF-8", "save the file as UTF-8") from error
    except OSError as error:
        remedy = "give the path of a workload file; foretrain.workload.save writes one"
        raise ConfigError("", os.fspath(path), f"cannot be read ({error.strerror or error})", remedy) from error


def _parse(text: str) -> _Table:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at (?:line (\d+), column \d+|end of document)\)", str(error))
        lines = text.splitlines() or [""]
        number = int(place[1]) if place and place[1] else len(lines)
        what = re.sub(r"\s*\(at .*\)$", "", str(error))
        shown = lines[min(number, len(lines)) - 1].strip()
        raise ConfigError(f"line {number}", shown, f"is not TOML ({what})", "correct that line") from error


def _workload(table: _Table) -> Workload:
    _only(table, "", ("name", "batch", "unit", "source", "layers", "gradients"))
    layers = _rows(table, "layers", _layer)
    numbers: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        numbers.setdefault(layer.name, []).append(index)
    return Workload(
        name=_text(table, "", "name"),
        batch=_whole(_required(table, "", "batch", "64"), "batch", "64"),
        layers=layers,
        gradients=_rows(table, "gradients", lambda row, where: _gradient(row, where, numbers)),
        unit=_text(table, "", "unit", "samples"),
        source=_text(table, "", "source", ""),
    )


def _layer(row: _Table, where: str) -> Layer:
    _only(row, where, ("name", "forward", "backward", "update"))
    return Layer(
        name=_text(row, where, "name"),
        forward=parse_time(_required(row, where, "forward", "'2us'"), f"{where}.forward"),
        backward=parse_time(_required(row, where, "backward", "'4us'"), f"{where}.backward"),
        update=parse_time(row.get("update", "0ps"), f"{where}.update"),
    )


def _gradient(row: _Table, where: str, numbers: Mapping[str, list[int]]) -> Gradient:
    _only(row, where, ("name", "size", "layer", "release"))
    return Gradient(
        name=_text(row, where, "name"),
        size=parse_size(_required(row, where, "size", "'25MB'"), f"{where}.size"),
        layer=_index(_required(row, where, "layer", "'conv1'"), f"{where}.layer", numbers),
        release=parse_time(_required(row, where, "release", "'2ms'"), f"{where}.release"),
    )


def _index(value: object, field: str, numbers: Mapping[str, list[int]]) -> int:
    """The layer's number; one out of range is found by `Workload`."""
    if not isinstance(value, str):
        return _whole(value, field, "a layer's name or number")
    found = numbers.get(value, [])
    if not found:
        raise errors.unknown(field, value, numbers)
    if len(found) > 1:
        remedy = f"write its number instead, one of {', '.join(map(str, found))}"
        raise ConfigError(field, value, f"is the name of {len(found)} layers", remedy)
    return found[0]


def _rows(table: _Table, key: str, read: Callable[[_Table, str], _Row]) -> tuple[_Row, ...]:
    rows = _required(table, "", key, "a list of inline tables")
    if not isinstance(rows, list):
        raise ConfigError(key, rows, "is not a list", f"write {key} = [ {{ name = … }}, … ]")
    read_rows: list[_Row] = []
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(f"{key}[{index}]", row, "is not a table", "write { name = … }")
        read_rows.append(read(row, f"{key}[{index}]"))
    return tuple(read_rows)


def _only(table: _Table, where: str, known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            raise errors.unknown(_path(where, key), key, known)


def _required(table: _Table, where: str, key: str, example: str) -> object:
    if key not in table:
        raise ConfigError(_path(where, key), None, "is missing", f"write {key} = {example}")
    return table[key]


def _text(table: _Table, where: str, key: str, default: str | None = None) -> str:
    value = table.get(key, default) if default is not None else _required(table, where, key, f"'{key}'")
    if not isinstance(value, str):
        raise ConfigError(_path(where, key), value, "is not text", "write it in quotes")
    return value


def _whole(value: object, field: str, example: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(field, value, "is not a whole number", f"write e.g. {example}")
    return value


def _path(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
