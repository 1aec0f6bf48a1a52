"""Tells what a script sees of the process it runs in, and of virtual time."""

import argparse
import atexit
import datetime
import json
import os
import sys
import threading
import time

import torch
from kit.layers import trained
from torch.utils.data import DataLoader, TensorDataset

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")


def polled(clock) -> int:
    """How often one reads ``clock`` until a millisecond is over."""
    begin, reads = clock(), 1
    while clock() - begin < 1e-3:
        reads += 1
    return reads


def loaded(**options) -> int:
    rows = DataLoader(TensorDataset(torch.ones(64, 256)), batch_size=16, **options)
    return sum(int(row.cuda(non_blocking=True).shape[0]) for (row,) in rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float)
    parser.add_argument("--status", type=int, default=0)
    args = parser.parse_args()
    atexit.register(lambda: print(json.dumps({"atexit": True})))
    threading.Thread(target=lambda: print(json.dumps({"thread": True}))).start()
    layer = trained(steps=3)

    begin, today = time.perf_counter(), datetime.datetime.now()
    time.sleep(1.5)
    slept = time.perf_counter() - begin, (datetime.datetime.now() - today).total_seconds()

    event, queries = torch.cuda.Event(), 1
    layer(torch.randn(1 << 16, 256, device="cuda"))
    event.record()
    while not event.query():
        queries += 1

    told = {
        "rate": args.rate,
        "name": __name__,
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "gpus": torch.cuda.device_count(),
        "slept": slept,
        "polled": [polled(clock) for clock in (time.time, time.monotonic, time.process_time)],
        "instant": isinstance(datetime.datetime.strptime("2020", "%Y"), datetime.datetime),
        "queries": queries,
        "rows": [loaded(num_workers=workers, pin_memory=workers > 0) for workers in (0, 2)],
    }
    print(json.dumps(told))
    sys.exit(args.status)


if __name__ == "__main__":
    main()
