"""Search for the best recipe, over an unmodified script's own flags, by live simulation.

    space → recipes → short simulations → whole simulations of what may be the best → ranking with intervals

space.py       values, conditions, command lines     strategy.py    which recipe is simulated next, and which never
evaluation.py  one simulation, in a worker           comparison.py  intervals of comparisons, why a recipe loses
bill.py        failures, energy and money            api.py         `search`: everything together
presets/       spaces of torchtitan and Megatron-LM
"""

from foretrain.recipe_search.api import SearchResult, search
from foretrain.recipe_search.bill import Failures, Stragglers

__all__ = ["Failures", "SearchResult", "Stragglers", "search"]
