"""From a real training step to a forecast: record it here, save it, and compare schedules on a cluster elsewhere."""

import tempfile
from pathlib import Path

import torch
from torch import nn

import foretrain as ft

BATCH = 32


def main() -> None:
    torch.set_num_threads(1)  # threads that spin for each other suffer from anything else that runs
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, labels = torch.randn(BATCH, 256), torch.randint(10, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    workload = ft.workload.record(step, model, batch=BATCH, name="mlp", iterations=5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mlp.toml"
        ft.workload.save(workload, path)
        assert ft.workload.load(path) == workload  # the file holds every picosecond and byte
        table = ft.compare(ft.workload.load(path), "4 workers @ 10Gbps", ["ddp", "bytescheduler", "prophet"])

    print(f"{workload.name}: {workload.source}")
    for run in table.runs:
        print(f"{run.schedule.name:<14} {run.iteration_time / 1e9:7.2f} ms, {run.gap:.1%} above the optimum")
    print(table.advice.text)


if __name__ == "__main__":
    main()
