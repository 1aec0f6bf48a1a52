"""Host time of an operator besides its kernel (Python, autograd, dispatcher), and background load while measuring.

Background load is other processes that compute meanwhile, as ranks do that share a machine's cores and memory.
``python -m foretrain.operator_benchmark.host [OPERATORS]`` computes what the file says, or a small training step,
with one thread. It writes a line once it does, and ends when its standard input is closed.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from foretrain.device import calls
from foretrain.device.aten import work
from foretrain.device.calls import Meta, OperatorCall
from foretrain.device.work import Nothing
from foretrain.operator_benchmark.replay import SCALAR_TYPES, OperatorReplay, Unrepeatable, replay
from foretrain.operator_benchmark.session import MeasuringSession

_LAYERS, _WIDTH = 12, 32
_STEPS = 4
"""At once: fewer kernels than a GPU's queue takes before the host has to wait."""


class Recorder(TorchDispatchMode):
    """Recorder of every call that is more than another view of a tensor. A context manager.

    Attributes:
        calls: in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record and run a call."""
        given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | (kwargs or {})
        all_of_them = [given.get(one.name, one.default_value) for one in func._schema.arguments]
        result = func(*args, **(kwargs or {}))
        call = OperatorCall(func._schema.name, tuple(map(_described, all_of_them)))
        results = tuple(map(_described, result if isinstance(result, tuple) else (result,)))
        if func.namespace != "profiler" and not isinstance(work(call.operator, call.arguments, results), Nothing):
            self.calls.append(call)
        return result


def dispatch(session: MeasuringSession) -> float:
    """Return the host seconds of one operator of a training step, beyond the operator itself on a CPU.

    A step of a network whose kernels take next to nothing is timed. On a GPU the host's time is what passes until all
    is queued; on a CPU it is what remains when the operators' own times are subtracted. There it is the processor's
    time, since medians of operators know no other processes either, and what they add is added to both (``shared``).
    """
    step = _training(session.device)
    for _ in range(3):
        step()
    with Recorder() as recorder:
        step()
    count = len(recorder.calls)
    taken = median(_host_time(step, session.device) for _ in range(max(5, session.rounds)))
    if session.device.type == "cuda":
        return taken / count
    runs = {one.call.key: one.run for one in _replays(recorder.calls, session.device)}
    scale, timings = session.timings(tuple(runs.values()))
    times = dict(zip(runs, timings, strict=True))
    kernels = sum(times[call.key].seconds for call in recorder.calls if call.key in times) / scale
    return max(0.0, taken - kernels) * scale / count


def usual(device: torch.device) -> list[OperatorCall]:
    """Return the different operators of that step: a load for a processor."""
    step = _training(device)
    with Recorder() as recorder:
        step()
    return [one.call for one in _replays(recorder.calls, device)]


def _replays(calls: Iterable[OperatorCall], device: torch.device) -> list[OperatorReplay]:
    """Return a replay of each different call that can be repeated."""
    found = []
    for call in {call.key: call for call in calls}.values():
        with suppress(Unrepeatable):
            found.append(replay(call, device))
    return found


def _training(device: torch.device) -> Callable[[], None]:
    parts = (part for _ in range(_LAYERS) for part in (nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.GELU()))
    model = nn.Sequential(*parts).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(4, _WIDTH, device=device)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _host_time(step: Callable[[], None], device: torch.device) -> float:
    clock = time.thread_time
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        clock = time.perf_counter
    began = clock()
    for _ in range(_STEPS):
        step()
    return (clock() - began) / _STEPS


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        where = "cpu" if value.is_cpu and not value.dim() else "cuda:0"
        return Meta(tuple(value.shape), value.stride(), str(value.dtype).removeprefix("torch."), where)
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    if isinstance(value, torch.dtype):
        return next((number for number, one in SCALAR_TYPES.items() if one == value), None)
    return value if isinstance(value, int | float | str) else None


@contextmanager
def others(count: int, operators: Path | None) -> Iterator[None]:
    """Run ``count`` processes that compute ``operators`` for as long as the block runs."""
    command = [sys.executable, "-m", "foretrain.operator_benchmark.host", *([str(operators)] if operators else [])]
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            started.append(process)
            stack.callback(_end, process)
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield


def _end(process: subprocess.Popen[bytes]) -> None:
    for end in (process.stdin, process.stdout):
        assert end is not None
        end.close()
    process.wait()


def main(path: str | None) -> None:
    """Compute until standard input is closed."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    device = torch.device("cpu")
    runs = []
    for call in calls.load(path) if path else usual(device):
        try:
            runs.append(replay(call, device).run)
        except Unrepeatable:
            continue
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    sys.stdout.write("computing\n")
    sys.stdout.flush()
    with torch.no_grad():
        while not over.is_set():
            for run in runs:
                run()
            if not runs:
                over.wait()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
