"""Layout of the memory of a packet simulation: rows of a network's ports and nodes, and of a program's flows.

A program's rows (flows, paths, bits, steps and dependencies, for `foretrain.network.packet.state`) are one part of the
memory, which names nothing outside of it but ports, nodes and the transport's parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError
from foretrain.network.packet import state as c
from foretrain.network.packet.port_config import LinkLosses, Queues
from foretrain.network.packet.transports.transport import Transport
from foretrain.network.program import Paths, Program
from foretrain.network.topology.graph import Topology
from foretrain.units import SECOND

LINE = 8
"""Rows are aligned to so many numbers: a line of the cache."""


class Parts:
    """Arrays that are laid out one behind the other.

    Args:
        first: where the first one does.
    """

    def __init__(self, first: int) -> None:
        self._first = self.end = first
        self._parts: list[NDArray[np.int64]] = []

    def add(self, part: NDArray[np.int64]) -> int:
        """Append ``part``, aligned, and return its address. It can be changed until `whole`."""
        at = self.end
        self._parts.append(part)
        self.end += -(-part.size // LINE) * LINE
        return at

    def whole(self) -> NDArray[np.int64]:
        """Return all parts as one array, (end − first,)."""
        made, at = np.zeros(self.end - self._first, np.int64), 0
        for part in self._parts:
            made[at : at + part.size] = part.ravel()
            at += -(-part.size // LINE) * LINE
        return made


class Extents:
    """Free parts of a memory, sorted: (first, size)."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []

    def take(self, size: int) -> int | None:
        """Return the address of the first free ``size`` numbers and allocate them; None if there are none."""
        for k, (first, has) in enumerate(self._free):
            if has >= size:
                self._free[k : k + 1] = [(first + size, has - size)] if has > size else []
                return first
        return None

    def give(self, first: int, size: int) -> None:
        """Free ``size`` numbers from ``first`` on, and join them with free neighbours."""
        merged: list[tuple[int, int]] = []
        for at, has in sorted([*self._free, (first, size)]):
            if merged and sum(merged[-1]) == at:
                merged[-1] = merged[-1][0], merged[-1][1] + has
            else:
                merged.append((at, has))
        self._free = merged


FINE: Final = 1 << 16
"""Parts of a ps in which a byte's time is given."""


@dataclass(frozen=True, slots=True, eq=False)
class NetworkRows:
    """Addresses of a network's rows.

    Attributes:
        topology, transport: what it is made of, and what all its flows have.
        first_node, first_port: rows of nodes and ports.
        parameters: the transport's.
        lists: of ports, hosts and coupled nodes to look at.
        first_watched: addresses of ports.
        back: of each link that in the other direction, -1 for none.
    """

    topology: Topology
    transport: Transport
    first_node: int
    first_port: int
    parameters: int
    lists: tuple[int, int, int]
    first_watched: int
    back: NDArray[np.int64]


def add_network(
    parts: Parts,
    topology: Topology,
    transport: Transport,
    queues: tuple[Queues, Queues],
    losses: Mapping[int, LinkLosses],
    watched: Sequence[int] = (),
) -> NetworkRows:
    """Add all rows of a network; see `foretrain.network.packet.simulator.Packets` for the arguments."""
    links, nodes = topology.links, len(topology.nodes)
    settings = parts.add(np.stack([each.row() for each in queues]))
    parameters = parts.add(transport.row().view(np.int64))
    node = _nodes(topology)
    first_node = parts.add(node)
    node[:, c.FIRST_PORT : c.LAST_PORT + 1] += parts.end
    port = _ports(topology, losses, queues, settings, first_node)
    first_port = parts.end + -(-links // 8) * 8
    parts.add(first_port + c.PORT_COLUMNS * np.argsort(topology.source, kind="stable").astype(np.int64))
    parts.add(port)
    active, host, switch = (parts.add(np.zeros(size, np.int64)) for size in (links, nodes, nodes))
    first_watched = parts.add(first_port + c.PORT_COLUMNS * np.asarray(watched, np.int64))
    lists, back = (active, host, switch), _reverse(topology)
    return NetworkRows(topology, transport, first_node, first_port, parameters, lists, first_watched, back)


def _nodes(topology: Topology) -> NDArray[np.int64]:
    """Return the rows of nodes; FIRST_PORT and LAST_PORT count from the list of ports on."""
    node = np.zeros((len(topology.nodes), c.NODE_COLUMNS), np.int64)
    node[:, c.COMING] = node[:, c.PULL_FIRST] = node[:, c.PULL_LAST] = -1
    node[:, c.LAST_PORT] = np.cumsum(np.bincount(topology.source, minlength=len(node)))
    node[1:, c.FIRST_PORT] = node[:-1, c.LAST_PORT]
    return node


def _ports(
    topology: Topology, losses: Mapping[int, LinkLosses], queues: tuple[Queues, Queues], settings: int, first_node: int
) -> NDArray[np.int64]:
    port = np.zeros((topology.links, c.PORT_COLUMNS), np.int64)
    with np.errstate(divide="ignore"):
        port[:, c.RATE] = np.where(topology.capacity > 0, np.rint(SECOND * FINE / topology.capacity), 0)
    port[:, c.DELAY] = topology.latency
    port[:, c.NODE] = first_node + c.NODE_COLUMNS * topology.source.astype(np.int64)
    port[:, c.NUMBER] = np.arange(topology.links)
    port[:, c.ARRIVALS] = -1
    forwards = np.array([node.forwards for node in topology.nodes])[topology.source].astype(np.int64)
    port[:, c.SETTING] = settings + c.SETTING_COLUMNS * forwards
    port[:, c.COUPLED] = np.array([each.coupled for each in queues])[forwards]
    port[:, c.TURN] = np.minimum(np.array([each.strict for each in queues])[forwards], c.CLASSES - 1)
    for link, each in losses.items():
        port[link, c.LOSES : c.LOSES_IN_BURST + 1] = each.row()
    return port


def _reverse(topology: Topology) -> NDArray[np.int64]:
    """Return the reverse of each link, the k-th of parallel ones for the k-th; -1 where there is none."""
    nodes = len(topology.nodes)
    forward = topology.source.astype(np.int64) * nodes + topology.target
    backward = topology.target.astype(np.int64) * nodes + topology.source
    rank = _rank_among_equals(forward)
    known = {(int(key), int(k)): link for link, (key, k) in enumerate(zip(forward, rank, strict=True))}
    return np.array([known.get((int(key), int(k)), -1) for key, k in zip(backward, rank, strict=True)], np.int64)


def _rank_among_equals(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]]) if len(keys) else np.zeros(0, bool)
    place = np.arange(len(keys))
    rank = np.empty(len(keys), np.int64)
    rank[order] = place - np.maximum.accumulate(np.where(first, place, 0))
    return rank


@dataclass(frozen=True, slots=True)
class ProgramRows:
    """Addresses of a program's rows.

    Attributes:
        first, last: where they begin, and end.
        program: its own row.
        first_flow: where the rows of its flows begin.
        flows: how many.
        dependents: of a flow, at the most.
    """

    first: int
    last: int
    program: int
    first_flow: int
    flows: int
    dependents: int


def add_program(
    parts: Parts,
    network: NetworkRows,
    program: Program,
    others: Sequence[Paths] = (),
    important: Sequence[NDArray[np.bool_]] | None = None,
    number: int = 0,
) -> ProgramRows:
    """Add all rows of ``program``, whose flows are numbered from ``number`` on.

    Raises:
        ConfigError: as `foretrain.network.packet.simulator.Packets.run`.
    """
    topology, transport, flows = network.topology, network.transport, len(program)
    _check(program, others)
    forward = [program.paths, *program.others, *others]
    used = np.unique(np.concatenate([paths.links for paths in forward]))
    for link in used[topology.capacity[used] <= 0]:
        raise ConfigError("program.paths", topology.link_name(int(link)), "is down or full", "route around it")
    first = parts.end
    row = parts.add(np.zeros(c.PROGRAM_COLUMNS, np.int64))
    flow = _flows(network, program)
    flow[:, c.PROGRAM], flow[:, c.FLOW_NUMBER] = row, number + np.arange(flows)
    first_flow = parts.add(flow)
    _add_paths(parts, network, forward, flow)
    _add_bits(parts, transport, flow, important)
    flow[:, c.FIRST_STEP] = parts.end + c.STEP_COLUMNS * (np.cumsum(program.steps) - program.steps)
    parts.add(np.zeros((int(flow[:, c.STEPS].sum()) if transport.tolerates else 0, c.STEP_COLUMNS), np.int64))
    _add_dependencies(parts, program, flow, first_flow)
    dependents = int((flow[:, c.LAST_DEPENDENT] - flow[:, c.FIRST_DEPENDENT]).max(initial=0))
    return ProgramRows(first, parts.end, row, first_flow, flows, dependents)


def _check(program: Program, others: Sequence[Paths]) -> None:
    flows = len(program)
    for name in ("release", "priority"):
        if len(getattr(program, name)) != flows:
            raise ConfigError(f"program.{name}", len(getattr(program, name)), "is not one per flow", f"give {flows}")
    for paths in others:
        if len(paths) != flows:
            raise ConfigError("others", len(paths), "is not one path per flow", f"give {flows}")
    if flows and not 0 <= program.priority.min() <= program.priority.max() < c.CLASSES:
        worst = int(program.priority[np.argmax(np.abs(program.priority))])
        raise ConfigError("program.priority", worst, "is no class", f"give 0 to {c.CLASSES - 1}")


def _flows(network: NetworkRows, program: Program) -> NDArray[np.int64]:
    topology, transport, first_node = network.topology, network.transport, network.first_node
    flows, paths = len(program), program.paths
    flow = np.zeros((flows, c.FLOW_COLUMNS), np.int64)
    crossing = np.diff(paths.first) > 0
    starts, ends = paths.links[paths.first[:-1][crossing]], paths.links[paths.first[1:][crossing] - 1]
    flow[:, c.SOURCE] = flow[:, c.TARGET] = first_node
    flow[crossing, c.SOURCE] = first_node + c.NODE_COLUMNS * topology.source[starts].astype(np.int64)
    flow[crossing, c.TARGET] = first_node + c.NODE_COLUMNS * topology.target[ends].astype(np.int64)
    flow[crossing, c.LAST_RATE] = np.rint(SECOND * FINE / topology.capacity[ends])
    sizes = np.maximum(np.ceil(program.size).astype(np.int64), 1)
    packets = -(-sizes // transport.payload)
    flow[:, c.TRANSPORT], flow[:, c.PROTOCOL] = network.parameters, transport.protocol
    flow[:, c.PACKETS], flow[:, c.FULL] = packets, transport.payload + transport.header
    flow[:, c.LAST_SIZE] = sizes - (packets - 1) * transport.payload + transport.header
    flow[:, c.NEED] = np.ceil(sizes * (1 - transport.tolerated) - 1e-9)
    flow[:, c.WHOLE] = transport.tolerates & (sizes - flow[:, c.NEED] < transport.payload)
    flow[:, c.STEPS], flow[:, c.OWN_CLASS] = program.steps, program.priority
    for column in (c.ALLOWED, c.ALARM_AT, c.DUE, c.END, c.BEGUN):
        flow[:, column] = -1
    flow[:, c.RELEASE] = np.rint(program.release).astype(np.int64)
    flow[:, c.OVERHEAD] = _overheads(topology, program)
    flow.view(np.float64)[:, c.PEAK] = _slowest(topology, paths) / SECOND
    return flow


def _slowest(topology: Topology, paths: Paths) -> NDArray[np.float64]:
    """Return the bytes/s of each flow's slowest link; 1 where it crosses none, which needs no rate."""
    capacity = np.append(topology.capacity[paths.links], np.inf)
    first = paths.first.astype(np.int64)
    found = np.minimum.reduceat(capacity, first[:-1]) if len(paths) else np.zeros(0)
    return np.where(np.diff(first) > 0, found, 1.0)


def _overheads(topology: Topology, program: Program) -> NDArray[np.int64]:
    """Return the part of each flow's latency that is software's, not its links'."""
    first, links = program.paths.first.astype(np.int64), program.paths.links
    total = np.concatenate([[0], np.cumsum(topology.latency[links])])
    wires = total[first[1:]] - total[first[:-1]]
    return np.maximum(np.rint(program.latency).astype(np.int64) - wires, 0)


def _add_paths(parts: Parts, network: NetworkRows, forward: Sequence[Paths], flow: NDArray[np.int64]) -> None:
    """Add the hops of all paths, each ended by -1; the path of replies is the first one backwards."""
    flows, ways = len(flow), len(forward)
    back, first_port = network.back, network.first_port
    links = forward[0].links
    first = forward[0].first.astype(np.int64)
    lengths = np.diff(first)
    # The hops of each flow the other way round.
    place = np.arange(len(links)) - np.repeat(first[:-1], lengths)
    replies = back[links[np.repeat(first[1:], lengths) - 1 - place]]
    for f in np.repeat(np.arange(flows), lengths)[replies < 0][:1]:
        link = int(next(each for each in forward[0].of(f)[::-1] if back[each] < 0))
        what = f"leads from {network.topology.link_name(link)} and nothing leads back"
        raise ConfigError("program.paths", int(f), what, "acknowledgements need a link in the other direction")
    starts = np.zeros((flows, ways), np.int64)
    for k, paths in enumerate(forward):
        starts[:, k] = _add_hops(parts, paths.links, paths.first.astype(np.int64), first_port)
    flow[:, c.ACK_PATH] = _add_hops(parts, replies, first, first_port)
    flow[:, c.PATHS], flow[:, c.PATH_COUNT] = parts.end + ways * np.arange(flows), ways
    parts.add(starts)


def _add_hops(parts: Parts, links: NDArray[np.integer], first: NDArray[np.int64], first_port: int) -> NDArray[np.int64]:
    """Add the hops of one path of each flow; return their addresses."""
    flows = len(first) - 1
    hops = np.full(len(links) + flows, -1, np.int64)
    hops[np.arange(len(links)) + np.repeat(np.arange(flows), np.diff(first))] = (
        first_port + c.PORT_COLUMNS * links.astype(np.int64)
    )
    return parts.add(hops) + first[:-1] + np.arange(flows)


def _add_bits(
    parts: Parts,
    transport: Transport,
    flow: NDArray[np.int64],
    important: Sequence[NDArray[np.bool_]] | None,
) -> None:
    """Add one bit for each packet: whether it arrived, what its sender knows, and whether it is protected."""
    packets = flow[:, c.PACKETS] * flow[:, c.STEPS]
    words = -(-packets // 32)
    first, total = 32 * (np.cumsum(words) - words), int(words.sum())
    flow[:, c.BITS] = 32 * parts.add(np.zeros(total, np.int64)) + first
    if transport.remembers:
        flow[:, c.KNOWN] = 32 * parts.add(np.zeros(total, np.int64)) + first
    flow[:, c.VITAL] = -1
    if important is None:
        return
    if len(important) != len(flow):
        raise ConfigError("important", len(important), "is not one array per flow", f"give {len(flow)}")
    found = np.zeros(32 * total, bool)
    for f, each in enumerate(important):
        if np.size(each) != packets[f]:
            what = "is not one per packet of all steps"
            raise ConfigError(f"important[{f}]", np.size(each), what, f"give {int(packets[f])}")
        found[first[f] : first[f] + packets[f]] = np.ravel(each)
    vital = np.packbits(found, bitorder="little").view(np.uint32).astype(np.int64)
    flow[:, c.VITAL] = 32 * parts.add(vital) + first


def _add_dependencies(parts: Parts, program: Program, flow: NDArray[np.int64], first_flow: int) -> None:
    """Add the dependencies between flows, from both ends."""
    flows, count = len(program), len(program.after)
    dependency = np.zeros((count, c.DEPENDENCY_COLUMNS), np.int64)
    dependency[:, c.WAITED] = first_flow + c.FLOW_COLUMNS * program.after.astype(np.int64)
    dependency[:, c.LAG] = program.lag
    waiters = np.repeat(np.arange(flows, dtype=np.int64), np.diff(program.first))
    dependency[:, c.WAITER] = first_flow + c.FLOW_COLUMNS * waiters
    first = parts.add(dependency)
    ends = first + c.DEPENDENCY_COLUMNS * program.first.astype(np.int64)
    flow[:, c.FIRST_DEPENDENCY], flow[:, c.LAST_DEPENDENCY] = ends[:-1], ends[1:]
    dependents = parts.add(first + c.DEPENDENCY_COLUMNS * np.argsort(program.after, kind="stable").astype(np.int64))
    last = dependents + np.cumsum(np.bincount(program.after, minlength=flows))
    flow[:, c.LAST_DEPENDENT] = last
    flow[:, c.FIRST_DEPENDENT] = np.concatenate([[dependents], last[:-1]]) if flows else last
