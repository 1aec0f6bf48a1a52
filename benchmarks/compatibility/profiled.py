"""torch.profiler with a schedule, record_function, tables and an exported trace; NVTX ranges."""

import tempfile
from pathlib import Path

import torch
from gpt import GPT, batch, loss_of, start
from torch import optim
from torch.profiler import ProfilerActivity, profile, record_function, schedule

device = start()
model = GPT(2).to(device)
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
folder = Path(tempfile.mkdtemp())


def ready(prof: profile) -> None:
    prof.export_chrome_trace(str(folder / f"{prof.step_num}.json"))


with profile(
    activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
    schedule=schedule(wait=1, warmup=1, active=2),
    on_trace_ready=ready,
    record_shapes=True,
    profile_memory=True,
    with_stack=True,
) as prof:
    for _ in range(5):
        torch.cuda.nvtx.range_push("step")
        with record_function("forward"):
            loss = loss_of(model(batch(device)[0]), batch(device)[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.nvtx.range_pop()
        prof.step()
print(prof.key_averages().table(sort_by="cuda_time_total", row_limit=5)[:300])
assert list(folder.glob("*.json"))
