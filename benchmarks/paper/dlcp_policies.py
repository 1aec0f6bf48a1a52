"""DLCP's baselines that schedule: the project's own policies decide what each worker pushes next, TCP carries it.

    worker's computation ──▶ policy ──▶ chunk, a message ──▶ packets ──▶ server, which answers what all have pushed,
    the most urgent first ──▶ packets ──▶ worker, whose layer may compute

Each message is a connection of its own that begins with the transport's first window: the network of packets knows no
connections that go on. Of eight workers that share a link, each would have about as many packets under way for good.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np
from dlcp_network import LATENCY, WORKERS, Way, testbed
from dlcp_server import paths

from foretrain.network.packet.online_simulator import Online
from foretrain.network.program import Paths, Program, ProgramHandle
from foretrain.network.switch_cluster import WINDOW
from foretrain.schedule import Job, spec
from foretrain.schedule.job import CostModel
from foretrain.simulation.replay import TrainingLoop
from foretrain.simulation.world import ARRIVAL, LOOK, TIMER, VirtualWorld
from foretrain.tasks import Chunk, Piece
from foretrain.workload import Workload

ACKNOWLEDGED = 2 * LATENCY
"""What an acknowledgement takes from the server of the testbed, ps."""


def scheduled(work: Workload, schedule: str, way: Way) -> float:
    """One job on the testbed under a policy, in its notation: ms from one backward pass to the next."""
    job = Job.of(work, CostModel(overhead=0, per_byte=0))
    world = VirtualWorld()
    wires = _Wires(way.on(testbed()).online(), world)
    forth, back = paths(testbed(), testbed().ranks[: WORKERS + 1], 1)
    server = _Server(job, wires, back)
    for k in range(WORKERS):
        policy, worker = spec(schedule).build(job), _Worker(server, forth.gather(np.array([k])))
        server.workers.append(TrainingLoop(work, job, policy, worker, 1, served=True))
    for worker in server.workers:
        worker.begin()
    world.run()
    for worker in server.workers:
        worker.raise_if_stalled()
    return max(worker.begins[1] for worker in server.workers) / 1e9


class _Wires:
    """The network in the world's time."""

    def __init__(self, online: Online, world: VirtualWorld) -> None:
        self.world, self._online = world, online
        self._landed: dict[ProgramHandle, Callable[[], None]] = {}
        self._asked, self._asking = 0, False

    def send(self, path: Paths, size: int, landed: Callable[[], None]) -> None:
        """Sends a message now; calls ``landed`` when it has come."""
        self._collect()  # what completes at this very instant, too
        self._landed[self._online.add(Program.of(path, np.array([float(size)])))] = landed
        if not self._asking:  # once for all that is sent at this instant
            self._asking = True
            self.world.schedule(self.world.now(), LOOK, self._ask)

    def _ask(self) -> None:
        self._asking = False
        self._asked += 1
        when = self._online.next_completion()
        if when is not None:
            self.world.schedule(when, ARRIVAL, self._arrive, self._asked)

    def _arrive(self, asked: int) -> None:
        if asked != self._asked:
            return  # Something was sent in between, and changed when.
        self._collect()
        self._ask()

    def _collect(self) -> None:
        for handle in self._online.advance(self.world.now()):
            self.world.schedule(self.world.now(), TIMER, self._landed.pop(handle))


class _Worker:
    """The world of one worker's policy: what it starts is pushed, and done when the server has acknowledged it."""

    def __init__(self, server: _Server, path: Paths) -> None:
        self._server, self._path, self._world = server, path, server.wires.world
        self.now, self.call_at = self._world.now, self._world.call_at

    def start(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        """Pushes ``chunk``, a piece of one tensor."""
        (piece,) = chunk.pieces

        def came() -> None:
            self._world.schedule(self._world.now() + ACKNOWLEDGED, ARRIVAL, done, chunk)
            self._server.pushed(piece)

        self._server.wires.send(self._path, chunk.size, came)


class _Server:
    """Sums what all have pushed, and answers each worker, the most urgent first; as much is under way as
    `foretrain.network.switch_cluster` says."""

    def __init__(self, job: Job, wires: _Wires, ways: Paths) -> None:
        self.wires, self.workers = wires, list[TrainingLoop]()
        self._tasks, self._ways = job.tasks, [ways.gather(np.array([k])) for k in range(WORKERS)]
        self._came: dict[tuple[int, int], int] = {}
        self._queues: list[list[tuple[int, int, Piece]]] = [[] for _ in range(WORKERS)]
        self._under_way = [0] * WORKERS
        self._left = [[task.size for task in job.tasks] for _ in range(WORKERS)]

    def pushed(self, piece: Piece) -> None:
        """One more worker has pushed ``piece``."""
        key = piece.task, piece.offset
        self._came[key] = self._came.get(key, 0) + 1
        if self._came[key] == WORKERS:
            for k in range(WORKERS):
                heappush(self._queues[k], (self._tasks[piece.task].first_use, piece.offset, piece))
                self._answer(k)

    def _answer(self, k: int) -> None:
        while self._queues[k] and self._under_way[k] < WINDOW:
            _, _, piece = heappop(self._queues[k])
            self._under_way[k] += piece.size
            self.wires.send(self._ways[k], piece.size, lambda piece=piece: self._pulled(k, piece))

    def _pulled(self, k: int, piece: Piece) -> None:
        world = self.wires.world
        world.schedule(world.now() + ACKNOWLEDGED, ARRIVAL, self._acknowledged, k, piece.size)
        self._left[k][piece.task] -= piece.size
        if not self._left[k][piece.task]:
            self.workers[k].landed(piece.task)

    def _acknowledged(self, k: int, size: int) -> None:
        self._under_way[k] -= size
        self._answer(k)
