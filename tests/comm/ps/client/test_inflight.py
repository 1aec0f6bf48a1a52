"""Flights against a table of bytes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from foretrain.comm.ps.client.inflight import InFlight, InFlightChunk
from foretrain.tasks import Chunk, Piece

SIZE = 20

edges = st.lists(st.integers(1, SIZE - 1), max_size=5).map(lambda inner: sorted({0, SIZE, *inner}))


def pairs(points):
    return list(pairwise(points))


def of(ranges):
    found = [byte for start, end in ranges for byte in range(start, end)]
    assert len(found) == len(set(found))
    return set(found)


@given(edges, st.permutations(range(6)), edges, st.permutations(range(6)), st.booleans())
def test_chunks_are_done_when_heard_and_tasks_land_when_back(pushed, push_order, answered, answer_order, twice):
    flights = InFlight([SIZE, 7])
    for _round in range(2):
        left = {}
        ranges = pairs(pushed)
        for place in (place for place in push_order if place < len(ranges)):
            start, end = ranges[place]
            chunk = Chunk("all_reduce", (Piece(0, start, end - start),), end - start)
            flights.push(InFlightChunk(chunk, lambda chunk: None, end - start, place), 0, start, end)
            left[start] = set(range(start, end))
        heard: set[int] = set()
        back: set[int] = set()
        answers = pairs(answered)
        for place in [place for place in answer_order if place < len(answers)] * (1 + twice):
            start, end = answers[place]
            heard |= set(range(start, end))
            finished = {offset for offset, bytes_ in left.items() if bytes_ and bytes_ <= heard}
            found = [flight.chunk.pieces[0].offset for flight in flights.acknowledge(0, start, end)]
            assert sorted(found) == sorted(finished)
            left |= {offset: set() for offset in finished}
            out = of((byte_range.start, byte_range.end) for task, byte_range in flights.unanswered() if task == 0)
            assert out == set(range(SIZE)) - back
            fresh = set(range(start, end)) - back
            arrived = flights.arrive(0, start, end)
            assert of(arrived.new) == fresh
            back |= fresh
            assert arrived.landed == (bool(fresh) and len(back) == SIZE)
        assert flights.oldest() is None


def test_a_flight_over_several_tasks():
    flights = InFlight([8, 8])
    flight = InFlightChunk(Chunk("all_reduce", (Piece(0, 4, 4), Piece(1, 0, 8)), 12), lambda chunk: None, 12, 5)
    flights.push(flight, 0, 4, 8)
    flights.push(flight, 1, 0, 8)
    assert flights.oldest() is flight
    assert flights.acknowledge(1, 0, 8) == []
    assert flights.arrive(1, 0, 8) == ([(0, 8)], [], True)
    assert flights.acknowledge(0, 0, 8) == [flight]
    assert flights.acknowledge(0, 0, 8) == []
    assert flights.arrive(0, 0, 4) == ([], [], False)
    assert flights.arrive(0, 4, 8) == ([(4, 8)], [], False)


def test_a_pull_is_complete_when_its_bytes_are_back():
    flights = InFlight([16])
    chunk = Chunk("reduce_scatter", (Piece(0, 0, 16),), 16)
    flights.push(InFlightChunk(chunk, lambda chunk: None, 16, 0), 0, 0, 16)
    pull = InFlightChunk(chunk, lambda chunk: None, 12, 1)
    flights.pull(pull, 0, 0, 12)
    assert [(task, byte_range.start, byte_range.end) for task, byte_range in flights.unpulled()] == [(0, 0, 12)]
    assert flights.arrive(0, 4, 12).pulled == []
    assert flights.arrive(0, 0, 4).pulled == [pull]
    assert flights.arrive(0, 12, 16) == ([(12, 16)], [], True)
