"""Keras 3 on TensorFlow: gradients are exchanged while ``model.fit`` computes the others.

    model.compile(ft.keras.scheduled(keras.optimizers.Adam()), loss)
    ft.keras.attach(model)                 # optional: communication then goes on during the next forward pass
    model.fit(data)

                     in the backward pass          after it            at a layer's entry, one step later
    scheduled        each gradient goes            sums → update
    attach           each gradient goes                                its sum → its update → its forward pass

# Note [Callbacks inside a graph]
A step is a graph of TensorFlow's, which calls back with each gradient as soon as it is computed. A stateful callback
would wait for the one before it in the program, which is in the order of the variables and not of the backward pass:
callbacks are declared free of side effects, and kept by adding their results to a counter.

# Note [Waits]
A callback that waits keeps a thread of TensorFlow's. Waits depend on all gradients having gone, those of a layer's
entry through the counter, so that no gradient that another rank waits for is left behind.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from foretrain.comm.session import Session
from foretrain.errors import ConfigError, RecordError
from foretrain.plugins.gradient_stream import (
    GradientSpec,
    GradientStream,
    broadcast,
    recorded,
    recording,
    warn_if_untested,
)
from foretrain.units import format_size
from foretrain.workload.step import Workload

logger = logging.getLogger("foretrain")

_PER_VARIABLE = {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "RMSprop", "SGD"}
"""Optimizers of Keras whose update of a variable reads that variable's gradient and state alone."""

_SEE_ALL = (
    *("evaluate", "predict", "test_on_batch", "predict_on_batch", "save", "export"),
    *("get_weights", "set_weights", "save_weights", "load_weights"),
)
"""Methods of a model before which all updates that are due are done."""


def scheduled(optimizer: keras.Optimizer | str, session: Session | None = None) -> keras.Optimizer:
    """Let ``optimizer`` update with the mean of all ranks' gradients, which go as they are computed. Collective.

    Clipping, weight decay, accumulation, moving averages and loss scaling are the optimizer's, of the means. Weights
    are those of rank 0 from the first step on.

    Args:
        optimizer: of any kind, or its name; a LossScaleOptimizer as a whole, not what it wraps.
        session: where gradients are exchanged; None makes one of what ``foretrain run`` says.

    Returns:
        It.

    Raises:
        ConfigError: Keras runs on another backend, or the optimizer is scheduled already.
    """
    _check_backend()
    found: Any = keras.optimizers.get(optimizer)
    if _exchange_of(found) is not None:
        raise ConfigError("optimizer", found.name, "is scheduled already", "schedule each optimizer once")
    _Exchange(found, GradientStream(session))
    return found


def attach(model: keras.Model, session: Session | None = None) -> Session:
    """Let communication go on across steps: a layer of ``model`` waits for its own gradients, where it begins.

    Call it after ``compile`` and before the first ``fit``. A layer is then updated at its next entry. Evaluation,
    prediction, saving, loading, `get_weights`, `set_weights` and the ends of epochs see all updates done; a variable
    that is read or assigned directly between two batches does not. What needs all gradients at once keeps the barrier,
    and a message says so: clipping by global norm, accumulation, moving averages of weights, loss scaling, and
    optimizers that Keras did not bring or that share state between variables.

    Args:
        model: compiled; its optimizer is scheduled if it is not.
        session: as of `scheduled`, where the optimizer is not scheduled yet.

    Returns:
        The session that exchanges its gradients.

    Raises:
        ConfigError: the model is not compiled, is compiled by XLA, or is attached already.
    """
    _check_backend()
    if getattr(model, "optimizer", None) is None:
        raise ConfigError("model", model.name, "is not compiled", "call model.compile(…) first")
    if model.jit_compile:
        raise _compiled_by_xla()
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    exchange = _exchange_of(optimizer)
    if inner is not None and (wrapped := _exchange_of(inner)) is not None:
        # compile() has wrapped it, for mixed precision: what is exchanged is scaled, and checked after the sum.
        wrapped.detach()
        exchange = _Exchange(optimizer, wrapped.stream)
    if exchange is None:
        exchange = _Exchange(optimizer, GradientStream(session))
    elif session is not None and session is not exchange.stream.session:
        raise ConfigError("session", "another", "than the optimizer's was handed in", "leave it out")
    exchange.follow(model)
    return exchange.stream.session


def record(
    model: keras.Model,
    step: Callable[[], object],
    *,
    batch: int,
    iterations: int = 10,
    warmup: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> Workload:
    """Run ``step`` until as many training steps were observed, and return their median as a workload.

    A layer's update happens at its next entry, and counts as its forward time. Where the optimizer keeps the barrier,
    as `attach` says, all of the forward pass counts as the last layer's.

    Args:
        model: compiled, not trained yet in this process.
        step: trains it, e.g. ``lambda: model.train_on_batch(x, y)``.
        batch: samples per training step.
        iterations: steps that are measured.
        warmup: steps before them; only the first, which is compiled, is left out, the others move no median.
        progress: called with the number of training steps done and in all.

    Raises:
        ConfigError: as of `attach`; or a number is too small.
        RecordError: ``step`` trains nothing.
    """
    count = warmup + iterations
    with recording(iterations, warmup) as session:
        attach(model, session)
        while session.workload is None:
            before = session.steps
            step()
            if session.steps == before:
                raise RecordError(f"step() has not trained {model.name}: let it call train_on_batch() or fit() once")
            if progress:
                progress(min(session.steps, count), count)
        versions = f"Keras {keras.__version__}, TensorFlow {tf.__version__}"
        return recorded(session, model.name, batch, f"recorded on CPU, {versions}, median of {count - 1} steps")


class AverageMetrics(keras.callbacks.Callback):
    """Callback that averages the metrics of an epoch over the ranks. First in the list, so that others see the mean.

    All ranks then stop early, lower the learning rate, or save the best weights at the same epoch. Collective.

    Args:
        session: of the job.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace all numbers by their means."""
        if logs:
            names = sorted(logs)
            means = self._session.mean([float(logs[name]) for name in names])
            logs.update(zip(names, means, strict=True))


class Checkpoint(keras.callbacks.ModelCheckpoint):
    """Keras' ModelCheckpoint that writes on rank 0 alone; after `AverageMetrics`, if it saves the best.

    Args:
        filepath: as of Keras' callback.
        session: of the job.
        options: as of Keras' callback.
    """

    def __init__(self, filepath: str, session: Session, **options: Any) -> None:
        super().__init__(filepath, **options)
        self._session = session

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save on rank 0, where that is due after a batch."""
        if self._session.rank == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save on rank 0, where that is due after an epoch."""
        if self._session.rank == 0:
            super().on_epoch_end(epoch, logs)


class _Exchange:
    """Exchange of one optimizer's gradients; it stands in for the optimizer's ``apply``.

    Attributes:
        stream: of the gradients.
    """

    def __init__(self, optimizer: Any, stream: GradientStream) -> None:
        self._optimizer, self.stream = optimizer, stream
        self._apply: Callable[..., None] = optimizer.apply
        self._learning_rate: Callable[[], Any] = optimizer._get_current_learning_rate
        self._variables: list[Any] = []
        self._index: dict[int, int] = {}
        self._model: Any = None
        self._crosses = self._in_update = self._warned = False
        self._entered: set[int] | None = None
        """Variables whose wait is in the graph that is being traced; None outside a training step."""
        warn_if_untested(stream.session.rank, "keras", keras.__version__, "3.15")
        warn_if_untested(stream.session.rank, "tensorflow", tf.__version__, "2.21")
        optimizer.apply = self.apply
        optimizer.foretrain = self

    def detach(self) -> None:
        """Give the optimizer its own ``apply`` back."""
        del self._optimizer.apply, self._optimizer.foretrain

    # ── inside a step, while it is traced ──

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Exchange ``grads``; update now with their means, or leave that to the layers' next entries."""
        graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
        if type(graph).__name__ == "CondBranchFuncGraph":
            remedy = "schedule the LossScaleOptimizer itself, or call ft.keras.attach(model)"
            raise ConfigError("optimizer", self._optimizer.name, "is wrapped by another, which may skip it", remedy)
        if graph is None and not self._warned:
            self._warned = True
            name = self._optimizer.name
            logger.warning("%s: a step that runs eagerly sends gradients after its backward pass, which is slow", name)
        if graph is not None and control_flow_util.GraphOrParentsInXlaContext(graph):
            raise _compiled_by_xla()
        variables = list(trainable_variables or self._optimizer._trainable_variables)
        if self._declare(variables) and self._model is None:
            _broadcast(self.stream.session, variables)
        used = [(v, _dense(g, v)) for g, v in zip(grads, variables, strict=True) if g is not None]
        gone = tf.add_n([self._push(self._index[id(v)], gradient) for v, gradient in used])
        if self._entered is not None:
            self._leave_to_entries(gone, [v for v, _ in used])
            return
        means = {id(v): self._wait(self._index[id(v)], v, gone) for v, _ in used}
        self._apply([means.get(id(v)) for v in variables], variables)

    def _declare(self, variables: Sequence[Any]) -> bool:
        if not self._optimizer.built:
            with tf.init_scope():
                self._optimizer.build(variables)
        parameters = [
            GradientSpec(v.path.replace("/", "."), tuple(v.shape), np.dtype(tf.as_dtype(v.dtype).as_numpy_dtype))
            for v in variables
        ]
        if not self.stream.declare(parameters, ordered=not self._crosses):
            return False
        self._variables = list(variables)
        self._index = {id(v): k for k, v in enumerate(variables)}
        return True

    def _push(self, index: int, gradient: tf.Tensor) -> tf.Tensor:
        def push(values: np.ndarray[Any, Any]) -> np.int64:
            self.stream.push(index, values)
            return np.int64(0)

        return tf.ensure_shape(tf.numpy_function(push, [gradient], tf.int64, stateful=False), ())

    def _wait(self, index: int, variable: Any, after: tf.Tensor) -> tf.Tensor:
        wait = partial(self._waited, index)
        return tf.ensure_shape(tf.numpy_function(wait, [after], variable.dtype, stateful=False), variable.shape)

    def _waited(self, index: int, after: object) -> np.ndarray[Any, Any]:
        return self.stream.wait(index)

    # ── across steps ──

    def follow(self, model: Any) -> None:
        """Cross the barrier in the training steps of ``model`` as far as its optimizer allows."""
        if self._model is not None:
            raise ConfigError("model", model.name, "is attached already", "attach it once")
        if reason := _keeps_barrier(self._optimizer):
            logger.info("%s: each step waits for all gradients, because %s", model.name, reason)
        self._model, self._crosses = model, not reason
        self._steps = tf.Variable(tf.constant(0, tf.int64), dtype=tf.int64, trainable=False, name="foretrain_steps")
        """Steps whose gradients have gone; read by every wait, see Note [Waits]."""
        self._rate = tf.Variable(tf.constant(0.0), dtype=tf.float32, trainable=False, name="foretrain_learning_rate")
        """Learning rate of the step whose updates are due."""
        self._due: tf.Variable | None = None
        """Per variable, whether its update is due."""
        step, fit = model.train_step, model.fit

        def train_step(data: Any) -> Any:
            self._prepare(data)
            self._entered = set() if self._crosses else None
            try:
                return step(data)
            finally:
                self._entered = None

        def followed_fit(*args: Any, **options: Any) -> Any:
            asked = inspect.signature(fit).bind(*args, **options)
            given = asked.arguments.get("callbacks")
            flush = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: self.flush())
            if isinstance(given, keras.callbacks.CallbackList):
                given.callbacks.insert(0, flush)
            else:
                asked.arguments["callbacks"] = [flush, *(keras.tree.flatten(given) if given else ())]
            try:
                return fit(*asked.args, **asked.kwargs)
            except tf.errors.OpError:
                self.stream.session.check()  # the error of the job instead of TensorFlow's about a callback
                raise

        model.train_step, model.fit = train_step, followed_fit
        model.train_function = None
        for name in _SEE_ALL:
            setattr(model, name, _after(self.flush, getattr(model, name)))
        if self._crosses:
            self._optimizer._get_current_learning_rate = self._rate_in_force

    def _prepare(self, data: Any) -> None:
        """Declare and broadcast before the first step, while it is traced: it has run nothing yet."""
        model = self._model
        if self._due is not None:
            return
        inputs, *_ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.init_scope():
            if not model.built:
                model(keras.tree.map_structure(lambda x: keras.KerasTensor(x.shape, x.dtype.name), inputs))
            variables = list(model.trainable_variables)
            self._declare(variables)
            _broadcast(self.stream.session, model.weights)
            self._due = tf.Variable(tf.zeros(len(variables), tf.bool), trainable=False, name="foretrain_due")
        for layer in _units(model) if self._crosses else ():
            layer.call = self._entering(layer.call, layer)

    def _entering(self, call: Callable[..., Any], layer: Any) -> Callable[..., Any]:
        def entered(*args: Any, **options: Any) -> Any:
            if self._entered is not None:
                first = next((each for each in tf.nest.flatten((args, options)) if tf.is_tensor(each)), None)
                for variable in layer.trainable_variables:
                    if id(variable) not in self._entered:  # a layer that is used twice waits at its first use
                        self._entered.add(id(variable))
                        self._enter(variable, first)
            return call(*args, **options)

        return entered

    def _enter(self, variable: Any, activation: tf.Tensor | None) -> None:
        """Update ``variable`` if that is due, once ``activation``, which its layer computes with, is there."""
        index, due = self._index.get(id(variable)), self._due
        if index is None or due is None:
            return  # it was frozen when gradients were declared
        with tf.control_dependencies([] if activation is None else [activation]):
            pending = tf.identity(due[index])
        tf.cond(pending, lambda: self._update(index, variable, self._steps.read_value()), lambda: tf.constant(0))

    def _update(self, index: int, variable: Any, after: tf.Tensor) -> tf.Tensor:
        mean = self._wait(index, variable, after)
        optimizer = self._optimizer
        if optimizer.loss_scale_factor is not None:
            mean = mean / optimizer.loss_scale_factor
        self._in_update = True
        try:
            optimizer._backend_apply_gradients([mean], [variable])
        finally:
            self._in_update = False
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))
        return tf.constant(0)

    def _rate_in_force(self) -> Any:
        return self._rate if self._in_update else self._learning_rate()

    def _leave_to_entries(self, gone: tf.Tensor, used: Sequence[Any]) -> None:
        """Leave the updates of this step to the next entries; count the step before, whose updates are done."""
        assert self._due is not None
        assert self._entered is not None
        iterations = self._optimizer.iterations
        iterations.assign_add(tf.cast(tf.reduce_any(self._due), iterations.dtype))
        self._rate.assign(keras.ops.cast(self._learning_rate(), "float32"))
        self._steps.assign_add(1 + gone)
        due = np.zeros(len(self._variables), bool)
        for variable in used:
            index = self._index[id(variable)]
            due[index] = id(variable) in self._entered
            if not due[index]:  # no layer's call shows where its next use begins
                self._update(index, variable, gone)
        self._due.assign(due)

    def flush(self) -> None:
        """Do all updates that are due. Called between steps."""
        due = self._due
        if due is None or not self._crosses or not bool(tf.reduce_any(due)):
            return
        for index, variable in enumerate(self._variables):
            if bool(due[index]):
                self._update(index, variable, self._steps.read_value())
        self._optimizer.iterations.assign_add(1)
        due.assign(tf.zeros_like(due))


def _after(first: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **options: Any) -> Any:
        first()
        return method(*args, **options)

    return called


def _units(model: Any) -> list[Any]:
    """Return the layers that are entered as a whole: those of nested models one by one, others with what they hold.

    What a layer holds may be called in a loop, as the cell of a recurrent layer is, where nothing can wait.
    """
    found: list[Any] = []
    for layer in model.layers:
        found += _units(layer) if isinstance(layer, keras.Model) else [layer]
    inside = {id(v) for layer in found for v in layer.trainable_variables}
    if any(id(v) not in inside for v in model.trainable_variables):
        found.append(model)
    return [layer for layer in found if layer.trainable_variables]


def _keeps_barrier(optimizer: Any) -> str:
    """Return why all gradients must be there before the first update; empty if they need not."""
    if type(optimizer).__name__ == "LossScaleOptimizer":
        return "loss scaling checks all gradients before the first update"
    if type(optimizer).__name__ not in _PER_VARIABLE or not type(optimizer).__module__.startswith("keras."):
        return f"{type(optimizer).__name__} may update variables together"
    for field, what in (
        ("global_clipnorm", "gradients are clipped by their global norm"),
        ("gradient_accumulation_steps", "gradients are accumulated"),
        ("use_ema", "weights are averaged over steps"),
    ):
        if getattr(optimizer, field):
            return f"{what} ({field})"
    return ""


def _dense(gradient: Any, variable: Any) -> tf.Tensor:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    size = format_size(int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size)
    warnings.warn(f"the gradient of {variable.path} is sparse, and exchanged dense: {size} in every step", stacklevel=2)
    return tf.convert_to_tensor(gradient)


def _broadcast(session: Session, variables: Sequence[Any]) -> None:
    """Set ``variables`` to rank 0's values, before a step that is being traced."""
    with tf.init_scope():
        sent = [v for v in variables if not v.numpy().dtype.hasobject and v.numpy().size]
        for variable, values in zip(sent, broadcast(session, [(v.path, v.numpy()) for v in sent]), strict=True):
            variable.assign(values)


def _compiled_by_xla() -> ConfigError:
    remedy = "write model.compile(…, jit_compile=False)"
    return ConfigError("jit_compile", True, "leaves no way to hand a gradient over inside a step", remedy)


def _exchange_of(optimizer: Any) -> _Exchange | None:
    return getattr(optimizer, "foretrain", None)


def _check_backend() -> None:
    if (backend := keras.backend.backend()) != "tensorflow":
        others = {"torch": "use foretrain.attach(model, optimizer)", "jax": "use foretrain.jax"}
        remedy = f"set KERAS_BACKEND=tensorflow, or {others.get(backend, 'use foretrain.Session')}"
        raise ConfigError("KERAS_BACKEND", backend, "computes gradients outside of TensorFlow", remedy)
