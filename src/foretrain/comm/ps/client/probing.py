"""Measured cost of pushing: rounds of a few bytes and of many, through the very servers that will sum gradients."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from foretrain.comm.coordinator.addresses import local_address, resolved
from foretrain.comm.ps.client.connection import Connection, Links, failure
from foretrain.comm.ps.frames import ABSENT, FrameKind, Header, Item, bundle, unbundle
from foretrain.comm.ps.placement import Declaration, Declared, Placement
from foretrain.errors import PeerLost
from foretrain.network import Cluster
from foretrain.schedule import CostModel
from foretrain.units import COST_SHIFT, NANOSECOND, SECOND

_SMALL, _LARGE = 4 << 10, 1 << 20
"""Bytes of the timed messages."""
_SERIES: Final = (3, 12, 32, 8)
"""Repetitions of a series; rounds of small messages in it, one by one and together, and of large ones, by server."""
_DEPTH: Final = 16
"""Most messages in flight at a server."""


def depth(size: int) -> int:
    """Return the messages of ``size`` bytes in flight at each server that keep both directions and both ends busy."""
    return max(4, min(_DEPTH, _LARGE // size))


class PushProbe:
    """Timed rounds, declared as ``epoch``. All workers probe at the same time, as they will push.

    Args:
        links: to every shard, established.
        epoch: number of this worker's earlier declarations.
        stall_timeout: seconds after which an outstanding round counts as stuck.
    """

    def __init__(self, links: Links, workers: int, job: str, epoch: int, stall_timeout: float) -> None:
        self._links, self._stall_timeout = links, stall_timeout
        shards = len(links.connections)
        # One part per message, so that with one shard as with many each message is one part's.
        self._declaration = Declaration(
            tuple(Declared(f"probe {k}", _LARGE, "float32", k) for k in range(_DEPTH * shards)), workers, job, _LARGE
        )
        self._parts = Placement(self._declaration, shards).parts
        self._payload = memoryview(bytearray(_LARGE))
        self._step = [0] * len(self._parts)
        self._left = [0] * len(self._parts)
        self._epoch, self._sessions = epoch, [0] * shards
        self.hear()

    def cost(self) -> CostModel:
        """Return the cost of one push-and-pull: κ with several in flight, latency and θ from small ones.

        Every server has as many in flight as one alone would, so that all are busy.
        """
        repeated, small, many, large = _SERIES
        servers = len(self._links.connections)
        self.series(_SMALL, small, 1)
        alone = median(self.series(_SMALL, small, 1) for _ in range(repeated))
        busy = median(self.series(_SMALL, servers * many, servers * depth(_SMALL)) for _ in range(repeated))
        each = median(self.series(_LARGE, servers * large, servers * depth(_LARGE)) for _ in range(repeated))
        per_byte = max(1, round(each * NANOSECOND * 2**COST_SHIFT / _LARGE))
        return CostModel(
            overhead=round(busy) * NANOSECOND,
            per_byte=per_byte,
            latency=max(0, round(alone - busy)) * NANOSECOND,
        )

    def series(self, size: int, count: int, depth: int) -> float:
        """Return nanoseconds per round of ``size`` bytes to every shard in turn, ``depth`` parts in flight at a time.

        The first ``depth`` rounds warm up: until their end not all directions are busy.
        """
        self.together()
        waiting: deque[int] = deque()
        ended: list[int] = []
        for k in range(count + depth):
            part = k % min(len(self._parts), depth * len(self._links.connections))
            while len(waiting) == depth or part in waiting:
                self._wait(waiting.popleft())
                ended.append(time.perf_counter_ns())
            self._push(part, size)
            waiting.append(part)
        while waiting:
            self._wait(waiting.popleft())
            ended.append(time.perf_counter_ns())
        return (ended[-1] - ended[depth - 1]) / count

    def together(self) -> None:
        """Wait until all workers have called this."""
        self._push(0, _SMALL)
        self._wait(0)

    def _push(self, part: int, size: int) -> None:
        # The next round of a part needs all its bytes pushed: the rest goes without payload in the same message.
        items = [Item(part, 0, size, self._payload[:size])]
        if size < _LARGE:
            items.append(Item(part, size, _LARGE - size, b""))
        header = Header(FrameKind.PUSH, step=self._step[part])
        self._links.connections[self._parts[part].shard].send(*bundle(header, items))
        self._left[part] = _LARGE
        self._step[part] += 1

    def _wait(self, part: int) -> None:
        deadline = time.monotonic() + self._stall_timeout
        while self._left[part]:
            connection = self._links.connections[self._parts[part].shard]
            self._links.poll(0.1)
            self._hear()
            if time.monotonic() > deadline:
                host, port = connection.address
                raise PeerLost(
                    f"a round through server {connection.shard} at {host}:{port} has not come back in "
                    f"{self._stall_timeout:g} s"
                )

    def hear(self) -> None:
        """Handle the servers' messages; resend to a restarted server the pushes that other workers may need.

        Call periodically until all workers have measured.
        """
        self._links.poll(0)
        self._hear()

    def _hear(self) -> None:
        for connection in self._links.connections:
            heard = connection.read()
            if connection.sessions > self._sessions[connection.shard]:
                self._sessions[connection.shard] = connection.sessions
                self._declare(connection)
            for header, payload in heard:
                if header.kind is FrameKind.VALUE:
                    items = unbundle(header, payload)
                    connection.send(Header(FrameKind.RECEIVED, size=sum(len(item.data) for item in items)))
                    for part, _, size, _ in items:
                        if header.step == self._step[part] - 1:
                            self._left[part] = max(0, self._left[part] - size)
                elif header.kind is FrameKind.FAIL:
                    raise failure(header, payload)
        self._links.live()

    def _declare(self, connection: Connection) -> None:
        begun = max(self._step)
        connection.send(Header(FrameKind.DECLARE, step=self._epoch, offset=begun), self._declaration.encode())
        # Without regard to what the server knows: the sums do not matter, nor does one that comes twice.
        for part in (part for part in self._parts if part.shard == connection.shard):
            for step in range(max(0, self._step[part.number] - 2), self._step[part.number]):
                connection.send(Header(FrameKind.PUSH, ABSENT, part=part.number, step=step, size=_LARGE))
            self._left[part.number] = _LARGE if self._left[part.number] else 0


def beside(servers: Sequence[tuple[str, int]], workers: int) -> bool:
    """Return whether each of ``workers`` hosts has a server of its own, as far as this host can tell."""
    hosts = {host for host, _ in servers}
    if workers == 1 or not len(hosts) == len(servers) == workers:
        return False
    # This host is the one that is reached from its own address.
    return any(local_address(None, place) == resolved(*place)[1][0] for place in servers)


def served_cluster(cost: CostModel, workers: int, servers: int, *, beside: bool = False) -> Cluster:
    """Return a cluster whose push-and-pull costs ``cost``: the measured network, for the simulator.

    Servers ``beside`` the workers share their links: what is measured is one byte up and one down, over the same wire.
    """
    rate = 1 / max(cost.per_byte / (1 << COST_SHIFT) / SECOND, 1e-15)
    where: dict[str, Any] = {"workers": workers, "latency": cost.latency // 2, "sharded": servers > 1}
    if beside:
        link = 2 * rate * (workers - 1) / workers
        return Cluster(**where, up=link, down=link, overhead=cost.overhead // 2, exchange="ps_colocated")
    served = {"servers": servers, "server_rate": rate * workers / servers}
    return Cluster(**where, up=rate, down=rate, overhead=cost.overhead, exchange="ps", **served)
