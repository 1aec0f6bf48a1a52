"""Servers: what stands between a GPU and the network. One kind per module; `preset` knows real ones by name."""

from foretrain.network.servers.nvlink_mesh import NVLinkMesh
from foretrain.network.servers.nvswitch import NVSwitch
from foretrain.network.servers.pcie import PCIeTree
from foretrain.network.servers.presets import SERVERS, preset
from foretrain.network.servers.server import Host, Server, ServerPorts

__all__ = ["SERVERS", "Host", "NVLinkMesh", "NVSwitch", "PCIeTree", "Server", "ServerPorts", "preset"]
