"""Saved plans: the chosen schedule, its expected gain, and the workload and cluster it was chosen for.

A plan file is TOML that a person can read and edit, checked strictly:

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

`requested_schedule` reads what users write where a schedule is named: a policy, ``"auto"`` or the path of a plan file.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from foretrain.errors import ConfigError, unknown
from foretrain.files import read_text, write_atomically
from foretrain.network import Cluster, Exchange, Place
from foretrain.planner.candidate_search import engine_of
from foretrain.planner.choice import Recommendation, choose
from foretrain.schedule import AUTO, POLICIES, CostModel, Spec, spec
from foretrain.units import Time, exact_size, exact_time, format_size, format_time, parse_size, parse_time
from foretrain.workload.step import Workload

_CLOSE = 0.1
"""Measured times that differ by less are the same."""
_TIMES = 2.0
"""Costs of an operation that differ by less than this factor are."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Properties of the workload and the network that a plan was made for, as far as they decide about schedules.

    Attributes:
        workload: its name, for people.
        cluster: its description, for people.
        tensors: gradients.
        size: their bytes on the wire.
        compute: Σb + Σf.
        ranks: N of the exchange: hosts, or the ranks of a topology.
        exchange: how long all gradients take on the link alone.
        overhead: θ.
    """

    workload: str
    cluster: str
    tensors: int
    size: int
    compute: Time
    ranks: int
    exchange: Time
    overhead: Time

    def differences(self, here: Fingerprint) -> Iterator[str]:
        """Yield a text for each difference from ``here``; names of workloads and clusters do not count."""
        if here.tensors != self.tensors:
            yield f"{here.tensors} gradients, planned for {self.tensors}"
        if here.size != self.size:
            yield f"{format_size(here.size)} of gradients on the wire, planned for {format_size(self.size)}"
        if here.ranks != self.ranks:
            yield f"{here.ranks} ranks exchange them, planned for {self.ranks}"
        if not _near(here.compute, self.compute, 1 + _CLOSE):
            yield f"a step computes for {format_time(here.compute)}, planned for {format_time(self.compute)}"
        if not _near(here.exchange, self.exchange, 1 + _CLOSE):
            yield f"gradients take {format_time(here.exchange)} on the link, planned for {format_time(self.exchange)}"
        if not _near(here.overhead, self.overhead, _TIMES):
            yield f"an operation costs {format_time(here.overhead)}, planned for {format_time(self.overhead)}"


def fingerprint(workload: Workload, place: Place | None, cost: CostModel, ranks: int) -> Fingerprint:
    """Return the fingerprint of ``workload``, as sent, on a network of ``cost``; ``place`` may not be known."""
    return Fingerprint(
        workload=f"{workload.name}, batch {workload.batch}",
        cluster="" if place is None else str(place),
        tensors=len(workload.gradients),
        size=workload.size,
        compute=workload.compute,
        ranks=ranks,
        exchange=cost.time(workload.size),
        overhead=cost.overhead,
    )


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """Chosen schedule as a plan file stores it.

    Attributes:
        schedule: the policy with its knobs.
        engine: how gradients become sums.
        servers: of their own, with the engine "ps".
        compression: None, "fp16" or "bf16".
        time: of an iteration, expected.
        baseline: of DDP at its best, expected.
        uncertainty: one standard deviation of the gain.
        made_for: the workload and the cluster.
    """

    schedule: Spec
    engine: Exchange
    servers: int
    compression: str | None
    time: Time
    baseline: Time
    uncertainty: float
    made_for: Fingerprint

    @property
    def gain(self) -> float:
        """Expected, over DDP at its best."""
        return self.baseline / self.time - 1

    def differences(
        self, here: Fingerprint, served: bool | None = None, compression: str | None = None
    ) -> tuple[str, ...]:
        """Return a text for each difference from the plan.

        Args:
            here: of what is to run.
            served: whether over a parameter server; None does not compare.
            compression: what gradients are sent as.
        """
        found = list(self.made_for.differences(here))
        if served is not None and served != (self.engine != "all_reduce"):
            how = "a parameter server" if served else "all-reduce"
            found.insert(0, f"gradients go by {how}, planned for {self.engine}")
        if compression != self.compression:
            planned = self.compression or "no compression"
            found.insert(0, f"gradients are sent as {compression or 'they are'}, planned for {planned}")
        return tuple(found)


def saved(choice: Recommendation) -> SavedPlan:
    """Return ``choice`` as a plan file stores it."""
    chosen, place = choice.chosen, choice.chosen.place
    ranks = place.workers if isinstance(place, Cluster) else place.total_gpus
    assert choice.baseline.time is not None
    return SavedPlan(
        schedule=_spelled_out(chosen.schedule),
        engine=engine_of(place),
        servers=place.servers if isinstance(place, Cluster) else 0,
        compression=chosen.compression,
        time=choice.time,
        baseline=choice.baseline.time,
        uncertainty=choice.uncertainty,
        made_for=fingerprint(chosen.workload, place, place.cost, ranks),
    )


def _spelled_out(plan: Spec) -> Spec:
    """Return ``plan`` with every tunable knob spelled out, so that later defaults do not change it."""
    tuned = {knob.name: plan.settings[knob.name] for knob in POLICIES[plan.name].knobs if knob.tunable}
    return Spec(plan.name, {**tuned, **plan.knobs})


def _near(one: Time, other: Time, factor: float) -> bool:
    low, high = sorted((max(1, one), max(1, other)))
    return high <= low * factor


_REMEDY = "write it anew with `foretrain plan WORKLOAD --cluster CLUSTER --out FILE`"
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


_TIME = (exact_time, parse_time)
_UNITS = {"size": (exact_size, parse_size), "compute": _TIME, "exchange": _TIME, "overhead": _TIME}
"""Writer and parser of each field of `_MadeFor` that has a unit."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of a plan file."""

    policy: str
    engine: Literal["all_reduce", "ps", "ps_colocated"]
    expected: _Expected
    made_for: _MadeFor
    compression: Literal["none", "fp16", "bf16"] = "none"
    servers: int = 0
    knobs: dict[str, str] = {}


def save(plan: SavedPlan, path: str | os.PathLike[str]) -> None:
    """Write ``plan``; an existing file is replaced in one step or not at all."""
    write_atomically(path, dumps(plan))


def load(path: str | os.PathLike[str]) -> SavedPlan:
    """Read a plan. Raises ConfigError that names the file, the key, what stood there and what to write."""
    text = read_text(path, "plan", "give the path of a plan file")
    try:
        return loads(text)
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error.field}", error.value, error.problem, error.remedy) from None


def dumps(plan: SavedPlan) -> str:
    """Return the plan file's text."""
    known = {knob.name: knob for knob in POLICIES[plan.schedule.name].knobs}
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
            name: _UNITS[name][0](value) if name in _UNITS else value for name, value in asdict(plan.made_for).items()
        },
    }
    lines = [_HEAD.rstrip()]
    for title, table in tables.items():
        lines += ["", f"[{title}]"] if title else [""]
        lines += [f"{key} = {_written(value)}" for key, value in table.items()]
    return "\n".join([*lines, ""])


def loads(text: str) -> SavedPlan:
    """Return the plan that ``text`` spells; ConfigError names the key."""
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
        raise ConfigError("expected.uncertainty", read.expected.uncertainty, "is not a share", "write e.g. 0.02")
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
            **{
                name: _UNITS[name][1](value, f"made_for.{name}") if name in _UNITS else value
                for name, value in msgspec.structs.asdict(made).items()
            }
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
    """Turn a message of msgspec into a ConfigError that names the key, its value and what is expected."""
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


@dataclass(frozen=True, slots=True)
class Auto:
    """Request that the planner chooses a schedule, once workload and cluster are known. It has no knobs."""

    def __str__(self) -> str:
        return AUTO


ScheduleRequest: TypeAlias = Spec | Auto | SavedPlan
"""Parsed argument ``schedule``: a policy with its knobs, the request to choose one, or a plan file."""


def requested_schedule(schedule: str | os.PathLike[str] | ScheduleRequest) -> ScheduleRequest:
    """Parse ``schedule``: ``"auto"``, the path of a plan file (ends in ``.toml``), or a policy with its knobs.

    ConfigError names what does not read, and what to write.
    """
    if isinstance(schedule, Spec | Auto | SavedPlan):
        return schedule
    if isinstance(schedule, os.PathLike):
        return load(schedule)
    if not isinstance(schedule, str):
        return spec(schedule)  # refuses it
    text = schedule.strip()
    if text.lower() == AUTO:
        return Auto()
    if text.lower().startswith(f"{AUTO}("):
        raise ConfigError("schedule", schedule, "has knobs, which the planner sets", "write auto alone, or a policy")
    return load(text) if text.endswith(".toml") else spec(text)


def resolved(schedule: ScheduleRequest, workload: Workload, place: Place) -> Spec:
    """Return the policy with its knobs that ``schedule`` means for ``workload`` on ``place``."""
    if isinstance(schedule, Auto):
        return choose(workload, place).schedule
    return schedule.schedule if isinstance(schedule, SavedPlan) else schedule


def request_text(schedule: ScheduleRequest) -> str:
    """Return ``schedule`` as text; of a plan file its policy."""
    return str(schedule.schedule if isinstance(schedule, SavedPlan) else schedule)
