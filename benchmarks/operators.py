"""How far operator times are off on shapes that nobody measured: half of each GPU's table forecast from the other half.

Mean relative errors of GEMMs in bf16 or fp16 with m, n and k of 512 at least, of those over 100 us at the datasheet's
peak, and of all; of causal attention with 512 tokens at least. Baselines see the same half:

roofline    efficiency, part of the memory's bandwidth and overhead, fitted
waves       the same over whole waves of tiles over the multiprocessors, the best of three sizes of tiles
neighbours  time over roofline of the nearest shapes: what `foretrain.device.OperatorModel` does
both        the same of time over waves

Rows that are no multiple of 16, measured on purpose just above a multiple, are forecast only under "all". "within σ" is
the part of errors smaller than the uncertainty that comes with the forecast; 68 % would be right for a normal error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from measure import finish, options
from rich.console import Console
from rich.table import Table
from scipy.optimize import minimize

from foretrain import device
from foretrain.device import table
from foretrain.device.model import interpolation_sigma
from foretrain.device.table import Gemms, roofline

SEED = 0
QUICK = 1500
"""Shapes forecast per GPU with --quick."""
GPUS = ("A100", "H100", "H200", "B200")

Vector = npt.NDArray[np.float64]


class Halves(NamedTuple):
    """Measurements of one GPU: ``known`` and ``asked`` are rows of ``shapes``."""

    gpu: device.Device
    shapes: npt.NDArray[np.int64]
    seconds: Vector
    known: npt.NDArray[np.int64]
    asked: npt.NDArray[np.int64]


def split(gpu: device.Device, shapes: npt.NDArray[np.int64], seconds: Vector, most: int | None) -> Halves:
    """Half of the measurements to learn from, the others (``most`` of them) to forecast."""
    order = np.random.default_rng(SEED).permutation(len(shapes))
    half = len(order) // 2
    return Halves(gpu, shapes, seconds, order[:half], order[half:][:most])


def peak_of(gpu: device.Device) -> float:
    """Datasheet's FLOP/s in half precision."""
    return gpu.arithmetic("bf16").peak


def rooflines(halves: Halves, constants: Vector) -> Vector:
    """Seconds by efficiency, part of the bandwidth, and overhead in us."""
    m, n, k = halves.shapes.T.astype(float)
    compute = 2 * m * n * k / (constants[0] * peak_of(halves.gpu))
    return _with_memory(halves, compute, constants)


def waves(halves: Halves, constants: Vector) -> Vector:
    """The same when tiles are computed in whole waves over the multiprocessors, small ones less efficiently."""
    m, n, k = halves.shapes.T.astype(float)
    sms, choices = halves.gpu.sms, []
    for rows, columns, share in ((128, 256, 1.0), (128, 128, constants[3]), (64, 64, constants[4])):
        tiles = np.ceil(m / rows) * np.ceil(n / columns)
        choices.append(np.ceil(tiles / sms) * sms * 2 * rows * columns * k / share)
    return _with_memory(halves, np.minimum.reduce(choices) / (constants[0] * peak_of(halves.gpu)), constants)


def _with_memory(halves: Halves, compute: Vector, constants: Vector) -> Vector:
    m, n, k = halves.shapes.T.astype(float)
    streaming = 2 * (m * k + k * n + m * n) / (constants[1] * halves.gpu.bandwidth)
    return np.maximum(compute, streaming) + constants[2] * 1e-6


def fitted(halves: Halves, model: Callable[[Halves, Vector], Vector], start: list[float]) -> Vector:
    """Seconds of all shapes by ``model``, its constants fitted to the large known shapes."""
    rows = halves.known[(halves.shapes[halves.known] >= 512).all(1)]
    part = halves._replace(shapes=halves.shapes[rows])

    def error(constants: Vector) -> float:
        if (constants <= 0).any():
            return math.inf
        return float(np.abs(np.log(model(part, constants) / halves.seconds[rows])).mean())

    return model(halves, minimize(error, start, method="Nelder-Mead").x)


def forecast_gemms(halves: Halves, most: int | None) -> dict[str, Any]:
    """Errors of each model by group of shapes."""
    gpu, peak = halves.gpu, peak_of(halves.gpu)
    known = Gemms.of(halves.shapes[halves.known], halves.seconds[halves.known], 2)
    base = roofline(halves.shapes, 2, peak, gpu.bandwidth)
    found = [known.near(m, n, k, peak, gpu.bandwidth) for m, n, k in halves.shapes[halves.asked].tolist()]
    plain, tiled = fitted(halves, rooflines, [0.8, 0.8, 4]), fitted(halves, waves, [0.8, 0.8, 4, 0.9, 0.6])
    # The neighbours of the time over waves: the same places, another denominator.
    over = Gemms.of(known.shapes, known.seconds * (base / tiled)[halves.known], 2)
    both = [over.near(m, n, k, peak, gpu.bandwidth).ratio for m, n, k in halves.shapes[halves.asked].tolist()]
    forecasts = {
        "roofline": plain[halves.asked],
        "waves": tiled[halves.asked],
        "neighbours": base[halves.asked] * np.exp([one.ratio for one in found]),
        "both": tiled[halves.asked] * np.exp(both),
    }
    shapes, truth = halves.shapes[halves.asked], halves.seconds[halves.asked]
    even = (shapes[:, 0] % 16 == 0) | (shapes[:, 0] < 64)
    large = even & (shapes >= 512).all(1)
    long = even & (2.0 * shapes.prod(1) / peak > 100e-6)
    errors = {name: np.abs(seconds / truth - 1) for name, seconds in forecasts.items()}
    sigma = np.array([interpolation_sigma(one) for one in found])
    return {
        "shapes": int(large.sum()),
        "large": {name: float(error[large].mean()) for name, error in errors.items()},
        "long": {name: float(error[long].mean()) for name, error in errors.items()},
        "all": {name: float(error.mean()) for name, error in errors.items()},
        "within_sigma": float((errors["neighbours"] < sigma)[large].mean()),
    }


def forecast_attention(halves: Halves) -> dict[str, float]:
    """Mean error of neighbours, and of a roofline at the known half's median efficiency."""
    gpu, peak = halves.gpu, peak_of(halves.gpu)
    known = table.CausalAttention.of(halves.shapes[halves.known], halves.seconds[halves.known])
    base = table.attention_roofline(halves.shapes, peak, gpu.bandwidth)
    long = halves.asked[halves.shapes[halves.asked][:, 1] >= 512]
    ratios = []
    for batch, length, heads, kv in halves.shapes[long].tolist():
        ratios.append(known.near((batch, length, heads, kv), peak, gpu.bandwidth).ratio)
    rows = halves.known[halves.shapes[halves.known][:, 1] >= 512]
    middle = np.median(halves.seconds[rows] / base[rows])
    truth = halves.seconds[long]
    return {
        "roofline": float(np.abs(base[long] * middle / truth - 1).mean()),
        "neighbours": float(np.abs(base[long] * np.exp(ratios) / truth - 1).mean()),
    }


def main() -> None:
    arguments = options(__doc__ or "")
    most = QUICK if arguments.quick else None
    details: dict[str, Any] = {}
    console = Console()
    for name in GPUS:
        gpu = device.preset(name)
        assert gpu.measured_as is not None
        gemms, attention = table.gemms(gpu.measured_as, "half"), table.attention(gpu.measured_as)
        assert gemms is not None
        with console.status(name):
            found = forecast_gemms(split(gpu, gemms.shapes, gemms.seconds, most), most)
            found["attention"] = forecast_attention(split(gpu, attention.shapes, attention.seconds, most))
        details[name] = found
    show(console, details)
    values = {f"{name.lower()}_gemm": details[name]["large"]["neighbours"] for name in GPUS}
    values |= {f"{name.lower()}_attention": details[name]["attention"]["neighbours"] for name in GPUS}
    finish(arguments, "operators", values, details, seed=SEED)


def show(console: Console, details: dict[str, Any]) -> None:
    """One row per GPU and group of shapes."""
    rows = Table("GPU", "shapes", "roofline", "waves", "neighbours", "both", "within σ", title="mean error, %")
    for name, found in details.items():
        for group in ("large", "long", "all"):
            errors = [f"{100 * found[group][model]:.1f}" for model in ("roofline", "waves", "neighbours", "both")]
            rows.add_row(name, f"GEMM, {group}", *errors, f"{found['within_sigma']:.0%}" if group == "large" else "")
        both = found["attention"]
        rows.add_row(name, "attention", f"{100 * both['roofline']:.1f}", "", f"{100 * both['neighbours']:.1f}", "", "")
    console.print(rows)


if __name__ == "__main__":
    main()
