"""One rank of Keras models that train under foretrain, and what one process alone computes; run by test_keras.

    foretrain run --nproc 2 -- keras_job.py NAME...

Prints, per case, ``NAME rank ITERATIONS DIFFERENCE-TO-ONE-PROCESS DIFFERENCE-TO-RANK-0``; the first on rank 0 alone.
"""

import os
import sys

import numpy as np
from bare_keras import keras, tf

import foretrain as ft

tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.threading.set_intra_op_parallelism_threads(1)
BATCH, BATCHES, EPOCHS = 16, 5, 2
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
random = np.random.default_rng(0)


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


def words(seed):
    """An embedding, whose gradient is sparse, and a recurrent layer; without an input shape, so built by fit."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [layers.Embedding(50, 8, name="table"), layers.GRU(8, name="cell"), layers.Dense(10, name="head")], name="words"
    )


def data(model):
    count = 2 * BATCH * BATCHES
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

    @tf.function
    def step(x, y):
        found = []
        for half in range(2):
            with tf.GradientTape() as tape:
                loss = LOSS(y[half], model(x[half], training=True)) + sum(model.losses)
                loss = adapt.scale_loss(loss)
            found.append([tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)])
        adapt.apply([a * 0.5 + b * 0.5 for a, b in zip(*found, strict=True)], variables)

    adapt.build(variables)
    for begin, end in fits(build):
        for at in [*range(BATCHES)] * (end - begin):
            step(inputs.reshape(BATCHES, 2, BATCH, *inputs.shape[1:])[at], classes.reshape(BATCHES, 2, BATCH)[at])
        adapt.finalize_variable_values(variables)
    return trained(model)


def trained(model):
    """Weights, and the scale of the loss if there is one."""
    scale = getattr(model.optimizer, "dynamic_scale", None)
    return [v.numpy() for v in (*model.trainable_variables, *([] if scale is None else [scale]))]


def main():
    for name in sys.argv[1:]:
        build, optimizer, across, options = CASES[name]
        inputs, classes = data(build)
        with ft.Session() as session:
            assert session.ranks == 2
            model = build(3 + session.rank)
            model.compile(ft.keras.scheduled(optimizer(), session), LOSS, **options)
            if across:
                assert ft.keras.attach(model) is session
            mine = inputs.reshape(BATCHES, 2, BATCH, *inputs.shape[1:])[:, session.rank]
            targets = classes.reshape(BATCHES, 2, BATCH)[:, session.rank]
            samples = mine.reshape(-1, *inputs.shape[1:]), targets.reshape(-1)
            validation = (inputs[:BATCH], classes[:BATCH]) if build is images else None
            kept = os.path.join(os.environ.get("KEPT", ""), f"{session.rank}.weights.h5")
            checkpoint = ft.keras.Checkpoint(kept, session, save_weights_only=True)
            for begin, end in fits(build):
                model.fit(
                    *samples,
                    batch_size=BATCH,
                    initial_epoch=begin,
                    epochs=end,
                    shuffle=False,
                    verbose=0,
                    validation_data=validation,
                    callbacks=[checkpoint] if "KEPT" in os.environ else None,
                )
            found = trained(model)
            if "KEPT" in os.environ:
                assert os.path.exists(kept) == (session.rank == 0)
                if session.rank == 0:
                    model.load_weights(kept)  # of the last epoch's end
                    assert all((a == b).all() for a, b in zip(found, trained(model), strict=True))
            first = np.frombuffer(session.broadcast(b"".join(w.tobytes() for w in found)), np.float32)
            apart = abs(first - np.concatenate([w.reshape(-1) for w in found])).max()
            print(f"{name} {session.rank} of {session.ranks}: {session.schedule}", file=sys.stderr)
        worst = float("nan")
        if session.rank == 0:
            expected = alone(build, optimizer, options, inputs, classes)
            worst = max(abs(a - b).max() for a, b in zip(found, expected, strict=True))
        sys.stdout.write(f"{name} {session.rank} {int(model.optimizer.iterations)} {worst:.3g} {apart:.3g}\n")
    assert "torch" not in sys.modules, "a rank of Keras needs no PyTorch, which takes seconds to import"


if __name__ == "__main__":
    main()
