"""What a user may write where a schedule is named: a policy, the wish that one be chosen, or a plan file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

from foretrain.errors import ConfigError
from foretrain.network import Place
from foretrain.planner.choice import choose
from foretrain.planner.plan import SavedPlan
from foretrain.planner.plan_file import load
from foretrain.schedule import AUTO, Spec, spec
from foretrain.workload.step import Workload


@dataclass(frozen=True, slots=True)
class Auto:
    """The wish that the planner choose, once there is a workload and a cluster to choose for. It has no knobs."""

    def __str__(self) -> str:
        return AUTO


Wanted: TypeAlias = Spec | Auto | SavedPlan


def requested_schedule(schedule: str | os.PathLike[str] | Wanted) -> Wanted:
    """What ``schedule`` asks for: ``"auto"``, the path of a plan file (ends in ``.toml``), or a policy with its knobs.

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


def resolved(schedule: Wanted, workload: Workload, place: Place) -> Spec:
    """The policy with its knobs that ``schedule`` comes to for ``workload`` on ``place``, by its own engine."""
    if isinstance(schedule, Auto):
        return choose(workload, place).schedule
    return schedule.schedule if isinstance(schedule, SavedPlan) else schedule


def said(schedule: Wanted) -> str:
    """It as a text for people and for agreements: a plan file's policy."""
    return str(schedule.schedule if isinstance(schedule, SavedPlan) else schedule)
