"""Makes a folder, which it cannot do twice, and sends from rank to rank."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank = dist.get_rank()
if rank == 0:
    Path(sys.argv[1]).mkdir(exist_ok=len(sys.argv) > 2)
layer = nn.Linear(256, 256).cuda()
activation = torch.randn(4, 256, device="cuda")
if rank:
    dist.recv(activation, rank - 1)
else:
    dist.send(activation, rank + 1)
layer(activation).sum().backward()
torch.optim.SGD(layer.parameters(), 0.1).step()
