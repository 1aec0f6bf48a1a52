"""What `eflops.py` prints of its three parts: tables, paper against ours, and what decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import mean, median
from typing import Any, TypeAlias

import eflops_network as network
import eflops_scaling as scaling
import eflops_server as server
from eflops_plots import Chart
from rich.console import Console
from rich.progress import track
from rich.table import Table

from foretrain.network.deployment import Deployment
from foretrain.units import MICROSECOND, Time

Part: TypeAlias = tuple[dict[str, float], Any, Chart]
"""Values of the RESULT line, details, and the figure."""

SERVER, NETWORK = 11.3, 6.08
"""Published, "up to"."""
BIG = 25_000_000
"""From this size on rates decide, and below it rounds do."""
CONSOLE = Console(width=160)
FABRICS = ("two-tier", "three-tier", "bigraph")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    made = Table(*columns, title=title, title_justify="left")
    for column in made.columns[1:]:
        column.justify = "right"
    for row in rows:
        made.add_row(*map(str, row))
    CONSOLE.print(made)


def server_part() -> Part:
    """(a): the server."""
    cases = [(given, gpus) for given in server.INPUTS for gpus in server.GPUS]
    rows = [server.row(*case) for case in track(cases, "servers", transient=True)]
    found = {(row.input, row.gpus): row for row in rows}
    cells: Mapping[str, Callable[[server.Row], str]] = {
        "(a) one GPU's flow to another server: EFLOPS over baseline": lambda row: f"{row.gain:.2f}",
        "(a) the same in GB/s": lambda row: f"{row.baseline / 1e9:.2f} / {row.beside / 1e9:.2f}",
        "(a) all-reduce, halving-doubling, far first: gain": lambda row: f"{row.all_reduce:.2f}",
    }
    names = [given.name for given in server.INPUTS]
    for title, cell in cells.items():
        lines = [[name, *(cell(found[name, gpus]) for gpus in server.GPUS)] for name in names]
        table(title, ("input", *(f"k = {gpus}" for gpus in server.GPUS)), lines)
    paced = (one for one in server.INPUTS if 0 < one.copied < float("inf"))
    print("copied to each GPU, GB/s: " + "; ".join(f"{one.name} {one.copied / 1e9:.2f}" for one in paced))
    print(f"64-byte packets leave gradients {server.SMALL_PACKETS:.2f} of PCIe's payload")
    _print_algorithms()
    alone, best = (found[given.name, 8] for given in (server.NONE, server.MIXED))
    print(
        f"\ngain of the server: paper up to {SERVER}; ours {best.gain:.2f}, ratio {best.gain / SERVER:.2f},"
        f" with 8 GPUs, float32 images and mixed precision; {alone.gain:.2f} without input"
    )
    first = {name: min((k for k in server.GPUS if found[name, k].gain >= SERVER), default=0) for name in names}
    for name, gpus in first.items():
        print(f"  {SERVER}× with {name}: {f'from k = {gpus} on' if gpus else 'not up to k = 8'}")
    print(server.WHY)
    drawn = (server.PACKETS, server.MIXED, server.FULL, server.NONE)
    values = {
        "server_gain_k8": alone.gain,
        "server_gain_k8_input": best.gain,
        "server_allreduce_gain_k8_input": best.all_reduce,
        "server_first_k": first[server.MIXED.name],
    }
    chart = Chart(
        "eflops-server",
        "Gain of a NIC beside each GPU",
        "GPUs behind one NIC in the baseline",
        "gain",
        {given.name: [(k, found[given.name, k].gain) for k in server.GPUS] for given in drawn},
        marks=tuple(server.GPUS),
        top=16,
        rule=(SERVER, "published: up to 11.3"),
        log=False,
    )
    return values, [asdict(row) for row in rows], chart


def _print_algorithms() -> None:
    found = [(given, server.by_algorithm(given)) for given in (server.NONE, server.MIXED)]
    rows = []
    for name in found[0][1]:
        pairs = [times[name] for _, times in found]
        rows.append([name, *(f"{1e3 * a:.1f} / {1e3 * b:.1f} = {a / b:.2f}" for a, b in pairs)])
    columns = ("baseline / EFLOPS, ms", *(given.name for given, _ in found))
    table("(a) all-reduce of 102 MB, 16 servers of 8 GPUs", columns, rows)


def network_part(alphas: Sequence[Time], seeds: int) -> Part:
    """(b): BiGraph and HDRM."""
    slowdowns, times = _trials(alphas, seeds)
    _print_slowdowns(slowdowns)
    ours = {(h, s, a): network.hdrm(h, s, a) for h in network.HOSTS for s in network.SIZES for a in alphas}
    gains = {key: [time / ours[key[0], *key[3:]] for time in found] for key, found in times.items()}
    for alpha in alphas:
        _print_gains(gains, ours, alpha)
    plain = {key: network.hdrm(*key, mapped=False) / time for key, time in ours.items()}
    table(
        "(b) HDRM on the BiGraph without its mapping, rank r on host r: time over HDRM's",
        ("hosts", "α, µs", *(f"{size // 10**6} MB" for size in network.SIZES)),
        (
            [h, a // MICROSECOND, *(f"{plain[h, s, a]:.2f}" for s in network.SIZES)]
            for h in network.HOSTS
            for a in alphas
        ),
    )
    error = max(abs(time / network.closed_form(*key) - 1) for key, time in ours.items())
    print(f"HDRM on the BiGraph against T_HDRM: largest relative difference {error:.1e}")
    largest = dict(_largest(gains))
    print(network.WHY)
    values = {"hdrm_error": error, "hdrm_identity_slowdown": plain[512, 100_000_000, alphas[0]], **largest}
    names = {case: case if "ring" in case else f"halving-doubling, {case}" for case in network.CASES}
    chart = Chart(
        "eflops-network",
        "All-reduce on a two-tier fat tree, 512 hosts, α = 2 µs",
        "MB",
        "time over that of HDRM on a BiGraph",
        {
            name: [(size / 1e6, median(gains[512, "two-tier", case, size, alphas[0]])) for size in network.SIZES]
            for case, name in names.items()
        },
        marks=(1, 25, 100, 1024),
        top=16,
        rule=(NETWORK, "published: up to 6.08"),
    )
    return values, [(*key, found) for key, found in times.items()], chart


def _trials(alphas: Sequence[Time], seeds: int) -> tuple[dict[Any, Any], dict[Any, list[float]]]:
    """Slowdowns by (hosts, fabric, case), and seconds by (hosts, fabric, case, size, alpha)."""
    slowdowns, times = {}, {}
    grid = [(h, f, c) for h in network.HOSTS for f in FABRICS for c in network.CASES]
    for hosts, name, case in track(grid, "networks", transient=True):
        # Rings of 512 that share links take half a second each.
        many = seeds if hosts < 512 or "ring" not in case else max(2, seeds // 3)
        trials = network.Trials.of(network.fabric(name, hosts), case, hosts, many)
        slowdowns[hosts, name, case] = trials.slowdowns()
        if name != "bigraph":
            for size in network.SIZES:
                times |= {(hosts, name, case, size, alpha): trials.times(size, alpha) for alpha in alphas}
    return slowdowns, times


def _print_slowdowns(found: Mapping[tuple[int, str, str], tuple[list[float], list[float]]]) -> None:
    rows = []
    for (hosts, name, case), (simulated, stepped) in sorted(found.items(), key=lambda item: FABRICS.index(item[0][1])):
        before = network.SLOWDOWNS.get((hosts, case)) if name == "two-tier" else None
        ratio = f"{mean(stepped) / before:.2f}" if before else ""
        middle = network.spread(stepped, mean(stepped)), ratio, network.spread(simulated, mean(simulated))
        rows.append((name, hosts, case, before or "", *middle))
    columns = ("fabric", "hosts", "all-reduce", "reference", "lock step", "ratio", "simulated")
    table("(b) bandwidth alone: time over 2(P−1)/P · S/B, mean (least–most) of seeds", columns, rows)


def _print_gains(gains: Mapping[Any, list[float]], ours: Mapping[Any, float], alpha: Time) -> None:
    rows = []
    for name in FABRICS[:2]:
        for hosts in network.HOSTS:
            for size in network.SIZES:
                found = [gains[hosts, name, case, size, alpha] for case in network.CASES]
                cells = [network.spread(values, median(values)) for values in found]
                rows.append((name, hosts, size // 10**6, f"{1e3 * ours[hosts, size, alpha]:.3f}", *cells))
    title = f"(b) time over that of HDRM on the BiGraph, α = {alpha // MICROSECOND} µs, median (least–most) of seeds"
    table(title, ("fabric", "hosts", "MB", "HDRM, ms", *network.CASES), rows)


def _largest(gains: Mapping[Any, list[float]]) -> Iterator[tuple[str, float]]:
    for kind, ring in (("ring", True), ("hd", False)):
        for label, sizes in (("large", range(BIG, 1 << 40)), ("small", range(BIG))):
            some = {k: median(v) for k, v in gains.items() if k[2].startswith("ring") == ring and k[3] in sizes}
            hosts, name, case, size, alpha = at = max(some, key=some.__getitem__)
            print(
                f"largest median gain over {kind}, {label} data: paper up to {NETWORK}, ours {some[at]:.2f},"
                f" ratio {some[at] / NETWORK:.2f}: {hosts} hosts, {name}, {case}, {size // 10**6} MB,"
                f" α {alpha // MICROSECOND} µs"
            )
            yield f"gain_{kind}_{label}", some[at]


def scaling_part(counts: Sequence[int], seeds: int) -> Part:
    """(c): ResNet-50."""
    cases = [(p, g, s) for p in ("fp32", "fp16") for g in counts for s in ("EFLOPS", "ring", "ring, any order")]
    # A ring of 10,000 whose servers stand in any order shares links in 200 million steps.
    cases = [case for case in cases if case[1] <= 512 or case[2] != "ring, any order"]
    found = {
        (p, g, s): scaling.scaling(g, _systems(s, g, p, seeds), p)
        for p, g, s in track(cases, "scaling", transient=True)
    }
    rows = []
    for (p, g, s), one in found.items():
        shares = [f"{value:.1%}" for value in (one.optimum, one.ddp, one.bytescheduler)]
        rows.append((p, f"{g:,}", s, f"{1e3 * one.exchange:.1f}", *shares))
    columns = ("precision", "GPUs", "system", "all-reduce, ms", "T*", "DDP", "ByteScheduler")
    table("(c) ResNet-50, batch 64 a GPU: efficiency, and the time of an all-reduce of everything", columns, rows)
    print("near-linear: no number of the paper was to be had; ours, DDP in mixed precision:")
    for g in (512, 10_000):
        e, r = found["fp16", g, "EFLOPS"].ddp, found["fp16", g, "ring"].ddp
        print(f"  {g:,} GPUs: EFLOPS {e:.1%}, baseline {r:.1%}, ratio {e / r:.2f}")
    if len(counts) == len(scaling.BIGRAPHS):
        _print_uneven()
    print(scaling.WHY)
    values = {f"efficiency_{s.lower()}_{g}": found["fp16", g, s].ddp for s in ("EFLOPS", "ring") for g in (512, 10_000)}
    lines = {
        f"{s}, {p}": [(g, found[p, g, s].ddp) for g in counts if (p, g, s) in found]
        for s in ("EFLOPS", "ring", "ring, any order")
        for p in ("fp32", "fp16")
    }
    marks = (8, 64, 512, 10_000)
    chart = Chart("eflops-scaling", "ResNet-50 under DDP", "GPUs", "efficiency", lines, marks=marks, top=1.0)
    return values, [(*key, asdict(one)) for key, one in found.items()], chart


def _print_uneven() -> None:
    even, uneven = (scaling.eflops_system(10_000, shape) for shape in (scaling.BIGRAPHS[10_000], scaling.SMALLEST))
    size = scaling.model("fp16").size
    ratio = uneven.duration("all_reduce", size) / even.duration("all_reduce", size)
    print(f"HDRM of 10,000 GPUs on {uneven.topology.name}, unevenly filled, over {even.topology.name}: {ratio:.2f}")


def _systems(name: str, gpus: int, precision: str, seeds: int) -> list[Deployment]:
    if name == "EFLOPS":
        return [scaling.eflops_system(gpus)]
    if name == "ring":
        return [scaling.baseline_system(gpus, precision)]
    return [scaling.baseline_system(gpus, precision, seed=seed) for seed in range(seeds)]
