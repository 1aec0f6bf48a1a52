"""Sessions under bounded loss, of ranks that are threads, through a network in front of their UDP sockets."""

import os
import threading
from collections import Counter, defaultdict
from contextlib import nullcontext

import msgspec
import numpy as np
import pytest

import foretrain as ft
from foretrain.comm.bounded import server
from foretrain.comm.bounded.collectives import BoundedCollectives
from foretrain.comm.bounded.server import Opening, serve
from foretrain.schedule import IDEAL, POLICIES
from tests.comm.bounded.group import through
from tests.comm.bounded.relay import Network, losing, perfect
from tests.comm.collectives.test_ring import nothing_is_left_behind
from tests.comm.test_session import WARMUP, on_ranks, secret

__all__ = ["nothing_is_left_behind", "secret"]

DATA = 0
"""Kind of a packet, in its byte 14."""
LAYERS, COUNT = 4, 8192
TENSORS = [(f"layer{k}", 4 * COUNT, "float32") for k in range(LAYERS)]


class ThreadOfServer:
    """Stands for the process of a server, which is a thread of this one."""

    def __init__(self, _command, **_pipes):
        (self._told, said), (heard, self._answers) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(said, "wb"), os.fdopen(heard, "rb")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        with os.fdopen(self._told, "rb") as source, os.fdopen(self._answers, "wb") as answers:
            serve(msgspec.json.decode(source.readline(), type=Opening), source, answers)

    def wait(self, timeout=None):
        self._thread.join(timeout)


def layers_of(values):
    """Layers of which there is something in ``values``: gradients of layer k are 10^k, their sums and means near it."""
    return set(np.rint(np.log10(values[values > 0])).astype(int).tolist())


@pytest.mark.parametrize("over", ["transpose", "ring", "halving_doubling", "ps"])
@pytest.mark.parametrize("schedule", [*sorted({*POLICIES} - {IDEAL, "dear"}), "dear(group=4KiB)"])
def test_every_policy_sums_over_every_way_and_marks_packets_by_its_priorities(monkeypatch, schedule, over):
    """Layers are used in their order, so that a policy with priorities sends a later one in a later class.

    Of two policies, one with each kind of priorities, packets are looked at, which takes longer.
    """
    operations, codes, lock = [], defaultdict(set), threading.Lock()
    submit = BoundedCollectives.submit

    def noting(member, operation, values, **options):
        if member.rank == 0:
            operations.append((operation, layers_of(values), options["hint"]))
        return submit(member, operation, values, **options)

    def note(packet, service):
        if packet[14] == DATA and packet[12] == 0:  # of rank 0
            with lock:
                codes[int.from_bytes(packet[16:20], "little")].add(service >> 5)
        return service

    def run(session):
        tasks, first = session.declare(TENSORS), 0
        for step in range(WARMUP + 2):
            session.begin_step()
            if step == WARMUP:
                first = len(operations)
            for k in reversed(range(LAYERS)):
                tasks[k].ready(np.full(COUNT, 10.0**k, np.float32))
            for k, task in enumerate(tasks):
                np.testing.assert_array_equal(task.wait(), np.float32(10.0**k))
        return first

    monkeypatch.setattr(BoundedCollectives, "submit", noting)
    monkeypatch.setattr(server.subprocess, "Popen", ThreadOfServer)
    looked_at = schedule in ("bytescheduler", "dear(group=4KiB)")
    with through(Network(perfect, note)) if looked_at else nullcontext():
        first, _ = on_ranks(2, run, schedule, ft.BoundedLoss(0.0, over), warmup=WARMUP)
    prioritized = {"p3": "all_reduce", "bytescheduler": "all_reduce", "prophet": "all_reduce", "pace": "all_reduce"}
    prioritized |= {"dear(group=4KiB)": "all_gather", "tictac": "all_gather", "tic": "all_gather"}
    assert {layer for _, layers, _ in operations[first:] for layer in layers} == set(range(LAYERS))
    for number, (operation, layers, hint) in enumerate(operations[first:], first):
        urgent = min(layers) if operation == prioritized.get(schedule) else 0
        assert hint.urgency == urgent / LAYERS, (operation, layers)
        assert not looked_at or codes[number] == {4 - urgent}, (operation, layers)


def test_what_a_layer_loses_stands_on_the_timeline_and_in_the_end_line(caplog):
    """A fifth of what may be lost is; what goes again is important, and arrives."""
    caplog.set_level("INFO", "foretrain")
    count, steps = 100_000, 8

    def lose(packet, rng):
        return [] if packet[14] == DATA and not packet[15] & 1 and rng.random() < 0.2 else [packet]

    def run(session):
        tasks = session.declare([(f"layer{k}", 4 * count, "float32") for k in range(3)], reliable={"layer0"})
        for _ in range(WARMUP + steps):
            session.begin_step()
            for task in tasks:
                task.ready(np.ones(count, np.float32))
            session.wait_all()
        return [span for span in session.timeline if span.lane == "lost"], session.ledger.lost.copy(), session.ledger

    transport = ft.BoundedLoss(0.3, reliable_steps=1, droppable="packet")
    with through(Network(lose)):
        outcomes = on_ranks(2, run, "fifo", transport, warmup=WARMUP, trace=True)
    for spans, lost, _ in outcomes:
        booked = Counter()
        for span in spans:
            booked[span.name] += span.size
            assert WARMUP < span.step < WARMUP + steps
        assert booked == {
            f"layer{k} of rank {rank}": lost[k, rank] for k in (1, 2) for rank in range(2) if lost[k, rank]
        }
    (_, lost, ledger), (_, others, _) = outcomes
    assert lost[1:, 1].all()  # each rank's sums lose of what the other sends
    assert others[1:, 0].all()
    assert not lost[0].any()
    of_all = lost + others
    assert ledger.by_tensor() == {f"layer{k}": of_all[k].tolist() for k in (1, 2)}
    most, rank = sorted((1, 2), key=lambda k: -of_all[k].sum()), of_all.sum(0).argmax()
    shares = of_all.sum() / (2 * steps * 3 * 4 * count), of_all[:, rank].sum() / of_all.sum()
    [said] = [record.getMessage() for record in caplog.records if " steps, " in record.getMessage()]
    end = "{:.2%} of the gradients' bytes were lost, most of layer{}, layer{}, {:.0%} from rank {}"
    assert said.endswith(", " + end.format(shares[0], *most, shares[1], rank))


def test_where_udp_is_blocked_a_session_trains_over_tcp_and_says_so(caplog):
    """By default from a second on. Nothing is lost, though it may be."""
    count = 50_000

    def run(session):
        (task,) = session.declare([("layer", 4 * count, "float32")])
        for _ in range(WARMUP + 3):
            session.begin_step()
            task.ready(np.full(count, session.rank, np.float32))
            np.testing.assert_array_equal(task.wait(), 0.5)
        return session.ledger

    transport = ft.BoundedLoss(0.3, reliable_steps=0, droppable="packet")
    with through(Network(losing(1.0))):
        ledger, _ = on_ranks(2, run, "fifo", transport, warmup=WARMUP)
    assert ledger.line() == "nothing was lost"
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(line.partition(" takes no packets")[0] for line in said) == ["rank 0: rank 1", "rank 1: rank 0"]


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
@pytest.mark.parametrize("missing", ["zero", "rescale"])
def test_means_of_compressed_gradients_lack_what_is_booked_as_lost(compression, missing):
    """Each rank's gradients are ones. Rescaled, what came of them has the same mean."""
    count, steps, width = 200_000, 6, 2

    def run(session):
        (task,) = session.declare([("layer", 4 * count, "float32")])
        lacking = 0.0
        for _ in range(WARMUP + steps):
            session.begin_step()
            task.ready(np.ones(count, np.float32))
            found = task.wait()
            assert set(found.tolist()) <= {0.5, 1.0}
            lacking += float((1 - found).sum())
        return lacking, session.ledger

    transport = ft.BoundedLoss(0.3, reliable_steps=1, droppable="packet", missing=missing)
    with through(Network(losing(0.1))):
        (lacking, ledger), (others, _) = on_ranks(2, run, "fifo", transport, warmup=WARMUP, compression=compression)
    assert ledger.lost.sum() > 0
    assert lacking == others == (0.0 if missing == "rescale" else ledger.lost.sum() / width / 2)
