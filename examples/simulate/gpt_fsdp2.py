"""A GPT whose parameters, gradients and optimizer are sharded over all GPUs by fully_shard (FSDP2).

torchrun --nproc-per-node 8 examples/simulate/gpt_fsdp2.py --checkpoint           where there are GPUs
foretrain simulate --cluster dgx-h100:4 -- examples/simulate/gpt_fsdp2.py         where there are none
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


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


class GPT(nn.Module):
    def __init__(self, vocabulary: int, sequence: int, dim: int, heads: int, layers: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(sequence, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (batch, sequence) -> (batch, sequence, vocabulary)
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("batch", 4), ("sequence", 2048), ("dim", 2048), ("heads", 16), ("layers", 24),
                          ("vocabulary", 50304), ("steps", 4)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--checkpoint", action="store_true", help="recompute each block in the backward pass")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))

    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(args.vocabulary, args.sequence, args.dim, args.heads, args.layers, args.checkpoint)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device=args.device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(args.vocabulary, (args.batch, args.sequence + 1), device=args.device)
    for step in range(args.steps):
        start = time.perf_counter()
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value, seconds = loss.item(), time.perf_counter() - start
        if dist.get_rank() == 0:
            peak = torch.cuda.max_memory_allocated() / 2**30
            rate = args.batch * args.sequence / seconds
            print(f"step {step}: loss {value:.4f}, {seconds:.4f} s, {rate:,.0f} tokens/s/GPU, peak {peak:.2f} GiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
