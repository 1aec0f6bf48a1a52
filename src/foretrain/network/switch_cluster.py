"""Cluster in its simple form: equal workers around one switch that is never the bottleneck.

Also the path of a chunk as a pipeline of hops, and the constants that simulated and real parameter servers share. A job
with a topology is a `foretrain.network.deployment.Deployment`, whose collectives the fluid simulation times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from foretrain.errors import ConfigError, unknown
from foretrain.network.host_cpu import HostCpu
from foretrain.schedule import CostModel
from foretrain.tasks import Op
from foretrain.units import MICROSECOND, Time, format_rate, format_time, moving, per_byte


@dataclass(frozen=True, slots=True)
class Hop:
    """First-in-first-out pipe on a route.

    Attributes:
        pipe: which pipe; hops with the same name queue behind each other.
        cost: time of one byte, in the fixed point of `units.per_byte`.
        overhead: θ, time of one operation whatever its size. It occupies the pipe.
        floor: time that an operation keeps the pipe at least, however small it is. Unlike θ it is hidden behind the
            bytes of larger ones: what small collectives cost over sockets, which must make all their rounds.
        latency: time from leaving the pipe to arriving. It occupies nothing, so that a window can hide it.
    """

    pipe: str
    cost: int
    overhead: Time = 0
    latency: Time = 0
    floor: Time = 0

    def occupancy(self, size: int) -> Time:
        """Return how long ``size`` bytes keep the pipe busy."""
        return max(self.floor, self.overhead + moving(size, self.cost))


Route: TypeAlias = tuple[Hop, ...]
"""Links that a message crosses, in order."""


class Shards(NamedTuple):
    """Links of several servers: their number, and what a byte of every worker costs one, as of `units.per_byte`."""

    number: int
    push: int
    pull: int


def route_cost(route: Route) -> CostModel:
    """Return the cost of crossing ``route``: κ and θ of the slowest pipe per byte, and the delay of all the others."""
    totals: dict[str, tuple[int, Time]] = {}
    for hop in route:
        per_byte, overhead = totals.get(hop.pipe, (0, 0))
        totals[hop.pipe] = (per_byte + hop.cost, overhead + hop.overhead)
    dearest = max(totals, key=totals.__getitem__)
    others = [total for pipe, total in totals.items() if pipe != dearest]
    return CostModel(
        overhead=totals[dearest][1],
        per_byte=totals[dearest][0],
        latency=sum(hop.latency for hop in route) + sum(overhead for _, overhead in others),
        elsewhere=sum(per_byte for per_byte, _ in others),
        floor=sum(hop.floor for hop in route if hop.pipe == dearest),
    )


def served_cost(route: Route) -> CostModel:
    """Return the cost over a parameter server, which answers while more is pushed: the last hops are push and pull.

    Whichever direction is the dearer sets the pace; an operation is done when the acknowledgement of its push is back.
    Where both directions share a wire, a byte that is pushed while another is pulled takes twice as long.
    """
    *local, push, pull = route
    if push.pipe == pull.pipe:
        pace = replace(push, cost=push.cost + pull.cost, overhead=push.overhead + pull.overhead)
    else:
        pace = max(push, pull, key=lambda hop: (hop.cost, hop.overhead))
    return route_cost((*local, replace(pace, latency=push.latency + pull.latency)))


WINDOW: Final = 2 << 20
"""Bytes of sums handed to a socket and not acknowledged at which a server hands over no more.

What is handed over cannot be overtaken by what is more urgent. Two mebibytes are a few percent of a model, and more
than any round trip of a local network needs.
"""


MESSAGE: Final = 512 << 10
"""Bytes of a message with gradients or sums, at most. They are summed, and answered, message by message."""


Exchange: TypeAlias = Literal["all_reduce", "ps", "ps_colocated"]
"""Exchange of gradients: ring all-reduce, or a parameter server on hosts of its own or beside the workers."""

DEFAULT_LATENCY: Time = 10 * MICROSECOND
"""One way through switch and stack; a data-centre TCP round trip is 20–50 µs."""
DEFAULT_OVERHEAD: Time = 50 * MICROSECOND
"""θ per operation: launch, hand-off and protocol of one collective or one message. NCCL needs 20–50 µs, gloo 250+."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """``workers`` hosts of ``gpus`` GPUs each.

    The GPUs of one host first reduce among themselves (at ``local``), then the hosts exchange: the hierarchy that
    ByteScheduler, BytePS and NCCL's trees use, so that N in every formula is the number of hosts.

    Attributes:
        workers: N, hosts that train.
        gpus: GPUs per host.
        device: what a GPU is, a preset of `foretrain.device`; None where a recorded workload brings its times along.
        up: a host's sending rate, bytes/s.
        down: its receiving rate, bytes/s.
        latency: one way between two hosts, ps.
        overhead: θ, cost of one operation whatever its size, ps.
        exchange: all-reduce or parameter server.
        servers: k, dedicated server hosts (with ``exchange="ps"`` only).
        server_rate: sending and receiving rate of a server, bytes/s; a worker's where None.
        local: all-reduce bus bandwidth among the GPUs of one host, bytes/s; free where None.
        floor: least time an operation takes on the wire, however small it is, ps; see `Hop`.
        message: bytes in which a parameter server sums, and answers, at most. foretrain's own cuts whatever it is given
            into these; MXNet's, which the papers measured, did not: what is pushed whole comes back whole.
        cpu: the cores that a parameter server's messages queue for; unlimited where None. T* is without it.
        sharded: whether a message goes over the link of the one server that has its bytes. Otherwise all servers carry
            a share of each, as if there were always enough messages to keep all of them busy. T* is without it.
    """

    workers: int
    gpus: int = 1
    device: str | None = None
    up: float = 1.25e9
    down: float = 1.25e9
    latency: Time = DEFAULT_LATENCY
    overhead: Time = DEFAULT_OVERHEAD
    exchange: Exchange = "all_reduce"
    servers: int = 0
    server_rate: float | None = None
    local: float | None = None
    floor: Time = 0
    message: int = MESSAGE
    cpu: HostCpu | None = None
    sharded: bool = False

    def __post_init__(self) -> None:
        for field in ("workers", "gpus"):
            _check_count(field, getattr(self, field), 1)
        _check_count("servers", self.servers, 0)
        _check_count("message", self.message, 1)
        for field in ("up", "down", "server_rate", "local"):
            rate = getattr(self, field)
            number = isinstance(rate, float | int) and not isinstance(rate, bool)
            if rate is not None and not (number and 0 < rate < math.inf):
                raise ConfigError(field, rate, "is not a positive finite rate", "write e.g. '100Gbps'")
        for field in ("latency", "overhead", "floor"):
            _check_count(field, getattr(self, field), 0)
        if self.exchange not in get_args(Exchange):
            raise unknown("exchange", self.exchange, get_args(Exchange))
        if self.exchange == "all_reduce" and self.cpu is not None:
            raise ConfigError("cpu", self.cpu, "is of a parameter server's messages", "leave it out for an all-reduce")
        if self.exchange == "ps" and not self.servers:
            raise ConfigError(
                "servers", 0, "leaves the parameter server without a host", "write e.g. ps=2, or ps=colocated"
            )
        if self.exchange != "ps" and (self.servers or self.server_rate):
            value = self.servers or self.server_rate
            raise ConfigError(
                "servers", value, f"contradicts exchange '{self.exchange}'", "dedicated servers need 'ps'"
            )
        if self.workers * self.gpus == 1 and self.exchange != "ps":
            raise ConfigError(
                "workers", 1, "with 1 GPU has nobody to exchange gradients with", "write at least 2 workers"
            )

    @property
    def total_gpus(self) -> int:
        """Return the GPUs of the whole job."""
        return self.workers * self.gpus

    @property
    def slowdown(self) -> float:
        """Return 1: no worker is slower than its kind."""
        return 1.0

    @property
    def cost(self) -> CostModel:
        """Return the cost of one exchange: κ, θ and latency."""
        route = self.routes()["all_reduce"]
        return route_cost(route) if self.exchange == "all_reduce" else served_cost(route)

    @property
    def shards(self) -> Shards | None:
        """Return the servers' links; None where each carries a share of every message."""
        if not self.sharded:
            return None
        if self.exchange == "ps" and self.servers > 1:
            push, pull = self.server_rate or self.down, self.server_rate or self.up
            return Shards(self.servers, per_byte(push, self.workers), per_byte(pull, self.workers))
        if self.exchange == "ps_colocated" and self.workers > 1:
            # Its own worker's bytes do not cross a link.
            return Shards(self.workers, per_byte(self.down, self.workers - 1), per_byte(self.up, self.workers - 1))
        return None

    def without_latency(self) -> Cluster:
        """Return a copy in which an operation costs nothing besides its bytes."""
        return replace(self, latency=0, overhead=0, floor=0, cpu=None)

    def scaled(self, factor: float) -> Cluster:
        """Return a copy with the hosts' links ``factor`` times as fast."""
        server_rate = self.server_rate and self.server_rate * factor
        return replace(self, up=self.up * factor, down=self.down * factor, server_rate=server_rate)

    def routes(self) -> dict[Op, Route]:
        """Return the hops of every operation.

        A ring all-reduce moves 2(N−1)/N of every byte through each host in both directions at once; dedicated servers
        are reached by 1/k of every byte from each of N workers; beside the workers, k = N and both directions carry
        pushes and pulls.
        """
        if self.exchange == "all_reduce":
            wire = self._ring()
        elif self.exchange == "ps":
            wire = self._dedicated()
        else:
            wire = self._colocated()
        local = self._local()
        return {op: local.get(op, ()) + wire.get(op, ()) for op in ("all_reduce", "reduce_scatter", "all_gather")}

    def _local(self) -> dict[Op, Route]:
        if self.gpus == 1 or (self.local is None and self.workers > 1):
            return {}
        half = Fraction(self.gpus - 1, self.gpus)
        rate = self.local or math.inf
        overhead = self.overhead if self.workers == 1 else 0
        return _halves("local", 0 if rate == math.inf else per_byte(rate, half), overhead, 0)

    def _ring(self) -> dict[Op, Route]:
        if self.workers == 1:
            return {}
        cost = per_byte(min(self.up, self.down), Fraction(self.workers - 1, self.workers))
        return _halves("wire", cost, self.overhead, (self.workers - 1) * self.latency, self.floor)

    def _colocated(self) -> dict[Op, Route]:
        if self.workers == 1:
            return {}
        # Every host sends and receives (N−1)/N of each byte when pushing and again when pulling: same wire, twice.
        cost = per_byte(min(self.up, self.down), Fraction(self.workers - 1, self.workers))
        push = Hop("wire", cost, self.overhead, self.latency, self.floor)
        return {"all_reduce": (push, push), "reduce_scatter": (push,), "all_gather": (push,)}

    def _dedicated(self) -> dict[Op, Route]:
        share = Fraction(self.workers, self.servers)
        push_cost = max(per_byte(self.up), per_byte(self.server_rate or self.down, share))
        pull_cost = max(per_byte(self.down), per_byte(self.server_rate or self.up, share))
        push = Hop("up", push_cost, self.overhead, self.latency, self.floor)
        pull = Hop("down", pull_cost, self.overhead, self.latency, self.floor)
        return {"all_reduce": (push, pull), "reduce_scatter": (push,), "all_gather": (pull,)}

    def __str__(self) -> str:
        rate = format_rate(self.up) if self.up == self.down else f"{format_rate(self.up)} / {format_rate(self.down)}"
        how = {
            "all_reduce": "ring all-reduce",
            "ps": f"{self.servers} dedicated parameter server{'s' if self.servers > 1 else ''}",
            "ps_colocated": "parameter server beside the workers",
        }[self.exchange]
        floor = f", floor {format_time(self.floor)}" if self.floor else ""
        shared = " together" if self.cpu is not None and self.cpu.together else ""
        cores = f", cores for messages: {self.cpu.cores}{shared}" if self.cpu is not None else ""
        hosts = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        gpus = f" × {self.gpus} {self.device or 'GPUs'}" if self.device or self.gpus > 1 else ""
        return (
            f"{hosts}{gpus} @ {rate}, {how}, latency {format_time(self.latency)}, "
            f"θ {format_time(self.overhead)}{floor}{cores}"
        )


def _halves(pipe: str, half: int, overhead: Time, latency: Time, floor: Time = 0) -> dict[Op, Route]:
    """Return the routes of a collective whose halves, reduce-scatter and all-gather, cost the same."""
    one = (Hop(pipe, half, overhead, latency, floor),)
    both = (Hop(pipe, 2 * half, overhead, 2 * latency, floor),)
    return {"all_reduce": both, "reduce_scatter": one, "all_gather": one}


def _check_count(field: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(field, value, f"is not a whole number of at least {least}", f"write e.g. {max(least, 4)}")
