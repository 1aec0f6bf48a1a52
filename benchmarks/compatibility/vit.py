"""timm: a vision transformer with its own optimizer, mixup and EMA."""

import timm
import torch
from gpt import start
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch.nn.parallel import DistributedDataParallel

device = start()
model = timm.create_model("vit_small_patch16_224", num_classes=1000, drop_path_rate=0.1).to(device)
ema = ModelEmaV3(model)
parallel = DistributedDataParallel(model, device_ids=[device.index])
optimizer = create_optimizer_v2(parallel, opt="adamw", lr=1e-3)
mixup, loss_of = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=1000), SoftTargetCrossEntropy()
for step in range(4):
    images, labels = torch.randn(64, 3, 224, 224, device=device), torch.randint(1000, (64,), device=device)
    images, targets = mixup(images, labels)
    with torch.autocast("cuda", torch.bfloat16):
        loss = loss_of(parallel(images), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    ema.update(model, step)
