"""``foretrain server``: one shard of a parameter server."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import tyro

from foretrain.comm.ps import EVERY
from foretrain.errors import ConfigError, MissingExtra
from foretrain.launch.command import SECRET, check_secret, read_secret
from foretrain.launch.server_supervisor import check_every
from foretrain.parent_death import end_with_parent
from foretrain.units import SECOND, parse_time


def server(
    address: str,
    workers: int,
    shard: int = 0,
    shards: int = 1,
    secret_file: Path | None = None,
    timeout: str = "60s",
    elastic: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    snapshot_dir: Path | None = None,
    snapshot_every: int = EVERY,
    updates: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    with_parent: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Serve as one shard of a parameter server, until interrupted.

    Its job is started with foretrain run --servers HOST:PORT,..., or attaches with transport="ps". Prints where it
    listens; what it turns away is logged to stderr.

    Args:
        address: where to listen: an address of this host and a port, e.g. 10.0.0.5:5555; port 0 takes a free one.
        workers: how many ranks train.
        shard: number of this server.
        shards: how many servers there are.
        secret_file: a file with the job's secret, the same for all; by default what FORETRAIN_SECRET says.
        timeout: how long a worker may be silent before it counts as lost.
        elastic: the others go on without a worker that is lost, instead of ending.
        snapshot_dir: where parameters and optimizers' state are written, if they are here; started anew, a server goes
            on from there.
        snapshot_every: rounds between two snapshots; workers keep the gradients of as many.
        updates: load PyTorch at once, for a job whose optimizers run here, and not only when it begins.
        with_parent: end when the process that started it does.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) >= 1 << 16:
        raise ConfigError("address", address, "is no address and port", "write e.g. 10.0.0.5:5555")
    if not 0 <= shard < shards:
        raise ConfigError("shard", shard, f"is none of {shards} servers", f"write 0 to {shards - 1}")
    secret = read_secret(secret_file) if secret_file is not None else os.environ.get(SECRET, "")
    remedy = "make one with: openssl rand -hex 32 > FILE; chmod 600 FILE; and copy it to every node"
    if not secret:
        raise ConfigError("secret-file", "", "is missing: nobody is let in without a secret", remedy)
    check_secret(secret, SECRET, "(hidden)", remedy)
    check_every(snapshot_every)
    peer_timeout = parse_time(timeout, "timeout") / SECOND
    if peer_timeout <= 0:
        raise ConfigError("timeout", timeout, "is no time to wait", "write e.g. 60s")
    try:
        from foretrain.comm.ps.server.job import ServerConfig
        from foretrain.comm.ps.server.service import Service
        from foretrain.plugins.torch.ps.server import make_optimizer_shard, prepare
    except ImportError as error:
        raise MissingExtra(error.name or "pyzmq", "ps", "foretrain server") from error
    logging.basicConfig(stream=sys.stderr, format="foretrain server: %(message)s", level=logging.INFO)
    if with_parent:
        end_with_parent()
    if updates:
        prepare()
    terms = ServerConfig(
        *(workers, shard, shards, peer_timeout, elastic),
        snapshots=snapshot_dir,
        every=snapshot_every,
        optimizer_shard=make_optimizer_shard,
    )
    with Service(host, bytes.fromhex(secret), terms, int(port)) as service:
        found, number = service.address
        sys.stdout.write(f"server {shard} of {shards} for {workers} workers listens on {found}:{number}\n")
        sys.stdout.flush()
        service.run(lives_on=True)
