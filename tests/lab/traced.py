"""Worker that trains paced models over servers and writes the times of gradients and chunks: ``traced.py RUNS``.

RUNS is a JSON list of objects with ``model``, ``size`` (scale of its gradients), ``compute`` (ps), ``jitter``,
``seed``, ``schedule`` and ``steps``. Rank 0 writes lines of JSON for each: first ``urgency`` of each gradient, the
smallest first, and the measured ``startup`` and ``latency`` of an operation, ps; then for every step ``gradients``,
with times, and ``chunks``, each with the times of issue and acknowledgement and its ranges. Times are ns of one clock.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import foretrain as ft
from foretrain.lab.paced import AcceleratorClock, scaled
from foretrain.lab.training import PacedModel
from foretrain.plugins.torch.attached import Attached
from foretrain.schedule import Job
from foretrain.workload import zoo


def train(run: dict[str, Any]) -> Iterator[dict[str, Any]]:
    workload = scaled(zoo(run["model"], precision="fp32"), run["compute"], run["size"])
    model = PacedModel(workload, AcceleratorClock(seed=2 * run["seed"] + dist.get_rank(), jitter=run["jitter"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given = torch.zeros(1)
    with ft.attach(model, optimizer, run["schedule"], transport="ps", warmup=2, trace=True) as attached:
        done = 0
        while done < run["steps"]:
            done += attached.schedule is not None
            model(given).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        attached.gather()
        yield from told(attached)
    dist.barrier()


def told(attached: Attached) -> Iterator[dict[str, Any]]:
    trace, origin = attached._trace, attached._origin
    assert trace is not None
    assert attached.workload is not None
    assert attached.cost is not None
    urgency = [task.first_use for task in Job.of(attached.workload, attached.cost).tasks]
    yield {"urgency": urgency, "startup": attached.cost.startup, "latency": attached.cost.latency}
    begins = [origin + when // 1000 for when in trace.begins]
    chunks: list[list[Any]] = [[] for _ in begins]
    for record in attached._runtime.executor.records:
        pieces = [(piece.task, piece.offset, piece.size) for piece in record.chunk.pieces]
        chunks[bisect_right(begins, record.issued) - 1].append((record.issued, record.completed, pieces))
    for gradients, sent in zip(trace._gradients, chunks, strict=True):
        yield {"gradients": [(task, origin + when // 1000) for task, when in gradients], "chunks": sent}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for run in json.loads(sys.argv[1]):
        for line in train(run):
            if dist.get_rank() == 0:
                print(json.dumps(line), flush=True)
    dist.destroy_process_group()
