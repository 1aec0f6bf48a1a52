"""JAX models that train under foretrain, and what one process alone computes; ranks of test_jax run it.

As a script, ``foretrain run --nproc 2 -- jax_job.py NAME``, it prints what `trained` returns.
"""

import os
import signal
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


def worst(a, b):
    """By NumPy, which compiles nothing."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.float32(p) - np.float32(q)).max()) for p, q in pairs)


def trained(name, schedule=None, transport=None):
    """Return the largest difference to what one process computes, on rank 0 alone, and to rank 0's parameters."""
    optimizer, crosses, dtype, together = CASES[name]
    with ft.Session(schedule, transport) as session:
        rank = session.rank
        mine = INPUTS[:, rank], TARGETS[:, rank]
        params = parameters(3 + rank * (name not in FROZEN), dtype)
        if crosses:
            found = across(name, optimizer, params, session, *mine, together)
        else:
            found = barrier(optimizer, ft.jax.broadcast(params, session), session, *mine)
        first = ft.jax.broadcast(found, session)
    assert "torch" not in sys.modules, "a rank of JAX needs no PyTorch, which takes seconds to import"
    return 0.0 if rank else worst(found, alone(name, optimizer, parameters(3, dtype))), worst(found, first)


def refusals():
    """Return what each wrong use is answered with, and two lines of numbers."""
    said = []
    params = {"one": {"w": jnp.ones((2, 2))}, "two": {"w": jnp.ones((2, 2))}}
    sgd = optax.sgd(0.1)

    def refused(call, *arguments):
        try:
            jax.block_until_ready(call(*arguments))
        except ft.ConfigError as error:
            said.append(str(error))
        except Exception as error:  # JAX's own, around the session's
            said.append(" ".join(str(error).split()))

    with ft.Session() as session:
        refused(ft.jax.DeferredUpdates(sgd, session).init, [jnp.ones(2)])
        frozen = optax.multi_transform({"yes": sgd, "no": optax.set_to_zero()}, {"one": "no", "two": "yes"})
        refused(ft.jax.DeferredUpdates(frozen, session).init, params)
        clipped = optax.chain(optax.clip_by_global_norm(1.0), sgd)
        refused(ft.jax.DeferredUpdates(clipped, session).init, params)
        updates = ft.jax.DeferredUpdates(sgd, session)
        state = updates.init(params)
        refused(updates.step, lambda taps: taps("three", jnp.ones(2))["w"].sum(), state)
        refused(updates.step, lambda taps: taps("one", jnp.ones(2))["w"].sum(), state)
        refused(ft.jax.DeferredUpdates(sgd, session).init, {"drop": {"key": jax.random.key(0)}})

        def squares(taps):
            hidden = taps("one", jnp.ones(2))["w"] @ jnp.ones(2)
            return ((taps("two", hidden)["w"] @ hidden) ** 2).sum()

        step = jax.jit(lambda state: updates.step(squares, state)[1])
        first = step(state)
        second = jax.block_until_ready(step(first))
        for late in (step, updates.flush):  # the gradients of the first step are gone
            refused(late, first)
        said.append(" ".join(f"{updates.flush(second).params['two']['w'].sum():.4f}" for _ in range(2)))
    with ft.Session() as session:
        grads = ft.jax.scheduled_value_and_grad(lambda p: p["w"].sum(), session)
        jax.jit(grads)({"w": jnp.ones((2, 2))})
        refused(jax.jit(grads), {"w": jnp.ones((3, 2))})
    with ft.Session() as session:
        grads = ft.jax.scheduled_value_and_grad(lambda p, x: ((p["w"] @ x) ** 2).sum(), session)
        w = {"w": jnp.ones((2, 2))}
        refused(jax.jit(lambda: (grads(w, jnp.ones(2)), grads(w, jnp.ones(2)))))

        def summed(total, x):
            return total + grads(w, x)[1]["w"], None

        said.append(str(jax.jit(lambda xs: jax.lax.scan(summed, 0 * w["w"], xs)[0])(jnp.ones((5, 2))).sum()))
        refused(jax.vmap(grads, in_axes=(None, 0)), w, jnp.ones((3, 2)))
    return said


def ending(how):
    """Rank 1 is killed or interrupted in the middle, or trains another model."""
    with ft.Session(timeouts=ft.Timeouts(peer=10)) as session:
        width = 3 if how == "another" and session.rank == 1 else 2
        graded = jax.jit(ft.jax.scheduled_value_and_grad(lambda p: (p["w"] ** 2).sum(), session))
        params = ft.jax.broadcast({"w": jnp.ones((4, width))}, session)
        for step in range(16):
            _, means = jax.block_until_ready(graded(params))
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, means)
            if session.rank == 1 and step == 6:
                if how == "interrupted":
                    raise KeyboardInterrupt
                os.kill(os.getpid(), signal.SIGKILL)


def recorded():
    """What `foretrain record` asks a script for."""
    params = {"back": jnp.ones((256, 8)), "front": {"w": jnp.ones((64, 256)), "b": jnp.ones(256)}}

    def small(params, x):
        return ((x @ params["front"]["w"] + params["front"]["b"]) @ params["back"]).sum()

    return small, (params, jnp.ones((16, 64))), 16


if __name__ == "__main__":
    sys.stdout.write(f"{trained(sys.argv[1])}\n")
