"""Costs of kernels that are not PyTorch's: a TOML file of names with what each does, or takes.

    [[kernel]]
    name = "rms_norm_kernel"                     # as in warnings and traces; * stands for anything
    operator = "Memory"
    moved = "2 * bytes(x) + bytes(weight)"

    [[kernel]]
    name = ["mylib::scan", "scan_*"]
    by = "elements(0)"
    table = [[1e6, "11us"], [1e8, "640us"]]      # interpolated

    [[kernel]]
    name = "init_tables"
    time = "25us"

An entry has one of: ``time``, the same for every call; ``table`` with ``by``, interpolated in logarithms of both, and
in proportion beyond; ``operator``, a kind of work of calibration files (`foretrain.device.calibration`) with its
attributes. Numbers and truth values may be formulas, of which 0 is false. The last entry that a name fits counts.

A formula is arithmetic with ``+ - * / // % **``, ``min``, ``max``, ``ceil`` and ``log2`` on numbers and on arguments of
the kernel, by name or by position from 0: ``bytes(x)``, ``elements(x)`` and ``dim(x, -1)`` of tensors, and numbers as
they are. ``result`` is what it returns, and ``moved`` all it reads and writes, as far as that can be told.

``results`` says what an extension's function returns: for each tensor the position of the argument that it is like, or
the formulas of its shape.

Entries for libraries that many scripts use stand in ``kernels.toml``, in the same format.
"""

from __future__ import annotations

import ast
import math
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, get_args

from foretrain import errors
from foretrain.device import calls
from foretrain.device.calls import Meta
from foretrain.device.work import FORMATS, WORKS, Algorithm, Work
from foretrain.errors import ConfigError
from foretrain.files import read_text
from foretrain.units import Time, parse_time

_REMEDY: Final = "see 'Custom kernels' in the documentation for the format"
_OWN: Final = ("name", "time", "table", "by", "operator", "results")

Value = int | float
Shape = int | tuple[str, ...]
"""Of a result: the position of the argument that it is like, or the formulas of its dimensions."""


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Cost of the kernels of some names.

    Attributes:
        names: patterns.
        time: of every call, ps.
        by: the formula that ``table`` is looked up by.
        table: values of ``by`` and times, ascending.
        work: the kind of work; None where a time is given, or nothing but ``results``.
        attributes: of ``work``; texts are formulas, but for the number format and the algorithm.
        results: what it returns; None if that is not said.
    """

    names: tuple[str, ...]
    time: Time | None = None
    by: str = ""
    table: tuple[tuple[float, Time], ...] = ()
    work: type | None = None
    attributes: Mapping[str, Any] | None = None
    results: tuple[Shape, ...] | None = None

    def of(self, arguments: KernelArguments) -> Time | Work | None:
        """Return the time of a call, ps, or its work; None where the entry says neither.

        Raises ConfigError if a formula names what the kernel does not have.
        """
        try:
            return self._of(arguments)
        except ConfigError as error:
            raise error.at(f"kernel[{self.names[0]!r}]") from None

    def _of(self, arguments: KernelArguments) -> Time | Work | None:
        if self.time is not None:
            return self.time
        if self.table:
            return _interpolated(self.table, evaluate(self.by, arguments, "by"))
        if self.work is None:
            return None
        kind = {one.name: one.type for one in fields(self.work)}
        given: dict[str, Any] = {}
        for name, value in (self.attributes or {}).items():
            formula = isinstance(value, str) and name not in _TEXTS
            given[name] = _convert(evaluate(value, arguments, name), kind[name]) if formula else value
        if "dtype" in kind and "dtype" not in given and (first := arguments.first_tensor):
            given["dtype"] = calls.number_format(first)
        return self.work(**given)


class KernelCosts:
    """Costs of kernels by name: those of a file, and behind them those that the package knows."""

    def __init__(self, entries: Sequence[KernelCost] = ()) -> None:
        self._entries = (*_known(), *entries)
        self._unused = list(entries)

    def find(self, *names: str, entries: Callable[[KernelCost], bool] = lambda entry: True) -> KernelCost | None:
        """Return the last entry that fits any of the names a kernel goes by, and ``entries``."""
        for entry in reversed(self._entries):
            if entries(entry) and any(fnmatchcase(name, pattern) for name in names for pattern in entry.names):
                if entry in self._unused:
                    self._unused.remove(entry)
                return entry
        return None

    @property
    def unused(self) -> list[str]:
        """Return the names of the file's entries that no kernel has been found to fit."""
        return [", ".join(entry.names) for entry in self._unused]


@dataclass(frozen=True, slots=True)
class KernelArguments:
    """Arguments of a call, for formulas.

    Attributes:
        names: of the arguments.
        values: tensors as `Meta`, numbers; what is None has no number.
        moved: bytes read and written.
        results: tensors that are returned.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]
    moved: int
    results: tuple[Meta, ...] = ()

    @property
    def first_tensor(self) -> Meta | None:
        """Return the first of the tensors among the arguments."""
        return next(calls.tensors_in(self.values), None)

    def named(self, name: str) -> Any:
        """Return an argument, a result, or ``moved``; KeyError if there is none of the name."""
        if name in self.names:
            return self.values[self.names.index(name)]
        if name == "moved":
            return self.moved
        if name == "result" and self.results:
            return self.results[0]
        raise KeyError(name)


def evaluate(formula: str | Value, arguments: KernelArguments, field: str) -> float:
    """Return the number that a formula gives; ConfigError on ``field`` says what is wrong with it."""
    if not isinstance(formula, str):
        return formula
    try:
        found = _value(_parsed(formula, field), arguments)
    except _FormulaError as error:
        names = ", ".join(arguments.names) or "none that have names"
        raise ConfigError(field, formula, str(error), f"the kernel's arguments are {names}") from None
    except (ZeroDivisionError, OverflowError, ValueError, IndexError) as error:
        raise ConfigError(field, formula, f"has no value here ({error})", "correct the formula") from None
    if isinstance(found, Meta):
        raise ConfigError(field, formula, "is a tensor, not a number", "write e.g. bytes(x) or dim(x, 0)")
    if isinstance(found, complex) or not 0 <= found < math.inf:
        raise ConfigError(field, formula, f"is {found} here", "correct the formula: it must give a number from 0 on")
    return found


class _FormulaError(Exception):
    """A name that is nothing of the kernel's, or not what the formula takes it for."""


@cache
def _parsed(formula: str, field: str) -> ast.expr:
    try:
        found = ast.parse(formula.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(field, formula, f"is no formula ({error})", "write e.g. '2 * bytes(x)'") from None
    _check(found, formula, field)
    return found


def _check(node: ast.expr, formula: str, field: str) -> None:
    """Raise ConfigError for what no formula has; names are not known before the kernel is launched."""
    match node:
        case ast.Constant(value=int() | float()) | ast.Name():
            parts: Sequence[ast.expr] = ()
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            parts = (operand,)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _BINARY:
            parts = (left, right)
        case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in _FUNCTIONS:
            if len(given) not in _FUNCTIONS[name][2]:
                raise ConfigError(field, formula, f"gives {name} {len(given)} arguments", _KNOWN)
            parts = given
        case _:
            raise ConfigError(field, formula, f"has {ast.unparse(node)!r}, which formulas do not know", _KNOWN)
    for part in parts:
        _check(part, formula, field)


_BINARY: dict[type, Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: a**b,
}
_FUNCTIONS: dict[str, tuple[Callable[..., Any], bool, range]] = {
    "bytes": (calls.moved, True, range(1, 2)),
    "elements": (calls.elements, True, range(1, 2)),
    "dim": (lambda tensor, axis: tensor.shape[int(axis)], True, range(2, 3)),
    "min": (min, False, range(2, 100)),
    "max": (max, False, range(2, 100)),
    "ceil": (math.ceil, False, range(1, 2)),
    "log2": (math.log2, False, range(1, 2)),
}
"""Functions of formulas, whether their first argument is a tensor, and how many arguments they take."""
_KNOWN: Final = "formulas have + - * / // % **, bytes(x), elements(x), dim(x, -1), min, max, ceil and log2"


def _value(node: ast.expr, arguments: KernelArguments) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name):
            try:
                found = arguments.named(name)
            except KeyError:
                raise _FormulaError(f"names {name!r}, which is no argument of the kernel") from None
            if not isinstance(found, Meta | int | float):
                raise _FormulaError(f"names {name!r}, which is no tensor and no number in this call")
            return found
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, arguments)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _BINARY:
            return _BINARY[type(operation)](_value(left, arguments), _value(right, arguments))
        case ast.Call(func=ast.Name(id=name), args=given):
            function, of_tensor, _ = _FUNCTIONS[name]
            first = _tensor(given[0], arguments) if of_tensor else _value(given[0], arguments)
            return function(first, *(_value(one, arguments) for one in given[1:]))
    raise AssertionError(ast.unparse(node))  # _check has let it pass


def _tensor(node: ast.expr, arguments: KernelArguments) -> Meta:
    """Return a tensor by name, or by its position among the arguments."""
    found = _value(node, arguments)
    if isinstance(found, int) and isinstance(node, ast.Constant) and 0 <= found < len(arguments.values):
        found = arguments.values[found]
    if not isinstance(found, Meta):
        raise _FormulaError(f"takes {ast.unparse(node)!r} for a tensor, which it is not")
    return found


def _interpolated(table: tuple[tuple[float, Time], ...], at: float) -> Time:
    """Return the time between two entries, in logarithms of both; beyond them in proportion to ``at``."""
    low, high = table[0], table[-1]
    if at <= low[0]:
        return low[1]  # a launch takes time, however small
    if at >= high[0]:
        return math.ceil(high[1] * at / high[0])
    (x, before), (y, after) = next(pair for pair in pairwise(table) if pair[1][0] >= at)
    part = math.log(at / x) / math.log(y / x)
    return math.ceil(before * (after / before) ** part)


def load(path: str | os.PathLike[str]) -> KernelCosts:
    """Load a file of costs; ConfigError names the file, the entry and the field that is wrong."""
    text = read_text(path, "costs", _REMEDY)
    try:
        return KernelCosts(_entries(text))
    except ConfigError as error:
        raise error.at(os.fspath(path)) from error


@cache
def _known() -> tuple[KernelCost, ...]:
    return _entries(Path(__file__).with_name("kernels.toml").read_text("utf-8"))


def _entries(text: str) -> tuple[KernelCost, ...]:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("costs", text[:40], f"is not TOML ({error})", _REMEDY) from error
    for name in content:
        if name != "kernel":
            raise errors.unknown("field", name, ("kernel",))
    entries = content.get("kernel")
    if entries is None:
        raise ConfigError("kernel", None, "is missing", "begin each entry with a line [[kernel]]")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError("kernel", entries, "is no list of tables", "begin each with a line [[kernel]]")
    found: list[KernelCost] = []
    for row, entry in enumerate(entries):
        try:
            found.append(_entry(entry))
        except ConfigError as error:
            raise error.at(f"kernel[{row}]") from error
    return tuple(found)


def _entry(entry: dict[str, Any]) -> KernelCost:
    names = _names(entry.get("name"))
    given = [name for name in ("time", "table", "operator") if name in entry]
    if len(given) > 1:
        raise ConfigError(given[1], entry[given[1]], f"stands beside {given[0]}", "keep one of them")
    results = _results(entry["results"]) if "results" in entry else None
    rest = {name: value for name, value in entry.items() if name not in _OWN}
    if not given and results is None:
        numbers = {one.name for work in WORKS.values() for one in fields(work)}
        for name in rest:
            if name not in numbers:
                raise errors.unknown("field", name, _OWN)
        raise ConfigError("name", entry["name"], "has no cost", "write a time, a table or an operator")
    if "operator" in entry:
        kind = entry["operator"]
        if kind not in WORKS:
            raise errors.unknown("operator", kind, WORKS)
        return KernelCost(names, work=WORKS[kind], attributes=_attributes(WORKS[kind], rest, kind), results=results)
    for name in rest:
        raise errors.unknown("field", name, _OWN)
    if "by" in entry and "table" not in entry:
        raise ConfigError("by", entry["by"], "stands without a table", "write the table, or leave it out")
    if "table" in entry:
        return KernelCost(names, by=_formula(entry.get("by"), "by"), table=_table(entry["table"]), results=results)
    time = parse_time(entry["time"], "time") if "time" in entry else None
    return KernelCost(names, time=time, results=results)


def _names(value: object) -> tuple[str, ...]:
    given = value if isinstance(value, list) else [value]
    names = tuple(name for name in given if isinstance(name, str) and name)
    if not names or len(names) < len(given):
        raise ConfigError("name", value, "is not the name of a kernel", "write e.g. 'rms_norm_kernel' or 'mylib::*'")
    return names


def _formula(value: object, field: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(field, value, "is no formula", "write e.g. 'elements(0)'")
    _parsed(str(value), field)
    return str(value)


def _table(value: object) -> tuple[tuple[float, Time], ...]:
    remedy = "write e.g. [[1e6, '11us'], [1e8, '640us']], ascending"
    if not isinstance(value, list) or not value:
        raise ConfigError("table", value, "has no rows", remedy)
    rows: list[tuple[float, Time]] = []
    for row, one in enumerate(value):
        match one:
            case [int() | float() as at, str() as time] if at > (rows[-1][0] if rows else 0):
                rows.append((float(at), parse_time(time, f"table[{row}]")))
            case _:
                raise ConfigError(f"table[{row}]", one, "is no larger size with its time", remedy)
        if rows[-1][1] < 1:
            raise ConfigError(f"table[{row}]", one, "has no time above 0", remedy)
    return tuple(rows)


def _results(value: object) -> tuple[Shape, ...]:
    remedy = "write for each result an argument's position, or its shape: [0], [['dim(0, 0)', 'dim(1, 1)']], or []"
    if not isinstance(value, list):
        raise ConfigError("results", value, "is not a list", remedy)
    found: list[Shape] = []
    for row, one in enumerate(value):
        if isinstance(one, list):
            found.append(tuple(_formula(part, f"results[{row}]") for part in one))
        elif isinstance(one, int) and not isinstance(one, bool) and one >= 0:
            found.append(one)
        else:
            raise ConfigError(f"results[{row}]", one, "is neither a position nor a shape", remedy)
    return tuple(found)


_TEXTS: dict[str, Sequence[str]] = {"dtype": FORMATS, "algorithm": get_args(Algorithm)}


def _convert(value: float, kind: object) -> int | bool:
    """Return what a formula gives as an attribute: any number but 0 is true."""
    return bool(value) if kind == "bool" else math.ceil(value)


def _attributes(kind: type, given: Mapping[str, Any], name: str) -> dict[str, Any]:
    declared = {one.name: one for one in fields(kind)}
    for field, value in given.items():
        if field not in declared:
            raise errors.unknown("field", field, declared)
        if field in _TEXTS:
            if value not in _TEXTS[field]:
                raise errors.unknown(field, value, _TEXTS[field])
        elif declared[field].type == "bool":
            if isinstance(value, str):
                _formula(value, field)
            elif not isinstance(value, bool):
                raise ConfigError(field, value, "is neither true nor false", "write true, false or a formula")
        elif declared[field].type == "float":
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(field, value, "is not a number above 0", "write e.g. 0.5")
            if field == "efficiency" and value > 1:
                raise ConfigError(field, value, "is more than all of the hardware's rate", "write 1 or less, e.g. 0.5")
        else:
            _formula(value, field)
    for field, one in declared.items():
        if one.default is MISSING and field not in given:
            raise ConfigError(field, None, "is missing", f"write the {field} of the {name}, e.g. as a formula")
    return dict(given)
