"""Experts on all GPUs: tokens go where the router says, counts travel through the GPU first."""

import torch
import torch.distributed as dist
from gpt import start
from torch import nn, optim
from torch.distributed.nn.functional import all_to_all_single

device = start()
world, width, per_rank = dist.get_world_size(), 1024, 4
router = nn.Linear(width, world * per_rank, device=device)
experts = nn.ModuleList(nn.Linear(width, width, device=device) for _ in range(per_rank))
optimizer = optim.AdamW([*router.parameters(), *experts.parameters()], lr=1e-3)
for _ in range(3):
    x = torch.randn(8192, width, device=device)
    weights, chosen = router(x).softmax(-1).topk(2)
    counts = torch.histc(chosen.float(), bins=world * per_rank, min=0, max=world * per_rank).long()
    order = chosen.flatten().argsort()
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sent, received = (c.view(world, per_rank).sum(1).tolist() for c in (counts, arriving))
    rows = torch.empty(sum(received), width, device=device)
    rows = all_to_all_single(rows, x[order // 2], received, sent)
    sizes = arriving.view(world, per_rank).sum(0).tolist()
    done = torch.cat([expert(part) for expert, part in zip(experts, rows.split(sizes), strict=True)])
    back = torch.empty(sum(sent), width, device=device)
    back = all_to_all_single(back, done, sent, received)
    (back * weights.flatten()[order, None]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
