"""Train without any framework: foretrain orders and sums the gradients of plain NumPy arrays.

    foretrain run --nproc 2 -- examples/08_numpy.py

Each rank sees its own half of the data. A layer waits for its own gradient where its next forward pass begins, so that
communication goes on across the steps; all ranks end with the same weights.
"""

from itertools import pairwise

import numpy as np

import foretrain as ft

WIDTHS = (64, 256, 256, 10)
RATE, STEPS, BATCH = 0.1, 30, 64

random = np.random.default_rng(0)
weights = [random.standard_normal((n, m), np.float32) * np.float32((2 / n) ** 0.5) for n, m in pairwise(WIDTHS)]
teacher = random.standard_normal((WIDTHS[0], WIDTHS[-1]), np.float32)


def batch(rank, step):
    """Points, and the class of each."""
    points = np.random.default_rng((rank, step)).standard_normal((BATCH, WIDTHS[0]), np.float32)
    return points, (points @ teacher).argmax(1)


with ft.Session() as session:
    tasks = session.declare([(f"layer{k}", weight.nbytes, "float32") for k, weight in enumerate(weights)])
    for step in range(STEPS):
        values, classes = batch(session.rank, step)
        inputs = []
        for task, weight in zip(tasks, weights, strict=True):  # the forward pass waits layer by layer
            weight -= RATE * task.wait().reshape(weight.shape)
            inputs.append(values)
            values = values @ weight
            if weight is not weights[-1]:
                values = np.maximum(values, 0)
        odds = np.exp(values - values.max(1, keepdims=True))
        odds /= odds.sum(1, keepdims=True)
        loss = -np.log(odds[range(BATCH), classes]).mean()
        if session.rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss:.3f}")

        session.begin_step()
        odds[range(BATCH), classes] -= 1
        flow = odds / BATCH
        for k in reversed(range(len(weights))):  # gradients go as they are computed
            tasks[k].ready(inputs[k].T @ flow)
            flow = (flow @ weights[k].T) * (inputs[k] > 0)
    session.wait_all()
    print(
        f"rank {session.rank} of {session.ranks}: {session.schedule}; Σ|w| = {sum(abs(w).sum() for w in weights):.4f}"
    )
