"""Knobs that `set` changes in the middle of a real job change what is sent, by all-reduce and over servers."""

import os

import pytest

torch = pytest.importorskip("torch")

from foretrain.comm.options import ParameterServer  # noqa: E402
from foretrain.plugins.torch import attach  # noqa: E402
from foretrain.plugins.torch.rendezvous import SECRET  # noqa: E402
from tests.plugins.torch.models import batch, mlp, objective, sgd  # noqa: E402
from tests.plugins.torch.ps.serving import KEY, servers  # noqa: E402

STEPS, CHANGE = 16, 8


def largest(decisions):
    """Bytes of the largest chunk."""
    return max(decision.chunk.size for decision in decisions)


def fused(decisions):
    """Tensors in the chunk that has most."""
    return max(len(decision.chunk.pieces) for decision in decisions)


def at_once(decisions):
    """Bytes that were started at one moment."""
    started = {}
    for decision in decisions:
        started[decision.time] = started.get(decision.time, 0) + decision.chunk.size
    return max(started.values())


CASES = [
    ("bytescheduler(partition=1KiB, credit=1MiB)", "partition", "4KiB", largest),
    ("bytescheduler(partition=1KiB, credit=1KiB)", "credit", "1MiB", at_once),
    ("bytescheduler(partition=1MiB, credit=1MiB, fuse=0.0)", "fuse", "1000.0", fused),
    ("fusion(threshold=1KiB, cycle=20ms)", "threshold", "1MiB", fused),
    ("ddp(bucket=1KiB, first=1KiB)", "bucket", "1MiB", fused),
    ("dear(group=1KiB)", "group", "1MiB", fused),
    ("pace(partition=1KiB, credit=1MiB)", "partition", "4KiB", largest),
    ("prophet(partition=1KiB, credit=1MiB, profile=1000, fuse=0.0)", "partition", "4KiB", largest),
    ("p3(slice=1KiB)", "slice", "4KiB", largest),
]
"""A schedule, the knob that changes, to what, and what grows by that. A weight has 4 KiB."""


def changed(plan, knob, value, options):
    """This rank's decisions before and after the change; a policy's first two steps may be unlike all others."""
    os.environ[SECRET] = KEY.hex()
    try:
        model = mlp()
        optimizer = sgd(model)
        with attach(model, optimizer, plan, warmup=1, **options) as attached:
            for step in range(STEPS):
                objective(model(batch(step))).backward()
                optimizer.step()
                optimizer.zero_grad()
                attached.synchronize()
                if step == CHANGE:
                    change = attached.steps
                    attached.set(knob, value)
            log = attached.log
        first = [decision for decision in log if 2 <= decision.step < change]
        return first, [decision for decision in log if decision.step >= change + 2]
    finally:
        del os.environ[SECRET]


@pytest.mark.parametrize(("plan", "knob", "value", "grows"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_by_all_reduce(ranks, plan, knob, value, grows):
    (before, after), _ = ranks(changed, plan, knob, value, {})
    assert grows(before) < grows(after)


@pytest.mark.parametrize(("plan", "knob", "value", "grows"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_over_servers(ranks, plan, knob, value, grows):
    with servers(1, 2) as (addresses, _):
        for before, after in ranks(changed, plan, knob, value, {"transport": ParameterServer(addresses)}):
            assert grows(before) < grows(after)
