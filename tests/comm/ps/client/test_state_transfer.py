"""Errands: few parts at a time, said again when a session begins anew, and whole whatever comes twice."""

import threading

import pytest

from foretrain.comm.ps.client.inflight import StateTransfer
from foretrain.comm.ps.frames import FrameKind, Header
from foretrain.comm.ps.placement import ShardPart
from foretrain.errors import PeerLost

PARTS = [ShardPart(number, 0, number, 1, number % 2) for number in range(20)]


def never():
    """What ends the job: nothing, and nothing has to be waited for here."""
    raise AssertionError("it waits for an answer")


class Shards:
    """Two that answer when they are told to: two frames for a part."""

    def __init__(self):
        self.heard = []

    def say(self, shard, header, payload):
        assert PARTS[header.part].shard == shard
        self.heard.append(header.part)


def answer(transfer, shards, part, *frames):
    for number in frames:
        transfer.hear(
            Header(FrameKind.STATE, part=part, step=number, offset=2), memoryview(bytes([part, number])), shards.say
        )


def test_few_at_a_time_and_in_order():
    shards = Shards()
    transfer = StateTransfer(PARTS, lambda part: [(Header(FrameKind.GET_STATE, part=part.number), b"")])
    transfer.begin(shards.say)
    for part in range(20):
        assert shards.heard == list(range(min(20, part + 8)))
        answer(transfer, shards, part, 0, 1)
    frames = transfer.wait(never)
    assert frames == {part: [bytes([part, 0]), bytes([part, 1])] for part in range(20)}


def test_what_one_shard_has_heard_is_said_again_and_comes_whole():
    """It may be another shard in its place."""
    shards = Shards()
    transfer = StateTransfer(PARTS[:4], lambda part: [(Header(FrameKind.GET_STATE, part=part.number), b"")])
    transfer.begin(shards.say)
    answer(transfer, shards, 0, 0)
    answer(transfer, shards, 1, 0)
    answer(transfer, shards, 2, 0, 1)
    transfer.resend(0, shards.say)
    assert shards.heard == [0, 1, 2, 3, 0, 2]
    answer(transfer, shards, 0, 0, 1)
    answer(transfer, shards, 0, 0, 1)  # a late answer to the first time
    answer(transfer, shards, 2, 0, 1)
    answer(transfer, shards, 1, 1)
    answer(transfer, shards, 3, 0, 1)
    assert transfer.wait(never) == {part: [bytes([part, 0]), bytes([part, 1])] for part in range(4)}


def test_an_empty_answer_is_one():
    shards = Shards()
    transfer = StateTransfer(PARTS[:1], lambda part: [(Header(FrameKind.INIT, part=part.number), b"")])
    transfer.begin(shards.say)
    transfer.hear(Header(FrameKind.STATE, part=0), memoryview(b""), shards.say)
    assert transfer.wait(never) == {0: []}


def test_nothing_to_ask_for_is_done_at_once():
    transfer = StateTransfer([], lambda part: [])
    transfer.begin(Shards().say)
    assert transfer.wait(never) == {}


def test_what_ends_the_job_ends_the_wait():
    failed = threading.Event()
    failed.set()

    def check():
        if failed.is_set():
            raise PeerLost("the server is gone")

    with pytest.raises(PeerLost):
        StateTransfer(PARTS, lambda part: []).wait(check)
