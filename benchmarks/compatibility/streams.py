"""Streams, events and timing; recorded tensors; memory statistics, snapshots and summaries."""

import pickle
import tempfile
from pathlib import Path

import torch
from gpt import start
from torch import nn, optim

device = start()
model = nn.Linear(4096, 4096, device=device)
optimizer = optim.SGD(model.parameters(), lr=1e-3)
copies, begin, end = torch.cuda.Stream(priority=-1), torch.cuda.Event(enable_timing=True), torch.cuda.Event(True)
torch.cuda.memory._record_memory_history(max_entries=1000)
host = torch.randn(4096, 4096).pin_memory()
for _ in range(4):
    begin.record()
    with torch.cuda.stream(copies):
        x = host.to(device, non_blocking=True)
        ready = copies.record_event()
    torch.cuda.current_stream().wait_event(ready)
    x.record_stream(torch.cuda.current_stream())
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    end.record()
    while not end.query():
        pass
    end.synchronize()
    assert begin.elapsed_time(end) > 0
torch.cuda.synchronize()
torch.cuda.current_stream().synchronize()
print(torch.cuda.memory_summary(abbreviated=True)[:200])
assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() > 0
assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] > 0
snapshot = torch.cuda.memory._snapshot()
assert pickle.loads(pickle.dumps(snapshot))["segments"]
with tempfile.TemporaryDirectory() as folder:
    torch.cuda.memory._dump_snapshot(str(Path(folder) / "snapshot.pickle"))
torch.cuda.memory._record_memory_history(enabled=None)
torch.cuda.reset_peak_memory_stats()
torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
print(f"{free / total:.2f} free, {torch.cuda.get_device_name()}, {torch.cuda.memory_reserved()} reserved")
print(torch.cuda.get_device_properties(0).total_memory)
