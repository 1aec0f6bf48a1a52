"""Knobs at their best: search against the simulator."""

from foretrain.tune.search import forecaster, start, tune

__all__ = ["forecaster", "start", "tune"]
