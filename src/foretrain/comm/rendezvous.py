"""Rendezvous of all ranks before the first step: their secret, and links to rank 0."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import secrets

import msgspec

from foretrain.comm.control_plane import ControlPlane
from foretrain.comm.coordinator.handshake import SECRET, SECRET_SIZE, Listener, connect
from foretrain.comm.coordinator.link import Link, LinkError, local_address
from foretrain.comm.options import AttachOptions
from foretrain.errors import ConfigError

logger = logging.getLogger("foretrain")

_ONE_SECRET = (
    f"give all nodes the same {SECRET} (or foretrain run --secret-file), made with: openssl rand -hex {SECRET_SIZE}; "
    "or give it to none, and rank 0 makes one"
)
_UNASSIGNED = ("192.0.2.1", 9)
"""Address that no host has (RFC 5737): its route is the default route."""
_CONNECT_TIMEOUT = 20.0
"""Seconds the ranks have to connect to the coordinator."""
_OWN = ("interface", "trace")
"""Settings in which ranks may differ."""


def agree_on_settings(control: ControlPlane, options: AttachOptions) -> None:
    """Raise Disagreement, on all ranks, if ``options`` differ."""
    settings = {key: value for key, value in msgspec.structs.asdict(options).items() if key not in _OWN}
    control.must_agree("setting", list(settings), [hash_of(f"{key}={value}") for key, value in settings.items()])


def hash_of(text: str) -> int:
    """Return 64 bits of a hash of ``text``, by which ranks compare."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def connect_ranks(control: ControlPlane, interface: str | None) -> dict[int, Link] | None:
    """Return authenticated links between rank 0 and each other rank; None, on all ranks, if one cannot connect.

    Rank 0 listens on one address of one interface. The secret is the launcher's, or one that rank 0 makes and hands out
    over the process group.

    Raises:
        ConfigError: on all ranks, if a secret is malformed or differs between ranks, or rank 0 cannot listen.
    """
    links: dict[int, Link] = {}
    listener = problem = None
    several_hosts = len({row[0] for row in control.gather([hash_of(platform.node())])}) > 1
    given = common_secret(control)
    secret = given or secrets.token_bytes(SECRET_SIZE)
    if control.rank == 0:
        try:
            listener = _listen(_own_address(interface, several_hosts), secret, control.ranks)
        except ConfigError as error:
            problem = error
    try:
        control.raise_on_all(problem)
        if listener is not None:
            host, port = listener.address
            control.share(f"{host} {port} {'' if given else secret.hex()}".encode())
        else:
            host, port, made = control.share(None).decode().split(" ")
            secret = given or bytes.fromhex(made)
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
            return links
    finally:
        if listener is not None:
            listener.close()
    for link in links.values():
        link.close()
    return None


def _own_address(interface: str | None, several_hosts: bool) -> str:
    """Return the address that rank 0 listens on: never loopback with ``several_hosts``, even if it has that name."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    found = local_address(interface, (host, int(port)) if host and port and port.isdigit() else None)
    if several_hosts and interface is None and found.startswith("127."):
        return local_address(None, _UNASSIGNED)
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
    raise ConfigError(SECRET, "", "is not set, and servers refuse workers without it", _ONE_SECRET)
