"""What the lab's workers are asked, and what they say."""

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
"""Stock DistributedDataParallel, the same with its fp16 hook, or this package's runtime."""


# What is asked.


@dataclass(frozen=True, slots=True)
class LabCase:
    """One way to exchange gradients.

    Attributes:
        kind: who does it.
        bucket: of DDP, bytes; None is its default, 25 MiB after a first bucket of 1 MiB.
        schedule: of `attach`, in its notation; it sets what is left open to what is best in the virtual world.
        compression: of `attach`: None, ``"fp16"`` or ``"bf16"``.
    """

    kind: Kind
    bucket: int | None = None
    schedule: str = ""
    compression: str | None = None

    @property
    def name(self) -> str:
        """Return the label in tables."""
        if self.kind == "attach":
            return f"{self.schedule}+{self.compression}" if self.compression else self.schedule
        bucket = f" {exact_size(self.bucket)}" if self.bucket else ""
        return f"DDP{' fp16 hook' if self.kind == 'ddp_fp16' else ''}{bucket}"

    @property
    def plan(self) -> Spec:
        """The policy that forecasts it."""
        if self.kind == "attach":
            # What the planner chooses is known when it has run, and then it is that which forecasts.
            return spec("ddp" if self.schedule == AUTO else self.schedule)
        # With an explicit bucket_cap_mb torch takes it for the first bucket, too.
        return Spec("ddp", {"bucket": self.bucket, "first": self.bucket} if self.bucket else {})


@dataclass(frozen=True, slots=True)
class Experiment:
    """One model, trained in every case.

    Attributes:
        name: of the model.
        cases: in the order of each round.
        workload: to pace; None trains the small transformer for real.
        iterations: measured in every case, all rounds together.
        rounds: how often all cases take turns, with a fresh model each time.
        warmup: iterations before each measurement, besides what a schedule itself needs to observe.
        straggler: share by which the last host is slower.
        jitter: share by which each layer's time varies.
        seed: of jitter, parameters and data.
        step_time: what a step of the real transformer should take to compute, by its batch; None is a batch of 8.
        traced: whether to record two iterations of every case besides, which are not measured.
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
    traced: bool = False


@dataclass(frozen=True, slots=True)
class LabPlan:
    """All that the workers of one launch do, one experiment after the other.

    Attributes:
        hosts: how many train.
        rate: of every link, bytes/s.
        experiments: what to measure.
        timeout: seconds without a word from a peer after which a worker gives up.
        calibration: seconds to spend on what an exchange costs.
        exchange: among the hosts, over servers on hosts of their own, or over one beside every worker.
        servers: how many servers there are.
    """

    hosts: int
    rate: float
    experiments: tuple[Experiment, ...]
    timeout: float = 120.0
    calibration: float = 4.0
    exchange: Exchange = "all_reduce"
    servers: int = 0

    @property
    def dedicated(self) -> int:
        """Hosts that serve and do not train."""
        return self.servers if self.exchange == "ps" else 0

    @property
    def homes(self) -> range:
        """The hosts that serve; those that train are the first."""
        return range(self.hosts, self.hosts + self.servers) if self.dedicated else range(self.servers)

    @property
    def links(self) -> Cluster:
        """The hosts, on links of exactly their rate; an operation costs nothing besides its bytes."""
        return Cluster(
            self.hosts,
            up=self.rate,
            down=self.rate,
            latency=0,
            overhead=0,
            exchange=self.exchange,
            servers=self.dedicated,
        )


# What rank 0 says: its progress on standard output, all else in a file; one line of JSON each.


class CalibrationSample(msgspec.Struct, frozen=True):
    """An exchange of ``size`` bytes took ``time`` with ``depth`` of them under way."""

    size: int
    depth: int
    time: Time


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
    """The workload that the runtime observed on the slowest rank."""

    experiment: int
    workload: Workload


class RoundTimes(msgspec.Struct, frozen=True, tag=True):
    """One round of one case.

    Attributes:
        experiment: which.
        case: which of its cases.
        times: from one iteration's beginning to the next one's.
        schedule: what was in force, knobs included; empty for DDP.
        cluster: the network as the runtime measured it; None for DDP.
        idle: share of that time in which host 0's accelerator had nothing to compute; None where it is the CPU.
        links: per host, workers first, the shares of its link's rate that it sent and received; empty outside a lab.
    """

    experiment: int
    case: int
    times: tuple[Time, ...]
    schedule: str = ""
    cluster: Cluster | None = None
    idle: float | None = None
    links: tuple[tuple[float, float], ...] = ()


class CaseRefused(msgspec.Struct, frozen=True, tag=True):
    """A case that the runtime does not run, and why."""

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
