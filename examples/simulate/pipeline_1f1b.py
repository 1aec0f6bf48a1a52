"""A GPT cut into pipeline stages, one process each, by torch.distributed.pipelining.

torchrun --nproc-per-node 8 examples/simulate/pipeline_1f1b.py                                     with GPUs
foretrain simulate --cluster dgx-a100:1 -- examples/simulate/pipeline_1f1b.py --schedule gpipe     without
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, sequence, dim)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for part in self.qkv(self.before_attention(x)).chunk(3, dim=-1))  # fmt: skip
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


def cut(args: argparse.Namespace, index: int, count: int) -> nn.Sequential:
    """The layers of stage ``index`` of ``count``, with the same initial values whatever the number of stages."""
    layers: list[nn.Module] = []
    for number in range(-1, args.layers + 1):
        torch.manual_seed(number + 1)
        if number == -1 and index == 0:
            layers.append(nn.Embedding(args.vocabulary, args.dim))
        elif number == args.layers and index == count - 1:
            layers += [nn.LayerNorm(args.dim), nn.Linear(args.dim, args.vocabulary, bias=False)]
        elif number * count // args.layers == index and 0 <= number < args.layers:
            layers.append(Block(args.dim, args.heads))
    return nn.Sequential(*layers)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("batch", 32), ("microbatches", 32), ("sequence", 2048), ("dim", 4096), ("heads", 32),
                          ("layers", 32), ("vocabulary", 50304), ("steps", 3)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--schedule", choices=("1f1b", "gpipe", "interleaved"), default="1f1b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]) if args.device == "cuda" else 0)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    count = 2 * world if args.schedule == "interleaved" else world
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with device:
        modules = [cut(args, index, count).to(dtype) for index in range(rank, count, world)]
    stages = [PipelineStage(module, rank + i * world, count, device) for i, module in enumerate(modules)]
    if args.schedule == "interleaved":
        schedule = ScheduleInterleaved1F1B(stages, args.microbatches, loss_fn=loss_of)
    else:
        kind = Schedule1F1B if args.schedule == "1f1b" else ScheduleGPipe
        schedule = kind(stages[0], args.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=3e-4)

    torch.manual_seed(0)
    tokens = torch.randint(args.vocabulary, (args.batch, args.sequence + 1), device=device)
    for step in range(args.steps):
        start, losses = time.perf_counter(), []
        inputs = (tokens[:, :-1],) if rank == 0 else ()
        schedule.step(*inputs, **({"target": tokens[:, 1:], "losses": losses} if rank == world - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
        if rank == world - 1:
            value, seconds = torch.stack(losses).mean().item(), time.perf_counter() - start
            rate = args.batch * args.sequence / world / seconds
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"step {step}: loss {value:.4f}, {seconds:.4f} s, {rate:,.0f} tokens/s/GPU, peak {peak:.2f} GiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
