"""Findings of a live simulation, for table and page, and as plain numbers for JSON."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.device.model import PROVENANCES
from foretrain.live.forecast import CriticalPath, Forecast, RankForecast, critical_path
from foretrain.live.imbalance import ImbalancePoint
from foretrain.live.routed_loads import RoutedLoads
from foretrain.live.scheduled_gradients import ModelSchedule
from foretrain.live.simulate import Simulated
from foretrain.network.topology.graph import Topology
from foretrain.report.topology_layout import LinkKind, link_kinds
from foretrain.units import Time, to_seconds


@dataclass(frozen=True, slots=True)
class OperatorShare:
    """Kernels of one name; of one step, in the mean over all GPUs.

    Attributes:
        name: theirs.
        time: ps.
        share: of the time of all kernels.
    """

    name: str
    time: Time
    share: float


@dataclass(frozen=True, slots=True)
class KindLoad:
    """Utilisation of the links of one kind in a step.

    Attributes:
        kind: which.
        busiest: the most of any link's utilisation.
        name: that link, from where to where.
        mean: over the links.
        carried: bytes over all of them.
    """

    kind: LinkKind
    busiest: float
    name: str
    mean: float
    carried: float


@dataclass(frozen=True)
class SimulationFindings:
    """A simulation and quantities derived from it.

    Attributes:
        done: the simulation.
        tokens: of one step, over all ranks; None where nobody said.
        curve: the same script with other loads of experts; empty where nobody asked.
    """

    done: Simulated
    tokens: int | None = None
    curve: tuple[ImbalancePoint, ...] = ()

    @property
    def forecast(self) -> Forecast:
        """Return the simulation's forecast."""
        return self.done.forecast

    @cached_property
    def path(self) -> CriticalPath | None:
        """Return the critical path of the last step; None where no activities were kept."""
        return critical_path(self.done.trace.rank_traces)

    @property
    def tokens_rate(self) -> float | None:
        """Tokens per second of all GPUs."""
        return None if self.tokens is None else self.tokens / to_seconds(self.forecast.iteration_time)

    @property
    def bubble(self) -> float:
        """Return the part of their steps in which GPUs only wait for others, in the mean over all ranks."""
        ranks = self.forecast.ranks
        waits = sum(share(rank, "waiting") * rank.members for rank in ranks)
        return waits / sum(rank.members for rank in ranks)

    @property
    def tightest(self) -> RankForecast:
        """Return the rank that needs the most memory."""
        return max(self.forecast.ranks, key=lambda rank: (rank.memory.reserved, -rank.rank))

    @property
    def left(self) -> int:
        """Bytes that `tightest` could still have."""
        return self.done.usable - self.tightest.memory.reserved

    @cached_property
    def operators(self) -> tuple[OperatorShare, ...]:
        """Return operators by time, longest first; empty where no times of kernels were recorded."""
        sums: defaultdict[str, float] = defaultdict(float)
        for rank in self.forecast.ranks:
            for name, time in (rank.by_name or self._kernel_times(rank)).items():
                sums[name] += time * rank.members
        world, every = sum(rank.members for rank in self.forecast.ranks), sum(sums.values())
        ranked = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
        return tuple(OperatorShare(name, round(time / world), time / every) for name, time in ranked if time)

    @property
    def step_time(self) -> Time:
        """Return the time of the first live rank's last step, in which the links' traffic was counted."""
        step = self.forecast.first.steps[-1]
        return step.end - step.begin

    @cached_property
    def utilisation(self) -> NDArray[np.float64]:
        """Return the utilisation of each link in a step: bytes carried over capacity, float64 (links,)."""
        could = self.done.network.rate * to_seconds(self.step_time)
        return np.divide(self.done.carried, could, out=np.zeros(len(could)), where=could > 0)

    @cached_property
    def loads(self) -> tuple[KindLoad, ...]:
        """Return the utilisation of each kind of links, the busiest first."""
        return tuple(sorted(map(self._load, link_kinds(self.done.network)), key=lambda load: -load.busiest))

    def _load(self, kind: LinkKind) -> KindLoad:
        used, links = self.utilisation[kind.links], kind.links
        busiest = int(links[int(used.argmax())])
        name = link_name(self.done.network, busiest)
        return KindLoad(kind, float(used.max()), name, float(used.mean()), float(self.done.carried[links].sum()))

    def _kernel_times(self, rank: RankForecast) -> dict[str, Time]:
        """Return the kernels' times of the last step, from the activities that were kept."""
        rank_trace = self.done.trace.rank_traces[rank.rank]
        begin = rank_trace.steps[-1].begin
        sums: defaultdict[str, Time] = defaultdict(int)
        for activity in rank_trace.activities():
            if activity.kind == "kernel" and activity.end > begin:
                sums[activity.name] += activity.end - max(activity.start, begin)
        return sums


def step_time(rank: RankForecast) -> Time:
    """Return the mean time of a rank's steady steps."""
    return sum(step.end - step.begin for step in rank.steady) // len(rank.steady)


def share(rank: RankForecast, name: str) -> float:
    """Return the share of one account (e.g. "compute") in a rank's steps."""
    return rank.mean(name) / max(step_time(rank), 1)


def link_name(topology: Topology, link: int) -> str:
    """Return the ends of a link: ``"gpu0 → nvswitch1"``."""
    ends = topology.source[link], topology.target[link]
    return " → ".join(topology.nodes[end].name for end in ends)


def numbers(found: SimulationFindings) -> dict[str, Any]:
    """Return the document of ``--json``; quantities that were not kept or not requested are None."""
    forecast, path, rate = found.forecast, found.path, found.tokens_rate
    return {
        "cluster": forecast.cluster,
        "device": forecast.device.name,
        "world": forecast.world,
        "live": [rank.rank for rank in forecast.ranks],
        "folding": list(forecast.classes),
        "more_live": list(found.done.more_live),
        "iteration_time": to_seconds(forecast.iteration_time),
        "iteration_sigma": to_seconds(forecast.sigma),
        "iteration_interval": [to_seconds(time) for time in forecast.interval],
        "tokens_per_step": found.tokens,
        "tokens_per_second": rate,
        "tokens_per_second_per_gpu": None if rate is None else rate / forecast.world,
        "flops_per_gpu": forecast.flops,
        "mfu": forecast.mfu,
        "bubble": found.bubble,
        "memory_usable": found.done.usable,
        "memory_left": found.left,
        "memory_left_on": found.tightest.rank,
        "checkpoints": [
            {
                "after_step": one.step,
                "calls": list(one.calls),
                "size": one.size,
                "largest": one.largest,
                "seconds": to_seconds(one.time),
                "partial": one.partial,
            }
            for one in forecast.checkpoints
        ],
        "ranks": [_rank(rank) for rank in forecast.ranks],
        "operators": [
            {"name": one.name, "seconds": to_seconds(one.time), "share": one.share} for one in found.operators
        ],
        "critical_path": None
        if path is None
        else {
            "rank": path.rank,
            "seconds": to_seconds(path.end - path.begin),
            "kinds": path.kinds(),
            "shares": path.shares(),
        },
        "links": [
            {
                "between": load.kind.label,
                "links": len(load.kind.links),
                "carried": load.carried,
                "mean": load.mean,
                "busiest": load.busiest,
                "busiest_link": load.name,
            }
            for load in found.loads
        ],
        "schedules": [_schedule(one) for one in found.done.trace.schedules if one.plan],
        "experts": None if found.done.loads is None else _experts(found.done.loads),
        "experts_curve": [imbalance_numbers(point) for point in found.curve],
        "warnings": dict(forecast.warnings),
        "unknown_operators": list(forecast.unknown),
        "stand_ins": list(forecast.stand_ins),
        "wall": forecast.wall,
    }


def comparison_numbers(stock: SimulationFindings, found: SimulationFindings) -> dict[str, Any]:
    """Return the document of ``--compare --json``: the policy's numbers, PyTorch's own and the speed-up."""
    speedup = stock.forecast.iteration_time / found.forecast.iteration_time
    return {**numbers(found), "stock": numbers(stock), "speedup": speedup}


def _schedule(schedule: ModelSchedule) -> dict[str, Any]:
    assert schedule.plan is not None
    plan, rounds = schedule.plan, len(schedule.begins)
    return {
        "model": plan.workload.name,
        "schedule": str(plan.schedule),
        "rounds": rounds,
        "settled": schedule.settled,
        "operations_per_round": len(schedule.log) / max(rounds, 1),
        "optimum": to_seconds(plan.bound.time),
        "binds": plan.bound.kind,
    }


def _experts(loads: RoutedLoads) -> dict[str, Any]:
    return {
        "loads": loads.given,
        "seed": loads.seed,
        "routers": loads.routers,
        "busiest_expert": loads.busiest_expert,
        "busiest_rank": loads.busiest_rank,
    }


def imbalance_numbers(point: ImbalancePoint) -> dict[str, Any]:
    """Return a point of a curve of expert loads for JSON; the time in seconds."""
    return {
        "sigma": point.sigma,
        "seed": point.seed,
        "seconds": None if point.time is None else to_seconds(point.time),
        "busiest_expert": point.busiest_expert,
        "busiest_rank": point.busiest_rank,
        "failure": point.failure,
    }


def _rank(rank: RankForecast) -> dict[str, Any]:
    names = ("compute", "communication", "exposed", "waiting", "idle")
    return {
        "rank": rank.rank,
        "stands_for": rank.members,
        "steps": [to_seconds(step.end - step.begin) for step in rank.steps],
        "steady_steps": len(rank.steady),
        **{name: to_seconds(rank.mean(name)) for name in names},
        "shares": {name: share(rank, name) for name in names},
        "flops": rank.flops,
        "recomputed_flops": rank.recomputed,
        "kernels": rank.kernels,
        "kernel_seconds": {name: to_seconds(time) for name, time in zip(PROVENANCES, rank.times, strict=True)},
        "kernel_sigma": to_seconds(rank.spread),
        "memory": {
            "allocated": rank.memory.allocated,
            "reserved": rank.memory.reserved,
            "retries": rank.memory.retries,
            "breakdown": dict(rank.memory.breakdown),
            "timeline": [[to_seconds(time), size] for time, size in rank.memory.timeline],
        },
    }
