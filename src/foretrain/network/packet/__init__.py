"""Packets in switch queues: what flows only approximate. See `foretrain.network.packet.simulator`."""

from foretrain.network.packet.kernels import Kernel
from foretrain.network.packet.online_simulator import Online
from foretrain.network.packet.port_config import LinkLosses, Queues
from foretrain.network.packet.simulator import Distribution, Outcome, Packets, PortCounters, QueueTrace

__all__ = [
    "Distribution",
    "Kernel",
    "LinkLosses",
    "Online",
    "Outcome",
    "Packets",
    "PortCounters",
    "QueueTrace",
    "Queues",
]
