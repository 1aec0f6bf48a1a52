"""A residual network trained by DistributedDataParallel in mixed precision.

torchrun --nproc-per-node 8 examples/simulate/cnn_ddp.py                          where there are GPUs
foretrain simulate --cluster dgx-a100:2 -- examples/simulate/cnn_ddp.py           where there are none
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Residual(nn.Module):
    """Two convolutions and a shortcut, as in ResNet-18 (He et al., CVPR'16)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, inputs, y, x)
        return torch.relu(self.path(x) + self.shortcut(x))


def network(width: int) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    blocks = [Residual(width << max(0, i - 1), width << i, 1 + (i > 0)) for i in range(4)]
    return nn.Sequential(stem, nn.MaxPool2d(3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(width << 3, 1000))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=128, help="images of each GPU")
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer")
    parser.add_argument("--size", type=int, default=224, help="pixels of an image's edge")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()

    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]) if args.device == "cuda" else 0)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(network(args.width).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(args.device)

    torch.manual_seed(1 + dist.get_rank())
    images = torch.randn(args.batch, 3, args.size, args.size, device=device)
    labels = torch.randint(1000, (args.batch,), device=device)
    for step in range(args.steps):
        start = time.perf_counter()
        with torch.autocast(args.device):
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        value, seconds = loss.item(), time.perf_counter() - start
        if dist.get_rank() == 0:
            rate = args.batch * dist.get_world_size() / seconds
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"step {step}: loss {value:.4f}, {seconds:.4f} s, {rate:,.0f} images/s, peak {peak:.2f} GiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
