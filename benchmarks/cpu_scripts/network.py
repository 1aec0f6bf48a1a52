"""What an all-reduce costs between hosts, and how much slower they compute meanwhile; rank 0 prints it as JSON.

foretrain lab up --hosts 2 --rate 1Gbps; then on each host, with torchrun's variables: network.py HOSTS RATE
"""

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from foretrain.lab.calibration import calibrate

TURNS, SHARE = 5, 0.4
SIZE = 1 << 20
"""Bytes of each all-reduce under way while computing is timed; as many as take about `SHARE` seconds in each turn."""


def main(hosts: int, rate: float) -> None:
    """Prints samples of all-reduces, and ``overlap``: how much longer computing takes during them, on each host.

    ``busy`` is the other side of it: how much longer an all-reduce takes while the hosts compute.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    samples = calibrate(hosts, rate, budget=6.0)
    overlap, busy = [], []
    count = max(3, min(20, round(SHARE * rate / (2 * SIZE))))
    for _ in range(TURNS):
        alone = exchanging(count)
        product, meanwhile = computing(count)
        overlap.append(meanwhile.product / product)
        busy.append(meanwhile.exchange / alone)
    told: list[object] = [None] * hosts
    dist.all_gather_object(told, (median(overlap), median(busy)))
    if dist.get_rank() == 0:
        print(json.dumps({"samples": msgspec.to_builtins(samples), "overlap_busy": told}), flush=True)
    dist.destroy_process_group()


class Meanwhile(NamedTuple):
    """Seconds of a small product and of an all-reduce, both at once."""

    product: float
    exchange: float


def computing(exchanges: int) -> tuple[float, Meanwhile]:
    """Seconds of a small product alone, and beside an all-reduce."""
    one = torch.rand(256, 256)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(200):
        torch.mm(one, one)
    alone = (time.perf_counter() - began) / 200
    count = 0

    def product() -> None:
        nonlocal count
        torch.mm(one, one)
        count += 1

    exchange = exchanging(exchanges, product)
    return alone, Meanwhile(exchanges * exchange / max(1, count), exchange)


def exchanging(count: int, step: Callable[[], None] | None = None) -> float:
    """Seconds of each of ``count`` all-reduces, while ``step`` is called again and again."""
    tensor = torch.zeros(SIZE // 4)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        while step and not work.is_completed():
            step()
        work.wait()
    return (time.perf_counter() - began) / count


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
