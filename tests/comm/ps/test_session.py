"""Sessions: what is altered, replayed, left out, reflected or forged is told from what is said."""

import os

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils.garbage import gc

from foretrain.comm.coordinator.handshake import nonce
from foretrain.comm.ps.frames import HEADER, FrameKind, Header, Malformed, unpack
from foretrain.comm.ps.session import AuthenticatedSession, Rejected, ZeroCopy, session_proof

SECRET = bytes(range(32))


def pair(secret=SECRET, other=SECRET):
    c, s = nonce(), nonce()
    return AuthenticatedSession(secret, 3, 1, c, s, serves=False), AuthenticatedSession(other, 3, 1, c, s, serves=True)


def heard(end, frame, payload=b""):
    header, tag = unpack(frame)
    end.open(header, tag, payload)
    return header


def test_messages_of_both_directions_are_accepted():
    worker, server = pair()
    for step in range(3):
        header = heard(
            server, worker.seal(Header(FrameKind.PUSH, 1, part=4, step=step, offset=8, size=5), b"abcde"), b"abcde"
        )
        assert header == Header(FrameKind.PUSH, 1, 3, step, 4, step, 8, 5)
        assert heard(worker, server.seal(Header(FrameKind.VALUE, step=step))).sender == 1


@given(st.integers(0, HEADER.size + 15), st.integers(1, 255))
def test_no_bit_can_be_altered(place, flip):
    worker, server = pair()
    frame = bytearray(worker.seal(Header(FrameKind.PUSH, size=3), b"abc"))
    frame[place] ^= flip
    with pytest.raises(Malformed):
        heard(server, bytes(frame), b"abc")
    frame[place] ^= flip
    with pytest.raises(Rejected, match="wrong tag"):
        heard(server, bytes(frame), b"abd")


def test_replays_gaps_reflections_and_strangers():
    worker, server = pair()
    first, second, third = (worker.seal(Header(FrameKind.ALIVE)) for _ in range(3))
    heard(server, first)
    with pytest.raises(Rejected, match="once more") as replay:
        heard(server, first)
    assert replay.value.reason == "replay"
    with pytest.raises(Rejected, match="1 messages of 3 are missing") as gap:
        heard(server, third)
    assert gap.value.reason == "gap"
    heard(server, second)
    with pytest.raises(Rejected, match="wrong tag"):
        heard(worker, second)
    with pytest.raises(Rejected, match="wrong tag"):
        heard(pair()[1], first)
    with pytest.raises(Rejected, match="wrong tag"):
        heard(pair(other=os.urandom(32))[1], pair()[0].seal(Header(FrameKind.ALIVE)))


def test_a_proof_is_of_one_role_rank_shard_and_pair_of_nonces():
    c, s = nonce(), nonce()
    proofs = {
        session_proof(secret, role, rank, shard, one, other)
        for secret in (SECRET, b"x" * 32)
        for role in ("worker", "server")
        for rank in (0, 1)
        for shard in (0, 1)
        for one, other in ((c, s), (s, c))
    }
    assert len(proofs) == 32


@given(st.binary(max_size=80))
def test_noise_is_malformed_and_does_not_disturb_the_session(noise):
    worker, server = pair()
    with pytest.raises(Malformed):
        heard(server, noise)
    assert heard(server, worker.seal(Header(FrameKind.ALIVE))).kind is FrameKind.ALIVE


def test_first_messages_of_two_threads_make_nothing_that_they_could_make_twice(monkeypatch):
    gc.stop()
    one, other = ZeroCopy(), ZeroCopy()
    with monkeypatch.context() as patch:
        patch.setattr(zmq.Context, "socket", lambda *_: pytest.fail("two threads would make two sockets"))
        patch.setattr(gc, "start", lambda: pytest.fail("two threads would start it twice"))
        zmq.Frame(bytes(1 << 17), copy=False)
    one.close()
    assert gc.is_alive()
    other.close()
    assert not gc.is_alive()
