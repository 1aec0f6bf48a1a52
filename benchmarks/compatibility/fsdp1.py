"""FullyShardedDataParallel (FSDP1): strategies, mixed precision, checkpointing, offload, state dict."""

import argparse
import functools

import torch
from gpt import GPT, Block, batch, loss_of, start
from torch import optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

parser = argparse.ArgumentParser()
parser.add_argument(
    "kind", choices=("full", "grad_op", "hybrid", "mixed", "checkpoint", "offload", "original", "accumulate")
)
kind = parser.parse_args().kind
device = start()
strategies = {"hybrid": ShardingStrategy.HYBRID_SHARD, "grad_op": ShardingStrategy.SHARD_GRAD_OP}
half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
model = FullyShardedDataParallel(
    GPT(),
    device_id=device,
    sharding_strategy=strategies.get(kind, ShardingStrategy.FULL_SHARD),
    auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    mixed_precision=half if kind in ("mixed", "checkpoint") else None,
    cpu_offload=CPUOffload(offload_params=True) if kind == "offload" else None,
    use_orig_params=kind == "original",
    limit_all_gathers=True,
)
if kind == "checkpoint":
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    if kind == "accumulate":
        with model.no_sync():
            loss_of(model(batch(device)[0]), batch(device)[1]).backward()
    tokens, targets = batch(device)
    loss_of(model(tokens), targets).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
