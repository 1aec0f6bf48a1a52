"""A perceptron of several layers, trained by DistributedDataParallel with Adam, on GPUs or on CPUs.

torchrun --nproc-per-node 2 benchmarks/cpu_scripts/mlp.py
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--width", type=int, default=768)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(args.width, args.width), nn.ReLU())]
    net = nn.Sequential(nn.Linear(256, args.width), nn.ReLU(), *hidden, nn.Linear(args.width, 10)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + dist.get_rank())
    inputs = torch.randn(args.batch, 256, device=device)
    labels = torch.randint(10, (args.batch,), device=device)
    for step in range(args.steps):
        began = time.perf_counter()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()
        if dist.get_rank() == 0:
            print(f"step {step}: {1e3 * (time.perf_counter() - began):.3f} ms, loss {value:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
