"""One simulated rank: the device made real to PyTorch, the script run, and what it leaves behind."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from foretrain import device as gpus
from foretrain.fakecuda import clocks, compiler, cuda, groups, operators, pricing
from foretrain.fakecuda.settings import Settings
from foretrain.main_script import run_as_main, told_as_its_own

_PATIENCE = 20_000
"""Values that are not real which a script may read at one place before it is taken to wait for one of them."""


def activate(device: ModuleType, settings: Settings) -> None:
    """Makes PyTorch believe in the device; once per process, before it forks."""
    gpu = gpus.preset(settings.device)
    own = set(device.native_operators())
    device.install([name for name in operators.cuda_operators() if name not in own])
    device.set_device_count(min(settings.gpus, settings.world))
    device.set_capacity(gpu.memory, settings.reserve)
    device.set_launch(settings.launch)
    cuda.install(device, cuda.properties_of(gpu))
    groups.install(device, lambda: dist.FileStore(settings.store, -1))
    compiler.install(device)


def run(device: ModuleType, settings: Settings, rank: int, socket: int) -> int:
    """Runs the script as ``rank``, talking to the conductor over ``socket``; returns the exit status."""
    os.environ.update(settings.environment(rank))
    os.register_at_fork(after_in_child=lambda: _leave_log(device, socket))
    torch.set_num_threads(1)
    prices = pricing.Prices(settings.device, settings.factor)
    device.set_price(prices)
    device.connect(socket)
    device.set_tracing(settings.tracing)
    device.set_on_unreal_read(_Watchdog(device))
    clocks.install(device.host, device.spend)
    finished = _end_after(device, settings.steps)
    status = 0
    try:
        run_as_main(settings.script[0], settings.script[1:], module=settings.module)
    except _Enough:
        pass
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(error.code + "\n")
    except BaseException as error:
        told_as_its_own(type(error), error, error.__traceback__)
        status = 1
    _report(device, prices, finished())
    sys.stdout.flush()
    sys.stderr.flush()
    device.leave(status)
    return status


class _Enough(BaseException):
    """The steps that were asked for are done. Not an Exception, which a script may catch."""


def _end_after(device: ModuleType, steps: int | None) -> Callable[[], int]:
    """Notes every step of the optimizer, and ends the script after the last wanted; returns how many there were.

    Where a script has several optimizers, the first that makes its n-th step makes the script's.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    made: dict[int, int] = {}
    done = 0

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal done
        made[id(optimizer)] = made.get(id(optimizer), 0) + 1
        if made[id(optimizer)] > done:
            done += 1
            device.note(device.STEP, done, device.record(), b"")
            if done == steps:
                raise _Enough

    register_optimizer_step_post_hook(stepped)
    return lambda: done


class _Watchdog:
    """Warns, once for each line, of values read that are not real, and ends a loop that waits for one."""

    def __init__(self, device: ModuleType) -> None:
        self._device = device
        self._reads: dict[tuple[str, int], int] = {}

    def __call__(self, what: str) -> None:
        frame = _script_frame()
        place = (frame.f_code.co_filename, frame.f_lineno) if frame else ("?", 0)
        count = self._reads[place] = self._reads.get(place, 0) + 1
        where = f"{place[0]}:{place[1]}"
        if count == 1 and "Float" not in what and "BFloat16" not in what:
            text = f"{where} reads {what}, which no GPU has computed: it is made up, and what follows from it as well"
            self._device.note(self._device.WARNING, 0, 0, text.encode())
        if count == _PATIENCE:
            raise RuntimeError(
                f"{where} has read {what} {count:,} times. Values on the simulated GPU are not real, so a loop that waits"
                f" for one of them never ends; bound it, or read a value that the host computes"
            )


def _script_frame() -> FrameType | None:
    """The innermost frame that is neither PyTorch's nor ours."""
    frame = sys._getframe(1)
    library = os.path.dirname(torch.__file__)
    here = os.path.dirname(__file__)
    while frame and frame.f_code.co_filename.startswith((library, here)):
        frame = frame.f_back
    return frame


def _leave_log(device: ModuleType, socket: int) -> None:
    """A child of the rank, e.g. a DataLoader's worker, has no GPU and no say in the rank's time."""
    device.connect(-1)
    try:
        os.close(socket)
    except OSError:
        traceback.clear_frames(None)


def _report(device: ModuleType, prices: pricing.Prices, steps: int) -> None:
    """The last notes: memory, and how well the times are known."""
    index = device.current_device()
    stats = device.memory_stats(index)
    launched, priced, computed = device.statistics()
    memory = {
        "allocated": stats["allocated_bytes"]["all"]["peak"],
        "reserved": stats["reserved_bytes"]["all"]["peak"],
        "breakdown": device.memory_breakdown(index),
    }
    device.note(device.MEMORY, 0, 0, json.dumps(memory).encode())
    cost = {"launched": launched, "priced": priced, "computed": computed, "steps": steps, **prices.summary()}
    device.note(device.COST, 0, 0, json.dumps(cost).encode())
