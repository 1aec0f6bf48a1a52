"""Gluon nets that train under foretrain, and what one process alone computes; ranks of test_mxnet run it.

As a script, ``foretrain run --nproc 2 -- mxnet_job.py NAME``, it prints what `trained` returns.
"""

import os
import signal
import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import foretrain as ft
from foretrain.mxnet import ScheduledKVS

BATCH, STEPS = 16, 10
random = np.random.RandomState(0)
INPUTS = random.randn(STEPS, 2, BATCH, 12).astype(np.float32)
TARGETS = random.randn(STEPS, 2, BATCH, 6).astype(np.float32)
LOSS = gluon.loss.L2Loss()


def net(seed, whole, twice=False):
    """Return three dense layers, the second of which is entered twice if ``twice``."""
    mx.random.seed(seed)
    np.random.seed(seed)
    found = gluon.nn.HybridSequential()
    middle = gluon.nn.Dense(24, activation="tanh", in_units=24)
    found.add(gluon.nn.Dense(24, activation="tanh", in_units=12), *[middle] * (2 if twice else 1))
    found.add(gluon.nn.Dense(6, in_units=24))
    found.initialize(mx.init.Xavier())
    if whole is not None:
        found.hybridize() if whole else [child.hybridize() for child in found._children.values()]
    return found


CASES = {  # name: optimizer, its options, whether layers wait for themselves, hybridized: whole, by layer or not
    "barrier": ("adam", {"learning_rate": 0.01}, False, True),
    "across": ("adam", {"learning_rate": 0.01}, True, False),
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, True, None),
    "whole": ("adam", {"learning_rate": 0.01}, True, True),
    "zeroed": ("sgd", {"learning_rate": 0.1}, True, False),
    "added": ("sgd", {"learning_rate": 0.1}, True, False),
    "twice": ("adam", {"learning_rate": 0.01}, True, False),
}
ADDED = 2
"""Backward passes per step where gradients are added up, each with half of a batch."""


def backward(case, model, x, y):
    """Leave the gradients of a batch in the parameters."""
    parts = ADDED if case == "added" else 1
    for some_x, some_y in zip(np.split(x, parts), np.split(y, parts), strict=True):
        with autograd.record():
            loss = LOSS(model(mx.nd.array(some_x)), mx.nd.array(some_y))
        loss.backward()


def prepared(case, model):
    """Return ``model``, with gradients that are added up if ``case`` says so."""
    if case == "added":
        model.collect_params().setattr("grad_req", "add")
    return model


def zero(case, model):
    if case in ("zeroed", "added"):
        model.collect_params().zero_grad()


def alone(case, name, options, model):
    """Weights after training on both ranks' batches in one process: the sum of each half's gradients."""
    trainer = gluon.Trainer(model.collect_params(), name, options, kvstore=None)
    params = [p for p in model.collect_params().values() if p.grad_req != "null"]
    for x, y in zip(INPUTS, TARGETS, strict=True):
        found = []
        for half in range(2):
            backward(case, model, x[half], y[half])
            found.append([p.grad().copy() for p in params])
            zero(case, model)
        for p, a, b in zip(params, *found, strict=True):
            p.grad()[:] = a + b
        trainer.step(2 * BATCH)
        zero(case, model)
    return [p.data().asnumpy() for p in params]


def trained(case, schedule=None, transport=None):
    """Return the largest difference to what one process computes, and to rank 0's weights."""
    name, options, across, whole = CASES[case]
    with ft.Session(schedule, transport, average=False) as session:
        rank = session.rank
        model = prepared(case, net(3, whole, case == "twice"))
        kvs = ScheduledKVS(mx.kv.create("local"), session)
        if across:
            kvs.attach(model)
        trainer = gluon.Trainer(model.collect_params(), name, dict(options), kvstore=kvs)
        for x, y in zip(INPUTS[:, rank], TARGETS[:, rank], strict=True):
            backward(case, model, x, y)
            trainer.step(BATCH * kvs.num_workers)
            zero(case, model)
        kvs.flush()
        found = [p.data().asnumpy() for p in model.collect_params().values()]
        first = np.frombuffer(session.broadcast(b"".join(w.tobytes() for w in found)), np.float32)
        apart = abs(first - np.concatenate([w.reshape(-1) for w in found])).max()
    expected = alone(case, name, dict(options), prepared(case, net(3, whole, case == "twice")))
    worst = max(abs(a - b).max() for a, b in zip(found, expected, strict=True))
    return float(worst), float(apart)


def refusals():
    """Return what each wrong use is answered with."""
    said = []
    with ft.Session(average=False) as session:
        model = gluon.nn.Dense(2, in_units=2)
        model.initialize()
        kvs = ScheduledKVS(None, session)
        trainer = gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kvs)
        with autograd.record():
            loss = model(mx.nd.ones((1, 2))).sum()
        loss.backward()
        trainer.step(1)
        another = mx.nd.ones(2)
        for call, *arguments in (
            (kvs.attach, model),
            (kvs.pushpull, 7, mx.nd.ones(2)),
            (kvs.broadcast, 0, another, another),
        ):
            try:
                call(*arguments)
            except ft.ConfigError as error:
                said.append(str(error))
    return said


def odd(what):
    """Return the steps of a net of which a part is frozen or unused, or that forks, and its difference to rank 0's."""
    with ft.Session("bytescheduler", average=False) as session:
        model = net(3, False)
        trainer = gluon.Trainer(
            model.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=ScheduledKVS(None, session)
        )
        for step, (x, y) in enumerate(zip(INPUTS[:, session.rank], TARGETS[:, session.rank], strict=True)):
            if what == "frozen" and step == 1:
                model[0].collect_params().setattr("grad_req", "null")
            with autograd.record():
                out = model[0](mx.nd.array(x)) if what == "unused" and step % 2 else model(mx.nd.array(x))
                loss = LOSS(out, mx.nd.zeros((BATCH, 24)) if out.shape[1] == 24 else mx.nd.array(y))
            loss.backward()
            trainer.step(2 * BATCH, ignore_stale_grad=True)
            if what == "forks" and step == STEPS - 1 and (child := os.fork()) == 0:
                os._exit(0)
            if what == "forks" and step == STEPS - 1:
                os.waitpid(child, 0)
        mx.nd.waitall()
        found = np.concatenate([p.data().asnumpy().reshape(-1) for p in model.collect_params().values()])
        return session.steps, float(abs(np.frombuffer(session.broadcast(found.tobytes()), np.float32) - found).max())


def failing():
    """Let an operation of MXNet fail whose gradient the next exchange waits for."""
    with ft.Session(average=False) as session:
        model = net(3, False)
        trainer = gluon.Trainer(
            model.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=ScheduledKVS(None, session)
        )
        for step in range(4):
            with autograd.record():
                out = model(mx.nd.array(INPUTS[0, 0]))
                loss = mx.nd.linalg.potrf(-mx.nd.eye(6)).sum() * out.sum() if step == 3 else out.sum()
            loss.backward()
            trainer.step(BATCH)


def ending(how):
    """Rank 1 is killed, interrupted, or stops early in the middle, or trains another model."""
    with ft.Session(timeouts=ft.Timeouts(peer=10), average=False) as session:
        model = gluon.nn.Sequential()
        width = 3 if how == "another" and session.rank == 1 else 2
        model.add(gluon.nn.Dense(4, in_units=4), gluon.nn.Dense(width, in_units=4))
        model.initialize()
        kvs = ScheduledKVS(mx.kv.create("local"), session)
        kvs.attach(model)
        trainer = gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kvs)
        for step in range(16):
            with autograd.record():
                loss = model(mx.nd.ones((4, 4))).sum()
            loss.backward()
            trainer.step(8)
            loss.wait_to_read()  # as a script does that shows it
            if session.rank == 1 and step == 6:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "interrupted":
                    raise KeyboardInterrupt
                return


if __name__ == "__main__":
    sys.stdout.write(f"{trained(sys.argv[1])}\n")
