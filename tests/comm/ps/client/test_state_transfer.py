"""Errands: few parts at a time, said again when a session begins anew, and whole whatever comes twice."""

import pytest

from foretrain.comm.ps.client.inflight import StateTransfer
from foretrain.comm.ps.frames import FrameKind, Header
from foretrain.comm.ps.placement import ShardPart
from foretrain.errors import PeerLost

PARTS = [ShardPart(number, 0, number, 1, number % 2) for number in range(20)]


def never():
    raise AssertionError("it waits for an answer")


class Shards:
    """Two shards that send two frames for a part when `answer` is called."""

    def __init__(self, count=20):
        self.heard = []
        self.transfer = StateTransfer(
            PARTS[:count], lambda part: [(Header(FrameKind.GET_STATE, part=part.number), b"")]
        )
        self.transfer.begin(self.say)

    def say(self, shard, header, payload):
        assert PARTS[header.part].shard == shard
        self.heard.append(header.part)

    def answer(self, part, *frames):
        for number in frames:
            header = Header(FrameKind.STATE, part=part, step=number, offset=2)
            self.transfer.hear(header, memoryview(bytes([part, number])), self.say)


def test_parts_are_requested_in_order_and_few_at_a_time():
    shards = Shards()
    for part in range(20):
        assert shards.heard == list(range(min(20, part + 8)))
        shards.answer(part, 0, 1)
    frames = shards.transfer.wait(never)
    assert frames == {part: [bytes([part, 0]), bytes([part, 1])] for part in range(20)}


def test_requests_to_one_shard_are_resent_and_answered_completely():
    """It may be another shard in its place."""
    shards = Shards(4)
    shards.answer(0, 0)
    shards.answer(1, 0)
    shards.answer(2, 0, 1)
    shards.transfer.resend(0, shards.say)
    assert shards.heard == [0, 1, 2, 3, 0, 2]
    shards.answer(0, 0, 1)
    shards.answer(0, 0, 1)  # a late answer to the first time
    shards.answer(2, 0, 1)
    shards.answer(1, 1)
    shards.answer(3, 0, 1)
    assert shards.transfer.wait(never) == {part: [bytes([part, 0]), bytes([part, 1])] for part in range(4)}


def test_an_empty_answer_counts():
    shards = Shards(1)
    shards.transfer.hear(Header(FrameKind.STATE, part=0), memoryview(b""), shards.say)
    assert shards.transfer.wait(never) == {0: []}


def test_a_transfer_of_nothing_is_done_at_once():
    assert Shards(0).transfer.wait(never) == {}


def test_the_end_of_the_job_ends_the_wait():
    def check():
        raise PeerLost("the server is gone")

    with pytest.raises(PeerLost):
        StateTransfer(PARTS, lambda part: []).wait(check)
