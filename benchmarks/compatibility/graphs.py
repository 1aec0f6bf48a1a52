"""CUDA graphs: a captured training step, and make_graphed_callables."""

import argparse

import torch
from gpt import start
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("capture", "callables"))
kind = parser.parse_args().kind
device = start()
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))).to(device)
optimizer = optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
static = torch.randn(64, 1024, device=device)


def step() -> torch.Tensor:
    loss = model(static).square().mean()
    loss.backward()
    return loss


if kind == "capture":
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            step()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(5):
        static.copy_(torch.randn(64, 1024, device=device))
        graph.replay()
        optimizer.step()
        loss.item()
else:
    model = torch.cuda.make_graphed_callables(model, (static.requires_grad_(),))
    for _ in range(5):
        optimizer.zero_grad(set_to_none=True)
        step()
        optimizer.step()
torch.cuda.synchronize()
