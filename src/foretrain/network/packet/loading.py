"""State of a packet simulation before anything has happened, and rows of programs that come and go.

# Note [Places]
Rows are known by their addresses, so nothing ever moves. A program that is over keeps its rows as long as something
names its flows: packets, late repetitions, acknowledgements and timers among them, and hosts that want to pull from it.
Rows that nothing names are free for later programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from foretrain.network.packet import state as c
from foretrain.network.packet.memory_layout import Extents, NetworkRows, Parts, ProgramRows, add_network, add_program
from foretrain.network.packet.port_config import LinkLosses, Queues
from foretrain.network.packet.state import PacketState
from foretrain.network.packet.transports.transport import Transport
from foretrain.network.program import Paths, Program
from foretrain.network.topology.graph import Topology

_POOL: Final = 1 << 12
"""Packets to begin with, at least."""
_TRACE: Final = 1 << 12
"""Samples of queues between two looks at them from outside."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """State of a simulation and the addresses in it.

    Attributes:
        state: it.
        network: where ports and nodes are.
        first_flow: where the rows of flows begin.
        flows: how many.
        shortest: ps that the shortest link in use takes.
    """

    state: PacketState
    network: NetworkRows
    first_flow: int
    flows: int
    shortest: int

    @property
    def port(self) -> NDArray[np.int64]:
        """Rows of ports, (links, PORT_COLUMNS)."""
        return self.state.rows(self.network.first_port, c.PORT_COLUMNS, self.network.topology.links)

    @property
    def flow(self) -> NDArray[np.int64]:
        """Rows of flows, (flows, FLOW_COLUMNS)."""
        return self.state.rows(self.first_flow, c.FLOW_COLUMNS, self.flows)


def prepared(
    topology: Topology,
    program: Program,
    others: Sequence[Paths],
    transport: Transport,
    queues: tuple[Queues, Queues],
    losses: Mapping[int, LinkLosses],
    seed: int,
    important: Sequence[NDArray[np.bool_]] | None = None,
    watch: tuple[Sequence[int], int] = ((), 0),
) -> Prepared:
    """Check and load everything; see `foretrain.network.packet.simulator.Packets` for the arguments."""
    watched, every = watch
    parts = Parts(c.WHEEL_AT + c.WHEEL)
    network = add_network(parts, topology, transport, queues, losses, watched)
    block = add_program(parts, network, program, others, important)
    used = np.concatenate([program.paths.links, *(paths.links for paths in (*program.others, *others))])
    shortest = int(topology.latency[used].min(initial=2**62))
    state = _state(parts, network, seed, shortest, watched, every)
    begin(state, block)
    need(state, margin(transport, block), max(_POOL, 2 * block.flows))
    return Prepared(state, network, block.first_flow, block.flows, shortest)


def empty(
    topology: Topology,
    transport: Transport,
    queues: tuple[Queues, Queues],
    losses: Mapping[int, LinkLosses],
    seed: int,
) -> Prepared:
    """Return a network without flows; windows are no longer than the shortest link that is up takes."""
    shortest = int(topology.latency[topology.capacity > 0].min(initial=2**40))
    parts = Parts(c.WHEEL_AT + c.WHEEL)
    network = add_network(parts, topology, transport, queues, losses)
    state = _state(parts, network, seed, shortest)
    grow(state, _POOL)
    return Prepared(state, network, len(state.memory), 0, shortest)


def begin(state: PacketState, block: ProgramRows) -> None:
    """Make the flows of ``block`` those that a kernel loads next."""
    m = state.memory
    m[c.FIRST_FLOW], m[c.LAST_FLOW] = block.first_flow, block.first_flow + block.flows * c.FLOW_COLUMNS
    m[c.UNFINISHED] += block.flows


def margin(transport: Transport, block: ProgramRows) -> int:
    """Return how many packets one event of a host may send: a window of its flow, and of each dependent one."""
    return 16 + (transport.most + 4) * (1 + block.dependents)


def need(state: PacketState, margin: int, packets: int) -> None:
    """Make sure that ``packets`` are free, and as many as two events of a host need, ``margin`` each."""
    m = state.memory
    m[c.MARGIN] = max(m[c.MARGIN], margin)
    short = max(packets, 2 * int(m[c.MARGIN])) - int(m[c.FREES])
    if short > 0:
        grow(state, short)


def grow(state: PacketState, packets: int = 0) -> None:
    """Add ``packets``, or as many as there are."""
    had = len(state.far)
    more = packets or had
    packet = np.zeros((more, c.PACKET_COLUMNS), np.int64)
    first = len(state.memory)
    packet[:, c.NEXT] = first + c.PACKET_COLUMNS * np.arange(1, more + 1)
    packet[-1, c.NEXT] = state.memory[c.FREE]
    state.memory[c.FREE] = first
    state.memory[c.FREES] += more
    state.memory = np.concatenate([state.memory, packet.ravel()])
    state.far = np.concatenate([state.far, np.zeros(more, np.int64)])
    state.buffer = np.concatenate([state.buffer, np.zeros(2 * more, np.int64)])
    # Besides a packet, every port may have an event.
    state.event = np.concatenate([state.event, np.zeros((more, 3), np.int64)])
    state.pools = (*state.pools, (first, more))


def _state(
    parts: Parts, network: NetworkRows, seed: int, shortest: int, watched: Sequence[int] = (), every: int = 0
) -> PacketState:
    """Return the state that ``parts`` describe, without packets."""
    first = c.WHEEL_AT + c.WHEEL
    m = np.concatenate([np.zeros(first, np.int64), parts.whole()])
    m[c.WHEEL_AT : first] = -1
    m[c.SHIFT] = max(0, min(shortest, 2**40).bit_length() - 1)
    m[c.SEED], m[c.UNTIL] = seed, c.FOREVER
    m[c.ACTIVE_LIST], m[c.HOST_LIST], m[c.SWITCH_LIST] = network.lists
    m[c.WATCHED], m[c.LAST_WATCHED] = network.first_watched, network.first_watched + len(watched)
    m[c.TRACE_EVERY] = max(1, every >> int(m[c.SHIFT])) if len(watched) else 0
    m[c.OUT] = m[c.FREE] = m[c.ASKING] = m[c.LAST_TRACE] = -1
    return PacketState(
        memory=m,
        far=np.zeros(0, np.int64),
        buffer=np.zeros(0, np.int64),
        event=np.zeros((network.topology.links + 1, 3), np.int64),
        trace=np.zeros((_TRACE if len(watched) else 0, 1 + len(watched)), np.int64),
    )


_DEAD: Final = 1 << 17
"""Programs that are over may take so much of the memory, and twice what live ones do, before it is looked through."""


class RowAllocator:
    """Allocator of the rows of programs in the memory of a network.

    Args:
        ready: the network, without flows.
    """

    def __init__(self, ready: Prepared) -> None:
        self._network = ready.network
        self._free = Extents()
        self._live: dict[int, ProgramRows] = {}
        self._over: list[ProgramRows] = []
        self._bound = _DEAD

    def place(self, state: PacketState, program: Program, number: int) -> ProgramRows:
        """Write the rows of ``program`` into ``state``; its flows are numbered from ``number`` on.

        Raises:
            ConfigError: as `foretrain.network.packet.Packets.run`.
        """
        if sum(block.last - block.first for block in self._over) > self._bound:
            self._forget(state)
        # What it needs does not depend on where it is.
        parts = Parts(len(state.memory))
        size = add_program(parts, self._network, program, number=number).last - len(state.memory)
        at = self._free.take(size)
        if at is None:
            first, more = len(state.memory), size + max(size, len(state.memory) // 4) // 8 * 8
            state.memory = np.concatenate([state.memory, np.zeros(more, np.int64)])
            self._free.give(first, more)
            at = self._free.take(size)
            assert at is not None
        parts = Parts(at)
        block = add_program(parts, self._network, program, number=number)
        state.memory[at : at + size] = parts.whole()
        self._live[block.first_flow] = block
        return block

    def over(self, first_flow: int) -> None:
        """Note that the program whose flows begin at ``first_flow`` has nothing more to do."""
        self._over.append(self._live.pop(first_flow))

    def _forget(self, state: PacketState) -> None:
        """Free the rows of programs that are over and that nothing names."""
        named = _named(state, self._nodes(state))
        kept = []
        for block in self._over:
            place = np.searchsorted(named, block.first)
            if place < len(named) and named[place] < block.last:
                kept.append(block)
            else:
                self._free.give(block.first, block.last - block.first)
        self._over = kept
        self._bound = _DEAD + 2 * sum(block.last - block.first for block in (*kept, *self._live.values()))

    def _nodes(self, state: PacketState) -> NDArray[np.int64]:
        return state.rows(self._network.first_node, c.NODE_COLUMNS, len(self._network.topology.nodes))


def _named(state: PacketState, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the flows that packets name, and those that hosts want to pull from; sorted."""
    pools = [state.rows(first, c.PACKET_COLUMNS, packets) for first, packets in state.pools]
    address = np.concatenate([first + c.PACKET_COLUMNS * np.arange(packets) for first, packets in state.pools])
    free, p = [], int(state.memory[c.FREE])
    while p >= 0:
        free.append(p)
        p = int(state.memory[p + c.NEXT])
    live = ~np.isin(address, free)
    found = [np.concatenate([pool[:, c.WAY] for pool in pools])[live] >> 32]
    for f in nodes[:, c.PULL_FIRST].tolist():
        while f >= 0:
            found.append(np.array([f]))
            f = int(state.memory[f + c.PULL_NEXT])
    return np.unique(np.concatenate(found))
