"""DTensor tensor parallelism, with sequence parallelism, loss parallelism and FSDP2 across."""

import argparse

import torch
from gpt import GPT, batch, loss_of, start
from torch import optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("plain", "sequence", "fsdp"))
kind = parser.parse_args().kind
device = start()
world = torch.distributed.get_world_size()
shape = (world // 4, 4) if kind == "fsdp" else (1, world)
mesh = init_device_mesh("cuda", shape, mesh_dim_names=("dp", "tp"))
model = GPT().to(device)
rows = Shard(1) if kind == "sequence" else Replicate()
plan = {
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(output_layouts=rows),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(output_layouts=rows),
}
if kind == "sequence":
    plan |= {
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "up": ColwiseParallel(input_layouts=Shard(1)),
    }
    parallelize_module(
        model,
        mesh["tp"],
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
for block in model.blocks:
    parallelize_module(block, mesh["tp"], plan)
    if kind == "fsdp":
        fully_shard(block, mesh=mesh["dp"])
if kind == "fsdp":
    fully_shard(model, mesh=mesh["dp"])
optimizer = optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
for _ in range(4):
    tokens, targets = batch(device)
    if kind == "sequence":
        with loss_parallel():
            loss_of(model(tokens), targets).backward()
    else:
        loss_of(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
