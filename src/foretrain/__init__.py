"""foretrain: forecast and speed up distributed DNN training.

One communication scheduler for two worlds: the policies that order gradient traffic are pure state machines that run
in a simulator and on a real clock alike, and every result comes with its distance to the provable optimum.

    import foretrain as ft

    workload = ft.workload.zoo("resnet50", batch=64, device="V100")
    table = ft.compare(workload, "4x8xV100@100Gbps")
    run = ft.simulate(workload, "4 workers @ 1Gbps", schedule="prophet")
    print(ft.bound(workload, "4 workers @ 1Gbps"))

Names are imported on first use, so that ``import foretrain`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrain import network as cluster
    from foretrain import workload
    from foretrain.comm.options import AllReduce, BoundedLoss, ParameterServer, Timeouts
    from foretrain.comm.session import CommTask, Session
    from foretrain.errors import ConfigError, ForetrainError
    from foretrain.experiments import Comparison, compare, sweep
    from foretrain.network import Cluster
    from foretrain.planner import Recommendation, choose
    from foretrain.plugins.torch import Attached, attach
    from foretrain.recipe_search import Failures, SearchResult, Stragglers, search
    from foretrain.schedule import Bound, Spec
    from foretrain.simulation import Run, bound, simulate
    from foretrain.trace import Timeline
    from foretrain.workload import Workload

__version__ = "0.1.0"
__all__ = [
    "AllReduce",
    "Attached",
    "Bound",
    "BoundedLoss",
    "Cluster",
    "CommTask",
    "Comparison",
    "ConfigError",
    "Failures",
    "ForetrainError",
    "ParameterServer",
    "Recommendation",
    "Run",
    "SearchResult",
    "Session",
    "Spec",
    "Stragglers",
    "Timeline",
    "Timeouts",
    "Workload",
    "attach",
    "bound",
    "choose",
    "cluster",
    "compare",
    "search",
    "simulate",
    "sweep",
    "workload",
]

_HOMES = {
    "AllReduce": "comm.options",
    "Attached": "plugins.torch",
    "Bound": "schedule",
    "BoundedLoss": "comm.options",
    "Cluster": "network",
    "CommTask": "comm.session",
    "Comparison": "experiments",
    "ConfigError": "errors",
    "Failures": "recipe_search",
    "ForetrainError": "errors",
    "ParameterServer": "comm.options",
    "Recommendation": "planner",
    "Run": "simulation",
    "SearchResult": "recipe_search",
    "Session": "comm.session",
    "Spec": "schedule",
    "Stragglers": "recipe_search",
    "Timeline": "trace",
    "Timeouts": "comm.options",
    "Workload": "workload",
    "attach": "plugins.torch",
    "bound": "simulation",
    "choose": "planner",
    "compare": "experiments",
    "search": "recipe_search",
    "simulate": "simulation",
    "sweep": "experiments",
}
_MODULES = {
    "cluster": "network",
    "jax": "plugins.jax",
    "keras": "plugins.keras",
    "mxnet": "mxnet",
    "lightning": "launch.lightning",
    "ray": "launch.ray",
    "workload": "workload",
}


_EXTRAS = {"jax": "jax", "keras": "keras", "lightning": "trainers", "mxnet": "mxnet", "ray": "trainers"}
"""Extra of the package that each module for a framework needs."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        try:
            return importlib.import_module(f"foretrain.{_MODULES[name]}")
        except ModuleNotFoundError as error:
            if name not in _EXTRAS or not error.name or error.name.startswith("foretrain"):
                raise
            from foretrain.errors import MissingExtra

            raise MissingExtra(error.name.partition(".")[0], _EXTRAS[name], f"foretrain.{name}") from error
    if name in _HOMES:
        return getattr(importlib.import_module(f"foretrain.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'foretrain' has no attribute {name!r}; it has: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
