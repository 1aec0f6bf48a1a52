"""A parameter server of NumPy and ZeroMQ, as one writes it in an afternoon: what ps.py compares the CPU of a byte with.

    naive.py server WORKERS CHUNK COUNT STEPS       prints its port, and at its end its CPU seconds in each step
    naive.py worker PORT CHUNK COUNT STEPS          prints its own

In every step each worker pushes COUNT chunks of CHUNK bytes of float32, and gets the sum of each when all have pushed.
Nothing is copied but by ZeroMQ itself; there is no authentication, no schedule, and nobody may be lost.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

WARMUP = 3


def serve(workers: int, chunk: int, count: int, steps: int) -> None:
    """Adds up what comes, and answers all when it has come from all."""
    sums = np.zeros((2, count, chunk // 4), np.float32)  # of two steps: a worker may be one ahead
    missing = np.full((2, count), workers)
    used, began = [], time.process_time()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.set_hwm(0)
        print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
        peers: set[bytes] = set()
        for step in range(WARMUP + steps):
            place = step % 2
            for _ in range(count * workers):
                who, number, frame = router.recv_multipart(copy=False)
                peers.add(who.bytes)
                key = int.from_bytes(number.bytes, "little")
                place, index = key // count % 2, key % count
                total, values = sums[place, index], np.frombuffer(frame.buffer, np.float32)
                if missing[place, index] == workers:
                    total[:] = values
                else:
                    total += values
                missing[place, index] -= 1
                if missing[place, index] == 0:
                    missing[place, index] = workers
                    for peer in peers:
                        router.send_multipart([peer, number.bytes, total], copy=False)
            used.append(time.process_time() - began)
            began = time.process_time()
        for _ in range(workers):
            router.recv_multipart()  # they have everything
    print(json.dumps(used[WARMUP:]), flush=True)


def work(port: int, chunk: int, count: int, steps: int) -> None:
    """Pushes everything at once, and takes sums as they come."""
    gradients = np.ones((count, chunk // 4), np.float32)
    used, began = [], time.process_time()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set_hwm(0)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        sums: Any = np.empty_like(gradients)
        for step in range(WARMUP + steps):
            for index in range(count):
                key = (step * count + index).to_bytes(8, "little")
                dealer.send_multipart([key, gradients[index]], copy=False)
            for _ in range(count):
                number, frame = dealer.recv_multipart(copy=False)
                index = int.from_bytes(number.bytes, "little") % count
                sums[index] = np.frombuffer(frame.buffer, np.float32)
            used.append(time.process_time() - began)
            began = time.process_time()
        dealer.send_multipart([b"", b""])
    print(json.dumps(used[WARMUP:]), flush=True)


def main() -> None:
    """Serves, or works."""
    role: Callable[..., None] = {"server": serve, "worker": work}[sys.argv[1]]
    role(*map(int, sys.argv[2:]))


if __name__ == "__main__":
    main()
