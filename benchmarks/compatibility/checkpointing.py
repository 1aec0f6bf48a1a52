"""Activation checkpointing: reentrant, non-reentrant, selective; saved tensors on the CPU."""

import argparse

import torch
from gpt import GPT, batch, loss_of, start
from torch import optim
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("reentrant", "plain", "selective", "cpu"))
kind = parser.parse_args().kind
device = start()
model = GPT().to(device)
SAVED = {torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_efficient_attention.default}


def policy(_, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(torch.nn.Module):
    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if kind == "cpu":
            with save_on_cpu(pin_memory=True):
                return self.block(x)
        if kind == "selective":
            context = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
            return checkpoint(self.block, x, use_reentrant=False, context_fn=context)
        return checkpoint(self.block, x, use_reentrant=kind == "reentrant")


model.blocks = torch.nn.ModuleList(map(Checkpointed, model.blocks))
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    tokens, targets = batch(device)
    loss_of(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
