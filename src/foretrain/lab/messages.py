"""Requests to the lab's workers, and their reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from foretrain.network import Cluster, Exchange
from foretrain.schedule import AUTO, Spec, spec
from foretrain.trace import Span
from foretrain.units import Time, exact_size
from foretrain.workload import Workload

Kind: TypeAlias = Literal["ddp", "ddp_fp16", "attach"]
"""Stock DistributedDataParallel, DistributedDataParallel with its fp16 hook, or this package's runtime."""


# Requests.


@dataclass(frozen=True, slots=True)
class LabCase:
    """Way to exchange gradients.

    Attributes:
        kind: DDP or this package.
        bucket: of DDP, bytes, or a list, one per bucket; None is its default, 25 MiB after a first of 1 MiB.
        schedule: of `attach`, in its notation; it sets open knobs to the best in simulation.
        compression: of `attach`: None, ``"fp16"`` or ``"bf16"``.
    """

    kind: Kind
    bucket: int | tuple[int, ...] | None = None
    schedule: str = ""
    compression: str | None = None

    @property
    def name(self) -> str:
        """Return the label in tables."""
        if self.kind == "attach":
            return f"{self.schedule}+{self.compression}" if self.compression else self.schedule
        if isinstance(self.bucket, tuple):
            bucket = f" list of {len(self.bucket)}"
        else:
            bucket = f" {exact_size(self.bucket)}" if self.bucket else ""
        return f"DDP{' fp16 hook' if self.kind == 'ddp_fp16' else ''}{bucket}"

    @property
    def plan(self) -> Spec:
        """Return the policy that forecasts it."""
        if self.kind == "attach":
            # The planner's choice replaces it when it is known.
            return spec("ddp" if self.schedule == AUTO else self.schedule)
        if isinstance(self.bucket, tuple):
            return Spec("ddp", {"buckets": self.bucket})
        # With an explicit bucket_cap_mb torch takes it for the first bucket, too.
        return Spec("ddp", {"bucket": self.bucket, "first": self.bucket} if self.bucket else {})


@dataclass(frozen=True, slots=True)
class Experiment:
    """Training of one model in every case.

    Attributes:
        name: of the model.
        cases: in the order of each round.
        workload: to pace; None trains the small transformer for real.
        iterations: measured in every case, all rounds together.
        rounds: how often all cases take turns, with a fresh model each time.
        warmup: iterations before each measurement, besides those that a schedule needs to observe.
        straggler: share by which the last host is slower.
        jitter: share by which each layer's time varies.
        seed: of jitter, parameters and data.
        step_time: computing time of the real transformer's step, which determines its batch; None is a batch of 8.
        traced: further iterations of every case to record.
    """

    name: str
    cases: tuple[LabCase, ...]
    workload: Workload | None = None
    iterations: int = 15
    rounds: int = 3
    warmup: int = 3
    straggler: float = 0.0
    jitter: float = 0.0
    seed: int = 0
    step_time: Time | None = None
    traced: int = 0


@dataclass(frozen=True, slots=True)
class LabPlan:
    """Plan of the workers of one launch: one experiment after the other.

    Attributes:
        hosts: number of those that train.
        rate: of every link, bytes/s.
        experiments: to measure.
        timeout: seconds of a peer's silence after which a worker gives up.
        calibration: seconds to measure the cost of an exchange.
        exchange: all-reduce, or servers on hosts of their own or beside every worker.
        servers: number of servers.
        cores: how many cores the hosts use, each host one, in turn; None leaves all to all.
    """

    hosts: int
    rate: float
    experiments: tuple[Experiment, ...]
    timeout: float = 120.0
    calibration: float = 4.0
    exchange: Exchange = "all_reduce"
    servers: int = 0
    cores: int | None = None

    @property
    def dedicated(self) -> int:
        """Return the number of hosts that serve and do not train."""
        return self.servers if self.exchange == "ps" else 0

    @property
    def homes(self) -> range:
        """Return the hosts that serve; those that train are the first."""
        return range(self.hosts, self.hosts + self.servers) if self.dedicated else range(self.servers)

    @property
    def links(self) -> Cluster:
        """Return the cluster at nominal rates; an operation costs nothing besides its bytes."""
        link = {"up": self.rate, "down": self.rate, "latency": 0, "overhead": 0}
        return Cluster(self.hosts, **link, exchange=self.exchange, servers=self.dedicated)


# Reports of rank 0: its progress on standard output, all others in a file; one line of JSON each.


class CalibrationSample(msgspec.Struct, frozen=True):
    """Time of an exchange of ``size`` bytes with ``depth`` of them in flight.

    Over servers also the CPU time, ps, that a ``worker`` and a ``server`` take to send or to receive a message of that
    size; 0 where it was not counted.
    """

    size: int
    depth: int
    time: Time
    worker: Time = 0
    server: Time = 0


class LabProgress(msgspec.Struct, frozen=True, tag=True):
    """Progress of an experiment; ``done`` of ``total`` is in iterations, of one experiment."""

    experiment: int
    what: str
    done: int
    total: int


class CalibrationReport(msgspec.Struct, frozen=True, tag=True):
    """Measured cost of all-reduce, or of a round through the servers, between these hosts."""

    samples: tuple[CalibrationSample, ...]


class WorkloadReport(msgspec.Struct, frozen=True, tag=True):
    """Workload that the runtime observed on the slowest rank."""

    experiment: int
    workload: Workload


class RoundTimes(msgspec.Struct, frozen=True, tag=True):
    """Measured iterations of one case in one round.

    Attributes:
        experiment: its index.
        case: index among its cases.
        times: from one iteration's beginning to the next one's.
        schedule: in force, knobs included; empty for DDP.
        cluster: the network as the runtime measured it; None for DDP.
        idle: share of that time in which host 0's accelerator computed nothing; None where it is the CPU.
        links: per host, workers first, the shares of its link's rate that it sent and received; empty outside a lab.
        cores: per host, as ``links``, CPU time of its processes, and time in which threads of them were ready and had
            no core, of all iterations together.
        threads: CPU time of each of the runtime's own threads on rank 0, by name, of all iterations together.
    """

    experiment: int
    case: int
    times: tuple[Time, ...]
    schedule: str = ""
    cluster: Cluster | None = None
    idle: float | None = None
    links: tuple[tuple[float, float], ...] = ()
    cores: tuple[tuple[Time, Time], ...] = ()
    threads: dict[str, Time] = {}


class CaseRefused(msgspec.Struct, frozen=True, tag=True):
    """Case that the runtime does not run, with the reason."""

    experiment: int
    case: int
    problem: str


class CaseTrace(msgspec.Struct, frozen=True, tag=True):
    """Timeline of a few iterations of one case; times from the first of ``begins``."""

    experiment: int
    case: int
    begins: tuple[Time, ...]
    spans: tuple[Span, ...]


Message: TypeAlias = CalibrationReport | WorkloadReport | RoundTimes | CaseRefused | CaseTrace
