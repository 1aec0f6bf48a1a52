"""What other scripts import."""

import torch
from torch import nn


def trained(steps: int, width: int = 256) -> nn.Module:
    """A layer on the GPU after ``steps`` steps."""
    layer = nn.Linear(width, width).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(steps):
        layer(torch.randn(64, width, device="cuda")).sum().backward()
        optimizer.step()
    return layer
