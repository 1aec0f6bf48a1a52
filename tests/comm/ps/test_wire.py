"""Messages over TCP: framing, places, tags, and everything that ends a connection."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import time

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrain.comm.collectives import runners
from foretrain.comm.ps.frames import FrameKind, Header, pack
from foretrain.comm.ps.wire import Why, Wire
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
    with listening() as (server, address), Wire(LIMIT, LIMIT) as wire:
        if not keyed:
            messages = [[each[:40] for each in pieces] for pieces in messages]
        client = End(wire)
        number = wire.connect(*address, client.arrived.append)
        client.until(1)
        wire.send(number, Header(FrameKind.HELLO), b"first", sender=7)
        wire.flush()
        ((accepted, header, payload, _),) = server.until(1)
        assert (header.sender, bytes(payload)) == (7, b"first")
        if keyed:
            wire.keys(number, ONE, OTHER)
            server.wire.keys(accepted, OTHER, ONE)
        for step, pieces in enumerate(messages):
            wire.send(number, Header(FrameKind.PUSH, step=step), [memoryview(bytearray(each)) for each in pieces])
        while len(server.arrived) <= len(messages):
            wire.poll(0)
            server.arrived += server.wire.poll(0.001)
        for step, (pieces, arrival) in enumerate(zip(messages, server.arrived[1:], strict=True)):
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
