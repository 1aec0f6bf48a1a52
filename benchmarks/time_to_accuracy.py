"""Time to accuracy: a real training over simulated packets, with a reliable transport and with bounded loss.

Handwritten digits (examples/tolerance/digits.py) on four workers and a server at one switch, 10 Gb/s. Every wire loses
one packet of a hundred (the worst grey failure of the DLCP paper, but everywhere), a class of a switch's port holds 100
packets, marks above 20 and drops what is droppable above 60. A round takes the simulated push and pull and 100 µs of
computation, which is assumed; what the network lost is lost to the gradients and parameters of that round. Times are
simulated, so the same on every machine but for the last digits of the training's floating point. Fifty rounds differ,
and come again and again; by magnitude, which depends on the gradients, all do.

The target is 96 % of the images held out; trainings without losses end at 97.5 %.
--plot FOLDER: the curves of the first seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from measure import finish, options
from rich.console import Console
from rich.progress import track
from rich.table import Table

from foretrain.cli.record import loaded
from foretrain.loss_tolerance.replicas import LossyExchange, Replica
from foretrain.loss_tolerance.rounds import NetworkRounds
from foretrain.loss_tolerance.tagging import Criterion, Tagging
from foretrain.loss_tolerance.training import Training, time_to_accuracy, timed
from foretrain.loss_tolerance.trial import build_trial
from foretrain.network.fabrics.clos import star
from foretrain.network.packet import LinkLosses, Packets, Queues
from foretrain.network.packet.transports.transport import Bounded, Dctcp, Transport
from foretrain.network.routing import Ecmp
from foretrain.units import MICROSECOND, MILLISECOND

SCRIPT = Path(__file__).parents[1] / "examples" / "tolerance" / "digits.py"
WORKERS, RATE, LOSS = 4, 1.25e9, 0.01
PACKET = 1538
LIMIT, MARK, SPARE = 100 * PACKET, 20 * PACKET, 60 * PACKET
COMPUTATION = 100 * MICROSECOND
ROUNDS, EVERY, DISTINCT = 150, 5, 50
MARKING = Queues(limit=LIMIT, mark_from=MARK, mark_to=MARK)
ROUTER = Ecmp(star(WORKERS + 1, RATE))
TARGET = 0.96


class Way(NamedTuple):
    """A transport, what its switches do, and by what packets may be dropped."""

    transport: Transport
    switches: Queues
    by: Criterion = "packet"


def bounded(tolerance: float, by: Criterion = "packet") -> Way:
    """Bounded loss at p; what is not droppable is marked."""
    return Way(Bounded(tolerance=tolerance), Queues(limit=LIMIT, mark_from=MARK, mark_to=MARK, spare=SPARE), by)


WAYS = {
    "DCTCP": Way(Dctcp(least_timeout=MILLISECOND), MARKING),
    "DCTCP, timer 200 µs": Way(Dctcp(), MARKING),
    "bounded loss, p = 0": bounded(0.0),
    "p = 1 %": bounded(0.01),
    "p = 10 %": bounded(0.1),
    "p = 10 %, by layer": bounded(0.1, "layer"),
    "p = 10 %, by magnitude": bounded(0.1, "magnitude"),
    "p = 20 %": bounded(0.2),
    "p = 40 %": bounded(0.4),
}


class Trained(NamedTuple):
    """One training: ms and rounds to the target, or None; ms of a round; the share lost; accuracy in the end; points
    (ms, accuracy)."""

    time: float | None
    rounds: int | None
    each: float
    lost: float
    accuracy: float
    curve: list[tuple[float, float]]


def trained(build: Callable[[int], object], way: Way, seed: int) -> Trained:
    """Trains ``ROUNDS`` rounds over the network of ``way``."""
    trial = build_trial(build, seed)
    exchange = LossyExchange(ranks=WORKERS, tagging=Tagging(way.by))

    def network(number: int) -> Packets:
        wires = {link: LinkLosses(LOSS) for link in range(ROUTER.topology.links)}
        return Packets(
            ROUTER.topology, transport=way.transport, switches=way.switches, losses=wires, seed=1000 * seed + number
        )

    tensors = Replica(trial, trial.model, trial.optimizer).tensors()
    over = NetworkRounds(exchange, tensors, ROUTER, network, count=DISTINCT)
    training = Training(trial, exchange, losses=over)
    for _ in range(ROUNDS // EVERY):
        training.advance(EVERY)
    curve, times = training.curve(), [time + COMPUTATION for time in over.times()]
    found = time_to_accuracy(curve, times, TARGET)
    return Trained(
        time=None if found is None else found / MILLISECOND,
        rounds=curve.reaches(TARGET),
        each=fmean(times) / MILLISECOND,
        lost=curve.lost,
        accuracy=curve.accuracies[-1],
        curve=[(time / MILLISECOND, accuracy) for time, accuracy in timed(curve, times)],
    )


def table(found: dict[str, list[Trained]]) -> Table:
    """A row for each transport."""
    made = Table(box=None, pad_edge=False)
    for name in ("transport", "lost", "round, ms", "accuracy in the end", "rounds to target", "ms to target", "faster"):
        made.add_column(name, justify="left" if name == "transport" else "right")
    base = mean_time(found["DCTCP"])
    for name, runs in found.items():
        times = [run.time for run in runs if run.time is not None]
        whole = len(times) == len(runs)
        spread = f" ± {stdev(times):.1f}" if whole and len(times) > 1 else ""
        made.add_row(
            name,
            f"{fmean(run.lost for run in runs):.2%}",
            f"{fmean(run.each for run in runs):.3f}",
            f"{fmean(run.accuracy for run in runs):.4f}",
            f"{fmean(run.rounds or 0 for run in runs):.0f}" if whole else "not by all",
            f"{fmean(times):.1f}{spread}" if whole else "not by all",
            f"{base / fmean(times):.2f}×" if whole else "",
        )
    return made


def mean_time(runs: list[Trained]) -> float:
    """ms to the target, of all seeds; not a number where one never got there."""
    return fmean(float("nan") if run.time is None else run.time for run in runs)


def plot(found: dict[str, list[Trained]], folder: Path) -> None:
    """Wrong answers over simulated time, of the first seed."""
    from paper.eflops_plots import Chart

    names = ("DCTCP", "DCTCP, timer 200 µs", "bounded loss, p = 0", "p = 10 %", "p = 10 %, by magnitude", "p = 40 %")
    lines = {name: [(x, 100 * (1 - y)) for x, y in found[name][0].curve] for name in names if name in found}
    end = 20 * round(1.2 * mean_time(found["DCTCP"]) / 20)  # what comes later is of no interest
    lines = {name: [(x, min(y, 20)) for x, y in points if x <= end] for name, points in lines.items()}
    marks = [0, end / 4, end / 2, 3 * end / 4, end]
    rule = (100 * (1 - TARGET), f"{100 * (1 - TARGET):g} %")
    title = "Time to accuracy over a grey network"
    Chart("time-to-accuracy", title, "simulated ms", "% wrong", lines, marks, 20, rule, log=False).write(folder)


def more(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark alone."""
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each transport")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write time-to-accuracy.svg and .html there")


def main() -> None:
    """Prints the table and the RESULT line."""
    arguments = options(__doc__ or "", more)
    console = Console(highlight=False, width=130)
    names = ("DCTCP", "DCTCP, timer 200 µs", "p = 10 %") if arguments.quick else tuple(WAYS)
    seeds = 2 if arguments.quick else arguments.seeds
    found: dict[str, list[Trained]] = {name: [] for name in names}
    with loaded(f"{SCRIPT}:build") as build:
        work = [(name, seed) for seed in range(seeds) for name in names]
        for name, seed in track(work, "training", transient=True, console=console):
            found[name].append(trained(build, WAYS[name], seed))
    console.print(table(found))
    if arguments.plot:
        plot(found, arguments.plot)
    base = mean_time(found["DCTCP"])
    values = {
        "ms_dctcp": base,
        "ms_p10": mean_time(found["p = 10 %"]),
        "speedup_p10": base / mean_time(found["p = 10 %"]),
    }
    details: dict[str, Any] = {name: [run._asdict() for run in runs] for name, runs in found.items()}
    finish(arguments, "time_to_accuracy", values, details, seed=0)


if __name__ == "__main__":
    main()
