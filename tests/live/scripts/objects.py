"""Broadcasts objects of several lengths from rank 0 over Gloo, to ranks that have none yet."""

import os

import torch
import torch.distributed as dist
from torch import nn

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
rank = dist.get_rank()
for length in (0, 3, 9000):
    given = [{"name": "a" * length}, length] if rank == 0 else [None, None]
    dist.broadcast_object_list(given, src=0)
    assert given == [{"name": "a" * length}, length], given
layer = nn.Linear(256, 256).cuda()
layer(torch.randn(4, 256, device="cuda")).sum().backward()
torch.optim.SGD(layer.parameters(), 0.1).step()
