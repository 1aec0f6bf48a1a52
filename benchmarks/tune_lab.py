"""tune.py's part in the lab: a real job whose knobs are searched, on hosts that are network namespaces.

It is searched for a while, then the links lose half of their rate, and then, on links as they are at the end, all that
the search has ever taken for the best, the defaults and a grid are measured in turns.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from foretrain.lab import Lab
from foretrain.lab.compare import on, plan_of
from foretrain.workload import zoo

SCRIPT = Path(__file__).parent / "tune_scripts" / "tuned.py"
POLICY = "bytescheduler"
CLOSE = 1.02


class Job(NamedTuple):
    """A paced model with ``size`` of its bytes, as much communication as computation, on two hosts.

    Attributes:
        searched: iterations at ``rate``.
        slow: iterations after it was halved.
        settings: per knob of the grid; 0 for none.
        rounds, iterations: of each setting.
    """

    model: str
    engine: str
    rate: str = "1Gbps"
    half: str = "500Mbps"
    size: float = 0.2
    searched: int = 200
    slow: int = 100
    settings: int = 3
    rounds: int = 3
    iterations: int = 8


def lab_quick() -> list[Job]:
    """One, without a change of its links, and less compared."""
    return [Job("resnet50", "all_reduce", "2Gbps", size=0.1, searched=80, slow=0, settings=0, rounds=4, iterations=6)]


def lab_full() -> list[Job]:
    """Both engines."""
    return [Job("resnet50", "all_reduce"), Job("resnet50", "ps", size=0.1, settings=2, iterations=6)]


def searched_on_line(job: Job) -> dict[str, Any]:
    """What came of ``job``."""
    servers = 1 if job.engine == "ps" else None
    plan = plan_of(hosts=2, rate=job.rate, servers=servers)
    size = zoo(job.model, precision="fp32").size * job.size
    asked = {
        **{field: getattr(job, field) for field in ("model", "engine", "size", "settings", "rounds", "iterations")},
        "compute": plan.links.cost.time(round(size)),
        "policy": POLICY,
        "searched": job.searched + job.slow,
    }
    lines: list[dict[str, Any]] = []
    with Lab.up("tune", 2 + plan.dedicated, job.rate) as built, tempfile.TemporaryDirectory() as cache:

        def heard(rank: int, line: str) -> None:
            if line.startswith("{"):
                lines.append(json.loads(line))
                if job.slow and lines[-1].get("iteration") == job.searched - 1:
                    built.rate(job.half)

        command = [sys.executable, str(SCRIPT), json.dumps(asked)]
        # Nothing is known of an earlier run.
        on(built, plan)(command, environment={"XDG_CACHE_HOME": cache}, timeout=1800, on_line=heard)
    return {**job._asdict(), **_judged(job, lines)}


def _judged(job: Job, lines: list[dict[str, Any]]) -> dict[str, Any]:
    compared: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        if "setting" in line:
            compared[line["setting"]].append(line["median"])
    times = {setting: median(several) for setting, several in compared.items()}
    path = [line for line in lines if "iteration" in line]
    last = path[job.searched :] if job.slow else path
    best, end = min(times.values()), last[-1]["best"]
    far = [k for k, line in enumerate(last) if times[line["best"]] > CLOSE * best]
    return {
        "settings": len(times),
        "best": best,
        "end": times[end] / best - 1,
        "defaults": times[_defaults()] / best - 1 if _defaults() in times else None,
        "samples": max(line["samples"] for line in path[: job.searched]),
        "close_after": far[-1] + 1 if far else 0,
        "lost": _usual(path[: job.searched]) / _usual(path[job.searched // 2 : job.searched]) - 1,
        "kept": end,
        "path": path,
        "compared": compared,
    }


def _usual(lines: list[dict[str, Any]]) -> float:
    """The mean without a tenth at both ends: what a neighbour takes is not lost by the search."""
    times = sorted(line["seconds"] for line in lines)
    cut = len(times) // 10
    return fmean(times[cut : len(times) - cut])


def _defaults() -> str:
    from foretrain.schedule import Spec, spec

    plan = spec(POLICY)
    return str(Spec(plan.name, plan.settings))
