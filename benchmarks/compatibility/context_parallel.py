"""Context parallelism: PyTorch's ring attention, and a ring of one's own with batch_isend_irecv."""

import argparse

import torch
import torch.distributed as dist
from gpt import GPT, batch, loss_of, start
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("torch", "ring"))
kind = parser.parse_args().kind
device = start()
rank, world = dist.get_rank(), dist.get_world_size()


def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every rank's queries meet every rank's keys and values, which go round (outputs are only added up here)."""
    total = torch.zeros_like(q)
    for step in range(world):
        if step + 1 < world:
            buffers = [torch.empty_like(k), torch.empty_like(v)]
            operations = [dist.P2POp(dist.isend, x.contiguous(), (rank + 1) % world) for x in (k, v)]
            operations += [dist.P2POp(dist.irecv, x, (rank - 1) % world) for x in buffers]
            works = dist.batch_isend_irecv(operations)
        total = total + scaled_dot_product_attention(q, k, v)
        if step + 1 < world:
            for work in works:
                work.wait()
            k, v = buffers
    return total


if kind == "torch":
    mesh = init_device_mesh("cuda", (world,))
    model = GPT().to(device, torch.bfloat16)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        tokens, targets = (x.clone() for x in batch(device))
        with (
            context_parallel(
                mesh, buffers=[tokens, targets], buffer_seq_dims=[1, 1], no_restore_buffers={tokens, targets}
            ),
            sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]),
        ):
            loss_of(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
else:
    linear = nn.Linear(512, 3 * 512, device=device, dtype=torch.bfloat16)
    optimizer = optim.AdamW(linear.parameters(), lr=1e-3)
    for _ in range(3):
        x = torch.randn(2, 2048, 512, device=device, dtype=torch.bfloat16)
        q, k, v = linear(x).view(2, 2048, 3, 8, 64).permute(2, 0, 3, 1, 4)
        ring(q, k.contiguous().detach(), v.contiguous().detach()).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
