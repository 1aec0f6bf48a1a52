"""Wires against an oracle in exact fractions: who shares, for how long, and when each is out."""

from collections import deque
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from foretrain.simulation import VirtualWorld
from foretrain.simulation.links import ExclusiveLink, SharedLink


def sent_on(lanes, sends):
    """When each of ``sends``, (time, lane, work), is out: by a wire."""
    world, out = VirtualWorld(), {}
    wire = SharedLink(lanes)

    def send(index, lane, work):
        wire.lanes[lane].send(work, world, lambda start: out.setdefault(index, world.now()))

    for index, (time, lane, work) in enumerate(sends):
        world.call_at(time, lambda index=index, lane=lane, work=work: send(index, lane, work))
    world.run()
    return [out[index] for index in range(len(sends))]


def exactly(lanes, sends):
    """The same without rounding: lanes that are busy get equal shares."""
    coming = deque(sorted(range(len(sends)), key=lambda index: sends[index][0]))
    queues, rest, out, now = [deque() for _ in range(lanes)], {}, {}, Fraction(0)
    while coming or any(queues):
        busy = [queue[0] for queue in queues if queue]
        until = Fraction(sends[coming[0]][0]) if coming else None
        first = min((rest[index] * len(busy) for index in busy), default=None)
        if first is None or (until is not None and until < now + first):
            assert until is not None
            for index in busy:
                rest[index] -= (until - now) / len(busy)
            now = max(now, until)
            index = coming.popleft()
            queues[sends[index][1]].append(index)
            rest[index] = Fraction(sends[index][2])
            continue
        now += first
        for index in busy:
            rest[index] -= first / len(busy)
            if not rest[index]:
                out[index] = now
                queues[sends[index][1]].popleft()
    return [out[index] for index in range(len(sends))]


@given(
    st.integers(1, 3).flatmap(
        lambda lanes: st.tuples(
            st.just(lanes),
            st.lists(
                st.tuples(st.integers(0, 60), st.integers(0, lanes - 1), st.integers(1, 30)), min_size=1, max_size=12
            ),
        )
    )
)
def test_busy_lanes_share_equally(case):
    """To the picosecond but for rounding, which is up, and of which each change of who shares may add one."""
    lanes, sends = case
    exact = exactly(lanes, sends)
    for found, wanted in zip(sent_on(lanes, sends), exact, strict=True):
        assert -1 < found - wanted <= 2 * len(sends)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=12))
def test_a_lane_alone_is_a_line(rows):
    rows, world, out = sorted(rows), VirtualWorld(), []
    line = ExclusiveLink()
    for time, work in rows:
        world.call_at(time, lambda work=work: line.send(work, world, lambda start: out.append(world.now())))
    world.run()
    assert out == sent_on(1, [(time, 0, work) for time, work in rows])
