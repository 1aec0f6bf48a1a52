from hypothesis import given
from hypothesis import strategies as st

from foretrain.trace import Span, Timeline

SPANS = st.lists(
    st.builds(
        lambda lane, kind, start, length, size: Span(lane, kind, "x", 0, start, start + length, size),
        st.sampled_from(["gpu", "wire"]),
        st.sampled_from(["forward", "backward", "communication"]),
        st.integers(0, 60),
        st.integers(0, 20),
        st.integers(0, 2**62),
    ),
    max_size=20,
)


@given(SPANS)
def test_what_is_added_is_what_comes_out(spans):
    timeline = Timeline(spans)
    assert list(timeline) == spans
    assert len(timeline) == len(spans)
    assert timeline.lanes() == tuple(dict.fromkeys(span.lane for span in spans))


@given(SPANS)
def test_busy_is_the_union_of_intervals(spans):
    timeline = Timeline(spans)
    for kinds in ((), ("forward",), ("forward", "backward")):
        moments = {
            t for s in spans if s.lane == "gpu" and (not kinds or s.kind in kinds) for t in range(s.start, s.end)
        }
        assert timeline.busy("gpu", *kinds) == len(moments)


@given(SPANS, st.integers(0, 80), st.integers(0, 40))
def test_a_window_shows_the_moments_inside_from_zero(spans, start, length):
    window = Timeline(spans).between(start, start + length)
    inside = {t - start for s in spans if s.lane == "gpu" for t in range(s.start, s.end) if start <= t < start + length}
    assert {t for s in window if s.lane == "gpu" for t in range(s.start, s.end)} == inside
    assert all(0 <= span.start <= span.end <= length for span in window)


@given(SPANS)
def test_the_same_spans_give_the_same_bytes(spans):
    data = Timeline(spans).to_bytes()
    assert data == Timeline(iter(spans)).to_bytes()
    assert data.count(b"\n") == max(0, len(spans) - 1)


def test_bytes_are_canonical():
    timeline = Timeline([Span("gpu", "forward", "größe", 1, 2, 3), Span("wire", "communication", "a +1", 1, 2, 3, 4)])
    expected = '["gpu","forward","größe",1,2,3,0]\n["wire","communication","a +1",1,2,3,4]'
    assert timeline.to_bytes() == expected.encode()


def test_an_empty_timeline_is_empty():
    timeline = Timeline()
    assert (len(timeline), timeline.lanes(), timeline.busy("gpu"), timeline.to_bytes()) == (0, (), 0, b"")
    assert len(timeline.between(0, 10)) == 0
