"""The simulated world: an event heap in picoseconds, pipes, and a training loop that replays a workload."""

from foretrain.simulation.simulation import Run, bound, simulate
from foretrain.simulation.world import VirtualWorld

__all__ = ["Run", "VirtualWorld", "bound", "simulate"]
