"""Trains two steps on each rank, goes wrong in one way, and would train another."""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

fault, rank = sys.argv[1], int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
layer = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(layer.parameters(), 0.1)


def step() -> None:
    layer(torch.randn(64, 256, device="cuda")).sum().backward()
    dist.all_reduce(layer.weight.grad)
    optimizer.step()
    torch.cuda.synchronize()


step()
step()
if fault == "raise on one" and rank == 1:
    raise ValueError("only here")
if fault == "raise":
    count = torch.randint(9, (4096, 4096), device="cuda").sum().item()
    raise ValueError(f"everywhere, as of {count}")
if fault == "exit early" and rank == 1:
    sys.exit()
if fault == "exits" and rank == 1:
    sys.exit(3)
if fault == "polls" and rank == 1:
    sys.exit()
if fault == "polls":
    work = dist.all_reduce(layer.weight.grad, async_op=True)
    while not work.is_completed():
        pass
if fault == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if fault == "leaves at once" and rank == 1:
    os._exit(0)
if fault == "mismatch":
    dist.all_reduce(layer.weight.data) if rank else dist.broadcast(layer.weight.data, 0)
if fault == "memory":
    torch.empty(200 << 30, dtype=torch.uint8, device="cuda")
if fault == "needs data":
    torch.repeat_interleave(torch.randint(9, (4096, 4096), device="cuda").flatten())
if fault == "waits for a note":
    store = dist.TCPStore("127.0.0.1", 0, world_size=2, is_master=rank == 0)
    store.set("note of rank 0", "here")
    dist.distributed_c10d._get_default_store().wait(["note of rank 1"], timedelta(seconds=2))
if fault == "waits for a value":
    while torch.randn(4096, 4096, device="cuda").sum().item() < 1e9:
        pass
if fault == "reads a loss":
    for _ in range(1001):
        layer(torch.randn(64, 256, device="cuda")).sum().item()
        optimizer.step()
    sys.exit()
if fault == "fewer steps":
    for _ in range(rank, 1):
        dist.all_reduce(layer.weight.grad)
        optimizer.step()
    sys.exit()
if fault == "computes":
    sys.stdout.write("computes\n")  # at once with its line's end, so that ranks' lines do not mix
    sys.stdout.flush()
    while True:
        pass
if fault == "prints":
    while True:
        sys.stdout.write("and again\n")
        sys.stdout.flush()
step()
