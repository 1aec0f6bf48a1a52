"""JAX under foretrain: real ranks, against one process that trains on the joint batch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foretrain.comm.options import ParameterServer
from foretrain.workload.file import load
from tests.comm.ps.server.jobs import serving
from tests.plugins.torch.ranks import ROOT
from tests.processes import foretrain, need

need("jax", "jax")
pytestmark = pytest.mark.process
JOB = "tests.plugins.jax_job"
FILE = Path(__file__).with_name("jax_job.py")
LONG = 300
"""Seconds for a step to be compiled and run, twice, on a busy machine."""


def assert_learns_the_same(rows, exact=1e-6):
    for alone, apart in rows:
        assert apart == 0
        assert not alone > exact


def test_ranks_of_a_script_learn_what_one_process_does():
    ended = foretrain("run", "--nproc", 2, "--schedule", "bytescheduler", "--", FILE, "across")
    assert ended.returncode == 0, ended.stderr
    rows = [tuple(map(float, line.strip("()").split(", "))) for line in ended.stdout.splitlines() if line[:1] == "("]
    assert len(rows) == 2
    assert_learns_the_same(rows)


@pytest.mark.parametrize(
    "name", ["barrier", "global", "momentum", "decay", "scan", "half", "shared", "frozen", "masked"]
)
def test_ranks_learn_what_one_process_does(ranks, name):
    assert_learns_the_same(ranks(f"{JOB}:trained", name, "prophet", timeout=LONG), 0.02 if name == "half" else 1e-6)


def test_ranks_learn_what_one_process_does_over_servers(ranks):
    with serving(2) as service:
        host, port = service.address
        found = ranks(f"{JOB}:trained", "across", transport=ParameterServer(f"{host}:{port}"), timeout=LONG)
    assert_learns_the_same(found)


@pytest.mark.parametrize("how", ["barrier", "across"])
def test_a_model_of_flax_learns_what_it_does_in_one_process(ranks, how):
    need("flax", "dev")
    assert_learns_the_same(ranks("tests.plugins.flax_job:train", how, timeout=LONG))


def test_the_example_runs(job):
    two = job(2)
    two("tests.plugins.torch.ranks:run_script", str(ROOT / "examples" / "10_jax.py"), timeout=LONG)
    assert re.search(r"^rank 0.*bytescheduler.*loss \d\.\d\d → \d\.\d\d", two.wrote(0), re.MULTILINE)


def test_what_cannot_be_exchanged_is_refused_with_a_remedy(alone):
    gone = "'step 1' is not the last, 2: its mean is gone; go on from the state that the last step returned"
    expected = [
        "params: 'list' does not name layers; name each layer",
        "cannot take the layers one by one; leave frozen layers out of init()",
        "needs the gradients of all layers at once; clip layer by layer",
        "layer: 'three' has no parameters; these have: one, two",
        "layer: 'two' is not used by the loss; leave it out of init()",
        "drop.key: key<fry> has no gradient; hand the parameters in alone",
        gone,
        gone,
        "-1.0176 -1.0176",
        "are not those that this session exchanges",
        "is called twice in one step; accumulate gradients, or repeat steps, with jax.lax.scan",
        "80.0",
        "comes before the last was used; compute gradients once per step",
    ]
    (said,) = alone(f"{JOB}:refusals", timeout=LONG)
    for line, words in zip(said, expected, strict=True):
        assert words in line


@pytest.mark.parametrize(
    ("how", "words"), [("killed", "PeerLost"), ("interrupted", "KeyboardInterrupt"), ("another", "Disagreement: ")]
)
def test_a_rank_that_is_left_alone_names_the_one_that_is_gone(job, how, words):
    first, second = job(2).outcomes(f"{JOB}:ending", how, timeout=LONG, grace=60)
    assert words in first.error
    assert "rank 1" in first.error
    assert second.error


def test_a_recorded_step_is_a_workload(alone, tmp_path):
    alone("foretrain.cli:main", ["record", f"{FILE}:recorded", "--out", str(tmp_path / "small.toml")], timeout=LONG)
    workload = load(tmp_path / "small.toml")
    assert (workload.name, workload.batch) == ("small", 16)
    sizes = {"back.value": 256 * 8 * 4, "front.w": 64 * 256 * 4, "front.b": 256 * 4}
    assert {gradient.name: gradient.size for gradient in workload.gradients} == sizes
    assert {workload.layers[gradient.layer].name for gradient in workload.gradients} == {"back", "front"}
    assert workload.forward > 0
    assert workload.backward > 0
    assert "median of 12 steps" in workload.source
