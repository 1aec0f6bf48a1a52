"""Run a training script on a simulated cluster; choose a schedule from a short simulation.

A simulated rank must know its policy before its first step is scheduled, and cannot be told later. So for
``foretrain simulate --schedule auto`` and ``--plan`` the script runs twice: a few steps under plain DDP, and again
under the schedule that was chosen for them.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foretrain.device import calls, preset_names
from foretrain.device.gpu import forecast_range, host_launch, stack_factor
from foretrain.errors import ConfigError
from foretrain.live.device.settings import STAND_INS, WATCHED, ExpertLoads, RankSettings
from foretrain.live.folding import Folding
from foretrain.live.forecast import Forecast, forecast_of
from foretrain.live.network_traffic import NetworkTraffic
from foretrain.live.rank_processes import WarmForkServers
from foretrain.live.rank_trace import SimulationTrace
from foretrain.live.refold import Live, ProgressCallbacks, Refold, RunOutcome, reporting_warnings
from foretrain.live.routed_loads import RoutedLoads
from foretrain.live.scheduled_gradients import SchedulePlan
from foretrain.network.deployment import Deployment
from foretrain.network.topology.graph import Topology
from foretrain.planner import Recommendation, SavedPlan, choose
from foretrain.planner.candidate_search import cluster_of
from foretrain.planner.plan import fingerprint
from foretrain.schedule import Spec, spec
from foretrain.units import Time


@dataclass(frozen=True, slots=True)
class Simulated:
    """Forecast with the traces and traffic that it was made from.

    Attributes:
        forecast: the numbers.
        trace: of every live rank, with its activities where they were kept.
        folding: which ranks were live.
        traffic: what the network carried.
        network: whose links `carried` is about.
        carried: bytes over each link in the last step of the first live rank, by all ranks, float64 (links,).
        usable: bytes of a GPU's memory that a script can have.
        loads: that routers gave to experts; None where none were given, or none were counted.
        more_live: why no fewer ranks are live; empty where one stands for all, or where the caller said how many.
    """

    forecast: Forecast
    trace: SimulationTrace
    folding: Folding
    traffic: NetworkTraffic
    network: Topology
    carried: NDArray[np.float64]
    usable: int
    loads: RoutedLoads | None = None
    more_live: tuple[str, ...] = ()


def simulate(
    script: Sequence[str],
    where: Deployment,
    *,
    module: bool = False,
    live: Live = "auto",
    steps: int | None = None,
    kept: int | None = 0,
    factor: str | float = 1.0,
    host: Time | Literal["measured"] | None = None,
    calibration: Path | None = None,
    costs: Path | None = None,
    stand_ins: tuple[str, ...] = STAND_INS,
    memory: int | None = None,
    operators: Path | None = None,
    schedule: str | Spec | None = None,
    experts: str = "balanced",
    watch: ProgressCallbacks | None = None,
    warm: WarmForkServers | None = None,
) -> Simulated:
    """Run ``script`` on every rank of ``where``, as torchrun would, until it ends.

    Args:
        script: the script, or with ``module`` a module's name, and its arguments.
        where: the cluster; its device must be named.
        module: as ``python -m``.
        live: which ranks run as processes of their own; the others are represented.
        steps: after how many steps of the optimizer to end the script; None lets it run to its end.
        kept: of how many last steps to keep every kernel and communication; None keeps all.
        factor: of the framework's efficiency, or its name; see `foretrain.device.gpu`.
        host: the host's time to launch an operator, ps; or this machine's CPU time, with which forecasts are not
            reproducible; None is the time on servers with GPUs.
        calibration: a file of what was measured on the cluster's devices, preferred to what is known of them.
        costs: a file of what kernels cost that are not PyTorch's; see `foretrain.device.kernel_costs`.
        stand_ins: libraries to stand in for where they are not installed; see `foretrain.live.device.stand_ins`.
        memory: bytes of GPU memory; overrides the preset, e.g. to find the peak that a script needs.
        operators: where to write the operators that were launched, for ``foretrain calibrate``.
        schedule: the policy that exchanges gradients in place of DistributedDataParallel's own; None leaves them to it.
        experts: loads that routers give to their experts: balanced, lognormal(SIGMA[,SEED]) or a file; see
            `foretrain.live.device.settings.ExpertLoads`.
        watch: callbacks that report progress.
        warm: what forks the ranks' fork server; None starts one.

    Raises:
        ConfigError: there is no such policy, the script does not exist, or the cluster does not say what its GPUs are.
        ForetrainError: the device cannot be compiled, or there was no step to forecast.
        ScriptFailed: a rank failed; its traceback is on stderr.
        OutOfMemory: a rank failed as its GPU's memory was not enough.
        Disagreement: ranks call different collectives.
        StallError: all ranks wait; says who for whom.
    """
    watch = watch or ProgressCallbacks()
    begin = time.perf_counter()
    settings = dataclasses.replace(
        _settings(script, where, module),
        steps=steps,
        tracing=kept != 0,
        schedule=None if schedule is None else str(spec(schedule)),
        calibration=calibration and str(calibration.absolute()),
        costs=costs and str(costs.absolute()),
        stand_ins=stand_ins,
        memory=memory,
        experts=ExpertLoads.parse(experts),
        slow=_slow_ranks(where),
        measured_host=host == "measured",
    )
    device, measured = settings.measured()
    launch = host if isinstance(host, int) else (measured and measured.launch)
    settings = dataclasses.replace(
        settings,
        factor=stack_factor(device, factor),
        launch=host_launch(device, factor) if launch is None else launch,
    )

    faulty = live == "auto" and where.topology.faulty_links
    if faulty:
        live = "all"  # what one link does to some groups, no other rank can stand for

    def run(settings: RankSettings) -> RunOutcome:
        return Refold(where, settings, live, kept, watch, warm).run()

    done = _recorded(settings, operators, run) if operators else run(settings)
    members = Counter(done.folding.representative(rank) for rank in range(settings.world))
    with reporting_warnings(done.trace, watch):
        forecast = forecast_of(
            done.trace.rank_traces,
            members,
            cluster=str(where),
            device=device,
            world=settings.world,
            classes=done.folding.describe(),
            wall=time.perf_counter() - begin,
            stack_range=forecast_range(device, factor, across=settings.gpus < settings.world),
        )
    usable = device.memory - settings.reserve
    network = where.fluid.network
    more_live = ("links have faults of their own",) if faulty else done.more_live
    return Simulated(
        forecast, done.trace, done.folding, done.traffic, network, done.carried, usable, done.loads, more_live
    )


def _recorded(settings: RankSettings, operators: Path, run: Callable[[RankSettings], RunOutcome]) -> RunOutcome:
    """Run ``run``, with every operator that was launched written to ``operators``."""
    with tempfile.TemporaryDirectory(prefix="foretrain-", ignore_cleanup_errors=True) as folder:
        done = run(dataclasses.replace(settings, operators=str(Path(folder) / "operators")))
        found = {call.key: call for path in sorted(Path(folder).glob("operators*")) for call in calls.load(path)}
    calls.dump(found.values(), operators)
    return done


def _settings(script: Sequence[str], where: Deployment, module: bool) -> RankSettings:
    if not module and not Path(script[0]).exists():
        raise ConfigError("script", script[0], "is no file", f"there is none at {Path(script[0]).absolute()}")
    if where.device is None:
        raise ConfigError("cluster", str(where), "does not say which GPUs it has", "add e.g. ',device=H100'")
    return RankSettings(
        script=tuple(script),
        module=module,
        device=where.device,
        world=len(where.members),
        gpus=_per_host(where),
        store="",
    )


def _slow_ranks(where: Deployment) -> tuple[tuple[int, float], ...]:
    nodes, ranks = where.topology.nodes, where.topology.ranks
    slowdowns = ((rank, nodes[ranks[place]].slowdown) for rank, place in enumerate(where.members))
    return tuple((rank, slowdown) for rank, slowdown in slowdowns if slowdown != 1)


def _per_host(where: Deployment) -> int:
    """Return the GPUs of a machine, as torchrun counts them; 1 where every rank is one."""
    nodes, ranks = where.topology.nodes, where.topology.ranks
    hosts = [(nodes[ranks[rank]].server, nodes[ranks[rank]].host) for rank in where.members]
    counts = [len(list(alike)) for _, alike in groupby(hosts)]
    if len(set(hosts)) == 1:
        return len(hosts)
    if len(set(counts[:-1])) > 1 or counts[-1] > counts[0]:
        raise ConfigError(
            "cluster",
            str(where),
            f"has {', '.join(map(str, counts[:8]))} of the job's ranks on its servers, one after the other",
            "torchrun fills servers alike; only the last may have fewer",
        )
    return counts[0]


PLANNING_STEPS = WATCHED + 1
"""Steps that are watched, and one under the policy."""


def recommended_schedule(watched: Simulated, device: str | None) -> Recommendation | None:
    """Return the best schedule for the largest model of a script that ran under a policy; None where none did.

    ``device`` is what the cluster's GPUs are.
    """
    found = _largest_model(watched)
    if found is None or found[1] < 2:
        return None
    plan, ranks = found
    known = device if device in preset_names() else None
    cluster = dataclasses.replace(cluster_of(plan.job.cost, ranks), device=known)
    return choose(plan.workload, cluster, careful=True)


def plan_differences(done: Simulated, saved: SavedPlan) -> tuple[str, ...]:
    """Return the differences between what ``saved`` was made for and what was simulated."""
    found = _largest_model(done)
    if found is None:
        return ()
    plan, ranks = found
    here = fingerprint(plan.workload, None, plan.job.cost, ranks)
    return saved.differences(here, served=False, compression=saved.compression)


def _largest_model(done: Simulated) -> tuple[SchedulePlan, int] | None:
    plans = [(one.plan, len(one.group.members)) for one in done.trace.schedules if one.plan is not None]
    return max(plans, key=lambda each: each[0].workload.size, default=None)
