"""The three uses of foretrain, one screen each: ``make demo``.

1. Compare schedules for ResNet-50 on 4 V100 at 7 Gb/s, where scheduling pays; the same on every machine.
2. Simulate an unmodified FSDP script on 16 H100 GPUs that are not there.
3. Record one real training step on this machine and forecast it on four such machines at 1 Gb/s.

Writes pages to look at, and says where.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import foretrain as ft
from foretrain.report import page
from foretrain.units import format_time

EXAMPLES = Path(__file__).parent
SHOWN = ("ddp", "p3", "bytescheduler", "prophet")
BATCH = 16
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
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar with the elapsed time; yield what moves it."""
    with Progress(TextColumn("{task.description:32s}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def compare(workload: ft.Workload, cluster: str, console: Console, out: Path) -> None:
    """Print what an iteration takes under each schedule and under the optimum, and whether a change is worth it."""
    with progress("comparing schedules") as move:
        found = ft.compare(workload, cluster, SHOWN, progress=lambda _, done, total: move(done, total))
    table = Table("schedule", "iteration", "speed-up", "GPU idle", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for run in sorted(found.runs, key=lambda run: -run.iteration_time):
        speed = f"{found.speedup(run):.2f}×"
        table.add_row(run.schedule.name, format_time(run.iteration_time), speed, f"{run.idle:.0%}")
    limit = found.baseline.iteration_time / found.bound.time
    table.add_row("optimum T*", format_time(found.bound.time), f"{limit:.2f}×", "")
    console.print(table)
    console.print(f"\n{found.advice.text}", soft_wrap=True)
    page(found, out)
    console.print(f"[dim]wrote {out}[/dim]")


def simulate(console: Console, out: Path) -> None:
    """Run a script on simulated GPUs; print what it says of itself and the summary of the forecast."""
    arguments = ["simulate", "--cluster", "dgx-h100:2", "--steps", "3", "--html", str(out), "--"]
    script = EXAMPLES / "simulate" / "gpt_fsdp2.py"
    command = [sys.executable, "-m", "foretrain", *arguments, str(script)]
    environment = os.environ | {"COLUMNS": "88"}
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if ran.returncode:
        console.print("The simulation failed; see above. It needs a C++ compiler.")
        return
    lines = ran.stdout.splitlines()
    own = [line for line in lines if line.startswith("step ")]
    first = next(number for number, line in enumerate(lines) if line.startswith("cluster"))
    summary = lines[first : lines.index("", first)]
    console.print("\n".join(["", "the script prints:", *own[-1:], "", "foretrain prints:", *summary]), markup=False)


def record(out: Path) -> ft.Workload:
    """Record a training step of ResNet-18 on this machine."""
    # Threads that spin for each other are slowed tenfold by anything else that runs: leave one core free.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    model, step, batch = training()
    with progress("recording a step of ResNet-18") as move:
        recorded = ft.workload.record(step, model, batch=batch, name="resnet18", unit="images", progress=move)
    ft.workload.save(recorded, out)
    return recorded


def pays_from(workload: ft.Workload) -> str:
    """Tell on which links an optimal schedule would be 10 % faster than overlap with a barrier."""
    for rate in ("10Gbps", "5Gbps", "2Gbps", "1Gbps", "500Mbps", "200Mbps", "100Mbps", "50Mbps"):
        bound = ft.bound(workload, f"4 workers @ {rate}")
        if bound.wfbp >= 1.1 * bound.time:
            return f"For this step scheduling begins to gain 10 % where links are as slow as about {rate}."
    return "For this step scheduling gains little on links of any rate."


def main() -> None:
    """Run the demo; ``--out`` says where the pages go."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)

    console.rule("1 of 3: ResNet-50 on 4 V100 at 7 Gb/s", align="left")
    resnet50 = ft.workload.zoo("resnet50", batch=64, device="V100")
    compare(resnet50, "4x1xV100@7Gbps", console, out / "resnet50.html")

    console.print()
    console.rule("2 of 3: examples/simulate/gpt_fsdp2.py on 16 H100 GPUs that are not there", align="left")
    simulate(console, out / "gpt.html")

    console.print()
    console.rule("3 of 3: a training step of this machine, on 4 such machines at 1 Gb/s", align="left")
    recorded = record(out / "resnet18.toml")
    compare(recorded, "4 workers @ 1Gbps", console, out / "resnet18.html")
    console.print(
        f"{pays_from(recorded)}\n\nNext: foretrain record train.py:setup --out mine.toml, and compare your own step.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
