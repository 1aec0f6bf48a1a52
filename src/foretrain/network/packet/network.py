"""What is there before anything is sent: the rows of a network's ports and nodes, and of what is set of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from foretrain.network.packet import state as c
from foretrain.network.packet.memory_layout import Parts
from foretrain.network.packet.port_config import LinkLosses, Queues
from foretrain.network.packet.transports.transport import Transport
from foretrain.network.topology.graph import Topology
from foretrain.units import SECOND

FINE: Final = 1 << 16
"""Parts of a ps in which a byte's time is given."""


@dataclass(frozen=True, slots=True, eq=False)
class NetworkRows:
    """Where its rows begin.

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
    """Adds all rows of a network; see `foretrain.network.packet.simulator.Packets` for the arguments."""
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
    """Columns of nodes; FIRST_PORT and LAST_PORT from where ports are listed on."""
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
    """Of each link the one in the other direction, the k-th of parallel ones for the k-th; -1 where there is none."""
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
