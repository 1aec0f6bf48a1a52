"""attach on a GPU: does it train what DistributedDataParallel trains, and what does it cost?

Two jobs, started here: one rank over NCCL, where communication is free and what is left is the host's work; and two
ranks that share the GPU over gloo, because NCCL refuses to. In each a transformer and a residual network train with
stock DDP and attached, from the same seeds:

- *same*: largest difference of parameters and buffers after some steps, relative to the largest value of a tensor. Both
  sides add in the same order (one rank, and a + b = b + a), so that they must agree bit for bit wherever DDP agrees
  with itself; where it does not, they may differ by ten times as much as DDP from DDP. Trained as ever; with two
  backward passes before each step (in double precision to 1e-9, because sums are then added in another order); and
  with kernels that spin on the runtime's own streams, so that whoever does not wait for them shows.
- *time*: seconds per step in interleaved rounds, each sample ending with everything done on the device. All cases live
  in one process, so DDP passes this package's guards too, a fraction of a microsecond per parameter.
- *CPU* (one rank): processor time of all threads per step beyond plain training, as a share of the plain step; taken
  before the host waits for the device.

Needs a CUDA build of torch and a GPU; says so and ends where there is none.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from measure import finish, options, spread
from torch import Tensor, nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing import spawn  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import foretrain as ft
from foretrain.lab.training import batches, transformer
from foretrain.plugins.torch.streams import CudaStreams
from foretrain.schedule import Job

JOBS = (("nccl", 1), ("gloo", 2))
SCHEDULES = ("bytescheduler", "prophet")
SAMPLES = 15
TRAINED = 16
"""Steps before parameters are compared: three are observed, Prophet profiles some, the others are scheduled."""
LATE = tuple(name for name in ("issuing", "arriving", "updating") if hasattr(CudaStreams, name))
"""The streams that are made late."""
_ROUNDING = 1e-9
"""What sums of two passes may differ by in double precision: attach may add them here, DDP adds them everywhere."""
_SPIN = 500_000
"""Clock cycles that a late stream spins, about 0.3 ms."""
_LIMIT = timedelta(seconds=120)
_DEATH_SIGNAL = 1


# ---------------------------------------------------------------- models


class Residual(nn.Module):
    """Two convolutions beside a shortcut, (batch, channels, height, width) both ways."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        y = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(y)) + self.shortcut(x)).relu()


class Pictures(nn.Module):
    """ResNet-18 on small pictures: 62 parameters, 11 million numbers, and buffers that all ranks share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        places = [(width << max(0, stage - 1), width << stage, 1 if stage == 0 else 2) for stage in range(4)]
        self.blocks = nn.Sequential(
            *(
                block
                for inputs, outputs, stride in places
                for block in (Residual(inputs, outputs, stride), Residual(outputs, outputs, 1))
            )
        )
        self.head = nn.Linear(width << 3, 100)

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy."""
        return nn.functional.cross_entropy(self.head(self.blocks(self.stem(pictures)).mean((2, 3))), labels)


@dataclass(frozen=True)
class Subject:
    """A model and its data. ``make()`` gives the same model every time, ``data`` other batches on every rank."""

    make: Callable[[], nn.Module]
    data: Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Size:
    """Width, depth and sequences per batch of the transformer; width, batch and side of the residual network."""

    width: int
    depth: int
    sequences: int
    channels: int
    pictures: int
    side: int


TINY = Size(64, 2, 2, 8, 4, 8)
"""For trying this file without a GPU."""
SMALL = Size(256, 4, 16, 32, 32, 32)
"""4 and 3 million parameters: to compare, and for gloo, which takes the way through the host's memory."""
WHOLE = Size(512, 8, 64, 64, 64, 32)
"""26 and 11 million."""


def subjects(device: torch.device, rank: int, size: Size) -> dict[str, Subject]:
    """What is trained."""
    walks = batches(size.sequences, rank)
    seeded = torch.Generator().manual_seed(rank)
    shape, count = (size.pictures, 3, size.side, size.side), 4
    text = [next(walks) for _ in range(count)]
    pictures = [
        (torch.randn(shape, generator=seeded), torch.randint(100, shape[:1], generator=seeded)) for _ in range(count)
    ]

    def moved(data: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        return [(inputs.to(device), labels.to(device)) for inputs, labels in data]

    def residual() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Pictures(size.channels).to(device)

    return {
        "transformer": Subject(lambda: transformer(0, size.width, size.depth).to(device), moved(text)),
        "resnet": Subject(residual, moved(pictures)),
    }


# ---------------------------------------------------------------- ways to train


@dataclass
class Case:
    """One way to train a subject. ``times``: seconds per step; ``cpu``: of processor time before the last wait."""

    model: nn.Module
    step: Callable[[], None]
    settle: Callable[[], None]
    close: Callable[[], None]
    times: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def sample(self, steps: int, wait: Callable[[], None]) -> None:
        """Some steps, timed as one; ``wait`` waits for the device."""
        gc.collect()
        wait()
        dist.barrier()
        wait()
        began, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step()
        self.cpu.append((time.process_time() - busy) / steps)
        self.settle()
        wait()
        self.times.append((time.perf_counter() - began) / steps)


def case(subject: Subject, way: str) -> Case:
    """``way`` is "plain", "ddp" or a schedule, which is in force when this returns."""
    model = subject.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if way == "plain":
        return Case(model, loop(subject, model, optimizer), nothing, nothing)
    if way == "ddp":
        # As views, which is DDP at its best; each gradient is copied otherwise.
        module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return Case(model, loop(subject, module, optimizer), nothing, nothing)
    handle = ft.attach(model, optimizer, schedule=way)
    step = loop(subject, model, optimizer)
    while handle.schedule is None or handle.workload is None or handle.cost is None:
        step()
    # Some policies, Prophet among them, profile before they plan.
    for _ in range(handle.schedule.build(Job.of(handle.workload, handle.cost)).warmup):
        step()
    return Case(model, step, handle.synchronize, handle.close)


def loop(subject: Subject, module: nn.Module, optimizer: torch.optim.Optimizer, passes: int = 1) -> Callable[[], None]:
    """One step of the training loop of every tutorial; backward runs ``passes`` times before each."""
    data = cycle(subject.data)

    def step() -> None:
        for _ in range(passes):
            module(*next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def nothing() -> None:
    """What stock training has to be waited for."""


# ---------------------------------------------------------------- the same?


@contextmanager
def late(method: str) -> Iterator[None]:
    """Everything that the runtime puts on the stream entered by ``CudaStreams.<method>`` comes 0.3 ms late."""
    original = getattr(CudaStreams, method)

    @contextmanager
    def spinning(self: CudaStreams, *arguments: Any) -> Iterator[None]:
        with original(self, *arguments):
            torch.cuda._sleep(_SPIN)
            yield

    setattr(CudaStreams, method, spinning)
    try:
        yield
    finally:
        setattr(CudaStreams, method, original)


def trained(subject: Subject, way: str, passes: int = 1) -> list[Tensor]:
    """Parameters and buffers after `TRAINED` steps, on the CPU; in double precision where ``passes`` are several."""
    model = subject.make()
    if passes > 1:
        model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with ExitStack() as stack:
        module = model
        if way == "ddp":
            module = DistributedDataParallel(model)
        else:
            stack.enter_context(ft.attach(model, optimizer, schedule=way))
        step = loop(subject, module, optimizer, passes)
        for _ in range(TRAINED):
            step()
    return [value.detach().cpu().clone() for value in model.state_dict().values()]


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest, on any rank, relative to the largest value of its tensor; infinite where a number is none."""
    worst = 0.0
    for one, other in zip(ours, theirs, strict=True):
        gap = (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
        size = other.double().abs().max().item() if other.numel() else 1.0
        worst = max(worst, gap / size if size else gap) if gap == gap else float("inf")
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, worst)
    return max(everywhere)


def checked(subject: Subject, spins: bool, twice: bool) -> dict[str, dict[str, float]]:
    """Per way of training, its difference from DDP and what is allowed.

    Args:
        subject: what is trained.
        spins: whether to make the runtime's streams late, too, under the first schedule.
        twice: whether to train with two backward passes per step, too; for subjects whose data are no floats.
    """
    found: dict[str, dict[str, float]] = {}
    for passes in (1, 2) if twice else (1,):
        expected = trained(subject, "ddp", passes)
        allowed = 10 * difference(trained(subject, "ddp", passes), expected)
        if passes > 1:
            allowed = max(allowed, _ROUNDING)
        for way in SCHEDULES if passes == 1 else SCHEDULES[:1]:
            for method in (None, *LATE) if spins and way == SCHEDULES[0] else (None,):
                with late(method) if method else nullcontext():
                    gap = difference(trained(subject, way, passes), expected)
                words = [way, *(["two passes"] if passes > 1 else []), *([f"late in {method}"] if method else [])]
                found[", ".join(words)] = {"difference": gap, "allowed": allowed}
    return found


# ---------------------------------------------------------------- one rank


def timed(subject: Subject, ways: Sequence[str], steps: int, wait: Callable[[], None]) -> dict[str, Any]:
    """Samples of all ways, round after round, so that drift hits all alike."""
    cases = {way: case(subject, way) for way in ways}
    for turn in range(SAMPLES + 1):
        for one in cases.values():
            one.sample(steps, wait)
            if not turn:
                one.times.clear()
                one.cpu.clear()
    for one in cases.values():
        one.close()
    return {way: {"step_s": one.times, "cpu_s": one.cpu} for way, one in cases.items()}


def live(
    rank: int, backend: str, ranks: int, port: int, steps: int, sizes: tuple[Size, Size], path: str, on: str
) -> None:
    """A rank's life on device ``on``; compares and times subjects of ``sizes``; rank 0 writes to ``path``."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    place = torch.device(on)
    cuda = place.type == "cuda"
    wait: Callable[[], None] = partial(torch.cuda.synchronize, place) if cuda else nothing
    if cuda:
        torch.cuda.set_device(place)
    # What is compared bit for bit must be repeatable by itself.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    store = TCPStore("127.0.0.1", port, ranks, False, _LIMIT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=_LIMIT)
    found: dict[str, Any] = {}
    compared, run = (subjects(place, rank, size) for size in sizes)
    ways = (*(("plain",) if ranks == 1 else ()), "ddp", *SCHEDULES)
    with sdpa_kernel(SDPBackend.MATH):
        for name, subject in compared.items():
            tokens = name == "transformer"
            same = checked(subject, spins=cuda and tokens, twice=tokens)
            found[name] = {"same": same, "time": timed(run[name], ways, steps, wait)}
            if rank == 0:
                Path(path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------- all ranks


def job(backend: str, ranks: int, steps: int, sizes: tuple[Size, Size], on: str = "cuda:0") -> dict[str, Any]:
    """Runs one job to its end: what rank 0 found comparing and timing subjects of these ``sizes``."""
    store = TCPStore("127.0.0.1", 0, ranks, True, _LIMIT, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
    # Read when a rank first touches CUDA or gloo, which is after this.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        spawn(live, (backend, ranks, store.port, steps, sizes, str(path), on), nprocs=ranks, daemon=True)
        return json.loads(path.read_text())


def show(backend: str, ranks: int, found: dict[str, Any]) -> dict[str, float]:
    """Prints a job's tables and returns its numbers."""
    values: dict[str, float] = {}
    print(f"\n{ranks} rank{'s' if ranks > 1 else ''} over {backend}")
    for model, both in found.items():
        for way, one in both["same"].items():
            verdict = "bit for bit" if not one["difference"] else f"differs by {one['difference']:.2g}"
            if not right(one):
                verdict += f", which is WRONG: allowed is {one['allowed']:.2g}"
            print(f"  {model:12} {way:44} {verdict}")
        ddp = both["time"]["ddp"]["step_s"]
        plain = both["time"].get("plain")
        for way, one in both["time"].items():
            ratio = median(mine / theirs for mine, theirs in zip(one["step_s"], ddp, strict=True))
            line = f"  {model:12} {way:14} {spread([1e3 * t for t in one['step_s']]):26} ms  {ratio:.3f} of DDP"
            if way in SCHEDULES:
                values[f"{backend}_{model}_{way}_vs_ddp"] = ratio
            if plain and way != "plain":
                step = median(plain["step_s"])
                busy = median(mine - theirs for mine, theirs in zip(one["cpu_s"], plain["cpu_s"], strict=True))
                line += f"  CPU {100 * busy / step:+.1f} % of a step"
                if way in SCHEDULES:
                    values[f"{backend}_{model}_{way}_cpu_percent"] = 100 * busy / step
            print(line)
    return values


def right(one: dict[str, float]) -> bool:
    """Whether a difference is none that DDP does not have too."""
    return one["difference"] <= one["allowed"]


def main() -> None:
    """Prints the tables and the RESULT line; exit status 1 where attached training gave something else than DDP."""
    arguments = options(__doc__ or "")
    if not torch.cuda.is_available():
        print("skipped: no CUDA device here")
        finish(arguments, "gpu_attach", {"skipped": 1})
        return
    print(torch.cuda.get_device_name(0))
    values: dict[str, float] = {"skipped": 0}
    details: dict[str, Any] = {}
    for backend, ranks in JOBS:
        sizes = (SMALL, SMALL if arguments.quick and backend == "gloo" else WHOLE)
        details[backend] = job(backend, ranks, 3 if arguments.quick else 10, sizes)
        values |= show(backend, ranks, details[backend])
    checks = [one for found in details.values() for both in found.values() for one in both["same"].values()]
    values["bitwise"] = sum(not one["difference"] for one in checks) / len(checks)
    values["wrong"] = sum(not right(one) for one in checks)
    finish(arguments, "gpu_attach", values, details, seed=0)
    sys.exit(values["wrong"] > 0)


if __name__ == "__main__":
    main()
