"""Groups of ranks, each a thread of this process, that exchange over UDP on loopback."""

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from foretrain.comm.bounded import collectives
from foretrain.comm.bounded.collectives import BoundedCollectives, connect_engine
from foretrain.comm.bounded.engine import BoundedEngine, EngineOptions
from foretrain.comm.coordinator.addresses import addresses_of, decoded, encoded
from foretrain.network.packet.transports.transport import Bounded
from tests.comm.bounded.relay import Network

has_ipv6 = pytest.mark.skipif("::1" not in addresses_of("lo"), reason="this machine has no IPv6")


class Exchange:
    """Gathers everyone's values, as a control plane does."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._rows: list[Any] = [None] * ranks

    def of(self, rank: int, network: Network | None = None) -> Callable[[Sequence[Any]], list[Any]]:
        def exchange(values: Sequence[Any]) -> list[Any]:
            self._rows[rank] = tuple(values)
            self._barrier.wait(300)
            rows = list(self._rows)
            self._barrier.wait(300)
            return rows

        return exchange if network is None else relayed(exchange, network)


class Control:
    """Control plane of one rank of `controls`.

    Attributes:
        sent: what all ranks have sent.
    """

    def __init__(self, rank: int, ranks: int, exchange: Exchange, sent: list[bytes]) -> None:
        self.rank, self.ranks, self.sent = rank, ranks, sent
        self._exchange = exchange.of(rank)

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        self.sent.append(b"".join(value.to_bytes(8, "little", signed=True) for value in values))
        return [list(row) for row in self._exchange(values)]

    def share(self, data: bytes | None) -> bytes:
        if data is not None:
            self.sent.append(data)
        return self._exchange([data])[0][0]


def controls(ranks: int) -> list[Control]:
    """Return the control planes of ``ranks`` threads of this process."""
    exchange, sent = Exchange(ranks), list[bytes]()
    return [Control(rank, ranks, exchange, sent) for rank in range(ranks)]


def relayed(exchange: Callable[[Sequence[Any]], list[Any]], network: Network) -> Callable[[Sequence[Any]], list[Any]]:
    """Return an ``exchange`` whose addresses of UDP are those of relays in front of all."""
    calls = iter(range(3))

    def exchanged(values: Sequence[Any]) -> list[Any]:
        rows = exchange(values)
        return [encoded(*network.in_front_of(decoded(row))) for row in rows] if next(calls) == 1 else rows

    return exchanged


@contextmanager
def through(network: Network) -> Iterator[None]:
    """Let all that this process sends from now on go through ``network``, but for what a server sends back."""
    connect = collectives.connect_engine

    def connected(host: str, gather: Any, *arguments: Any, **options: Any) -> BoundedEngine:
        return connect(host, relayed(gather, network), *arguments, **options)

    with network, pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "connect_engine", connected)
        yield


def in_threads(ranks: int, call: Callable[[int], Any]) -> list[Any]:
    """Return what ``call`` returns for each rank, all at the same time."""
    with ThreadPoolExecutor(ranks) as pool:
        return [each.result(300) for each in [pool.submit(call, rank) for rank in range(ranks)]]


@contextmanager
def engines(
    ranks: int, timeout: float = 10.0, network: Network | None = None, host: str = "127.0.0.1", **options: Any
) -> Iterator[list[BoundedEngine]]:
    """Yield connected engines, over ``network`` if there is one."""
    exchange, secret = Exchange(ranks), secrets.token_bytes(32)
    settings = EngineOptions(**{"transport": Bounded(first_window=16), "timeout": timeout, **options})
    made = in_threads(
        ranks, lambda rank: connect_engine(host, exchange.of(rank, network), secret, rank, ranks, settings)
    )
    try:
        yield made
    finally:
        for each in made:
            each.close()


@contextmanager
def group(ranks: int, **options: Any) -> Iterator[list[BoundedCollectives]]:
    """Yield connected collectives; options are theirs and those of `engines`."""
    names = ("over", "tolerance", "droppable", "share", "rescale", "feedback", "hadamard")
    own = {key: options.pop(key) for key in names if key in options}
    with engines(ranks, **options) as made:
        members = [BoundedCollectives(each, rank, ranks, **own) for rank, each in enumerate(made)]
        try:
            yield members
        finally:
            for each in members:
                each.close()
