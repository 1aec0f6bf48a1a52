"""Arguments of `attach`: the transport of gradients and timeouts.

    AllReduce          collectives among the ranks, in an order that a coordinator decides or that is fixed
    BoundedLoss        the same over UDP, over when enough has come, for a network that loses packets
    ParameterServer    pushes and pulls over servers, see ``foretrain server``
    Timeouts           limits of a rank's silence, and of work without progress

``foretrain run`` builds the same values from its flags.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import msgspec

from foretrain.comm.ps.consistency import consistency
from foretrain.errors import ConfigError, unknown
from foretrain.units import parse_share, parse_time, to_seconds

if TYPE_CHECKING:
    from foretrain.planner import ScheduleRequest

CollectiveOrder: TypeAlias = Literal["coordinator", "replay"]
CollectiveBackend: TypeAlias = Literal["gloo", "nccl", "ring", "mpi"]
UpdateLocation: TypeAlias = Literal["workers", "servers"]
Compression: TypeAlias = Literal["fp16", "bf16"]

CHECK_EVERY = 50
"""Steps between two comparisons of what all ranks have issued, by default."""
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
    check_every: int = CHECK_EVERY
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


BoundedAlgorithm: TypeAlias = Literal["transpose", "ring", "halving_doubling", "ps"]
Droppable: TypeAlias = Literal["packet", "layer", "magnitude"]
Missing: TypeAlias = Literal["zero", "rescale", "feedback"]
Ending: TypeAlias = Literal["share", "early_close", "adaptive_timeout"]


@dataclass(frozen=True, slots=True)
class BoundedLoss:
    """Sum gradients by collectives over UDP that are over when enough has come (DLCP, arXiv 2008.08445).

    All ranks get the same sums; with ``updates="servers"`` they get a server's parameters in their place, of which each
    rank may lose some. Where a peer cannot be reached over UDP, its packets go over TCP from a second later on.

    Attributes:
        tolerance: p, the share of each rank's contribution that a sum may lose. 0 loses nothing. "auto" begins with 0,
            and raises it while training goes on as without losses; see `foretrain.comm.bounded.guard`.
        over: "transpose": each rank sums one block, and sends the sum to all. "ring", "halving_doubling": fewer and
            larger messages; the latter needs a power of two of ranks. A block that is lost on its way takes with it
            what was added before, so each of their hops may lose less; see `foretrain.comm.bounded.plans`. "ps": a
            server, a process beside rank 0, sums everything: all of it crosses that host's link, N times.
        droppable: which packets switches may drop rather than mark: "packet": all; "layer": those of the front half of
            the layers; "magnitude": the half of these whose values were smaller on average in the step before.
        missing: "zero": what a rank's contribution to a sum loses counts as zero. "rescale": the sum of what came is
            multiplied by N over how many ranks it is from. "feedback": a rank adds what was lost of its contribution to
            its next one (error feedback). The latter two need one hop from a rank to the sum: "transpose" or "ps".
        reliable_steps: of the first so many scheduled steps nothing is lost, nor of the observed ones.
        reliable_bytes: tensors of at most so many bytes are never lost, nor biases and norms of any size: parameters
            of at most one dimension, and what `foretrain.Session.declare` names.
        ending: when a rank's contribution is over. "share": when 1 − p of it has come. "early_close": when all has come
            in the time that it took before, or 1 − p later on, or the deadline has passed (LTP, arXiv 2305.04279).
            "adaptive_timeout": by timeouts alone, which need ``tolerance`` above 0 (OptiReduce, arXiv 2310.06993).
            The latter two may lose more than p at a deadline, and need one hop.
        hadamard: whether contributions are summed after a randomized Hadamard transform, so that a packet that is lost
            is a small error of all values and not the loss of some (OptiReduce). Sums are rounded otherwise then.
        updates: where optimizers run: "workers", each rank on its own copy of the parameters, or "servers", for
            ``over="ps"`` and PyTorch: the server updates, and sends parameters back instead of sums, of which a rank
            may lose as much as of its contribution: what is lost keeps its previous value there until the next pull.

    Raises ConfigError for a value that is not one of these.
    """

    tolerance: float | Literal["auto"] = 0.01
    over: BoundedAlgorithm = "transpose"
    droppable: Droppable = "magnitude"
    missing: Missing = "zero"
    reliable_steps: int = 10
    reliable_bytes: int = 16 << 10
    ending: Ending = "share"
    hadamard: bool = False
    updates: UpdateLocation = "workers"

    def __post_init__(self) -> None:
        if self.over not in get_args(BoundedAlgorithm):
            raise unknown("over", self.over, get_args(BoundedAlgorithm))
        if self.droppable not in get_args(Droppable):
            raise unknown("droppable", self.droppable, get_args(Droppable))
        if self.missing not in get_args(Missing):
            raise unknown("missing", self.missing, get_args(Missing))
        if self.ending not in get_args(Ending):
            raise unknown("ending", self.ending, get_args(Ending))
        check_flag("hadamard", self.hadamard)
        if self.tolerance != "auto":
            object.__setattr__(self, "tolerance", _share(self.tolerance))
        for name, usual in (("missing", "zero"), ("ending", "share")):
            if (value := getattr(self, name)) != usual and self.over not in ("transpose", "ps"):
                problem = f"needs whole contributions, of which {self.over} knows nothing"
                raise ConfigError(name, value, problem, f"write over='transpose', or {name}={usual!r}")
            if value != usual and self.tolerance == 0:
                remedy = f"write e.g. tolerance=0.01, or {name}={usual!r}"
                raise ConfigError(name, value, "is of no use where nothing may be lost", remedy)
        if self.updates not in get_args(UpdateLocation):
            raise unknown("updates", self.updates, get_args(UpdateLocation))
        if self.updates == "servers":
            self._check_updates()
        for name in ("reliable_steps", "reliable_bytes"):
            if not isinstance(value := getattr(self, name), int) or isinstance(value, bool) or value < 0:
                raise ConfigError(name, value, "is no number", "write 0 or more")

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError if the algorithm cannot sum what so many ranks have."""
        if self.over == "halving_doubling" and ranks & (ranks - 1):
            problem = f"needs a power of two of ranks, not {ranks}"
            raise ConfigError("over", self.over, problem, "write over='transpose' or 'ring'")

    def _check_updates(self) -> None:
        """Raise ConfigError for what cannot be where a server updates."""
        remedy = "or updates='workers'"
        if self.over != "ps":
            problem = f"needs a server, and over={self.over!r} has none"
            raise ConfigError("updates", "servers", problem, f"write over='ps', {remedy}")
        if self.tolerance == "auto":
            problem = "compares sums, which ranks do not get from a server that updates"
            raise ConfigError("tolerance", "auto", problem, f"write e.g. tolerance=0.01, {remedy}")
        if self.hadamard:
            problem = "transforms sums back on the ranks, which do not get them from a server that updates"
            raise ConfigError("hadamard", True, problem, f"write hadamard=False, {remedy}")

    def __str__(self) -> str:
        """Return it as text that `as_transport` reads."""
        return f"bounded({', '.join(f'{each.name}={getattr(self, each.name)}' for each in fields(self))})"


def _share(value: object) -> float:
    """Return a share of bytes as a float, whatever type of number it was."""
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= float(value) < 1:
        remedy = "write 0 or more and less than 1, or auto; `foretrain tolerance` measures what a model tolerates"
        raise ConfigError("tolerance", value, "is no share of the bytes", remedy)
    return float(value)


def _bounded(text: str) -> BoundedLoss:
    """Return what the arguments in ``text``, "name=value, …", make; raise ConfigError for one that is wrong."""
    known: dict[str, Any] = {each.name: each.default for each in fields(BoundedLoss)}
    given: dict[str, Any] = {}
    for argument in filter(None, map(str.strip, text.split(","))):
        name, _, value = map(str.strip, argument.partition("="))
        if name not in known:
            raise unknown("transport", name, known)
        if name in given:
            raise ConfigError(f"transport.{name}", value, "is there twice", "write it once")
        value = value.strip("'\"")
        given[name] = _number(value) if isinstance(known[name], int | float) else value
    return BoundedLoss(**given)


def _number(text: str) -> bool | float | str:
    """Return the number or flag that ``text`` writes; else ``text``, which `BoundedLoss` refuses but for "auto"."""
    if text.endswith("%"):
        with contextlib.suppress(ConfigError):
            return parse_share(text)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


Collective: TypeAlias = AllReduce | BoundedLoss
Transport: TypeAlias = Collective | ParameterServer
TransportKind: TypeAlias = Literal["all_reduce", "ps", "bounded"]
"""Short form of a transport with its defaults."""


def as_transport(value: Transport | TransportKind | str) -> Transport:
    """Return the transport that a short form stands for, or text of a `BoundedLoss`: "bounded(tolerance=0.01, …)".

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, AllReduce | BoundedLoss | ParameterServer):
        return value
    if isinstance(value, str) and value.startswith("bounded(") and value.endswith(")"):
        return _bounded(value.removeprefix("bounded(").removesuffix(")"))
    if value not in get_args(TransportKind):
        raise unknown("transport", value, get_args(TransportKind))
    return {"all_reduce": AllReduce, "ps": ParameterServer, "bounded": BoundedLoss}[value]()


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
    def check_every(self) -> int:
        """Return the steps between two comparisons of what all ranks have issued; 0 never compares."""
        return self.transport.check_every if isinstance(self.transport, AllReduce) else CHECK_EVERY

    @property
    def on_host(self) -> bool:
        """Return whether buffers on the host are summed by what is no process group of PyTorch."""
        return isinstance(self.transport, BoundedLoss) or (
            isinstance(self.transport, AllReduce) and self.transport.on_host
        )

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
        return "workers" if isinstance(self.transport, AllReduce) else self.transport.updates or "workers"

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
        field, value, remedy = "updates", "servers", "write updates='workers', or use foretrain.attach"
        if isinstance(transport, ParameterServer) and transport.asynchronous:
            field, value = "consistency", transport.consistency
            remedy = "write updates='workers' and consistency='bsp', or use foretrain.attach"
        raise ConfigError(f"transport.{field}", value, "runs PyTorch's optimizers on the servers", remedy)
    if isinstance(transport, ParameterServer) and transport.elastic:
        raise ConfigError(
            "transport.elastic", True, "goes on without ranks only under foretrain.attach", "leave it out"
        )
