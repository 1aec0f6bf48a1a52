"""torchvision: ResNet-50 with DDP, channels_last and fp16."""

import torch
from gpt import start
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet50

device = start()
model = DistributedDataParallel(resnet50().to(device, memory_format=torch.channels_last), device_ids=[device.index])
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cuda")
for _ in range(4):
    images = torch.randn(64, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.float16):
        loss = nn.functional.cross_entropy(model(images), torch.randint(1000, (64,), device=device))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
