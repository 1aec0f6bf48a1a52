"""One worker of ps.py: trains a paced model under one schedule after the other, while somebody else changes the links.

    steady.py OPTIONS

OPTIONS is JSON: ``model``, ``size`` (scale of its gradients), ``compute`` (ps), ``schedules``, ``iterations``. Rank 0
writes a line of JSON for every iteration: its number, its seconds, how often Prophet has adopted a plan and how slow
it takes the link to be by now, and the seconds of a core that its monitor and its profile took in
all.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import foretrain as ft
from foretrain.lab.paced import AcceleratorClock, scaled
from foretrain.lab.training import PacedModel
from foretrain.schedule import Job
from foretrain.schedule.prophet import PlannedOrder
from foretrain.workload import zoo

WATCHED = "_measure", "_judge"
"""Of `PlannedOrder`: what it does for every acknowledgement, and in every step, a new plan included."""


class Meter:
    """What Prophet's watching of the link costs, and what it finds.

    Attributes:
        seconds: of a core.
        slowness: of the link that the latest plan is for, in that of the first.
    """

    def __init__(self) -> None:
        self.seconds, self.slowness = 0.0, 1.0
        for name in WATCHED:
            setattr(PlannedOrder, name, self._timed(getattr(PlannedOrder, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(order: PlannedOrder, *arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return call(order, *arguments)
            finally:
                self.seconds += time.thread_time() - began
                self.slowness = order._slowness

        return timed


def train(options: dict[str, Any], schedule: str, meter: Meter) -> None:
    """Trains as long as it is asked to, after warm-up."""
    gc.collect()
    workload = scaled(zoo(options["model"], precision="fp32"), options["compute"], options["size"])
    model = PacedModel(workload, AcceleratorClock(seed=dist.get_rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given = torch.zeros(1)

    def iterate() -> None:
        model(given).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with ft.attach(model, optimizer, schedule, transport="ps") as attached:
        while attached.schedule is None:
            iterate()
        assert attached.workload is not None
        assert attached.cost is not None
        for _ in range(2 + attached.schedule.build(Job.of(attached.workload, attached.cost)).warmup):
            iterate()
        meter.seconds = 0.0
        for number in range(options["iterations"]):
            began = time.perf_counter()
            iterate()
            if dist.get_rank() == 0:
                took = time.perf_counter() - began
                told = {"schedule": schedule, "iteration": number, "seconds": took}
                seen = {"slowness": meter.slowness, "monitor": meter.seconds}
                print(json.dumps(told | seen), flush=True)
    dist.barrier()


def main() -> None:
    """All schedules."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options, meter = json.loads(sys.argv[1]), Meter()
    for schedule in options["schedules"]:
        train(options, schedule, meter)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
