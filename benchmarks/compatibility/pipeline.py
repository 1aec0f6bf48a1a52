"""Pipeline parallelism of torch.distributed.pipelining: GPipe, 1F1B, interleaved, zero bubble."""

import argparse

import torch
import torch.distributed as dist
from gpt import SEQUENCE, VOCABULARY, WIDTH, Block, loss_of, start
from torch import nn, optim
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

parser = argparse.ArgumentParser()
parser.add_argument(
    "schedule", choices=("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")
)
name = parser.parse_args().schedule
device = start()
rank, world = dist.get_rank(), dist.get_world_size()
several = name not in ("GPipe", "1F1B")
count = 2 * world if several else world
mine = (rank, 2 * world - 1 - rank) if name == "ZBVZeroBubble" else (rank, rank + world) if several else (rank,)


def part(index: int) -> nn.Module:
    layers: list[nn.Module] = [Block(), Block()]
    if index == 0:
        layers.insert(0, nn.Embedding(VOCABULARY, WIDTH))
    if index == count - 1:
        layers.append(nn.Linear(WIDTH, VOCABULARY))
    return nn.Sequential(*layers).to(device)


stages = [PipelineStage(part(index), index, count, device) for index in mine]
schedule = get_schedule_class(name)(stages if several else stages[0], n_microbatches=16, loss_fn=loss_of)
optimizer = optim.AdamW([p for stage in stages for p in stage.submod.parameters()], lr=1e-3)
for _ in range(3):
    tokens = torch.randint(VOCABULARY, (32, SEQUENCE), device=device)
    first, last = 0 in mine, count - 1 in mine
    losses: list[torch.Tensor] = []
    schedule.step(*([tokens] if first else []), **({"target": tokens, "losses": losses} if last else {}))
    optimizer.step()
    optimizer.zero_grad()
