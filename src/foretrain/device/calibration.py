"""Operator times measured on the machine at hand: a JSON file that people can read, and merging of several.

    {"version": 1, "device": "NVIDIA H100 80GB HBM3", "stack": "torch 2.13.0+cu130", "measured": [
      {"operator": "Gemm", "m": 8192, "n": 4096, "k": 4096, "dtype": "bf16", "time": "412.5us", "spread": 0.01}]}

``operator`` is a class of `foretrain.device.work`, the rest of an entry its attributes, where those with a default may
be left out; ``spread`` is the relative standard deviation of the repetitions. ``device`` is what the driver calls it.

An entry with ``call`` in place of ``operator`` is of one operator with just these arguments (`foretrain.device.calls`).
It is preferred to all else that is known, because not every operator's time follows from its arithmetic and its bytes.

``launch`` is what the host spends on one kernel. ``description``, where it is there, says what the device is, with the
attributes of `foretrain.device.Device`: such a file is a device that can be simulated though nobody has described it
before, e.g. one core of a CPU.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, get_args

from foretrain import errors
from foretrain.device.calls import OperatorCall, read_json
from foretrain.device.gpu import Arithmetic, Device
from foretrain.device.presets import preset_of_product
from foretrain.device.work import FORMATS, WORKS, Algorithm, Work
from foretrain.errors import ConfigError
from foretrain.files import write_atomically
from foretrain.units import Time, exact_rate, exact_size, exact_time, parse_rate, parse_size, parse_time

VERSION: Final = 1
_NAMES = {kind: name for name, kind in WORKS.items()}
"""Names of kinds of work in calibration files."""
_TEXTS = {"dtype": FORMATS, "algorithm": get_args(Algorithm)}


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """The time of one operator, and the relative standard deviation of its repetitions."""

    work: Work
    time: Time
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """Measured time of one operator with exactly these arguments."""

    call: OperatorCall
    time: Time
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements on one kind of device under one software stack, nothing twice.

    Attributes:
        device: what the driver calls it.
        stack: what computed.
        measured: by what an operator does.
        calls: by the operator itself and its arguments.
        description: what the device is, where that was measured too.
        launch: ps that its host spends on launching a kernel; of a serial device the description says it.
    """

    device: str
    stack: str
    measured: tuple[OperatorTime, ...] = ()
    calls: tuple[MeasuredCall, ...] = ()
    description: Device | None = None
    launch: Time | None = None

    def described(self) -> Device:
        """Return the device that was measured: its description, or the preset of that product.

        Raises ConfigError when there is neither.
        """
        found = self.description or preset_of_product(self.device)
        if found is None:
            remedy = "add one by 'foretrain calibrate --merge FILE' without --operators"
            raise ConfigError("device", self.device, "is no GPU known by name, and the file has no description", remedy)
        return found

    def check(self, device: Device) -> None:
        """Raise ConfigError unless it was measured on such a GPU; one without a product name accepts all."""
        if device.product and device.product != self.device:
            remedy = f"{device.name} is '{device.product}': measure there, or forecast for the GPU that was measured"
            raise ConfigError("device", self.device, f"was measured, not {device.name}", remedy)


def merged(calibrations: Iterable[Calibration]) -> Calibration:
    """Merge the measurements of ``calibrations``; of an operator measured in several the last one counts.

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
    calls = {found.call.key: found for calibration in every for found in calibration.calls}
    description = next((one.description for one in reversed(every) if one.description), None)
    launch = next((one.launch for one in reversed(every) if one.launch is not None), None)
    return Calibration(first.device, first.stack, tuple(latest.values()), tuple(calls.values()), description, launch)


def load(path: str | os.PathLike[str]) -> Calibration:
    """Load the calibration in a file; ConfigError names the file, the entry and the field that is wrong."""
    content = read_json(path, "calibration", "write one with 'foretrain calibrate'")
    try:
        return _calibration(content)
    except ConfigError as error:
        raise error.at(os.fspath(path)) from error


def dump(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Write what `load` reads, one measurement a line."""
    entries = [*map(_entry, calibration.measured), *map(_call_entry, calibration.calls)]
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    head: dict[str, Any] = {"version": VERSION, "device": calibration.device, "stack": calibration.stack}
    if calibration.launch is not None:
        head["launch"] = exact_time(calibration.launch)
    if calibration.description:
        head["description"] = _description_text(calibration.description)
    write_atomically(path, f'{json.dumps(head)[:-1]}, "measured": [\n{lines}\n]}}\n')


def _entry(found: OperatorTime) -> dict[str, Any]:
    # No Nothing is ever measured, and all other works are dataclasses.
    attributes = dataclasses.asdict(found.work)
    return (
        {"operator": _NAMES[type(found.work)]} | attributes | {"time": exact_time(found.time), "spread": found.spread}
    )


def _call_entry(found: MeasuredCall) -> dict[str, Any]:
    return found.call.to_json() | {"time": exact_time(found.time), "spread": found.spread}


_RATES = ("bandwidth", "local_rate", "host_rate")
_ARITHMETIC = ("fp32", "tf32", "fp16", "bf16")


def _description_text(device: Device) -> dict[str, Any]:
    """Return the attributes that differ from their defaults, as text; peaks in FLOP/s."""
    texts: dict[str, Any] = {}
    for one in dataclasses.fields(Device):
        value = getattr(device, one.name)
        if value == one.default or one.name == "product":
            continue
        if one.name in _RATES:
            value = exact_rate(value)
        elif one.name in ("memory", "l2"):
            value = exact_size(value)
        elif one.name == "launch":
            value = exact_time(value)
        elif isinstance(value, Arithmetic):
            value = dataclasses.asdict(value)
        texts[one.name] = value
    return texts


def _description(content: object, product: str) -> Device:
    fields = dict(_table(content, "description", {one.name for one in dataclasses.fields(Device)} - {"product"}))
    for name, value in fields.items():
        if name in _RATES:
            fields[name] = parse_rate(value, name)
        elif name in ("memory", "l2"):
            fields[name] = parse_size(value, name)
        elif name == "launch":
            fields[name] = parse_time(value, name)
        elif name in _ARITHMETIC:
            fields[name] = _arithmetic(value, name)
        elif name == "capability":
            fields[name] = _capability(value)
        else:
            _check_plain(name, value)
    for one in dataclasses.fields(Device):
        if one.default is dataclasses.MISSING and one.name not in fields:
            raise ConfigError(one.name, None, "is missing", f"write the device's {one.name}")
    return Device(**fields, product=product)


def _arithmetic(value: object, name: str) -> Arithmetic:
    parts = ("peak", "conv", "winograd", "gemm")
    table = _table(value, name, set(parts))
    for part in parts:
        _check_above_zero(f"{name}.{part}", table.get(part))
    return Arithmetic(**table)


def _capability(value: object) -> tuple[int, int]:
    match value:
        case [int() as major, int() as minor]:
            return major, minor
    raise ConfigError("capability", value, "is not a major and a minor number", "write e.g. [9, 0]")


def _check_plain(name: str, value: object) -> None:
    if name in ("name", "measured_as"):
        if not isinstance(value, str) or not value:
            raise ConfigError(name, value, "is not a name", "write it in quotes")
    elif name == "serial":
        if not isinstance(value, bool):
            raise ConfigError(name, value, "is neither true nor false", "write true or false")
    else:
        _check_above_zero(name, value)


def _check_above_zero(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(name, value, "is not a number above 0", "write e.g. 1.5")


def _calibration(content: object) -> Calibration:
    head = _table(content, "calibration", {"version", "device", "stack", "measured", "description", "launch"})
    if head.get("version") != VERSION:
        raise ConfigError("version", head.get("version"), "is not 1", "measure anew with this version of foretrain")
    for name in ("device", "stack"):
        if not isinstance(head.get(name), str) or not head[name]:
            raise ConfigError(name, head.get(name), "is not a name", f"write the {name} in quotes")
    entries = head.get("measured")
    if not isinstance(entries, list):
        raise ConfigError("measured", entries, "is not a list", "write [{...}, ...]")
    found: dict[Work, OperatorTime] = {}
    calls: dict[object, MeasuredCall] = {}
    for row, entry in enumerate(entries):
        try:
            measurement = _measurement(entry)
        except ConfigError as error:
            raise error.at(f"measured[{row}]") from error
        if isinstance(measurement, MeasuredCall):
            calls[measurement.call.key] = measurement
        else:
            found[measurement.work] = measurement
    description = _description(head["description"], head["device"]) if "description" in head else None
    launch = parse_time(head["launch"], "launch") if "launch" in head else None
    return Calibration(head["device"], head["stack"], tuple(found.values()), tuple(calls.values()), description, launch)


def _measurement(entry: object) -> OperatorTime | MeasuredCall:
    fields = dict(_table(entry, "entry", None))
    if "call" in fields:
        _table(fields, "entry", {"call", "arguments", "time", "spread"})
        return MeasuredCall(OperatorCall.from_json(fields["call"], fields.get("arguments")), *_time(fields))
    operator = fields.pop("operator", None)
    if operator not in WORKS:
        raise errors.unknown("operator", operator, WORKS)
    time, spread = _time(fields)
    return OperatorTime(_work(WORKS[operator], fields), time, spread)


def _time(fields: dict[str, Any]) -> tuple[Time, float]:
    """Remove the time and its spread from an entry and return them."""
    time = parse_time(fields.pop("time", None))
    if time < 1:
        raise ConfigError("time", exact_time(time), "is not above 0", "write what was measured, e.g. '412.5us'")
    spread = fields.pop("spread", 0.0)
    if isinstance(spread, bool) or not isinstance(spread, int | float) or not 0 <= spread < math.inf:
        raise ConfigError("spread", spread, "is not a number from 0 on", "write e.g. 0.01 for 1 %")
    return time, float(spread)


def _work(kind: type, fields: dict[str, Any]) -> Work:
    declared = {one.name: one for one in dataclasses.fields(kind)}
    _table(fields, _NAMES[kind], set(declared))
    for name, one in declared.items():
        if name not in fields:
            if one.default is dataclasses.MISSING:
                raise ConfigError(name, None, "is missing", f"write the {name} of the {_NAMES[kind]}")
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
