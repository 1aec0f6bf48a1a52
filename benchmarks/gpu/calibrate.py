"""Calibration on a GPU: how far off are forecasts that know nothing of it, and do the measured operators add up?

1. The grid of ``foretrain calibrate`` is measured: matrix products, attention forward and backward, convolutions,
   AdamW, operators that only move bytes, copies from pinned and pageable memory, and what the host spends on a launch.
   Each time is compared with what the device model says without it: by its tables and rooflines, where the GPU is a
   preset. RESULT has the median ratio, forecast over measured, of every kind.
2. A training step of a small GPT in bf16 is recorded operator by operator. Each different operator is measured alone,
   as ``foretrain calibrate --operators`` does, and their sum is compared with the GPU's time of the whole step.

--quick: a small grid, under 50 s. --out FILE keeps the calibration, for ``foretrain simulate --device FILE``.
--cpu tries this file on a CPU. Says so and ends where there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu_scripts"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpt import GPT
from measure import finish, options
from torch.nn import functional

from foretrain.device import OperatorModel, calibration, preset_names
from foretrain.device.aten import work
from foretrain.device.calibration import Calibration
from foretrain.device.calls import contiguous
from foretrain.device.presets import preset_of_product
from foretrain.errors import ConfigError
from foretrain.operator_benchmark import MeasuringSession
from foretrain.operator_benchmark.calibrating import calibrated
from foretrain.operator_benchmark.host import Recorder

STEPS = 15


def more(parser: argparse.ArgumentParser) -> None:
    """This benchmark's own options."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the calibration there")
    parser.add_argument("--cpu", action="store_true", help="try this file without a GPU")


def ratios(found: Calibration) -> dict[str, list[float]]:
    """Forecast over measured, by the kind of operator, of a GPU that is a preset; empty for others."""
    if preset_of_product(found.device) is None:
        print(f"{found.device} is none of {', '.join(preset_names())}: nothing to compare with")
        return {}
    model = OperatorModel(found.described())
    all_of_them: dict[str, list[float]] = {}
    for one in found.measured:
        kind = type(one.work).__name__.lower() + ("_backward" if getattr(one.work, "backward", False) else "")
        all_of_them.setdefault(kind, []).append(model.estimate(one.work).time / one.time)
    for one in found.calls:
        image, weight, *_ = (*one.call.arguments, None)
        if one.call.operator == "aten::convolution":
            result = (contiguous((image.shape[0], weight.shape[0], *image.shape[2:]), image.dtype),)
        elif one.call.operator == "aten::convolution_backward":
            result = one.call.arguments[1:3]
        else:
            result = ()
        kind = one.call.operator.removeprefix("aten::").strip("_")
        estimate = model.estimate(work(one.call.operator, one.call.arguments, result))
        all_of_them.setdefault(kind, []).append(estimate.time / one.time)
    return all_of_them


def training(device: torch.device, quick: bool) -> Callable[[], None]:
    """A step of a GPT; small on a CPU."""
    dim, layers, batch, sequence = (512, 4, 4, 512) if quick else (1024, 8, 8, 1024)
    if device.type == "cpu":
        dim, layers, batch, sequence = 128, 2, 2, 64
    net = GPT(32_000 if device.type == "cuda" else 1000, sequence, dim, dim // 64, layers).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    tokens = torch.randint(1000, (batch, sequence + 1), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = net(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None], device: torch.device) -> float:
    """Of one step in a queue of several, so that the host's launches hide behind the kernels where they can."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / 5


def step_sum(device: torch.device, quick: bool) -> dict[str, Any]:
    """A whole step, the sum of its operators measured alone, and how many could not be."""
    step = training(device, quick)
    for _ in range(3):
        step()
    whole = median(seconds(step, device) for _ in range(5 if quick else STEPS))
    with Recorder() as recorder:
        step()
    different = tuple({call.key: call for call in recorder.calls}.values())
    found = MeasuringSession(device, 5 if quick else STEPS).calls(different)
    times = {one.call.key: one.time / 1e12 for one in found.calls}
    total = sum(times.get(call.key, 0.0) for call in recorder.calls)
    for call, reason in found.failed:
        print(f"  not repeated: {call!s:.90}: {reason:.60}")
    print(
        f"a step of {len(recorder.calls)} operators, {len(different)} of them different: {1e3 * whole:.2f} ms,"
        f" their sum {1e3 * total:.2f} ms, {total / whole:.3f} of it"
    )
    return {"step_s": whole, "operators_s": total, "operators": len(recorder.calls), "failed": len(found.failed)}


def shown(kinds: dict[str, list[float]]) -> dict[str, float]:
    """Prints how far the model is off, and returns the medians."""
    for kind, found in kinds.items():
        ordered: Sequence[float] = sorted(found)
        print(
            f"{kind:22} forecast / measured: {median(found):.3f} ({ordered[0]:.2f} to {ordered[-1]:.2f}, {len(found)})"
        )
    return {f"{kind}_vs_measured": median(found) for kind, found in kinds.items()}


def main() -> None:
    """Prints the comparison and the RESULT line."""
    arguments = options(__doc__ or "", more)
    if not torch.cuda.is_available() and not arguments.cpu:
        print("skipped: no CUDA device here")
        finish(arguments, "gpu_calibrate", {"skipped": 1})
        return
    torch.set_num_threads(1)
    device = torch.device("cpu" if arguments.cpu else "cuda")
    found, failed = calibrated(device, None, quick=arguments.quick)
    print(f"{found.device}, {found.stack}: {len(found.measured) + len(found.calls)} operators, {len(failed)} failed")
    for call, reason in failed:
        print(f"  not measured: {call!s:.90}: {reason:.60}")
    if found.launch:
        print(f"the host spends {found.launch / 1e6:.2f} us on a launch")
    if arguments.out:
        calibration.dump(found, arguments.out)
    kinds = ratios(found)
    values = {"skipped": 0} | shown(kinds)
    whole = step_sum(device, arguments.quick)
    values |= {"operators_vs_step": whole["operators_s"] / whole["step_s"], "failed": whole["failed"] + len(failed)}
    if found.launch:
        values["launch_us"] = found.launch / 1e6
    finish(arguments, "gpu_calibrate", values, {"ratios": kinds, "step": whole}, seed=0)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"gpu/calibrate.py: {error}")
