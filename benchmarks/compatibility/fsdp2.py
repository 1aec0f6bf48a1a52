"""fully_shard (FSDP2): mixed precision, HSDP, CPU offload, meta initialisation, prefetching, accumulation."""

import argparse

import torch
from gpt import GPT, batch, loss_of, start
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("plain", "mixed", "hsdp", "offload", "meta", "prefetch", "accumulate", "keep"))
kind = parser.parse_args().kind
device = start("cpu:gloo,cuda:nccl" if kind == "offload" else "nccl")
world = torch.distributed.get_world_size()
shape, names = ((2, world // 2), ("replicate", "shard")) if kind == "hsdp" else ((world,), ("shard",))
mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
options = {
    "mesh": mesh,
    "mp_policy": half if kind == "mixed" else MixedPrecisionPolicy(),
    "offload_policy": CPUOffloadPolicy() if kind == "offload" else OffloadPolicy(),
    "reshard_after_forward": kind != "keep",
}
with torch.device("meta" if kind == "meta" else "cpu" if kind == "offload" else device):
    model = GPT()
for block in model.blocks:
    fully_shard(block, **options)
fully_shard(model, **options)
if kind == "meta":
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding)):
            module.reset_parameters()
if kind == "prefetch":
    for block, after in zip(model.blocks, model.blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([after])
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    if kind == "accumulate":
        model.set_requires_gradient_sync(False)
        loss_of(model(batch(device)[0]), batch(device)[1]).backward()
        model.set_requires_gradient_sync(True)
    tokens, targets = batch(device)
    loss_of(model(tokens), targets).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(norm.full_tensor().item() > 0)
