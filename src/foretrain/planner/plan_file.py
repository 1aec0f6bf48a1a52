"""Plan files: TOML that a person can read and edit, checked strictly.

    policy = "prophet"
    engine = "all_reduce"
    compression = "none"

    [knobs]
    partition = "2MB"

    [expected]
    iteration = "184.2ms"
    ddp = "238.1ms"
    uncertainty = 0.024

    [made_for]
    workload = "resnet50, batch 64"
    ...

`load` after `save` gives back exactly the same plan.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from foretrain.errors import ConfigError, unknown
from foretrain.files import write_atomically
from foretrain.planner.plan import Fingerprint, SavedPlan
from foretrain.schedule import POLICIES, Spec, spec
from foretrain.units import exact_size, exact_time, parse_size, parse_time

_REMEDY = "write it anew with `foretrain tune WORKLOAD --cluster CLUSTER --out FILE`"
_HEAD = """\
# What the planner chose. foretrain run --plan, foretrain simulate --plan and attach(schedule=Path(...)) take it.
# Where something else is trained than what it was made for, they say what differs.
"""


class _Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times with units; the uncertainty is a share."""

    iteration: str
    ddp: str
    uncertainty: float


class _MadeFor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See `Fingerprint`."""

    workload: str
    cluster: str
    tensors: int
    size: str
    compute: str
    ranks: int
    exchange: str
    overhead: str


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan file's keys."""

    policy: str
    engine: Literal["all_reduce", "ps", "ps_colocated"]
    expected: _Expected
    made_for: _MadeFor
    compression: Literal["none", "fp16", "bf16"] = "none"
    servers: int = 0
    knobs: dict[str, str] = {}


def save(plan: SavedPlan, path: str | os.PathLike[str]) -> None:
    """Writes ``plan``; an existing file is replaced in one step or not at all."""
    write_atomically(path, dumps(plan))


def load(path: str | os.PathLike[str]) -> SavedPlan:
    """Reads a plan. Raises ConfigError that names the file, the key, what stood there and what to write."""
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError("plan", name, f"cannot be read ({why})", "give the path of a plan file") from None
    try:
        return loads(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.field}", error.value, error.problem, error.remedy) from None


def dumps(plan: SavedPlan) -> str:
    """The file's text."""
    known = {knob.name: knob for knob in POLICIES[plan.schedule.name].knobs}
    made = plan.made_for
    tables: dict[str, dict[str, Any]] = {
        "": {
            "policy": plan.schedule.name,
            "engine": plan.engine,
            "servers": plan.servers,
            "compression": plan.compression or "none",
        },
        "knobs": {name: known[name].write(value) for name, value in plan.schedule.knobs.items()},
        "expected": {
            "iteration": exact_time(plan.time),
            "ddp": exact_time(plan.baseline),
            "uncertainty": plan.uncertainty,
        },
        "made_for": {
            "workload": made.workload,
            "cluster": made.cluster,
            "tensors": made.tensors,
            "size": exact_size(made.size),
            "compute": exact_time(made.compute),
            "ranks": made.ranks,
            "exchange": exact_time(made.exchange),
            "overhead": exact_time(made.overhead),
        },
    }
    lines = [_HEAD.rstrip()]
    for title, table in tables.items():
        lines += ["", f"[{title}]"] if title else [""]
        lines += [f"{key} = {_written(value)}" for key, value in table.items()]
    return "\n".join([*lines, ""])


def loads(text: str) -> SavedPlan:
    """The plan that ``text`` spells; ConfigError names the key."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError("TOML", text[:40], f"does not parse ({error})", "mend that line") from None
    try:
        read = msgspec.convert(table, _File, strict=True)
    except msgspec.ValidationError as error:
        raise _named(str(error), table) from None
    if read.policy not in POLICIES:
        raise unknown("policy", read.policy, POLICIES)
    if (read.servers > 0) != (read.engine == "ps"):
        raise ConfigError("servers", read.servers, f"contradicts engine {read.engine!r}", "only 'ps' has some")
    if not 0 <= read.expected.uncertainty < float("inf"):
        raise ConfigError("expected.uncertainty", read.expected.uncertainty, "is no share", "write e.g. 0.02")
    made = read.made_for
    for field in ("tensors", "ranks"):
        if getattr(made, field) < 1:
            raise ConfigError(f"made_for.{field}", getattr(made, field), "is none at all", "write 1 or more")
    return SavedPlan(
        schedule=_schedule(read),
        engine=read.engine,
        servers=read.servers,
        compression=None if read.compression == "none" else read.compression,
        time=_positive(read.expected.iteration, "expected.iteration"),
        baseline=_positive(read.expected.ddp, "expected.ddp"),
        uncertainty=read.expected.uncertainty,
        made_for=Fingerprint(
            workload=made.workload,
            cluster=made.cluster,
            tensors=made.tensors,
            size=parse_size(made.size, "made_for.size"),
            compute=parse_time(made.compute, "made_for.compute"),
            ranks=made.ranks,
            exchange=parse_time(made.exchange, "made_for.exchange"),
            overhead=parse_time(made.overhead, "made_for.overhead"),
        ),
    )


def _schedule(read: _File) -> Spec:
    known = {knob.name: knob for knob in POLICIES[read.policy].knobs}
    found = {}
    for name, value in read.knobs.items():
        if name not in known:
            raise unknown("knobs", name, known)
        try:
            found[name] = known[name].check(known[name].parse(value))
        except ConfigError as error:
            raise error.at("knobs") from None
    return spec(Spec(read.policy, found))


def _positive(text: str, field: str) -> int:
    if (time := parse_time(text, field)) < 1:
        raise ConfigError(field, text, "is no time at all", "write e.g. '184.2ms'")
    return time


def _named(message: str, table: dict[str, Any]) -> ConfigError:
    """A ConfigError for what msgspec says: the key it stands at, its value, and what is expected."""
    what, _, where = message.partition(" - at ")
    path = where.strip("`").removeprefix("$").lstrip(".")
    if missing := re.search(r"missing required field `(\w+)`", what):
        return ConfigError(".".join(filter(None, (path, missing[1]))), None, "is missing", _REMEDY)
    if extra := re.search(r"unknown field `(\w+)`", what):
        known = {"": _File, "expected": _Expected, "made_for": _MadeFor}[path]
        return unknown(".".join(filter(None, (path, "key"))), extra[1], known.__struct_fields__)
    value: Any = table
    for key in filter(None, path.split(".")):
        value = value.get(key) if isinstance(value, dict) else None
    return ConfigError(path or "plan", value, f"is not what belongs there ({what})", _REMEDY)


def _written(value: object) -> str:
    # JSON's escapes are TOML's, except that TOML also wants DEL escaped; floats are written alike.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
