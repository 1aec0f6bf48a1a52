"""Trains two layers with named ranges, for other scripts."""

from collections.abc import Callable

import torch
from torch import nn
from torch.profiler import record_function


def training() -> Callable[..., None]:
    """A function that makes so many steps, and calls ``after`` behind each."""
    layers = [nn.Linear(4096, 4096) for _ in range(2)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).cuda())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.empty(512, 4096, device="cuda")

    def steps(number: int, after: Callable[[], object] = lambda: None) -> None:
        for _ in range(number):
            with record_function("forward"):
                loss = model(x).sum()
            with torch.cuda.nvtx.range("backward"):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after()

    return steps
