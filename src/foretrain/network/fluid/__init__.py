"""Flow-level simulation: bytes as a fluid that shares links max-min fairly, event by event."""

from foretrain.network.fluid.simulator import Fluid, ProgramHandle, run

__all__ = ["Fluid", "ProgramHandle", "run"]
