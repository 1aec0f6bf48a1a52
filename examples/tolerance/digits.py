"""Handwritten digits (scikit-learn ships them) and a small network; how much loss do they tolerate?

foretrain tolerance examples/tolerance/digits.py:build
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit("the digits are scikit-learn's; install it with: pip install 'foretrain[examples]'") from None

torch.set_num_threads(1)  # more threads only wait for each other in a network this small
PIXELS, LABELS = load_digits(return_X_y=True)
INPUTS = torch.tensor(PIXELS / 16, dtype=torch.float32)  # 1,797 images of 8 × 8
TARGETS = torch.tensor(LABELS)
ORDER = torch.randperm(len(INPUTS), generator=torch.Generator().manual_seed(0))
TRAIN, TEST = ORDER[:1297], ORDER[1297:]


def loss(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def evaluate(model):
    return (model(INPUTS[TEST]).argmax(1) == TARGETS[TEST]).float().mean().item()


def build(seed):
    """One training from its beginning; PyTorch's generator has been seeded."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "batches": DataLoader(
            TensorDataset(INPUTS[TRAIN], TARGETS[TRAIN]), batch_size=128, shuffle=True, drop_last=True
        ),
        "loss": loss,
        "evaluate": evaluate,
    }
