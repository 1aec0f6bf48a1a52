"""Arguments of `attach`: the transport of gradients and timeouts.

    AllReduce          collectives among the ranks, in an order that a coordinator decides or that is fixed
    ParameterServer    pushes and pulls over servers, see ``foretrain server``
    Timeouts           limits of a rank's silence, and of work without progress

``foretrain run`` builds the same values from its flags.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import msgspec

from foretrain.comm.ps.consistency import consistency
from foretrain.errors import ConfigError, unknown
from foretrain.units import parse_time, to_seconds

if TYPE_CHECKING:
    from foretrain.planner import ScheduleRequest

CollectiveOrder: TypeAlias = Literal["coordinator", "replay"]
CollectiveBackend: TypeAlias = Literal["gloo", "nccl", "ring", "mpi"]
UpdateLocation: TypeAlias = Literal["workers", "servers"]
Compression: TypeAlias = Literal["fp16", "bf16"]

SERVERS = "FORETRAIN_SERVERS"
"""Environment variable with the addresses of a job's servers."""
SCHEDULE, TRANSPORT = "FORETRAIN_SCHEDULE", "FORETRAIN_TRANSPORT"
"""Environment variables of ``foretrain run``: what `foretrain.Session` takes where a script says nothing."""


def check_flag(name: str, value: object) -> None:
    """Raise ConfigError for a flag that is neither True nor False."""
    if not isinstance(value, bool):
        raise ConfigError(name, value, "is neither True nor False", "write one of them")


def check_watching(warmup: object, timeouts: object, **flags: object) -> None:
    """Raise ConfigError for a number of steps to observe, timeouts or flags that are none."""
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 1:
        raise ConfigError("warmup", warmup, "is not a number of steps", "watch at least 1")
    for name, flag in flags.items():
        check_flag(name, flag)
    if not isinstance(timeouts, Timeouts):
        raise ConfigError("timeouts", timeouts, "is no Timeouts", "write e.g. Timeouts(peer='30s')")


def _seconds(name: str, value: float | str) -> float:
    seconds = to_seconds(parse_time(value, name)) if isinstance(value, str) else value
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds > 0:
        raise ConfigError(name, value, "is not a positive time", "write e.g. 60 or '60s'")
    return float(seconds)


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sum gradients by collectives among the ranks.

    Attributes:
        order: "coordinator": rank 0 orders what is ready on all ranks. "replay": every step repeats one fixed order,
            without messages between the ranks.
        check_every: steps between two comparisons of the collectives that all ranks have issued; 0 never compares.
        backend: what sums: "gloo" or "nccl", the process group's own; "ring", foretrain's, over TCP; "mpi", mpi4py's,
            on ranks that mpirun started. None is the process group's, or "ring" where PyTorch has none.

    Raises ConfigError for a value that is not one of these.
    """

    order: CollectiveOrder = "coordinator"
    check_every: int = 50
    backend: CollectiveBackend | None = None

    def __post_init__(self) -> None:
        if self.backend is not None and self.backend not in get_args(CollectiveBackend):
            raise unknown("backend", self.backend, get_args(CollectiveBackend))
        if self.order == "replay" and self.on_host:
            problem = "replays no fixed order: that needs a process group's own collectives"
            raise ConfigError("backend", self.backend, problem, "write order='coordinator'")
        if self.order not in get_args(CollectiveOrder):
            raise unknown("order", self.order, get_args(CollectiveOrder))
        if not isinstance(self.check_every, int) or isinstance(self.check_every, bool) or self.check_every < 0:
            remedy = "write e.g. 50, or 0 for never"
            raise ConfigError("check_every", self.check_every, "is not a number of steps", remedy)

    @property
    def on_host(self) -> bool:
        """Return whether buffers on the host are summed by what is no process group of PyTorch."""
        return self.backend in ("ring", "mpi")


@dataclass(frozen=True, slots=True)
class ParameterServer:
    """Push gradients to a parameter server and pull sums, or parameters, back. Each rank decides its own order.

    Attributes:
        addresses: of the servers, by number: ``"host:port,host:port"``; None reads FORETRAIN_SERVERS, which
            ``foretrain run --servers`` sets. Servers and all ranks have the same FORETRAIN_SECRET.
        updates: where optimizers run: "workers", each rank on its own copy of the parameters, or "servers", which then
            send parameters back instead of sums. None is "workers", or "servers" where ``consistency`` needs them.
        consistency: "bsp": a step sums the gradients of all ranks. "async": the gradients of each rank are an update of
            their own, and no rank waits. "ssp(3)": as async, but no rank runs more than 3 steps ahead of the slowest.
            The latter two run optimizers on the servers.
        elastic: whether this rank goes on without ranks that are lost once steps are scheduled; servers must be
            started with ``--elastic``. The process group is not used from then on: buffers stay each rank's own.

    Raises ConfigError for a value that is not one of these, and for asynchronous updates on the workers.
    """

    addresses: str | None = None
    updates: UpdateLocation | None = None
    consistency: str = "bsp"
    elastic: bool = False

    def __post_init__(self) -> None:
        if self.updates is not None and self.updates not in get_args(UpdateLocation):
            raise unknown("updates", self.updates, get_args(UpdateLocation))
        if self.asynchronous and self.updates == "workers":
            what = "cannot be with optimizers on the workers: each would have other parameters"
            raise ConfigError("consistency", self.consistency, what, "write updates='servers', or leave it out")
        check_flag("elastic", self.elastic)
        object.__setattr__(self, "updates", "servers" if self.asynchronous else self.updates or "workers")

    @property
    def asynchronous(self) -> bool:
        """Return whether each rank's gradients are an update of their own, so that no operation waits for all ranks."""
        return consistency(self.consistency).apart

    def endpoints(self) -> tuple[tuple[str, int], ...]:
        """Return host and port of each server; raise ConfigError where none is named or one is no address."""
        named = self.addresses is not None
        source, text = ("addresses", self.addresses or "") if named else (SERVERS, os.environ.get(SERVERS, ""))
        found = []
        for each in filter(None, map(str.strip, text.split(","))):
            host, _, port = each.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
                raise ConfigError(source, each, "is no address", "write e.g. '10.0.0.5:5555'")
            found.append((host, int(port)))
        if not found:
            remedy = "start some with `foretrain server`, or the job with `foretrain run --servers 1`"
            raise ConfigError(source, text, "names no server", remedy)
        return tuple(found)


Transport: TypeAlias = AllReduce | ParameterServer
TransportKind: TypeAlias = Literal["all_reduce", "ps"]
"""Short form of a transport with its defaults."""


def as_transport(value: Transport | TransportKind | str) -> Transport:
    """Return the transport that a short form stands for; raise ConfigError for anything else."""
    if isinstance(value, AllReduce | ParameterServer):
        return value
    if value not in get_args(TransportKind):
        raise unknown("transport", value, get_args(TransportKind))
    return AllReduce() if value == "all_reduce" else ParameterServer()


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Times that a job waits, each in seconds or written as "30s".

    Attributes:
        peer: after which a silent rank counts as lost.
        stall: after which a collective, or work without progress, counts as stuck although all ranks live.

    Raises ConfigError for what is not a positive time.
    """

    peer: float | str = 60.0
    stall: float | str = 1800.0

    def __post_init__(self) -> None:
        for name in ("peer", "stall"):
            object.__setattr__(self, name, _seconds(f"timeouts.{name}", getattr(self, name)))


class AttachOptions(msgspec.Struct, frozen=True):
    """Arguments of `attach`, checked.

    Attributes:
        servers: host and port of each server; empty under all-reduce.
    """

    schedule: ScheduleRequest
    compression: str | None = None
    transport: Transport = AllReduce()
    timeouts: Timeouts = Timeouts()
    servers: tuple[tuple[str, int], ...] = ()
    tune: bool = False
    broadcast_buffers: bool = True
    warmup: int = 3
    interface: str | None = None
    trace: bool = False

    @property
    def server(self) -> ParameterServer | None:
        """Return the transport if it is a parameter server."""
        return self.transport if isinstance(self.transport, ParameterServer) else None

    @property
    def asynchronous(self) -> bool:
        """Return whether ranks proceed independently, so that no operation waits for all of them."""
        return self.server is not None and self.server.asynchronous

    @property
    def elastic(self) -> bool:
        """Return whether ranks go on without one that is lost."""
        return self.server is not None and self.server.elastic

    @property
    def updates(self) -> UpdateLocation:
        """Return the place where optimizers run."""
        return "servers" if self.server is not None and self.server.updates == "servers" else "workers"

    @property
    def peer_timeout(self) -> float:
        """Return the seconds after which a silent rank counts as lost."""
        return float(self.timeouts.peer)

    @property
    def stall_timeout(self) -> float:
        """Return the seconds after which work without progress counts as stuck."""
        return float(self.timeouts.stall)


def refuse_torch_only(transport: Transport) -> None:
    """Raise ConfigError for a ``transport`` that needs process groups or optimizers of PyTorch."""
    if isinstance(transport, AllReduce):
        if transport.order == "replay":
            remedy = "write order='coordinator', or use foretrain.attach"
            raise ConfigError("transport.order", "replay", "needs a process group of PyTorch", remedy)
        if transport.backend is not None and not transport.on_host:
            remedy = "write backend='ring' or 'mpi', or use foretrain.attach"
            raise ConfigError("transport.backend", transport.backend, "needs a process group of PyTorch", remedy)
        return
    if transport.updates == "servers":
        remedy = "write updates='workers' and consistency='bsp', or use foretrain.attach"
        raise ConfigError("transport.updates", "servers", "runs PyTorch's optimizers", remedy)
    if transport.elastic:
        raise ConfigError(
            "transport.elastic", True, "goes on without ranks only under foretrain.attach", "leave it out"
        )
