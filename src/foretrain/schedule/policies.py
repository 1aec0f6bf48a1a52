"""A policy with its knobs as text: ``"bytescheduler(partition=1MB, credit=4MB)"`` and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Protocol

from foretrain.engine import Policy
from foretrain.errors import ConfigError, unknown
from foretrain.schedule.by_readiness import Ddp, Dear, Fifo, Fusion, MgWfbp
from foretrain.schedule.by_urgency import P3, ByteScheduler, LargestTailFirst
from foretrain.schedule.job import Job, Knob, KnobValue
from foretrain.schedule.pace import Pace
from foretrain.schedule.prophet import Prophet
from foretrain.schedule.tictac import Tac, Tic
from foretrain.tasks import Priorities


class ScheduledPolicy(Policy, Protocol):
    """A policy as the worlds need it.

    Attributes:
        knobs: its constructor's keyword arguments.
        barrier: whether the optimizer and the next forward pass wait until everything has landed.
        warmup: steps after which its decisions repeat.
        priorities: of what is ready; whatever its knobs are.
    """

    knobs: ClassVar[tuple[Knob, ...]]
    barrier: bool
    warmup: int
    priorities: Priorities


POLICIES: Mapping[str, type[ScheduledPolicy]] = {
    "fifo": Fifo,
    "ddp": Ddp,
    "fusion": Fusion,
    "p3": P3,
    "tictac": Tac,
    "tic": Tic,
    "mgwfbp": MgWfbp,
    "dear": Dear,
    "pace": Pace,
    "bytescheduler": ByteScheduler,
    "prophet": Prophet,
    "largest_tail_first": LargestTailFirst,
}
"""Every policy by the name that commands and functions take."""
IDEAL = "largest_tail_first"
"""The one that is there to compare with: it wins nothing that the others could not have."""

AUTO = "auto"
"""Written where a schedule may be: the planner shall choose (`foretrain.planner`). It is no policy itself."""

_SPEC = re.compile(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_COMMA = re.compile(r",(?![^\[]*\])")
"""A comma that is not inside a list."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A policy by name, and the knobs that differ from their defaults.

    Raises ConfigError for an unknown policy or knob (naming the near ones) and for a knob out of range.
    """

    name: str
    knobs: Mapping[str, KnobValue] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise unknown("schedule", self.name, POLICIES)
        known = {knob.name: knob for knob in POLICIES[self.name].knobs}
        checked = {}
        for name, value in self.knobs.items():
            try:
                if name not in known:
                    raise unknown("knob", name, known)
                checked[name] = known[name].check(value)
            except ConfigError as error:
                raise error.at(f"schedule {self.name}") from None
        object.__setattr__(self, "knobs", MappingProxyType(checked))

    @property
    def settings(self) -> dict[str, KnobValue]:
        """Every knob, defaults included."""
        return {knob.name: self.knobs.get(knob.name, knob.default) for knob in POLICIES[self.name].knobs}

    def build(self, job: Job) -> ScheduledPolicy:
        """The policy, ready to schedule ``job``."""
        return POLICIES[self.name](job, **self.settings)  # pyright: ignore[reportCallIssue]

    def __str__(self) -> str:
        knobs = {knob.name: knob for knob in POLICIES[self.name].knobs}
        inside = ", ".join(f"{name}={knobs[name].write(value)}" for name, value in self.knobs.items())
        return f"{self.name}({inside})" if inside else self.name


def spec(text: str | Spec) -> Spec:
    """The policy that ``text`` spells."""
    if isinstance(text, Spec):
        return text
    match = _SPEC.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(
            "schedule", text, "is not a schedule", "write e.g. 'bytescheduler(partition=1MB, credit=4MB)'"
        )
    name = match[1].lower().replace("-", "_")
    if name == AUTO:
        remedy = "name a policy, or choose one: foretrain.choose(workload, cluster).schedule"
        raise ConfigError("schedule", text, "is no policy, but the wish that one be chosen", remedy)
    if name not in POLICIES:
        raise unknown("schedule", match[1], POLICIES)
    known = {knob.name: knob for knob in POLICIES[name].knobs}
    knobs: dict[str, KnobValue] = {}
    for part in filter(None, (part.strip() for part in _COMMA.split(match[2] or ""))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise ConfigError(f"schedule {name}", part, "is not knob=value", "write e.g. 'partition=1MB'")
        if key not in known:
            raise unknown(f"schedule {name}: knob", key, known)
        if key in knobs:
            raise ConfigError(f"schedule {name}.{key}", value, "contradicts the value before it", "give each knob once")
        try:
            knobs[key] = known[key].parse(value)
        except ConfigError as error:
            raise error.at(f"schedule {name}") from None
    return Spec(name, knobs)
