"""Measurement of operators on the GPU, or the CPU, at hand: a grid of the usual ones, or those that a script launched.

calibration = measure(torch.device("cuda"), calls, rounds=25)

Needs torch, which the rest of `foretrain.device` does not.
"""

from foretrain.operator_benchmark.session import MeasuredOperators, MeasuringSession, measure

__all__ = ["MeasuredOperators", "MeasuringSession", "measure"]
