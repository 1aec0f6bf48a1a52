"""Many simulations side by side: all schedules on one workload, one parameter swept, or thousands of scenarios.

    compare → table and advice      sweep → curves over one parameter      grid → schedules × collectives × topologies
    sweep file → scenarios → batches → results → result table → best schedules, Pareto front

comparison.py  schedules, and advice            evaluation.py    scenarios, and their simulation in a worker
grid.py        a comparison over many clusters  execution.py     batches to workers, results to the store
sweep_file.py  keys of a file                   result_store.py  results on disk, complete after any kill
conditions.py  ranges, and excluded scenarios   result_table.py  columns, Parquet file, best schedules, Pareto front
expansion.py   all scenarios of a file
"""

from foretrain.experiments.comparison import Advice, Comparison, advise, compare, fastest
from foretrain.experiments.evaluation import Scenario
from foretrain.experiments.execution import run
from foretrain.experiments.expansion import Expansion, expand
from foretrain.experiments.grid import ParameterSweep, sweep
from foretrain.experiments.result_store import ResultStore, ScenarioResult
from foretrain.experiments.sweep_file import SweepFile, parse, read

__all__ = [
    "Advice",
    "Comparison",
    "Expansion",
    "ParameterSweep",
    "ResultStore",
    "Scenario",
    "ScenarioResult",
    "SweepFile",
    "advise",
    "compare",
    "expand",
    "fastest",
    "parse",
    "read",
    "run",
    "sweep",
]
