"""Table of measured operator times, and prediction for shapes between and beyond them.

``operators.npz`` is distilled from the package aiconfigurator 0.8.0 (© 2025-2026 NVIDIA Corporation & affiliates,
Apache License 2.0) by ``tools/distil_operators.py``; ``operators.txt`` beside it is the notice. Per GPU: GEMMs in bf16
or fp16 ("half"), fp8 and fp8 in blocks over a grid of m, n and k, and causal attention forward over batch, length,
heads and heads of keys.

# Note [Neighbours]
Between measured shapes the logarithm of time over roofline is averaged over the nearest shapes, in logarithms of the
sizes. This is 4 to 5 % off on large GEMMs, where a roofline with fitted constants is 7 % off, and 3 to 5 % on those
over 100 us (``benchmarks/operators.py``); a good part of it is the noise of single measurements. How full the last
tile of 256 rows or columns is counts as a distance as well: else 4,097 rows, which waste a whole row of tiles, would be
the nearest thing to 4,096. Averaging the time over whole waves of tiles instead is a little worse on each GPU: the
libraries choose among too many tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretrain.device.gpu import KERNEL_OVERHEAD

PATH = Path(__file__).with_name("operators.npz")
GEMM_FORMATS = ("half", "fp8", "fp8_block")

SHORTEST, LONGEST = 1e-7, 10.0
"""Seconds that can be stored."""
_STEP = math.log(LONGEST / SHORTEST) / 65535

NEIGHBOURS = 8
_SMOOTH = 0.05
"""Distance up to which neighbours weigh alike, so that noise of a single measurement is averaged out."""
_TILE = 256
"""Rows or columns of the largest tiles."""

Vector = npt.NDArray[np.float64]


class Prediction(NamedTuple):
    """Prediction of the table for one shape.

    Attributes:
        ratio: time over roofline, logarithm.
        spread: standard deviation of the neighbours' ratios, 0 for a measured shape.
        distance: to the nearest neighbour, in factors of e of one size; 0 for a measured shape.
    """

    ratio: float
    spread: float
    distance: float


def encoded(seconds: float) -> int:
    """Return the 16 bits that stand for a time, 1 at least."""
    return max(1, round(math.log(seconds / SHORTEST) / _STEP))


def decoded(codes: npt.NDArray[np.uint16]) -> Vector:
    """Return the seconds of `encoded` times."""
    return SHORTEST * np.exp(_STEP * codes.astype(np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Gemms:
    """Measured GEMMs of one GPU and number format.

    Attributes:
        shapes: ``(points, 3)``, m, n and k.
        seconds: ``(points,)``.
        size: bytes of an element of the factors.
    """

    shapes: npt.NDArray[np.int64]
    seconds: Vector
    size: int
    _index: dict[tuple[int, int, int], int]
    _places: Vector
    _limits: tuple[int, int, int]

    @classmethod
    def of(cls, shapes: npt.NDArray[np.int64], seconds: Vector, size: int) -> Gemms:
        """Build the table from measurements in any order, no shape twice."""
        index = {(m, n, k): row for row, (m, n, k) in enumerate(shapes.tolist())}
        high = shapes.max(0).tolist()
        return cls(shapes, seconds, size, index, _gemm_places(shapes), (high[0], high[1], high[2]))

    def measured(self, m: int, n: int, k: int) -> float | None:
        """Return the seconds of exactly this product, or of its transpose, where one was measured."""
        row = self._index.get((m, n, k))
        if row is None and m > self._limits[0]:
            row = self._index.get((n, m, k))
        return None if row is None else float(self.seconds[row])

    def near(self, m: int, n: int, k: int, peak: float, bandwidth: float) -> Prediction:
        """Return time over `roofline` of the nearest shapes; ``peak`` FLOP/s and ``bandwidth`` make the roofline.

        Beyond the measured rows the transposed product is asked if it is less far out: it computes the same.
        """
        if self._beyond(n, m) < self._beyond(m, n):
            m, n = n, m
        place = _gemm_places(np.array([[m, n, k]], np.int64))
        distances = np.linalg.norm(self._places - place, axis=1)
        chosen = np.argpartition(distances, min(NEIGHBOURS, len(distances)) - 1)[:NEIGHBOURS]
        roof = roofline(self.shapes[chosen], self.size, peak, bandwidth)
        return _averaged(np.log(self.seconds[chosen] / roof), distances[chosen])

    def _beyond(self, m: int, n: int) -> float:
        return max(0.0, math.log(m / self._limits[0])) + max(0.0, math.log(n / self._limits[1]))


def roofline(shapes: npt.NDArray[np.int64], size: int, peak: float, bandwidth: float) -> Vector:
    """Return the seconds of GEMMs ``(points, 3)`` at the datasheet's rates, which no GPU reaches."""
    m, n, k = shapes.T.astype(np.float64)
    moved = size * (m + n) * k + max(size, 2) * m * n
    return np.maximum(2 * m * n * k / peak, moved / bandwidth) + KERNEL_OVERHEAD


def _gemm_places(shapes: npt.NDArray[np.int64]) -> Vector:
    m, n, k = shapes.T.astype(np.float64)
    filling = [2 * np.log(np.ceil(side / _TILE) * _TILE / side) for side in (m, n)]
    # A tile's efficiency hardly depends on how long it accumulates, hence the lesser weight of k.
    return np.stack([np.log(m), np.log(n), 0.4 * np.log(k), *filling], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class CausalAttention:
    """Measured causal attention forward of one GPU, heads of 128 numbers in half precision.

    Attributes:
        shapes: ``(points, 4)``: batch, length, heads, heads of keys.
        seconds: ``(points,)``.
    """

    shapes: npt.NDArray[np.int64]
    seconds: Vector
    _index: dict[tuple[int, int, int, int], int]
    _places: Vector

    @classmethod
    def of(cls, shapes: npt.NDArray[np.int64], seconds: Vector) -> CausalAttention:
        """Build the table from measurements in any order, no shape twice."""
        index = {(batch, length, heads, kv): row for row, (batch, length, heads, kv) in enumerate(shapes.tolist())}
        return cls(shapes, seconds, index, _attention_places(shapes))

    def measured(self, batch: int, length: int, heads: int, kv_heads: int) -> float | None:
        """Return the seconds of exactly this shape, where it was measured."""
        row = self._index.get((batch, length, heads, kv_heads))
        return None if row is None else float(self.seconds[row])

    def near(self, shape: tuple[int, int, int, int], peak: float, bandwidth: float) -> Prediction:
        """Return time over `attention_roofline` of the shapes nearest to batch, length, heads, heads of keys."""
        distances = np.linalg.norm(self._places - _attention_places(np.array([shape], np.int64)), axis=1)
        chosen = np.argpartition(distances, NEIGHBOURS - 1)[:NEIGHBOURS]
        roof = attention_roofline(self.shapes[chosen], peak, bandwidth)
        return _averaged(np.log(self.seconds[chosen] / roof), distances[chosen])


def attention_roofline(shapes: npt.NDArray[np.int64], peak: float, bandwidth: float) -> Vector:
    """Return the seconds of shapes ``(points, 4)`` at the datasheet's rates."""
    batch, length, heads, kv = shapes.T.astype(np.float64)
    flops = 2 * batch * heads * length * (length + 1) * 128
    moved = 2 * 128 * batch * length * (2 * heads + 2 * kv)
    return np.maximum(flops / peak, moved / bandwidth) + KERNEL_OVERHEAD


def _attention_places(shapes: npt.NDArray[np.int64]) -> Vector:
    # Batch and heads fill the GPU alike; how many heads share keys matters little.
    batch, length, heads, kv = np.log(shapes.T.astype(np.float64))
    return np.stack([length, 0.7 * (batch + heads), 0.2 * kv, 0.2 * heads], axis=1)


def _averaged(ratios: Vector, distances: Vector) -> Prediction:
    nearest = float(distances.min())
    if nearest < 1e-9:
        return Prediction(float(ratios[distances.argmin()]), 0.0, 0.0)
    weights = (distances + _SMOOTH) ** -2.0
    weights /= weights.sum()
    mean = float(weights @ ratios)
    return Prediction(mean, math.sqrt(float(weights @ (ratios - mean) ** 2)), nearest)


@cache
def names() -> tuple[str, ...]:
    """Return the GPUs of the table."""
    with np.load(PATH) as arrays:
        return tuple(dict.fromkeys(name.split(".")[0] for name in arrays.files))


@cache
def gemms(gpu: str, name: str) -> Gemms | None:
    """Return the GEMMs of a GPU of `names` in one of `GEMM_FORMATS`; None if it cannot compute in that."""
    with np.load(PATH) as arrays:
        key = f"{gpu}.gemm.{name}"
        if f"{key}.time" not in arrays.files:
            return None
        codes = arrays[f"{key}.time"]
        axes = [arrays[f"{key}.{axis}"].astype(np.int64) for axis in "mnk"]
    at = np.nonzero(codes)
    shapes = np.stack([axis[rows] for axis, rows in zip(axes, at, strict=True)], axis=1)
    return Gemms.of(shapes, decoded(codes[at]), 2 if name == "half" else 1)


@cache
def attention(gpu: str) -> CausalAttention:
    """Return the attention of a GPU of `names`."""
    with np.load(PATH) as arrays:
        shapes, codes = arrays[f"{gpu}.attention.shapes"], arrays[f"{gpu}.attention.time"]
    return CausalAttention.of(shapes.astype(np.int64), decoded(codes))
