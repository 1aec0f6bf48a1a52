"""An ordinary DistributedDataParallel script, as torchrun runs it. By a schedule of foretrain's, without a change:

foretrain run --nproc 2 --schedule bytescheduler -- examples/07_train.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 3


def data() -> TensorDataset:
    """Points on two rings, by which ring they are on."""
    angle = torch.rand(512) * 6.283
    ring = torch.randint(2, (512,))
    radius = 1 + ring + 0.2 * torch.randn(512)
    return TensorDataset(torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), ring)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    points = data()
    sampler = DistributedSampler(points)
    loader = DataLoader(points, batch_size=32, sampler=sampler)
    network = nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    model.eval()
    with torch.no_grad():
        right = (model(points.tensors[0]).argmax(1) == points.tensors[1]).float().mean()
    if dist.get_rank() == 0:
        print(f"{right:.1%} of {len(points)} points are on the ring they were put on")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
