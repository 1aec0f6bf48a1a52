"""One worker of ps.py: pushes gradients in chunks of one size through a server, and says what CPU that takes.

    messages.py CHUNK STEPS

16 gradients of 1.5625 MiB, ready at once, by ``bytescheduler`` with partitions of CHUNK bytes and a credit of 1 MiB.
One line of JSON for every step: its seconds and the CPU seconds of this worker. Where the environment names servers'
processes, rank 0 adds theirs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from foretrain.comm.buffers import HostStaging
from foretrain.comm.ps.client.connection import Links
from foretrain.comm.ps.client.exchange import ServedExchange
from foretrain.lab.servers import PIDS
from foretrain.launch.command import SECRET, SERVERS
from foretrain.schedule import CostModel, Job, Spec
from foretrain.tasks import Task
from foretrain.units import NANOSECOND

TASKS, COUNT = 16, 25 << 14
"""Gradients, and float32 elements of each: 25 MiB in all."""
WARMUP = 3


def busy(pid: int) -> float:
    """CPU seconds that all threads of a process have taken, by the scheduler's own count in ns."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9


def exchange(links: Links, workers: int, chunk: int, landed: threading.Semaphore) -> ServedExchange:
    """An exchange whose gradients are plain memory."""
    tasks = tuple(Task(k, f"gradient {k}", 4 * COUNT, k) for k in range(TASKS))
    nothing = (0,) * TASKS
    job = Job(tasks, tuple(range(TASKS)), nothing, nothing, nothing, 0, CostModel(NANOSECOND, 1))
    staging = HostStaging([COUNT] * TASKS, ["float32"] * TASKS, list(range(TASKS)), tasks, workers, "messages")
    spec = Spec("bytescheduler", {"partition": chunk, "credit": 1 << 20})

    def failed(error: BaseException) -> None:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)

    return ServedExchange(
        *(job, spec, staging, links),
        epoch=0,
        landed=lambda task, used: landed.release(),
        failed=failed,
        peer_timeout=60.0,
        stall_timeout=60.0,
        origin=time.perf_counter_ns(),
    )


def main() -> None:
    """Connects, warms up, and measures."""
    chunk, steps = int(sys.argv[1]), int(sys.argv[2])
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    places = [each.rpartition(":") for each in os.environ[SERVERS].split(",")]
    links = Links([(host, int(port)) for host, _, port in places], bytes.fromhex(os.environ[SECRET]), "messages", rank)
    links.establish(30)
    landed = threading.Semaphore(0)
    exchanged = exchange(links, workers, chunk, landed)
    servers = [int(pid) for pid in os.environ[PIDS].split(",")] if not rank else []
    for step in range(WARMUP + steps):
        before, own, began = sum(map(busy, servers)), time.process_time(), time.perf_counter()
        exchanged.open(step, False)
        for task in reversed(range(TASKS)):
            exchanged.ready(task, True)
        for _ in range(TASKS):
            landed.acquire()
        if step >= WARMUP:
            told = {"seconds": time.perf_counter() - began, "worker": time.process_time() - own}
            print(json.dumps(told | {"servers": sum(map(busy, servers)) - before}), flush=True)
    exchanged.close()


if __name__ == "__main__":
    main()
