"""The outbox: urgency first, within the credit."""

from hypothesis import given
from hypothesis import strategies as st

from foretrain.comm.ps.server.peers import SendQueue
from foretrain.comm.ps.server.shard import Value


def value(part, size):
    return Value(part, 0, 0, size, memoryview(bytes(size)))


def test_the_most_urgent_value_goes_first_within_the_credit():
    box = SendQueue(100, 60)
    box.put(5, value(5, 150))
    (first,) = box.take()
    assert (first.part, first.start, first.end, len(first.data)) == (5, 0, 60, 60)
    box.put(1, value(1, 70))
    assert ([each.part for each in box.take()], box.under_way) == ([1], 120)
    assert box.take() == []
    box.received(60)
    assert [(box.take()[0], box.received(60))[0][:4] for _ in range(3)] == [
        (1, 0, 60, 70),
        (5, 0, 60, 120),
        (5, 0, 120, 150),
    ]
    assert box.take() == []


def test_a_value_without_bytes_needs_no_credit():
    box = SendQueue(10, 10)
    for _ in range(3):
        box.put(0, Value(0, 0, 0, 100, None))
    assert [each.end for each in box.take()] == [100, 100, 100]
    assert box.under_way == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), max_size=20), st.integers(1, 40), st.integers(1, 20))
def test_every_byte_is_sent_once_and_never_more_than_the_window(values, credit, largest):
    box, sent = SendQueue(credit, largest), {}
    for part, (urgency, size) in enumerate(values):
        box.put(urgency, value(part, size))
    while together := box.take():
        assert box.under_way < credit + largest
        for taken in together:
            assert taken.start == sent.get(taken.part, 0)
            sent[taken.part] = taken.end
            box.received(taken.end - taken.start)
    assert sent == {part: size for part, (_, size) in enumerate(values)}


def test_a_value_wider_than_its_gradient_is_cut_by_its_own_bytes():
    outbox = SendQueue(1 << 20, 8)
    outbox.put(0, Value(0, 0, 4, 16, memoryview(bytes(range(24)))))
    taken = [outbox.take()[0] for _ in range(3)]
    assert [(value.start, value.end, bytes(value.data)[0]) for value in taken] == [(4, 8, 0), (8, 12, 8), (12, 16, 16)]
