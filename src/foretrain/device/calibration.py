"""Operator times measured on the machine at hand: a JSON file that people can read, and merging of several.

    {"version": 1, "device": "NVIDIA H100 80GB HBM3", "stack": "torch 2.13.0+cu130", "measured": [
      {"operator": "Gemm", "m": 8192, "n": 4096, "k": 4096, "dtype": "bf16", "time": "412.5us", "spread": 0.01}]}

``operator`` is a class of `foretrain.device.work`, the rest of an entry its attributes, where those with a default may
be left out; ``spread`` is the relative standard deviation of the repetitions. ``device`` is what the driver calls it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from foretrain import errors
from foretrain.device.work import FORMATS, Algorithm, Attention, Convolution, Gemm, HostCopy, Memory, Unknown, Work
from foretrain.errors import ConfigError
from foretrain.files import write_atomically
from foretrain.units import Time, exact_time, parse_time

if TYPE_CHECKING:
    from foretrain.device.gpu import Device

VERSION: Final = 1
_OPERATORS = {kind.__name__: kind for kind in (Gemm, Attention, Convolution, Memory, HostCopy, Unknown)}
_TEXTS = {"dtype": FORMATS, "algorithm": get_args(Algorithm)}


@dataclass(frozen=True, slots=True)
class Measurement:
    """The time of one operator, and the relative standard deviation of its repetitions."""

    work: Work
    time: Time
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured on one kind of GPU under one software stack, no operator twice."""

    device: str
    stack: str
    measured: tuple[Measurement, ...]

    def check(self, device: Device) -> None:
        """Raises ConfigError unless it was measured on such a GPU; one without a product name accepts all."""
        if device.product and device.product != self.device:
            remedy = f"{device.name} is '{device.product}': measure there, or forecast for the GPU that was measured"
            raise ConfigError("device", self.device, f"was measured, not {device.name}", remedy)


def merged(calibrations: Iterable[Calibration]) -> Calibration:
    """All measurements of ``calibrations``; of an operator measured in several the last one counts.

    Raises ConfigError when there is none, or when device or stack differ.
    """
    every = tuple(calibrations)
    if not every:
        raise ConfigError("calibrations", every, "has no calibration", "give one file at least")
    first = every[0]
    for other in every[1:]:
        for name in ("device", "stack"):
            if getattr(other, name) != getattr(first, name):
                problem = f"differs from '{getattr(first, name)}'"
                raise ConfigError(name, getattr(other, name), problem, f"merge only what was measured on one {name}")
    latest = {found.work: found for calibration in every for found in calibration.measured}
    return Calibration(first.device, first.stack, tuple(latest.values()))


def load(path: str | os.PathLike[str]) -> Calibration:
    """The calibration in a file; ConfigError names the file, the entry and the field that is wrong."""
    name = os.fspath(path)
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        raise ConfigError("calibration", name, problem, "write one with 'foretrain calibrate'") from error
    except ValueError as error:
        raise ConfigError(
            "calibration", name, f"is not JSON ({error})", "write one with 'foretrain calibrate'"
        ) from error
    try:
        return _calibration(content)
    except ConfigError as error:
        raise error.at(name) from error


def dump(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Writes what `load` reads, one measurement a line."""
    lines = ",\n".join(f"  {json.dumps(_entry(found))}" for found in calibration.measured)
    head = {"version": VERSION, "device": calibration.device, "stack": calibration.stack}
    write_atomically(path, f'{json.dumps(head)[:-1]}, "measured": [\n{lines}\n]}}\n')


def _entry(found: Measurement) -> dict[str, Any]:
    # No Nothing is ever measured, and all other works are dataclasses.
    attributes = dataclasses.asdict(found.work)
    return (
        {"operator": type(found.work).__name__} | attributes | {"time": exact_time(found.time), "spread": found.spread}
    )


def _calibration(content: object) -> Calibration:
    head = _table(content, "calibration", {"version", "device", "stack", "measured"})
    if head.get("version") != VERSION:
        raise ConfigError("version", head.get("version"), "is not 1", "measure anew with this version of foretrain")
    for name in ("device", "stack"):
        if not isinstance(head.get(name), str) or not head[name]:
            raise ConfigError(name, head.get(name), "is not a name", f"write the {name} in quotes")
    entries = head.get("measured")
    if not isinstance(entries, list):
        raise ConfigError("measured", entries, "is not a list", "write [{...}, ...]")
    found: dict[Work, Measurement] = {}
    for row, entry in enumerate(entries):
        try:
            measurement = _measurement(entry)
        except ConfigError as error:
            raise error.at(f"measured[{row}]") from error
        found[measurement.work] = measurement
    return Calibration(head["device"], head["stack"], tuple(found.values()))


def _measurement(entry: object) -> Measurement:
    fields = dict(_table(entry, "entry", None))
    operator = fields.pop("operator", None)
    if operator not in _OPERATORS:
        raise errors.unknown("operator", operator, _OPERATORS)
    time = parse_time(fields.pop("time", None))
    if time < 1:
        raise ConfigError("time", exact_time(time), "is not above 0", "write what was measured, e.g. '412.5us'")
    spread = fields.pop("spread", 0.0)
    if isinstance(spread, bool) or not isinstance(spread, int | float) or not 0 <= spread < math.inf:
        raise ConfigError("spread", spread, "is not a number from 0 on", "write e.g. 0.01 for 1 %")
    return Measurement(_work(_OPERATORS[operator], fields), time, float(spread))


def _work(kind: type, fields: dict[str, Any]) -> Work:
    declared = {one.name: one for one in dataclasses.fields(kind)}
    _table(fields, kind.__name__, set(declared))
    for name, one in declared.items():
        if name not in fields:
            if one.default is dataclasses.MISSING:
                raise ConfigError(name, None, "is missing", f"write the {name} of the {kind.__name__}")
            continue
        value = fields[name]
        if name in _TEXTS:
            if value not in _TEXTS[name]:
                raise errors.unknown(name, value, _TEXTS[name])
        elif one.type == "bool":
            if not isinstance(value, bool):
                raise ConfigError(name, value, "is neither true nor false", "write true or false")
        elif isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(name, value, "is not a whole number from 0 on", "write e.g. 4096")
    return kind(**fields)


def _table(value: object, field: str, names: set[str] | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(field, value, "is not an object", "write {...}")
    for name in value:
        if names is not None and name not in names:
            raise errors.unknown("field", name, names)
    return value
