"""Plan made from the observed steps: one workload, one network and one schedule, the same on all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from foretrain.comm.control_plane import ControlPlane
from foretrain.comm.coordinator.protocol import pack_spec, unpack_spec
from foretrain.comm.observation import StepProfile, workload_of
from foretrain.comm.options import AttachOptions
from foretrain.errors import ConfigError
from foretrain.files import write_atomically
from foretrain.network import Cluster
from foretrain.planner import SavedPlan, ScheduleRequest, choose, tune
from foretrain.planner.candidate_search import cluster_of
from foretrain.planner.online import Tuner
from foretrain.planner.plan import fingerprint
from foretrain.planner.search import IterationTimes, Space, forecaster
from foretrain.planner.simulator_prior import JobForecaster
from foretrain.schedule import POLICIES, Bound, CostModel, Job, Spec, bound, spec
from foretrain.simulation import simulate
from foretrain.tasks import Chunk
from foretrain.units import Time, format_time
from foretrain.workload.step import Workload

logger = logging.getLogger("foretrain.auto")
"""Log of the planner's choices."""
_FORMAT = 1
_ALIKE = 1.25
"""By which factor a link's bandwidth may differ and be the same link."""


class _Kept(msgspec.Struct, frozen=True):
    """Content of a file: ``rate`` in bytes a second, ``time`` and ``error`` in seconds an iteration."""

    format: int
    schedule: str
    rate: float
    time: float
    error: float
    iterations: int


class Saved:
    """File of the best knobs of ``workload`` on ``cluster`` under ``plan``, in ``folder``; the next run begins with it.

    A job is the same where tensors, their order, the number of ranks, how they exchange, the policy and the knobs that
    it sets are, and its link is within 25 % of as fast.
    """

    def __init__(self, folder: Path, workload: Workload, cluster: Cluster, plan: Spec) -> None:
        sizes = [(gradient.name, gradient.size) for gradient in workload.gradients]
        world = (cluster.workers, cluster.gpus, cluster.exchange, cluster.servers)
        what = msgspec.json.encode((_FORMAT, sizes, world, str(plan)))
        self._path = folder / f"{hashlib.sha256(what).hexdigest()[:24]}.json"
        self._rate, self._name = cluster.up, plan.name

    @property
    def path(self) -> Path:
        """Return the path of the file, existing or not."""
        return self._path

    def load(self) -> tuple[Spec, IterationTimes] | None:
        """Return the knobs and what an iteration took; None if there are none, or they do not read."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_Kept)
            found = spec(kept.schedule)
        except (OSError, msgspec.MsgspecError, RecursionError, ConfigError):
            return None
        ours = kept.format == _FORMAT and found.name == self._name and kept.time > 0 and kept.error >= 0
        if not ours or not self._rate / _ALIKE <= kept.rate <= self._rate * _ALIKE:
            return None
        return found, IterationTimes(kept.time, kept.error, kept.iterations)

    def keep(self, found: Spec, sample: IterationTimes) -> None:
        """Write them; do nothing if that fails, as it is only a convenience."""
        kept = _Kept(_FORMAT, str(Spec(found.name, found.settings)), self._rate, *sample)
        with contextlib.suppress(OSError, ConfigError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, msgspec.json.encode(kept))


def folder() -> Path:
    """Return the folder of results: ``foretrain/tuned`` in XDG_CACHE_HOME, or in ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return Path(root or os.path.join(os.path.expanduser("~"), ".cache")) / "foretrain" / "tuned"


class RuntimePlan(NamedTuple):
    """Plan of the scheduled steps.

    Attributes:
        profile: the slowest rank's.
        workload: made from the profile.
        cost: of the network, measured.
        cluster: with that cost, for the simulator; None for a single rank.
        job: tasks and cost for the policy.
        schedule: the policy, with all its knobs.
        bound: T* of the workload on the cluster; None for a single rank.
        tuner: searches for knobs as the job runs; on rank 0, with ``tune``.
        saved: store of the tuner's results.
    """

    profile: StepProfile
    workload: Workload
    cost: CostModel
    cluster: Cluster | None
    job: Job
    schedule: Spec
    bound: Bound | None
    tuner: Tuner | None = None
    saved: Saved | None = None


def runtime_plan(
    control: ControlPlane,
    profile: StepProfile,
    tasks: Mapping[str, int],
    model: str,
    device: str,
    options: AttachOptions,
    measure: Callable[[], tuple[CostModel, Cluster]] | None = None,
    memory: float | None = None,
) -> RuntimePlan:
    """Return the plan, the same on all ranks. Collective.

    Args:
        control: of all ranks.
        profile: this rank's.
        tasks: names of the parameters, in the order of tasks, and their bytes on the wire.
        model: its name.
        device: on which it computes, for people.
        options: of `foretrain.plugins.torch.attach`.
        measure: measures the network, on all ranks at once, each on its own. None times all-reduces on ``control``.
        memory: bytes/s of the device's memory, for the cost of compression; None on a CPU.
    """
    profile = slowest(control, profile)
    workload = workload_of(profile, list(tasks), list(tasks.values()), model, f"{control.ranks} ranks of {device}")
    if measure is not None:
        cost, cluster = measure()
    else:
        cost = control.cost(profile.crowding / 1000)
        cluster = cluster_of(cost, control.ranks) if control.ranks > 1 else None
    beside = cluster is not None and cluster.exchange == "ps_colocated"
    job = Job.of(workload, cost, separate=measure is not None, beside=beside)
    # Rank 0 chooses for all: floating point may differ in the last digit between machines.
    tuner, saved, text = None, None, b""
    if control.rank == 0:
        if isinstance(options.schedule, SavedPlan):
            warn_of_differences(options.schedule, workload, cluster, options)
        schedule = decide(options.schedule, workload, cluster, profile.crowding / 1000, memory)
        if options.tune and cluster is not None and cluster.cost.per_byte:
            tuner, saved = search_of(options.schedule, schedule, workload, cluster)
            schedule = tuner.spec if tuner else schedule
        text = pack_spec(schedule)
    schedule = unpack_spec(control.share(text))
    optimum = bound(workload, job) if cluster is not None else None
    return RuntimePlan(profile, workload, cost, cluster, job, schedule, optimum, tuner, saved)


def slowest(control: ControlPlane, own: StepProfile) -> StepProfile:
    """Return the profile of the rank that computes longest, for which the others will wait. Collective.

    Two values are the maxima over all ranks: how often a gradient accumulates in one pass, and how busy the cores are.
    """
    computes = [row[0] for row in control.gather([own.compute])]
    slowest_rank = computes.index(max(computes))
    count = len(own.order)
    times = [own.forward, own.backward, own.update]
    rows = control.gather([*own.fires, *own.order, *own.uses, *own.releases, *times, own.passes, own.crowding])
    _, order, uses, releases = (rows[slowest_rank][k * count : (k + 1) * count] for k in range(4))
    forward, backward, update, passes, _ = rows[slowest_rank][4 * count :]
    return StepProfile(
        order=order,
        uses=uses,
        forward=forward,
        releases=releases,
        backward=backward,
        update=update,
        fires=[max(fires) for fires in zip(*(row[:count] for row in rows), strict=True)],
        passes=passes,
        crowding=max(row[-1] for row in rows),
    )


def decide(
    wanted: ScheduleRequest,
    workload: Workload,
    cluster: Cluster | None,
    crowding: float = 0.0,
    memory: float | None = None,
) -> Spec:
    """Return the policy that ``wanted`` asks for, with all knobs, and log the planner's choice. Called on rank 0.

    Args:
        wanted: a policy, whose open knobs are searched; a plan; or ``Auto``, which lets the planner choose.
        workload: observed.
        cluster: measured; None for a single rank.
        crowding: how busy the cores are, from 0 to 1.
        memory: bytes/s of the device's memory; None on a CPU.
    """
    if isinstance(wanted, SavedPlan):
        return wanted.schedule
    if cluster is None or cluster.cost.per_byte == 0:
        if isinstance(wanted, Spec):
            return wanted
        logger.info("auto: plain DDP: there is nobody to exchange gradients with, or it costs nothing")
        return Spec("ddp")
    if isinstance(wanted, Spec):
        is_open = any(knob.name not in wanted.knobs for knob in POLICIES[wanted.name].knobs)
        return tune(workload, cluster, wanted, careful=True) if is_open else wanted
    choice = choose(workload, cluster, careful=True, crowding=crowding, memory=memory)
    for line in choice.lines:
        logger.info("%s", line)
    return choice.schedule


def warn_of_differences(saved: SavedPlan, workload: Workload, cluster: Cluster | None, options: AttachOptions) -> None:
    """Log a warning if ``saved`` was made for another job."""
    if cluster is None:
        found = ["one rank alone exchanges nothing"]
    else:
        here = fingerprint(workload, cluster, cluster.cost, cluster.workers)
        found = list(saved.differences(here, options.server is not None, options.compression))
    if found:
        logger.warning("the plan was made for something else: %s; foretrain plan makes another", "; ".join(found))


def search_of(
    wanted: ScheduleRequest, chosen: Spec, workload: Workload, cluster: Cluster
) -> tuple[Tuner | None, Saved | None]:
    """Return a tuner of the knobs that ``wanted`` leaves open, and its store; None, with a warning, if none is open.

    It begins with stored results, or with ``chosen``. Knobs that a planner chose are open, too.
    """
    fixed = {knob.name for knob in POLICIES[chosen.name].knobs if not (knob.tunable or knob.noisy)}
    knobs = {name: value for name, value in chosen.knobs.items() if name in fixed}
    plan = wanted if isinstance(wanted, Spec) else Spec(chosen.name, knobs)
    if not Space.of(plan, workload, running=True).free:
        logger.warning("tune: %s leaves no knob open, so that nothing is searched", plan)
        return None, None
    saved = Saved(folder(), workload, cluster, plan)
    known = saved.load()
    virtual = JobForecaster(workload, cluster, plan, earlier=known is not None)
    proposer = virtual.informed(known[0] if known else chosen, careful=True)
    return Tuner(proposer, virtual.again, known=known[1] if known else None), saved


def forecast(workload: Workload | None, cluster: Cluster | None, schedule: Spec | None) -> Time | None:
    """Return the forecast time of an iteration, ps; None while one of the three is not known, as for a single rank."""
    if workload is None or cluster is None or schedule is None:
        return None
    return forecaster(workload, cluster)(schedule)


def outcome(median: Time, forecast: Time | None, optimum: Bound | None) -> str:
    """Return an iteration's ``median`` for people, beside its ``forecast`` with the error, and T* with the gap."""
    parts = [f"median {format_time(median)}"]
    if forecast is not None:
        parts.append(f"forecast {format_time(forecast)} ({forecast / median - 1:+.1%})")
    if optimum is not None:
        parts.append(f"T* {format_time(optimum.time)}, gap {median / optimum.time - 1:.1%}")
    return ", ".join(parts)


def replayed_order(schedule: Spec, workload: Workload, cost: CostModel, ranks: int) -> list[Chunk]:
    """Return the chunks that ``schedule`` sends in one steady step of the simulator, in order."""
    run = simulate(workload, cluster_of(cost, max(2, ranks)), schedule, trace=False)
    last = len(run.begins) - 2
    return [decision.chunk for decision in run.log if decision.step == last]
