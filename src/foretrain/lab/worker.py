"""``python -m foretrain.lab.worker CONFIG.json``: one host of the lab, which trains every case in turn and times it.

CONFIG.json is a `LabPlan`; RANK, WORLD_SIZE and MASTER_* come from the launcher. Rank 0 prints its progress, a line of
JSON each, and writes its reports to CONFIG.jsonl, because a timeline is too long for a line of output. All ranks must
do the same at the same time, so values that differ between them (a recorded workload, a fitting batch) are broadcast.
"""

from __future__ import annotations

import gc
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
import torch.distributed as dist
from torch import nn

import foretrain as ft
from foretrain.comm.coordinator.handshake import SECRET
from foretrain.comm.options import SERVERS
from foretrain.comm.ps.client.connection import Links
from foretrain.errors import ForetrainError
from foretrain.lab.calibration import calibrate, probe
from foretrain.lab.host import CoreTime, thread_times
from foretrain.lab.iproute import LinkTraffic
from foretrain.lab.messages import (
    CalibrationReport,
    CalibrationSample,
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
from foretrain.lab.result import PLAIN
from foretrain.lab.servers import PIDS
from foretrain.lab.training import PacedTraining, RealTraining, TracedDdp, Trainable, complete, ddp
from foretrain.schedule import Job
from foretrain.trace import Span
from foretrain.units import Time
from foretrain.workload import Workload

_RATE = 0.01
"""Learning rate of plain SGD: the optimizer that costs a CPU least, because on an accelerator it costs nothing."""
_BATCH = 8
_THREADS = "foretrain-"
"""How names of the runtime's threads begin."""


def main(path: str) -> None:
    """Run the plan at ``path``."""
    plan = msgspec.json.decode(Path(path).read_bytes(), type=LabPlan)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=plan.timeout))
    try:
        with Path(path).with_suffix(".jsonl").open("ab") if not dist.get_rank() else nullcontext() as found:
            _Worker(plan, found).run()
        dist.barrier()
    finally:
        dist.destroy_process_group()


class _Worker:
    """Rank that runs a plan."""

    def __init__(self, plan: LabPlan, found: BinaryIO | None) -> None:
        self._plan = plan
        self._found = found
        self._rank = dist.get_rank()
        self._batch = _BATCH
        self._done = self._total = self._number = 0
        # On every host whose traffic and CPU time are counted, on rank 0 alone; none outside a lab.
        self._pids = self._processes() if PIDS in os.environ else []

    def run(self) -> None:
        """Calibrate, then run one experiment after the other."""
        self._report(CalibrationReport(self._calibrated()))
        for number, experiment in enumerate(self._plan.experiments):
            self._number = number
            self._experiment(experiment)

    def _calibrated(self) -> tuple[CalibrationSample, ...]:
        plan = self._plan
        if not plan.servers:
            return calibrate(plan.hosts, plan.rate, budget=plan.calibration)
        places = [each.rpartition(":") for each in os.environ[SERVERS].split(",")]
        job = self._agreed(secrets.token_hex(8))
        secret = bytes.fromhex(os.environ[SECRET])
        links = Links([(host, int(port)) for host, _, port in places], secret, job, self._rank)
        workers = [host[0] for host in self._pids[: plan.hosts]]
        servers = [pid for host in self._pids for pid in host if pid not in workers]
        options = {"timeout": plan.timeout, "processes": (workers, servers), "budget": plan.calibration}
        return probe(links, plan.links, job, **options)

    def _experiment(self, experiment: Experiment) -> None:
        each = -(-experiment.iterations // experiment.rounds)
        self._done, self._total = 0, len(experiment.cases) * experiment.rounds * (each + experiment.warmup)
        self._progress("observing")
        if experiment.workload is None and experiment.step_time:
            self._batch = self._fitting_batch(experiment)
        if any(case.kind == "attach" for case in experiment.cases):
            self._report(WorkloadReport(self._number, self._recorded(experiment)))
        cases: list[LabCase | None] = list(experiment.cases)
        for turn in range(experiment.rounds):
            for place, case in enumerate(cases):
                if case is None:
                    continue
                what = f"round {turn + 1}/{experiment.rounds}, {case.name}"
                self._progress(what)
                try:
                    self._report(self._timed(experiment, place, case, each, what))
                except ForetrainError as error:
                    cases[place] = None
                    self._report(CaseRefused(self._number, place, str(error)))
        if experiment.traced:
            for place, case in enumerate(cases):
                if case is not None:
                    self._progress(f"tracing {case.name}")
                    self._trace(experiment, place, case)
        self._progress("done")

    def _recorded(self, experiment: Experiment) -> Workload:
        """Return the workload that the runtime observes under a barrier, of the rank that computes longest."""
        training = self._training(experiment)
        with self._attached(training, PLAIN, traced=False) as (module, step, attached):
            while attached.workload is None:
                self._iterate(training, module, step)
            return attached.workload

    # One case.

    def _timed(self, experiment: Experiment, place: int, case: LabCase, iterations: int, what: str) -> RoundTimes:
        """Return iteration times after warm-up, and the schedule in force."""
        training = self._training(experiment)
        with self._trainer(training, case) as (module, step, attached):
            self._warm(training, module, step, attached, experiment.warmup)
            self._done += experiment.warmup
            traffic, cores = LinkTraffic([pids[0] for pids in self._pids], self._plan.rate), CoreTime(self._pids)
            busy, before = training.clock.busy, thread_times(_THREADS)
            heads = [time.perf_counter_ns()]
            for _ in range(iterations):
                self._iterate(training, module, step)
                heads.append(time.perf_counter_ns())
            links, spent, after = traffic.shares(), cores.passed(), thread_times(_THREADS)
            self._done += iterations
            self._progress(what)
            times = tuple(1000 * (later - head) for head, later in pairwise(heads))
            idle = 1 - (training.clock.busy - busy) / sum(times) if experiment.workload else None
            schedule, cluster = ("", None) if attached is None else (str(attached.schedule), attached.cluster)
            threads = {name: taken - before.get(name, 0) for name, taken in after.items()}
            return RoundTimes(self._number, place, times, schedule, cluster, idle, links, spent, threads)

    def _trace(self, experiment: Experiment, place: int, case: LabCase) -> None:
        training = self._training(experiment)
        with self._trainer(training, case, traced=True) as (module, step, attached):
            self._warm(training, module, step, attached, experiment.warmup)
            computed = training.trace()
            first = len(attached.begins) if attached else 0
            for _ in range(experiment.traced + 1):
                self._iterate(training, module, step)
            begins = tuple(training.clock.begins)
            if attached:
                attached.synchronize()
                # Both recorded the same instants, each on its own clock.
                later = begins[0] - attached.begins[first]
                spans = [_moved(span, later) for span in attached.timeline if span.kind not in ("forward", "backward")]
            else:
                assert isinstance(module, TracedDdp)
                spans = complete(module.spans, computed, begins)
            spans = computed + spans
        origin, end = begins[0], begins[-1]
        kept = (_moved(span, -origin) for span in spans if span.end > origin and span.start < end)
        self._report(CaseTrace(self._number, place, tuple(begin - origin for begin in begins), tuple(kept)))

    def _warm(
        self, training: Trainable, module: nn.Module, step: Callable[[], None], attached: Any, least: int
    ) -> None:
        """Iterate until the schedule is in force and warmed up, and ``least`` iterations more."""
        while attached is not None and attached.schedule is None:
            self._iterate(training, module, step)
        if attached is not None:
            least += attached.schedule.build(Job.of(attached.workload, attached.cost)).warmup
        for _ in range(least):
            self._iterate(training, module, step)

    def _iterate(self, training: Trainable, module: nn.Module, step: Callable[[], None]) -> None:
        training.loss(module).backward()
        step()

    def _training(self, experiment: Experiment) -> Trainable:
        gc.collect()  # frees the last model
        if experiment.workload is None:
            return RealTraining(experiment, self._batch, self._rank)
        return PacedTraining(experiment, experiment.workload, self._rank)

    @contextmanager
    def _trainer(
        self, training: Trainable, case: LabCase, traced: bool = False
    ) -> Iterator[tuple[nn.Module, Callable[[], None], Any]]:
        """Yield the module to call, the step after a backward pass, and the attachment, if there is one."""
        dist.barrier()
        if case.kind == "attach":
            with self._attached(training, case, traced) as all_three:
                yield all_three
        else:
            step = _step(torch.optim.SGD(training.model.parameters(), lr=_RATE))
            module = ddp(training.model, case, traced)
            yield module, module.noted(step) if isinstance(module, TracedDdp) else step, None
        dist.barrier()

    @contextmanager
    def _attached(
        self, training: Trainable, case: LabCase, traced: bool
    ) -> Iterator[tuple[nn.Module, Callable[[], None], Any]]:
        optimizer = torch.optim.SGD(training.model.parameters(), lr=_RATE)
        with ft.attach(
            training.model,
            optimizer,
            schedule=case.schedule,
            compression=case.compression,
            transport="ps" if self._plan.servers else "all_reduce",
            trace=traced,
        ) as attached:
            yield training.model, _step(optimizer), attached

    # Agreement and reports.

    def _fitting_batch(self, experiment: Experiment) -> int:
        """Return the batch with which a step of the real model computes for the experiment's ``step_time``.

        All hosts compute at once, as they will, and a step's time counts as linear in the batch.
        """
        few, many = (self._agreed(self._computing(experiment, batch)) for batch in (2, 8))
        wanted = (experiment.step_time or 0) - few
        return self._agreed(max(1, round(2 + 6 * wanted / max(1, many - few))))

    def _computing(self, experiment: Experiment, batch: int) -> Time:
        training = RealTraining(experiment, batch, self._rank)
        times = []
        dist.barrier()
        for _ in range(4):
            began = time.perf_counter_ns()
            training.loss(training.model).backward()
            times.append((time.perf_counter_ns() - began) * 1000)
            training.model.zero_grad()
        return min(times)

    def _processes(self) -> list[list[int]]:
        """Return, on rank 0, the processes of each host: its worker, its server, or both; workers' hosts first."""
        pids: list[Any] = [0] * self._plan.hosts
        dist.all_gather_object(pids, os.getpid())
        servers = list(map(int, filter(None, os.environ[PIDS].split(","))))
        hosts = {rank: [pid] for rank, pid in enumerate(pids)}
        for home, server in zip(self._plan.homes, servers, strict=True):
            hosts.setdefault(home, []).append(server)
        return list(hosts.values()) if self._leads else []

    @property
    def _leads(self) -> bool:
        return self._rank == 0

    def _agreed(self, value: Any) -> Any:
        """Return the value of rank 0."""
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def _progress(self, what: str) -> None:
        if self._leads:
            now = LabProgress(self._number, what, self._done, self._total)
            sys.stdout.write(msgspec.json.encode(now).decode() + "\n")
            sys.stdout.flush()

    def _report(self, message: Message) -> None:
        if self._found is not None:
            self._found.write(msgspec.json.encode(message) + b"\n")
            self._found.flush()


def _step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def _moved(span: Span, by: Time) -> Span:
    return span._replace(start=span.start + by, end=span.end + by)


if __name__ == "__main__":
    main(sys.argv[1])
