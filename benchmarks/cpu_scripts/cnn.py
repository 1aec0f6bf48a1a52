"""A small residual network, trained by DistributedDataParallel with momentum, on GPUs or on CPUs.

torchrun --nproc-per-node 2 benchmarks/cpu_scripts/cnn.py
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, inputs, y, x)
        return torch.relu(self.path(x) + self.shortcut(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(0)
    stem = [nn.Conv2d(3, args.width, 3, 1, 1, bias=False), nn.BatchNorm2d(args.width), nn.ReLU(inplace=True)]
    blocks = [Residual(args.width << max(0, i - 1), args.width << i, 1 + (i > 0)) for i in range(4)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(args.width << 3, 100)]
    model = DistributedDataParallel(nn.Sequential(*stem, *blocks, *head).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    torch.manual_seed(1 + dist.get_rank())
    images = torch.randn(args.batch, 3, 32, 32, device=device)
    labels = torch.randint(100, (args.batch,), device=device)
    for step in range(args.steps):
        began = time.perf_counter()
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()
        if dist.get_rank() == 0:
            print(f"step {step}: {1e3 * (time.perf_counter() - began):.3f} ms, loss {value:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
