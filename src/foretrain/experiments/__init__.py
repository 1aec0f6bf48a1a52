"""Many simulations side by side: all schedules on one workload, one parameter swept, or thousands of scenarios.

    compare → table and advice      sweep → curves over one parameter      grid → schedules × collectives × topologies
    sweep file → scenarios → batches → results → result table → best schedules, Pareto front

sweep_file.py  what a file may say          execution.py     batches to workers, results to the store
values.py      lists and ranges             evaluation.py    simulates scenarios in a worker
conditions.py  which scenarios are excluded result_store.py  results on disk, complete after any kill
scenario.py    one scenario, and its id     result_table.py  columns, and the Parquet file
expansion.py   all scenarios of a file      pareto.py        the best, and the Pareto front
"""

from foretrain.experiments.comparison import Advice, Comparison, advise, compare, fastest
from foretrain.experiments.evaluation import Scenario
from foretrain.experiments.execution import run
from foretrain.experiments.expansion import Expansion, expand
from foretrain.experiments.parameter_sweep import ParameterSweep, sweep
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
