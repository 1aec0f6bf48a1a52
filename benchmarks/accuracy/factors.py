"""The constants that are fitted, and on which rows: at most two for each GPU and framework."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from row_outcome import outcome
from rows import Row

ANCHORS = {
    ("H100-HBM2e", "torchtitan"): ("torchtitan-0001", "torchtitan-0006"),
    ("A100", "torchtitan"): ("torchtitan-0036", "torchtitan-0035"),
    ("H200", "torchtitan"): ("torchtitan-0032",),
    ("H100", "fms-fsdp"): ("fmsfsdp-0002", "fmsfsdp-0006"),
    ("A100", "fms-fsdp"): ("fmsfsdp-0005",),
    ("H100", "neusight"): ("neusight-0005", "neusight-0008"),
    ("B200", "megatron"): ("simumax-b200-0009", "simumax-b200-0026"),
}
"""The rows that a stack's factor is fitted on."""


HOST_ANCHORS = {("A100", "megatron-deepspeed"): ("vtrain-single-0256", "vtrain-single-0522")}
"""The rows that a stack's factor of the host is fitted on, in place of that of operators."""


def fit(rows: dict[str, Row], wanted: set[str]) -> None:
    """Prints the factors with which the forecasts of anchors in ``wanted`` are right, by the secant method."""
    for (device, stack), names in ANCHORS.items():
        if not wanted & set(names):
            continue
        found = [_secant(lambda x, row=rows[name]: outcome(row, x).error, 1.0, 1.15) for name in names]
        print(f"{stack}: {device} = {statistics.geometric_mean(found):.3f}  # {', '.join(names)}", flush=True)
    for (device, stack), names in HOST_ANCHORS.items():
        if not wanted & set(names):
            continue
        found = [_secant(lambda x, row=rows[name]: outcome(row, host=x).error, 6.0, 8.0) for name in names]
        print(f"{stack}: host.{device} = {statistics.geometric_mean(found):.2f}  # {', '.join(names)}", flush=True)


def _secant(error: Callable[[float], float], low: float, high: float) -> float:
    """Where ``error``, nearly linear, is 0."""
    at_low, at_high = error(low), error(high)
    return low - at_low * (high - low) / (at_high - at_low)
