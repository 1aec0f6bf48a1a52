"""What benchmarks/live.py simulates: Llama 3 8B, plain, in DistributedDataParallel or FSDP2; prints what a step cost.

A plain training script but for its last lines, which print the CPU time of this process, not the virtual one, and the
memory that it shares with no other process.
"""

import argparse
import os
import resource
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

DIM, LAYERS, HEADS, GROUPS, FEED, WORDS = 4096, 32, 32, 8, 14336, 128256
"""Llama 3 8B."""


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, sequence, head)."""
    low, high = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-high, low), dim=-1) * sine


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        head = DIM // HEADS
        self.attention_norm, self.feed_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.query, self.output = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.key, self.value = (nn.Linear(DIM, GROUPS * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(DIM, FEED, bias=False) for _ in range(2))
        self.down = nn.Linear(FEED, DIM, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(batch, sequence, DIM) to the same."""
        batch, sequence, _ = x.shape
        normed = self.attention_norm(x)
        query, key, value = (
            part(normed).view(batch, sequence, -1, DIM // HEADS).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, sequence, DIM))
        normed = self.feed_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Tokens (batch, sequence) to logits (batch, sequence, WORDS)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits."""
        x = self.embedding(tokens)
        turns = torch.ones(tokens.shape[1], DIM // HEADS, device=x.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, turns, turns)
        return self.head(self.norm(x))


def private() -> int:
    """Bytes that this process alone has written; what it reads of libraries and of its parent is shared."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) * 1024


def main() -> None:
    """Trains some steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("plain", "ddp", "fsdp2"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sequence", type=int, default=4096)
    options = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    if options.mode != "plain":
        dist.init_process_group("nccl")
    if options.mode == "fsdp2":
        with torch.device("meta"):
            model = Llama()
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision)
        model.to_empty(device=device)
    else:
        torch.set_default_dtype(torch.bfloat16)
        with device:
            model = Llama()
        if options.mode == "ddp":
            model = DistributedDataParallel(model, device_ids=[local], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(options.steps):
        tokens = torch.randint(0, WORDS, (1, options.sequence + 1), device=device)
        began = resource.getrusage(resource.RUSAGE_SELF)
        logits = model(tokens[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        ended = resource.getrusage(resource.RUSAGE_SELF)
        spent = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
        print(f"rank {os.environ['RANK']} cpu {spent:.6f} private {private()}", flush=True)


if __name__ == "__main__":
    main()
