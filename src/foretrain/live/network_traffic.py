"""Traffic of the live ranks in the simulated network: collectives and messages, started in a fixed order.

traffic = NetworkTraffic(world, cluster("dgx-h100:16,collective=nccl"), folding)
traffic.collective("all_gather", 2**28, group, None, done)

# Note [Starts of one instant]
All that begins at one instant is handed to the traffic at its end, ordered by rank and by position in its log: the
order must not tell which frame came first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from foretrain.collective import Operation
from foretrain.collective.nccl.generation import gpu_named
from foretrain.errors import ConfigError, unknown
from foretrain.live.comm_layout import ALL_PAIRS, Group, Rows, Sends, Splits, algorithm, layout, message, uneven
from foretrain.live.comm_pattern import (
    CommPattern,
    RoutedCluster,
    RoutedPattern,
    by_messages,
    by_wire,
    cost,
    patterned,
)
from foretrain.live.contention import Contention
from foretrain.live.event_log import OPERATIONS
from foretrain.live.folding import Folding
from foretrain.network.collective_placement import choice_on
from foretrain.network.deployment import Deployment
from foretrain.schedule import CostModel
from foretrain.simulation.world import START, TIMER, VirtualWorld
from foretrain.units import Time

Done = Callable[[], None]

_OF_MESSAGES: Final = ("all_to_all", "gather", "scatter")
"""Collectives that NCCL does by sends and receives."""
_SEEN: Final = 1 << 14
"""Group tuples that are looked up by identity."""


class NetworkTraffic:
    """Collectives and messages of the live ranks, and of those they stand for, in one network.

    Time is that of an exchange alone where no other in flight shares a link with it, which costs microseconds; else of
    all that share links, flow by flow (`foretrain.live.contention`). What groups and messages of represented ranks do
    at the same moment is simulated with them as far as it contends.

    Args:
        world: the virtual clock.
        where: the cluster: topology, ranks, routing and collective, ``"nccl"`` for NCCL's choice at each size.
        folding: which ranks are alike.
        tell: called with a line about each exchange that takes long to simulate.

    Raises:
        ConfigError: cluster and folding are not of equally many ranks.
    """

    def __init__(
        self,
        world: VirtualWorld,
        where: Deployment,
        folding: Folding,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        if folding.world != len(where.members):
            have = len(where.members)
            raise ConfigError("nproc", folding.world, f"is not the cluster's {have} ranks", f"start {have}")
        self._world, self._where, self._folding = world, where, folding
        self._ground = RoutedCluster(where, tell)
        self._contention = Contention(world, where.fluid.network)
        self._nccl = where.collective == "nccl"
        self._seen: dict[int, tuple[Group, int]] = {}
        self._numbers: dict[Group, int] = {}
        self._laid: dict[object, RoutedPattern] = {}
        self._patterns: dict[object, CommPattern] = {}
        self._looked: dict[object, CommPattern] = {}
        self._times: dict[CommPattern, int] = {}
        self._marked = np.zeros(len(where.capacity))

    def collective(self, operation: str, size: int, group: Group, splits: Splits | None, done: Done) -> None:
        """Begin a collective now; call ``done`` through the world when all members have ended.

        Args:
            operation: of `foretrain.live.event_log.OPERATIONS`.
            size: bytes as in the record ``COLLECTIVE`` there: the whole vector.
            group: world ranks in the group's order. A broadcast's, reduce's, gather's or scatter's root is the first.
            splits: for an uneven all-to-all: bytes to each rank of the group, the same from all members, or by world
                rank of live members, from whose rows those of the others follow; see Note [Two readings of a row] in
                `foretrain.live.comm_layout`. More messages than all pairs of 256 ranks are taken for an even
                all-to-all.

        Raises:
            ConfigError: the operation is unknown, or NCCL cannot do it.
        """
        if len(group) < 2:
            self._world.schedule(self._world.now() + self._launch(), TIMER, done)
            return
        rows = None if splits is None or operation != "all_to_all" else Rows.of(group, splits)
        key = operation, size, self._number(group), rows
        found = self._looked.get(key)
        if found is None:
            found = self._looked[key] = self._collective(operation, max(size, 1), group, rows)
        self._begin(found, done)

    def messages(self, transfers: Sequence[tuple[int, int, int]], done: Sequence[Done]) -> None:
        """Begin to send ``transfers``, each (source, target, bytes) by world ranks; each ends on its own."""
        for (source, target, size), call in zip(transfers, done, strict=True):
            if source == target:
                self._world.schedule(self._world.now() + self._launch(), TIMER, call)
                continue
            key = "message", source, target, size
            found = self._looked.get(key)
            if found is None:
                found = self._looked[key] = self._message(source, target, max(size, 1))
            self._begin(found, call)

    def cost(self, group: Group) -> CostModel:
        """Return the cost of one all-reduce in ``group``; see `foretrain.network.deployment.Deployment.cost`."""
        ranks = tuple(self._ground.members[list(group)].tolist())
        where = self._where
        return (where if ranks == where.members else dataclasses.replace(where, ranks=ranks, _memo={})).cost

    def overhead(self) -> Time:
        """Return θ of the cluster."""
        return self._where.overhead

    def regrouped(self) -> None:
        """Forget which groups act together: the folding has learnt of another."""
        self._looked.clear()

    def carried(self) -> NDArray[np.float64]:
        """Return the bytes that all ranks have sent over each link, ended or not; float64 (links,)."""
        total = np.zeros(len(self._where.capacity))
        for pattern, times in self._times.items():
            links, bytes_ = pattern.carried
            total[links] += times * bytes_
        return total

    def mark(self) -> NDArray[np.float64]:
        """Return the bytes carried since the last mark, and set a new mark."""
        total = self.carried()
        since, self._marked = total - self._marked, total
        return since

    def _begin(self, pattern: CommPattern, done: Done) -> None:
        self._times[pattern] = self._times.get(pattern, 0) + 1
        if pattern.program is None:
            self._world.schedule(self._world.now() + pattern.alone, TIMER, done)
        else:
            self._contention.begin(pattern, done)

    def _launch(self) -> Time:
        """Return the cost of an exchange with oneself."""
        return gpu_named(self._where.device or "").generation.ll.launch if self._nccl else self._where.step

    def _number(self, group: Group) -> int:
        """Return a number for ``group``."""
        # A tuple's hash takes as long as it is long, and the same ones come again and again.
        seen = self._seen.get(id(group))
        if seen is not None and seen[0] is group:
            return seen[1]
        number = self._numbers.setdefault(group, len(self._numbers))
        if len(self._seen) < _SEEN:
            self._seen[id(group)] = group, number
        return number

    def _collective(self, operation: str, size: int, group: Group, rows: Rows | None) -> CommPattern:
        if operation not in OPERATIONS:
            raise unknown("operation", operation, OPERATIONS)
        if operation == "barrier":
            return CommPattern(self._latency(group))
        images = self._folding.images(group)
        key = operation, size, images, rows
        if key not in self._patterns:
            laid = self._laid_as(operation, size, images)
            sends = None if rows is None else rows.sends(group, self._folding.representative, ALL_PAIRS**2)
            self._patterns[key] = self._priced(laid, operation, size, images, sends)
        return self._patterns[key]

    def _laid_as(self, operation: str, size: int, images: tuple[Group, ...]) -> RoutedPattern:
        members = self._ground.members[list(images[0])]
        name, pieces = algorithm(self._where, operation, size, members)
        key = operation, name, pieces, images
        if key not in self._laid:
            transfers = layout(self._where, operation, members, name, pieces)
            proxied = self._nccl and operation in _OF_MESSAGES
            self._laid[key] = self._ground.lay(transfers, images, proxied=proxied)
        return self._laid[key]

    def _priced(
        self, laid: RoutedPattern, operation: str, size: int, images: tuple[Group, ...], sends: Sends | None
    ) -> CommPattern:
        ground, group = self._ground, images[0]
        actual, bytes_ = laid, size
        if sends is not None:
            actual, bytes_ = ground.lay(uneven(len(group), *sends[:3]), images, proxied=self._nccl), 1
        if not self._nccl:
            return by_wire(actual, ground, bytes_)
        if operation in ("gather", "scatter") or (sends is not None and sends.one_each()):
            return by_messages(actual, ground, bytes_, between=self._between(group))
        asked = cast(Operation, "broadcast" if operation == "reduce" else operation)
        if sends is not None:
            size = max(sends.most, 1)
        return patterned(actual, ground, bytes_, *cost(laid, ground, asked, size, group))

    def _message(self, source: int, target: int, size: int) -> CommPattern:
        images = self._folding.message_images(source, target)
        key = "message", size, images
        if key not in self._patterns:
            if images not in self._laid:
                self._laid[images] = self._ground.lay(message(), images, proxied=self._nccl)
            laid = self._laid[images]
            if self._nccl:
                made = by_messages(laid, self._ground, size, between=self._between((source, target)))
            else:
                made = by_wire(laid, self._ground, size)
            self._patterns[key] = made
        return self._patterns[key]

    def _latency(self, group: Group) -> Time:
        """Return the time of a barrier: an all-reduce of a single number."""
        if not self._nccl:
            return 2 * (len(group) - 1).bit_length() * self._where.step
        members = self._ground.members[list(group)].tolist()
        return choice_on(self._where.topology, members, self._where.device, "all_reduce", 4)[0].time

    def _between(self, group: Group) -> bool:
        """Return whether ``group`` is in several servers."""
        servers = self._ground.server[list(group)]
        return bool((servers < 0).any() or (servers != servers[0]).any())


Order: TypeAlias = tuple[int, int]
"""World rank, and position among all that it has posted."""


class CollectiveRequest(NamedTuple):
    """The arguments of `NetworkTraffic.collective`, less ``done``."""

    operation: str
    size: int
    group: tuple[int, ...]
    splits: Mapping[int, tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class PendingComm:
    """Communication that all members have reached, or decision of a policy at the same instant.

    Attributes:
        order: its rank among those that begin at the same instant.
        request: the collective, or (source, target, bytes) of a message; None if it crosses no network.
        on_start: called when it begins.
        on_end: called when the network is through with ``request``.
    """

    order: Order
    request: CollectiveRequest | tuple[int, int, int] | None
    on_start: Callable[[], None]
    on_end: Callable[[], None] = lambda: None


class CommLaunches:
    """Queue of communications by the instant at which they begin; see Note [Starts of one instant].

    Args:
        world: the virtual clock.
        traffic: the network that carries them.
    """

    def __init__(self, world: VirtualWorld, traffic: NetworkTraffic) -> None:
        self.world = world
        self._traffic = traffic
        self._due: dict[Time, list[PendingComm]] = {}

    def at(self, when: Time, comm: PendingComm) -> None:
        """Begin ``comm`` at ``when``."""
        due = self._due.get(when)
        if due is None:
            self._due[when] = [comm]
            self.world.schedule(when, START, self._begin, when)
        else:
            due.append(comm)

    def _begin(self, when: Time) -> None:
        transfers: list[tuple[int, int, int]] = []
        done: list[Callable[[], None]] = []
        for comm in sorted(self._due.pop(when), key=attrgetter("order")):
            comm.on_start()
            request = comm.request
            if isinstance(request, CollectiveRequest):
                self._traffic.collective(*request, comm.on_end)
            elif request is not None and request[0] == request[1]:
                self.world.schedule(when, TIMER, comm.on_end)  # It crosses no network.
            elif request is not None:
                transfers.append(request)
                done.append(comm.on_end)
        if transfers:
            self._traffic.messages(transfers, done)
