"""Keras on TensorFlow under foretrain: real ranks, against one process that trains on the joint batch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from foretrain.plugins.gradient_stream import warn_if_untested
from tests.processes import foretrain, need

need("tensorflow", "keras")
pytestmark = pytest.mark.process
JOB = Path(__file__).with_name("keras_job.py")
STEPS = 10
EXACT = 1e-6
"""Sums of three terms, a regularizer's among them, may be taken in another order."""


def train(names: Sequence[str], *options: object) -> tuple[dict[str, list[tuple[int, float, float]]], str]:
    """Return, per case and rank, iterations and differences, as the job prints them; and what stderr says."""
    ended = foretrain("run", "--nproc", 2, *options, "--", JOB, *names)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, list[tuple[int, float, float]]] = {name: [] for name in names}
    for name, count, alone, apart in re.findall(r"^(\w+) \d (\d+) (\S+) (\S+)$", ended.stdout, re.MULTILINE):
        found[name].append((int(count), float(alone), float(apart)))
    assert all(len(rows) == 2 for rows in found.values()), ended.stdout
    return found, ended.stderr


@pytest.mark.smoke
def test_a_model_that_crosses_the_barrier_learns_what_one_process_does_and_rank_0_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setenv("KEPT", str(tmp_path))
    found, _ = train(["across"], "--schedule", "bytescheduler")
    for count, alone, apart in found["across"]:
        assert (count, apart) == (STEPS, 0)
        assert not alone > EXACT


def test_every_optimizer_learns_what_it_does_in_one_process():
    names = ["barrier", "decay", "schedule", "several", "frozen", "global", "average", "accumulate"]
    found, messages = train([*names, "mixed", "automatic"], "--schedule", "prophet")
    # In two steps of float16 a gradient of rank 1 is infinite: no rank makes that update.
    counts = {"accumulate": STEPS // 2, "mixed": STEPS - 2, "automatic": STEPS - 2}
    for name, rows in found.items():
        for count, alone, apart in rows:
            assert (count, apart) == (counts.get(name, STEPS), 0), name
            assert not alone > EXACT, name
    for reason in ("global norm", "averaged over steps", "accumulated", "loss scaling"):
        assert re.search(f"each step waits for all gradients.*{reason}", messages), reason


def test_sparse_gradients_eager_steps_and_servers():
    found, messages = train(["words", "eager"], "--servers", 1)
    for name, rows in found.items():
        for count, alone, apart in rows:
            assert (count, apart) == (STEPS, 0), name
            assert not alone > EXACT, name
    assert "table/embeddings is sparse, and exchanged dense: 1.60 kB in every step" in messages
    assert messages.count("runs eagerly") == 2  # once on each rank


_HELD = """
import os, sys, threading
os.environ |= {"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
sys.modules |= dict.fromkeys(("jax", "pandas", "sklearn"))  # as in bare_keras.py
import keras, numpy as np, tensorflow as tf
import foretrain as ft

tf.config.threading.set_inter_op_parallelism_threads(2)
LAST = 2
arrived = threading.Semaphore(0)

class Watched(ft.Session):
    def _land(self, index, used):
        super()._land(index, used)
        if index == LAST:
            arrived.release()

def hold(gradient):
    assert arrived.acquire(timeout=100), "the last layer's sum did not come before the first layer's gradient was ready"
    return gradient

@tf.custom_gradient
def held(x):
    def gradient(dy):
        return tf.ensure_shape(tf.numpy_function(hold, [dy], tf.float32, stateful=False), dy.shape)
    return tf.identity(x), gradient

class Held(keras.layers.Layer):
    def call(self, x):
        return held(x)

# So large that no gradient waits for another one to be reported with it.
first, middle, last = (keras.layers.Dense(512, use_bias=False, name=name) for name in ("first", "middle", "last"))
model = keras.Sequential([keras.Input((512,)), first, Held(), middle, last], name="net")
with Watched(trace=True) as session:
    model.compile(ft.keras.scheduled(keras.optimizers.SGD(0.1), session), "mse")
    ones = np.ones((6, 512), np.float32)
    model.fit(ones, ones, batch_size=1, verbose=0)
    spans = list(session.timeline)
for step in range(6):
    (ready,) = [s.end for s in spans if (s.kind, s.name, s.step) == ("backward", "net.first", step)]
    sent = [s for s in spans if (s.lane, s.name, s.step) == ("wire", "net.last.kernel", step)]
    print(session.rank, step, bool(sent), all(s.start < s.end < ready for s in sent))
"""


def test_the_last_layers_sum_arrives_while_the_backward_pass_computes_the_first(tmp_path):
    (tmp_path / "held.py").write_text(_HELD)
    ended = foretrain("run", "--nproc", 2, "--schedule", "fifo", "--", tmp_path / "held.py")
    assert ended.returncode == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines()]
    scheduled = [row for row in rows if row[2] == "True"]
    assert {row[3] for row in scheduled} == {"True"}, ended.stdout
    assert {row[0] for row in scheduled} == {"0", "1"}


_ERRORS = """
import os, sys
os.environ |= {"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
sys.modules |= dict.fromkeys(("jax", "pandas", "sklearn"))  # as in bare_keras.py
import keras, numpy as np
import foretrain as ft

def model(**options):
    found = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    found.compile("sgd", "mse", **options)
    return found

def refused(call, *arguments):
    try:
        call(*arguments)
    except ft.ConfigError as error:
        print(error)

with ft.Session(rank=0, ranks=1) as session:
    refused(ft.keras.attach, keras.Sequential([keras.layers.Dense(2)]), session)
    refused(ft.keras.attach, model(jit_compile=True), session)
    one = model()
    ft.keras.attach(one, session)
    refused(ft.keras.attach, one)
    refused(ft.keras.scheduled, one.optimizer)
    one.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0)
    other = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    other.compile(one.optimizer, "mse")
    refused(other.fit, np.ones((4, 5)), np.ones((4, 2)))

for late in (False, True):  # compiled by XLA, without attach() and after it
    with ft.Session(rank=0, ranks=1) as session:
        one = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        one.compile(ft.keras.scheduled("sgd", session), "mse", jit_compile=not late)
        if late:
            ft.keras.attach(one)
            one.jit_compile = True
        refused(one.fit, np.ones((4, 4)), np.ones((4, 2)))

def seen(attached, ask):
    keras.utils.set_random_seed(1)
    x, y = np.ones((4, 4)), np.ones((4, 2))
    with ft.Session(rank=0, ranks=1) as session:
        one = model()
        if attached:
            ft.keras.attach(one, session)
        first = one.get_weights()
        for _ in range(3):
            one.train_on_batch(x, y)
        found = ask(one, x, y, first)
        return float(np.sum(found))

def put(one, x, y, weights):
    one.set_weights(weights)
    return one(x)

def loaded(one, x, y, weights):
    one.save_weights(os.environ["KEPT"])
    one.train_on_batch(x, y)
    one.load_weights(os.environ["KEPT"])
    one.train_on_batch(x, y)
    return one.get_weights()[0]

for ask in (lambda one, x, y, _: one.test_on_batch(x, y), lambda one, x, y, _: one.predict_on_batch(x), put, loaded):
    print("same", seen(True, ask) == seen(False, ask))
"""


def test_what_cannot_be_attached_is_refused_and_what_can_sees_all_updates(tmp_path):
    environment = os.environ | {"KEPT": str(tmp_path / "kept.weights.h5")}
    command = [sys.executable, "-c", _ERRORS]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    for line, words in zip(
        lines,
        [
            "is not compiled; call model.compile",
            "jit_compile: True leaves no way to hand a gradient over inside a step",
            "is attached already; attach it once",
            "is scheduled already; schedule each optimizer once",
            "are not those that this session exchanges",
            *["jit_compile: True leaves no way to hand a gradient over inside a step"] * 2,
            *["same True"] * 4,
        ],
        strict=True,
    ):
        assert words in line


_OTHERS = """
import os, sys
os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
backend = os.environ["KERAS_BACKEND"]
import keras, numpy as np
import foretrain as ft

def model():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])

def refused(call, *arguments):
    try:
        call(*arguments)
    except ft.ConfigError as error:
        print(error)

refused(ft.keras.scheduled, "sgd")
refused(ft.keras.attach, model())
x = np.ones((4, 4), np.float32)

def in_torch(one, job):
    import torch
    optimizer = torch.optim.SGD(one.parameters(), 0.1)
    with job(one, optimizer):
        for _ in range(6):
            (one(torch.from_numpy(x)) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().numpy().copy() for p in one.parameters()]

def in_jax(one, graded):
    import jax
    def loss(params):
        return (one.stateless_call(params, [], x)[0] ** 2).mean()
    params, step = [v.value for v in one.trainable_variables], jax.jit(graded(loss))
    for _ in range(6):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, step(params)[1])
    return [np.asarray(p) for p in params]

if backend == "torch":
    import contextlib, torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plain, ours = (in_torch(model(), job) for job in (lambda *_: contextlib.nullcontext(), ft.attach))
    dist.destroy_process_group()
else:
    import jax
    with ft.Session(rank=0, ranks=1) as session:
        ours = in_jax(model(), lambda loss: ft.jax.scheduled_value_and_grad(loss, session))
    plain = in_jax(model(), jax.value_and_grad)
print(all(np.array_equal(a, b) for a, b in zip(plain, ours, strict=True)))
"""


@pytest.mark.parametrize(("backend", "remedy"), [("torch", "use foretrain.attach"), ("jax", "use foretrain.jax")])
def test_another_backend_is_refused_and_trains_by_its_own_plug_in(backend, remedy):
    need(backend, backend)
    environment = os.environ | {"KERAS_BACKEND": backend}
    ended = subprocess.run(
        [sys.executable, "-c", _OTHERS], capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    *refusals, same = ended.stdout.splitlines()
    assert len(refusals) == 2
    assert all("computes gradients outside of TensorFlow" in each and remedy in each for each in refusals)
    assert same == "True"


def test_another_version_is_said_once_and_on_rank_0(caplog):
    warn_if_untested.cache_clear()
    for rank, version in ((0, "3.15.2"), (1, "9.0.0"), (0, "9.0.0"), (0, "9.0.0")):
        warn_if_untested(rank, "keras", version, "3.15")
    assert [record.message for record in caplog.records] == [
        "keras 9.0.0: foretrain is tested with 3.15.x; please report what fails"
    ]
    warn_if_untested.cache_clear()
