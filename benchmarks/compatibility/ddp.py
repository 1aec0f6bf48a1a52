"""DistributedDataParallel: no_sync, unused parameters, a static graph, communication hooks."""

import argparse

from gpt import GPT, batch, loss_of, start
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("plain", "no_sync", "unused", "static", "fp16", "bf16", "powersgd", "buckets"))
kind = parser.parse_args().kind
device = start()
model = GPT().to(device)
if kind == "unused":
    model.spare = nn.Linear(8, 8, device=device)
options = {
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "buckets": {"bucket_cap_mb": 5, "gradient_as_bucket_view": True},
}
parallel = DistributedDataParallel(model, device_ids=[device.index], **options.get(kind, {}))
if kind in ("fp16", "bf16"):
    parallel.register_comm_hook(None, getattr(default_hooks, f"{kind}_compress_hook"))
if kind == "powersgd":
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
optimizer = optim.AdamW(parallel.parameters(), lr=1e-3)
for _ in range(4):
    if kind == "no_sync":
        for _ in range(2):
            with parallel.no_sync():
                loss_of(parallel(batch(device)[0]), batch(device)[1]).backward()
    tokens, targets = batch(device)
    loss_of(parallel(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
