"""``foretrain accuracy add``: a run that somebody measured, checked and added to a table of such runs.

The table is TOML, one ``[[run]]`` for each; benchmarks/data/contributed.toml in a checkout of foretrain is the one that
benchmarks/accuracy.py compares with forecasts. A file to add has the keys of one run, `MeasuredRun`.
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
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from foretrain.cli.arguments import JsonFile, check_writable
from foretrain.errors import ConfigError, unknown
from foretrain.files import read_text, write_atomically, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

HELP = "Add a measured run to those that forecasts are compared with."
_REMEDY = "see 'foretrain accuracy add' in the reference of commands for the format"
_NEEDED = ("command", "cluster", "step_time", "contributor", "source", "software", "date")
_KEYS = (*_NEEDED, "stack", "memory", "calibration", "notes")
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


def measured_run(entry: dict[str, Any], folder: Path) -> MeasuredRun:
    """Return a checked run of a file in ``folder``; ConfigError names the key, its value and the remedy."""
    from foretrain.device import stack_factor
    from foretrain.device.calibration import load
    from foretrain.device.presets import preset
    from foretrain.network.deployment_notation import place
    from foretrain.units import parse_size, parse_time

    for key in entry:
        if key not in _KEYS:
            raise unknown("key", key, _KEYS)
    for key in _NEEDED:
        if key not in entry:
            raise ConfigError(key, None, "is missing", _REMEDY)
    if isinstance(entry["date"], datetime.date):
        entry = {**entry, "date": entry["date"].isoformat()}
    for key, value in entry.items():
        if not isinstance(value, str) or (key in _NEEDED and not value.strip()):
            raise ConfigError(key, value, "is no text, or empty", _REMEDY)
    found = MeasuredRun(**entry)
    try:
        _, words = found.parts()
    except ValueError as error:
        problem = f"cannot be split into words ({error})"
        raise ConfigError("command", found.command, problem, "quote as in a shell") from None
    remedy = "write the day of the measurement, e.g. 2026-11-25"
    try:
        date = datetime.date.fromisoformat(found.date)
    except ValueError:
        raise ConfigError("date", found.date, "is not a date", remedy) from None
    if date > datetime.datetime.now(datetime.UTC).date():
        raise ConfigError("date", found.date, "is in the future", remedy)
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


def load_runs(path: Path) -> list[MeasuredRun]:
    """Return the runs of a table; none where there is no such file."""
    if not path.exists():
        return []
    found: list[MeasuredRun] = []
    for number, entry in enumerate(_parsed(path).get("run", [])):
        try:
            found.append(measured_run(entry, path.parent))
        except ConfigError as error:
            raise error.at(f"run[{number}]").at(str(path)) from error
    return found


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path, "run", _REMEDY))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("run", str(path), f"is no TOML: {error}", _REMEDY) from error


def _text(runs: Sequence[MeasuredRun]) -> str:
    """Return a table as TOML; its basic strings are JSON's."""
    from json import dumps

    def entry(run: MeasuredRun) -> str:
        lines = (f"{key} = {dumps(value, ensure_ascii=False)}\n" for key, value in asdict(run).items() if value)
        return "[[run]]\n" + "".join(lines)

    return "\n".join(map(entry, runs))


def _kept_beside(calibration: Path, table: Path) -> str:
    """Copy a calibration to the table's folder, and return its path from there; its name tells contents apart."""
    content = calibration.read_bytes()
    name = f"calibrations/{calibration.stem}-{hashlib.sha256(content).hexdigest()[:8]}.json"
    (table.parent / "calibrations").mkdir(exist_ok=True)
    write_atomically(table.parent / name, content)
    return name


def add(
    run: Annotated[Path, tyro.conf.arg(metavar="FILE")],
    /,
    *,
    into: Path = Path("benchmarks/data/contributed.toml"),
    json: JsonFile = None,
) -> None:
    """Check a measured run and add it to a table; one of the same command, cluster, contributor and date is replaced.

    Its calibration is copied to the table's folder.

    Args:
        run: a TOML file: command, cluster, step_time, contributor, source, software, date; where known stack, memory,
            calibration, notes.
        into: the table.
        json: write the run as it was read, how many the table has, and the command that forecasts it.
    """
    check_writable(json=json)
    entry = _parsed(run)
    try:
        new = measured_run(entry, run.parent)
    except ConfigError as error:
        raise error.at(str(run)) from error
    if not into.parent.is_dir():
        remedy = "run this in a checkout of foretrain, or name a table with --into"
        raise ConfigError("into", str(into), f"is in no folder: there is no {into.parent}", remedy)
    before = load_runs(into)
    if new.calibration:
        new = replace(new, calibration=_kept_beside(run.parent / new.calibration, into))
    rest = [one for one in before if one.key != new.key]
    write_atomically(into, _text(sorted([*rest, new], key=lambda one: one.key)))
    options = ["--cluster", new.cluster]
    if new.calibration:
        options += ["--device", str(into.parent / new.calibration)]
    if new.stack:
        options += ["--factor", new.stack]
    variables, script = new.parts()
    set_by_shell = (f"{name}={shlex.quote(value)} " for name, _, value in (each.partition("=") for each in variables))
    command = "".join(set_by_shell) + shlex.join(["foretrain", "simulate", *options, "--", *script])
    replaced, runs = len(rest) < len(before), len(rest) + 1
    what = f"{runs} run{'s' * (runs != 1)}, {'one replaced' if replaced else 'one more'}"
    sys.stdout.write(f"{into}: {what}\ncompare: {command}\n")
    if json is not None:
        write_json(json, {"run": asdict(new), "runs": runs, "replaced": replaced, "command": command})


COMMANDS = {"add": add}
"""Subcommands of ``foretrain accuracy`` by name."""
