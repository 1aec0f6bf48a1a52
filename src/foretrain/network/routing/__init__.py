"""Routing of flows: a file for each kind of policy, and new paths when links fail.

    route = router(topology, "ecmp", seed=1)
    paths = route.paths(sources, targets, connections)

Every policy takes shortest ways only (the sum of `Topology.metric`), over links that are up and through nodes that
forward; only a table may say otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError, unknown
from foretrain.network.routing.per_flow import Adaptive, Ecmp, Shortest, link_load
from foretrain.network.routing.route_search import PortableRouter, reroute
from foretrain.network.routing.spray import Scatter, Spray, bundled, contract, groups
from foretrain.network.routing.static import Given, Key, Static
from foretrain.network.topology.graph import Topology

__all__ = [
    "Adaptive",
    "Ecmp",
    "Name",
    "PortableRouter",
    "Scatter",
    "Shortest",
    "Spray",
    "Static",
    "bundled",
    "contract",
    "groups",
    "link_load",
    "reroute",
    "router",
]

Name: TypeAlias = Literal["shortest", "ecmp", "static", "spray", "adaptive"]
"""What `router` makes."""


def router(
    topology: Topology,
    policy: Name | str = "ecmp",
    *,
    seed: int = 0,
    polarised: bool = False,
    table: Mapping[Key, Given] | None = None,
    fallback: Name | str | None = "ecmp",
    load: NDArray[np.float64] | None = None,
) -> PortableRouter:
    """Return the policy of that name for ``topology``.

    Args:
        topology: the network.
        policy: ``"shortest"``, ``"ecmp"``, ``"static"``, ``"spray"`` or ``"adaptive"``.
        seed: of the hash of ecmp and spray; the others are not random.
        polarised: ecmp only; see `Ecmp`.
        table: static only, and needed there; see `Static`.
        fallback: static only: the policy of pairs that are not in the table, or None to refuse them.
        load: adaptive only; see `Adaptive`.

    Raises:
        ConfigError: the policy is unknown (near names are listed), or an option is not one of its own.
    """
    for owner, name, given in (
        ("ecmp", "polarised", polarised),
        ("static", "table", table is not None),
        ("adaptive", "load", load is not None),
    ):
        if given and policy != owner and not (policy == "static" and fallback == owner):
            raise ConfigError(name, policy, f"does not have this option, which is one of {owner}", f"use '{owner}'")
    match policy:
        case "shortest":
            return Shortest(topology)
        case "ecmp":
            return Ecmp(topology, seed=seed, polarised=polarised)
        case "spray":
            return Spray(topology, seed=seed)
        case "adaptive":
            return Adaptive(topology, load=load)
        case "static":
            if table is None:
                raise ConfigError("table", None, "lists no paths", "write table={('a', 'b'): ['a', 'switch', 'b']}")
            if fallback == "static":
                raise ConfigError("fallback", fallback, "is the policy itself", "use e.g. 'ecmp'")
            other = fallback and router(topology, fallback, seed=seed, polarised=polarised, load=load)
            return Static(topology, table, fallback=other or None)
    raise unknown("routing", policy, get_args(Name))
