"""MPT trained as llm-foundry and Composer do: FSDP, micro-batches, autocast, an Adam without fused kernels.

torchrun --nproc-per-node 8 mpt.py --model 7b --sequence 2048 --micro-batch 6 --global-batch 96

Composer's defaults of 2023: one FSDP unit for each block, parameters and gradients travel in bf16, the next unit is
fetched after the gradients of the one at hand, and gradients are reduced after every micro-batch.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from float8_layers import convert, fuse
from job import Meter, join
from mpt_model import MPT, SHAPES, Block
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.nn import functional


class DecoupledAdamW(torch.optim.Optimizer):
    """Adam as Composer wrote it: parameter by parameter, operator by operator; without weight decay, as MPT's is 0."""

    def __init__(self, parameters, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"steps": 0, "mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
                state["steps"] += 1
                state["mean"].mul_(first).add_(p.grad, alpha=1 - first)
                state["square"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                spread = (state["square"].sqrt() / (1 - second ** state["steps"]) ** 0.5).add_(group["eps"])
                p.addcdiv_(state["mean"], spread, value=-group["lr"] / (1 - first ** state["steps"]))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="7b")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences of each GPU at once")
    parser.add_argument("--global-batch", type=int, required=True, help="sequences of a step, of all GPUs")
    parser.add_argument("--strategy", choices=("FULL_SHARD", "SHARD_GRAD_OP"), default="FULL_SHARD")
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    parser.add_argument("--float8", action="store_true", help="linear layers multiply in float8")
    parser.add_argument("--exact", action="store_true", help="all in float32, to compare layouts")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def fill(module: nn.Module, device: torch.device) -> None:
    """Initial values of what a module itself has, which was made without any."""
    module.to_empty(device=device, recurse=False)
    for p in module.parameters(recurse=False):
        nn.init.normal_(p, std=0.02) if p.ndim > 1 else nn.init.ones_(p)


def build(args: argparse.Namespace, device: torch.device) -> FullyShardedDataParallel:
    with torch.device("cpu" if args.exact else "meta"):
        torch.manual_seed(0)
        model = MPT(SHAPES[args.model], args.sequence)
    units: tuple[type[nn.Module], ...] = (Block,)
    if args.float8:
        convert(model)
        if device.type == "cuda":
            fuse()
    if args.recompute == "full":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = checkpoint_wrapper(block)
        units = (type(model.blocks[0]),)
    low = None if args.exact else torch.bfloat16
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[args.strategy],
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, units),
        mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=low, buffer_dtype=low),
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        device_id=device,
        param_init_fn=None if args.exact else lambda module: fill(module, device),
        limit_all_gathers=True,
        use_orig_params=True,
    )


def loss_of(model: nn.Module, tokens: Tensor, exact: bool) -> Tensor:
    """Mean over all tokens but the last of each sequence, which has no successor to learn."""
    targets = tokens.roll(-1, dims=1)
    targets[:, -1] = -100
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=not exact):
        logits = model(tokens)
    # llm-foundry's loss is one fused kernel that reads logits as they are; it is outside autocast for that.
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def main() -> None:
    """Trains, and prints each step."""
    args = options()
    device = join(args.device)
    world, rank = dist.get_world_size(), dist.get_rank()
    pieces, rest = divmod(args.global_batch, args.micro_batch * world)
    if rest:
        raise SystemExit(
            f"{args.global_batch} sequences do not make micro-batches of {args.micro_batch} on {world} GPUs"
        )
    model = build(args, device)
    optimizer = DecoupledAdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    tokens = torch.randint(SHAPES[args.model].words, (args.global_batch, args.sequence)).chunk(world)[rank].to(device)
    meter = Meter(args.global_batch * args.sequence, talks=rank == 0)
    for _ in range(args.steps):
        total = torch.zeros((), device=device)
        for part in tokens.split(args.micro_batch):
            loss = loss_of(model, part, args.exact) / pieces
            loss.backward()
            total += loss.detach()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        meter.step(total / world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
