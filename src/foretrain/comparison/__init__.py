"""Every schedule on one workload: the table, the sweep, and the advice."""

from foretrain.comparison.advice import Advice, advise, fastest
from foretrain.comparison.sweeps import Sweep, sweep
from foretrain.comparison.table import Comparison, compare

__all__ = ["Advice", "Comparison", "Sweep", "advise", "compare", "fastest", "sweep"]
