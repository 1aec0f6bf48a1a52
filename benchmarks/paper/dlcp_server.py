"""DLCP with a parameter server: pushes and pulls of eight workers with one server, every tensor a flow of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from dlcp_network import SEED, WORKERS, Way, fabric, places, testbed
from dlcp_tags import tags
from numpy.typing import NDArray

from foretrain.collective.plan import WHOLE
from foretrain.network.packet import LinkLosses, Outcome
from foretrain.network.program import Paths, Program, joined
from foretrain.network.routing import Ecmp
from foretrain.network.topology.graph import Topology
from foretrain.workload import Workload


@dataclass(frozen=True)
class Found:
    """What came of one job.

    Attributes:
        times: of all pushes, from release to the last byte, ms.
        step: from one backward pass to the next of the slowest worker, ms.
        lost: share of all bytes that receivers did without.
        drops: of all jobs that ran at once.
        timeouts: of its flows.
    """

    times: NDArray[np.float64]
    step: float
    lost: float
    drops: int
    timeouts: int

    @classmethod
    def of(cls, jobs: Sequence[Found]) -> Found:
        """All flows of ``jobs`` that ran at once; means of the rest."""
        return cls(
            np.concatenate([each.times for each in jobs]),
            float(np.mean([each.step for each in jobs])),
            float(np.mean([each.lost for each in jobs])),
            jobs[0].drops,
            sum(each.timeouts for each in jobs),
        )

    @property
    def mean(self) -> float:
        """Of the flow completion times."""
        return float(self.times.mean())

    @property
    def tail(self) -> float:
        """Their 99th percentile."""
        return float(np.percentile(self.times, 99))

    def row(self) -> dict[str, float]:
        """For JSON."""
        row = {"mean": self.mean, "tail": self.tail, "step": self.step, "lost": self.lost}
        return row | {"drops": self.drops, "timeouts": self.timeouts}


def paths(where: Topology, nodes: NDArray[np.int32], connections: int) -> tuple[Paths, Paths]:
    """From each worker to the server, which is the last of ``nodes``, and back; ``connections`` of each."""
    workers = np.repeat(nodes[:-1], connections)
    servers = np.full(len(workers), nodes[-1], np.int32)
    number = np.arange(2 * len(workers), dtype=np.int32)
    router = Ecmp(where, seed=SEED)
    return router.paths(workers, servers, number[: len(workers)]), router.paths(
        servers, workers, number[len(workers) :]
    )


def exchange(
    work: Workload, where: Topology, nodes: NDArray[np.int32], classes: int, partition: int = WHOLE
) -> Program:
    """Pushes (worker, tensor) when gradients exist, then pulls; tensors go in messages of at most ``partition`` bytes,
    one after the other, each of which is pulled when all have pushed it."""
    gradients = work.gradients
    count = len(gradients)
    forth, back = paths(where, nodes, count)
    both = Paths(
        np.concatenate([forth.first, forth.first[-1] + back.first[1:]]).astype(np.int32),
        np.concatenate([forth.links, back.links]),
    )
    flows = WORKERS * count
    tensor = np.tile(np.arange(count), 2 * WORKERS)
    release = np.array([each.release for each in gradients], np.float64)[tensor]
    release[flows:] = 0
    layer = np.array([each.layer for each in gradients])[tensor]
    # A pull of tensor k waits for the pushes k, count + k, …
    waited = (tensor[flows:, None] + count * np.arange(WORKERS)).ravel()
    size = np.array([each.size for each in gradients], np.float64)[tensor]
    messages = np.ceil(size / partition).astype(np.int32)
    return Program.of(
        both,
        size / messages,
        steps=messages,
        release=release,
        priority=(layer * classes // len(work.layers)).astype(np.int32),
        first=np.concatenate([np.zeros(flows), np.arange(flows + 1) * WORKERS]).astype(np.int32),
        after=waited.astype(np.int32),
        lag=np.ones(len(waited), np.int32),
    )


def important(work: Workload, program: Program, way: Way) -> list[NDArray[np.bool_]]:
    """Return which packets of each flow are important: all of the back layers, where the way protects them as the paper
    does, and those of large magnitude. What a server answers has the magnitudes of the last worker's push."""
    depths = [each.layer / len(work.layers) for each in work.gradients]
    payload = way.transport.payload
    packets = np.ceil(program.size / payload).astype(int) * program.steps
    found = []
    for f, n in enumerate(packets):
        worker, tensor = divmod(f, len(depths))
        share = 1.0 if way.back and depths[tensor] >= 0.5 else way.important
        found.append(tags(payload, share, depths[tensor], min(worker, WORKERS - 1), tensor, n))
    return found


def exchanged(
    works: Sequence[Workload],
    way: Way,
    progress: Callable[[int, int], None] | None = None,
    *,
    grey: float = 0.0,
) -> list[Found]:
    """One job of each of ``works`` at random places of the fabric, all at once; what came of each.

    ``grey`` is the chance of a packet to be lost on one link from a spine, that which most flows cross.
    """
    nodes = places(len(works), WORKERS + 1)
    programs = [exchange(work, fabric(), at, way.classes) for work, at in zip(works, nodes, strict=True)]
    whole = joined(programs)
    losses = {_from_spine(whole): LinkLosses(grey)} if grey else {}
    vital = None
    if way.tagged:
        vital = [bits for work, program in zip(works, programs, strict=True) for bits in important(work, program, way)]
    outcome = way.on(fabric(), losses).run(whole, progress=progress, important=vital)
    first = np.cumsum([0, *map(len, programs)])
    return [_found(work, outcome, slice(*first[k : k + 2])) for k, work in enumerate(works)]


def _from_spine(program: Program) -> int:
    tier = np.array([node.tier for node in fabric().nodes])
    flows = np.bincount(program.paths.links, minlength=fabric().links)
    return int(np.argmax(np.where(tier[fabric().source] == 2, flows, -1)))


def on_testbed(work: Workload, way: Way, partition: int = WHOLE) -> float:
    """One job at one switch: ms from one backward pass to the next."""
    nodes = testbed().ranks[: WORKERS + 1]
    program = exchange(work, testbed(), nodes, way.classes, partition)
    vital = important(work, program, way) if way.tagged else None
    finish = way.on(testbed()).run(program, important=vital).finish.reshape(2, WORKERS, -1)
    return step(work, finish[1]) / 1e9


def _found(work: Workload, outcome: Outcome, flows: slice) -> Found:
    finish = outcome.finish[flows].reshape(2, WORKERS, -1)
    release = np.array([each.release for each in work.gradients])
    came = outcome.came[flows]
    return Found(
        times=(finish[0] - release).ravel() / 1e9,
        step=step(work, finish[1]) / 1e9,
        lost=1 - sum(int(each.sum()) for each in came) / sum(each.size for each in came),
        drops=outcome.drops,
        timeouts=int(outcome.timeouts[flows].sum()),
    )


def step(work: Workload, pulled: NDArray[np.int64]) -> float:
    """From one backward pass to the next, ps: a layer computes when its parameters are there and updated."""
    last = pulled.max(axis=0)
    ready = np.zeros(len(work.layers))
    np.maximum.at(ready, [each.layer for each in work.gradients], last)
    at = float(work.backward)
    for layer, there in zip(work.layers, ready, strict=True):
        at = max(at, there + layer.update) + layer.forward
    return at
