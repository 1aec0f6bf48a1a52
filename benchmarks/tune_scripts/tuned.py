"""One worker of tune.py: trains a paced model while its knobs are searched, then under knobs that are kept, in turns.

    tuned.py OPTIONS

OPTIONS is JSON: ``model``, ``size`` (scale of its gradients), ``compute`` (ps), ``engine``, ``policy``, ``searched``
(iterations while knobs are searched), ``settings`` (so many of the grid besides those that the search has kept),
``rounds`` and ``iterations`` (of each of the settings in each round). Rank 0 writes a line of JSON for every iteration
of the search (its seconds, the knobs in force and those that are taken for the best, the samples so far), and one for
every round of every setting (the median of its iterations in seconds).
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import foretrain as ft
from foretrain.lab.paced import AcceleratorClock, scaled
from foretrain.lab.training import PacedModel
from foretrain.planner.search import Space
from foretrain.schedule import Spec, spec
from foretrain.workload import zoo

HOPELESS = 2.0
"""How many times as long as the best so far an iteration takes that is not worth more of them."""
SETTLE = 2
"""Iterations after a change that do not count."""


def say(**what: Any) -> None:
    """A line, of rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps(what), flush=True)


def in_full(one: Spec) -> str:
    """With all its knobs."""
    return str(Spec(one.name, one.settings))


class Job:
    """The model, with an optimizer that costs next to nothing."""

    def __init__(self, options: dict[str, Any]) -> None:
        workload = scaled(zoo(options["model"], precision="fp32"), options["compute"], options["size"])
        self.model = PacedModel(workload, AcceleratorClock(seed=dist.get_rank()))
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self._given, self._engine = torch.zeros(1), options["engine"]

    def iterate(self) -> float:
        """One iteration, seconds."""
        began = time.perf_counter()
        self.model(self._given).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - began

    @contextmanager
    def attached(self, policy: str, *, tune: bool) -> Iterator[Any]:
        """Scheduled, and past what is watched."""
        with ft.attach(self.model, self._optimizer, policy, transport=self._engine, tune=tune) as attached:
            while attached.schedule is None:
                self.iterate()
            yield attached


def searched(options: dict[str, Any]) -> list[str]:
    """Trains while knobs are searched; what was taken for the best, the defaults, and a grid."""
    job, kept = Job(options), []
    with job.attached(options["policy"], tune=True) as attached:
        for number in range(options["searched"]):
            took, tuner = job.iterate(), attached.tuner
            if tuner is not None:
                best, now = in_full(tuner.best), in_full(attached.schedule)
                say(iteration=number, seconds=took, spec=now, best=best, samples=tuner.samples)
                kept.append(best)
        workload = attached.workload
    space, count = Space.of(spec(options["policy"]), workload), options["settings"]
    grid = [in_full(one) for one in space.grid(count)] if count else []
    return list(dict.fromkeys([*agreed(kept), in_full(spec(options["policy"])), *agreed(grid)]))


def compared(options: dict[str, Any], settings: list[str]) -> None:
    """Trains under each of ``settings``, in turns; what takes far longer than the best is given up at once."""
    gc.collect()
    job, best = Job(options), float("inf")
    with job.attached(options["policy"], tune=False) as attached:
        for turn in range(options["rounds"]):
            for text in list(settings):
                for knob, value in spec(text).settings.items():
                    attached.set(knob, value)
                probe = [job.iterate() for _ in range(SETTLE + 1)][-1]
                best = min(best, probe)
                if not turn and agreed(probe > HOPELESS * best):
                    settings.remove(text)
                    continue
                say(setting=text, median=median(job.iterate() for _ in range(options["iterations"])))


def agreed(value: Any) -> Any:
    """Rank 0's."""
    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def main() -> None:
    """Searches, then compares."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options = json.loads(sys.argv[1])
    compared(options, searched(options))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
