"""Bounded loss over UDP beside TCP: goodput, CPU, and the time of a training step on networks that lose packets.

Hosts are network namespaces of this machine; loss is a random share of the packets to each host. Computation is paced:
layers sleep. Cases are interleaved in the same processes.

clean     all-reduces of 4 MiB, two in flight: foretrain's ring over TCP, and the same over UDP without tolerance
lossy     a session of twelve layers whose communication takes as long as its computation, under TCP's schedules and
          with bounded loss (p = 5 %; at some places 1 % or "auto") over the transposed all-reduce; beside each the
          forecast of the packet simulation of the same lab (bounded_forecast.py), which knows of the hosts what
          all-reduces of two sizes take there without losses, measured once per number of hosts and TCP. At some places
          also every other baseline, without a forecast: gloo's all-reduce of each layer (DistributedDataParallel's
          order), schedules over a parameter server beside rank 0 (P3, ByteScheduler, Prophet), and in our transport
          LTP's and OptiReduce's rules (docs/bounded.md), error feedback, and P3 over a server
training  real models on real data until an accuracy is reached (bounded_training.py)
drops     rounds to the same accuracy where packets of small magnitude are dropped, and where any are, at the same share
          of lost bytes: four ranks in one process, without a network

Incast: four more hosts send bursts of unmarked UDP to the last host's port. Three bands: its switch serves what is
marked first, as bounded loss marks its packets; TCP's data are not marked, and share the last band with the bursts.
(What ranks agree on is marked AF41 in all sessions.) --full has TCP beside it whose packets are all in the first band
("marked-tcp").

A ratio is TCP's time over ours: above 1, ours is faster; but RESULT's p99_vs_best_tcp is ours over TCP's. p99 of 60
steps is the slowest. RESULT's median_vs_best_tcp, p99_vs_best_tcp, tta_vs_best_tcp and accuracy_delta are of 2 hosts
under incast of 40 %, three bands, 1 % lost, and TCP not marked; clean_vs_tcp is of 2 hosts without losses.

--quick trains nothing, so that RESULT's tta_vs_best_tcp and accuracy_delta are nan there: a time to accuracy of one
seed says nothing, and five seeds take minutes. --full takes two hours: with --json FILE each place is kept
there as soon as it is measured, and the next run with the same FILE goes on from it, and says so; --only KIND… measures
some, so that several runs make one FILE. Needs root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bounded_training import STEPS
from measure import finish, options, spread, written

MIB = 1 << 20
_WORK = "FORETRAIN_BOUNDED_BENCHMARK"
TOLERANCE = 0.05
RATE = "300Mbps"
"""Where packets go one by one, two cores move no more beside everything else."""
OBSERVED = 3
LAYERS = 12
LEARNING = 40
"""Steps until rules that learn from times have seen enough of them."""
PROBES = (4 << 10, MIB)
"""Bytes of the all-reduces that say what hosts add."""
EVERY_BASELINE = {(2, 0.001, "cubic"), (2, 0.01, "cubic"), (2, 0.01, "bbr"), (2, 0.02, "cubic"), (3, 0.01, "cubic")}
"""Hosts, loss and TCP where every baseline is measured; so it is at a grey link of 1 %, and under incast with bands."""
HARDLY = 1e-12
"""A loss that never happens, on a lab whose hosts send packets one by one, as where there are losses."""


@dataclass(frozen=True, slots=True)
class Place:
    """Network and what is measured on it.

    Attributes:
        what: "clean", "lossy", "training", "drops", or "alone": what hosts add to the forecast of "lossy".
        hosts: N.
        rate: of each link, each way.
        loss: share of packets that is lost.
        congestion: TCP's.
        background: share of the last host's port that bursts of other hosts take: incast.
        schedules: of sessions.
        grey: whether only the last host's link loses packets.
        papers: whether every baseline is measured, too; by "lossy", under the last schedule and P3.
        model, seeds, steps: of "training" and "drops", see bounded_training.py.
        bands: of ports: with three, what is marked goes first, and what may be dropped is dropped first.
        over: of "clean": who sums what.
        marked: whether "lossy" has marked TCP, too.
        samples: of each case, after warm-up.
        compute: seconds of computation of a step.
        tolerance: p, or "auto"; of "lossy" and "training".
        least_timeout: of all hosts' TCP, ms; None is Linux's, 200.
    """

    what: str
    hosts: int
    rate: str
    loss: float = 0.0
    congestion: str = "cubic"
    samples: int = 15
    compute: float = 0.04
    background: float = 0.0
    bands: int = 1
    schedules: tuple[str, ...] = ("fifo", "bytescheduler", "prophet")
    over: tuple[Any, ...] = ("ring", "transpose")
    grey: bool = False
    marked: bool = False
    papers: bool = False
    model: str = ""
    seeds: int = 1
    steps: int = 100
    tolerance: float | str = TOLERANCE
    least_timeout: int | None = None

    def __str__(self) -> str:
        said = [f"{self.what}: {self.hosts} hosts", self.rate]
        if self.what not in ("clean", "alone"):
            said += [f"{self.loss:.1%} lost", *[self.congestion] * (self.what != "drops")]
        if self.background:
            said.append(f"incast of {self.background:.0%}")
        if self.bands > 1:
            said.append(f"{self.bands} bands")
        said += ["one grey link"] * self.grey + [self.model] * bool(self.model)
        said += [f"tolerance {self.tolerance}"] * (self.tolerance != TOLERANCE)
        said += [f"TCP's least timeout {self.least_timeout} ms"] * (self.least_timeout is not None)
        return ", ".join(said)


def places(quick: bool) -> list[Place]:
    """Where it is measured."""
    if quick:
        return [
            Place("clean", 2, "1Gbps", over=("ring",)),
            Place("clean", 2, "none", over=("ring",)),
            Place("lossy", 2, RATE, schedules=("prophet",)),
            Place("lossy", 2, RATE, 0.01, background=0.4, bands=3, schedules=("fifo", "prophet")),
        ]
    clean = [Place("clean", hosts, rate, samples=31) for hosts in (2, 3) for rate in ("1Gbps", "none")]
    lossy = [
        Place("lossy", hosts, RATE, loss, congestion, samples=60, papers=(hosts, loss, congestion) in EVERY_BASELINE)
        for hosts in (2, 3)
        for loss in (0.0, 0.001, 0.01, 0.02)
        for congestion in ("cubic", "bbr")
    ]
    lossy += [Place("lossy", 4, RATE, loss, samples=60) for loss in (0.0, 0.01)]
    lossy += [Place("lossy", 2, RATE, 0.01, samples=60, tolerance=tolerance) for tolerance in (0.01, "auto")]
    lossy += [Place("lossy", hosts, RATE, 0.01, samples=60, least_timeout=10) for hosts in (2, 3)]
    incast = [
        Place(
            "lossy",
            hosts,
            RATE,
            loss,
            samples=60,
            background=background,
            bands=bands,
            marked=bands > 1,
            papers=(hosts, background, bands) == (2, 0.4, 3),
        )
        for hosts in (2, 3)
        for loss, background, bands in ((0.0, 0.4, 1), (0.0, 0.4, 3), (0.0, 0.6, 3), (0.01, 0.4, 3))
    ]
    grey = [Place("lossy", 3, RATE, loss, samples=60, grey=True, papers=loss == 0.01) for loss in (0.0001, 0.001, 0.01)]
    training = [
        Place(
            "training",
            hosts=2,
            rate=RATE,
            loss=loss,
            congestion=congestion,
            background=background,
            bands=bands,
            papers=model == "digits" and congestion == "cubic",
            model=model,
            seeds=5,
            steps=STEPS[model],
        )
        for model, loss, congestion, background, bands in (
            ("digits", 0.0, "cubic", 0.0, 1),
            ("digits", 0.01, "cubic", 0.0, 1),
            ("digits", 0.01, "bbr", 0.0, 1),
            ("digits", 0.01, "cubic", 0.4, 3),
            ("characters", 0.01, "cubic", 0.0, 1),
            ("characters", 0.01, "cubic", 0.4, 3),
            ("images", 0.01, "cubic", 0.0, 1),
        )
    ]
    drops = [Place("drops", 4, "none", share, model="digits", seeds=5) for share in (0.1, 0.3, 0.5)]
    return [*clean, *lossy, *incast, *grey, *training, *drops]


def clean_cases(place: Place) -> list[str]:
    """Names of the cases of a "clean" place."""
    return ["tcp", *(f"udp {over}" for over in place.over)]


# In each rank


def exchange_over(rank: int, ranks: int) -> Any:
    """Return a function that gathers integers of all ranks, over links that a session would make."""
    from foretrain.comm.control_plane import LinkControl
    from foretrain.comm.rendezvous import join, membership

    member = membership(rank, ranks, f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1}")
    return LinkControl(rank, ranks, join(member, 30.0), 60.0)


def clean(place: Place) -> dict[str, Any]:
    """Return seconds of an all-reduce, and CPU seconds, of each case."""
    import numpy as np

    from foretrain.comm.options import AllReduce, BoundedLoss
    from foretrain.comm.rendezvous import connect_collectives

    rank, ranks = int(os.environ["RANK"]), place.hosts
    control = exchange_over(rank, ranks)
    towards = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        transports: dict[str, Any] = {"tcp": AllReduce()}
        transports |= {f"udp {over}": BoundedLoss(0.0, over) for over in place.over}
        made = {
            name: stack.enter_context(closing(connect_collectives(control, transport, None, 30.0, towards)))
            for name, transport in transports.items()
        }
        arrays = [np.zeros(4 * MIB // 4, np.float32) for _ in range(2)]
        for name in made:
            found[name] = {"seconds": [], "cpu": []}
        for turn in range(3 + place.samples):
            for name, collectives in made.items():
                control.all_true(True)
                cpu, began = time.process_time(), time.perf_counter()
                flying: list[Any] = []
                for k in range(4):
                    flying.append(collectives.all_reduce(arrays[k % 2]))
                    if len(flying) == 2:
                        flying.pop(0).wait()
                for work in flying:
                    work.wait()
                took = (time.perf_counter() - began) / 4
                cpu = (time.process_time() - cpu) / 4
                control.all_true(True)
                if turn >= 3:
                    found[name]["seconds"].append(took)
                    found[name]["cpu"].append(cpu)
        found["counters"] = made["udp ring"].engine.counted()  # pyright: ignore[reportAttributeAccessIssue]
    return found


def sizes(place: Place) -> list[int]:
    """Elements of each layer: as many bytes as take as long as the computation; half of them in the last three."""
    rate = {"1Gbps": 1e9, "300Mbps": 3e8, "none": 5e9}[place.rate]
    total = place.compute * rate / 8 / (2 * (place.hosts - 1) / place.hosts) / 4
    return [int(total / 2 / (LAYERS - 3))] * (LAYERS - 3) + [int(total / 2 / 3)] * 3


@contextmanager
def marked() -> Iterator[None]:
    """Let rings over TCP that are made meanwhile mark all that they send AF41, as the most urgent of bounded loss."""
    from foretrain.comm.bounded import SERVICES
    from foretrain.comm.collectives import ring

    original = ring.set_service
    ring.set_service = lambda connected, service: original(connected, SERVICES[0][1])
    try:
        yield
    finally:
        ring.set_service = original


def papers(tolerance: float) -> dict[str, Any]:
    """Return the transports of other papers, as options of ours."""
    import foretrain as ft

    return {
        "ltp": ft.BoundedLoss(tolerance, ending="early_close"),
        "optireduce": ft.BoundedLoss(tolerance, ending="adaptive_timeout", hadamard=True),
        "feedback": ft.BoundedLoss(tolerance, missing="feedback"),
    }


@contextmanager
def server(hosts: int, number: int) -> Iterator[str]:
    """A parameter server beside rank 0, which starts it, the ``number``-th there; its address, for all ranks."""
    from foretrain.launch.child_processes import ServerProcess, end_servers, server_command

    address = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 100 + number}"
    started = []
    try:
        if os.environ["RANK"] == "0":
            started.append(ServerProcess(server_command(address, hosts, 0, 1, 60), env=dict(os.environ)))
            started[0].address()
        yield address
    finally:
        end_servers(started)


class _Bucket:
    """A layer's gradient, summed by torch.distributed over gloo as DistributedDataParallel does: at once, and the next
    forward computation begins when all are there."""

    def __init__(self, flying: list[Any]) -> None:
        self._flying = flying

    def ready(self, gradient: Any) -> None:
        import torch
        import torch.distributed as dist

        self._flying.append(dist.all_reduce(torch.from_numpy(gradient), async_op=True))

    def wait(self) -> None:
        while self._flying:
            self._flying.pop(0).wait()


@contextmanager
def gloo() -> Iterator[list[_Bucket]]:
    """Tasks like those of a session, one for each layer."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    flying: list[Any] = []
    try:
        yield [_Bucket(flying) for _ in range(LAYERS)]
    finally:
        dist.destroy_process_group()


def lossy(place: Place) -> dict[str, Any]:
    """Return the seconds of each step of each case."""
    import numpy as np

    import foretrain as ft
    from foretrain.schedule import Spec

    transports: dict[str, Any] = {"tcp": ft.AllReduce(), "bounded": ft.BoundedLoss(place.tolerance)}
    if place.marked:
        transports["marked-tcp"] = ft.AllReduce()
    cases = {
        f"{name} {schedule}": (schedule, transport)
        for name, transport in transports.items()
        for schedule in place.schedules
    }
    if place.papers:
        last = place.schedules[-1]
        cases |= {f"{name} {last}": (last, transport) for name, transport in papers(place.tolerance).items()}
        cases["bounded-server p3"] = "p3", ft.BoundedLoss(place.tolerance, over="ps")
    forward = place.compute / LAYERS / 3
    found: dict[str, Any] = {}
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    gradients = [np.ones(size, np.float32) for size in sizes(place)]
    with ExitStack() as stack:
        if place.papers:
            for number, name in enumerate(("p3", *place.schedules[1:])):
                address = stack.enter_context(server(place.hosts, number))
                cases[f"tcp-server {name}"] = name, ft.ParameterServer(address)
        sessions: dict[str, Any] = {}
        tasks: dict[str, Any] = {}
        for number, (name, (schedule, transport)) in enumerate(cases.items()):
            with marked() if name.startswith("marked") else nullcontext():
                session = stack.enter_context(
                    ft.Session(schedule, transport, warmup=OBSERVED, address=f"{host}:{port + 1 + number}")
                )
                # This connects the ranks.
                declared = session.declare([(f"layer{k}", each.nbytes, "float32") for k, each in enumerate(gradients)])
            sessions[name], tasks[name] = session, declared
        if place.papers:
            tasks["gloo ddp"] = stack.enter_context(gloo())

        def train(name: str, steps: int) -> list[float]:
            ends = []
            for _ in range(steps):
                for task in tasks[name]:
                    task.wait()
                    time.sleep(forward)
                if name in sessions:
                    sessions[name].begin_step()
                for k in reversed(range(LAYERS)):
                    time.sleep(2 * forward)
                    tasks[name][k].ready(gradients[k])
                ends.append(time.perf_counter())
            for task in tasks[name]:
                task.wait()
            return [round(after - before, 6) for before, after in pairwise(ends)]

        for name in tasks:
            train(name, OBSERVED + 2 + LEARNING * place.papers)
            found[name] = []
        blocks = max(2, place.samples // 10)
        for _ in range(blocks):
            for name in tasks:
                found[name] += train(name, -(-place.samples // blocks) + 3)[2:]
        found["lost"] = {
            name: session.ledger.line() for name, session in sessions.items() if session.ledger is not None
        }
        # The session has chosen the knobs, and measured what the policy knows of the network.
        found["policies"] = {
            name: {"schedule": str(Spec(used.name, used.settings)), "cost": asdict(session.cost)}
            for name, session in sessions.items()
            if (used := session.schedule) is not None and session.cost is not None
        }
    return found


def alone(place: Place) -> dict[str, Any]:
    """Return what hosts take for all-reduces of two sizes, one after the other, and by how much a sleep is too long."""
    import numpy as np

    import foretrain as ft

    found: dict[str, Any] = {}
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    pause, sleeps = place.compute / LAYERS / 2, []
    for number, (name, transport) in enumerate({"tcp": ft.AllReduce(), "bounded": ft.BoundedLoss(TOLERANCE)}.items()):
        rows: dict[str, dict[str, list[float]]] = {
            str(size): {what: [] for what in ("operation", "ready", "copy")} for size in PROBES
        }
        with ft.Session("fifo", transport, warmup=OBSERVED, address=f"{host}:{port + 1 + number}") as session:
            tasks = session.declare([(str(size), size, "float32") for size in PROBES])
            gradients = [np.ones(size // 4, np.float32) for size in PROBES]
            for _ in range(OBSERVED + 2 + place.samples):
                session.begin_step()
                for task, gradient in zip(tasks, gradients, strict=True):
                    began = time.perf_counter()
                    time.sleep(pause)
                    slept = time.perf_counter()
                    gradient.flags.writeable = False  # so that `wait` copies nothing
                    task.ready(gradient)
                    handed = time.perf_counter()
                    result = task.wait()
                    landed = time.perf_counter()
                    gradient.flags.writeable = True
                    gradient[:] = result
                    sleeps.append(slept - began - pause)
                    row = rows[task.name]
                    row["ready"].append(handed - slept)
                    row["operation"].append(landed - handed)
                    row["copy"].append(time.perf_counter() - landed)
        found[name] = {
            size: {what: median(times[-place.samples :]) for what, times in row.items()} for size, row in rows.items()
        }
    found["sleep"] = median(sleeps)
    return found


def training(place: Place) -> dict[str, Any]:
    """Return the accuracy of a training over time, under each case."""
    from bounded_training import train

    return train(place, place.tolerance)


# Around them


def measured(place: Place) -> dict[str, Any]:
    """What rank 0 found; CPU seconds are of all ranks."""
    from foretrain.lab import Conditions, Lab, launch

    lines: list[str] = []
    environment = {_WORK: json.dumps(asdict(place)), "OMP_NUM_THREADS": "1"}
    selective = {"bands": place.bands, "drop": "selective"} if place.bands > 1 else {}
    selective |= {"lossy_host": place.hosts - 1} if place.grey else {}
    conditions = Conditions(loss=place.loss, background=place.background, **selective)  # pyright: ignore
    with Lab.up("bounded", place.hosts, place.rate, congestion=place.congestion, conditions=conditions) as lab:  # pyright: ignore[reportArgumentType]
        if place.least_timeout is not None:
            setting = f"net.ipv4.tcp_rto_min_us={1000 * place.least_timeout}"
            for host in range(place.hosts):
                subprocess.run(lab.command(host, ["sysctl", "-qw", setting]), check=True)
        launch(
            lab,
            [sys.executable, str(Path(__file__).absolute())],
            environment=environment,
            timeout=1800,
            on_line=lambda rank, line: lines.append(line),
        )
    found = [json.loads(line) for line in lines if line.startswith("{")]
    first = next(each for each in found if each["rank"] == 0)
    if place.what == "clean":
        for name in clean_cases(place):
            first[name]["cpu"] = [sum(each) for each in zip(*(rank[name]["cpu"] for rank in found), strict=True)]
    return first


def clean_table(place: Place, found: dict[str, Any]) -> dict[str, float]:
    """Print goodput and CPU; return the ratios to TCP's."""
    moved = 4 * MIB * 2 * (place.hosts - 1) / place.hosts
    ratios: dict[str, float] = {}
    for name in clean_cases(place):
        seconds, cpu = median(found[name]["seconds"]), median(found[name]["cpu"])
        goodput = 8 * moved / seconds / 1e9
        per_gb = cpu / (moved * place.hosts / 1e9)
        ratios[name], ratios[f"{name} cpu"] = goodput, per_gb
        times = spread([1e3 * each for each in found[name]["seconds"]])
        print(f"  {name:14s} {times:>24s} ms  {goodput:6.2f} Gb/s each way  {per_gb:5.2f} CPU s per GB")
    return ratios


def forecasts(place: Place, found: dict[str, Any], hosts: dict[str, Any]) -> dict[str, float]:
    """Return the forecast seconds of a step of each case of a "lossy" place.

    Args:
        place: where.
        found: there.
        hosts: what `alone` found on the same lab.
    """
    from bounded_forecast import forecast, overheads

    import foretrain as ft
    from foretrain.schedule import CostModel

    transports: dict[str, Any] = {"tcp": ft.AllReduce()}
    if place.tolerance != "auto":  # which the simulation does not follow
        transports["bounded"] = ft.BoundedLoss(place.tolerance)
    where = Place("alone", place.hosts, place.rate)
    added = {name: overheads(where, each, hosts[name], hosts["sleep"]) for name, each in transports.items()}
    layers = [4 * size for size in sizes(place)]
    times: dict[str, float] = {}
    for name, policy in found["policies"].items():
        kind, cost = name.split()[0], CostModel(**policy["cost"])
        if kind not in transports:
            continue
        times[name] = forecast(place, layers, policy["schedule"], transports[kind], added[kind], cost=cost)
    return times


def step_cases(found: dict[str, Any]) -> list[str]:
    """Names of the cases of a "lossy" place."""
    return [name for name, times in found.items() if isinstance(times, list)]


def lossy_table(place: Place, found: dict[str, Any], forecast: dict[str, float]) -> dict[str, float]:
    """Print times of steps beside the forecast; return the ratios of the best of TCP to the best of ours."""
    middles: dict[str, tuple[float, float]] = {}
    for name in step_cases(found):
        times = sorted(found[name])
        middles[name] = median(times), times[min(len(times) - 1, int(0.99 * len(times)))]
        shown, told = spread([1e3 * each for each in times]), ""
        if name in forecast:
            told = f"forecast {1e3 * forecast[name]:6.1f} ms ({forecast[name] / middles[name][0] - 1:+.0%})"
        lost = found["lost"].get(name, "")
        print(f"  {name:24s} {shown:>24s} ms  p99 {1e3 * middles[name][1]:7.1f} ms  {told}  {lost}")

    def best_of(*kinds: str) -> tuple[float, float]:
        return min(each for name, each in middles.items() if name.split()[0] in kinds)

    best, ours = best_of("tcp", "tcp-server", "gloo"), best_of("bounded", "bounded-server")
    print(f"  best of TCP over best of ours: median {best[0] / ours[0]:.2f}, p99 {best[1] / ours[1]:.2f}")
    if place.marked:
        urgent = best_of("marked-tcp")
        print(f"  the same of marked TCP: median {urgent[0] / ours[0]:.2f}, p99 {urgent[1] / ours[1]:.2f}")
    return {"median": best[0] / ours[0], "p99": ours[1] / best[1]}


def _more(parser: ArgumentParser) -> None:
    kinds = ["clean", "lossy", "training", "drops"]
    parser.add_argument("--only", choices=kinds, nargs="+", default=kinds, help="these places alone")


def _described(place: Place) -> dict[str, Any]:
    """Return it as it is in a file, where tuples are lists."""
    return json.loads(json.dumps(asdict(place)))


def _host_times(place: Place) -> Place:
    """Return where `alone` measures what hosts add at ``place``."""
    return Place("alone", place.hosts, place.rate, min(place.loss, HARDLY), place.congestion)


class Kept:
    """What was measured, by place, in the file of --json, where it outlives a run that was cut off.

    What was measured at places that are no more is forgotten; places of older files lack what has its default.

    Attributes:
        details: all of it, in the order in which it was measured.
    """

    def __init__(self, arguments: Namespace, places: Iterable[Place]) -> None:
        known = [_described(each) for place in places for each in (place, _host_times(place))]
        self._file: Path | None = None if arguments.quick else arguments.json
        self.details: list[Any] = []
        if self._file is not None and self._file.exists():
            for each in json.loads(self._file.read_text())["details"]:
                place = _described(Place(**each["place"]))
                if place in known:
                    self.details.append({"place": place, "found": each["found"]})
                else:
                    print(f"forgotten, as it is measured otherwise now: {Place(**each['place'])}")
            print(f"{len(self.details)} places are kept from {self._file}; delete it to measure them anew")

    def find(self, place: Place) -> dict[str, Any] | None:
        """Return what was found at ``place``, if it was measured."""
        return next((each["found"] for each in self.details if each["place"] == _described(place)), None)

    def add(self, place: Place, found: dict[str, Any]) -> None:
        """Keep what was ``found`` at ``place``."""
        self.details.append({"place": _described(place), "found": found})
        if self._file is not None:
            unfinished = self._file.with_name(f"{self._file.name}.unfinished")
            unfinished.write_text(written({"name": "bounded", "details": self.details}))
            unfinished.replace(self._file)  # a run that is cut off here loses nothing


def main() -> None:
    """Print a table for each place, and the RESULT line."""
    if work := os.environ.get(_WORK):
        place = Place(**json.loads(work))
        found = {"clean": clean, "lossy": lossy, "training": training, "alone": alone}[place.what](place)
        print(json.dumps(found | {"rank": int(os.environ["RANK"])}), flush=True)
        return
    arguments = options(__doc__ or "", _more)
    import bounded_training

    from foretrain.comm.bounded.congestion import callbacks
    from foretrain.comm.collectives.runners import library

    library(), callbacks()  # so that no rank compiles them
    kept = Kept(arguments, places(arguments.quick))
    values: dict[str, float] = {}
    errors: list[float] = []
    for place in places(arguments.quick):
        if place.what not in arguments.only:
            continue
        known = kept.find(place)
        print(f"\n{place}" + ", kept" * (known is not None))
        found = known or (bounded_training.drops(place) if place.what == "drops" else measured(place))
        if place.what == "clean":
            ratios = clean_table(place, found)
            if place.rate == "1Gbps" and place.hosts == 2:
                values["goodput_clean"] = ratios["udp ring"] / ratios["tcp"]
            elif place.hosts == 2:
                values["goodput_unpaced"] = ratios["udp ring"]
                values["cpu_vs_tcp"] = ratios["udp ring cpu"] / ratios["tcp cpu"]
        elif place.what == "drops":
            found["summary"] = bounded_training.drops_summary(place, found)
            bounded_training.drops_table(found["summary"])
            values[f"selective_vs_random_{100 * place.loss:.0f}"] = found["summary"]["ratio"]
        elif place.what == "training":
            ratios = found["summary"] = bounded_training.summary(place, found)
            bounded_training.table(ratios, found["lost"])
            if place.background and place.model == "digits":
                values["tta_vs_best_tcp"], values["accuracy_delta"] = ratios["ratio"], ratios["delta"]
        else:
            lab = _host_times(place)
            if known is None:
                if (hosts := kept.find(lab)) is None:
                    hosts = measured(lab)
                    kept.add(lab, hosts)
                found["forecast"] = forecasts(place, found, hosts)
            errors += [abs(each / median(found[name]) - 1) for name, each in found["forecast"].items()]
            ratios = lossy_table(place, found, found["forecast"])
            if place.hosts == 2 and place.congestion == "cubic":
                if place.loss == 0 and not place.background:
                    values["clean_vs_tcp"] = ratios["median"]
                elif place.loss == 0.01 and place.background:
                    values["median_vs_best_tcp"], values["p99_vs_best_tcp"] = ratios["median"], ratios["p99"]
        sys.stdout.flush()
        if known is None:
            kept.add(place, found)
    for key in ("tta_vs_best_tcp", "accuracy_delta"):
        values.setdefault(key, float("nan"))
    if errors:
        values["forecast_error_median"] = median(errors)
    finish(arguments, "bounded", values, kept.details)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
