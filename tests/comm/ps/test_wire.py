"""Messages over TCP: framing, places, tags, and everything that ends a connection."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import struct
import time
from itertools import pairwise

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.comm.collectives import runners
from foretrain.comm.ps.client.inflight import InFlight, InFlightChunk
from foretrain.comm.ps.frames import ABSENT, PULL_ONLY, SEVERAL, FrameKind, Header, Malformed, pack, unbundle
from foretrain.comm.ps.placement import Declaration, Declared, Placement, ShardPart
from foretrain.comm.ps.server.shard import SumShard
from foretrain.comm.ps.wire import SPAN, Why, Wire, address
from foretrain.tasks import Chunk
from tests.comm.ps.client.framing import framed
from tests.comm.ps.server.jobs import received

LIMIT = 3 << 20
ONE, OTHER = bytes(range(16)), bytes(range(16, 32))


def tag(key: bytes, place: int, prefix: bytes, payload: bytes) -> bytes:
    """A tag by the package that is trusted."""
    return AESGCM(key).encrypt(struct.pack("<4xQ", place), b"", prefix + payload)


def tagged(key: bytes, place: int, header: Header, payload: bytes = b"") -> bytes:
    prefix = struct.pack("<I", len(payload)) + pack(header._replace(sequence=place))
    return prefix + tag(key, place, prefix, payload) + payload


class End:
    """A wire and what has arrived on it."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.arrived = wire, []

    def until(self, count: int) -> list:
        deadline = time.monotonic() + 300
        while len(self.arrived) < count:
            assert time.monotonic() < deadline, self.arrived
            self.arrived += self.wire.poll(0.01)
        return self.arrived


@contextlib.contextmanager
def listening(crowd: int = 8):
    with Wire(LIMIT, 128) as wire:
        yield End(wire), ("127.0.0.1", wire.listen("127.0.0.1", 0, crowd))


@contextlib.contextmanager
def raw(crowd: int = 8, *, keyed: bool = True):
    """A listening end, and a plain socket that it has accepted; with keys, if that is wanted."""
    with listening(crowd) as (end, address), socket.create_connection(address, timeout=60) as plain:
        plain.sendall(struct.pack("<I", 2) + pack(Header(FrameKind.HELLO)) + bytes(16) + b"hi")
        ((number, header, payload, closed),) = end.until(1)
        assert (header.kind, bytes(payload), closed) == (FrameKind.HELLO, b"hi", None)
        end.arrived.clear()
        if keyed:
            end.wire.keys(number, OTHER, ONE)
        yield end, plain, number


@contextlib.contextmanager
def connected(*, keyed: bool = True):
    """A listening end and one that has connected, each with its number of the connection; with keys, if wanted."""
    with listening() as (server, where), Wire(LIMIT, LIMIT) as wire:
        client = End(wire)
        number = wire.connect(*where, client.arrived.append)
        client.until(1)
        wire.send(number, Header(FrameKind.HELLO), b"first", sender=7)
        wire.flush()
        ((accepted, header, payload, _),) = server.until(1)
        assert (header.sender, bytes(payload)) == (7, b"first")
        server.arrived.clear()
        client.arrived.clear()
        if keyed:
            wire.keys(number, ONE, OTHER)
            server.wire.keys(accepted, OTHER, ONE)
        yield server, client, accepted, number


@pytest.mark.parametrize("place", [0, 1, 1 << 40])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 127, 128, 129, 4000, 100_003])
def test_tags_are_those_of_aes_gmac(place, size):
    prefix, payload, found = os.urandom(48), os.urandom(size), ctypes.create_string_buffer(16)
    runners.library().foretrain_wire_tag(ONE, ctypes.c_uint64(place), prefix, payload, ctypes.c_int64(size), found)
    assert found.raw == tag(ONE, place, prefix, payload)


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 200_000), max_size=3), min_size=1, max_size=40), st.booleans())
def test_messages_arrive_as_they_were_sent_whatever_their_pieces(sizes, keyed):
    """More than two slabs of them, and one that needs a slab of its own."""
    messages = [[os.urandom(size) for size in each] for each in [*sizes, [LIMIT - 5, 5]]]
    if not keyed:
        messages = [[each[:40] for each in pieces] for pieces in messages]
    with connected(keyed=keyed) as (server, client, _, number):
        for step, pieces in enumerate(messages):
            client.wire.send(
                number, Header(FrameKind.PUSH, step=step), [memoryview(bytearray(each)) for each in pieces]
            )
        while len(server.arrived) < len(messages):
            client.wire.poll(0)
            server.arrived += server.wire.poll(0.001)
        for step, (pieces, arrival) in enumerate(zip(messages, server.arrived, strict=True)):
            assert arrival.header.step == step
            assert arrival.header.sequence == (step if keyed else 0)
            assert bytes(arrival.payload) == b"".join(pieces)


def test_a_slab_is_used_again_only_when_nobody_has_a_view_of_it():
    with raw() as (end, plain, _):
        kept = []
        for place in range(40):
            plain.sendall(tagged(ONE, place, Header(FrameKind.PUSH), bytes([place]) * 150_000))
            (arrival,) = end.until(1)
            end.arrived.clear()
            if place % 3 == 0:
                kept.append((place, arrival.payload))
            del arrival
        for place, payload in kept:
            assert bytes(payload) == bytes([place]) * 150_000


def test_tags_of_what_is_sent_are_right():
    with raw() as (end, plain, number):
        for place, payload in enumerate((b"", b"abc", bytes(10_000))):
            end.wire.send(number, Header(FrameKind.VALUE, step=5), payload)
            end.wire.flush()
            expected = tagged(OTHER, place, Header(FrameKind.VALUE, step=5), payload)
            assert received(plain, len(expected)) == expected


@given(st.integers(0, 63 + 1000), st.integers(1, 255))
def test_a_message_of_which_a_bit_was_altered_ends_the_connection(place, flip):
    with raw() as (end, plain, number):
        said = bytearray(tagged(ONE, 0, Header(FrameKind.PUSH, size=3), bytes(1000)))
        said[place] ^= flip
        plain.sendall(said)
        plain.shutdown(socket.SHUT_WR)
        (arrival,) = end.until(1)
        assert (arrival.connection, arrival.header) == (number, None)
        # A length that was altered may also be one that never comes.
        assert arrival.closed in (Why.FORGED, Why.NO_MESSAGE, Why.TOO_LARGE, Why.HUNG_UP)
        assert arrival.closed != Why.HUNG_UP or place < 4


@pytest.mark.parametrize("places", [(0, 0), (0, 2), (1,)], ids=["replay", "gap", "late"])
def test_a_message_out_of_its_place_ends_the_connection(places):
    with raw() as (end, plain, _):
        for place in places:
            plain.sendall(tagged(ONE, place, Header(FrameKind.ALIVE)))
        assert end.until(len(places))[-1].closed == Why.FORGED


def test_a_message_of_this_end_does_not_pass_for_one_of_the_other():
    with raw() as (end, plain, _):
        plain.sendall(tagged(OTHER, 0, Header(FrameKind.ALIVE)))
        assert end.until(1)[0].closed == Why.FORGED


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=4), st.booleans())
def test_noise_ends_its_connection_and_disturbs_no_other(noise, keyed):
    with raw() as (end, plain, number):
        with raw(keyed=keyed) as (other, stranger, _):
            with contextlib.suppress(OSError):
                for each in noise:
                    stranger.sendall(each)
                stranger.shutdown(socket.SHUT_WR)
            while not other.arrived or other.arrived[-1].closed is None:
                other.until(len(other.arrived) + 1)
            assert not keyed or all(each.closed is not None for each in other.arrived)
        plain.sendall(tagged(ONE, 0, Header(FrameKind.ALIVE)))
        (arrival,) = end.until(1)
        assert (arrival.connection, arrival.header.kind) == (number, FrameKind.ALIVE)


def test_of_a_stranger_nothing_is_read_behind_a_message_until_its_owner_has_seen_it():
    with raw(keyed=False) as (end, plain, number):
        plain.sendall(struct.pack("<I", 0) + pack(Header(FrameKind.PROOF)) + bytes(16))
        plain.sendall(tagged(ONE, 0, Header(FrameKind.ALIVE), b"x" * 5000))
        assert end.until(1)[0].header.kind is FrameKind.PROOF
        end.wire.keys(number, OTHER, ONE)
        assert bytes(end.until(2)[1].payload) == b"x" * 5000


def test_an_orderly_end_delivers_what_was_sent():
    with listening() as (server, address), Wire(LIMIT, LIMIT) as wire:
        client = End(wire)
        number = wire.connect(*address, client.arrived.append)
        client.until(1)
        wire.send(number, Header(FrameKind.HELLO), bytes(100))
        wire.end(number, orderly=True)
        assert [each.closed for each in server.until(2)] == [None, Why.HUNG_UP]
        assert not wire.send(number, Header(FrameKind.HELLO))


def test_a_port_that_nobody_listens_on_closes_the_connection():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    with Wire(LIMIT, LIMIT) as wire:
        client = End(wire)
        if wire.connect(*address, client.arrived.append) is not None:
            assert client.until(1)[0].closed > 0


def test_without_descriptors_a_listener_rests_and_accepts_when_there_are_some_again():
    with listening() as (end, address), socket.socket() as plain:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(free := os.dup(plain.fileno()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            plain.connect(address)
            plain.sendall(struct.pack("<I", 2) + pack(Header(FrameKind.HELLO)) + bytes(16) + b"hi")
            began = time.process_time()
            time.sleep(1)
            spent = time.process_time() - began
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert bytes(end.until(1)[0].payload) == b"hi"
        assert spent < 0.5  # of a second, which a thread that is woken again and again spends whole


# ---------------------------------------------------------------- tables of several ranges

SIZES = (40, 24, 64)
"""Bytes of parts 0 to 2; the first two are of task 0."""
sizes = st.one_of(st.sampled_from((0, 4, 8, *SIZES, 2**31, 2**32 - 1, 2**63 - 8, 2**63, 2**64 - 4)), st.integers(0, 64))


def several(entries, rest: bytes, right: bool) -> tuple[int, bytes]:
    """The number of ranges, and a payload of their table and bytes, as many as it says where ``right``."""
    table = b"".join(struct.pack("<QQQQ", *each) for each in entries)
    length = min(sum(each[3] for each in entries), 1 << 10) if right else len(rest)
    return len(entries), table + (rest * length)[:length]


entries = st.tuples(st.sampled_from((0, 1, 2, 2, 3, 2**64 - 1)), sizes, sizes, st.none() | sizes).map(
    lambda each: each if each[3] is not None else (*each[:3], each[2])
)
tables = st.builds(several, st.lists(entries, max_size=4), st.binary(min_size=1, max_size=99), st.booleans())
bundles = tables.map(lambda both: (Header(FrameKind.PUSH, SEVERAL, part=both[0]), both[1]))
singles = st.builds(
    lambda entry, flag, data: (Header(FrameKind.PUSH, flag, 0, 0, entry[0] % 2**32, 0, *entry[1:3]), data),
    *(entries, st.sampled_from((0, ABSENT)), st.one_of(st.binary(max_size=64), st.sampled_from(SIZES).map(bytes))),
)
wrong_counts = st.builds(
    lambda both, part: (both[0]._replace(part=part), both[1]), bundles, sizes.map(lambda n: n % 2**32)
)
messages = st.one_of(bundles, singles, wrong_counts)


def sums() -> SumShard:
    parts = [ShardPart(0, 0, 0, 40, 0), ShardPart(1, 0, 40, 24, 0), ShardPart(2, 1, 0, 64, 0)]
    return SumShard(parts, [Declared("one", 64, "float32", 0), Declared("other", 64, "float32", 1)], 1)


@given(messages)
def test_a_wire_takes_the_pushes_that_python_would_take_and_adds_up_the_same(said):
    header, payload = said
    served, oracle = sums(), sums()
    with raw() as (end, _, number):
        end.wire.serve((number, number), served.native, 0, 0, 0, 1 << 20)
        taken = end.wire.take_back(number, header, memoryview(bytearray(payload)))
    try:
        for part, offset, size, data in unbundle(header, memoryview(payload)):
            oracle.push(0, part, header.step, offset, size, memoryview(data) if len(data) else None)
    except Malformed:
        assert not taken
        return
    assert taken
    for part in range(len(SIZES)):
        assert bytes(served._sum(part, 0)) == bytes(oracle._sum(part, 0))
        assert served.round_complete(0) == oracle.round_complete(0)


def fits(header: Header, payload: bytes) -> list[tuple[int, int, int, bytes]] | None:
    """The ranges of a message with sums; None where it is no regular one."""
    if not header.flag & SEVERAL:
        found = [(header.part, header.offset, header.size, payload)]
    else:
        try:
            found = [(*each[:3], bytes(each.data)) for each in unbundle(header, memoryview(payload))]
        except Malformed:
            return [] if not header.part and not payload else None
    regular = all(
        part < len(SIZES) and 0 < size <= SIZES[part] - offset and len(data) in (0, size)
        for part, offset, size, data in found
    )
    return found if regular else None


@given(st.lists(messages, min_size=1, max_size=3))
def test_a_wire_writes_regular_sums_to_their_places_and_nothing_else(said):
    flights, chunk = InFlight([64, 64]), Chunk("all_reduce", (), 128)
    places = [bytearray(64 + 16), bytearray(64 + 16)]  # with room behind, in which nothing must be written
    for task in range(2):
        flights.push(InFlightChunk(chunk, lambda chunk: None, 64, task), task, 0, 64)
    parts = [ShardPart(0, 0, 0, 40, 0), ShardPart(1, 0, 40, 24, 0), ShardPart(2, 1, 0, 64, 0)]
    flights.split(parts)
    flights.place([ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in places])
    flights.begin(0)
    expected, back = [bytearray(80), bytearray(80)], [set(), set()]
    with raw() as (end, _, number):
        end.wire.take_answers((number, number), flights.native, 0, 0, 0)
        for header, payload in said:
            value = header._replace(kind=FrameKind.VALUE)
            found = fits(value, payload)
            assert end.wire.take_back(number, value, memoryview(bytearray(payload))) == (found is not None)
            for part, offset, size, data in found or ():
                task, start = parts[part].task, parts[part].offset + offset
                for byte in set(range(start, start + size)) - back[task] if data else ():
                    expected[task][byte] = data[byte - start]
                back[task] |= set(range(start, start + size))
            if len(back[0]) == 64 or len(back[1]) == 64:
                break  # the task has landed, and its bytes are of the next round
    assert places == expected


@st.composite
def pushes(draw):
    """Tasks of some parts, and ranges of them, some without a gradient."""
    tasks = draw(st.lists(st.integers(1, 40_000).map(lambda count: 8 * count), min_size=1, max_size=3))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(1, size - 1), max_size=3))}) for size in tasks]
    spans = [(task, low, high, draw(st.booleans())) for task, at in enumerate(cuts) for low, high in pairwise(at)]
    limit, shards = draw(st.sampled_from([4096, 70_000, 1 << 20])), draw(st.integers(1, 2))
    return tasks, draw(st.permutations(spans)), limit, shards, draw(st.integers(1, len(spans)))


@settings(max_examples=25)
@given(pushes())
def test_a_wire_pushes_ranges_and_takes_their_acknowledgements(what):
    tasks, spans, limit, shards, received = what
    declared = tuple(Declared(f"layer{task}", size, "float64", task) for task, size in enumerate(tasks))
    placement = Placement(Declaration(declared, 1, limit=limit), shards)
    flights, whole = InFlight(tasks), [os.urandom(size) for size in tasks]
    flights.split(placement.parts)
    flights.begin(3)
    chunks = [InFlightChunk(Chunk("all_reduce", (), 1), lambda chunk: None, 1, 0) for _ in spans]
    for chunk, (task, low, high, _) in zip(chunks, spans, strict=True):
        flights.push(chunk, task, low, high)
    packed = b"".join(
        SPAN.pack(task, low, high, used and address(whole[task]) + low) for task, low, high, used in spans
    )
    done, answered = [], []
    for shard in range(shards):
        expected = list(framed(placement, shard, 3, PULL_ONLY, packed))
        count = min(received, len(expected))
        with connected() as (server, client, accepted, number):
            client.wire.take_answers((number, number), flights.native, shard, 5, 1)
            assert client.wire.push(number, 3, PULL_ONLY, packed)
            assert not client.wire.push(number + 1, 3, PULL_ONLY, packed)
            client.wire.flush()
            for (header, pieces, _), arrival in zip(expected, server.until(len(expected)), strict=True):
                assert arrival.header == header._replace(sender=5, sequence=arrival.header.sequence)
                assert bytes(arrival.payload) == b"".join(pieces)
            # One for another declaration, and one twice, change nothing.
            for epoch, offset in ((0, len(expected)), (1, count), (1, count)):
                server.wire.send(accepted, Header(FrameKind.RECEIVED, step=epoch, offset=offset))
            server.wire.send(accepted, Header(FrameKind.WANTED))
            server.wire.flush()
            client.until(1)
            done += [flights.finished(each.chunk) for each in client.wire.progress()]
            answered += [each for _, _, ranges in expected[:count] for each in ranges]
    for chunk, (task, low, high, _) in zip(chunks, spans, strict=True):
        shares = [min(high, end) - max(low, start) for place, start, end in answered if place == task]
        assert done.count(chunk) == (sum(max(0, share) for share in shares) == high - low)
    assert flights.idle == (len(done) == len(spans))
