"""The TOML file of a sweep: which workloads, clusters, schedules, knobs and seeds.

    seeds = 3                                            # or a list of them
    jitter = 0.03                                        # what they vary; see `foretrain.workload.step`
    exclude = ["schedule = p3 and rate >= 50Gbps"]       # see `foretrain.experiments.conditions`

    [[workloads]]
    model = ["resnet50", "vgg16"]                        # of the zoo; or file = "mine.toml"
    batch = [32, 64]

    [[clusters]]
    notation = "{hosts}x8xV100@{rate}"
    axes = { hosts = [2, 4], rate = { from = "1Gbps", to = "100Gbps", points = 9 } }

    [[schedules]]
    notation = "bytescheduler"
    knobs = { partition = ["1MB", "4MB"], credit = { from = "4MB", to = "64MB", points = 5 } }

Every table is the product of what it lists, and the sweep the product of workloads, clusters, schedules and seeds.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from foretrain.device import Precision
from foretrain.errors import ConfigError, unknown
from foretrain.experiments.conditions import Axis, Range
from foretrain.files import read_text


class WorkloadAxis(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Models of the zoo with what `foretrain.workload.zoo` takes, or recorded workloads, which take nothing."""

    model: str | list[str] | None = None
    file: str | list[str] | None = None
    batch: int | list[int] | Range | None = None
    precision: Precision | list[Precision] | None = None
    device: str | list[str] | None = None
    sequence: int | list[int] | Range | None = None
    throughput: float | None = None


class ClusterAxis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Notations of clusters, in which ``{name}`` stands for the values of the axis of that name."""

    notation: str | list[str]
    axes: dict[str, Axis] = {}


class ScheduleAxis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Notations of schedules, knobs to add to them, and whether the others are searched for their best."""

    notation: str | list[str]
    knobs: dict[str, Axis] = {}
    tuned: bool | None = None


class SweepFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of a sweep file.

    Attributes:
        workloads: what is trained; a text is a model of the zoo.
        clusters: where; a text is a notation.
        schedules: how; a text is a notation.
        name: for people.
        seeds: of the jitter: how many, or which.
        jitter: relative spread of layer times, one or several.
        tuned: whether schedules that do not say so themselves have their free knobs searched.
        baseline: what speed-ups are counted from; its free knobs are searched.
        exclude: conditions; what meets one of them is left out.
        objectives: two columns that the Pareto front is made of; chosen by what varies where empty.
    """

    workloads: list[str | WorkloadAxis]
    clusters: list[str | ClusterAxis]
    schedules: list[str | ScheduleAxis]
    name: str = ""
    seeds: int | list[int] = 1
    jitter: float | list[float] = 0.0
    tuned: bool = False
    baseline: str = "ddp"
    exclude: list[str] = []
    objectives: list[str] = []


_TABLES: dict[str, type[msgspec.Struct]] = {
    "workloads": WorkloadAxis,
    "clusters": ClusterAxis,
    "schedules": ScheduleAxis,
}
"""What stands below the sweep itself; below that there are only ranges."""
_EXAMPLES = {"workloads": '["resnet50"]', "clusters": '["4x8xV100@10Gbps"]', "schedules": '["ddp", "bytescheduler"]'}
_PATH = re.compile(r"(?P<problem>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")


def read(path: str | Path) -> SweepFile:
    """Return the sweep that the file at ``path`` declares. Raises ConfigError that names the file and the field."""
    text = read_text(path, "sweep", "give the path of a sweep's .toml file, in UTF-8")
    try:
        return parse(text)
    except ConfigError as error:
        raise error.at(str(path)) from None


def parse(text: str) -> SweepFile:
    """Return the sweep that ``text`` declares. Raises ConfigError that names the field, and near ones if unknown."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError("TOML", "", f"does not parse ({error})", "correct that line") from None
    try:
        sweep = msgspec.convert(table, SweepFile)
    except msgspec.ValidationError as error:
        raise _config_error(str(error), table) from None
    for field in _TABLES:
        if not getattr(sweep, field):
            raise ConfigError(field, [], "is empty", f"write e.g. {field} = {_EXAMPLES[field]}")
    return sweep


def _config_error(message: str, table: dict[str, Any]) -> ConfigError:
    """Return msgspec's error as a ConfigError."""
    found = _PATH.fullmatch(message)
    assert found is not None
    path, problem = found["path"] or "", found["problem"]
    below = f"{path}." if path else ""
    if match := _UNKNOWN.fullmatch(problem):
        if path and match[1] in SweepFile.__struct_fields__:
            remedy = f"it is of the whole sweep: write it above all [[{']], [['.join(_TABLES)}]]"
            return ConfigError(path, match[1], "is unknown there", remedy)
        return unknown(path or "sweep", match[1], _fields(path))
    if match := _MISSING.fullmatch(problem):
        example = _EXAMPLES.get(match[1], "...")
        return ConfigError(f"{below}{match[1]}", None, "is missing", f"write e.g. {match[1]} = {example}")
    return ConfigError(path or "sweep", _at(path, table), f"does not suit: {problem[:1].lower()}{problem[1:]}", _HELP)


_HELP = "see docs/sweep.md for what a sweep may say"


def _fields(path: str) -> tuple[str, ...]:
    """Return the fields that the table at ``path`` may have."""
    top, _, rest = path.partition(".")
    kind = SweepFile if not path else Range if rest else _TABLES.get(top.partition("[")[0], Range)
    return kind.__struct_encode_fields__


def _at(path: str, table: Any) -> object:
    """Return the value at ``path`` as far as the path names it; msgspec writes keys of a dictionary as ``[...]``."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
        if index == "...":
            break
        table = table[name] if name else table[int(index)]
    return table
