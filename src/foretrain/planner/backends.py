"""How hosts can exchange gradients: all-reduce, or a parameter server, on hosts of its own or beside them."""

from __future__ import annotations

from dataclasses import replace

from foretrain.network import Cluster, Exchange, Place


def engine_of(place: Place) -> Exchange:
    """How gradients become sums on ``place``; a topology has collectives."""
    return place.exchange if isinstance(place, Cluster) else "all_reduce"


def engines(place: Place) -> tuple[Place, ...]:
    """``place`` with every engine that its hosts can have, all-reduce first.

    Servers of their own need hosts of their own, so that only a cluster which has some can use them. Servers beside
    the workers need nothing. A topology stays as it is.
    """
    if not isinstance(place, Cluster) or place.workers == 1:
        return (place,)
    plain = replace(place, exchange="all_reduce", servers=0, server_rate=None)
    found = [plain, replace(plain, exchange="ps_colocated")]
    return tuple(found if place in found else [*found, place])


def describe(place: Place) -> str:
    """The engine for people: ``"all-reduce"``, ``"4 parameter servers"``."""
    if not isinstance(place, Cluster):
        return f"all-reduce ({place.collective})"
    if place.exchange == "ps":
        return f"{place.servers} parameter server{'s' if place.servers > 1 else ''}"
    return "all-reduce" if place.exchange == "all_reduce" else "parameter servers beside the workers"
