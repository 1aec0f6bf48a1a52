"""Planner: the best schedule for one workload on one cluster, and its gain over plain DDP.

every policy × knobs × backend × compression ─▶ choose ─▶ Recommendation ─▶ a job, or a plan file

`tune` searches the knobs of one policy against the simulator; `foretrain.planner.online` does so while a job trains.
"""

from foretrain.planner.backends import COMPRESSIONS, engines
from foretrain.planner.candidate_search import Candidate
from foretrain.planner.choice import GainUncertainty, Recommendation, choose
from foretrain.planner.plan import (
    Auto,
    SavedPlan,
    ScheduleRequest,
    load,
    request_text,
    requested_schedule,
    resolved,
    save,
    saved,
)
from foretrain.planner.search import forecaster, start, tune

__all__ = [
    "COMPRESSIONS",
    "Auto",
    "Candidate",
    "GainUncertainty",
    "Recommendation",
    "SavedPlan",
    "ScheduleRequest",
    "choose",
    "engines",
    "forecaster",
    "load",
    "request_text",
    "requested_schedule",
    "resolved",
    "save",
    "saved",
    "start",
    "tune",
]
