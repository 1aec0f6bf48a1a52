"""The real world: threads, clocks and, in time, torch.distributed."""

from foretrain.runtime.wall import WallWorld

__all__ = ["WallWorld"]
