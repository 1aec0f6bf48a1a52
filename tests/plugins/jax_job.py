"""One rank of JAX models that train under foretrain, and what one process alone computes; run by test_jax.

    foretrain run --nproc 2 -- jax_job.py NAME...

Prints, per case, ``NAME rank DIFFERENCE-TO-ONE-PROCESS DIFFERENCE-TO-RANK-0``; the first on rank 0 alone.
"""

import os
import sys

# What takes long is to compile.
os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}

import jax
import jax.numpy as jnp
import numpy as np
import optax

import foretrain as ft

WIDTHS, BATCH, STEPS = (12, 24, 24, 6), 16, 10
LAYERS = [f"layer{k}" for k in range(len(WIDTHS) - 1)]
random = np.random.default_rng(0)
INPUTS = random.standard_normal((STEPS, 2, BATCH, WIDTHS[0]), dtype=np.float32)
TARGETS = random.standard_normal((STEPS, 2, BATCH, WIDTHS[-1]), dtype=np.float32)


def parameters(seed, dtype=jnp.float32):
    random = np.random.default_rng(seed)
    return {
        name: {
            "w": jnp.asarray((random.standard_normal((n, m)) * (2 / n) ** 0.5).astype(dtype)),
            "b": jnp.asarray(np.zeros(m, dtype)),
        }
        for name, n, m in zip(LAYERS, WIDTHS, WIDTHS[1:], strict=False)
    }


def loss(of, x, y, uses=LAYERS):
    """``of`` returns the parameters of a layer, for what it computes with."""
    for name in uses:
        params = of(name, x)
        x = x.astype(params["w"].dtype) @ params["w"] + params["b"]
        x = jnp.tanh(x) if name != LAYERS[-1] else x
    return jnp.mean((x - y) ** 2)


USES = {"shared": [*LAYERS[:2], *LAYERS[1:]]}
"""Layers in the order of their use; all of them, one after the other, where a case is not named."""
FROZEN = {"frozen": LAYERS[0]}
"""Layer that is not trained, by case."""
SOME = optax.multi_transform(
    {"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()},
    {name: "frozen" if name == LAYERS[0] else "trained" for name in LAYERS},
)
CASES = {  # name: optimizer, whether layers wait for themselves, type, steps in one call
    "barrier": (optax.adam(1e-2), False, jnp.float32, 1),
    "global": (optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)), False, jnp.float32, 1),
    "across": (optax.adam(1e-2), True, jnp.float32, 1),
    "momentum": (optax.sgd(optax.exponential_decay(0.1, 1, 0.9), momentum=0.9), True, jnp.float32, 1),
    "decay": (optax.adamw(1e-2, weight_decay=0.1), True, jnp.float32, 1),
    "scan": (optax.adam(1e-2), True, jnp.float32, 5),
    "shared": (optax.adam(1e-2), True, jnp.float32, 1),
    "frozen": (optax.adam(1e-2), True, jnp.float32, 1),
    "masked": (SOME, False, jnp.float32, 1),
    "half": (optax.sgd(0.1), True, jnp.bfloat16, 1),
}


def barrier(optimizer, params, session, inputs, targets):
    def of_all(params, x, y):
        return loss(lambda name, _: params[name], x, y)

    grads_of, state = ft.jax.scheduled_value_and_grad(of_all, session), jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, state, x, y):
        value, grads = grads_of(params, x, y)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, value

    for x, y in zip(inputs, targets, strict=True):
        params, state, _ = step(params, state, x, y)
    return params


def across(case, optimizer, params, session, inputs, targets, together):
    updates = ft.jax.DeferredUpdates(optimizer, session)
    frozen = {name: params[name] for name in LAYERS if name == FROZEN.get(case)}
    state = updates.init({name: params[name] for name in LAYERS if name not in frozen})

    def step(state, batch):
        def tapped(taps):
            return loss(lambda name, x: frozen.get(name) or taps(name, x), *batch, USES.get(case, LAYERS))

        value, state = updates.step(tapped, state)
        return state, value

    steps = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))
    for at in range(0, STEPS, together):
        state, _ = steps(state, (inputs[at : at + together], targets[at : at + together]))
        if at == STEPS // 2:
            state = updates.flush(state)
    return frozen | updates.flush(state).params


def alone(case, optimizer, params):
    """Parameters after training on both ranks' batches in one process: gradients of each half, then their mean."""
    frozen = {name: params.pop(name) for name in LAYERS if name == FROZEN.get(case)}
    state = jax.jit(optimizer.init)(params)

    def of_all(params, x, y):
        return loss(lambda name, _: (frozen | params)[name], x, y, USES.get(case, LAYERS))

    @jax.jit
    def step(params, state, x, y):
        halves = [jax.grad(of_all)(params, x[k], y[k]) for k in range(2)]
        mean = jax.tree.map(lambda a, b: (a * 0.5 + b * 0.5).astype(a.dtype), *halves)
        changes, state = optimizer.update(mean, state, params)
        return optax.apply_updates(params, changes), state

    for x, y in zip(INPUTS, TARGETS, strict=True):
        params, state = step(params, state, x, y)
    return frozen | params


def main():
    for name in sys.argv[1:]:
        optimizer, crosses, dtype, together = CASES[name]
        with ft.Session() as session:
            rank = session.rank
            mine = INPUTS[:, rank], TARGETS[:, rank]
            params = parameters(3 + rank * (name not in FROZEN), dtype)
            if crosses:
                found = across(name, optimizer, params, session, *mine, together)
            else:
                found = barrier(optimizer, ft.jax.broadcast(params, session), session, *mine)
            first = ft.jax.broadcast(found, session)
            print(f"{name} {rank} of {session.ranks}: {session.schedule}", file=sys.stderr)

        def worst(a, b):  # by NumPy, which compiles nothing
            pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
            return max(float(np.abs(np.float32(p) - np.float32(q)).max()) for p, q in pairs)

        expected = worst(found, alone(name, optimizer, parameters(3, dtype))) if rank == 0 else float("nan")
        sys.stdout.write(f"{name} {rank} {expected:.3g} {worst(found, first):.3g}\n")
    assert "torch" not in sys.modules, "a rank of JAX needs no PyTorch, which takes seconds to import"


if __name__ == "__main__":
    main()
