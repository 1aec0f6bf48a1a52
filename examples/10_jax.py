"""Train a model in JAX: each layer waits for its own gradients where it begins, and is updated there.

    foretrain run --nproc 2 -- examples/10_jax.py

Each rank sees its own half of the data. With `ft.jax.scheduled_value_and_grad` instead, gradients are averaged as they
are computed, and the step ends when all are there: one line changes, and any optimizer follows.
"""

import os
from itertools import pairwise

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretrain as ft

WIDTHS, STEPS, BATCH = (64, 256, 128, 10), 60, 64
random = np.random.default_rng(0)
params = {
    f"layer{k}": {"w": jnp.asarray(random.standard_normal((n, m)) * (2 / n) ** 0.5, jnp.float32), "b": jnp.zeros(m)}
    for k, (n, m) in enumerate(pairwise(WIDTHS))
}
teacher = random.standard_normal((64, 10))

with ft.Session() as session:
    updates = ft.jax.DeferredUpdates(optax.adam(3e-3), session)
    state = updates.init(params)  # rank 0's

    @jax.jit
    def step(state, points, classes):
        def loss(taps):
            flow = points
            for name in params:
                layer = taps(name, flow)
                flow = flow @ layer["w"] + layer["b"]
                flow = jax.nn.relu(flow) if name != "layer2" else flow
            return optax.softmax_cross_entropy_with_integer_labels(flow, classes).mean()

        return updates.step(loss, state)

    losses = []
    for number in range(STEPS):
        points = np.random.default_rng((session.rank, number)).standard_normal((BATCH, WIDTHS[0]), np.float32)
        value, state = step(state, points, (points @ teacher).argmax(1))
        losses.append(float(value))
    weights = sum(float(jnp.abs(leaf).sum()) for leaf in jax.tree.leaves(updates.flush(state).params))
    print(f"rank {session.rank}: {session.schedule}; loss {losses[0]:.2f} → {losses[-1]:.2f}; Σ|w| = {weights:.4f}")
