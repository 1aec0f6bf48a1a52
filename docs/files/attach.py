import torch
import torch.distributed as dist
from torch import nn

import foretrain as ft

dist.init_process_group("gloo")
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())

with ft.attach(model, optimizer, schedule="bytescheduler") as attached:  # where DistributedDataParallel(model) stood
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(16, 512)).square().mean().backward()
        optimizer.step()
    if attached.rank == 0:
        print(attached.schedule, attached.cluster, attached.bound, sep="\n")

dist.destroy_process_group()
