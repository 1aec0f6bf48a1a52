"""``foretrain accuracy add``: what somebody measured, checked and added to a table of such measurements.

The table is TOML, a ``[[run]]`` for each run, and a ``[[calibration]]`` for operators of a GPU that were measured
without one; benchmarks/data/contributed.toml in a checkout of foretrain is the one that benchmarks/accuracy.py compares
with forecasts. A file to add has the keys of one run, `MeasuredRun`, or of a calibration alone, `MeasuredGpu`.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import shlex
import sys
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from foretrain.cli.arguments import JsonFile, check_writable
from foretrain.errors import ConfigError, unknown
from foretrain.files import read_text, write_atomically, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HELP = "Add a measured run, or a calibration, to those that others gave."
_REMEDY = "see 'foretrain accuracy add' in the reference of commands for the format"
_NEEDED = ("command", "cluster", "step_time", "contributor", "source", "software", "date")
_KEYS = (*_NEEDED, "stack", "memory", "calibration", "notes")
_RUN_ONLY = ("command", "cluster", "step_time")
_GPU_NEEDED = ("calibration", "contributor", "source", "date")
_GPU_KEYS = (*_GPU_NEEDED, "notes")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z_0-9]*=")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run that was measured.

    Attributes:
        command: the script, or ``-m`` and a module, and its arguments, as torchrun ran it; variables of the environment
            may stand before it, as in a shell.
        cluster: in the notation of ``foretrain simulate --cluster``, with its device.
        step_time: of an iteration, with its unit; of steps after the first few.
        contributor: who measured.
        source: where the measurement can be looked up: a log, a page.
        software: framework, version, PyTorch, CUDA.
        date: of the measurement, ISO 8601.
        stack: the name of the framework's factor, as for ``--factor``; empty if there is none.
        memory: peak reserved on a GPU, with its unit; empty if it was not measured.
        calibration: a file of ``foretrain calibrate`` on that GPU, which the forecast uses, from the folder of the file
            that names it; empty if there is none.
        notes: what else is to be known.
    """

    command: str
    cluster: str
    step_time: str
    contributor: str
    source: str
    software: str
    date: str
    stack: str = ""
    memory: str = ""
    calibration: str = ""
    notes: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Return what tells measurements apart: a second one with the same replaces the first."""
        return self.command, self.cluster, self.contributor, self.date

    def parts(self) -> tuple[list[str], list[str]]:
        """Return the variables that the command sets, and the script, or ``-m`` and a module, with its arguments."""
        words = shlex.split(self.command)
        variables = 0
        while variables < len(words) and _VARIABLE.match(words[variables]):
            variables += 1
        return words[:variables], words[variables:]


@dataclass(frozen=True, slots=True)
class MeasuredGpu:
    """Operators of a GPU that were measured, without a run.

    Attributes:
        calibration: the file of ``foretrain calibrate``, from the folder of the file that names it; it says which GPU
            and software were measured.
        contributor, source, date, notes: as of a `MeasuredRun`.
    """

    calibration: str
    contributor: str
    source: str
    date: str
    notes: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what tells calibrations apart: a second one with the same replaces the first."""
        return self.calibration.rpartition("-")[0], self.contributor, self.date


def measured_run(entry: dict[str, Any], folder: Path) -> MeasuredRun:
    """Return a checked run of a file in ``folder``; ConfigError names the key, its value and the remedy."""
    from foretrain.device import stack_factor
    from foretrain.device.calibration import load
    from foretrain.device.presets import preset
    from foretrain.network.deployment_notation import place
    from foretrain.units import parse_size, parse_time

    found = MeasuredRun(**_texts(entry, _NEEDED, _KEYS))
    try:
        _, words = found.parts()
    except ValueError as error:
        problem = f"cannot be split into words ({error})"
        raise ConfigError("command", found.command, problem, "quote as in a shell") from None
    if not words or not (words[0].endswith(".py") or (words[0] == "-m" and len(words) > 1)):
        remedy = "write the script, or -m and a module, and its arguments, without torchrun and its options"
        raise ConfigError("command", found.command, "does not begin with a script", remedy)
    where = place(found.cluster)
    if not parse_time(found.step_time, "step_time"):
        raise ConfigError("step_time", found.step_time, "is 0", "write e.g. '2.84 s'")
    device = preset(where.device or "")
    if found.memory and parse_size(found.memory, "memory") > device.memory:
        remedy = f"{device.name} has {device.memory / 2**30:.1f} GiB; is it the sum of several GPUs, or another GPU?"
        raise ConfigError("memory", found.memory, "is more than a GPU has", remedy)
    if found.stack:
        try:
            stack_factor(device, found.stack)
        except ConfigError as error:
            raise ConfigError("stack", error.value, error.problem, error.remedy) from None
    if found.calibration:
        load(folder / found.calibration).check(device)
    return found


def measured_gpu(entry: dict[str, Any], folder: Path) -> MeasuredGpu:
    """Return the checked calibration of a file in ``folder``; ConfigError names the key, its value and the remedy."""
    from foretrain.device.calibration import load

    found = MeasuredGpu(**_texts(entry, _GPU_NEEDED, _GPU_KEYS))
    calibration = load(folder / found.calibration)
    calibration.described()
    if not (calibration.measured or calibration.calls):
        raise ConfigError(
            "calibration", found.calibration, "has no measurements", "write one with 'foretrain calibrate'"
        )
    return found


def _texts(entry: dict[str, Any], needed: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Return an entry whose keys are known and whose values are texts, and the date one in the past."""
    for key in entry:
        if key not in known:
            raise unknown("key", key, known)
    for key in needed:
        if key not in entry:
            raise ConfigError(key, None, "is missing", _REMEDY)
    if isinstance(entry["date"], datetime.date):
        entry = {**entry, "date": entry["date"].isoformat()}
    for key, value in entry.items():
        if not isinstance(value, str) or (key in needed and not value.strip()):
            raise ConfigError(key, value, "is no text, or empty", _REMEDY)
    remedy = "write the day of the measurement, e.g. 2026-11-25"
    try:
        date = datetime.date.fromisoformat(entry["date"])
    except ValueError:
        raise ConfigError("date", entry["date"], "is not a date", remedy) from None
    if date > datetime.datetime.now(datetime.UTC).date():
        raise ConfigError("date", entry["date"], "is in the future", remedy)
    return entry


_Measured = TypeVar("_Measured", MeasuredRun, MeasuredGpu)


@dataclass(frozen=True, slots=True)
class Measurements:
    """All of a table."""

    runs: tuple[MeasuredRun, ...] = ()
    gpus: tuple[MeasuredGpu, ...] = ()


def load_measurements(path: Path) -> Measurements:
    """Return all of a table; nothing where there is no such file."""
    if not path.exists():
        return Measurements()
    content = _parsed(path)

    def checked(kind: str, read: Callable[[dict[str, Any], Path], _Measured]) -> Iterator[_Measured]:
        for number, entry in enumerate(content.get(kind, [])):
            try:
                yield read(entry, path.parent)
            except ConfigError as error:
                raise error.at(f"{kind}[{number}]").at(str(path)) from error

    return Measurements(tuple(checked("run", measured_run)), tuple(checked("calibration", measured_gpu)))


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path, "run", _REMEDY))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("run", str(path), f"is no TOML: {error}", _REMEDY) from error


def _text(measurements: Measurements) -> str:
    """Return a table as TOML; its basic strings are JSON's."""
    from json import dumps

    def entry(kind: str, measured: MeasuredRun | MeasuredGpu) -> str:
        lines = (f"{key} = {dumps(value, ensure_ascii=False)}\n" for key, value in asdict(measured).items() if value)
        return f"[[{kind}]]\n" + "".join(lines)

    runs = [entry("run", run) for run in measurements.runs]
    return "\n".join([*runs, *(entry("calibration", gpu) for gpu in measurements.gpus)])


def _kept_beside(calibration: Path, table: Path) -> str:
    """Copy a calibration to the table's folder, and return its path from there; its name tells contents apart."""
    content = calibration.read_bytes()
    name = f"calibrations/{calibration.stem}-{hashlib.sha256(content).hexdigest()[:8]}.json"
    (table.parent / "calibrations").mkdir(exist_ok=True)
    write_atomically(table.parent / name, content)
    return name


def _with(new: _Measured, before: Sequence[_Measured]) -> tuple[_Measured, ...]:
    """Return the measurements with a new one, which replaces the one of its key, in the order of their keys."""
    return tuple(sorted([*(one for one in before if one.key != new.key), new], key=lambda one: one.key))


def add(
    file: Annotated[Path, tyro.conf.arg(metavar="FILE")],
    /,
    *,
    into: Path = Path("benchmarks/data/contributed.toml"),
    json: JsonFile = None,
) -> None:
    """Check a measured run, or a calibration, and add it to a table.

    A run of the same command, cluster, contributor and date is replaced, and so is a calibration whose file has the
    same name, of the same contributor and date. The calibration is copied to the table's folder.

    Args:
        file: a TOML file: command, cluster, step_time, contributor, source, software, date; where known stack, memory,
            calibration, notes. Of a calibration alone: calibration, contributor, source, date; notes.
        into: the table.
        json: write what was added as it was read, how many runs and calibrations the table has, and the command that
            forecasts with it.
    """
    check_writable(json=json)
    entry = _parsed(file)
    try:
        read = measured_gpu if "calibration" in entry and entry.keys().isdisjoint(_RUN_ONLY) else measured_run
        new = read(entry, file.parent)
    except ConfigError as error:
        raise error.at(str(file)) from error
    if not into.parent.is_dir():
        remedy = "run this in a checkout of foretrain, or name a table with --into"
        raise ConfigError("into", str(into), f"is in no folder: there is no {into.parent}", remedy)
    before = load_measurements(into)
    if new.calibration:
        new = replace(new, calibration=_kept_beside(file.parent / new.calibration, into))
    if isinstance(new, MeasuredRun):
        after = replace(before, runs=_with(new, before.runs))
        command = _forecast_of(new, into)
    else:
        after = replace(before, gpus=_with(new, before.gpus))
        command = f"foretrain simulate --device {shlex.quote(str(into.parent / new.calibration))} -- train.py"
    write_atomically(into, _text(after))
    runs, gpus = len(after.runs), len(after.gpus)
    replaced = runs + gpus == len(before.runs) + len(before.gpus)
    counts = [f"{count} {what}{'s' * (count != 1)}" for count, what in ((runs, "run"), (gpus, "calibration")) if count]
    what = f"{' and '.join(counts)}, {'one replaced' if replaced else 'one more'}"
    sys.stdout.write(f"{into}: {what}\n{'compare' if isinstance(new, MeasuredRun) else 'use'}: {command}\n")
    if json is not None:
        kind = "run" if isinstance(new, MeasuredRun) else "calibration"
        numbers = {"runs": runs, "calibrations": gpus, "replaced": replaced, "command": command}
        write_json(json, {kind: asdict(new), **numbers})


def _forecast_of(run: MeasuredRun, table: Path) -> str:
    """Return the command that forecasts a run of a table."""
    options = ["--cluster", run.cluster]
    if run.calibration:
        options += ["--device", str(table.parent / run.calibration)]
    if run.stack:
        options += ["--factor", run.stack]
    variables, script = run.parts()
    set_by_shell = (f"{name}={shlex.quote(value)} " for name, _, value in (each.partition("=") for each in variables))
    return "".join(set_by_shell) + shlex.join(["foretrain", "simulate", *options, "--", *script])


COMMANDS = {"add": add}
"""Subcommands of ``foretrain accuracy`` by name."""
