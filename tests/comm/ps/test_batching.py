"""Several ranges in one message come out as they went in, and what does not fit is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.comm.ps.frames import ABSENT, PULL_ONLY, SEVERAL, FrameKind, Header, Item, Malformed, bundle, unbundle

PUSH = Header(FrameKind.PUSH, PULL_ONLY, step=3)
items = st.builds(
    Item, st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(1, 1 << 40), st.binary(max_size=9)
)


def message(some):
    header, payload = bundle(PUSH, some)
    return header, memoryview(payload)


@given(st.lists(items, min_size=1, max_size=5))
def test_what_goes_in_comes_out(some):
    header, payload = message(some)
    assert [each._replace(data=bytes(each.data)) for each in unbundle(header, payload)] == some
    assert (header.kind, header.step, header.flag & PULL_ONLY) == (FrameKind.PUSH, 3, PULL_ONLY)


def test_a_single_one_is_not_copied():
    data = memoryview(bytearray(8))
    header, payload = bundle(PUSH, [Item(1, 2, 8, data)])
    assert payload is data
    assert not header.flag & SEVERAL
    assert bundle(PUSH, [Item(1, 2, 8, b"")])[0].flag & ABSENT


@pytest.mark.parametrize("cut", [1, 8, 63, 64, 70])
def test_a_message_that_is_cut(cut):
    header, payload = message([Item(0, 0, 4, b"abcd"), Item(1, 0, 4, b"efgh")])
    with pytest.raises(Malformed, match=r"ranges in a message|whose table says"):
        unbundle(header, payload[:cut])


@pytest.mark.parametrize("count", [0, 1, 3, 1 << 60])
def test_a_table_of_another_length(count):
    header, payload = message([Item(0, 0, 4, b"abcd"), Item(1, 0, 4, b"efgh")])
    with pytest.raises(Malformed):
        unbundle(header._replace(part=count), payload)


@pytest.mark.parametrize(("flag", "data"), [(ABSENT, b"abc"), (0, b"")])
def test_a_range_with_bytes_where_there_are_none_and_the_other_way_round(flag, data):
    with pytest.raises(Malformed, match=f"{len(data)} bytes where 3 are announced"):
        unbundle(Header(FrameKind.PUSH, flag, size=3), memoryview(data))
