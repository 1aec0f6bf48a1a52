"""How Megatron-LM loads each micro-batch: the host waits for the GPU, and each stage makes masks of its own.

Where micro-batches are small, this is much of a pipeline's step. In Megatron-LM up to 2022, as in Megatron-DeepSpeed,
``forward_step`` loads the whole batch on all stages.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def load(sequences: Tensor, device: torch.device, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return words and targets, (batch, sequence); only the first rank of ``group`` would have to read them."""
    first = dist.get_global_rank(group, 0)
    shape = torch.tensor([*sequences.shape, 0, 0, 0]).to(device)
    dist.broadcast(shape, first, group)
    shape.cpu()  # the other ranks allocate what will come
    flat = sequences.flatten().to(device)
    dist.broadcast(flat, first, group)
    whole = flat.view(sequences.shape)
    targets, words = whole[:, 1:].contiguous(), whole[:, :-1].contiguous()
    length = words.shape[1]
    torch.ones(1, length, length, device=device).tril().view(1, 1, length, length) < 0.5  # noqa: B015, the mask
    torch.ones(words.shape, device=device)  # weights of the loss
    torch.arange(length, device=device).unsqueeze(0).expand_as(words)  # positions
    return words, targets
