"""Saves a checkpoint asynchronously while it trains."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters())
saved = None
for step in range(6):
    model(torch.ones(64, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    if step % 2:
        saved = dcp.async_save(model.state_dict(), checkpoint_id=os.path.join(sys.argv[1], str(step)))
if saved is not None:
    saved.result()
