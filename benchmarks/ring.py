"""What an all-reduce takes over our ring, beside gloo's: the same bytes, the same hosts, interleaved in the same run.

Hosts are network namespaces of this machine, whose cables have a rate or none; then processes on one host's loopback.
A sample is one all-reduce of single-precision numbers that starts when the one before is done (alone), or one of many
of which two are in flight. A ratio is gloo's median time over the ring's: above 1, the ring is faster. Needs root.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from measure import finish, options, spread

KIB, MIB = 1 << 10, 1 << 20
PIPELINED = 6
"""Operations of a sample with two in flight."""
LONG, FEWER = 8 * MIB, 15
"""Bytes from which on an operation takes so long that there are no more than so many samples."""
_WORK = "FORETRAIN_RING_BENCHMARK"


@dataclass(frozen=True, slots=True)
class Place:
    """Hosts and their rate; None of them: processes of one host."""

    ranks: int
    rate: str | None
    sizes: tuple[int, ...]
    samples: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.rate or 'loopback'}" + (" rate" if self.rate == "none" else "")


def places(quick: bool) -> list[Place]:
    """Where it is measured; samples of large sizes take long on slow links."""
    if quick:
        return [
            Place(2, "2Gbps", (4 * KIB, 64 * KIB, MIB, 8 * MIB), 15),
            Place(4, "1Gbps", (4 * KIB, 64 * KIB, MIB), 15),
            Place(2, None, (4 * KIB, 64 * KIB, MIB, 8 * MIB), 15),
        ]
    sizes = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    return [
        *(Place(2, rate, sizes, 31) for rate in ("2Gbps", "10Gbps", "none", None)),
        *(Place(4, rate, sizes, 31) for rate in ("1Gbps", "none", None)),
    ]


# In each rank


def measure(place: Place) -> None:
    """Measure all sizes and print the times of rank 0, as JSON."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from foretrain.comm.collectives import RingCollectives, connect_peers
    from foretrain.comm.coordinator.addresses import local_address
    from foretrain.comm.coordinator.handshake import SECRET

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def exchange(address: tuple[str, int]) -> list[Any]:
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, address)
        return gathered

    secret, host = bytes.fromhex(os.environ[SECRET]), local_address(None, None)
    links = connect_peers(host, exchange, secret, rank, ranks, timeout=30)
    found: dict[str, dict[str, list[float]]] = {}
    with closing(RingCollectives(links, rank, ranks)) as ring:
        for size in place.sizes:
            arrays = [np.zeros(size // 4, np.float32) for _ in range(2)]
            tensors = [torch.from_numpy(each) for each in arrays]
            starts: dict[str, Callable[[int], Any]] = {
                "gloo": lambda turn, tensors=tensors: dist.all_reduce(tensors[turn % 2], async_op=True),
                "ring": lambda turn, arrays=arrays: ring.all_reduce(arrays[turn % 2]),
            }
            cases = {f"{name} {how}": (start, how) for how in ("alone", "two") for name, start in starts.items()}
            times: dict[str, list[float]] = {name: [] for name in cases}
            samples = place.samples if size < LONG else min(place.samples, FEWER)
            for turn in range(3 + samples):
                for name, (start, how) in cases.items():
                    dist.barrier()
                    took = sample(start, 1 if how == "alone" else PIPELINED)
                    if turn >= 3:
                        times[name].append(took)
            found[str(size)] = times
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def sample(start: Callable[[int], Any], count: int) -> float:
    """Seconds for each of ``count`` operations, at most two of them in flight."""
    began = time.perf_counter()
    flying = []
    for turn in range(count):
        flying.append(start(turn))
        if len(flying) == 2:
            flying.pop(0).wait()
    for work in flying:
        work.wait()
    return (time.perf_counter() - began) / count


# Around them


def measured(place: Place) -> dict[str, dict[str, list[float]]]:
    """The times of each case, by size."""
    lines: list[str] = []
    environment = {_WORK: json.dumps(asdict(place)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    if place.rate is None:
        _on_loopback(command, place.ranks, environment, lines)
    else:
        from foretrain.lab import Lab, launch

        with Lab.up("ring", place.ranks, place.rate) as lab:
            launch(lab, command, environment=environment, timeout=1200, on_line=lambda rank, line: lines.append(line))
    return json.loads(next(line for line in reversed(lines) if line.startswith("{")))


def _on_loopback(command: list[str], ranks: int, environment: dict[str, str], lines: list[str]) -> None:
    from foretrain.comm.coordinator.handshake import SECRET
    from foretrain.comm.rendezvous import free_port

    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        SECRET: secrets.token_hex(32),
    }
    started = [
        subprocess.Popen(
            command, env=os.environ | environment | common | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        for process in started:
            lines += process.communicate(timeout=1200)[0].splitlines()
            if process.returncode:
                raise SystemExit(f"a rank ended with {process.returncode}")
    finally:
        for process in started:
            process.kill()
            process.wait()


def table(place: Place, found: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Print what was found; return the ratios, by size and case."""
    ratios = {}
    print(f"\n{place}")
    for size, times in found.items():
        for how in ("alone", "two"):
            gloo, ring = (times[f"{name} {how}"] for name in ("gloo", "ring"))
            ratios[f"{size} {how}"] = ratio = median(gloo) / median(ring)
            shown = [spread([1e6 * each for each in values]) for values in (gloo, ring)]
            print(
                f"{int(size) // KIB:6d} KiB {how:5s}  gloo {shown[0]:>28s} µs  ring {shown[1]:>28s} µs  {ratio:5.2f} ×"
            )
    sys.stdout.flush()
    return ratios


def main() -> None:
    """Print a table for each place, and the RESULT line: the worst ratio over all places and both ways."""
    if work := os.environ.get(_WORK):
        given = json.loads(work)
        measure(Place(**{**given, "sizes": tuple(given["sizes"])}))
        return
    arguments = options(__doc__ or "")
    from foretrain.comm.collectives import runners

    runners.runner()  # so that no rank compiles it
    details, ratios = [], []
    for place in places(arguments.quick):
        found = measured(place)
        ratios.append(table(place, found))
        details.append({"place": asdict(place), "seconds": found})

    def worst(size: int) -> float:
        return min(found[f"{size} {how}"] for found in ratios for how in ("alone", "two"))

    large = [ratio for found in ratios for key, ratio in found.items() if int(key.split()[0]) >= MIB]
    values = {
        "ring_vs_gloo_1mib": worst(MIB),
        "ring_vs_gloo_64kib": worst(64 * KIB),
        "ring_vs_gloo_4kib": worst(4 * KIB),
        "ring_vs_gloo_from_1mib": min(large),
    }
    finish(arguments, "ring", values, details)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
