"""Distils the measured operator times of NVIDIA's aiconfigurator into `foretrain/device/operators.npz`.

    pip download --no-deps aiconfigurator==0.8.0        # 72 MB; later releases carry no data
    python tools/distil_operators.py aiconfigurator-0.8.0-py3-none-any.whl

Of each GPU one framework is kept, SGLang, in the version that measured most: its linear layer is PyTorch's own and its
attention is FlashAttention (2 on Ampere and Ada, 3 on Hopper) or TensorRT-LLM's (Blackwell). So one factor per
software stack can correct all GPUs alike, and the choice is not made anew for each. Left out: INT8 and FP4, in which
nobody trains yet, sliding windows, caches in FP8, mixtures of experts (whole layers with their routing) and decoding.

On GB200 SGLang's large products were measured on throttled GPUs: in half precision those over 10^13 operations reach
0.93 PFLOP/s, where TensorRT-LLM reaches 1.44 on GB200, and SGLang 1.31 on B200 and 1.65 on GB300. There the lesser of
both frameworks' times counts, for the shapes that SGLang measured.

Times are stored as 16-bit logarithms, to 0.014 %. The file is the same, byte for byte, whenever it is made.
"""

from __future__ import annotations

import csv
import io
import sys
import zipfile
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np

from foretrain.device.table import GEMM_FORMATS, LONGEST, PATH, encoded

PACKAGE = "aiconfigurator-0.8.0-py3-none-any.whl"
SOURCES = {
    "A100": "a100_sxm/sglang/0.5.9",
    "L40S": "l40s/sglang/0.5.9",
    "H100": "h100_sxm/sglang/0.5.9",
    "H200": "h200_sxm/sglang/0.5.10",
    "B200": "b200_sxm/sglang/0.5.10",
    "GB200": "gb200/sglang/0.5.9",
    "GB300": "gb300/sglang/0.5.9",
}
"""Which measurements stand for which GPU."""
ALSO = {"GB200": "gb200/trtllm/1.2.0rc6"}
"""Measurements of the same shapes that count where they are shorter."""
FORMATS = {"float16": "half", "bfloat16": "half", "fp8": "fp8", "fp8_block": "fp8_block"}


def main() -> None:
    """Writes the table and says how large it is."""
    if len(sys.argv) != 2 or Path(sys.argv[1]).name != PACKAGE:
        sys.exit(f"{__doc__}\nexpected the path of {PACKAGE}")
    arrays: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        for gpu, source in SOURCES.items():
            also = times(rows(wheel, ALSO[gpu], "gemm")) if gpu in ALSO else {}
            measured = lesser(times(rows(wheel, source, "gemm")), also)
            arrays |= {f"{gpu}.{name}": array for name, array in gemms(measured).items()}
            arrays |= {
                f"{gpu}.{name}": array for name, array in attention(rows(wheel, source, "context_attention")).items()
            }
    np.savez_compressed(PATH, **arrays)  # pyright: ignore[reportArgumentType]
    points = sum(int(np.count_nonzero(array)) for name, array in arrays.items() if name.endswith("time"))
    print(f"{PATH}: {points:,} measured times of {len(SOURCES)} GPUs, {PATH.stat().st_size / 1e6:.2f} MB")


def rows(wheel: zipfile.ZipFile, source: str, operator: str) -> list[dict[str, str]]:
    """The lines of one file of measurements."""
    with wheel.open(f"aiconfigurator/systems/data/{source}/{operator}_perf.txt") as stream:
        return list(csv.DictReader(io.TextIOWrapper(stream, "utf-8")))


Times = dict[str, dict[tuple[int, ...], float]]
"""Per number format the seconds of each shape."""


def times(measured: list[dict[str, str]]) -> Times:
    """The median time of each product (m, n, k)."""
    found: dict[str, dict[tuple[int, ...], list[float]]] = {name: defaultdict(list) for name in GEMM_FORMATS}
    for row in measured:
        shape = (int(row["m"]), int(row["n"]), int(row["k"]))
        name = FORMATS.get(row["gemm_dtype"])
        if name and min(shape) > 0 and 0 < (seconds := float(row["latency"]) / 1e3) < LONGEST:
            found[name][shape].append(seconds)
    return {name: {shape: median(each) for shape, each in some.items()} for name, some in found.items()}


def lesser(measured: Times, also: Times) -> Times:
    """The lesser of both times of each shape in ``measured``."""
    return {
        name: {shape: min(seconds, also.get(name, {}).get(shape, seconds)) for shape, seconds in some.items()}
        for name, some in measured.items()
    }


def gemms(measured: Times) -> dict[str, np.ndarray]:
    """Per number format the axes m, n, k and the times over them, 0 where nothing was measured."""
    arrays = {}
    for name, found in measured.items():
        if not found:
            continue
        axes = [np.unique([shape[axis] for shape in found]).astype(np.uint32) for axis in range(3)]
        grid = np.zeros([len(axis) for axis in axes], np.uint16)
        for shape, seconds in found.items():
            at = tuple(int(np.searchsorted(axis, size)) for axis, size in zip(axes, shape, strict=True))
            grid[at] = encoded(seconds)
        arrays |= {f"gemm.{name}.{axis}": sizes for axis, sizes in zip("mnk", axes, strict=True)}
        arrays[f"gemm.{name}.time"] = grid
    return arrays


def attention(measured: list[dict[str, str]]) -> dict[str, np.ndarray]:
    """Shapes ``(points, 4)``: batch, length, heads and heads of keys; and their times. Heads are of 128 numbers."""
    found: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for row in measured:
        plain = row.get("window_size", "0") in ("0", None) and row["head_dim"] == "128"
        if plain and row["attn_dtype"] == row["kv_cache_dtype"] and row["attn_dtype"] in ("float16", "bfloat16"):
            shape = tuple(int(row[name]) for name in ("batch_size", "isl", "num_heads", "num_key_value_heads"))
            found[shape].append(float(row["latency"]) / 1e3)
    shapes = sorted(found)
    return {
        "attention.shapes": np.array(shapes, np.uint16),
        "attention.time": np.array([encoded(median(found[shape])) for shape in shapes], np.uint16),
    }


if __name__ == "__main__":
    main()
