"""A live simulation as plain numbers: everything that the page shows. Times in seconds, sizes in bytes, parts of 1."""

from __future__ import annotations

from typing import Any

from foretrain.device.model import PROVENANCES
from foretrain.live.forecast import RankForecast
from foretrain.live.scheduled_gradients import ModelSchedule
from foretrain.report.findings import SimulationFindings, share
from foretrain.units import to_seconds


def numbers(found: SimulationFindings) -> dict[str, Any]:
    """What ``--json`` writes; what was not kept or not asked for is None."""
    forecast, path, rate = found.forecast, found.path, found.tokens_rate
    return {
        "cluster": forecast.cluster,
        "device": forecast.device.name,
        "world": forecast.world,
        "live": [rank.rank for rank in forecast.ranks],
        "folding": list(forecast.classes),
        "iteration_time": to_seconds(forecast.iteration_time),
        "iteration_sigma": to_seconds(forecast.sigma),
        "tokens_per_step": found.tokens,
        "tokens_per_second": rate,
        "tokens_per_second_per_gpu": None if rate is None else rate / forecast.world,
        "flops_per_gpu": forecast.flops,
        "mfu": forecast.mfu,
        "bubble": found.bubble,
        "memory_usable": found.done.usable,
        "memory_left": found.left,
        "memory_left_on": found.tightest.rank,
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
        "schedules": [_schedule(one) for one in found.done.story.schedules if one.plan],
        "warnings": dict(forecast.warnings),
        "unknown_operators": list(forecast.unknown),
        "wall": forecast.wall,
    }


def comparison_numbers(stock: SimulationFindings, found: SimulationFindings) -> dict[str, Any]:
    """What ``--compare --json`` writes: the policy's numbers, and besides them PyTorch's own and the speed-up."""
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
        },
    }
