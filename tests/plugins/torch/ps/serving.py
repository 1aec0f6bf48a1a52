"""Servers of the tests: services in this process, to which real ranks push."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Iterator

from foretrain.comm.coordinator.handshake import SECRET
from foretrain.comm.ps.server.job import ServerConfig
from foretrain.comm.ps.server.service import Service
from foretrain.errors import ForetrainError
from foretrain.plugins.torch.ps.server import make_optimizer_shard
from tests.plugins.torch.ranks import KEY


@contextlib.contextmanager
def servers(shards: int, workers: int, **options) -> Iterator[tuple[str, list[Service]]]:
    """Their addresses, as `attach` takes them, and they themselves."""
    importlib.import_module("torch._dynamo")  # else the first optimizer does, in all threads at once
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(
                Service(
                    "127.0.0.1",
                    KEY,
                    ServerConfig(workers, shard, shards, **options, optimizer_shard=make_optimizer_shard),
                )
            )
            for shard in range(shards)
        ]
        threads = [threading.Thread(target=_run, args=(service,)) for service in made]
        for thread in threads:
            thread.start()
        try:
            yield ",".join(f"{host}:{port}" for host, port in (service.address for service in made)), made
        finally:
            for service in made:
                service.stop()
            for thread in threads:
                thread.join()  # sockets are closed behind this, which a thread that uses them does not survive


def keyed(side, recipe, *args):
    """``recipe``, with the job's secret in the environment of the rank."""
    os.environ[SECRET] = KEY.hex()
    try:
        yield from recipe(side, *args)
    finally:
        del os.environ[SECRET]


def _run(service: Service) -> None:
    with contextlib.suppress(ForetrainError):  # `Service.failure` has it
        service.run()
