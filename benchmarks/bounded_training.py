"""Training to an accuracy with bounded loss and without: real models, real gradients, in the lab of bounded.py.

digits        a residual network on the 1,797 handwritten digits that scikit-learn ships
characters    the transformer of examples/tolerance/characters.py, on this repository's own pages

Where switches drop selectively, "bounded" lets them drop what is small in front layers, and "any drop" any packet.
"server" is a server beside rank 0 that updates the parameters, with bounded loss both ways.

Each seed trains the same model on the same batches over each transport. Time is that of steps, without evaluations and
without the first ones, which are observed and planned.
"""

from __future__ import annotations

import sys
import time
from math import sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

TARGETS = {"digits": 0.94, "characters": 0.30}
"""Accuracy on data held out that a training is to reach."""
STEPS = {"digits": 100, "characters": 600}
EVERY = {"digits": 5, "characters": 15}
"""Steps between two evaluations."""
SKIPPED = 6
"""Steps that are not timed."""
MARGIN = 0.01
"""Accuracy that a tolerance may cost at most."""
_STUDENT = {1: 6.31, 2: 2.92, 3: 2.35, 4: 2.13, 5: 2.02, 9: 1.83}
"""The one-sided 95 % quantile, by degrees of freedom."""


def cases(place: Any, tolerance: float) -> dict[str, tuple[str, Any]]:
    """Return the schedule and the transport of each case at ``place``."""
    from bounded import papers

    import foretrain as ft

    return {
        "tcp gloo": ("prophet", ft.AllReduce()),
        "tcp ring": ("prophet", ft.AllReduce(backend="ring")),
        "bounded": ("prophet", ft.BoundedLoss(tolerance)),
        **({"any drop": ("prophet", ft.BoundedLoss(tolerance, droppable="packet"))} if place.bands > 1 else {}),
        **({"server": ("p3", ft.BoundedLoss(tolerance, over="ps", updates="servers"))} if place.papers else {}),
        **{name: ("prophet", transport) for name, transport in papers(tolerance).items() if place.papers},
    }


def digits(seed: int) -> dict[str, Any]:
    """Return a residual network on digits, as examples/tolerance/digits.py returns a training."""
    import digits as example
    import torch
    from torch import nn

    class Residual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.path = nn.Sequential(
                *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
                *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, width, y, x)
            return torch.relu(x + self.path(x))

    model = nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), Residual(32), nn.MaxPool2d(2)),
        *(Residual(32), nn.Flatten(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    )
    draw = torch.Generator().manual_seed(seed)

    def batches() -> Any:
        while True:
            chosen = example.TRAIN[torch.randint(len(example.TRAIN), (64,), generator=draw)]
            yield example.INPUTS[chosen], example.TARGETS[chosen]

    def evaluate(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            found = example.evaluate(model)
        model.train()
        return found

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "batches": batches(), "loss": example.loss, "evaluate": evaluate}


def characters(seed: int) -> dict[str, Any]:
    """Return the transformer on characters."""
    import characters as example

    return example.build(seed)


def train(place: Any, tolerance: float) -> dict[str, Any]:
    """Return, of each case and seed, [seconds, accuracy] at each evaluation."""
    import torch
    import torch.distributed as dist

    import foretrain as ft

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "tolerance"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    build = {"digits": digits, "characters": characters}[place.model]
    compared = cases(place, tolerance)
    found: dict[str, Any] = {name: [] for name in compared}
    found["lost"] = {}
    for seed in range(place.seeds):
        for name, (schedule, transport) in compared.items():
            torch.manual_seed(seed)
            made = build(seed)
            model, optimizer, loss = made["model"], made["optimizer"], made["loss"]
            batches, seconds, curve = iter(made["batches"]), 0.0, []
            with ft.attach(model, optimizer, schedule, transport=transport, warmup=3) as job:
                for step in range(STEPS[place.model]):
                    # One batch of all ranks, cut between them.
                    batch = next(batches)
                    batch = [b[rank::ranks] for b in batch] if isinstance(batch, tuple) else batch[rank::ranks]
                    began = time.perf_counter()
                    optimizer.zero_grad(set_to_none=True)
                    loss(model, batch).backward()
                    optimizer.step()
                    seconds += time.perf_counter() - began if step >= SKIPPED else 0.0
                    if (step + 1) % EVERY[place.model] == 0:
                        began = time.perf_counter()
                        job.synchronize()
                        seconds += time.perf_counter() - began if step >= SKIPPED else 0.0
                        with torch.no_grad():
                            curve.append((seconds, made["evaluate"](model)))
                        dist.barrier()
                if job.ledger is not None:
                    found["lost"][name] = job.ledger.line()
            found[name].append(curve)
    dist.barrier()
    return found


def reached(curve: list[tuple[float, float]], target: float) -> tuple[int, float] | None:
    """Return how many evaluations and seconds it took to an accuracy of ``target``; None if it was never there."""
    return next(((k, seconds) for k, (seconds, accuracy) in enumerate(curve, 1) if accuracy >= target), None)


def table(place: Any, found: dict[str, Any]) -> dict[str, float]:
    """Print times to accuracy and final accuracies; return the ratio to the best over TCP, and the cost in accuracy."""
    target = TARGETS[place.model]
    names = [name for name in found if name not in ("lost", "rank")]
    times = {name: [reached(curve, target) for curve in found[name]] for name in names}
    final = {name: [fmean(accuracy for _, accuracy in curve[-3:]) for curve in found[name]] for name in names}
    for name in names:
        there = [each for each in times[name] if each is not None]
        shown = "never"
        if there:
            rounds = EVERY[place.model] * median(evaluations for evaluations, _ in there)
            shown = f"{rounds:g} rounds, {median(seconds for _, seconds in there):6.2f} s"
        steps = median(curve[-1][0] for curve in found[name])
        print(
            f"  {name:10s} {target:.0%} after {shown} ({len(there)} of {len(times[name])} seeds), all steps {steps:.2f}"
            f" s, accuracy {fmean(final[name]):.2%}  {found['lost'].get(name, '')}"
        )
    never = 0, float("inf")
    best_of_tcp = (
        min((times[name][seed] or never)[1] for name in names if name.startswith("tcp")) for seed in range(place.seeds)
    )
    # Where ours never gets there, the ratio is 0.
    ratios = [
        best / ours[1] if ours is not None else 0.0 for best, ours in zip(best_of_tcp, times["bounded"], strict=True)
    ]
    ratio = median(ratios)
    best = max((name for name in names if name.startswith("tcp")), key=lambda name: fmean(final[name]))
    deltas = [ours - theirs for ours, theirs in zip(final["bounded"], final[best], strict=True)]
    delta = fmean(deltas)
    print(f"  best over TCP over ours: {ratio:.2f}; accuracy {delta:+.2%}", end="")
    if len(deltas) > 1:
        low = delta - _STUDENT.get(len(deltas) - 1, 1.83) * stdev(deltas) / sqrt(len(deltas))
        verdict = "not inferior" if low > -MARGIN else "not shown to be no worse"
        print(f", at least {low:+.2%} with 95 % confidence: {verdict} by a margin of {MARGIN:.0%}", end="")
    print()
    return {"ratio": ratio, "delta": delta}
