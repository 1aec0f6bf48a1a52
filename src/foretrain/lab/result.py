"""What the lab measures, as data: what is asked of the workers, what they say, and what it amounts to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Literal, TypeAlias

import msgspec

from foretrain.lab.losses import Losses
from foretrain.network import Cluster
from foretrain.schedule import Bound, Spec, spec
from foretrain.schedule.script import Written
from foretrain.timeline import Span, Timeline
from foretrain.units import Time, exact_size, format_rate, format_size, to_seconds
from foretrain.virtual import Run
from foretrain.workload import Workload

Kind: TypeAlias = Literal["ddp", "ddp_fp16", "attach"]
"""Stock DistributedDataParallel, the same with its fp16 hook, or this package's runtime."""


# What is asked.


@dataclass(frozen=True, slots=True)
class Case:
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
        """What a table calls it."""
        if self.kind == "attach":
            return f"{self.schedule}+{self.compression}" if self.compression else self.schedule
        bucket = f" {exact_size(self.bucket)}" if self.bucket else ""
        return f"DDP{' fp16 hook' if self.kind == 'ddp_fp16' else ''}{bucket}"

    @property
    def plan(self) -> Spec:
        """The policy that forecasts it."""
        if self.kind == "attach":
            return spec(self.schedule)
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
    cases: tuple[Case, ...]
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
class Plan:
    """All that the workers of one launch do, one experiment after the other.

    Attributes:
        hosts: how many.
        rate: of every link, bytes/s.
        experiments: what to measure.
        timeout: seconds without a word from a peer after which a worker gives up.
        calibration: seconds to spend on what an all-reduce costs.
    """

    hosts: int
    rate: float
    experiments: tuple[Experiment, ...]
    timeout: float = 120.0
    calibration: float = 4.0


# What rank 0 says: its progress on standard output, all else in a file; one line of JSON each.


class Sample(msgspec.Struct, frozen=True):
    """An all-reduce of ``size`` bytes took ``time`` with ``depth`` of them under way."""

    size: int
    depth: int
    time: Time


class Progress(msgspec.Struct, frozen=True, tag=True):
    """What is being done; ``done`` of ``total`` is in iterations, of one experiment."""

    experiment: int
    what: str
    done: int
    total: int


class Calibrated(msgspec.Struct, frozen=True, tag=True):
    """What all-reduce costs between these hosts."""

    samples: tuple[Sample, ...]


class Recorded(msgspec.Struct, frozen=True, tag=True):
    """The workload that the runtime observed on the slowest rank."""

    experiment: int
    workload: Workload


class Timed(msgspec.Struct, frozen=True, tag=True):
    """One round of one case.

    Attributes:
        experiment: which.
        case: which of its cases.
        times: from one iteration's beginning to the next one's.
        schedule: what was in force, knobs included; empty for DDP.
        cluster: the network as the runtime measured it; None for DDP.
    """

    experiment: int
    case: int
    times: tuple[Time, ...]
    schedule: str = ""
    cluster: Cluster | None = None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A case that the runtime does not run, and why."""

    experiment: int
    case: int
    problem: str


class Traced(msgspec.Struct, frozen=True, tag=True):
    """What happened in a few iterations of one case; times from the first of ``begins``."""

    experiment: int
    case: int
    begins: tuple[Time, ...]
    spans: tuple[Span, ...]


Message: TypeAlias = Calibrated | Recorded | Timed | Refused | Traced


# What it amounts to.


@dataclass(frozen=True, slots=True)
class Trace:
    """Some iterations of a real run: when backward passes began, and what happened."""

    begins: tuple[Time, ...]
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Measurement:
    """One case.

    Attributes:
        case: what was asked.
        schedule: what was in force, knobs included.
        rounds: of each round, the time of every measured iteration.
        cluster: what its operations cost, for the forecast.
        bound: T* of what it sends on the nominal links.
        forecast: the same in the virtual world; None where it was refused.
        losses: what the distance to T* consists of; None where it was refused.
        trace: a part of the real run, if asked for.
        problem: why there is no measurement; empty where there is.
    """

    case: Case
    schedule: Spec
    rounds: tuple[tuple[Time, ...], ...]
    cluster: Cluster
    bound: Bound
    forecast: Run | None = None
    losses: Losses | None = None
    trace: Trace | None = None
    problem: str = ""

    @property
    def times(self) -> tuple[Time, ...]:
        """Of all rounds."""
        return tuple(time for part in self.rounds for time in part)

    @property
    def time(self) -> Time:
        """The median iteration."""
        return int(median(self.times))

    @property
    def spread(self) -> tuple[Time, Time]:
        """The middle half: first and third quartile."""
        if len(self.times) < 2:
            return self.time, self.time
        quarters = quantiles(self.times, n=4, method="inclusive")
        return int(quarters[0]), int(quarters[2])

    @property
    def gap(self) -> float:
        """T/T* − 1."""
        return self.time / self.bound.time - 1

    @property
    def error(self) -> float | None:
        """Forecast over measurement − 1."""
        return self.forecast.iteration_time / self.time - 1 if self.forecast else None

    @property
    def runs(self) -> tuple[Run, ...]:
        """The traced part of the real run and the forecast, as pictures and traces take them; empty without a trace."""
        if self.trace is None or self.forecast is None:
            return ()
        measured = dataclasses.replace(
            self.forecast,
            schedule=Written("", self.forecast.barrier, f"{self.case.name}, measured"),
            iteration_time=self.time,
            bound=self.bound,
            begins=self.trace.begins,
            log=(),
            timeline=self.trace.timeline,
        )
        name = Written("", self.forecast.barrier, f"{self.case.name}, forecast")
        return measured, dataclasses.replace(self.forecast, schedule=name, bound=self.bound)


@dataclass(frozen=True, slots=True)
class LabResult:
    """All cases of one experiment.

    Attributes:
        experiment: what was asked.
        hosts: how many.
        rate: nominal rate of their links, bytes/s.
        workload: as recorded by the runtime; as paced where nothing was recorded.
        cluster: the lab with the costs of its all-reduce as calibrated.
        samples: what they were calibrated from.
        measurements: one per case, in the order asked for.
    """

    experiment: Experiment
    hosts: int
    rate: float
    workload: Workload
    cluster: Cluster
    samples: tuple[Sample, ...]
    measurements: tuple[Measurement, ...]

    @property
    def measured(self) -> tuple[Measurement, ...]:
        """Those that ran."""
        return tuple(one for one in self.measurements if one.rounds)

    @property
    def ratio(self) -> float:
        """R: communication over computation at the nominal rate."""
        return 2 * (self.hosts - 1) / self.hosts * self.workload.size / self.rate / to_seconds(self.workload.compute)

    @property
    def baseline(self) -> Measurement | None:
        """Stock DDP at its best bucket; None where no DDP ran."""
        plain = [one for one in self.measured if one.case.kind == "ddp"]
        return min(plain, key=lambda one: one.time, default=None)

    @property
    def best(self) -> Measurement | None:
        """The fastest of those that send every bit."""
        exact = [one for one in self.measured if one.case.kind == "attach" and not one.case.compression]
        return min(exact, key=lambda one: one.time, default=None)

    def speedup(self, one: Measurement) -> float:
        """Over the baseline; 1 without one."""
        return self.baseline.time / one.time if self.baseline else 1.0

    def find(self, start: str) -> Measurement | None:
        """The first measured case whose name starts with ``start``."""
        return next((one for one in self.measured if one.case.name.startswith(start)), None)

    def __str__(self) -> str:
        skew = [f"last host {self.experiment.straggler:.0%} slower"] if self.experiment.straggler else []
        skew += [f"jitter ±{self.experiment.jitter:.0%}"] if self.experiment.jitter else []
        how = "paced" if self.experiment.workload else "computing on the CPU"
        return ", ".join(
            [
                f"{self.experiment.name} {how} on {self.hosts} hosts @ {format_rate(self.rate)}",
                f"{format_size(self.workload.size)} of gradients",
                f"communication/computation {self.ratio:.2f}",
                *skew,
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, times in seconds, for JSON."""
        return {
            "model": self.experiment.name,
            "compute": "paced" if self.experiment.workload else "real",
            "hosts": self.hosts,
            "rate": self.rate,
            "ratio": self.ratio,
            "straggler": self.experiment.straggler,
            "jitter": self.experiment.jitter,
            "seed": self.experiment.seed,
            "workload": {
                "forward": to_seconds(self.workload.forward),
                "backward": to_seconds(self.workload.backward),
                "update": to_seconds(self.workload.update),
                "bytes": self.workload.size,
                "source": self.workload.source,
            },
            "calibration": {
                "cluster": str(self.cluster),
                "overhead": to_seconds(self.cluster.overhead),
                "rate": self.cluster.up,
                "latency": to_seconds(self.cluster.latency),
                "floor": to_seconds(self.cluster.floor),
                "samples": [[one.size, one.depth, to_seconds(one.time)] for one in self.samples],
            },
            "baseline": self.baseline.case.name if self.baseline else None,
            "cases": [self._row(one) for one in self.measurements],
        }

    def _row(self, one: Measurement) -> dict[str, Any]:
        if not one.rounds:
            return {"case": one.case.name, "problem": one.problem}
        low, high = one.spread
        return {
            "case": one.case.name,
            "schedule": str(one.schedule),
            "median": to_seconds(one.time),
            "quartiles": [to_seconds(low), to_seconds(high)],
            "rounds": [[to_seconds(time) for time in part] for part in one.rounds],
            "vs_best_ddp": self.speedup(one),
            "optimum": to_seconds(one.bound.time),
            "gap": one.gap,
            "forecast": to_seconds(one.forecast.iteration_time) if one.forecast else None,
            "forecast_error": one.error,
            "losses": dataclasses.asdict(one.losses) if one.losses else None,
            "cluster": str(one.cluster),
        }
