"""The compiled shard of sums against the same in Python: the same deliveries, in the same order, with the same bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.comm.ps.frames import Malformed
from foretrain.comm.ps.placement import WIDTHS, Declared, ShardPart
from foretrain.comm.ps.server.shard import SumShard
from foretrain.errors import Disagreement
from tests.comm.ps.server.oracle import PythonSumShard

COUNTS, WORKERS = (24, 7), 3


def outcome(shard, name, *arguments, **options):
    """What a call returns, or the error that it raises, in comparable form."""
    try:
        found = getattr(shard, name)(*arguments, **options)
    except (Malformed, Disagreement) as error:
        return str(error)
    return [(worker, *value[:4], None if value.data is None else bytes(value.data)) for worker, value in found]


steps = st.integers(0, 2)
pushes = st.tuples(
    st.just("push"),
    st.integers(0, WORKERS - 1),
    st.integers(0, len(COUNTS)),
    steps,
    st.integers(0, 24),
    st.integers(0, 24),
    st.booleans(),
    st.sampled_from([False] * 9 + [True]),
    st.sampled_from([False] * 3 + [True]),
)
pulls = st.tuples(st.just("pull"), st.integers(0, WORKERS - 1), st.integers(0, 1), steps, st.integers(0, 24), steps)
losses = st.tuples(st.just("remove_worker"), st.integers(0, WORKERS - 1))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@given(st.lists(st.one_of([pushes] * 8 + [pulls, losses]), max_size=40), st.booleans(), st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_deliveries_are_those_of_the_oracle(dtype, calls, restarted, seed):
    random, width = np.random.default_rng(seed), WIDTHS[dtype]
    parts = [ShardPart(number, number, 0, width * count, 0) for number, count in enumerate(COUNTS)]
    tasks = [Declared(f"layer{number}", width * count, dtype, number) for number, count in enumerate(COUNTS)]
    ours, oracle = (kind(parts, tasks, WORKERS, restarted=restarted) for kind in (SumShard, PythonSumShard))
    found = [[], []]
    for name, *arguments in calls:
        if name == "push":
            worker, part, step, offset, size, absent, again, held = arguments
            raw = random.standard_normal(size).astype(np.float64 if width == 8 else np.float32)
            # The upper half of a float32 is a bfloat16; as a float16 it is some number, too.
            bits = raw.view(np.uint16)[1::2].copy() if width == 2 else raw
            data = None if absent else memoryview(bits.tobytes())
            where = worker, part, step, width * offset, width * size, data
            found = [outcome(each, "push", *where, again=again, held=held) for each in (ours, oracle)]
        elif name == "pull":
            where = *arguments[:3], *(width * each for each in arguments[3:])
            found = [outcome(each, "pull", *where) for each in (ours, oracle)]
        elif oracle._group & ~(1 << arguments[0]):
            found = [outcome(each, "remove_worker", *arguments) for each in (ours, oracle)]
        assert found[0] == found[1]
        for worker in range(WORKERS):
            assert ours.blocking_round(worker) == oracle.blocking_round(worker)
        assert ours.waiting() == oracle.waiting()
        assert [ours.round_complete(step) for step in range(3)] == [oracle.round_complete(step) for step in range(3)]
