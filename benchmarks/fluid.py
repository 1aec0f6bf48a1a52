"""The fluid simulator: time, events a second, batches and memory, against a simulator that does as the textbook says.

What is simulated is in traffic.py, the baseline in naive_fluid.py. Ratios are of times over the same simulated time, in
one interleaved run, without loading on our side; where the baseline would take minutes it stops after some batches, and
ours at that instant. Before that, both must give the same makespan on smaller cases, to 1e-9.

Building topology, routes and program is not measured but shown. Memory is the most that a process of its own has had,
with Python, numba and the topology. Cold start is a process with an empty cache of kernels, from the import of the
simulator to the end of a first ring; that of numba itself is shown apart.
"""

from __future__ import annotations

import resource
import tempfile
import time
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from measure import child, finish, interleaved, options, spread
from rich.console import Console
from rich.progress import track

GB = 1e9
SEED = 0
LIVE, ADDS, ASKED = 1000, 300, 15
"""Programs that run while others are added, and asked about; how many of each."""


class Case(NamedTuple):
    """A workload.

    Attributes:
        kind: ``"mix"``, an algorithm of `foretrain.collective`, or one ``"disturbed"``.
        size: GPUs.
    """

    kind: str
    size: int

    def make(self) -> Any:
        """What is to be simulated."""
        import traffic

        if self.kind == "mix":
            return traffic.mix(self.size, seed=SEED)
        name, _, disturbed = self.kind.partition(", ")
        whole = traffic.collective(name, self.size, GB, seed=SEED)
        return traffic.disturbed(whole) if disturbed else whole

    def __str__(self) -> str:
        return f"{self.kind} {self.size:,d}"


SHORT = (
    Case("ring", 128),
    Case("ring", 1024),
    Case("halving_doubling", 1024),
    Case("direct", 128),
    Case("mix", 1024),
)
"""Less than a second each: measured 15 times."""
LONG = (
    Case("ring", 4096),
    Case("ring", 16384),
    Case("ring, disturbed", 1024),
    Case("halving_doubling", 8192),
    Case("direct", 512),
    Case("mix", 4096),
)
"""Measured once each, in a process of their own, with --full as well as the last one."""
LAST = Case("mix", 16384)
COMPARED = ((Case("mix", 1024), 200, 15), (Case("direct", 128), 1 << 62, 5))
"""Cases for the baseline, after how many batches it stops, and samples: it needs more than a second for the second."""
ALIKE = (Case("ring", 16), Case("halving_doubling", 64), Case("direct", 32), Case("mix", 128))
"""Cases on which both must agree."""


def measured(case: Case) -> dict[str, float]:
    """One run of ``case`` in this process."""
    from foretrain.network.fluid import Fluid

    began = time.perf_counter()
    made = case.make()
    built = time.perf_counter()
    network = Fluid(made.capacity)
    handle = network.add(made.program)
    added = time.perf_counter()
    network.advance()
    ended = time.perf_counter()
    return {
        "build": built - began,
        "add": added - built,
        "run": ended - added,
        "seconds": ended - built,
        "flows": len(made.program),
        "makespan": float(handle.finish.max()),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
        **network.effort,
    }


def alone(case: Case) -> dict[str, float]:
    """`measured` in a process of its own, with kernels from the cache, so that memory is that of the case."""
    # A first small case loads the kernels, which is not what is measured.
    return child(
        "import json, fluid\n"
        "fluid.measured(fluid.Case('mix', 128))\n"
        f"print(json.dumps(fluid.measured(fluid.Case({case.kind!r}, {case.size}))))"
    )


START = """
import json, time
began = time.perf_counter()
import numba
numba_ = time.perf_counter() - began
import numpy as np
from foretrain.network.fluid import run
from foretrain.network.program import Paths, Program
ring = np.arange(3, dtype=np.int32)
program = Program.of(Paths(ring, ring[:2]), np.ones(2), steps=ring[1:] * 0 + 2, first=ring, after=1 - ring[:2],
                     lag=0 * ring[:2])
run(program, np.ones(2))
print(json.dumps({"numba": numba_, "kernels": time.perf_counter() - began - numba_}))
"""


def starts() -> dict[str, float]:
    """Seconds to the end of a first simulation, without and with a cache of kernels, and those of importing numba."""
    with tempfile.TemporaryDirectory() as folder:
        cold = child(START, NUMBA_CACHE_DIR=folder)
        warm = [child(START, NUMBA_CACHE_DIR=folder) for _ in range(3)]
    return {
        "cold": cold["kernels"],
        "cached": median(one["kernels"] for one in warm),
        "numba": median(one["numba"] for one in warm),
    }


def against_naive() -> dict[str, dict[str, Any]]:
    """Times of both over the same simulated time; the ratio is that of the medians."""
    import naive_fluid

    from foretrain.network.fluid import run

    for case in track(ALIKE, "same results?", transient=True):
        program, capacity = case.make()
        ours, theirs = run(program, capacity).finish.max(), naive_fluid.simulate(program, capacity).finish.max()
        assert abs(ours / theirs - 1) <= 1e-9, f"{case}: {ours} and {theirs} ps"
    found = {}
    for case, batches, samples in track(COMPARED, "against the baseline", transient=True):
        program, capacity = case.make()
        outcome = naive_fluid.simulate(program, capacity, batches)
        ours = Ours(case.make(), int(outcome.time) + 1)
        naive = partial(naive_fluid.simulate, program, capacity, batches)
        times = interleaved({"naive": naive, "ours": ours.run}, samples=samples, warmup=1)["naive"]
        found[str(case)] = {
            "batches": outcome.batches,
            "our_batches": ours.batches,
            "whole": outcome.batches < batches,
            "ratio": median(times) / median(ours.seconds[1:]),
            "naive": times,
            "ours": ours.seconds[1:],
        }
    return found


class Ours:
    """Our simulator on ``made`` up to a time; `seconds` of each run, loading apart."""

    def __init__(self, made: Any, until: int) -> None:
        self.made, self.until, self.batches = made, until, 0
        self.seconds: list[float] = []

    def run(self) -> None:
        """One more run."""
        from foretrain.network.fluid import Fluid

        network = Fluid(self.made.capacity)
        network.add(self.made.program)
        began = time.perf_counter()
        network.advance(self.until)
        self.seconds.append(time.perf_counter() - began)
        self.batches = network.effort["batches"]


def online() -> dict[str, float]:
    """Programs added and predictions made each second while a thousand others run: small transfers in a leaf-spine."""
    import numpy as np
    import traffic

    from foretrain.network.fluid import Fluid
    from foretrain.network.program import Program

    random = np.random.default_rng(SEED)
    route = traffic.fabric(1024, SEED)
    pairs = np.stack([random.permutation(1024)[: 2 * 4].reshape(2, 4) for _ in range(LIVE + ADDS)], axis=1)
    sources, targets = route.topology.ranks[pairs.reshape(2, -1)]
    routed = route.paths(sources, targets, np.zeros(len(sources), np.int32))
    programs = [
        Program.of(routed.gather(np.arange(4 * i, 4 * i + 4)), random.uniform(1e8, 1e9, 4)) for i in range(LIVE + ADDS)
    ]
    network = Fluid(route.topology.capacity)
    for one in programs[:LIVE]:
        network.add(one)
    network.advance(1_000_000)
    began = time.perf_counter()
    handles = []
    for number, one in enumerate(programs[LIVE:]):
        handles.append(network.add(one, at=1_000_000 + 1000 * number))
        if len(network.running) > LIVE:
            network.cancel(network.running[0])
    added = time.perf_counter()
    # A change before each question: a prediction that nothing disturbs is looked up.
    for handle in handles[:ASKED]:
        network.set_capacity([0], float(route.topology.capacity[0]))
        network.predict(handle)
    return {
        "adds_per_s": ADDS / (added - began),
        "predictions_per_s": ASKED / (time.perf_counter() - added),
    }


def show(console: Console, case: Case, found: dict[str, float], times: str = "") -> None:
    """One line of the table."""
    rate = found["events"] / found["run"]
    console.print(
        f"{case!s:24s}{times or format(found['seconds'], '.4g'):>30s} s {found['events']:12,.0f} events"
        f" {rate / 1e6:6.2f} M/s {found['batches']:12,.0f} batches {found['memory'] / 1e9:6.2f} GB"
        f"   (built in {found['build']:.2f} s, added in {found['add']:.3f} s)",
        highlight=False,
        soft_wrap=True,
    )


def main() -> None:
    """Prints the table, start-up, ratios, online use, and the RESULT line."""
    import traffic

    arguments = options(__doc__ or "")
    console = Console()
    with console.status("starting without a cache of kernels"):
        start = starts()
    console.print(
        f"first simulation: {start['cold']:.1f} s without cached kernels, {start['cached']:.2f} s with;"
        f" besides, {start['numba']:.2f} s for numba itself",
        highlight=False,
    )
    details: dict[str, Any] = {"start": start, "cases": {}}
    programs = {case: case.make() for case in track(SHORT, "building", transient=True)}
    traffic.fabric.cache_clear()  # Collecting garbage between samples would take longer than they do.
    times = interleaved({str(case): partial(simulated, made) for case, made in programs.items()}, samples=15, warmup=2)
    for case in SHORT:
        found = alone(case)
        details["cases"][str(case)] = found | {"times": times[str(case)]}
        show(console, case, found, spread(times[str(case)]))
    values = {key: median(times[str(case)]) for key, case in (("ring1024_s", SHORT[1]), ("hd1024_s", SHORT[2]))}
    if not arguments.quick:
        console.print("once each:")
        for case in (*LONG, LAST):
            with console.status(str(case)):
                found = alone(case)
            details["cases"][str(case)] = found
            show(console, case, found)
        values["mix16384_s"] = details["cases"][str(LAST)]["seconds"]
    compared = against_naive()
    for name, one in compared.items():
        part = "the whole run" if one["whole"] else f"the first {one['batches']:,d} batches"
        micro = median(one["ours"]) / one["our_batches"] * 1e6
        console.print(f"{name}: {one['ratio']:.1f} × naive over {part}; {micro:.2f} µs a batch", highlight=False)
    live = online()
    console.print(
        f"with {LIVE:,d} live programs of 4 flows: {live['adds_per_s']:,.0f} programs added and cancelled a second,"
        f" {live['predictions_per_s']:,.1f} predictions after a change a second",
        highlight=False,
    )
    details |= {"compared": compared, "online": live}
    ratios = {"mix1024_vs_naive": compared["mix 1,024"]["ratio"], "a2a128_vs_naive": compared["direct 128"]["ratio"]}
    finish(arguments, "fluid", ratios | values, details, seed=SEED)


def simulated(made: Any) -> None:
    """Runs a whole program, its loading included."""
    from foretrain.network.fluid import run

    run(made.program, made.capacity)


if __name__ == "__main__":
    main()
