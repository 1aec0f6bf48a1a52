"""Packets in switch queues: what flows only approximate. See `foretrain.network.packet.simulator`."""

from foretrain.network.packet.kernels import Kernel
from foretrain.network.packet.online import Online
from foretrain.network.packet.simulator import Outcome, Packets
from foretrain.network.packet.statistics import Distribution, Ports
from foretrain.network.packet.switch import Losses, Queues
from foretrain.network.packet.tracing import Trace

__all__ = ["Distribution", "Kernel", "Losses", "Online", "Outcome", "Packets", "Ports", "Queues", "Trace"]
