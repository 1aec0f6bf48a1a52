"""Where programs are in the memory of a packet network that goes on, and when their rows are used again.

# Note [Places]
Rows are known by where they begin, so nothing ever moves. A program that is over keeps its rows as long as something
names its flows: packets, late repetitions, acknowledgements and timers among them, and hosts that want to pull from it.
What nothing names is free for programs that come later.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from foretrain.network.packet import state as c
from foretrain.network.packet.loading import Prepared
from foretrain.network.packet.memory_layout import Extents, Parts
from foretrain.network.packet.programs import ProgramRows, add_program
from foretrain.network.packet.state import PacketState
from foretrain.network.program import Program

_DEAD: Final = 1 << 17
"""Programs that are over may take so much of the memory, and twice what live ones do, before it is looked through."""


class Occupancy:
    """The blocks of programs, and what is free.

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
        """Writes the rows of ``program`` into ``state``; its flows are numbered from ``number`` on.

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
        """The program whose flows begin at ``first_flow`` has nothing more to do."""
        self._over.append(self._live.pop(first_flow))

    def _forget(self, state: PacketState) -> None:
        """Frees the rows of programs that are over and that nothing names."""
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
    """The flows that packets name, and those that hosts want to pull from; sorted."""
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
