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
    return header, memoryview(b"".join(payload))


@given(st.lists(items, min_size=1, max_size=5))
def test_bundled_ranges_are_unbundled_unchanged(some):
    header, payload = message(some)
    assert [each._replace(data=bytes(each.data)) for each in unbundle(header, payload)] == some
    assert (header.kind, header.step, header.flag & PULL_ONLY) == (FrameKind.PUSH, 3, PULL_ONLY)


@given(st.integers(0, 1 << 32), st.integers(0, 255), st.lists(st.integers(0, (1 << 64) - 1)), st.binary(max_size=200))
def test_a_payload_is_unbundled_into_as_much_as_it_has_or_is_malformed(count, flag, numbers, rest):
    payload = memoryview(b"".join(number.to_bytes(8, "little") for number in numbers) + rest)
    for part in (count, len(payload) // 32, 1):
        header = Header(FrameKind.PUSH, flag, part=part)
        try:
            found = unbundle(header, payload)
        except Malformed:
            continue
        assert len(found) == (part if flag & SEVERAL else 1)
        table = 32 * part if flag & SEVERAL else 0
        assert b"".join(bytes(each.data) for each in found) == bytes(payload[table:])


def test_a_single_range_is_not_copied():
    data = memoryview(bytearray(8))
    header, payload = bundle(PUSH, [Item(1, 2, 8, data)])
    assert payload[0] is data
    assert not header.flag & SEVERAL
    assert bundle(PUSH, [Item(1, 2, 8, b"")])[0].flag & ABSENT


@pytest.mark.parametrize(("count", "cut"), [(2, 1), (2, 64), (2, 70), (0, 72), (1, 72), (3, 72), (1 << 60, 72)])
def test_a_table_that_does_not_fit_its_message_is_malformed(count, cut):
    header, payload = message([Item(0, 0, 4, b"abcd"), Item(1, 0, 4, b"efgh")])
    with pytest.raises(Malformed, match=r"ranges in a message|whose table says"):
        unbundle(header._replace(part=count), payload[:cut])


@pytest.mark.parametrize(("flag", "data"), [(ABSENT, b"abc"), (0, b"")])
def test_a_payload_that_contradicts_the_absent_flag_is_malformed(flag, data):
    with pytest.raises(Malformed, match=f"{len(data)} bytes where 3 are announced"):
        unbundle(Header(FrameKind.PUSH, flag, size=3), memoryview(data))
