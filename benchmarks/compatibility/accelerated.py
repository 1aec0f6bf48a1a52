"""Accelerate: prepare, accumulate, clip, gather."""

import torch
from accelerate import Accelerator
from gpt import GPT, SEQUENCE, VOCABULARY, loss_of
from torch import optim
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
data = TensorDataset(torch.randint(VOCABULARY, (256, SEQUENCE)))
model, loader = GPT(), DataLoader(data, batch_size=4)
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for (tokens,) in loader:
    with accelerator.accumulate(model):
        loss = loss_of(model(tokens), tokens)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
mean = accelerator.gather(loss.detach().reshape(1)).mean()
accelerator.print(f"loss {mean.item():.3f}")
accelerator.wait_for_everyone()
