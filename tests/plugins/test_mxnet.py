"""Gluon nets of MXNet under foretrain: real ranks, against one process that trains on the joint batch.

MXNet's last release needs a NumPy of its time, and so an environment of its own, which tools/mxnet.py makes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.torch.ranks import Nursery
from tests.processes import own_environment, python_of_mxnet

pytestmark = pytest.mark.process
JOB = "tests.plugins.mxnet_job"


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter of an environment with MXNet; skips where its packages are not to be had."""
    return python_of_mxnet()


@pytest.fixture(scope="module")
def nursery(python: str) -> Iterator[Nursery]:
    with Nursery(JOB, python=python, environment=own_environment()) as nursery:
        yield nursery


def test_ranks_of_a_script_learn_the_same_bits_as_one_process(python):
    """The two lines of a script's command: without PyTorch, ranks are started plainly."""
    command = [python, "-m", "foretrain", "run", "--nproc", "2", "--servers", "1"]
    command += ["--schedule", "prophet", "--", Path(__file__).with_name("mxnet_job.py"), "across"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=own_environment())
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\n")[:2] == ["(0.0, 0.0)"] * 2


@pytest.mark.parametrize("name", ["barrier", "across", "momentum", "whole", "zeroed", "added", "twice"])
def test_ranks_learn_the_same_bits_as_one_process(ranks, name):
    assert ranks(f"{JOB}:trained", name, "bytescheduler", timeout=300) == [(0.0, 0.0)] * 2


def test_what_cannot_be_exchanged_is_refused_with_a_remedy(alone):
    ((late, sparse, second),) = alone(f"{JOB}:refusals", timeout=300)
    assert "comes too late; attach one net, before the trainer's first step" in late
    assert "train dense parameters on one device per process" in sparse
    assert "is another trainer's; make a session and a store for each" in second


@pytest.mark.parametrize("what", ["frozen", "unused", "forks"])
def test_layers_without_a_gradient_and_forks_cost_no_step(ranks, what):
    assert ranks(f"{JOB}:odd", what, timeout=300) == [(10, 0.0)] * 2


def test_an_operation_of_mxnet_that_fails_ends_the_job_with_its_error(job):
    (ended,) = job(1).outcomes(f"{JOB}:failing", timeout=300, grace=60)
    assert "potrf" in ended.error


@pytest.mark.parametrize(
    ("how", "words"),
    [("killed", "PeerLost"), ("stops", "PeerLost"), ("interrupted", "KeyboardInterrupt"), ("another", "Disagreement")],
)
def test_a_rank_that_is_left_alone_names_the_one_that_is_gone(job, how, words):
    first, second = job(2).outcomes(f"{JOB}:ending", how, timeout=300, grace=60)
    assert words in first.error
    assert "rank 1" in first.error
    assert bool(second.error) == (how != "stops")
