"""Mixed precision: fp16 with GradScaler, bf16, pure bf16, TF32."""

import argparse

import torch
from gpt import GPT, batch, loss_of, start
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("fp16", "bf16", "pure", "tf32"))
kind = parser.parse_args().kind
device = start()
model = GPT().to(device, torch.bfloat16 if kind == "pure" else torch.float32)
optimizer = optim.AdamW(model.parameters(), lr=1e-3, fused=kind == "fp16")
scaler = torch.amp.GradScaler("cuda", enabled=kind == "fp16")
torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
for _ in range(4):
    tokens, targets = batch(device)
    with torch.autocast("cuda", torch.float16 if kind == "fp16" else torch.bfloat16, enabled=kind in ("fp16", "bf16")):
        loss = loss_of(model(tokens), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
assert kind != "fp16" or scaler.get_scale() == 65536.0
