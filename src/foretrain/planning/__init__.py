"""The planner: which schedule, by which engine, is best for one workload on one cluster, and is it worth it?

every policy × knobs × engine × compression ─▶ choose ─▶ Recommendation ─▶ a job, or a plan file
"""

from foretrain.planning.choice import Recommendation, choose
from foretrain.planning.compression import COMPRESSIONS
from foretrain.planning.doubt import Doubt
from foretrain.planning.engines import engines
from foretrain.planning.file import load, save
from foretrain.planning.race import Candidate
from foretrain.planning.saved import SavedPlan, saved
from foretrain.planning.wanted import Auto, Wanted, resolved, said, wanted

__all__ = [
    "COMPRESSIONS",
    "Auto",
    "Candidate",
    "Doubt",
    "Recommendation",
    "SavedPlan",
    "Wanted",
    "choose",
    "engines",
    "load",
    "resolved",
    "said",
    "save",
    "saved",
    "wanted",
]
