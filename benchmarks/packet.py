"""The packet simulator: hops of data packets a second, against the same simulation one event after the other.

DCTCP with ECN, finite buffers, drops and retransmission, on links of 100 Gb/s that take 500 ns. What is counted are the
hops of data packets; acknowledgements cross as many. Both kernels must find the same to the ps. Times include loading.
--full: all cases, memory at 8,192 hosts (the most that a process of its own has had), and the first simulation of a
process without and with a cache of kernels, importing numba apart.
"""

from __future__ import annotations

import functools
import tempfile
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from measure import child, finish, interleaved, options, spread
from rich.console import Console
from rich.progress import track

RATE = 12.5e9
LATENCY = 500_000
PACKET = 1538
BUFFER, MARK = 300 * PACKET, 65 * PACKET
SEED = 0


class Case(NamedTuple):
    """A workload: ``"permutation"``, ``"incast"``, or an algorithm of `foretrain.collective`; ``size`` in bytes."""

    kind: str
    hosts: int
    size: float

    def __str__(self) -> str:
        return f"{self.kind} {self.hosts:,d}"


BASE = Case("permutation", 128, 4e6)
LARGE = Case("permutation", 1024, 1e6)
OTHERS = (Case("incast", 128, 4e5), Case("ring", 128, 16e6), Case("direct", 128, 4e6))
HUGE = Case("permutation", 8192, 1e5)


@functools.lru_cache(maxsize=1)
def fabric(hosts: int) -> Any:
    """A leaf-spine of 16 hosts a leaf up to 128 hosts, a fat tree above."""
    from foretrain.network.fabrics.clos import fat_tree, leaf_spine

    if hosts <= 128:
        return leaf_spine(hosts // 16, 16, RATE, latency=LATENCY)
    return fat_tree(next(k for k in range(4, 1000, 2) if k**3 // 4 >= hosts), RATE, latency=LATENCY)


def program(case: Case) -> Any:
    """The flows of ``case``."""
    from foretrain.collective import build
    from foretrain.network.program import Program, place
    from foretrain.network.routing import Ecmp

    topology, random = fabric(case.hosts), np.random.default_rng(SEED)
    route = Ecmp(topology, seed=SEED)
    if case.kind not in ("permutation", "incast"):
        operation = "all_to_all" if case.kind == "direct" else "all_reduce"
        return place(build(case.kind, operation, case.hosts), case.size, route)
    ranks = topology.ranks[: case.hosts]
    if case.kind == "incast":
        sources, targets = ranks[1:], np.repeat(ranks[:1], len(ranks) - 1)
    else:
        order = random.permutation(len(ranks))
        sources, targets = ranks[order], ranks[np.roll(order, 1)]
    paths = route.paths(sources, targets, np.arange(len(sources), dtype=np.int32))
    return Program.of(paths, np.full(len(sources), case.size))


def simulated(case: Case, what: Any, kernel: str = "windows") -> Any:
    """What becomes of ``what``, the program of ``case``."""
    from foretrain.network.packet import Packets, Queues

    switches = Queues(limit=BUFFER, mark_from=MARK, mark_to=MARK)
    return Packets(fabric(case.hosts), switches=switches, kernel=kernel, seed=SEED).run(what)


def alike(case: Case, what: Any) -> int:
    """Hops of data packets; both kernels must find the same."""
    ours, twin = (simulated(case, what, kernel) for kernel in ("windows", "events"))
    assert (ours.finish == twin.finish).all(), f"{case}: windows and events disagree"
    assert (ours.counts == twin.counts).all(), f"{case}: windows and events disagree"
    return int(ours.data_hops)


def compared(case: Case, samples: int, warmup: int) -> dict[str, Any]:
    """Both kernels in turns."""
    what = program(case)
    hops = alike(case, what)
    runs = {kernel: partial(simulated, case, what, kernel) for kernel in ("windows", "events")}
    times = interleaved(runs, samples=samples, warmup=warmup)
    return {"hops": hops, **{kernel: [hops / each / 1e6 for each in found] for kernel, found in times.items()}}


def alone(case: Case) -> dict[str, float]:
    """One run in a process of its own."""
    code = (
        "import json, resource, time, packet\n"
        f"case = packet.Case({case.kind!r}, {case.hosts}, {case.size})\n"
        "packet.simulated(packet.Case('permutation', 16, 1e4), packet.program(packet.Case('permutation', 16, 1e4)))\n"
        "what = packet.program(case)\n"
        "began = time.perf_counter()\n"
        "found = packet.simulated(case, what)\n"
        "took = time.perf_counter() - began\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "print(json.dumps({'hops': found.data_hops, 'seconds': took, 'memory': peak}))\n"
    )
    return child(code)


START = """
import json, time
import numba, packet
case = packet.Case("permutation", 16, 1e4)
what = packet.program(case)
began = time.perf_counter()
packet.simulated(case, what)
print(json.dumps({"kernels": time.perf_counter() - began}))
"""


def starts() -> dict[str, float]:
    """Seconds of a first simulation, without and with a cache of kernels; routing has been compiled before."""
    with tempfile.TemporaryDirectory() as folder:
        cold = child(START, NUMBA_CACHE_DIR=folder)["kernels"]
        warm = [child(START, NUMBA_CACHE_DIR=folder)["kernels"] for _ in range(3)]
    return {"cold": cold, "cached": median(warm)}


def main() -> None:
    """Prints rates, ratios, start-up and memory, and the RESULT line."""
    arguments = options(__doc__ or "")
    console = Console(highlight=False, soft_wrap=True)
    details: dict[str, Any] = {}
    for case in track((BASE, LARGE), "in turns", transient=True, console=console):
        few = case is LARGE and arguments.quick
        details[str(case)] = found = compared(case, samples=5 if few else 15, warmup=1)
        ratio = median(found["windows"]) / median(found["events"])
        console.print(
            f"{case!s:18s}{found['hops']:12,d} hops, million a second: windows {spread(found['windows'])}, "
            f"events {spread(found['events'])}, ratio {ratio:.2f}"
        )
    if not arguments.quick:
        for case in (*OTHERS, HUGE):
            with console.status(str(case)):
                details[str(case)] = found = alone(case)
            rate, peak = found["hops"] / found["seconds"] / 1e6, found["memory"] / 2**30
            console.print(f"{case!s:18s}{found['hops']:12,.0f} hops, {rate:.2f} million a second, {peak:.2f} GiB")
        with console.status("starting without a cache of kernels"):
            details["start"] = start = starts()
        console.print(f"first simulation {start['cold']:.1f} s without cached kernels, {start['cached']:.2f} s with")
    base, large = details[str(BASE)], details[str(LARGE)]
    values = {
        "mhops_128": median(base["windows"]),
        "mhops_1024": median(large["windows"]),
        "vs_heap": median(base["windows"]) / median(base["events"]),
    }
    finish(arguments, "packet", values, details, seed=SEED)


if __name__ == "__main__":
    main()
