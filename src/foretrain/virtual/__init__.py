"""The simulated world: an event heap in picoseconds, pipes, and a training loop that replays a workload."""

from foretrain.virtual.run import Run
from foretrain.virtual.simulation import bound, simulate
from foretrain.virtual.world import VirtualWorld

__all__ = ["Run", "VirtualWorld", "bound", "simulate"]
