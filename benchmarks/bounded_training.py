"""Training to an accuracy with bounded loss and without: real models, real gradients, in the lab of bounded.py.

digits        a residual network on the 1,797 handwritten digits that scikit-learn ships
characters    the transformer of examples/tolerance/characters.py, on this repository's own pages, at a learning rate of
              0.01
images        a small CNN with BatchNorm on images like CIFAR's whose optimum is known: one of ten smooth prototypes,
              and noise. The nearest prototype is the best answer, and accuracy is over that answer's: 1 is the optimum

Where switches drop selectively, "bounded" lets them drop what is small in front layers, and "any drop" any packet.
"server" is a server beside rank 0 that updates the parameters, with bounded loss both ways.

Each seed trains the same model on the same batches over each transport. Time is that of steps, without evaluations and
without the first ones, which are observed and planned.

`drops` trains digits on four ranks of one process whose gradients lose the same share of bytes: packets of any values,
or those of small magnitude first, as many as may be dropped.
"""

from __future__ import annotations

import sys
import time
from math import sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

TARGETS = {"digits": 0.94, "characters": 0.40, "images": 0.93}
"""Accuracy on data held out that a training is to reach."""
STEPS = {"digits": 100, "characters": 900, "images": 200}
EVERY = {"digits": 5, "characters": 30, "images": 10}
"""Steps between two evaluations."""
SKIPPED = 6
"""Steps that are not timed."""
MARGIN = 0.01
"""Accuracy that a tolerance may cost at most."""
DROPS = {"random": "packet", "selective": "magnitude"}
"""What may be dropped in each case of `drops`."""
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
    import torch

    made = example.build(seed)
    return made | {"optimizer": torch.optim.AdamW(made["model"].parameters(), lr=1e-2)}


def images(seed: int) -> dict[str, Any]:
    """Return a CNN on noisy images of ten prototypes; its accuracy is over that of the best classifier."""
    import torch
    from torch import nn

    noise, draw = 6.0, torch.Generator().manual_seed(0)
    prototypes = nn.functional.interpolate(torch.randn(10, 3, 4, 4, generator=draw), size=16, mode="bicubic")

    def sample(count: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        classes = torch.randint(10, (count,), generator=draw)
        return prototypes[classes] + noise * torch.randn(count, 3, 16, 16, generator=draw), classes

    inputs, classes = sample(2000, draw)
    # Classes are equally likely, and noise is alike in all directions.
    best = (torch.cdist(inputs.flatten(1), prototypes.flatten(1)).argmin(1) == classes).float().mean().item()

    def block(channels: int, width: int) -> tuple[nn.Module, ...]:
        convolution = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        return convolution, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)

    head = nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
    model = nn.Sequential(*block(3, 16), *block(16, 32), *head)
    batches = torch.Generator().manual_seed(1 + seed)

    def evaluate(model: nn.Module) -> float:
        model.eval()
        right = (model(inputs).argmax(1) == classes).float().mean().item()
        model.train()
        return right / best

    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "batches": iter(lambda: sample(64, batches), None),
        "loss": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        "evaluate": evaluate,
    }


def models() -> dict[str, Any]:
    """Return what builds a training of each model from a seed."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "tolerance"))
    return {"digits": digits, "characters": characters, "images": images}


def train(place: Any, tolerance: float) -> dict[str, Any]:
    """Return, of each case and seed, [seconds, accuracy] at each evaluation, and what was lost."""
    import torch
    import torch.distributed as dist

    import foretrain as ft

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    build = models()[place.model]
    compared = cases(place, tolerance)
    found: dict[str, Any] = {name: [] for name in compared}
    found["lost"], found["shares"] = {}, {}
    for seed in range(place.seeds):
        for name, (schedule, transport) in compared.items():
            torch.manual_seed(seed)
            made = build(seed)
            model, optimizer, loss = made["model"], made["optimizer"], made["loss"]
            batches, seconds, curve = iter(made["batches"]), 0.0, []
            with ft.attach(model, optimizer, schedule, transport=transport, warmup=3) as job:
                for step in range(place.steps):
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
                            curve.append((round(seconds, 6), made["evaluate"](model)))
                        dist.barrier()
            if job.ledger is not None:  # of all ranks, once the job is closed
                found["lost"][name] = job.ledger.line()
                lost = sum(sum(by_rank) for by_rank in job.ledger.by_tensor().values())
                found["shares"].setdefault(name, []).append(lost / (job.ledger.sent * ranks))
            found[name].append(curve)
    dist.barrier()
    return found


def reached(curve: list[tuple[float, float]], target: float) -> tuple[int, float] | None:
    """Return how many evaluations and seconds it took to an accuracy of ``target``; None if it was never there."""
    return next(((k, seconds) for k, (seconds, accuracy) in enumerate(curve, 1) if accuracy >= target), None)


def drops(place: Any) -> dict[str, Any]:
    """Return, of each case and seed, the share of bytes that was lost, and the accuracy after each round."""
    import torch

    from foretrain.loss_tolerance.replicas import LossyExchange
    from foretrain.loss_tolerance.tagging import Tagging
    from foretrain.loss_tolerance.training import Training
    from foretrain.loss_tolerance.trial import build_trial

    torch.set_num_threads(1)
    build = models()[place.model]
    found: dict[str, Any] = {name: [] for name in DROPS}
    for seed in range(place.seeds):
        for name, may in DROPS.items():
            exchange = LossyExchange(ranks=place.hosts, back="reliable", tagging=Tagging(may))  # pyright: ignore[reportArgumentType]
            training = Training(build_trial(build, seed), exchange, place.loss, seed)
            accuracies = [training.advance(1) for _ in range(place.steps)]
            found[name].append({"lost": training.curve().lost, "accuracies": accuracies})
    return found


def drops_summary(place: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return, of each case, rounds to accuracy in the median of the seeds that reach it; how many do; the mean accuracy
    in the end; the share of bytes that was lost. "ratio": the rounds of random over those of selective drop."""
    cases: dict[str, Any] = {}
    for name in DROPS:
        curves = [list(enumerate(one["accuracies"], 1)) for one in found[name]]
        there = [each[0] for curve in curves if (each := reached(curve, TARGETS[place.model])) is not None]
        cases[name] = {
            "rounds": median(there) if there else None,
            "reached": len(there),
            "seeds": len(curves),
            "accuracy": fmean(accuracy for curve in curves for _, accuracy in curve[-3:]),
            "lost": fmean(one["lost"] for one in found[name]),
        }
    random, selective = (cases[name]["rounds"] for name in DROPS)
    # A case that never gets there takes for ever.
    ratio = random / selective if random and selective else 0.0 if random else float("inf") if selective else 1.0
    return {"target": TARGETS[place.model], "cases": cases, "ratio": ratio}


def drops_table(summary: dict[str, Any]) -> None:
    """Print what `drops_summary` returns."""
    for name, one in summary["cases"].items():
        print(
            f"  {name:10s} {one['lost']:.1%} of the bytes lost; {summary['target']:.0%} after {one['rounds']} rounds "
            f"({one['reached']} of {one['seeds']} seeds), accuracy {one['accuracy']:.2%}"
        )
    print(f"  rounds of random over those of selective drop: {summary['ratio']:.2f}")


def summary(place: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return of each case what to report; the ratio to the best over TCP, and the cost in accuracy.

    Returns:
        "cases": of each, "rounds" and "seconds" to "target" in the median of the seeds that reach it, or None;
            "reached", of "seeds"; "steps", seconds of all steps in the median; "accuracy", the mean of the last three
            evaluations; "lost", the mean share of the gradients' bytes that all ranks' sums lost, where that is
            known. "ratio": the best over TCP over ours, the median of the seeds; 0 where ours never gets there.
            "delta": our accuracy less that of the most accurate over TCP; "least", its lower bound with 95 %
            confidence (Student's t, one-sided), None for one seed.
    """
    target = TARGETS[place.model]
    names = [name for name, curves in found.items() if isinstance(curves, list)]
    times = {name: [reached(curve, target) for curve in found[name]] for name in names}
    final = {name: [fmean(accuracy for _, accuracy in curve[-3:]) for curve in found[name]] for name in names}
    cases: dict[str, Any] = {}
    for name in names:
        there = [each for each in times[name] if each is not None]
        cases[name] = {
            "rounds": EVERY[place.model] * median(evaluations for evaluations, _ in there) if there else None,
            "seconds": median(seconds for _, seconds in there) if there else None,
            "reached": len(there),
            "seeds": len(times[name]),
            "steps": median(curve[-1][0] for curve in found[name]),
            "accuracy": fmean(final[name]),
        }
        if shares := found.get("shares", {}).get(name):
            cases[name]["lost"] = fmean(shares)
    never = 0, float("inf")
    tcp = [name for name in names if name.startswith("tcp")]
    best_of_tcp = (min((times[name][seed] or never)[1] for name in tcp) for seed in range(place.seeds))
    ratio = median(
        best / ours[1] if ours is not None else 0.0 for best, ours in zip(best_of_tcp, times["bounded"], strict=True)
    )
    best = max(tcp, key=lambda name: fmean(final[name]))
    deltas = [ours - theirs for ours, theirs in zip(final["bounded"], final[best], strict=True)]
    delta, least = fmean(deltas), None
    if len(deltas) > 1:
        least = delta - _STUDENT.get(len(deltas) - 1, 1.83) * stdev(deltas) / sqrt(len(deltas))
    return {"target": target, "cases": cases, "ratio": ratio, "delta": delta, "least": least}


def table(summary: dict[str, Any], lost: dict[str, str]) -> None:
    """Print what `summary` returns, and what each case has ``lost``."""
    for name, one in summary["cases"].items():
        shown = "never" if one["rounds"] is None else f"{one['rounds']:g} rounds, {one['seconds']:6.2f} s"
        print(
            f"  {name:10s} {summary['target']:.0%} after {shown} ({one['reached']} of {one['seeds']} seeds), all steps "
            f"{one['steps']:.2f} s, accuracy {one['accuracy']:.2%}  {lost.get(name, '')}"
        )
    print(f"  best over TCP over ours: {summary['ratio']:.2f}; accuracy {summary['delta']:+.2%}", end="")
    if (least := summary["least"]) is not None:
        verdict = "not inferior" if least > -MARGIN else "not shown to be no worse"
        print(f", at least {least:+.2%} with 95 % confidence: {verdict} by a margin of {MARGIN:.0%}", end="")
    print()
