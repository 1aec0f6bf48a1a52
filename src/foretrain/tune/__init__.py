"""Knobs at their best: search against the simulator."""

from foretrain.tune.search import tune

__all__ = ["tune"]
