"""One of two ranks, the second of which ends in the middle: ``ending_job.py keras how``; run by test_ends."""

import os
import signal
import sys

import numpy as np

import foretrain as ft

FRAMEWORK, HOW = sys.argv[1:]


def end_in(session, step):
    """Return whether this rank shall stop at ``step``; kill or interrupt it there."""
    if session.rank != 1 or step != 6:
        return False
    if HOW == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "interrupted":
        raise KeyboardInterrupt
    return HOW == "stops"


def width(session):
    return 3 if HOW == "another" and session.rank == 1 else 2


def in_keras(session):
    from bare_keras import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(width(session))])
    model.compile(ft.keras.scheduled(keras.optimizers.SGD(0.1), session), "mse")
    ft.keras.attach(model)

    class End(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = end_in(session, batch)

    model.fit(np.ones((64, 4)), np.ones((64, width(session))), batch_size=4, verbose=0, callbacks=[End()])


def in_jax(session):
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    graded = jax.jit(ft.jax.scheduled_value_and_grad(lambda p: (p["w"] ** 2).sum(), session))
    params = ft.jax.broadcast({"w": jnp.ones((4, width(session)))}, session)
    for step in range(16):
        _, means = jax.block_until_ready(graded(params))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, means)
        end_in(session, step)


def in_mxnet(session):
    import mxnet as mx
    from mxnet import autograd, gluon

    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(4, in_units=4), gluon.nn.Dense(width(session), in_units=4))
    net.initialize()
    kvs = ft.mxnet.ScheduledKVS(mx.kv.create("local"), session)
    kvs.attach(net)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kvs)
    for step in range(16):
        with autograd.record():
            loss = net(mx.nd.ones((4, 4))).sum()
        loss.backward()
        trainer.step(8)
        if end_in(session, step):
            break


try:
    with ft.Session(timeouts=ft.Timeouts(peer=10), average=FRAMEWORK != "mxnet") as session:
        {"keras": in_keras, "jax": in_jax, "mxnet": in_mxnet}[FRAMEWORK](session)
except Exception as error:  # jax has its own error around the job's
    print(f"rank {session.rank}: {type(error).__name__}: {error}", flush=True)
    os._exit(0)
