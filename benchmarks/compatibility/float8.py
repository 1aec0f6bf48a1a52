"""torchao: float8 training of linear layers, dynamic scales, with FSDP2 and its float8 all-gather."""

import torch
from gpt import GPT, batch, loss_of, start
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

device = start()
model = GPT().to(device, torch.bfloat16)
convert_to_float8_training(
    model.blocks,
    config=Float8LinearConfig(enable_fsdp_float8_all_gather=True),
    module_filter_fn=lambda module, name: isinstance(module, nn.Linear),
)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    tokens, targets = batch(device)
    loss_of(model(tokens), targets).backward()
    optimizer.step()
    precompute_float8_dynamic_scale_for_fsdp(model)
    optimizer.zero_grad()
