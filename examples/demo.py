"""The main job, end to end: ``make demo``.

Records one training step of a real PyTorch model on this machine, forecasts it on four such machines joined by 1 Gb/s,
and then VGG-16 on the testbed of the ByteScheduler paper: 4 machines of 8 V100 and 4 servers, at the effective 11 Gb/s
a machine that its published baseline implies (benchmarks/paper/bytescheduler.py). Writes two pages and two traces.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

import foretrain as ft
from foretrain.report import page, summary, write_trace

BATCH = 32
STAGES = (64, 64, 128, 128, 256, 256, 512, 512)


class Block(nn.Module):
    """Two convolutions and a shortcut, as in ResNet-18."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def training() -> tuple[nn.Module, Callable[[], None], int]:
    """ResNet-18 for 32×32 images, one step on random data, the batch: what ``foretrain record`` asks a script for."""
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    blocks = [Block(before, after) for before, after in zip((64, *STAGES), STAGES, strict=False)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return model, step, BATCH


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """A bar with elapsed and remaining time."""
    left = (TextColumn("{task.description:44s}"), BarColumn(), MofNCompleteColumn())
    with Progress(*left, TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        bar.add_task(title, total=None)
        yield bar


def main() -> None:
    """Runs the demo; ``--out`` says where the pages go."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)

    # Threads that spin for each other are slowed tenfold by anything else that runs: leave one core free.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    model, step, batch = training()
    with progress("recording ResNet-18's training step here") as bar:
        tell = lambda done, total: bar.update(bar.task_ids[0], completed=done, total=total)  # noqa: E731
        recorded = ft.workload.record(step, model, batch=batch, name="resnet18", unit="images", progress=tell)
    ft.workload.save(recorded, out / "resnet18.toml")

    scenarios = {
        "resnet18": (recorded, "4 workers @ 1Gbps"),
        "vgg16": (ft.workload.zoo("vgg16", batch=32), "4x8xV100@11Gbps,ps=4"),
    }
    for name, (workload, place) in scenarios.items():
        with progress(f"comparing schedules: {name} on {place}") as bar:
            tell = lambda what, done, total: bar.update(bar.task_ids[0], completed=done, total=total)  # noqa: E731
            table = ft.compare(workload, place, progress=tell)
        with progress(f"sweeping the link's rate: {name}") as bar:
            tell = lambda what, done, total: bar.update(bar.task_ids[0], completed=done, total=total)  # noqa: E731
            shown = ("ddp", "p3", "dear", "bytescheduler", "prophet")
            swept = ft.sweep(workload, place, shown, "rate=500Mbps:100Gbps", progress=tell)
        table = table.with_sweep(swept)
        console.print(summary(table))
        page(table, out / f"{name}.html")
        write_trace(table.runs, out / f"{name}.perfetto")
        console.print(f"wrote {out / name}.html and {out / name}.perfetto (for ui.perfetto.dev)\n")


if __name__ == "__main__":
    main()
