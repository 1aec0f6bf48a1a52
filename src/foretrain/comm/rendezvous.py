"""Rendezvous of all ranks before the first step: their secret, and links to rank 0."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from foretrain.comm.control_plane import ControlPlane
from foretrain.comm.coordinator.addresses import decoded, encoded, is_loopback, local_address, resolved, split
from foretrain.comm.coordinator.handshake import NONCE_SIZE, SECRET, SECRET_SIZE, Listener, connect, proof
from foretrain.comm.coordinator.link import Link, LinkError
from foretrain.comm.key_agreement import agreed_secret
from foretrain.errors import ConfigError

if TYPE_CHECKING:
    from foretrain.comm.bounded.collectives import BoundedCollectives
    from foretrain.comm.bounded.server import SummingServer
    from foretrain.comm.collectives.executor import Collectives
    from foretrain.comm.options import BoundedLoss, Transport

logger = logging.getLogger("foretrain")

_SAME_SECRET = (
    f"give all nodes the same {SECRET} (or foretrain run --secret-file), made with: openssl rand -hex {SECRET_SIZE}"
)
_ONE_SECRET = f"{_SAME_SECRET}; or give it to none, and the ranks agree on one"
_UNASSIGNED = ("192.0.2.1", 9), ("2001:db8::1", 9)
"""Addresses that no host has (RFC 5737, RFC 3849): their routes are the default routes."""
ADDRESS = "FORETRAIN_ADDRESS"
"""Environment variable with host and port of rank 0, where a session's ranks meet."""
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""Variables of torchrun, Open MPI, MPICH and srun."""
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100
_random = secrets.SystemRandom()
_CONNECT_TIMEOUT = 20.0
"""Seconds the ranks have to connect to the coordinator."""
_UPDATING_SERVER = "foretrain.plugins.torch.bounded.server"
"""Module of a server that updates: only there is a framework."""
_OWN = ("interface", "trace")
"""Settings in which ranks may differ."""


class Membership(NamedTuple):
    """Rank of a process, number of ranks, and the address where rank 0 waits for the others."""

    rank: int
    ranks: int
    address: tuple[str, int]


def membership(rank: int | None, ranks: int | None, address: str | None) -> Membership:
    """Return what a caller says, completed by what its launcher has put into the environment.

    Raises:
        ConfigError: something is missing, or makes no sense.
    """
    names = next((pair for pair in _LAUNCHERS if pair[0] in os.environ), ("RANK", "WORLD_SIZE"))
    own, count = (
        _whole(name, os.environ.get(name)) if value is None else value
        for name, value in zip(names, (rank, ranks), strict=True)
    )
    if not 0 <= own < count:
        raise ConfigError("rank", own, f"is none of {count} ranks", "write a number from 0 to ranks − 1")
    text = address or os.environ.get(ADDRESS, "")
    if not text and (port := os.environ.get("MASTER_PORT", "")).isdigit():
        # The port itself may be that of PyTorch's store.
        text = f"{os.environ.get('MASTER_ADDR', '')}:{int(port) + 1}"
    host, port = split(text)
    if count > 1 and not (host and port.isdigit() and 0 < int(port) < 1 << 16):
        remedy = f"give all ranks the same address of rank 0: address='10.0.0.5:29501', or {ADDRESS}"
        raise ConfigError("address", text, "is no host and port", remedy)
    return Membership(own, count, (host, int(port)) if count > 1 else ("", 0))


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of ``host`` that is free now, and that the system gives to nobody who asks for any free one."""
    try:
        low = int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        low = 32768
    for _ in range(_TRIES):
        port = _random.randrange(min(10_000, low // 2), low)
        with suppress(OSError), socket.create_server((host, port)):
            return port
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]


def _whole(name: str, text: str | None) -> int:
    if text is None or not text.isdigit():
        remedy = "start the script with foretrain run, torchrun or mpirun, or hand in rank=… and ranks=…"
        raise ConfigError(name, text, "is no number", remedy)
    return int(text)


def join(member: Membership, timeout: float) -> dict[int, Link]:
    """Return authenticated links between rank 0 and each other rank. Collective.

    Raises:
        ConfigError: there is no common secret, or rank 0 cannot listen on its address.
        LinkError: a rank is missing after ``timeout`` seconds, or has another secret.
    """
    if member.ranks == 1:
        return {}
    if (secret := _secret()) is None:
        raise ConfigError(SECRET, "", "is not set, and ranks refuse each other without it", _SAME_SECRET)
    host, port = member.address
    if member.rank:
        return {0: connect(member.address, secret, member.rank, timeout)}
    try:
        listener = Listener(resolved(host)[1][0], secret, port=port, expected=range(1, member.ranks))
    except (ConfigError, OSError) as error:
        problem = error.problem if isinstance(error, ConfigError) else f"is not known ({error})"
        raise ConfigError(
            "address", f"{host}:{port}", problem, f"name another address of this host: {ADDRESS}"
        ) from None
    with listener:
        links = listener.accept(timeout)
    if len(links) < member.ranks - 1:
        missing = [rank for rank in range(1, member.ranks) if rank not in links]
        for link in links.values():
            link.close()
        raise LinkError(f"rank {missing[0]} has not connected to {host}:{port} within {timeout:g} s", missing[0])
    return links


def agree_on_settings(control: ControlPlane, options: Mapping[str, object]) -> None:
    """Raise Disagreement, on all ranks, if ``options`` differ."""
    settings = {key: value for key, value in options.items() if key not in _OWN}
    control.must_agree("setting", list(settings), [hash_of(f"{key}={value}") for key, value in settings.items()])


def hash_of(text: str) -> int:
    """Return 64 bits of a hash of ``text``, by which ranks compare."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def connect_ranks(
    control: ControlPlane, interface: str | None, towards: tuple[str, int] | None = None, *, lossy: bool = False
) -> dict[int, Link] | None:
    """Return authenticated links between rank 0 and each other rank; None, on all ranks, if one cannot connect.

    Rank 0 listens on one address, of ``interface`` or on the way ``towards`` an address. The secret is the launcher's,
    or one on which the ranks agree. ``lossy`` links expect losses.

    Raises:
        ConfigError: on all ranks, if a secret is malformed or differs between ranks, or rank 0 cannot listen.
    """
    links: dict[int, Link] = {}
    listener = problem = None
    several = several_hosts(control)
    secret = common_secret(control) or agreed_secret(control)
    if control.rank == 0:
        try:
            listener = _listen(own_address(interface, several, towards), secret, control.ranks)
        except ConfigError as error:
            problem = error
    try:
        control.raise_on_all(problem)
        if listener is not None:
            host, port = listener.address
            control.share(f"{host} {port}".encode())
        else:
            host, port = control.share(None).decode().split(" ")
        try:
            if listener is not None:
                links = listener.accept(_CONNECT_TIMEOUT)
            else:
                links[0] = connect((host, int(port)), secret, control.rank, _CONNECT_TIMEOUT)
            complete = listener is None or len(links) == control.ranks - 1
        except LinkError as error:
            logger.warning("rank %d cannot connect: %s", control.rank, error)
            complete = False
        if control.all_true(complete):
            for link in links.values():
                if lossy:
                    link.expect_losses()
            return links
    finally:
        if listener is not None:
            listener.close()
    for link in links.values():
        link.close()
    return None


def connect_collectives(
    control: ControlPlane,
    transport: Transport,
    interface: str | None,
    timeout: float,
    towards: tuple[str, int] | None = None,
) -> Collectives:
    """Return collectives on buffers on the host: MPI's, with bounded loss, or a ring over links. Collective.

    Args:
        control: agreements among the ranks.
        transport: a `BoundedLoss`, or an `AllReduce` by MPI or a ring.
        interface: where this rank listens; None is the one ``towards`` rank 0's address.
        timeout: seconds until all ranks are connected.
        towards: an address of rank 0.

    Raises:
        ConfigError: MPI has other ranks, or this rank cannot listen.
        LinkError: another rank cannot be reached.
    """
    from foretrain.comm.options import AllReduce, BoundedLoss

    if isinstance(transport, AllReduce) and transport.backend == "mpi":
        from foretrain.comm.collectives.mpi import MpiCollectives

        return MpiCollectives(control.rank, control.ranks)
    from foretrain.comm.collectives import RingCollectives, connect_peers

    if control.ranks == 1:
        return RingCollectives({}, 0, 1)

    def exchange(address: tuple[str, int]) -> list[tuple[str, int]]:
        return [decoded(row) for row in control.gather(encoded(*address))]

    host = own_address(interface, several_hosts(control), towards)
    secret = common_secret(control) or agreed_secret(control)
    if isinstance(transport, BoundedLoss):
        return _connect_bounded(control, transport, host, secret, timeout)
    return RingCollectives(
        connect_peers(host, exchange, secret, control.rank, control.ranks, timeout), control.rank, control.ranks
    )


def _connect_bounded(
    control: ControlPlane, transport: BoundedLoss, host: str, secret: bytes, timeout: float
) -> BoundedCollectives:
    from foretrain.comm.bounded.collectives import BoundedCollectives, connect_engine
    from foretrain.comm.bounded.engine import EngineOptions
    from foretrain.comm.bounded.server import Opening, ServedCollectives, SummingServer
    from foretrain.comm.bounded.server_state import ServerState
    from foretrain.comm.collectives import connect_peers

    transport.check_ranks(control.ranks)
    # Packets of another set of sockets, of this job or of one before, have other keys.
    fresh = proof(secret, "foretrain bounded", control.share(secrets.token_bytes(NONCE_SIZE)))
    rank, ranks, gather, server = control.rank, control.ranks, control.gather, None
    rescale, ending = transport.missing == "rescale", transport.ending
    opening = host, ranks, fresh.hex(), rescale, ending
    updates = transport.updates == "servers"
    module = {"module": _UPDATING_SERVER} if updates else {}
    if transport.over == "ps":
        server = (
            SummingServer(Opening(*opening, transport.droppable, timeout, os.getpid()), **module) if rank == 0 else None
        )
        gather = partial(_gather_with, server, control)
    try:
        count = ranks + (transport.over == "ps")
        engine = connect_engine(host, gather, fresh, rank, count, EngineOptions(ending=ending, timeout=timeout))
        try:
            meet = lambda address: [decoded(row) for row in gather(encoded(*address))]  # noqa: E731
            links = connect_peers(host, meet, fresh, rank, count, timeout, [ranks]) if updates else {}
        except BaseException:
            engine.close()
            raise
    except BaseException:
        if server is not None:
            server.close()
        raise
    options: dict[str, Any] = {"over": transport.over, "droppable": transport.droppable, "rescale": rescale}
    options |= {"feedback": transport.missing == "feedback", "hadamard": transport.hadamard}
    made = (
        ServedCollectives(server, engine, rank, ranks, **options)
        if server is not None
        else BoundedCollectives(engine, rank, ranks, **options)
    )
    if updates:
        made.state = ServerState(links[ranks])
    return made


def _gather_with(server: SummingServer | None, control: ControlPlane, values: Sequence[int]) -> list[list[int]]:
    """Return everyone's values, by rank, and the server's as the last; rank 0 has the ``server``."""
    rows = [list(row) for row in control.gather(values)]
    own = server.row() if server is not None else []
    rows.append(list(control.gather(own or [0] * len(rows[0]))[0]))
    if not any(rows[-1]):
        why = server.how_it_ended() if server is not None else "the output of rank 0 says why"
        raise LinkError(f"the server that sums, a process of rank 0, has not started: {why}")
    if server is not None:
        server.tell(rows)
    return rows


def several_hosts(control: ControlPlane) -> bool:
    """Return whether the ranks run on more than one host. Collective."""
    return len({row[0] for row in control.gather([hash_of(platform.node())])}) > 1


def own_address(interface: str | None, several: bool, towards: tuple[str, int] | None = None) -> str:
    """Return the address that this rank listens on: never loopback with ``several`` hosts, even if it has that name.

    It is that of ``interface``, or of the one ``towards`` rank 0's address; None is MASTER_ADDR's.
    """
    host, port = os.environ.get("MASTER_ADDR", "").strip("[]"), os.environ.get("MASTER_PORT")
    found = local_address(interface, towards or ((host, int(port)) if host and port and port.isdigit() else None))
    if several and interface is None and is_loopback(found):
        routed = (local_address(None, each) for each in _UNASSIGNED)
        return next((each for each in routed if not is_loopback(each)), found)
    return found


def _listen(host: str, secret: bytes, ranks: int) -> Listener:
    try:
        return Listener(host, secret, expected=range(1, ranks))
    except ConfigError as error:
        remedy = "name another: attach(..., interface='eth0'), or GLOO_SOCKET_IFNAME"
        raise ConfigError("interface", host, error.problem, remedy) from error


def common_secret(control: ControlPlane) -> bytes | None:
    """Return the secret that a launcher gave to all ranks, or None; ConfigError, on all ranks, if they differ."""
    secret = problem = None
    try:
        secret = _secret()
    except ConfigError as error:
        problem = error
    control.raise_on_all(problem)
    # 8 bytes of a hash of 32 random bytes reveal no more than the handshake does.
    marks = [row[0] for row in control.gather([hash_of(f"secret {secret.hex()}") if secret else 0])]
    for rank, mark in enumerate(marks):
        if mark != marks[0]:
            having, missing = (0, rank) if marks[0] else (rank, 0)
            what = f"is another on rank {rank} than on rank 0"
            if not (mark and marks[0]):
                what = f"is set on rank {having} and not on rank {missing}"
            raise ConfigError(SECRET, "(hidden)", what, _ONE_SECRET)
    return secret


def _secret() -> bytes | None:
    text = os.environ.get(SECRET)
    if not text:
        return None
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        raise ConfigError(SECRET, "(hidden)", "is not hexadecimal", _ONE_SECRET) from None
    if len(secret) < SECRET_SIZE:
        raise ConfigError(SECRET, "(hidden)", f"has {len(secret)} bytes, fewer than {SECRET_SIZE}", _ONE_SECRET)
    return secret


def secret_for_servers(control: ControlPlane) -> bytes:
    """Return the job's secret, which its servers have, too; ConfigError, on all ranks, if there is none."""
    if given := common_secret(control):
        return given
    raise ConfigError(SECRET, "", "is not set, and servers refuse workers without it", _SAME_SECRET)
