"""DLCP: which packets may be dropped, by the magnitudes of gradients recorded in a small training on digits.

    rounds of gradients ──▶ mean |g| of each packet ──▶ important where at or above a quantile of the round before

That is the rule of ``tag()`` in foretrain/comm/bounded/engine.cpp. Each worker of the simulation has a round of its
own, and a tensor of the simulated model reads the recorded layer that is as deep in its network, over and over.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

SEED = 0
BEFORE, ROUNDS, BATCH = 40, 9, 64
"""Steps before the record, so that weights are no longer random; recorded rounds, of which the first has no round
before; samples of a step."""


@cache
def magnitudes(payload: int) -> tuple[NDArray[np.float64], ...]:
    """Return the mean |g| of each packet of ``payload`` bytes: (rounds, packets) of each layer, front layers first."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    torch.manual_seed(SEED)
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    targets = torch.tensor(labels)
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 128), nn.ReLU()),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    layers = [module for module in model if isinstance(module, nn.Conv2d | nn.Linear)]
    found: list[list[NDArray[np.float64]]] = [[] for _ in layers]
    for turn in range(BEFORE + ROUNDS):
        batch = torch.randint(len(targets), (BATCH,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        for rows, layer in zip(found, layers, strict=True):
            if turn >= BEFORE:
                assert layer.weight.grad is not None
                rows.append(per_packet(layer.weight.grad.numpy().ravel(), payload))
        optimizer.step()
    return tuple(np.array(rows) for rows in found)


def per_packet(gradient: NDArray[np.float32], payload: int) -> NDArray[np.float64]:
    """Return the mean magnitude of each packet; the last one may be short."""
    first = np.arange(0, len(gradient), payload // 4)
    return np.add.reduceat(np.abs(gradient, dtype=np.float64), first) / np.diff(np.append(first, len(gradient)))


def important(means: NDArray[np.float64], share: float) -> NDArray[np.bool_]:
    """Return which packets of each round but the first are important, (rounds − 1, packets), where about ``share`` of
    them are to be: those whose magnitude is at least a quantile of the round before."""
    place = int((1 - share) * means.shape[1])
    return means[1:] >= np.sort(means[:-1], axis=1)[:, place, None]


@cache
def _of_layers(payload: int, share: float) -> tuple[NDArray[np.bool_], ...]:
    return tuple(important(means, share) for means in magnitudes(payload))


def tags(payload: int, share: float, depth: float, worker: int, tensor: int, packets: int) -> NDArray[np.bool_]:
    """Return which ``packets`` of a tensor are important.

    Args:
        payload: bytes of a packet.
        share: of packets, that is to be important.
        depth: of the tensor's layer, 0 at the front to 1.
        worker: whose gradient it is.
        tensor: by number; neighbours begin at other places of the record.
        packets: how many.
    """
    if share in (0, 1):
        return np.full(packets, share == 1)
    layers = _of_layers(payload, share)
    rows = layers[min(int(depth * len(layers)), len(layers) - 1)]
    recorded = rows[worker % len(rows)]
    # Not np.take(…, mode="wrap"): that subtracts the length as often as an index has it, hundreds of times each here.
    return recorded[(np.arange(packets) + 7919 * tensor) % len(recorded)]
