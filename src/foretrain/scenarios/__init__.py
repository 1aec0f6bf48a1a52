"""Sweeps: thousands of scenarios from one file, simulated by many processes, and never twice.

    file → scenarios → batches → results → table → best, Pareto front

file.py        what a file may say          execution.py   batches to workers, results to the journal
values.py      lists and ranges             evaluation.py  what a worker does
conditions.py  what is left out             journal.py     what survives a kill
scenario.py    a point, and its id          table.py       columns, and the Parquet file
expansion.py   all points of a file         front.py       the best, and the Pareto front

`foretrain.comparison.sweep` is the small one: every schedule along one parameter of a cluster.
"""

from foretrain.scenarios.execution import run
from foretrain.scenarios.expansion import Expansion, expand
from foretrain.scenarios.file import Sweep, parse, read
from foretrain.scenarios.journal import Journal
from foretrain.scenarios.result import Result
from foretrain.scenarios.scenario import Scenario

__all__ = ["Expansion", "Journal", "Result", "Scenario", "Sweep", "expand", "parse", "read", "run"]
