"""Experts on different GPUs: each token goes to the experts that its router chooses, and comes back (all-to-all).

torchrun --nproc-per-node 8 examples/simulate/moe_all_to_all.py                     where there are GPUs
foretrain simulate --cluster dgx-h100:2 -- examples/simulate/moe_all_to_all.py      where there are none
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional


class Experts(nn.Module):
    """Top-k of ``experts`` feed-forward networks, spread evenly over all ranks (Lepikhin et al., GShard, ICLR'21)."""

    def __init__(self, dim: int, hidden: int, experts: int, top: int) -> None:
        super().__init__()
        self.top, self.here = top, experts // dist.get_world_size()
        self.norm, self.router = nn.LayerNorm(dim), nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(self.here, dim, hidden) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(self.here, hidden, dim) * hidden**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (tokens, dim)
        weights, chosen = self.router(self.norm(x)).softmax(-1).topk(self.top)  # (tokens, top) each
        order = chosen.flatten().argsort(stable=True)  # one row for each choice, sorted by expert
        counts = chosen.flatten().bincount(minlength=self.router.out_features)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent = counts.view(-1, self.here).sum(1).tolist()
        received = arriving.view(-1, self.here).sum(1).tolist()

        rows = all_to_all_single_autograd(self.norm(x)[order // self.top], received, sent, dist.group.WORLD)
        expert = torch.arange(len(arriving), device=x.device) % self.here
        expert = expert.repeat_interleave(arriving, output_size=sum(received))
        by_expert = expert.argsort(stable=True)
        sizes = arriving.view(-1, self.here).sum(0).tolist()
        parts = zip(rows[by_expert].split(sizes), self.up, self.down, strict=True)
        outputs = [torch.relu(part @ up) @ down for part, up, down in parts]
        rows = torch.cat(outputs)[by_expert.argsort()]
        rows = all_to_all_single_autograd(rows, sent, received, dist.group.WORLD)

        shares = weights.flatten()[order].unsqueeze(1)
        return x + torch.zeros_like(x).index_add(0, order // self.top, shares * rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("batch", 8), ("sequence", 2048), ("dim", 2048), ("hidden", 8192), ("experts", 32),
                          ("top", 2), ("layers", 12), ("vocabulary", 32000), ("steps", 4)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]) if args.device == "cuda" else 0)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")

    torch.manual_seed(dist.get_rank())
    with device:
        layers = [Experts(args.dim, args.hidden, args.experts, args.top) for _ in range(args.layers)]
        model = nn.Sequential(nn.Embedding(args.vocabulary, args.dim), *layers, nn.Linear(args.dim, args.vocabulary))
    model = model.to(torch.bfloat16 if args.device == "cuda" else torch.float32)
    shared = [p for name, p in model.named_parameters() if not name.endswith(("up", "down"))]
    for parameter in shared:
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    tokens = torch.randint(args.vocabulary, (args.batch * args.sequence + 1,), device=device)
    for step in range(args.steps):
        start = time.perf_counter()
        loss = functional.cross_entropy(model(tokens[:-1]).float(), tokens[1:])
        (loss / dist.get_world_size()).backward()  # an expert's gradient sums over the tokens of all ranks
        for parameter in shared:
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        value, seconds = loss.item(), time.perf_counter() - start
        if dist.get_rank() == 0:
            rate = args.batch * args.sequence / seconds
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"step {step}: loss {value:.4f}, {seconds:.4f} s, {rate:,.0f} tokens/s/GPU, peak {peak:.2f} GiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
