"""Keras models that train under foretrain, and what one process alone computes; ranks of test_keras run it.

As a script, ``foretrain run --nproc 2 -- keras_job.py NAME FOLDER``, it prints what `trained` returns.
"""

import os
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path

import numpy as np

import foretrain as ft

os.environ |= {"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
# Keras and TensorFlow import these where they find them, for what no test uses: a third of the seconds of a start.
sys.modules |= dict.fromkeys(("jax", "pandas", "sklearn"))
keras, tf = import_module("keras"), import_module("tensorflow")
tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.threading.set_intra_op_parallelism_threads(1)

BATCH, BATCHES, EPOCHS = 16, 5, 2
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def images(seed):
    """Convolutions with a layer that is used twice, a branch, a regularizer and normalization.

    Trained in several calls of `fit`, with validation; other models in one, of which less is traced.
    """
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    first = layers.Conv2D(8, 3, padding="same", name="first")
    # Its bias would have a gradient of rounding errors alone, of which Adam makes whole steps.
    twice = layers.Conv2D(8, 3, padding="same", use_bias=False, kernel_regularizer="l2", name="twice")
    start = keras.Input((8, 8, 3))
    x = first(start)
    for k in range(2):
        x = layers.ReLU()(layers.BatchNormalization(name=f"norm{k}")(twice(x)))
    x = layers.Add()([layers.Conv2D(8, 3, padding="same", name="main")(x), layers.Conv2D(8, 1, name="branch")(x)])
    return keras.Model(start, layers.Dense(10, name="head")(layers.GlobalAveragePooling2D()(x)), name="images")


def dense(seed):
    """Three layers, whose graph is traced quickly."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    hidden = [layers.Dense(16, activation="relu", name=name) for name in ("first", "second")]
    return keras.Sequential(
        [keras.Input((8, 8, 3)), layers.Flatten(), *hidden, layers.Dense(10, name="head")], name="dense"
    )


def mixed(seed):
    """Computes in float16, which `compile` sees from the policy of the model."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return dense(seed)
    finally:
        keras.config.set_dtype_policy("float32")


def frozen(seed):
    model = dense(seed)
    model.get_layer("first").trainable = False
    return model


def stopped(seed):
    """Has a layer that no gradient reaches: what the backward pass gives for its weights is None."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    start = keras.Input((8, 8, 3))
    x = layers.Flatten()(start)
    still = keras.ops.stop_gradient(layers.Dense(16, name="still")(x))
    x = layers.Add()([layers.Dense(16, activation="relu", name="first")(x), still])
    return keras.Model(start, layers.Dense(10, name="head")(x), name="stopped")


def words(seed):
    """An embedding, whose gradient is sparse, and a recurrent layer; without an input shape, so built by fit."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [layers.Embedding(50, 8, name="table"), layers.GRU(8, name="cell"), layers.Dense(10, name="head")], name="words"
    )


def data(model):
    random, count = np.random.default_rng(0), 2 * BATCH * BATCHES
    if model is words:
        return random.integers(0, 50, (count, 6)), random.integers(0, 10, count)
    inputs = random.standard_normal((count, 8, 8, 3), dtype=np.float32)
    if model is mixed:
        inputs[BATCH:][:BATCH] = 1e6  # rank 1's first: infinite in float16, so that no rank may make this update
    return inputs, random.integers(0, 10, count)


optimizers, schedules = keras.optimizers, keras.optimizers.schedules
CASES = {
    # name: model, optimizer, whether layers wait for themselves, options of compile()
    "barrier": (dense, lambda: optimizers.Adam(1e-2), False, {}),
    "across": (images, lambda: optimizers.Adam(1e-2), True, {}),
    "decay": (dense, lambda: optimizers.AdamW(1e-2, weight_decay=0.1, clipvalue=0.01), True, {}),
    "schedule": (
        dense,
        lambda: optimizers.SGD(schedules.ExponentialDecay(0.1, 1, 0.9), momentum=0.9, nesterov=True, clipnorm=0.5),
        True,
        {},
    ),
    "several": (dense, lambda: optimizers.RMSprop(1e-3), True, {"steps_per_execution": 2}),
    "eager": (dense, lambda: optimizers.SGD(0.1), True, {"run_eagerly": True}),
    "frozen": (frozen, lambda: optimizers.Adam(1e-2), True, {}),
    "stopped": (stopped, lambda: optimizers.Adam(1e-2), True, {}),
    "global": (dense, lambda: optimizers.Adam(1e-2, global_clipnorm=0.1), True, {}),
    "average": (dense, lambda: optimizers.Adam(1e-2, use_ema=True, ema_overwrite_frequency=3), True, {}),
    "accumulate": (dense, lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2), True, {}),
    "mixed": (mixed, lambda: optimizers.LossScaleOptimizer(optimizers.Adam(1e-2), dynamic_growth_steps=4), True, {}),
    "automatic": (mixed, lambda: optimizers.Adam(1e-2), True, {}),
    "words": (words, lambda: optimizers.Adagrad(0.1), True, {}),
}


def fits(build):
    """The epochs of each call of `fit`."""
    return [(0, 1), (1, EPOCHS)] if build is images else [(0, EPOCHS)]


def alone(build, optimizer, options, inputs, classes):
    """Weights after training on both ranks' batches in one process: gradients of each half, then their mean."""
    model = build(3)
    model.compile(optimizer())  # which adds loss scaling where the model needs it
    model(inputs[:2])
    adapt, variables = model.optimizer, model.trainable_variables

    # As a graph, as fit() runs its steps: TensorFlow rewrites graphs to other kernels, which round differently.
    @tf.function
    def step(x, y):
        found = []
        for half in range(2):
            with tf.GradientTape() as tape:
                loss = LOSS(y[half], model(x[half], training=True)) + sum(model.losses)
                loss = adapt.scale_loss(loss)
            found.append([None if g is None else tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)])
        adapt.apply([None if a is None else a * 0.5 + b * 0.5 for a, b in zip(*found, strict=True)], variables)

    adapt.build(variables)
    for begin, end in fits(build):
        for at in [*range(BATCHES)] * (end - begin):
            step(inputs.reshape(BATCHES, 2, BATCH, *inputs.shape[1:])[at], classes.reshape(BATCHES, 2, BATCH)[at])
        adapt.finalize_variable_values(variables)
    return weights(model)


def weights(model):
    """Weights, and the scale of the loss if there is one."""
    scale = getattr(model.optimizer, "dynamic_scale", None)
    return [v.numpy() for v in (*model.trainable_variables, *([] if scale is None else [scale]))]


def trained(name, schedule=None, transport=None, folder=None):
    """Train case ``name``; rank 0 keeps checkpoints in ``folder``.

    Returns:
        Updates made, the largest difference to what one process computes, on rank 0 alone, and to rank 0's weights.
    """
    build, optimizer, across, options = CASES[name]
    inputs, classes = data(build)
    with ft.Session(schedule, transport) as session:
        assert session.ranks == 2
        model = build(3 + session.rank)
        model.compile(ft.keras.scheduled(optimizer(), session), LOSS, **options)
        if across:
            assert ft.keras.attach(model) is session
        mine = inputs.reshape(BATCHES, 2, BATCH, *inputs.shape[1:])[:, session.rank]
        targets = classes.reshape(BATCHES, 2, BATCH)[:, session.rank]
        samples = mine.reshape(-1, *inputs.shape[1:]), targets.reshape(-1)
        validation = (inputs[:BATCH], classes[:BATCH]) if build is images else None
        kept = Path(folder or "", f"{session.rank}.weights.h5")
        checkpoint = ft.keras.Checkpoint(str(kept), session, save_weights_only=True)
        for begin, end in fits(build):
            model.fit(
                *samples,
                batch_size=BATCH,
                initial_epoch=begin,
                epochs=end,
                shuffle=False,
                verbose=0,
                validation_data=validation,
                callbacks=[checkpoint] if folder else None,
            )
        found = weights(model)
        if folder:
            assert kept.exists() == (session.rank == 0)
            if session.rank == 0:
                model.load_weights(kept)  # of the last epoch's end
                assert all((a == b).all() for a, b in zip(found, weights(model), strict=True))
        first = np.frombuffer(session.broadcast(b"".join(w.tobytes() for w in found)), np.float32)
        apart = abs(first - np.concatenate([w.reshape(-1) for w in found])).max()
    worst = 0.0
    if session.rank == 0:
        expected = alone(build, optimizer, options, inputs, classes)
        worst = max(abs(a - b).max() for a, b in zip(found, expected, strict=True))
    assert "torch" not in sys.modules, "a rank of Keras needs no PyTorch, which takes seconds to import"
    return int(model.optimizer.iterations), float(worst), float(apart)


# ---------------------------------------------------------------- a backward pass that waits for communication

LAST = 2
"""Task of the last layer, of three."""


def held():
    """Hold the first layer's gradient until the last layer's sum has arrived; return what was seen of each step.

    Per step: whether the last layer was sent by the schedule, and whether all of that was before the hold's end.
    """
    arrived = threading.Semaphore(0)

    class Watched(ft.Session):
        def _land(self, index, used):
            super()._land(index, used)
            if index == LAST:
                arrived.release()

    def hold(gradient):
        assert arrived.acquire(timeout=100), "the last layer's sum did not come before the first layer's gradient"
        return gradient

    @tf.custom_gradient
    def holding(x):
        def gradient(dy):
            return tf.ensure_shape(tf.numpy_function(hold, [dy], tf.float32, stateful=False), dy.shape)

        return tf.identity(x), gradient

    class Held(keras.layers.Layer):
        def call(self, x):
            return holding(x)

    # So large that no gradient waits for another one to be reported with it.
    first, middle, last = (keras.layers.Dense(512, use_bias=False, name=name) for name in ("first", "middle", "last"))
    model = keras.Sequential([keras.Input((512,)), first, Held(), middle, last], name="net")
    with Watched("fifo", trace=True) as session:
        model.compile(ft.keras.scheduled(keras.optimizers.SGD(0.1), session), "mse")
        ones = np.ones((6, 512), np.float32)
        model.fit(ones, ones, batch_size=1, verbose=0)
        spans = list(session.timeline)
    seen = []
    for step in range(6):
        (ready,) = [s.end for s in spans if (s.kind, s.name, s.step) == ("backward", "net.first", step)]
        sent = [s for s in spans if (s.lane, s.name, s.step) == ("wire", "net.last.kernel", step)]
        seen.append((bool(sent), all(s.start < s.end < ready for s in sent)))
    return seen


# ---------------------------------------------------------------- what is refused, and what sees all updates


def compiled(*, inputs=4, **options):
    found = keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(2)])
    found.compile(options.pop("optimizer", "sgd"), "mse", **options)
    return found


def refusals():
    """Return what each wrong use is answered with."""
    said, x, y = [], np.ones((4, 4)), np.ones((4, 2))

    def refused(call, *arguments):
        try:
            call(*arguments)
        except ft.ConfigError as error:
            said.append(str(error))

    with ft.Session() as session:
        refused(ft.keras.attach, keras.Sequential([keras.layers.Dense(2)]), session)
        refused(ft.keras.attach, compiled(jit_compile=True), session)
        one = compiled()
        ft.keras.attach(one, session)
        refused(ft.keras.attach, one)
        refused(ft.keras.scheduled, one.optimizer)
        one.fit(x, y, verbose=0)
        other = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        other.compile(one.optimizer, "mse")
        refused(other.fit, np.ones((4, 5)), y)
    for late in (False, True):  # compiled by XLA, without attach() and after it
        with ft.Session() as session:
            one = compiled(optimizer=ft.keras.scheduled("sgd", session), jit_compile=not late)
            if late:
                ft.keras.attach(one)
                one.jit_compile = True
            refused(one.fit, x, y)
    return said


def readings(folder):
    """Return, for each way to read or write a model, whether it sees the same attached as not."""
    path, x, y = str(Path(folder, "kept.weights.h5")), np.ones((4, 4)), np.ones((4, 2))

    def put(one, first):
        one.set_weights(first)
        return one(x)

    def loaded(one, first):
        one.save_weights(path)
        one.train_on_batch(x, y)
        one.load_weights(path)
        one.train_on_batch(x, y)
        return one.get_weights()[0]

    def seen(attached, ask):
        keras.utils.set_random_seed(1)
        with ft.Session() as session:
            one = compiled()
            if attached:
                ft.keras.attach(one, session)
            first = one.get_weights()
            for _ in range(3):
                one.train_on_batch(x, y)
            return float(np.sum(ask(one, first)))

    ways = (lambda one, _: one.test_on_batch(x, y), lambda one, _: one.predict_on_batch(x), put, loaded)
    return [seen(True, ask) == seen(False, ask) for ask in ways]


# ---------------------------------------------------------------- a rank that ends


def ending(how):
    """Rank 1 is killed, interrupted, or stops early, in the middle of an epoch, or trains another model."""

    class End(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if session.rank == 1 and batch == 6:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "interrupted":
                    raise KeyboardInterrupt
                self.model.stop_training = True

    with ft.Session(timeouts=ft.Timeouts(peer=10)) as session:
        inputs = 3 if how == "another" and session.rank == 1 else 4
        model = compiled(optimizer=ft.keras.scheduled("sgd", session), inputs=inputs)
        ft.keras.attach(model)
        model.fit(np.ones((64, inputs)), np.ones((64, 2)), batch_size=4, verbose=0, callbacks=[End()])


# ---------------------------------------------------------------- recording


def small():
    """What `foretrain record` asks a script for."""
    layers = [keras.layers.Dense(size, name=name) for name, size in (("front", 256), ("back", 8))]
    model = keras.Sequential([keras.Input((64,)), *layers], name="small")
    model.compile("sgd", "mse")
    x, y = np.ones((16, 64), np.float32), np.ones((16, 8), np.float32)
    return model, lambda: model.train_on_batch(x, y), 16


def idle():
    """As `small`, with a step that trains nothing."""
    model, _, batch = small()
    return model, lambda: None, batch


if __name__ == "__main__":
    told = trained(sys.argv[1], folder=sys.argv[2])
    sys.stdout.write(f"{told}\n")
