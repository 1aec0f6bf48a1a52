"""Recording on a GPU: do the layers' times add up to the step, and what does recording cost?

Records a stack of large linear layers with CUDA events and compares Σ forward + backward + update with the step's time
measured from outside, without hooks. Needs a CUDA build of torch and a GPU; says so and ends where there is none.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from measure import finish, options
from torch import nn

from foretrain.units import to_seconds
from foretrain.workload import record


def main() -> None:
    """Prints the recorded and the measured time, and the RESULT line."""
    arguments = options(__doc__ or "")
    if not torch.cuda.is_available():
        print("skipped: no CUDA device here")
        return
    model = nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(4096, 4096), nn.GELU()))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.randn(1024, 4096, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    def timed() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(5):
        timed()
    outside = median(timed() for _ in range(25))
    workload = record(step, model, batch=1024, iterations=25)
    inside = to_seconds(workload.compute + workload.update)
    print(f"{torch.cuda.get_device_name()}: step {outside * 1e3:.2f} ms, recorded {inside * 1e3:.2f} ms")
    finish(arguments, "gpu_record", {"step_s": outside, "recorded_vs_step": inside / outside})


if __name__ == "__main__":
    main()
