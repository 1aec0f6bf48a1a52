"""Results of the lab: measurements of each case and of an experiment, and the breakdown of their distance to T*."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

from foretrain.lab.messages import CalibrationSample, Experiment, LabCase
from foretrain.network import Cluster
from foretrain.network.host_cpu import HostCpu
from foretrain.schedule import Bound, Spec
from foretrain.schedule.script import Written
from foretrain.simulation import Run, bound, simulate
from foretrain.trace import Timeline
from foretrain.units import COST_SHIFT, SECOND, Time, format_rate, format_size, to_seconds
from foretrain.workload import Workload

PLAIN = LabCase("attach", schedule="fifo")
"""Parameter server without a scheduler: push gradients when they are ready, wait for all."""


@dataclass(frozen=True, slots=True)
class LabTrace:
    """Timeline of some iterations of a real run, with the starts of their backward passes."""

    begins: tuple[Time, ...]
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Measurements of one case.

    Attributes:
        case: as requested.
        schedule: in force, knobs included.
        rounds: of each round, the time of every measured iteration.
        cluster: with the costs of its operations, for the forecast.
        bound: T* of its bytes on the nominal links.
        forecast: its simulation; None where it was refused.
        losses: breakdown of the distance to T*; None where it was refused.
        trace: a part of the real run, if requested.
        problem: reason why there is no measurement; empty where there is one.
        idle: share of the time in which host 0's accelerator computed nothing; None where it is the CPU.
        links: per host, workers first, the shares of its link's rate that it sent and received; empty if not counted.
        cores: per host, as ``links``, CPU time of an iteration, and time in which threads were ready and had no core.
        threads: CPU time of an iteration in each of the runtime's own threads on rank 0, by name.
    """

    case: LabCase
    schedule: Spec
    rounds: tuple[tuple[Time, ...], ...]
    cluster: Cluster
    bound: Bound
    forecast: Run | None = None
    losses: GapBreakdown | None = None
    trace: LabTrace | None = None
    problem: str = ""
    idle: float | None = None
    links: tuple[tuple[float, float], ...] = ()
    cores: tuple[tuple[Time, Time], ...] = ()
    threads: Mapping[str, Time] = field(default_factory=dict)

    @property
    def times(self) -> tuple[Time, ...]:
        """Return the times of all rounds."""
        return tuple(time for part in self.rounds for time in part)

    @property
    def time(self) -> Time:
        """Return the median time of an iteration."""
        return int(median(self.times))

    @property
    def spread(self) -> tuple[Time, Time]:
        """Return the first and third quartile."""
        if len(self.times) < 2:
            return self.time, self.time
        quarters = quantiles(self.times, n=4, method="inclusive")
        return int(quarters[0]), int(quarters[2])

    @property
    def gap(self) -> float:
        """Return T/T* − 1."""
        return self.time / self.bound.time - 1

    @property
    def error(self) -> float | None:
        """Return forecast over measurement − 1."""
        return self.forecast.iteration_time / self.time - 1 if self.forecast else None

    @property
    def utilisation(self) -> float | None:
        """Return the share of its rate that the busiest direction of the busiest link carried."""
        return max((share for both in self.links for share in both), default=None)

    @property
    def busy(self) -> float | None:
        """Return how many cores the processes of all hosts kept busy, on average; None if not counted."""
        return sum(used for used, _ in self.cores) / self.time if self.cores else None

    @property
    def runs(self) -> tuple[Run, ...]:
        """Return the traced part of the real run and the forecast; empty without a trace."""
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
    """Results of all cases of one experiment.

    Attributes:
        experiment: as requested.
        links: the cluster at nominal rates.
        workload: as recorded by the runtime; as paced where nothing was recorded.
        cluster: with the calibrated costs of an exchange.
        samples: of the calibration.
        measurements: one per case, in the order of the request.
    """

    experiment: Experiment
    links: Cluster
    workload: Workload
    cluster: Cluster
    samples: tuple[CalibrationSample, ...]
    measurements: tuple[CaseResult, ...]

    @property
    def hosts(self) -> int:
        """Return the number of hosts that train."""
        return self.links.workers

    @property
    def rate(self) -> float:
        """Return the nominal rate of their links, bytes/s."""
        return self.links.up

    @property
    def served(self) -> bool:
        """Return whether gradients are exchanged over servers."""
        return self.links.exchange != "all_reduce"

    @property
    def measured(self) -> tuple[CaseResult, ...]:
        """Return the cases that ran."""
        return tuple(one for one in self.measurements if one.rounds)

    @property
    def ratio(self) -> float:
        """Return communication over computation at the nominal rate."""
        return self.links.cost.time(self.workload.size) / self.workload.compute

    @property
    def baseline(self) -> CaseResult | None:
        """Return stock DDP at its best bucket, or over servers fifo, their default; None where it did not run."""
        served = self.served
        plain = [one for one in self.measured if (one.case == PLAIN if served else one.case.kind == "ddp")]
        return min(plain, key=lambda one: one.time, default=None)

    @property
    def best(self) -> CaseResult | None:
        """Return the fastest case of this package without compression."""
        exact = [one for one in self.measured if one.case.kind == "attach" and not one.case.compression]
        return min(exact, key=lambda one: one.time, default=None)

    def speedup(self, one: CaseResult) -> float:
        """Return the speedup of ``one`` over the baseline; 1 without one."""
        return self.baseline.time / one.time if self.baseline else 1.0

    def speedup_range(self, one: CaseResult) -> tuple[float, float]:
        """Return the least and the largest speedup between the middle halves of ``one`` and of the baseline."""
        base = self.baseline or one
        return base.spread[0] / one.spread[1], base.spread[1] / one.spread[0]

    def find(self, start: str) -> CaseResult | None:
        """Return the first measured case whose name starts with ``start``."""
        return next((one for one in self.measured if one.case.name.startswith(start)), None)

    def __str__(self) -> str:
        skew = [f"last host {self.experiment.straggler:.0%} slower"] if self.experiment.straggler else []
        skew += [f"jitter ±{self.experiment.jitter:.0%}"] if self.experiment.jitter else []
        how = "paced" if self.experiment.workload else "computing on the CPU"
        return ", ".join(
            [
                f"{self.experiment.name} {how} on {self.hosts} hosts @ {format_rate(self.rate)}",
                *self._servers,
                f"{format_size(self.workload.size)} of gradients",
                f"communication/computation {self.ratio:.2f}",
                *skew,
            ]
        )

    @property
    def _servers(self) -> list[str]:
        if not self.served:
            return []
        count = self.links.servers
        return [f"{count} server{'s' if count > 1 else ''} beside them" if count else "a server on each of them"]

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, times in seconds, for JSON."""
        return {
            "model": self.experiment.name,
            "compute": "paced" if self.experiment.workload else "real",
            "hosts": self.hosts,
            "rate": self.rate,
            "exchange": self.links.exchange,
            "servers": self.links.servers,
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
                "cpu": _cpu(self.cluster.cpu),
                "samples": [[one.size, one.depth, to_seconds(one.time)] for one in self.samples],
            },
            "baseline": self.baseline.case.name if self.baseline else None,
            "cases": [self._row(one) for one in self.measurements],
        }

    def _row(self, one: CaseResult) -> dict[str, Any]:
        if not one.rounds:
            return {"case": one.case.name, "problem": one.problem}
        low, high = one.spread
        return {
            "case": one.case.name,
            "schedule": str(one.schedule),
            "median": to_seconds(one.time),
            "quartiles": [to_seconds(low), to_seconds(high)],
            "rounds": [[to_seconds(time) for time in part] for part in one.rounds],
            "vs_fifo" if self.served else "vs_best_ddp": self.speedup(one),
            "optimum": to_seconds(one.bound.time),
            "gap": one.gap,
            "forecast": to_seconds(one.forecast.iteration_time) if one.forecast else None,
            "forecast_error": one.error,
            "losses": dataclasses.asdict(one.losses) if one.losses else None,
            "cluster": str(one.cluster),
            "idle": one.idle,
            "links": [list(both) for both in one.links],
            "cores": [[to_seconds(used), to_seconds(waited)] for used, waited in one.cores],
            "threads": {name: to_seconds(used) for name, used in one.threads.items()},
        }


def _cpu(cpu: HostCpu | None) -> dict[str, Any] | None:
    """Return cores, and the CPU time of a message and of a byte at either end, as plain numbers."""
    if cpu is None:
        return None
    ends = {"worker": cpu.worker, "server": cpu.server}
    costs = {end: [to_seconds(cost.message), cost.per_byte / (SECOND << COST_SHIFT)] for end, cost in ends.items()}
    return {"cores": cpu.cores, **costs}


@dataclass(frozen=True, slots=True)
class GapBreakdown:
    """Causes of an iteration's excess over T*, as shares of T*; they add up to T/T* − 1.

    Attributes:
        link: links carry less than their nominal rate: headers, and gaps within a collective.
        policy: order, partitions, buckets and barrier.
        operations: costs of an operation whatever its size: coordination (θ), floor and latency.
        cores: CPU time of messages in the forecast, and threads that were ready and had no core, on the host that
            waited longest for one; threads that waited at the same time count as if one after the other, but no more
            than was measured beyond the forecast.
        unforeseen: the rest of what was measured beyond the forecast.
    """

    link: float
    policy: float
    operations: float
    cores: float
    unforeseen: float


def gap_breakdown(
    workload: Workload,
    where: Cluster,
    schedule: str | Spec,
    *,
    optimum: Time,
    forecast: Time,
    measured: Time,
    waited: Time = 0,
) -> GapBreakdown:
    """Return the breakdown of an iteration that took ``measured`` ps.

    Args:
        workload: with the bytes that are sent.
        where: the network with its operations' costs, as measured.
        schedule: with all its knobs.
        optimum: T* on links of nominal rate, ps.
        forecast: of the schedule on ``where``, ps.
        measured: the iteration's time, ps.
        waited: for cores, by the threads of one host in an iteration, ps.
    """

    def forecast_on(cluster: Cluster) -> Time:
        return simulate(workload, cluster, schedule, trace=False).iteration_time

    free = where.without_latency()
    reachable, ideal = bound(workload, free).time, forecast_on(free)
    unlimited = forecast_on(dataclasses.replace(where, cpu=None)) if where.cpu is not None else forecast
    steps = (optimum, reachable, ideal, unlimited, forecast, measured)
    link, policy, operations, messages, late = ((after - before) / optimum for before, after in pairwise(steps))
    threads = min(waited / optimum, max(0.0, late))
    return GapBreakdown(link, policy, operations, messages + threads, late - threads)
