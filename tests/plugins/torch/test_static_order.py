"""A replayed order: rounds that overtake each other, and what all ranks must have in common."""

import threading

import torch
import torch.distributed as dist

from foretrain.comm.coordinator.protocol import CollectiveCommand, pack
from foretrain.plugins.torch.static_order import StaticOrder
from foretrain.plugins.torch.streams import HostStreams
from foretrain.tasks import Chunk, Piece, Task

CHUNK = Chunk("all_reduce", (Piece(0, 0, 4),), 4)


class Quick:
    """A carrier whose sums land at once, and a training thread that on rank 0 runs two rounds ahead meanwhile."""

    sequence = 0
    replayer: StaticOrder

    def start(self, order, done):
        self.sequence += 1
        self.replayer.landed(0, True)
        if self.sequence == 1 and dist.get_rank() == 0:
            self.replayer.open(1, True)
            self.replayer.ready(0, True)
            self.replayer.open(2, True)

    def last(self):
        return "nothing"


def overtaking():
    """The first round adds to nothing, the second and third do: on all ranks, however far one is ahead."""
    carrier, landings, failures = Quick(), threading.Semaphore(0), []
    tasks = (Task(0, "weight", 4, 0),)
    landed = lambda task, used: landings.release()  # noqa: E731
    group = dist.new_group()
    replayer = carrier.replayer = StaticOrder(
        (CHUNK,), tasks, group, torch.device("cpu"), HostStreams(), landed, failures.append, 0, 60.0
    )
    replayer.start(carrier)
    quick = dist.get_rank() == 0
    for step in range(3):
        if step == 0 or not quick:
            replayer.open(step, step > 0)
        if step != 1 or not quick:
            replayer.ready(0, True)
        assert landings.acquire(timeout=10), failures
    dist.barrier()
    replayer.close()
    return [str(failure) for failure in failures]


def test_a_rank_that_is_two_rounds_ahead_changes_nothing(ranks):
    assert ranks(overtaking) == [[], []]


def test_orders_that_send_different_bytes_differ():
    assert pack(CollectiveCommand(0, CHUNK)) != pack(CollectiveCommand(0, CHUNK, frozenset({0})))
