"""A flax.nnx model that trains under foretrain, and what one process alone computes; ranks of test_jax run it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import foretrain as ft
from tests.plugins.jax_job import worst

STEPS, BATCH = 10, 16
random = np.random.default_rng(0)
INPUTS = random.standard_normal((STEPS, 2, BATCH, 12), dtype=np.float32)
TARGETS = random.standard_normal((STEPS, 2, BATCH, 6), dtype=np.float32)


class Network(nnx.Module):
    """Statistics and random keys beside the parameters: they have no gradients."""

    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        # Normalization follows: a bias would have a gradient of rounding errors alone, of which Adam makes whole steps.
        self.first = nnx.Linear(12, 24, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(24, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(24, 6, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(jnp.tanh(self.norm(self.first(x)))))


def jitted(value_and_grad):
    """A step of `nnx.jit`, whose gradients are those of ``value_and_grad(loss)``."""

    @nnx.jit
    def step(model, optimizer, x, y):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, x, y):
            copied = nnx.merge(graph, params, rest, copy=True)
            return jnp.mean((copied(x) - y) ** 2), nnx.state(copied, nnx.Not(nnx.Param))

        (_, rest), grads = value_and_grad(loss)(params, x, y)
        nnx.update(model, rest)
        optimizer.update(model, grads)

    return step


def trained(model, step, inputs, targets):
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for x, y in zip(inputs, targets, strict=True):
        step(model, optimizer, x, y)
    return nnx.state(model, nnx.Param)


def barrier(model, session, inputs, targets):
    nnx.update(model, ft.jax.broadcast(nnx.state(model, nnx.Param), session))
    step = jitted(lambda loss: ft.jax.scheduled_value_and_grad(loss, session, has_aux=True))
    return trained(model, step, inputs, targets)


def across(model, session, inputs, targets):
    layers = {name: nnx.split(getattr(model, name), nnx.Param, ...) for name in ("first", "norm", "last")}
    updates = ft.jax.DeferredUpdates(optax.adam(1e-2), session)
    state, drop = updates.init({name: params for name, (_, params, _) in layers.items()}), nnx.split(model.drop)

    @jax.jit
    def step(state, drop, x, y):
        def loss(taps):
            def layer(name, flow):
                graph, _, rest = layers[name]
                return nnx.merge(graph, taps(name, flow), rest, copy=True)(flow)

            dropped = nnx.merge(*drop, copy=True)
            found = layer("last", dropped(jnp.tanh(layer("norm", layer("first", x)))))
            return jnp.mean((found - y) ** 2), nnx.split(dropped)

        (_, drop), state = updates.step(loss, state, has_aux=True)
        return state, drop

    for x, y in zip(inputs, targets, strict=True):
        state, drop = step(state, drop, x, y)
    return updates.flush(state).params


def halves(loss):
    """Gradients of each half of a joint batch, then their mean."""

    def value_and_grad(params, x, y):
        (value, grads), (_, others) = [jax.value_and_grad(loss, has_aux=True)(params, x[k], y[k]) for k in range(2)]
        return value, jax.tree.map(lambda a, b: a * 0.5 + b * 0.5, grads, others)

    return value_and_grad


def train(how):
    """As `trained` of jax_job, with a barrier or across it."""
    with ft.Session("bytescheduler") as session:
        rank = session.rank
        found = {"barrier": barrier, "across": across}[how](
            Network(3 + rank), session, INPUTS[:, rank], TARGETS[:, rank]
        )
        first = ft.jax.broadcast(found, session)
        layers = {layer.name for layer in session.workload.layers}
        assert layers == {"first", "norm", "last"}, layers
    return 0.0 if rank else worst(found, trained(Network(3), jitted(halves), INPUTS, TARGETS)), worst(found, first)
