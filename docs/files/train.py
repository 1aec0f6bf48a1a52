"""A training script as it might be anywhere, with one addition: `setup`, which `foretrain record` calls."""

import torch
from torch import nn

BATCH = 256


def setup():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 2048),
        nn.ReLU(),
        nn.Linear(2048, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return model, step, BATCH


if __name__ == "__main__":
    _, step, _ = setup()
    for _ in range(100):
        step()
