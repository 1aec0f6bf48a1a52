"""Small cluster on one machine: hosts are network namespaces, and their links have a chosen rate."""

from foretrain.lab.conditions import Conditions
from foretrain.lab.host import HostStatus, LabHost, Process, Status
from foretrain.lab.iproute import LabError
from foretrain.lab.launch import LaunchError, launch
from foretrain.lab.network import Lab, labs, remove

__all__ = [
    "Conditions",
    "HostStatus",
    "Lab",
    "LabError",
    "LabHost",
    "LaunchError",
    "Process",
    "Status",
    "labs",
    "launch",
    "remove",
]
