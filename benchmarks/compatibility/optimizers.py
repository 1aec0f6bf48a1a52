"""Optimizers: fused, foreach and looped; Adafactor, Adagrad, LBFGS, Muon; schedules; ZeRO; EMA and SWA."""

import argparse

import torch
from gpt import GPT, batch, loss_of, start
from torch import optim
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

MADE = {
    "adamw_fused": lambda p: optim.AdamW(p, lr=1e-3, fused=True),
    "adamw_foreach": lambda p: optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw_loop": lambda p: optim.AdamW(p, lr=1e-3, foreach=False),
    "adamw_capturable": lambda p: optim.AdamW(p, lr=1e-3, capturable=True),
    "sgd_fused": lambda p: optim.SGD(p, lr=1e-3, momentum=0.9, fused=True),
    "sgd_foreach": lambda p: optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "adafactor": lambda p: optim.Adafactor(p, lr=1e-3),
    "adagrad": lambda p: optim.Adagrad(p, lr=1e-3),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3),
    "nadam": lambda p: optim.NAdam(p, lr=1e-3),
    "lbfgs": lambda p: optim.LBFGS(p, lr=1e-3, max_iter=4),
    "muon": lambda p: optim.Muon([w for w in p if w.ndim == 2], lr=1e-3),
    "zero": lambda p: ZeroRedundancyOptimizer(p, optimizer_class=optim.AdamW, lr=1e-3, overlap_with_ddp=False),
    "schedule": lambda p: optim.AdamW(p, lr=1e-3),
    "average": lambda p: optim.AdamW(p, lr=1e-3),
}
parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=MADE)
kind = parser.parse_args().kind
device = start()
model = GPT(2).to(device)
if kind == "zero":
    model = DistributedDataParallel(model, device_ids=[device.index])
optimizer = MADE[kind](list(model.parameters()))
warm = optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2)
schedule = optim.lr_scheduler.SequentialLR(optimizer, [warm, optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)], [2])
plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer)
if kind == "average":
    ema, swa = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)), AveragedModel(model)
    annealing = SWALR(optimizer, swa_lr=1e-4)


def closure() -> torch.Tensor:
    optimizer.zero_grad()
    tokens, targets = batch(device)
    loss = loss_of(model(tokens), targets)
    loss.backward()
    return loss


for _ in range(4):
    loss = optimizer.step(closure)
    if kind == "schedule":
        schedule.step()
        plateau.step(loss.item())
    if kind == "average":
        ema.update_parameters(model)
        swa.update_parameters(model)
        annealing.step()
if kind == "average":
    update_bn([batch(device)[0]], swa, device=device)
