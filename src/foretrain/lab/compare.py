"""Real training steps under every schedule on hosts of the lab, against DDP, T* and the forecast."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

import msgspec

from foretrain.errors import ConfigError, ForetrainError, unknown
from foretrain.files import temporary_folder
from foretrain.lab.calibration import fit, nominal, with_cpu
from foretrain.lab.host import MOST_HOSTS
from foretrain.lab.messages import (
    CalibrationReport,
    CaseRefused,
    CaseTrace,
    Experiment,
    LabCase,
    LabPlan,
    LabProgress,
    Message,
    RoundTimes,
    WorkloadReport,
)
from foretrain.lab.paced import scaled
from foretrain.lab.result import PLAIN, CaseResult, LabResult, LabTrace, gap_breakdown
from foretrain.network import Cluster
from foretrain.planner import request_text, requested_schedule
from foretrain.schedule import spec
from foretrain.simulation import bound, simulate
from foretrain.trace import Timeline
from foretrain.units import SECOND, Time, parse_rate
from foretrain.workload import Workload, zoo

if TYPE_CHECKING:
    from foretrain.lab.network import Lab

TRANSFORMER = "transformer"
"""Model that computes for real; all others are paced."""
BUCKETS: tuple[int | None, ...] = (None, 1 << 20, 5 << 20, 10 << 20, 100 << 20)
"""DDP's buckets, bytes; None is its default of 25 MiB."""
SCHEDULES = ("fifo", "mgwfbp", "dear", "p3", "pace", "bytescheduler", "prophet", "bytescheduler+fp16")
_BEFORE = 20.0
"""Seconds until the first step: hosts, processes, calibration of an operation\'s cost."""
_LAUNCH_TIMEOUT = 90.0
"""Seconds that a launch may take besides its iterations."""

OnLine = Callable[[int, str], None]
"""Function that gets a rank and a line that it printed."""
Report = Callable[[LabProgress], None]


class Launch(Protocol):
    """Function that runs a command once per host and returns when all have ended."""

    def __call__(
        self, command: Sequence[str], *, environment: Mapping[str, str], timeout: float, on_line: OnLine
    ) -> int:
        """Return the first exit status that is not 0, or 0."""
        ...


def compare(
    model: str = "resnet50",
    *,
    hosts: int = 2,
    rate: str = "1Gbps",
    servers: str | int | None = None,
    cores: int | None = None,
    name: str = "compare",
    progress: Report = lambda now: None,
    **options: object,
) -> LabResult:
    """Build a lab, measure an `experiment` with ``options`` there, and remove the lab.

    ``servers`` and ``cores`` are as for `plan_of`.

    Raises ForetrainError where there can be no lab on this machine, and where a worker fails.
    """
    from foretrain.lab import Lab

    asked = experiment(model, hosts=hosts, rate=rate, servers=servers, **options)  # pyright: ignore[reportArgumentType]
    plan = plan_of((asked,), hosts=hosts, rate=rate, servers=servers, cores=cores)
    with Lab.up(name, hosts + plan.dedicated, rate) as lab:
        return conduct(plan, on(lab, plan), progress)[0]


def plan_of(
    experiments: Sequence[Experiment] = (),
    *,
    hosts: int,
    rate: str,
    servers: str | int | None = None,
    cores: int | None = None,
) -> LabPlan:
    """Return the plan of experiments on ``hosts`` that train, with links of ``rate``.

    ``servers``: None all-reduces; a number of servers on hosts of their own, or ``"colocated"``: one on every host.
    ``cores``: how many cores the hosts use, each host one, in turn; None leaves all to all.

    Raises ConfigError where one is no number, or too many for a lab or for this machine.
    """
    if hosts < 2:
        raise ConfigError("hosts", hosts, "have nobody to exchange gradients with", "take at least 2")
    most = len(os.sched_getaffinity(0))
    if cores is not None and not 1 <= cores <= most:
        raise ConfigError("cores", cores, "cannot be had here", f"take 1 to {most}")
    plan = LabPlan(hosts, parse_rate(rate, "rate"), tuple(experiments), cores=cores)
    if servers is None:
        return plan
    if servers == "colocated":
        return dataclasses.replace(plan, exchange="ps_colocated", servers=hosts)
    if not str(servers).isdecimal() or not int(servers):
        raise ConfigError("servers", servers, "is no number of servers", "write e.g. 2, or colocated")
    if hosts + int(servers) > MOST_HOSTS:
        remedy = f"a lab has at most {MOST_HOSTS}; or write colocated"
        raise ConfigError("servers", servers, f"and {hosts} workers are too many hosts", remedy)
    return dataclasses.replace(plan, exchange="ps", servers=int(servers))


def on(lab: Lab, plan: LabPlan) -> Launch:
    """Return a launcher on the hosts of ``lab``, which runs the servers of ``plan`` during a launch."""
    from foretrain.lab.launch import launch
    from foretrain.lab.servers import PIDS, serving

    def on_hosts(command: Sequence[str], *, environment: Mapping[str, str], timeout: float, on_line: OnLine) -> int:
        common = {"timeout": timeout, "on_line": on_line, "cores": plan.cores}
        if not plan.servers:
            return launch(lab, command, environment={PIDS: "", **environment}, **common)
        with serving(lab, plan.homes, plan.hosts, silence=plan.timeout, cores=plan.cores) as served:
            own = {**served.environment, **environment}
            return launch(lab, command, environment=own, secret=served.secret, ranks=plan.hosts, **common)

    return on_hosts


def experiment(
    model: str,
    *,
    hosts: int,
    rate: str,
    servers: str | int | None = None,
    compute: str | None = None,
    schedules: Sequence[str] = SCHEDULES,
    buckets: Sequence[int | tuple[int, ...] | None] | None = None,
    half_hook: bool | None = None,
    ratio: float | None = None,
    step_time: Time | None = None,
    size: float = 1.0,
    iterations: int = 15,
    rounds: int = 3,
    warmup: int = 3,
    straggler: float = 0.0,
    jitter: float = 0.0,
    seed: int = 0,
    traced: int = 0,
) -> Experiment:
    """Return the validated experiment.

    Args:
        model: of the zoo, to pace; or ``"transformer"``, which computes for real.
        hosts: that train.
        rate: of their links.
        servers: as for `plan_of`; adds fifo, the baseline.
        compute: ``"paced"`` or ``"real"``; follows from the model.
        schedules: of the runtime; ``+fp16`` or ``+bf16`` behind one compresses what it sends.
        buckets: of DDP, bytes, or lists of them; None is its default. The fastest is the baseline. By default
            `BUCKETS` without servers.
        half_hook: whether to measure DDP's fp16 hook, too; by default without servers.
        ratio: communication over computation on these links; sets the computing time.
        step_time: the computing time itself; by default the ratio is 1.
        size: scales the gradients of a paced model.
        iterations: measured in every case, in all rounds together.
        rounds: how often the cases take turns.
        warmup: iterations before each measurement.
        straggler: share by which the last host is slower.
        jitter: share by which each layer's time varies.
        seed: of everything random.
        traced: further iterations of every case to record.
    """
    links = plan_of(hosts=hosts, rate=rate, servers=servers).links
    if servers is not None and (buckets or half_hook):
        raise ConfigError("servers", servers, "are not for DDP, which all-reduces", "leave out its buckets and hook")
    if ratio is not None and step_time is not None:
        raise ConfigError("ratio", ratio, "and a step time contradict each other", "give one")
    if ratio is not None and not 0 < ratio < float("inf"):
        raise ConfigError("ratio", ratio, "is no ratio of communication to computation", "write e.g. 1.0")
    real = model == TRANSFORMER
    if compute is not None and compute != ("real" if real else "paced"):
        others = "paced is for the models of the zoo, real for the transformer"
        raise ConfigError("compute", compute, f"does not go with {model}", others)
    for field, value, least in (("iterations", iterations, 2), ("rounds", rounds, 1), ("warmup", warmup, 0)):
        if value < least:
            raise ConfigError(field, value, "is too few", f"take at least {least}")
    for field, value in (("straggler", straggler), ("jitter", jitter)):
        if not 0 <= value < 1:
            raise ConfigError(field, value, "is not a share of the time to compute", "write e.g. 0.2 or 20%")
        if real and value:
            raise ConfigError(field, value, "needs a computation that is paced", f"leave it out for {TRANSFORMER}")
    plain = None if real else zoo(model, precision="fp32")
    bytes_sent = _transformer_size() if plain is None else plain.size * size
    wanted = step_time or round(links.cost.time(round(bytes_sent)) / (ratio or 1.0))
    cases = [LabCase("ddp", bucket) for bucket in (BUCKETS if buckets is None and servers is None else buckets or ())]
    cases += [LabCase("ddp_fp16")] if half_hook or (half_hook is None and servers is None) else []
    ours = [attached(text) for text in schedules]
    cases += [PLAIN] if servers is not None and PLAIN not in ours else []
    cases += ours
    return Experiment(
        name=model if plain is None else plain.name,
        cases=tuple(cases),
        workload=None if plain is None else scaled(plain, wanted, size),
        iterations=iterations,
        rounds=rounds,
        warmup=warmup,
        straggler=straggler,
        jitter=jitter,
        seed=seed,
        step_time=wanted if real and (ratio or step_time) else None,
        traced=traced,
    )


def attached(text: str) -> LabCase:
    """Parse a case: a schedule, with ``+fp16`` or ``+bf16`` appended for compression."""
    plain, plus, compression = text.partition("+")
    if plus and compression.strip() not in ("fp16", "bf16"):
        raise unknown("compression", compression.strip(), ("fp16", "bf16"))
    return LabCase("attach", schedule=request_text(requested_schedule(plain)), compression=compression.strip() or None)


def _transformer_size() -> int:
    """Return the bytes of the transformer's gradients."""
    from foretrain.lab.training import transformer

    return sum(parameter.nbytes for parameter in transformer().parameters())


def conduct(plan: LabPlan, launch: Launch, progress: Report = lambda now: None) -> tuple[LabResult, ...]:
    """Run ``plan`` on workers; return a result per experiment from their reports."""
    other: list[str] = []

    def on_line(rank: int, line: str) -> None:
        now = _progress(line) if rank == 0 else None
        if now is None:
            other.append(f"rank {rank}: {line.rstrip()}")
        else:
            progress(now)

    with temporary_folder("foretrain-lab-") as folder:
        config = folder / "plan.json"
        config.write_bytes(msgspec.json.encode(plan))
        command = [sys.executable, "-m", "foretrain.lab.worker", str(config)]
        environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        status = launch(command, environment=environment, timeout=_timeout(plan), on_line=on_line)
        reports = config.with_suffix(".jsonl").read_bytes().splitlines() if not status else []
    if status:
        tail = "\n  ".join(other[-12:]) or "(they said nothing)"
        raise ForetrainError(f"the lab's workers ended with status {status}; the last that they said:\n  {tail}")
    messages = [msgspec.json.decode(report, type=Message) for report in reports]
    return tuple(_result(plan, number, messages) for number in range(len(plan.experiments)))


def _progress(line: str) -> LabProgress | None:
    try:
        return msgspec.json.decode(line, type=LabProgress)
    except msgspec.DecodeError:
        return None


def _timeout(plan: LabPlan) -> float:
    """Return generous seconds for a plan: eight times the time of all steps under a barrier."""
    return _LAUNCH_TIMEOUT + sum(8 * seconds + 60 for seconds in _expected(plan))


def duration(plan: LabPlan) -> float:
    """Return about how many seconds a plan takes: its steps under a barrier, and what comes before them."""
    return _BEFORE + sum(_expected(plan))


def _expected(plan: LabPlan) -> Iterator[float]:
    """Yield the seconds of all steps of each experiment, under a barrier."""
    for one in plan.experiments:
        compute = one.workload.compute if one.workload else one.step_time or SECOND
        size = one.workload.size if one.workload else _transformer_size()
        step = (1 + one.straggler) * compute / SECOND + plan.links.cost.time(size) / SECOND
        steps = one.iterations + one.rounds * (one.warmup + 8) + (one.traced + 9 if one.traced else 0)
        yield step * steps * len(one.cases)


# From reports to a result.


def _result(plan: LabPlan, number: int, messages: Sequence[Message]) -> LabResult:
    one = plan.experiments[number]
    samples = next(message.samples for message in messages if isinstance(message, CalibrationReport))
    place = fit(samples, nominal(plan.links)).on(plan.links)
    if plan.servers:
        # All hosts of a lab are on one machine.
        place = with_cpu(place, samples, plan.cores or len(os.sched_getaffinity(0)))
        place = dataclasses.replace(place, sharded=True)
    recorded = [m.workload for m in messages if isinstance(m, WorkloadReport) and m.experiment == number]
    workload = recorded[-1] if recorded else one.workload
    if workload is None:
        raise ForetrainError("nothing recorded the real model, so nothing can be forecast; compare a schedule with it")
    asked = one.workload or workload
    workload = dataclasses.replace(workload, name=one.name, batch=asked.batch, unit=asked.unit)
    measurements = tuple(
        _measurement(plan, case, workload, place, [m for m in messages if _about(m, number, index)])
        for index, case in enumerate(one.cases)
    )
    return LabResult(one, plan.links, workload, place, samples, measurements)


def _about(message: Message, number: int, case: int) -> bool:
    return (
        isinstance(message, RoundTimes | CaseRefused | CaseTrace)
        and message.experiment == number
        and message.case == case
    )


def _measurement(
    plan: LabPlan, case: LabCase, workload: Workload, place: Cluster, messages: Sequence[Message]
) -> CaseResult:
    timed = [message for message in messages if isinstance(message, RoundTimes)]
    schedule = spec(timed[-1].schedule) if timed and timed[-1].schedule else case.plan
    # The runtime measures servers briefly, and takes each for a dedicated one: the calibration is better.
    where = (timed[-1].cluster if timed and not plan.servers else None) or place
    idle = [message.idle for message in timed if message.idle is not None]
    traces = [message for message in messages if isinstance(message, CaseTrace)]
    measurement = CaseResult(
        case=case,
        schedule=schedule,
        rounds=tuple(message.times for message in timed),
        cluster=where,
        bound=bound(_sent(case, workload), plan.links),
        trace=LabTrace(traces[-1].begins, Timeline(traces[-1].spans)) if traces else None,
        problem=next((message.problem for message in messages if isinstance(message, CaseRefused)), ""),
        idle=fmean(idle) if idle else None,
        links=_means(message.links for message in timed),
        cores=tuple(
            (round(used), round(waited))
            for used, waited in _means(
                tuple((used / len(m.times), waited / len(m.times)) for used, waited in m.cores) for m in timed
            )
        ),
        threads=_per_iteration(timed),
    )
    if not timed:
        return measurement
    sent, links = _virtual(case, workload, where)
    forecast = simulate(sent, links, schedule, trace=bool(traces))
    optimum, found = measurement.bound.time, forecast.iteration_time
    times = {"optimum": optimum, "forecast": found, "measured": measurement.time}
    waited = max((waited for _, waited in measurement.cores), default=0)
    lost = gap_breakdown(sent, links, schedule, **times, waited=waited)
    return dataclasses.replace(measurement, forecast=forecast, losses=lost)


def _means(rounds: Iterable[Sequence[tuple[float, float]]]) -> tuple[tuple[float, float], ...]:
    """Return the means of both numbers of each host over all rounds."""
    return tuple(
        (fmean(one), fmean(other)) for one, other in (zip(*of, strict=True) for of in zip(*rounds, strict=True))
    )


def _per_iteration(timed: Sequence[RoundTimes]) -> dict[str, Time]:
    """Return the mean CPU time of each of rank 0's threads in an iteration of all rounds."""
    iterations = sum(len(each.times) for each in timed)
    names = dict.fromkeys(name for each in timed for name in each.threads)
    return {name: sum(each.threads.get(name, 0) for each in timed) // iterations for name in names}


def _sent(case: LabCase, workload: Workload) -> Workload:
    """Return ``workload`` with as many bytes as the case sends."""
    if case.kind != "ddp_fp16" and case.compression is None:
        return workload
    halves = (dataclasses.replace(one, size=max(1, one.size // 2)) for one in workload.gradients)
    return dataclasses.replace(workload, gradients=tuple(halves))


def _virtual(case: LabCase, workload: Workload, where: Cluster) -> tuple[Workload, Cluster]:
    """Return the workload and the links with which the simulation forecasts a case."""
    if case.kind == "ddp_fp16":
        # Its buckets are cut by the full size and sent in half the bits: equivalent to links of twice the rate.
        return workload, dataclasses.replace(where, up=2 * where.up, down=2 * where.down)
    return _sent(case, workload), where
