"""torch.compile: a model, its blocks, modes, dynamic shapes, graph breaks; with DDP, FSDP2, checkpointing."""

import argparse

import torch
from gpt import GPT, SEQUENCE, VOCABULARY, batch, loss_of, start
from torch import optim
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

KINDS = (
    "model",
    "blocks",
    "tune",
    "overhead",
    "dynamic",
    "break",
    "ddp",
    "fsdp2",
    "checkpoint",
    "optimizer",
    "autocast",
)
parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=KINDS)
kind = parser.parse_args().kind
device = start()
model = GPT().to(device)
if kind == "blocks":
    for block in model.blocks:
        block.compile()
elif kind == "fsdp2":
    for block in model.blocks:
        block.compile(fullgraph=True)
        fully_shard(block)
    fully_shard(model)
elif kind == "ddp":
    model = torch.compile(DistributedDataParallel(model, device_ids=[device.index]))
elif kind == "break":
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: print(end="") or output)
    model = torch.compile(model)
elif kind == "checkpoint":
    for block in model.blocks:
        block.forward = lambda x, f=block.forward: checkpoint(f, x, use_reentrant=False)
    model = torch.compile(model)
elif kind != "optimizer":
    modes = {"tune": "max-autotune", "overhead": "reduce-overhead"}
    model = torch.compile(model, mode=modes.get(kind), dynamic=True if kind == "dynamic" else None)
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
step = torch.compile(optimizer.step, fullgraph=False) if kind == "optimizer" else optimizer.step
for index in range(4):
    tokens, targets = batch(device)
    if kind == "dynamic":
        tokens = torch.randint(VOCABULARY, (4, SEQUENCE + 64 * index), device=device)
        targets = tokens
    with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
        loss = loss_of(model(tokens), targets)
    loss.backward()
    step()
    optimizer.zero_grad()
