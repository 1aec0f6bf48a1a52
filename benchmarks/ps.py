"""A parameter server on real links: what scheduling gains, how near to T* it comes, and how well servers fill links.

Hosts are network namespaces of this machine, workers, servers and bytes are real, computation is paced. Every schedule
is compared with fifo, the servers without a scheduler, in interleaved rounds. Needs root.

--quick: the CPU of a message, also of a naive server's, the links' use at 1 and 5 Gb/s, and the first cell of --full
with three of its schedules; two minutes, because its steps are as long as there. Others' default knobs are left out, so
that RESULT has no prophet_vs_p3_defaults and no prophet_vs_bytescheduler_defaults.
--full: also a step of the links' rate; three models, three ratios of communication to computation and three set-ups
with a part of the models' bytes, a fourth with all; two hours. --json FILE is written anew after every cell, and cells
that it has are not measured again, so that --minutes may end a run and the next goes on; beside it is a picture
(FILE.svg) of what accelerator and links do in the first cell.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from measure import finish, machine, options, spread
from rich.console import Console
from rich.table import Table

from foretrain.comm.ps.placement import Declared, ShardPart
from foretrain.comm.ps.server.shard import SumShard
from foretrain.errors import ForetrainError
from foretrain.files import write_atomically
from foretrain.lab import Lab
from foretrain.lab.compare import conduct, experiment, on, plan_of
from foretrain.lab.messages import LabPlan, LabProgress
from foretrain.lab.servers import PIDS
from foretrain.launch.child_processes import ServerProcess, end_servers, server_command
from foretrain.launch.command import SECRET, SERVERS
from foretrain.network.switch_cluster import MESSAGE
from foretrain.report.timeline_plot import lanes_svg
from foretrain.simulation import Run
from foretrain.units import MILLISECOND, SECOND, Time, parse_rate

SCRIPTS = Path(__file__).parent / "ps_scripts"
MODELS = ("resnet50", "vgg16", "inception_v3")
RATIOS = (0.5, 1.0, 2.0)
P3, BYTESCHEDULER = "p3(slice=160kB)", "bytescheduler(partition=4MB, credit=16MB)"
"""With the knobs that their authors' code has; without knobs they are set to the best in simulation."""
SCHEDULES = ("fifo", "p3", P3, "bytescheduler", BYTESCHEDULER, "prophet")
SEED = 0
FASTEST = "5Gbps"
RATES = ("100Mbps", "1Gbps", FASTEST)
"""Of the links that servers are to fill."""
WORKERS = 2
"""That push to one server there, so that its link is the one that is full."""
BYTES = 30e6
"""Of a model's gradients, about: fewer than they have, so that three workers fill 1 Gb/s for 0.7 s a step."""
FAST, SLOW = "1Gbps", "500Mbps"
"""The step of bandwidth: there and back."""
CHUNK, GRADIENTS = 64 << 10, 25 << 20
"""Bytes of a message whose cost is measured, and of the gradients that each worker sends in such."""
TURNS = 3
"""Of our server's messages and a naive one's."""
JUST = 5
"""Iterations after a step that are also judged by themselves."""
TRACED = 12
"""Iterations that are recorded of a traced cell."""
WINDOW: Time = 50 * MILLISECOND
"""In which an accelerator's busy time is counted."""
LINKS = ("link", "policy", "operations")
"""Parts of the distance to T* that a forecast has which leaves out the cores."""
MOVED = 1.25
"""By so much, of the 2 that links change by, a plan must differ to count as made for the links after the step."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Hosts that train, the servers beside them or on them, and their links."""

    hosts: int
    servers: int | str
    rate: str

    def __str__(self) -> str:
        beside = "co-located" if self.servers == "colocated" else f"{self.servers} server{'s' * (self.servers != 1)}"
        return f"{beside} + {self.hosts} workers, {self.rate}"


SETUPS = (Setup(3, 1, "1Gbps"), Setup(2, 2, "500Mbps"), Setup(3, "colocated", "500Mbps"))
"""Two servers and two workers at 1 Gb/s carry 4 Gb/s, for which two cores do not suffice: that would be measured."""
WHOLE = {"resnet50": Setup(2, 1, "1Gbps"), "inception_v3": Setup(2, 1, "1Gbps"), "vgg16": Setup(2, 1, "3Gbps")}
"""Where models send all of their bytes; VGG-16's, 553 MB, take 1.5 s each way."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One model on one set-up; ``ratio`` is communication over computation there."""

    setup: Setup
    model: str
    ratio: float
    size: float
    iterations: int = 16
    rounds: int = 2
    warmup: int = 2
    schedules: tuple[str, ...] = SCHEDULES
    traced: bool = False

    def plan(self) -> LabPlan:
        """What the hosts are asked."""
        place = {"hosts": self.setup.hosts, "rate": self.setup.rate, "servers": self.setup.servers}
        how = {name: getattr(self, name) for name in ("iterations", "rounds", "warmup")}
        how |= {"traced": TRACED * self.traced, "seed": SEED}
        one = experiment(self.model, **place, **how, schedules=self.schedules, ratio=self.ratio, size=self.size)
        return plan_of([one], **place)


@dataclass(frozen=True)
class Found:
    """What has been measured so far.

    Attributes:
        results: cells, with what `LabResult.to_dict` says of each, and the date and machine of its measurement, which
            old cells may lack.
        pushes: by rate, of one server's link or of this machine without shaping.
        sum_rates: by type, bytes a second that one thread of a server takes and adds up.
        steps: by schedule, iterations over links whose rate changes.
        messages: CPU seconds of a small message.
        naive: the same of a server of NumPy and ZeroMQ.
        measured: of each of these the date and the machine, by what the program calls them; old files lack it.
        failures: what could not be measured.
    """

    results: list[tuple[Cell, dict[str, Any]]] = field(default_factory=list)
    pushes: dict[str, dict[str, Any]] = field(default_factory=dict)
    sum_rates: dict[str, float] = field(default_factory=dict)
    steps: dict[str, Any] = field(default_factory=dict)
    messages: dict[str, float] = field(default_factory=dict)
    naive: dict[str, float] = field(default_factory=dict)
    measured: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def quick() -> list[Cell]:
    """The first cell of the grid, with no more schedules and samples than a comparison needs, in as many turns."""
    schedules = "fifo", "bytescheduler", "prophet"
    return [replace(full()[0], iterations=15, rounds=3, warmup=1, schedules=schedules, traced=False)]


def full() -> list[Cell]:
    """The grid; R = 1, which counts most, comes first, then whole models at other ratios."""
    from foretrain.workload import zoo

    sizes = {model: BYTES / zoo(model, precision="fp32").size for model in MODELS}
    parts = [Cell(setup, model, ratio, sizes[model]) for ratio in RATIOS for setup in SETUPS for model in MODELS]
    whole = [Cell(WHOLE[model], model, ratio, 1.0) for ratio in RATIOS for model in MODELS]
    first = [cell for cell in (*parts, *whole) if cell.ratio == 1]
    others = [cell for cell in (*whole, *parts) if cell.ratio != 1]
    return [replace(first[0], traced=True), *first[1:], *others]


@contextmanager
def lab(setup: Setup, plan: LabPlan) -> Iterator[Lab]:
    """Hosts for ``setup``."""
    with Lab.up("ps", setup.hosts + plan.dedicated, setup.rate) as built:
        yield built


def measured(cell: Cell, calibration: float, picture: Path | None = None) -> dict[str, Any]:
    """All schedules of a cell, in turns; of a traced one also how busy accelerators were over time, and a picture."""
    plan = cell.plan()
    plan = LabPlan(**{name: getattr(plan, name) for name in LabPlan.__slots__} | {"calibration": calibration})
    last = time.monotonic()

    def progress(now: LabProgress) -> None:
        nonlocal last
        if time.monotonic() > last + 5:
            last = time.monotonic()
            print(f"{cell.model}, {cell.setup}: {now.what}, {now.done} of {now.total}", file=sys.stderr, flush=True)

    with lab(cell.setup, plan) as built:
        (result,) = conduct(plan, on(built, plan), progress)
    here = machine()
    found = {"date": here["date"], "machine": f"{here['cores']} cores, {here['cpu']}", **result.to_dict()}
    if cell.traced:
        traced = ((name, result.find(name)) for name in ("fifo", "bytescheduler", "prophet"))
        runs = {name: one.runs[0] for name, one in traced if one and one.runs}
        found["busy"] = {"window": WINDOW / SECOND, "shares": {name: shares(run) for name, run in runs.items()}}
        if picture is not None:
            title = f"{cell.model} over {cell.setup}, measured"
            picture.write_text(lanes_svg([*runs.values()], width=860, title=title))
    return found


def shares(run: Run) -> list[float]:
    """For how much of each `WINDOW` the first worker's accelerator computed, in all recorded iterations."""
    begin = run.begins[0]
    busy = [0] * ((run.begins[-1] - begin) // WINDOW)
    for span in run.timeline:
        start, end = max(0, span.start - begin), span.end - begin
        for k in range(start // WINDOW, min(len(busy), -(-end // WINDOW))) if span.lane == "gpu" else ():
            busy[k] += min(end, (k + 1) * WINDOW) - max(start, k * WINDOW)
    return [each / WINDOW for each in busy]


def kept(file: Path | None) -> Found:
    """What an earlier run wrote to ``file``."""
    if file is None or not file.exists():
        return Found()
    details = json.loads(file.read_text())["details"]
    results = []
    for one in details.pop("cells"):
        asked = one.pop("cell")
        asked |= {"setup": Setup(**asked["setup"]), "schedules": tuple(asked["schedules"])}
        results.append((Cell(**asked), one))
    # Older files have what is measured no more.
    known = {each.name for each in fields(Found)} - {"results", "failures"}
    return Found(results, **{name: value for name, value in details.items() if name in known})


# How near servers come to their links.


def pushed(rate: str | None, workers: int, series: int) -> dict[str, Any]:
    """What one server carries of messages of 1 MiB, each way; where ``rate`` is None on one host, without shaping."""
    speed = parse_rate(rate) if rate else 1.25e9
    setup = Setup(workers, 1 if rate else "colocated", rate or "none")
    told: list[list[dict[str, float]]] = [[] for _ in range(workers)]
    plan = LabPlan(workers, speed, (), exchange="ps" if rate else "ps_colocated", servers=1)
    with Lab.up("ps", workers + plan.dedicated, rate) as built:
        on(built, plan)(
            [sys.executable, str(SCRIPTS / "push.py"), str(speed), str(series)],
            environment={},
            timeout=300,
            on_line=lambda rank, line: told[rank].append(json.loads(line)) if line.startswith("{") else None,
        )
    # A series is over when its last worker is through.
    seconds = [max(one["seconds"] for one in each) for each in zip(*told, strict=True)]
    carried = workers * (1 << 20) / median(seconds)
    return {
        "setup": str(setup),
        "carried": carried,
        "seconds": seconds,
        "efficiency": carried / speed if rate else None,
        "server_cores": median(one["servers"] for one in told[0]),
        "worker_cores": fmean(median(one["worker"] for one in each) for each in told),
    }


def show_pushes(pushes: dict[str, dict[str, Any]]) -> None:
    """A line for every rate."""
    for rate, one in pushes.items():
        share = f", {one['efficiency']:.1%} of the link" if one["efficiency"] else ""
        print(
            f"{rate}: {one['carried'] * 8e-9:.3g} Gb/s of payload each way{share}; "
            f"of {os.cpu_count()} cores the server took {one['server_cores']:.2f}, a worker {one['worker_cores']:.2f}"
        )


# What a message costs.


def messaged(steps: int) -> dict[str, float]:
    """CPU seconds of a message of 64 KiB on loopback: of `WORKERS` workers, of a server, and of the kernel's TCP alone.

    A push is one message, and the sum that answers it another.
    """
    secret = secrets.token_hex(32)
    environment = os.environ | {SECRET: secret, "OMP_NUM_THREADS": "1"}
    server = ServerProcess(server_command("127.0.0.1:0", WORKERS, 0, 1, 60), env=environment)
    workers: list[subprocess.Popen[str]] = []
    try:
        environment |= {SERVERS: server.address() or "", PIDS: str(server.pid), "WORLD_SIZE": str(WORKERS)}
        command = [sys.executable, str(SCRIPTS / "messages.py"), str(CHUNK), str(steps)]
        workers = [
            subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(WORKERS)
        ]
        told = [[json.loads(line) for line in worker.communicate(timeout=300)[0].splitlines()] for worker in workers]
    except subprocess.TimeoutExpired as error:
        raise ForetrainError("a worker has not ended within 300 s") from error
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        end_servers([server])
    if any(len(lines) < steps for lines in told):
        raise ForetrainError("a worker has ended before it was through; what it wrote says why")
    count = 2 * WORKERS * GRADIENTS // CHUNK
    own = sum(median(line["worker"] for line in lines) for lines in told) / count
    servers = median(line["servers"] for line in told[0]) / count
    return {
        "worker": own,
        "server": servers,
        "both": own + servers,
        "kernel": median(_moved(CHUNK, 1000) for _ in range(5)),
        "step": median(line["seconds"] for line in told[0]),
    }


def naive(steps: int) -> dict[str, float]:
    """The same of the server of NumPy and ZeroMQ in ps_scripts/naive.py; nothing where there is no pyzmq."""
    if find_spec("zmq") is None:
        return {}
    script, count = str(SCRIPTS / "naive.py"), GRADIENTS // CHUNK
    asked = [str(CHUNK), str(count), str(steps)]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[str]] = []

    def start(*role: str) -> subprocess.Popen[str]:
        command = [sys.executable, script, *role, *asked]
        started.append(subprocess.Popen(command, env=alone, stdout=subprocess.PIPE, text=True))
        return started[-1]

    try:
        server = start("server", str(WORKERS))
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        workers = [start("worker", port) for _ in range(WORKERS)]
        told = [json.loads(each.communicate(timeout=300)[0]) for each in (server, *workers)]
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise ForetrainError(f"the naive server or a worker of it has not come through: {error}") from error
    finally:
        for process in started:
            process.kill()
            process.wait()
    own = [median(each) / (2 * WORKERS * count) for each in told]
    return {"worker": sum(own[1:]), "server": own[0], "both": sum(own)}


def in_turns(steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Both, in turns of so many steps, so that drift of the machine hits both alike: the medians of the turns."""
    both = [(messaged(steps), naive(steps)) for _ in range(TURNS)]
    ours, theirs = ({name: median(one[name] for one in each) for name in each[0]} for each in zip(*both, strict=True))
    return ours, theirs


def _moved(size: int, count: int) -> float:
    """CPU seconds for a message of plain bytes from one socket to another, both in this process."""
    data, place = bytes(size), memoryview(bytearray(size))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):

        def receive() -> None:
            left = size * count
            while left:
                left -= other.recv_into(place, min(size, left))

        thread, began = threading.Thread(target=receive), time.process_time()
        thread.start()
        for _ in range(count):
            one.sendall(data)
        thread.join()
        return (time.process_time() - began) / count


def show_messages(one: dict[str, float]) -> None:
    """A line."""
    if one:
        print(
            f"a message of {CHUNK >> 10} KiB on loopback: {1e6 * one['both']:.0f} µs of CPU, {1e6 * one['worker']:.0f} "
            f"in the worker and {1e6 * one['server']:.0f} in the server; TCP alone {1e6 * one['kernel']:.0f} µs; "
            f"{1e3 * one['step']:.0f} ms for {GRADIENTS >> 20} MiB of {WORKERS} workers"
        )


def show_naive(naive: dict[str, float], ours: dict[str, float]) -> None:
    """A line."""
    if not naive:
        print("a naive server: not measured; it needs pyzmq: install foretrain[dev]")
    elif ours:
        each = (f"{1e9 / CHUNK * one['both']:.2f} s/GB" for one in (naive, ours))
        print(f"CPU of workers and server: {' with a naive server of NumPy and ZeroMQ, '.join(each)} with ours")


# How fast a server adds.


def summed(series: int) -> dict[str, float]:
    """Bytes a second that one thread takes of two workers' messages and adds up, by type.

    A message is copied first, which those of a wire are not.
    """
    random = np.random.default_rng(SEED)
    found: dict[str, float] = {}
    for dtype in ("float32", "float16", "bfloat16"):
        # Bits of small numbers, in every type.
        gradient = memoryview((random.integers(0, 1 << 12, MESSAGE // 2) + 0x3C00).astype("<u2").tobytes())
        shard = SumShard([ShardPart(0, 0, 0, MESSAGE, 0)], [Declared("gradient", MESSAGE, dtype, 0)], 2)
        times = []
        for turn in range(series):
            began = time.perf_counter()
            for step in range(32 * turn, 32 * (turn + 1)):
                for worker in range(2):
                    shard.push(worker, 0, step, 0, MESSAGE, gradient)
            times.append(time.perf_counter() - began)
        found[dtype] = 32 * 2 * MESSAGE / median(times[1:])
    return found


def show_sums(rates: dict[str, float]) -> None:
    """A line for all types."""
    if rates:
        each = (f"{8e-9 * rate:.0f} Gb/s of {dtype}" for dtype, rate in rates.items())
        print(f"one thread of a server takes and adds up {', '.join(each)} of two workers")


# What happens when links change.


def stepped(phase: int, size: float, schedules: Sequence[str] = ("fifo", "prophet")) -> dict[str, Any]:
    """ResNet-50 over one server: a phase of so many iterations on fast links, one on slow ones, one on fast ones."""
    from foretrain.workload import zoo

    setup = Setup(WORKERS, 1, FAST)
    plan = plan_of(hosts=setup.hosts, rate=FAST, servers=setup.servers)
    compute = plan.links.cost.time(round(zoo("resnet50", precision="fp32").size * size))
    asked = {"model": "resnet50", "size": size, "compute": compute, "iterations": 3 * phase, "schedules": schedules}
    told: dict[str, list[dict[str, Any]]] = {schedule: [] for schedule in schedules}
    with lab(setup, plan) as built:

        def heard(rank: int, line: str) -> None:
            if not line.startswith("{"):
                return
            one = json.loads(line)
            told[one["schedule"]].append(one)
            if one["iteration"] + 1 in (phase, 2 * phase):
                built.rate(SLOW if one["iteration"] + 1 == phase else FAST)

        command = [sys.executable, str(SCRIPTS / "steady.py"), json.dumps(asked)]
        seconds = 300 + 10 * len(schedules) * 3 * phase * compute / SECOND
        on(built, plan)(command, environment={}, timeout=seconds, on_line=heard)
    return {schedule: _phases(lines, phase) for schedule, lines in told.items()}


def _phases(lines: Sequence[dict[str, Any]], phase: int) -> dict[str, Any]:
    """Medians of the phases, how long after each step a plan for the links as they are came, what monitoring costs."""
    times = [one["seconds"] for one in lines]
    adopted = []
    for begin, slower in ((phase, 1), (2 * phase, -1)):
        before = lines[begin - 1]["slowness"]
        moved = ((one["slowness"] / before) ** slower for one in lines[begin : begin + phase])
        adopted.append(next((k + 1 for k, ratio in enumerate(moved) if ratio > MOVED), None))
    return {
        "medians": [median(times[begin : begin + phase]) for begin in range(0, len(times), phase)],
        "after": [fmean(times[begin : begin + JUST]) for begin in (phase, 2 * phase)],
        "total": sum(times),
        "replanned_after": adopted,
        "monitoring": lines[-1]["monitor"] / sum(times),
        "iterations": times,
    }


def show_steps(steps: dict[str, Any]) -> None:
    """A line for every schedule."""
    for schedule, one in steps.items():
        medians = " → ".join(f"{1e3 * each:.0f}" for each in one["medians"])
        print(f"{schedule} over {FAST} → {SLOW} → {FAST}: {medians} ms an iteration, {one['total']:.2f} s in all")
    if (ours := steps.get("prophet")) is not None:
        after = " and ".join("never" if count is None else str(count) for count in ours["replanned_after"])
        print(f"prophet adopts a new plan {after} iterations after the steps; watching takes {ours['monitoring']:.2%}")


# Tables and targets.


def case(result: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The case of this name, if it was measured."""
    return next((one for one in result["cases"] if "median" in one and one["case"] == name), None)


def show(results: Sequence[tuple[Cell, dict[str, Any]]]) -> None:
    """A line for every case, by set-up; "cores" is the part of T/T* that they cost, "error" the forecast's."""
    for setup, group in groupby(sorted(results, key=lambda both: str(both[0].setup)), key=lambda both: both[0].setup):
        table = Table(title=str(setup), title_justify="left", box=None, pad_edge=False)
        heads = ("model", "R", "schedule", "ms [middle half]", "vs fifo", "T/T*", "cores", "error", "idle", "link")
        for head in heads:
            table.add_column(head, no_wrap=True, justify="left" if head in ("model", "schedule") else "right")
        for cell, result in group:
            for one in result["cases"]:
                if "median" in one:
                    table.add_row(cell.model, f"{cell.ratio:g}", *_columns(one))
        Console(width=120, highlight=False).print(table)


def _columns(one: dict[str, Any]) -> tuple[str, ...]:
    busiest = max((share for both in one["links"] for share in both), default=None)
    return (
        one["case"],
        spread([1e3 * time for part in one["rounds"] for time in part]),
        f"{one['vs_fifo']:.3f}",
        f"{1 + one['gap']:.3f}",
        "" if one["losses"] is None else f"{one['losses']['cores']:.3f}",
        "" if one["forecast_error"] is None else f"{one['forecast_error']:+.1%}",
        "" if one["idle"] is None else f"{one['idle']:.0%}",
        "" if busiest is None else f"{busiest:.0%}",
    )


def gains(found: Found, over: str, ours: str = "prophet", ratios: Sequence[float] = RATIOS) -> list[float]:
    """How many times as fast as ``over`` ``ours`` was, in cells of these ratios."""
    pairs = [(case(result, over), case(result, ours)) for cell, result in found.results if cell.ratio in ratios]
    return [slow["median"] / fast["median"] for slow, fast in pairs if slow and fast]


def values(found: Found) -> dict[str, float]:
    """The RESULT keys: the worst cell, the median, and the best one for what others' defaults cost."""
    filled = {rate: one["efficiency"] for rate, one in found.pushes.items() if one["efficiency"]}
    over = gains(found, "bytescheduler")
    worst: dict[str, list[float]] = {
        "link_efficiency": [each for rate, each in filled.items() if rate != FASTEST],
        "link_efficiency_5g": [each for rate, each in filled.items() if rate == FASTEST],
        "prophet_vs_fifo": gains(found, "fifo", ratios=(1.0,)),
        "prophet_vs_bytescheduler_worst": over,
    }
    best = {"p3": gains(found, P3), "bytescheduler": gains(found, BYTESCHEDULER)}
    numbers = {name: min(each) for name, each in worst.items() if each}
    numbers |= {f"prophet_vs_{name}_defaults": max(each) for name, each in best.items() if each}
    if over:
        numbers["prophet_vs_bytescheduler_median"] = median(over)
    gaps = [one["gap"] for _, result in found.results if (one := case(result, "prophet"))]
    cases = [one for _, result in found.results for one in result["cases"]]
    errors = [abs(one["forecast_error"]) for one in cases if one.get("forecast_error") is not None]
    if found.messages:
        numbers["message_us"] = 1e6 * found.messages["both"]
        if found.naive:
            numbers["cpu_vs_naive_server"] = found.naive["both"] / found.messages["both"]
    return numbers | ({"gap_to_optimum": max(gaps), "forecast_error_median": median(errors)} if gaps else {})


def deviations(found: Found) -> dict[str, float]:
    """How far off forecasts were that leave out the cores, as a job's own do: what `auto` must doubt over servers.

    In cells in which communication takes as long as computation or longer, with knobs that are the best in simulation:
    elsewhere every forecast is right. ``rate``: all schedules of a cell are off alike, as on slower links; the
    root mean square of the cells' medians. ``forecast``: each beside that, the median ÷ 0.67. ``overhead``: of the time
    of the smallest messages between calibrations of a set-up, the largest.
    """
    cells, beside, small = [], [], defaultdict(list)
    for cell, result in found.results:
        for size, depth, seconds in result["calibration"]["samples"]:
            if size == min(sample[0] for sample in result["calibration"]["samples"]):
                small[cell.setup, depth].append(seconds)
        off = [
            math.log(one["median"] / (one["optimum"] * (1 + sum(one["losses"][part] for part in LINKS))))
            for one in result["cases"]
            if one.get("losses") and one["case"].isidentifier()
        ]
        if off and cell.ratio >= 1:
            cells.append(median(off))
            beside += [abs(each - cells[-1]) for each in off]
    spreads = [stdev(each) / fmean(each) for each in small.values() if len(each) > 1]
    numbers = {"overhead": max(spreads)} if spreads else {}
    if cells:
        rate = math.sqrt(fmean(each**2 for each in cells))
        numbers |= {"rate": rate, "forecast": median(beside) / 0.67}
    return numbers


def targets(found: Found) -> Iterator[tuple[str, float | None, str, Callable[[float], bool]]]:
    """What was to be reached: in words, what was found (None: nothing), and whether that is good."""
    numbers = values(found)
    both = [*gains(found, "fifo", ratios=(1.0,)), *gains(found, "fifo", "bytescheduler", ratios=(1.0,))]
    ours, plain = found.steps.get("prophet"), found.steps.get("fifo")
    after = [float("inf") if each is None else each for each in ours["replanned_after"]] if ours else []
    pairs = [
        pair
        for part in ("medians", "after")
        for pair in (zip(plain[part], ours[part], strict=True) if ours and plain else ())
    ]
    for name, rates in (("link_efficiency", "up to 1 Gb/s"), ("link_efficiency_5g", "at 5 Gb/s")):
        what = f"share of the link that a server fills {rates}"
        yield what, numbers.get(name), "≥ 0.9", lambda x: x >= 0.9
    yield "CPU of a message of 64 KiB, µs", numbers.get("message_us"), "≤ 40", lambda x: x <= 40
    yield "bytescheduler and prophet over fifo at R = 1", min(both, default=None), "≥ 1.3", lambda x: x >= 1.3
    what = "CPU of a byte with a naive server over that with ours"
    yield what, numbers.get("cpu_vs_naive_server"), "≥ 3", lambda x: x >= 3
    name = "prophet_vs_bytescheduler"
    yield "prophet over bytescheduler, median", numbers.get(f"{name}_median"), "≥ 1.02", lambda x: x >= 1.02
    yield "prophet over bytescheduler, worst cell", numbers.get(f"{name}_worst"), "≥ 0.99", lambda x: x >= 0.99
    what = "over p3 at its authors' knobs, best cell"
    yield f"prophet {what}", numbers.get("prophet_vs_p3_defaults"), "≥ 1.4", lambda x: x >= 1.4
    what = "over bytescheduler at its authors' knobs, best cell"
    yield f"prophet {what}", numbers.get(f"{name}_defaults"), "≥ 1.15", lambda x: x >= 1.15
    gap = numbers.get("gap_to_optimum")
    yield "prophet's T/T*, worst cell", None if gap is None else 1 + gap, "≤ 1.08", lambda x: x <= 1.08
    yield "forecast error, median", numbers.get("forecast_error_median"), "≤ 0.04", lambda x: x <= 0.04
    yield "share of an iteration for monitoring", ours and ours["monitoring"], "≤ 0.01", lambda x: x <= 0.01
    yield "iterations until prophet plans anew", max(after, default=None), "≤ 10", lambda x: x <= 10
    slowest = min((slow / fast for slow, fast in pairs), default=None)
    what = f"prophet over fifo while links change, worst phase or {JUST} iterations after a step"
    yield what, slowest, "≥ 1", lambda x: x >= 1


def details(found: Found) -> dict[str, Any]:
    """Everything measured, for the JSON."""
    cells = [{"cell": asdict(cell), "setup": str(cell.setup), **result} for cell, result in found.results]
    return {
        "cells": cells,
        "pushes": found.pushes,
        "sum_rates": found.sum_rates,
        "messages": found.messages,
        "naive": found.naive,
        "measured": found.measured,
        "steps": found.steps,
        "failures": found.failures,
    }


def main() -> None:
    """Prints tables, targets and the RESULT line."""
    more = "begin no measurement after so many"
    arguments = options(__doc__ or "", lambda parser: parser.add_argument("--minutes", type=float, help=more))
    brief, file = arguments.quick, arguments.json
    found = Found() if brief else kept(file)
    here = machine()
    end = time.monotonic() + 60 * (math.inf if arguments.minutes is None else arguments.minutes)

    def keep(what: str, have: object, measure: Callable[[], None], *, dated: bool = True) -> None:
        """Measure what a file does not have, and write the file, with the date."""
        if have or time.monotonic() > end:
            return
        try:
            measure()
            if dated:
                found.measured[what] = f"{here['date']}, {here['cores']} cores, {here['cpu']}"
        except ForetrainError as error:
            found.failures.append(f"{what}: {error}")
            print(f"failed: {found.failures[-1]}", file=sys.stderr, flush=True)
        if file:
            write_atomically(file, json.dumps({"partial": values(found), "details": details(found)}, indent=2) + "\n")

    def cost() -> None:
        ours, theirs = in_turns(5 if brief else 15)
        found.messages.update(ours)
        found.naive.update(theirs)

    keep("messages", found.messages, cost)
    show_messages(found.messages)
    show_naive(found.naive, found.messages)
    for rate in ("1Gbps", FASTEST) if brief else RATES:
        have = rate in found.pushes
        keep(rate, have, lambda rate=rate: found.pushes.update({rate: pushed(rate, WORKERS, 1 if brief else 5)}))
    if not brief:
        free = "one host, not shaped"
        keep(free, found.pushes.get(free), lambda: found.pushes.update({free: pushed(None, 1, 5)}))
    show_pushes(found.pushes)
    keep("sums", found.sum_rates, lambda: found.sum_rates.update(summed(4 if brief else 16)))
    show_sums(found.sum_rates)
    if not brief:
        keep("step", found.steps, lambda: found.steps.update(stepped(20, 0.25)))
        show_steps(found.steps)
    have, seconds = [cell for cell, _ in found.results], 0.3 if brief else 2.0
    picture = file.with_suffix(".svg") if file else None
    for cell in quick() if brief else full():
        one = lambda cell=cell: found.results.append((cell, measured(cell, seconds, picture)))  # noqa: E731
        keep(str(cell), cell in have, one, dated=False)  # each has its own
    show(found.results)
    if off := deviations(found):
        print(f"standard deviations: {', '.join(f'{name} {share:.1%}' for name, share in off.items())}")
    for what, value, wanted, good in targets(found):
        told = "not measured" if value is None else f"{value:.3g} ({wanted}): {'met' if good(value) else 'not met'}"
        print(f"{what}: {told}")
    finish(arguments, "ps", values(found), details(found), seed=SEED)
    if found.failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
