"""A small regression that learns within tens of rounds."""

import torch
from torch import nn

TRUTH = torch.linspace(-1, 1, 30)


def build(seed, rate=0.1, layers=1):
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64, 30, generator=draw)
    data = [(inputs[i : i + 16], inputs[i : i + 16] @ TRUTH) for i in range(0, 64, 16)]
    parts = [nn.Linear(30, 30) for _ in range(layers - 1)]
    model = nn.Sequential(*parts, nn.Linear(30, 1))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5),
        "batches": data,
        "loss": lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square().mean(),
        "evaluate": lambda model: 1 - (model(inputs)[:, 0] - inputs @ TRUTH).square().mean(),
    }
