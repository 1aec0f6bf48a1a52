"""Ways to exchange gradients: by all-reduce or parameter servers, in full or in half precision.

# Note [Cost of compression]
Half precision halves the bytes and adds the work of rounding. The runtime rounds with error feedback
(`foretrain.plugins.torch.compression`). Of each value of 4 bytes it adds the residual (12 bytes of memory traffic),
rounds (6), takes what was sent from the residual (10) and clears what overflowed (8). When the sum is back it is
widened again (6). All of it streams through the memory of the device that computes, which has no time for anything else
meanwhile: rounding makes the backward pass longer, and widening the forward pass.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import accumulate

from foretrain.device import preset
from foretrain.device.gpu import ACHIEVED_BANDWIDTH
from foretrain.errors import unknown
from foretrain.network import Cluster, Exchange, Place
from foretrain.schedule import CostModel
from foretrain.units import COST_SHIFT, SECOND
from foretrain.workload.step import Workload

COMPRESSIONS = ("fp16", "bf16")
"""What gradients may be sent as. Both have two bytes."""
_VALUE, _SENT = 4, 2
_ROUND, _WIDEN = 36, 6
"""Bytes of memory traffic for a value that is sent, and for one that comes back."""
_HOST_MEMORY = 10e9
"""Bytes/s that one core streams where no GPU is named."""
_HALF = re.compile(r"\bin (fp16|bf16)\b")


def streaming(place: Place) -> float:
    """Bytes/s at which the device of ``place`` streams its memory."""
    return _HOST_MEMORY if place.device is None else ACHIEVED_BANDWIDTH * preset(place.device).bandwidth


def halvable(workload: Workload) -> bool:
    """Return whether gradients have four bytes a value. Only a model of the zoo says that it has two."""
    return _HALF.search(workload.source) is None


def compressed(workload: Workload, kind: str | None, bandwidth: float) -> Workload:
    """``workload`` with gradients sent as ``kind``, rounded and widened at ``bandwidth`` bytes/s; None is as it is."""
    if kind is None:
        return workload
    if kind not in COMPRESSIONS:
        raise unknown("compression", kind, COMPRESSIONS)
    values = [0] * len(workload.layers)
    for gradient in workload.gradients:
        values[gradient.layer] += math.ceil(gradient.size / _VALUE)
    rounding = [math.ceil(_ROUND * count / bandwidth * SECOND) for count in values]
    widening = [math.ceil(_WIDEN * count / bandwidth * SECOND) for count in values]
    # The backward pass comes from behind: a gradient waits for the rounding of all deeper layers and of its own.
    late = list(accumulate(reversed(rounding)))[::-1]
    layers = tuple(
        replace(layer, forward=layer.forward + wide, backward=layer.backward + narrow)
        for layer, wide, narrow in zip(workload.layers, widening, rounding, strict=True)
    )
    gradients = tuple(
        replace(one, size=max(1, math.ceil(one.size * _SENT / _VALUE)), release=one.release + late[one.layer])
        for one in workload.gradients
    )
    return replace(workload, layers=layers, gradients=gradients)


def engine_of(place: Place) -> Exchange:
    """Return how gradients are summed on ``place``; a topology has collectives."""
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


def cluster_of(cost: CostModel, ranks: int) -> Cluster:
    """Return the simple cluster of at least two ``ranks`` whose all-reduce costs ``cost``.

    A measured cost has a latency and a floor, which the cluster keeps. That of a simulated topology has neither
    (`foretrain.network.deployment.Deployment.cost`): there both are 0.
    """
    seconds_per_byte = cost.per_byte / (1 << COST_SHIFT) / SECOND
    rate = 2 * (ranks - 1) / ranks / max(seconds_per_byte, 1e-15)
    one_way = cost.latency // (2 * (ranks - 1))
    return Cluster(workers=ranks, up=rate, down=rate, latency=one_way, overhead=cost.overhead, floor=cost.floor)
