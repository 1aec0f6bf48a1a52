"""Keras on TensorFlow under foretrain: real ranks, against one process that trains on the joint batch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from foretrain.comm.options import ParameterServer
from foretrain.workload.file import load
from tests.comm.ps.server.jobs import serving
from tests.plugins.torch.ranks import ROOT
from tests.processes import foretrain, need

need("tensorflow", "keras")
pytestmark = pytest.mark.process
JOB = "tests.plugins.keras_job"
FILE = Path(__file__).with_name("keras_job.py")
STEPS = 10
EXACT = 1e-6
"""Sums of three terms, a regularizer's among them, may be taken in another order."""
LONG = 600
"""Seconds for a graph to be traced and trained, twice, on a busy machine."""


def assert_learns_the_same(rows, updates=STEPS):
    for count, alone, apart in rows:
        assert (count, apart) == (updates, 0)
        assert not alone > EXACT


def test_a_model_that_crosses_the_barrier_learns_what_one_process_does_and_rank_0_keeps_it(tmp_path):
    ended = foretrain("run", "--nproc", 2, "--schedule", "bytescheduler", "--", FILE, "decay", tmp_path)
    assert ended.returncode == 0, ended.stderr
    rows = [tuple(map(float, line.strip("()").split(", "))) for line in ended.stdout.splitlines() if line[:1] == "("]
    assert len(rows) == 2
    assert_learns_the_same(rows)


@pytest.mark.parametrize("name", ["barrier", "across", "schedule", "several", "frozen", "stopped"])
def test_a_model_learns_what_it_does_in_one_process(ranks, name):
    assert_learns_the_same(ranks(f"{JOB}:trained", name, "prophet", timeout=LONG))


@pytest.mark.parametrize(
    ("name", "updates", "reason"),
    [
        ("global", STEPS, "global norm"),
        ("average", STEPS, "averaged over steps"),
        ("accumulate", STEPS // 2, "accumulated"),
        # In two steps of float16 a gradient of rank 1 is infinite: no rank makes that update.
        ("mixed", STEPS - 2, "loss scaling"),
        ("automatic", STEPS - 2, "loss scaling"),
    ],
)
def test_what_needs_all_gradients_waits_for_them_says_so_and_learns_the_same(ranks, name, updates, reason):
    assert_learns_the_same(ranks(f"{JOB}:trained", name, "prophet", timeout=LONG), updates)
    assert re.search(f"each step waits for all gradients, because .*{reason}", ranks.wrote(0))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("words", "table/embeddings is sparse, and exchanged dense: 1.60 kB in every step"),
        ("eager", "runs eagerly"),
    ],
)
def test_sparse_gradients_and_eager_steps_over_servers(ranks, name, said):
    with serving(2) as service:
        host, port = service.address
        rows = ranks(f"{JOB}:trained", name, transport=ParameterServer(f"{host}:{port}"), timeout=LONG)
    assert_learns_the_same(rows)
    assert said in ranks.wrote(0)


def test_the_last_layers_sum_arrives_while_the_backward_pass_computes_the_first(ranks):
    for steps in ranks(f"{JOB}:held", timeout=LONG):
        assert {before for scheduled, before in steps if scheduled} == {True}


def test_the_example_runs(job):
    two = job(2)
    two("tests.plugins.torch.ranks:run_script", str(ROOT / "examples" / "09_keras.py"), timeout=LONG)
    assert re.search(r"^rank 0.*bytescheduler.*loss \d\.\d\d → \d\.\d\d", two.wrote(0), re.MULTILINE)


def test_what_cannot_be_attached_is_refused(alone):
    (said,) = alone(f"{JOB}:refusals", timeout=LONG)
    by_xla = "jit_compile: True leaves no way to hand a gradient over inside a step"
    expected = ["is not compiled; call model.compile", by_xla, "is attached already; attach it once"]
    expected += ["is scheduled already; schedule each optimizer once", "are not those that this session exchanges"]
    for line, words in zip(said, [*expected, by_xla, by_xla], strict=True):
        assert words in line


def test_whoever_reads_or_writes_a_model_sees_all_updates(alone, tmp_path):
    assert alone(f"{JOB}:readings", str(tmp_path), timeout=LONG) == [[True] * 4]


@pytest.mark.parametrize("how", ["killed", "stops", "interrupted"])
def test_a_rank_that_is_left_alone_names_the_one_that_is_gone(job, how):
    first, second = job(2).outcomes(f"{JOB}:ending", how, timeout=LONG, grace=60)
    assert "PeerLost" in first.error
    assert "rank 1" in first.error.partition("PeerLost")[2]
    assert ("KeyboardInterrupt" in first.error.partition("PeerLost")[2]) == (how == "interrupted")
    assert bool(second.error) == (how != "stops")


def test_ranks_whose_models_differ_say_so_when_training_begins(job):
    for each in job(2).outcomes(f"{JOB}:ending", "another", timeout=LONG, grace=60):
        assert re.search(r"Disagreement: tensor 'sequential\S*kernel \d+ float32' .*differs on rank 1", each.error)


def test_a_recorded_step_is_a_workload(alone, tmp_path):
    alone("foretrain.cli:main", ["record", f"{FILE}:small", "--out", str(tmp_path / "small.toml")], timeout=LONG)
    workload = load(tmp_path / "small.toml")
    assert (workload.name, workload.batch) == ("small", 16)
    assert {gradient.name: gradient.size for gradient in workload.gradients} == {
        **{"small.front.kernel": 64 * 256 * 4, "small.front.bias": 256 * 4},
        **{"small.back.kernel": 256 * 8 * 4, "small.back.bias": 8 * 4},
    }
    assert {workload.layers[gradient.layer].name for gradient in workload.gradients} == {"small.front", "small.back"}
    assert workload.forward > 0
    assert workload.backward > 0
    assert "median of 12 steps" in workload.source


def test_a_recorded_step_that_trains_nothing_is_refused(job, tmp_path):
    one, out = job(1), tmp_path / "idle.toml"
    (outcome,) = one.outcomes("foretrain.cli:main", ["record", f"{FILE}:idle", "--out", str(out)], timeout=LONG)
    assert "SystemExit" in outcome.error
    assert "step() has not trained small: let it call train_on_batch() or fit() once" in one.wrote(0)
    assert not out.exists()


_OTHERS = """
import os, sys
os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
backend = os.environ["KERAS_BACKEND"]
sys.modules |= dict.fromkeys({"pandas", "sklearn", "jax", "torch"} - {backend})  # as in keras_job.py
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
        [sys.executable, "-c", _OTHERS], capture_output=True, text=True, check=False, timeout=LONG, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    *refusals, same = ended.stdout.splitlines()
    assert len(refusals) == 2
    assert all("computes gradients outside of TensorFlow" in each and remedy in each for each in refusals)
    assert same == "True"
