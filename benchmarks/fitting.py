"""Fits the curves of `foretrain.collective.nccl.generation` to measurements, from a start that has seen none of them.

Least squares of the logarithm of time, each row alike, large errors counted linearly (soft L1 at 5 %). The start takes
its rates from the datasheet and the same latencies for all; a weak pull towards it (2 % per factor e) keeps what the
rows do not determine there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from measurements import Measurement
from scipy.optimize import least_squares

from foretrain.collective.nccl import GPUS, Generation, ProtocolCurve
from foretrain.collective.nccl.variants import LL128_PAYLOAD, NVLS_LATENCY
from foretrain.units import MICROSECOND, SECOND

FREE: dict[str, float] = {
    "ll.launch": 7.0,
    "ll.hop": 1.0,
    "ll.rate": 0.4,
    "ll.spread": 1.0,
    "ll128.launch": 15.0,
    "ll128.hop": 1.5,
    "simple.launch": 15.0,
    "simple.hop": 4.0,
    "simple.rate": 0.8,
    "simple.ramp": 0.5,
    "simple.tail": 0.5,
    "direct.launch": 8.0,
    "direct.hop": 0.5,
    "direct.rate": 0.8,
    "direct.ramp": 0.5,
    "direct.tail": 0.5,
    "direct.spread": 1.0,
    "nvls.launch": 30.0,
    "nvls.rate": 0.55,
    "nvls.ramp": 1.0,
    "overhead": 20.0,
    "efa": 50.0,
}
"""Where a fit starts: µs, of the link's rate, ns per √byte, blocks."""

PULL = 0.02
LARGEST_TAIL = 0.99
"""With a larger tail more ranks would be faster, since their blocks are smaller."""


def curves(values: dict[str, float], generation: Generation) -> Generation:
    """The generation with these values; LL, LL128 and Simple share the tail, LL128 and Simple the links."""

    def curve(name: str) -> ProtocolCurve:
        own = {key.partition(".")[2]: v for key, v in values.items() if key.startswith(f"{name}.")}
        if name == "ll128":
            own |= {"rate": values["simple.rate"] * LL128_PAYLOAD, "ramp": values["simple.ramp"]}
        if name in ("ll", "ll128"):
            own["tail"] = values["simple.tail"]
        if name == "nvls":
            own["launch"] = max(own["launch"], NVLS_LATENCY)
        times = {key: round(own.get(key, 0.0) * MICROSECOND) for key in ("launch", "hop", "spread")}
        rate = min(own["rate"], 1.0) * generation.link
        tail = min(own.get("tail", 0.0), LARGEST_TAIL)
        return ProtocolCurve(**times, rate=rate, tail=tail, ramp=own.get("ramp", 0.0) * 1e3)

    return dataclasses.replace(
        generation,
        ll=curve("ll"),
        ll128=curve("ll128"),
        simple=curve("simple"),
        direct=curve("direct"),
        nvls=curve("nvls") if generation.nvls else None,
    )


@contextmanager
def using(generation: Generation, names: Sequence[str]) -> Iterator[None]:
    """Forecasts for these GPUs come from ``generation`` meanwhile."""
    kept = {name: GPUS[name] for name in names}
    GPUS.update({name: dataclasses.replace(gpu, generation=generation) for name, gpu in kept.items()})
    try:
        yield
    finally:
        GPUS.update(kept)


def fit(rows: Sequence[Measurement], generation: Generation, evaluations: int = 60) -> dict[str, float]:
    """Values of `FREE` that suit the rows, all of GPUs of that generation."""
    names = sorted({row.gpu for row in rows})
    free = [
        name
        for name in FREE
        if (generation.nvls or not name.startswith("nvls"))
        and (name not in ("overhead", "efa") or any(row.library.startswith("torch") for row in rows))
    ]
    start = np.array([FREE[name] for name in free])
    measured = np.log([row.seconds * SECOND for row in rows])

    def values(point: np.ndarray) -> dict[str, float]:
        return FREE | dict(zip(free, (start * np.exp(point - 1)).tolist(), strict=True))

    def residuals(point: np.ndarray) -> np.ndarray:
        tried = values(point)
        extra = round(tried["overhead"] * MICROSECOND), round(tried["efa"] * MICROSECOND)
        with using(curves(tried, generation), names):
            said = np.log([row.forecast(*extra).time for row in rows])
        return np.concatenate([said - measured, PULL * (point - 1)])

    # Around 1, not 0: steps of the derivative are relative, and smaller ones drown in picoseconds.
    found = least_squares(
        residuals, np.ones(len(free)), loss="soft_l1", f_scale=0.05, diff_step=1e-3, max_nfev=evaluations
    )
    return values(found.x)


def predictor(values: dict[str, float], generation: Generation, names: Sequence[str]) -> Callable[[Measurement], float]:
    """Relative errors of forecasts by these values."""
    extra = round(values["overhead"] * MICROSECOND), round(values["efa"] * MICROSECOND)
    fitted = curves(values, generation)

    def error(row: Measurement) -> float:
        with using(fitted, names):
            return row.forecast(*extra).time / (row.seconds * SECOND) - 1

    return error


def lines(values: dict[str, float], generation: Generation) -> str:
    """The curves as they stand in the table, rounded to what the fit determines."""
    fitted = curves(values, generation)
    text = []
    for name in ("ll", "ll128", "simple", "direct", "nvls"):
        curve = getattr(fitted, name)
        if curve is None:
            continue
        times = {key: f"_us({getattr(curve, key) / MICROSECOND:.3g})" for key in ("launch", "hop", "spread")}
        parts = [times["launch"], times["hop"] if curve.hop else "0", f"{curve.rate / 1e9:.4g}e9"]
        parts += [f"tail={curve.tail:.2g}"] if curve.tail else []
        parts += [f"ramp={float(f'{curve.ramp:.3g}')}"] if curve.ramp else []
        parts += [f"spread={times['spread']}"] if curve.spread else []
        text.append(f"    {name}=Curve({', '.join(parts)}),")
    return "\n".join(text)


def median_absolute(errors: Sequence[float]) -> float:
    """Median of |error|; nan of nothing."""
    return float(np.median(np.abs(errors))) if len(errors) else math.nan
