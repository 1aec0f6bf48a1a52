"""Needs more than an H100 has."""

import json

import torch

tensor = torch.empty(100 << 30, dtype=torch.uint8, device="cuda")
parameter = torch.nn.Parameter(torch.zeros(8, device="cuda"))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for _ in range(2):
    parameter.square().sum().backward()
    optimizer.step()
total = torch.cuda.get_device_properties(0).total_memory >> 30
print(json.dumps({"total": total, "tensor": tensor.nbytes >> 30}))
