"""Gluon nets of MXNet under foretrain: real ranks, against one process that trains on the joint batch.

MXNet's last release needs a NumPy of its time, and so an environment of its own, which tools/mxnet.py makes.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.processes import own_environment, python_of_mxnet

pytestmark = pytest.mark.process
JOB = Path(__file__).with_name("mxnet_job.py")


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter of an environment with MXNet; skips where its packages are not to be had."""
    return python_of_mxnet()


def train(python: str, *words: object) -> dict[str, list[tuple[float, float]]]:
    """Return, per case and rank, the difference to one process and to rank 0."""
    command = [python, "-m", "foretrain", "run", "--nproc", "2", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=own_environment())
    assert ended.returncode == 0, ended.stderr
    found: dict[str, list[tuple[float, float]]] = {}
    for name, alone, apart in re.findall(r"^(\w+) \d (\S+) (\S+)$", ended.stdout, re.MULTILINE):
        found.setdefault(name, []).append((float(alone), float(apart)))
    return found


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--schedule", "bytescheduler"), ("barrier", "across", "momentum", "whole", "zeroed", "added")),
        (("--schedule", "prophet", "--servers", 1), ("across",)),
    ],
    ids=["all-reduce", "servers"],
)
def test_ranks_learn_the_same_bits_as_one_process(python, options, names):
    found = train(python, *options, "--", JOB, *names)
    assert found == {name: [(0.0, 0.0)] * 2 for name in names}


_ERRORS = """
import mxnet as mx
from mxnet import autograd, gluon
import foretrain as ft

def refused(call, *arguments):
    try:
        call(*arguments)
    except ft.ConfigError as error:
        print(error)

with ft.Session(rank=0, ranks=1, average=False) as session:
    net = gluon.nn.Dense(2, in_units=2)
    net.initialize()
    kvs = ft.mxnet.ScheduledKVS(None, session)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kvs)
    with autograd.record():
        loss = net(mx.nd.ones((1, 2))).sum()
    loss.backward()
    trainer.step(1)
    refused(kvs.attach, net)
    refused(kvs.pushpull, 7, mx.nd.ones(2))
"""


def test_what_cannot_be_exchanged_is_refused_with_a_remedy(python):
    ended = subprocess.run([python, "-c", _ERRORS], capture_output=True, text=True, check=False, env=own_environment())
    assert ended.returncode == 0, ended.stderr
    assert "comes too late; attach one net, before the trainer's first step" in ended.stdout
    assert "train dense parameters on one device per process" in ended.stdout
