"""JAX under foretrain: real ranks, against one process that trains on the joint batch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import foretrain, need

need("jax", "jax")
pytestmark = pytest.mark.process
JOB = Path(__file__).with_name("jax_job.py")
EXACT = 1e-6


def train(*words: object) -> dict[str, list[tuple[float, float]]]:
    """Return, per case and rank, the difference to one process and to rank 0."""
    ended = foretrain("run", "--nproc", 2, *words)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, list[tuple[float, float]]] = {}
    for name, alone, apart in re.findall(r"^(\w+) \d (\S+) (\S+)$", ended.stdout, re.MULTILINE):
        found.setdefault(name, []).append((float(alone), float(apart)))
    return found


@pytest.mark.smoke_case("all-reduce")
@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--schedule", "bytescheduler"), ("across", "barrier")),
        (("--schedule", "prophet"), ("global", "momentum", "decay", "scan", "half", "shared", "frozen", "masked")),
        (("--servers", 1), ("across",)),
    ],
    ids=["all-reduce", "optimizers", "servers"],
)
def test_ranks_learn_what_one_process_does(options, names):
    found = train(*options, "--", JOB, *names)
    assert list(found) == list(names)
    for name, rows in found.items():
        assert len(rows) == 2
        for alone, apart in rows:
            assert apart == 0, name
            assert not alone > (EXACT if name != "half" else 0.02), name


def test_a_model_of_flax_learns_what_it_does_in_one_process():
    need("flax", "dev")
    found = train("--schedule", "bytescheduler", "--", JOB.with_name("flax_job.py"), "barrier", "across")
    for name in ("barrier", "across"):
        assert len(found[name]) == 2
        for alone, apart in found[name]:
            assert apart == 0, name
            assert not alone > EXACT, name


_ERRORS = """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, optax
import foretrain as ft

params = {"one": {"w": jnp.ones((2, 2))}, "two": {"w": jnp.ones((2, 2))}}

def refused(call, *arguments):
    try:
        call(*arguments)
    except ft.ConfigError as error:
        print(error)

with ft.Session(rank=0, ranks=1) as session:
    refused(ft.jax.DeferredUpdates(optax.sgd(0.1), session).init, [jnp.ones(2)])
    frozen = optax.multi_transform({"yes": optax.sgd(0.1), "no": optax.set_to_zero()}, {"one": "no", "two": "yes"})
    refused(ft.jax.DeferredUpdates(frozen, session).init, params)
    refused(ft.jax.DeferredUpdates(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), session).init, params)
    updates = ft.jax.DeferredUpdates(optax.sgd(0.1), session)
    state = updates.init(params)
    refused(updates.step, lambda taps: taps("three", jnp.ones(2))["w"].sum(), state)
    refused(updates.step, lambda taps: taps("one", jnp.ones(2))["w"].sum(), state)
    refused(ft.jax.DeferredUpdates(optax.sgd(0.1), session).init, {"drop": {"key": jax.random.key(0)}})
    def squares(taps):
        hidden = taps("one", jnp.ones(2))["w"] @ jnp.ones(2)
        return ((taps("two", hidden)["w"] @ hidden) ** 2).sum()
    step = jax.jit(lambda state: updates.step(squares, state)[1])
    first = step(state)
    second = jax.block_until_ready(step(first))
    for late in (step, updates.flush):  # the gradients of the first step are gone
        try:
            jax.block_until_ready(late(first))
        except Exception as error:  # JAX's own, around the session's
            print(" ".join(str(error).split()))
    print(*(f'{updates.flush(second).params["two"]["w"].sum():.4f}' for _ in range(2)))
with ft.Session(rank=0, ranks=1) as session:
    grads = ft.jax.scheduled_value_and_grad(lambda p: p["w"].sum(), session)
    jax.jit(grads)({"w": jnp.ones((2, 2))})
    refused(jax.jit(grads), {"w": jnp.ones((3, 2))})
with ft.Session(rank=0, ranks=1) as session:
    grads = ft.jax.scheduled_value_and_grad(lambda p, x: ((p["w"] @ x) ** 2).sum(), session)
    w = {"w": jnp.ones((2, 2))}
    refused(jax.jit(lambda: (grads(w, jnp.ones(2)), grads(w, jnp.ones(2)))))
    steps = jax.jit(lambda xs: jax.lax.scan(lambda total, x: (total + grads(w, x)[1]["w"], None), 0 * w["w"], xs)[0])
    print(steps(jnp.ones((5, 2))).sum())
    try:
        jax.block_until_ready(jax.vmap(grads, in_axes=(None, 0))(w, jnp.ones((3, 2))))
    except Exception as error:  # JAX's own, around the session's
        print(" ".join(str(error).split()))
"""


def test_what_cannot_be_exchanged_is_refused_with_a_remedy():
    ended = subprocess.run([sys.executable, "-c", _ERRORS], capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    for line, words in zip(
        ended.stdout.splitlines(),
        [
            "params: 'list' does not name layers; name each layer",
            "cannot take the layers one by one; leave frozen layers out of init()",
            "needs the gradients of all layers at once; clip layer by layer",
            "layer: 'three' has no parameters; these have: one, two",
            "layer: 'two' is not used by the loss; leave it out of init()",
            "drop.key: key<fry> has no gradient; hand the parameters in alone",
            *["'step 1' is not the last, 2: its mean is gone; go on from the state that the last step returned"] * 2,
            "-1.0176 -1.0176",
            "are not those that this session exchanges",
            "is called twice in one step; accumulate gradients, or repeat steps, with jax.lax.scan",
            "80.0",
            "comes before the last was used; compute gradients once per step",
        ],
        strict=True,
    ):
        assert words in line
