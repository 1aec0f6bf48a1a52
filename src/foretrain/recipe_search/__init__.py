"""Which recipe? Search over an unmodified script's own flags, by live simulation.

    space → recipes → short simulations → whole simulations of what may be the best → ranking with intervals

space.py       values, conditions, command lines     search.py      which recipe is simulated next, and which never
evaluation.py  one simulation, in a worker           comparison.py  intervals of comparisons, why a recipe loses
api.py         `search`: everything together         goodput.py     failures, checkpoints, restarts
bill.py        energy and money                      presets/       spaces of torchtitan and Megatron-LM
"""

from foretrain.recipe_search.api import SearchResult, search

__all__ = ["SearchResult", "search"]
