"""JAX: gradients are exchanged while a compiled step computes the others.

    step = ft.jax.scheduled_value_and_grad(loss)     # instead of jax.value_and_grad: the means of all ranks
    updates = ft.jax.DeferredUpdates(optax.adam(1e-3))        # updates where layers begin: crosses the barrier

                               in the backward pass       after it        at a layer's entry, one step later
    scheduled_value_and_grad   each gradient goes         means
    DeferredUpdates            each gradient goes                         its mean → its update → its forward pass

# Note [Taps]
A parameter goes through a function whose derivative hands the gradient over. Its second argument is a number whose
derivative is what the callback returns, the step's number: all of them are there when all gradients have gone. Every
wait takes an argument made of them, because a callback that waits keeps a thread without which others could not go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import io_callback
from jax.extend.core import get_opaque_trace_state

from foretrain.comm.session import Session
from foretrain.errors import ConfigError
from foretrain.plugins.gradient_stream import GradientSpec, GradientStream, recorded, recording, warn_if_untested
from foretrain.plugins.gradient_stream import broadcast as stream_broadcast
from foretrain.units import NANOSECOND
from foretrain.workload.step import Workload

_ENTRY = jax.ShapeDtypeStruct((), np.float32)


def scheduled_value_and_grad(
    loss: Callable[..., Any], session: Session | None = None, *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Return ``jax.value_and_grad(loss)`` whose gradients are the means of all ranks, exchanged as they are computed.

    To be called inside `jax.jit`, once per step, by all ranks equally often: gradients are accumulated in a loop of
    `jax.lax.scan`, and not under `jax.vmap`. Any optimizer may follow. Collective when first traced.

    Args:
        loss: of the parameters, a pytree of floating-point arrays on one device, and of anything else.
        session: where gradients are exchanged; None makes one of what ``foretrain run`` says.
        has_aux: as of `jax.value_and_grad`.

    Returns:
        A function that returns this rank's value, and the mean gradients in the structure of the parameters. It raises
        ConfigError when it is traced with other parameters than before or twice in a step, and what JAX makes of a
        ForetrainError, with its text, when the job fails.
    """
    stream = GradientStream(session)
    warn_if_untested(stream.session.rank, "jax", jax.__version__, "0.10")
    last: Any = None

    def value_and_grad(parameters: Any, *others: Any, **options: Any) -> tuple[Any, Any]:
        nonlocal last
        trace = get_opaque_trace_state(convention="flax")
        zero = jnp.zeros(())
        if isinstance(zero, Tracer) and trace == last:
            # XLA may run the calls in any order and at once, and each rank in its own.
            remedy = "accumulate gradients, or repeat steps, with jax.lax.scan"
            raise ConfigError("scheduled_value_and_grad", "its function", "is called twice in one step", remedy)
        last = trace
        names, leaves, structure = _flat(parameters)
        # Layers are the text before the last dot: a parameter that is in no layer is one itself.
        names = [name if "." in name else f"{name}.value" for name in names]
        stream.declare(_described(names, leaves), ordered=True)

        def tapped(tokens: Sequence[Any]) -> Any:
            found = [_tap(partial(_push, stream, k), leaf, tokens[k]) for k, leaf in enumerate(leaves)]
            return loss(jax.tree.unflatten(structure, found), *others, **options)

        value, tokens = jax.value_and_grad(tapped, has_aux=has_aux)([zero] * len(leaves))
        gone = reduce(jnp.maximum, tokens)
        means = [io_callback(partial(_wait, stream, k), _like(leaf), gone) for k, leaf in enumerate(leaves)]
        return value, jax.tree.unflatten(structure, means)

    return value_and_grad


def record(
    loss: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    batch: int,
    name: str | None = None,
    iterations: int = 10,
    warmup: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> Workload:
    """Compute ``loss`` and its gradients as often, and return the median step as a workload, without an update.

    Args:
        loss: as of `scheduled_value_and_grad`.
        arguments: its arguments, the parameters first.
        batch: samples per step.
        name: of the workload; the function's when not given.
        iterations: steps that are measured.
        warmup: steps before them; only the first, which is compiled, is left out, the others move no median.
        progress: called after each step with the number of steps done and in all.

    Raises:
        ConfigError: as of `scheduled_value_and_grad`; or a number is too small.
    """
    count = warmup + iterations
    with recording(iterations, warmup) as session:
        forward, graded = jax.jit(loss), jax.jit(scheduled_value_and_grad(loss, session))
        took: list[int] = []
        for index in range(count + 1):
            # In turns, so that what else the machine does slows both; the session takes it for part of the pass.
            began = time.perf_counter_ns()
            jax.block_until_ready(forward(*arguments))
            took.append(time.perf_counter_ns() - began)
            jax.block_until_ready(graded(*arguments))
            if progress:
                progress(min(index + 1, count), count)
        how = f"jax {jax.__version__}, median of {count - 1} steps; forward time divided as backward"
        alone = round(median(took[1:])) * NANOSECOND
        return recorded(session, name or getattr(loss, "__name__", "loss"), batch, f"recorded on CPU, {how}", alone)


def broadcast(tree: Any, session: Session) -> Any:
    """Return rank 0's ``tree`` of arrays, as initial parameters, on all ranks. Collective.

    Raises:
        Disagreement: that of another rank has other names, shapes or types.
    """
    names, leaves, structure = _flat(tree)
    found = stream_broadcast(session, [(name, np.asarray(leaf)) for name, leaf in zip(names, leaves, strict=True)])
    return jax.tree.unflatten(structure, [jnp.asarray(values) for values in found])


class State(NamedTuple):
    """State of a training with `DeferredUpdates`; a pytree.

    Attributes:
        params: per layer, its parameters, without the update that is due.
        optimizer: per layer, the state of its optimizer.
        due: number of the step whose gradients have gone and are not applied yet; 0 if no update is due.
    """

    params: dict[str, Any]
    optimizer: dict[str, Any]
    due: Any


class Taps:
    """Parameters of a step's layers, on call, for the loss of `DeferredUpdates.step`."""

    def __init__(self, updates: DeferredUpdates, state: State, tokens: Mapping[str, Sequence[Any]]) -> None:
        self._updates, self._state, self._tokens = updates, state, tokens
        self.entered: dict[str, tuple[Any, Any]] = {}
        self._found: dict[str, Any] = {}

    def __call__(self, layer: str, activation: Any) -> Any:
        """Return the updated parameters of ``layer``, which waits for their update once ``activation`` is there.

        Args:
            layer: its name.
            activation: what the layer computes with: an array, or a pytree of arrays.
        """
        if layer not in self._state.params:
            names = ", ".join(self._state.params)
            raise ConfigError("layer", layer, "has no parameters", f"these have: {names}")
        if layer not in self._found:  # a layer that is used twice waits at its first use
            first = jnp.ravel(jax.tree.leaves(activation)[0])[:1].sum()
            params, state = self._updates.updated(self._state, layer, jax.lax.stop_gradient(first))
            self.entered[layer] = params, state
            self._found[layer] = self._updates.tapped(layer, params, self._tokens[layer])
        return self._found[layer]


class DeferredUpdates:
    """Optimizer whose update of a layer happens where the layer's next forward pass begins.

        updates = ft.jax.DeferredUpdates(optax.adam(1e-3))
        state = updates.init({"hidden": {"w": …}, "out": {"w": …}})      # in the order of their use

        @jax.jit
        def step(state, x, y):
            def loss(taps):
                hidden = jnp.tanh(x @ taps("hidden", x)["w"])
                return jnp.mean((hidden @ taps("out", hidden)["w"] - y) ** 2)
            return updates.step(loss, state)

        for x, y in data:
            value, state = step(state, x, y)
        params = updates.flush(state).params

    Args:
        optimizer: of optax, whose update of a layer needs that layer's gradients alone.
        session: as of `scheduled_value_and_grad`.
    """

    def __init__(self, optimizer: Any, session: Session | None = None) -> None:
        self._optimizer = optimizer
        self._stream = GradientStream(session)
        warn_if_untested(self._stream.session.rank, "jax", jax.__version__, "0.10")
        self._numbers: dict[str, list[int]] = {}
        self._flush = jax.jit(self._flushed)

    def init(self, params: Mapping[str, Any]) -> State:
        """Return the state before the first step, with rank 0's parameters. Collective.

        Args:
            params: per layer, in the order of use, a pytree of floating-point arrays.

        Raises:
            ConfigError: the optimizer mixes layers, as clipping by the global norm does, or a leaf has no gradient.
            Disagreement: the parameters of another rank have other names, shapes or types.
        """
        if not isinstance(params, Mapping):
            remedy = "name each layer: {'hidden': {'w': …}, 'out': {'w': …}}"
            raise ConfigError("params", type(params).__name__, "does not name layers", remedy)
        order = [(layer, name, leaf) for layer in params for name, leaf in zip(*_flat(params[layer])[:2], strict=True)]
        names = [f"{layer}.{name}" for layer, name, _ in order]
        described = _described(names, [leaf for *_, leaf in order])
        self._check_separable(params)
        self._stream.declare(described, ordered=True)
        for number, (layer, *_) in enumerate(order):
            self._numbers.setdefault(layer, []).append(number)
        found = broadcast(dict(params), self._stream.session)
        found = {layer: found[layer] for layer in params}
        optimizer = jax.jit(lambda found: {layer: self._optimizer.init(found[layer]) for layer in found})(found)
        return State(found, {layer: optimizer[layer] for layer in found}, jnp.int32(0))

    def step(self, loss: Callable[[Taps], Any], state: State, *, has_aux: bool = False) -> tuple[Any, State]:
        """Compute ``loss`` and hand its gradients over. To be called inside `jax.jit`.

        Args:
            loss: takes `Taps`, which it calls for the parameters of each layer, where that layer begins.
            state: of the step before, or a flushed one. Another one's gradients are gone: the step fails.
            has_aux: as of `jax.value_and_grad`.

        Returns:
            The value, and the state with this step's updates due.
        """

        def tapped(tokens: Mapping[str, Sequence[Any]]) -> tuple[Any, Any]:
            taps = Taps(self, state, tokens)
            value, aux = loss(taps) if has_aux else (loss(taps), None)
            unused = [layer for layer in state.params if layer not in taps.entered]
            if unused:
                raise ConfigError("layer", unused[0], "is not used by the loss", "leave it out of init()")
            return value, (aux, taps.entered)

        zeros = {layer: [jnp.zeros(())] * len(numbers) for layer, numbers in self._numbers.items()}
        (value, (aux, entered)), tokens = jax.value_and_grad(tapped, has_aux=True)(zeros)
        gone = reduce(jnp.maximum, jax.tree.leaves(tokens))
        params = {layer: entered[layer][0] for layer in state.params}
        optimizer = {layer: entered[layer][1] for layer in state.params}
        return (value, aux) if has_aux else value, State(params, optimizer, gone.astype(jnp.int32))

    def flush(self, state: State) -> State:
        """Return the state with all updates done, for evaluation and saving; training may go on with it."""
        return self._flush(state)

    def _flushed(self, state: State) -> State:
        found = {layer: self.updated(state, layer, jnp.zeros(())) for layer in state.params}
        params, optimizer = ({layer: pair[k] for layer, pair in found.items()} for k in (0, 1))
        return State(params, optimizer, jnp.zeros_like(state.due))

    def updated(self, state: State, layer: str, activation: Any) -> tuple[Any, Any]:
        """Return parameters and optimizer state of ``layer`` after the update that is due, if any."""
        params, before = state.params[layer], state.optimizer[layer]
        leaves, structure = jax.tree.flatten(params)
        # One callback for all: each costs time of its own.
        wait = partial(_wait_all, self._stream, self._numbers[layer])
        means = io_callback(wait, [_like(leaf) for leaf in leaves], state.due, activation)
        changes, after = self._optimizer.update(jax.tree.unflatten(structure, means), before, params)
        new = jax.tree.map(lambda old, change: (old + change).astype(old.dtype), params, changes)
        return jax.tree.map(lambda old, late: jnp.where(state.due == 0, old, late), (params, before), (new, after))

    def tapped(self, layer: str, params: Any, tokens: Sequence[Any]) -> Any:
        """Return ``params``, with a tap on each."""
        leaves, structure = jax.tree.flatten(params)
        found = [
            _tap(partial(_push, self._stream, number), leaf, token)
            for number, leaf, token in zip(self._numbers[layer], leaves, tokens, strict=True)
        ]
        return jax.tree.unflatten(structure, found)

    def _check_separable(self, params: Mapping[str, Any]) -> None:
        """Raise ConfigError if updating layers one by one differs from updating them together."""
        small = jax.tree.map(lambda leaf: np.ones([min(n, 2) for n in leaf.shape], leaf.dtype), dict(params))

        # One program: each operation alone would be compiled, too.
        @jax.jit
        def separable(small: dict[str, Any]) -> Any:
            steep = jax.tree.map(lambda leaf: 1e3 * leaf, small)
            update, init = self._optimizer.update, self._optimizer.init
            together, _ = update(steep, init(small), small)
            apart = {k: update(steep[k], init(small[k]), small[k])[0] for k in small}
            return jnp.array(jax.tree.leaves(jax.tree.map(jnp.allclose, together, apart))).all()

        try:
            together = bool(separable(small))
        except (KeyError, TypeError, ValueError) as error:
            remedy = "leave frozen layers out of init(), or use scheduled_value_and_grad, which keeps the barrier"
            raise ConfigError("optimizer", "init", "cannot take the layers one by one", remedy) from error
        if not together:
            remedy = "clip layer by layer, or use scheduled_value_and_grad, which keeps the barrier"
            raise ConfigError("optimizer", "update", "needs the gradients of all layers at once", remedy)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(push: Callable[[Any], Any], parameter: Any, token: Any) -> Any:
    """Return ``parameter``; its derivative hands the gradient to ``push``. See Note [Taps]."""
    return parameter


def _tap_forward(push: Callable[[Any], Any], parameter: Any, token: Any) -> tuple[Any, None]:
    return parameter, None


def _tap_backward(push: Callable[[Any], Any], kept: None, gradient: Any) -> tuple[Any, Any]:
    return gradient, io_callback(push, _ENTRY, gradient)


_tap.defvjp(_tap_forward, _tap_backward)


def _push(stream: GradientStream, number: int, gradient: Any) -> np.float32:
    return np.float32(stream.push(number, np.asarray(gradient)))


def _wait(stream: GradientStream, number: int, step: Any, *after: Any) -> np.ndarray[Any, Any]:
    return stream.wait(number, int(step))


def _wait_all(stream: GradientStream, numbers: Sequence[int], step: Any, *after: Any) -> list[np.ndarray[Any, Any]]:
    return [stream.wait(number, int(step)) for number in numbers]


def _like(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _flat(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Return the names of the leaves of ``tree``, the leaves, and its structure."""
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    value = jax.tree_util.GetAttrKey("value")  # of a variable of flax.nnx, which has no other leaf
    paths = [path[:-1] if path[-1:] == (value,) else path for path, _ in found]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "parameter" for path in paths]
    return names, [leaf for _, leaf in found], structure


def _described(names: Sequence[str], leaves: Sequence[Any]) -> list[GradientSpec]:
    for name, leaf in zip(names, leaves, strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            remedy = "hand the parameters in alone, e.g. those of nnx.split(model, nnx.Param, ...)"
            raise ConfigError(name, leaf.dtype, "has no gradient", remedy)
    return [
        GradientSpec(name, tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in zip(names, leaves, strict=True)
    ]
