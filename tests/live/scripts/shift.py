"""Rotates a tensor through the ranks of a group by an uneven all-to-all, as context parallelism does with its keys."""

import os

import torch
import torch.distributed as dist
from torch import nn

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
layer = nn.Linear(1024, 1024, bias=False).cuda()
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
keys, received = torch.randn(2, 1 << 14, 1024, device="cuda")
to_next = [len(keys) if other == (rank + 1) % world else 0 for other in range(world)]
from_last = [len(keys) if other == (rank - 1) % world else 0 for other in range(world)]
for _ in range(3):
    for _ in range(world - 1):
        dist.all_to_all_single(received, keys, from_last, to_next)
        keys, received = received, keys
        layer(keys).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()
