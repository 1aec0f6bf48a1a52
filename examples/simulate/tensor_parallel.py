"""A GPT on a two-dimensional mesh: matrices split inside a server (tensor parallel), the rest sharded across (FSDP2).

torchrun --nproc-per-node 8 examples/simulate/tensor_parallel.py --tp 4             where there are GPUs
foretrain simulate --cluster dgx-h100:8 -- examples/simulate/tensor_parallel.py     where there are none
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, dim: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, sequence, dim); the heads of this rank
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, head: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(dim), Attention(dim, head)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim, bias=False), nn.GELU(), nn.Linear(4 * dim, dim, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


BLOCK_PLAN = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "mlp_norm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "mlp.0": ColwiseParallel(),
    "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
}
ENDS_PLAN = {
    "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("tp", 8), ("batch", 8), ("sequence", 4096), ("dim", 4096), ("head", 128), ("layers", 16),
                          ("vocabulary", 50304), ("steps", 4)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    mesh = init_device_mesh(args.device, (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)
    with torch.device(args.device):
        model = nn.Sequential(nn.Embedding(args.vocabulary, args.dim))
        blocks = [Block(args.dim, args.head) for _ in range(args.layers)]
        for i, block in enumerate(blocks):
            model.add_module(f"block{i}", block)
        model.add_module("norm", nn.LayerNorm(args.dim))
        model.add_module("head", nn.Linear(args.dim, args.vocabulary, bias=False))
    parallelize_module(model, mesh["tp"], ENDS_PLAN)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(parallelize_module(block, mesh["tp"], BLOCK_PLAN), mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)

    torch.manual_seed(1 + mesh["dp"].get_local_rank())  # the ranks of a tensor-parallel group see the same tokens
    tokens = torch.randint(args.vocabulary, (args.batch, args.sequence + 1), device=args.device)
    for step in range(args.steps):
        start = time.perf_counter()
        with loss_parallel():
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value, seconds = loss.item(), time.perf_counter() - start
        if dist.get_rank() == 0:
            rate = args.batch * args.sequence / args.tp / seconds
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"step {step}: loss {value:.4f}, {seconds:.4f} s, {rate:,.0f} tokens/s/GPU, peak {peak:.2f} GiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
