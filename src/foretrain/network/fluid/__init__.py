"""Flow-level simulation: bytes as a fluid that shares links max-min fairly, event by event."""

from foretrain.network.fluid.simulator import Fluid, Running, run

__all__ = ["Fluid", "Running", "run"]
