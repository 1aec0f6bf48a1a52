"""Train a Keras model on TensorFlow: two lines let foretrain exchange its gradients.

    foretrain run --nproc 2 -- examples/09_keras.py

Each rank sees its own half of the data. `scheduled` averages gradients as they are computed; `attach` lets a layer wait
for its own gradients at its next use, so that communication goes on across the steps.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np

import foretrain as ft

with ft.Session() as session:
    keras.utils.set_random_seed(session.rank)  # weights become rank 0's
    layers = [keras.layers.Dense(width, activation="relu", name=f"hidden{width}") for width in (256, 128)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10, name="classes")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(ft.keras.scheduled(keras.optimizers.Adam(3e-3), session), loss, metrics=["accuracy"])
    ft.keras.attach(model)

    random = np.random.default_rng(0)
    points = random.standard_normal((2048, 64), dtype=np.float32)
    classes = (points @ random.standard_normal((64, 10), dtype=np.float32)).argmax(1)
    mine = slice(session.rank, None, session.ranks)
    history = model.fit(
        *(points[mine], classes[mine]),
        batch_size=64,
        epochs=4,
        verbose=0,
        callbacks=[ft.keras.AverageMetrics(session)],
    ).history
    weights = sum(float(abs(array).sum()) for array in model.get_weights())
    print(
        f"rank {session.rank} of {session.ranks}: {session.schedule}; loss {history['loss'][0]:.2f} → "
        f"{history['loss'][-1]:.2f}; Σ|w| = {weights:.4f}"
    )
