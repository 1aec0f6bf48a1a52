"""What attach costs the host where communication is free: one rank, so that nothing is ever waited for.

ResNet-50's 161 gradients on a model that computes by sleeping, 100 ms a step, as a host does whose accelerator
computes. Training it plainly, with stock DDP of one rank, and attached, in interleaved rounds; a sample is several
steps and, attached, the wait for the last updates. Gradients are a hundredth of their size, and so are the schedules'
partitions: as many tensors and operations as ResNet-50 has, without the copies and sums that an accelerator does in
its own memory. --full adds the same with all bytes, where deferred updates run while the host sleeps, and is a gain.

*wall* is what a step takes longer than a plain one; *CPU* is the processor time of all threads beyond that of a plain
step, most of which is spent while the accelerator computes. Both are shares of the plain step.

--profile: where it goes, by timers around the runtime's entrances and by the clocks of its threads, and cProfile.
"""

from __future__ import annotations

import cProfile
import gc
import os
import pstats
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from measure import finish, options, spread
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

import foretrain as ft
from foretrain.comm.coordinator.coordinator import Coordinator
from foretrain.lab.paced import AcceleratorClock, scaled
from foretrain.lab.training import PacedModel
from foretrain.plugins.torch.api import Attached
from foretrain.plugins.torch.gradient_dispatcher import GradientDispatcher
from foretrain.plugins.torch.optimizers import OptimizerHooks
from foretrain.units import MILLISECOND
from foretrain.workload import zoo

STEP = 100 * MILLISECOND
SAMPLES = 15
SMALL = 0.01


@dataclass
class Case:
    """One way to train. ``times`` and ``cpu`` are seconds per step, one value per sample."""

    step: Callable[[], None]
    settle: Callable[[], None]
    times: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def sample(self, steps: int) -> None:
        """Some steps, timed as one."""
        self.settle()
        gc.collect()
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step()
        self.settle()
        self.times.append((time.perf_counter() - began) / steps)
        self.cpu.append((time.process_time() - busy) / steps)


def loop(module: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """One step of the training loop of every tutorial."""
    inputs = torch.zeros(1)

    def step() -> None:
        module(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def made(size: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model that sleeps, with gradients of ``size`` times those of ResNet-50, and its optimizer."""
    model = PacedModel(scaled(zoo("resnet50"), STEP, size), AcceleratorClock())
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def attached(size: float, schedule: str) -> tuple[Case, Attached]:
    """An attached case whose schedule is in force."""
    model, optimizer = made(size)
    handle = ft.attach(model, optimizer, schedule=schedule, warmup=2)
    case = Case(loop(model, optimizer), handle.synchronize)
    while handle.steps < 2:
        case.step()
    return case, handle


def partition(size: float) -> str:
    """The default partition and credit, scaled."""
    return f"partition={round(4_000_000 * size)}B, credit={round(16_000_000 * size)}B"


@contextmanager
def cases(size: float) -> Iterator[dict[str, Case]]:
    """All ways to train, of which the attached ones are closed in the end."""
    model, optimizer = made(size)
    found = {"plain": Case(loop(model, optimizer), nothing)}
    model, optimizer = made(size)
    # As views, which is DDP at its best; each gradient is copied otherwise.
    found["ddp"] = Case(loop(DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer), nothing)
    handles = []
    for name, schedule in {"bytescheduler": f"bytescheduler({partition(size)})", "prophet": "prophet"}.items():
        found[name], handle = attached(size, schedule)
        handles.append(handle)
    yield found
    for handle in handles:
        handle.close()


def nothing() -> None:
    """What stock training has to be waited for."""


def measured(size: float, samples: int, steps: int) -> dict[str, Case]:
    """Rounds over all cases, so that drift of the machine hits all alike."""
    with cases(size) as found:
        for turn in range(samples + 1):
            for case in found.values():
                case.sample(steps)
            if not turn:
                for case in found.values():
                    case.times.clear()
                    case.cpu.clear()
        return found


def shares(found: dict[str, Case]) -> dict[str, tuple[float, float]]:
    """Wall and CPU time beyond the plain step, percent of it: medians of the rounds' differences."""
    plain = found["plain"]
    step = median(plain.times)

    def beyond(mine: list[float], theirs: list[float]) -> float:
        return 100 * median(one - other for one, other in zip(mine, theirs, strict=True)) / step

    return {
        name: (beyond(case.times, plain.times), beyond(case.cpu, plain.cpu))
        for name, case in found.items()
        if case is not plain
    }


def show(title: str, found: dict[str, Case]) -> None:
    """A table: median and middle half."""
    print(title)
    beyond = shares(found) | {"plain": (0.0, 0.0)}
    for name, case in found.items():
        wall, cpu = beyond[name]
        times, busy = [1e3 * t for t in case.times], [1e3 * t for t in case.cpu]
        print(f"  {name:14} step {spread(times):26} ms  CPU {spread(busy):24} ms  wall {wall:+.2f} %  CPU {cpu:+.2f} %")


# ---------------------------------------------------------------- where it goes

ENTRANCES: tuple[tuple[str, type, str], ...] = (
    ("hooks: a gradient is there", Attached, "_gradient"),
    ("  of it, copied and divided", GradientDispatcher, "_contribute"),
    ("  of it, told to the leader", Coordinator, "ready"),
    ("forward guards: a module is entered", Attached, "_enter"),
    ("forward begins", Attached, "_begin_forward"),
    ("forward ends, waiting included", Attached, "_end_forward"),
    ("step()", OptimizerHooks, "step"),
    ("zero_grad(): a gradient is dropped", GradientDispatcher, "drop"),
)
"""What is timed: a name for people, and the method. A timer itself costs 0.3 µs a call."""
THREADS = ("foretrain-coordinator", "foretrain-completer", "foretrain-updates")


def profile(steps: int, schedule: str, size: float) -> dict[str, float]:
    """Prints where one attached step's time goes; milliseconds per step by entrance and by thread."""
    took: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    originals = [(owner, method, getattr(owner, method)) for _, owner, method in ENTRANCES]
    for name, owner, method in ENTRANCES:
        setattr(owner, method, timed(getattr(owner, method), took[name]))
    try:
        case, handle = attached(size, schedule)
        for entry in took.values():
            entry[:] = [0, 0]
        clocks = {
            thread.name: time.pthread_getcpuclockid(thread.ident)
            for thread in threading.enumerate()
            if thread.name in THREADS and thread.ident
        }
        before = {name: time.clock_gettime(clock) for name, clock in clocks.items()}
        busy = time.thread_time()
        for _ in range(steps):
            case.step()
        handle.synchronize()
        main = time.thread_time() - busy
        threads = {name: time.clock_gettime(clock) - before[name] for name, clock in clocks.items()}
    finally:
        for owner, method, original in originals:
            setattr(owner, method, original)
    found = {name.strip(): entry[0] / steps / 1e6 for name, entry in took.items()}
    print(f"\n{schedule}, {steps} steps; wall time of each entrance, CPU time of each thread, per step:")
    for name, (spent, calls) in took.items():
        each = f"{spent / calls / 1e3:.1f} µs each" if calls else ""
        print(f"  {name:38} {spent / steps / 1e6:8.3f} ms  {calls / steps:6.1f} calls  {each}")
    for name, seconds in {"the training thread, all of it": main, **threads}.items():
        print(f"  {name:38} {seconds / steps * 1e3:8.3f} ms CPU")
        found[name] = seconds / steps * 1e3
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    for _ in range(steps):
        case.step()
    profiler.disable()
    handle.close()
    print("\nthe training thread by cProfile, CPU time, which it about doubles:")
    pstats.Stats(profiler, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(18)
    return found


def timed(method: Callable[..., Any], entry: list[int]) -> Callable[..., Any]:
    """``method`` that adds its nanoseconds and calls to ``entry``."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        began = time.perf_counter_ns()
        try:
            return method(*arguments, **keywords)
        finally:
            entry[0] += time.perf_counter_ns() - began
            entry[1] += 1

    return run


def main() -> None:
    """Prints a table and the RESULT line."""
    profiles = "--profile" in sys.argv
    if profiles:
        sys.argv.remove("--profile")
    arguments = options(__doc__ or "")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    load = os.getloadavg()[0]
    details: dict[str, Any] = {"load": load, "samples": SAMPLES}
    print(f"161 gradients, {STEP / MILLISECOND:g} ms of computation, one rank; load of this machine {load:.1f}")
    small = measured(SMALL, SAMPLES, 3 if arguments.quick else 10)
    show("a hundredth of the bytes:", small)
    values: dict[str, float] = {}
    for name, (wall, cpu) in shares(small).items():
        prefix = "" if name == "bytescheduler" else f"{name}_"
        values |= {f"{prefix}overhead_percent": wall, f"{prefix}cpu_percent": cpu}
    details["small"] = {name: {"step_s": case.times, "cpu_s": case.cpu} for name, case in small.items()}
    if not arguments.quick:
        whole = measured(1.0, SAMPLES, 5)
        show("all bytes:", whole)
        values |= {f"{name}_whole_percent": wall for name, (wall, _) in shares(whole).items()}
        details["whole"] = {name: {"step_s": case.times, "cpu_s": case.cpu} for name, case in whole.items()}
    if profiles:
        details["profile_ms"] = profile(20, f"bytescheduler({partition(SMALL)})", SMALL)
    dist.destroy_process_group()
    finish(arguments, "attach", values, details)


if __name__ == "__main__":
    main()
