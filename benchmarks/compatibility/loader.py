"""DataLoader with worker processes, pinned memory and a distributed sampler."""

import torch
from gpt import start
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(3, 64, 64), index % 10


device = start()
data = Images()
loader = DataLoader(
    data, batch_size=32, sampler=DistributedSampler(data), num_workers=2, pin_memory=True, persistent_workers=True
)
model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).to(
    device
)
optimizer = optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
