"""Trains a few layers, split over data, tensor and pipeline parallel ranks; prints how long its steps took."""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--shard", action="store_true", help="FSDP2 instead of DDP")
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--bound", action="store_true", help="the GPU named at once, so that groups are split off")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(gpu)
    dist.init_process_group(args.backend, device_id=gpu if args.bound else None)
    data = dist.get_world_size() // (args.tensor * args.pipeline)
    mesh = init_device_mesh("cuda", (args.pipeline, data, args.tensor), mesh_dim_names=("pp", "dp", "tp"))
    stage = mesh["pp"].get_local_rank()
    blocks = [Block(args.width).cuda() for _ in range(args.layers // args.pipeline)]
    for block in blocks if args.tensor > 1 else []:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model: nn.Module = nn.Sequential(*blocks)
    if args.shard:
        for block in blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    elif data > 1:
        model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(512, args.width, device="cuda")

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    schedule = None
    if args.pipeline > 1:
        piece = PipelineStage(model, stage, args.pipeline, torch.device("cuda"), group=mesh["pp"].get_group())
        schedule = Schedule1F1B(piece, n_microbatches=2 * args.pipeline, loss_fn=loss_of)

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for step in range(args.steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        begin.record()
        if schedule is None:
            loss_of(model(x), x).backward()
        elif stage == 0:
            schedule.step(x)
        else:
            schedule.step(target=x)
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        if dist.get_rank() == 0:
            print(json.dumps({"step": step, "seconds": seconds, "events": begin.elapsed_time(end) / 1e3}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
