"""A shard's sockets: lets workers in, hears what they push and sends them what it sums.

One thread does everything but the sockets' input and output, which are ZeroMQ's own thread's. Nothing that a stranger
or a broken worker sends ends a service: it is rejected, counted and logged.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import zmq

from foretrain.errors import ConfigError, Disagreement, ForetrainError, PeerLost
from foretrain.network.serving import MESSAGE, WINDOW
from foretrain.server import EVERY
from foretrain.server.bundles import Item, bundle, unbundle
from foretrain.server.door import Door
from foretrain.server.frames import (
    AGAIN,
    FAILURES,
    HELD,
    KEEPS,
    TO_SERVER,
    UNTAGGED,
    Header,
    Kind,
    Malformed,
    unpack,
)
from foretrain.server.modes import Mode, mode
from foretrain.server.outbox import Outbox
from foretrain.server.peers import Peer, Peers
from foretrain.server.placement import LIMIT, Declaration, Placement
from foretrain.server.sessions import NONCE_SIZE, PROOF_SIZE, Rejected, untagged
from foretrain.server.shard import Delivery
from foretrain.server.snapshots import Keeping, Snapshots, Stateful

logger = logging.getLogger("foretrain.server")

_GRACE: Final = 3.0
"""Seconds that a worker whose connection broke has to come back, or to close where another one has."""
_BATCH: Final = 1 << 20
"""Bytes to hear before what they lead to is sent."""
_MESSAGE_COSTS: Final = 16 << 10
"""Bytes that could be heard in the time that a message takes for itself, about."""


class Service:
    """One shard of a parameter server. Use as a context manager.

    Args:
        host: address of this host to listen on; never all of them.
        secret: the job's.
        workers: N.
        shard: this server's number.
        shards: how many there are.
        port: 0 takes a free one.
        silence: seconds after which a worker that says nothing is lost.
        elastic: whether the others go on without a worker that is lost.
        credit: bytes under way to a worker at which nothing more is sent to it.
        snapshots: a folder, where shards that keep more than sums write their state.
        every: rounds between two snapshots.

    Attributes:
        rejected: messages turned away, by reason.
        failure: what ended the job; None while it lives, and after a good end.
    """

    def __init__(
        self,
        host: str,
        secret: bytes,
        *,
        workers: int,
        shard: int = 0,
        shards: int = 1,
        port: int = 0,
        silence: float = 60.0,
        elastic: bool = False,
        credit: int = WINDOW,
        snapshots: Path | None = None,
        every: int = EVERY,
    ) -> None:
        if _everywhere(host):
            raise ConfigError("address", host, "means every address of this host", "name one, e.g. 127.0.0.1")
        if workers < 1:
            raise ConfigError("workers", workers, "is no number of workers", "write at least 1")
        self._secret, self._workers, self._shard, self._shards = secret, workers, shard, shards
        self._silence, self._elastic, self._credit = silence, elastic, credit
        self._folder, self._every = snapshots, every
        self._keeping = None
        self.rejected: Counter[str] = Counter()
        self._stopped = False
        self._begin()
        self._context = zmq.Context()
        try:
            self._socket = self._listen(host, port)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                "address", f"{host}:{port}", f"cannot be listened on ({error})", "name a free one of this host"
            ) from None

    def _begin(self) -> None:
        """A job begins: nobody has said anything."""
        if self._keeping is not None:
            self._keeping.close()
        self._keeping: Keeping | None = None
        self.failure: ForetrainError | None = None
        self._door = Door(self._secret, self._shard, self._workers)
        self._peers = Peers()
        self._left: set[int] = set()
        self._done: set[int] = set()
        """Those that have all their sums, and stay for others that may not."""
        self._lost: set[int] = set()
        self._owing: float | None = None
        """Since when others have been in a round that one of those that have closed has not pushed."""
        self._number = secrets.randbits(64)
        """Tells workers whether they speak with the server that they have pushed to."""
        self._said_again = -1
        """The latest round of which a server before this one may have given sums out."""
        self._missed: float | None = None
        """When workers that have not come back to a server that was started anew are lost."""
        self._declared: Declaration | None = None
        self._epoch = -1
        self._urgency: list[int] = []
        self._parts: Mode | None = None
        self._said = self._alone = time.monotonic()

    def _listen(self, host: str, port: int) -> zmq.Socket[bytes]:
        made = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 1000),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, 0),  # what may be under way is the outboxes' to say, and nothing must be dropped
            (zmq.RCVHWM, 64),
            (zmq.MAXMSGSIZE, LIMIT),
            (zmq.SNDBUF, 1 << 20),
        ):
            made.setsockopt(option, value)
        made.bind(f"tcp://{host}:{port or '*'}")
        return made

    @property
    def address(self) -> tuple[str, int]:
        """Where to connect: host and port."""
        host, port = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").rsplit(":", 1)
        return host, int(port)

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends sockets and threads; what was handed to them has a second to leave. Idempotent."""
        if self._keeping is not None:
            self._keeping.close()
        self._socket.close()
        self._context.term()

    def stop(self) -> None:
        """Has `run` return soon. For signal handlers and other threads."""
        self._stopped = True

    def run(self, idle: float = math.inf, *, lives_on: bool = False) -> None:
        """Serves until `stop`, or until all workers have left and none has come back for ``idle`` seconds.

        With ``lives_on`` a job that fails makes room for the next one, as when workers are started again.

        Raises:
            PeerLost: a worker is lost, and the job not elastic; all others have been told.
            Disagreement: workers do not train the same.
        """
        while not self._stopped:
            if self._socket.poll(100):
                self._turn()
            try:
                self._watch()
            except ForetrainError as error:
                self._fail(error)
            if self.failure is not None:
                if self._keeping is not None:
                    self._keeping.end()
                if not lives_on:
                    raise self.failure
                logger.error("server %d: %s", self._shard, self.failure)
                self._begin()
            if len(self._left | self._lost) < self._workers:
                self._alone = time.monotonic()
            elif time.monotonic() - self._alone > idle:
                break

    # ── hearing ──

    def _turn(self) -> None:
        heard = 0
        while heard < _BATCH:
            try:
                route, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            heard += _MESSAGE_COSTS + sum(map(len, frames))
            try:
                self._hear(route.bytes, frames)
            except Malformed as error:
                self._reject(route.bytes, error)
            except ForetrainError as error:
                self._fail(error)
        for peer in self._peers:
            self._acknowledge(peer)
            self._send_values(peer)

    def _hear(self, route: bytes, frames: list[zmq.Frame]) -> None:
        if not 1 <= len(frames) <= 2:
            raise Malformed("frames", f"a message of {len(frames)} frames")
        header, tag = unpack(frames[0].bytes)
        payload = frames[1].buffer if len(frames) > 1 else memoryview(b"")
        if header.kind not in TO_SERVER:
            raise Malformed("kind", f"{header.kind.name} is not for a server to hear")
        if header.kind in UNTAGGED:
            self._greet(route, header, bytes(payload[: NONCE_SIZE + PROOF_SIZE]))
        elif (peer := self._peers.hear(route, header, tag, payload)) is not None:
            self._take(peer, header, payload)

    def _greet(self, route: bytes, header: Header, payload: bytes) -> None:
        if header.kind is Kind.HELLO:
            if len(self._left | self._lost) == self._workers:
                self._begin()  # all have ended: this is another job
            if header.sender in self._lost:
                raise Malformed("hello", f"HELLO of worker {header.sender}, without whom the others go on")
            self._hand_over(route, self._door.challenge(route, header.sender, payload))
            return
        rank, sessions, welcome = self._door.admit(route, payload)
        if self._peers.add(Peer(rank, route, *sessions, Outbox(self._credit, MESSAGE), time.monotonic())):
            logger.info("worker %d has come back", rank)
        self._left.discard(rank)
        self._done.discard(rank)
        self._hand_over(route, welcome)

    def _reject(self, route: bytes, error: Malformed) -> None:
        self.rejected[error.reason] += 1
        count = self.rejected[error.reason]
        if count < 10 or count & count - 1 == 0:
            logger.warning("rejected (%s, %d so far): %s", error.reason, count, error)
        peer = self._peers.of_route(route)
        if error.reason == "stranger":
            self._hand_over(route, untagged(Kind.STRANGER, self._shard))
        elif peer is not None and error.reason == "gap":
            # What is missing was lost with a connection: what it says from now on cannot be told from a replay.
            self._hand_over(route, untagged(Kind.STRANGER, self._shard))
            peer.gone = peer.gone or time.monotonic()
        elif peer is not None and not isinstance(error, Rejected):
            # It is who it says, and talks nonsense.
            self._fail(PeerLost(f"worker {peer.rank} sent what makes no sense: {error}"))

    # ── what workers say ──

    def _take(self, peer: Peer, header: Header, payload: memoryview) -> None:
        kind = header.kind
        if kind is Kind.PUSH:
            self._push(peer, header, payload)
        elif kind is Kind.PULL:
            self._enqueue(
                self._declared_parts(peer).pull(peer.rank, header.part, header.step, header.offset, header.size)
            )
        elif kind in (Kind.RULE, Kind.SEED, Kind.FETCH):
            answers = [*self._declared_parts(peer).tell(peer.rank, header, payload)]
            if answers and kind is Kind.SEED and self._keeping is not None:
                self._keeping.begin()
            for answer, data in answers:
                self._send(peer, answer, data)
        elif kind is Kind.RECEIVED:
            peer.outbox.received(header.size)
        elif kind is Kind.DECLARE:
            self._declare(peer, header, Declaration.decode(bytes(payload)))
            self._answer(peer)
            for rank in self._lost:
                self._send(peer, Header(Kind.LOST, part=rank))
        elif kind is Kind.WANTED:
            self._answer(peer)
        elif kind is Kind.LOST:
            self._go_on_without(header.part, header.step, header.offset)
        elif kind is Kind.DONE:
            self._done.add(peer.rank)
            if self._keeping is not None:
                self._keeping.want()
            self._enqueue(self._parts.leaves(peer.rank) if self._parts else ())
            self._end_together()
        elif kind is Kind.BYE:
            self._left.add(peer.rank)
            self._peers.drop(peer.rank, left=True)
            self._enqueue(self._parts.leaves(peer.rank) if self._parts else ())
            self._end_together()
            if self._keeping is not None:
                self._keeping.want()
                if len(self._left | self._lost) == self._workers:
                    self._keeping.end()
        elif kind is Kind.FAIL:
            text = bytes(payload[:60_000]).decode(errors="replace")
            kind_of_failure = FAILURES[min(header.flag, len(FAILURES) - 1)]
            if not self._elastic or kind_of_failure is not PeerLost:
                raise kind_of_failure(f"worker {peer.rank} gave up: {text}")
            self._lose(peer.rank, f"it gave up: {text}")

    def _push(self, peer: Peer, header: Header, payload: memoryview) -> None:
        peer.pushes += 1
        parts = self._declared_parts(peer)
        again, held = bool(header.flag & AGAIN), bool(header.flag & HELD)
        for part, offset, size, data in unbundle(header, payload):
            given = memoryview(data) if len(data) else None
            self._enqueue(parts.push(peer.rank, part, header.step, offset, size, given, again=again, held=held))
        self._tell_progress()

    def _acknowledge(self, peer: Peer) -> None:
        if peer.told < peer.pushes:
            peer.told = peer.pushes
            self._send(peer, Header(Kind.RECEIVED, step=peer.epoch, offset=peer.pushes))

    def _answer(self, peer: Peer) -> None:
        if self._keeping is None:
            self._send(peer, Header(Kind.WANTED, offset=self._number))
            return
        done, saved = self._keeping.of(peer.rank)
        self._send(peer, Header(Kind.COMMITTED, step=saved, offset=done))
        self._send(peer, Header(Kind.WANTED, KEEPS, step=done, offset=self._number))

    def _tell_progress(self) -> None:
        for rank, (done, saved) in self._keeping.news().items() if self._keeping is not None else ():
            if (peer := self._peers.of_rank(rank)) is not None:
                self._send(peer, Header(Kind.COMMITTED, step=saved, offset=done))

    def _declared_parts(self, peer: Peer) -> Mode:
        if self._parts is None:
            raise Malformed("push", f"worker {peer.rank} pushes before it has declared anything")
        return self._parts

    def _end_together(self) -> None:
        """When nobody needs anything any more, those who have waited for that are told."""
        if len(self._left | self._lost | self._done) == self._workers:
            for peer in self._peers:
                if peer.rank in self._done:
                    self._send(peer, Header(Kind.DONE))

    def _declare(self, peer: Peer, header: Header, declaration: Declaration) -> None:
        epoch, begun = header.step, header.offset
        peer.declares(epoch)
        if self._missed is not None:
            self._said_again = max(self._said_again, begun - 1)
        if declaration.workers != self._workers:
            raise Disagreement(
                f"worker {peer.rank} is one of {declaration.workers}; server {self._shard} was started for "
                f"{self._workers}: start it with --workers {declaration.workers}"
            )
        if epoch > self._epoch or self._declared is None or declaration.job != self._declared.job:
            self._declared, self._epoch = declaration, epoch
            placement = Placement(declaration, self._shards)
            mine = [part for part in placement.parts if part.shard == self._shard]
            self._parts = mode(declaration, mine, self._workers, self._lost, anew=begun > 0)
            self._remember(declaration if mine else None, under_way=begun > 0)
            self._said_again = begun - 1
            if begun:
                logger.warning("worker %d is in round %d: started anew, all push again", peer.rank, begun - 1)
                self._missed = time.monotonic() + self._silence
            self._urgency = [declaration.tasks[part.task].urgency for part in placement.parts]
            return
        found = self._declared.difference(declaration) if self._declared and epoch == self._epoch else None
        if found is not None:
            raise Disagreement(f"worker {peer.rank} trains something else than the first to declare: {found}")

    def _remember(self, declaration: Declaration | None, *, under_way: bool) -> None:
        """A shard that keeps more than sums goes on from its job's last snapshot, and must if that is ``under_way``.

        There is nothing to keep of a ``declaration`` that leaves it nothing to do, which is None.
        """
        if self._keeping is not None:
            self._keeping.close()
        self._keeping = None
        if declaration is not None and isinstance(self._parts, Stateful):
            whose = (declaration, self._epoch, self._shard, self._shards)
            made = Snapshots(self._folder, self._every, *whose) if self._folder else None
            self._keeping = Keeping(self._parts, made)
            self._left.update(self._parts.left)
            if under_way and not self._parts.begun:
                raise PeerLost(
                    f"server {self._shard} was started anew, and what it had updated is lost, for want of a snapshot: "
                    "start servers with --snapshot-dir; this job can go on from a checkpoint"
                )

    def _enqueue(self, deliveries: Iterable[Delivery]) -> None:
        for worker, value in deliveries:
            if (peer := self._peers.of_rank(worker)) is not None:
                peer.outbox.put(self._urgency[value.part], value)

    # ── saying ──

    def _send_values(self, peer: Peer) -> None:
        while values := peer.outbox.take():
            items = [Item(part, start, end - start, data or b"") for part, _, start, end, data in values]
            self._send(peer, *bundle(Header(Kind.VALUE, step=values[0].step), items))

    def _send(self, peer: Peer, header: Header, payload: bytes | memoryview = b"") -> None:
        if peer.gone is None:
            route, *frames = peer.sealed(header, payload)
            if not self._hand_over(route, frames):
                peer.gone = time.monotonic()

    def _hand_over(self, route: bytes | memoryview, frames: list[Any]) -> bool:
        """To the socket; False where the connection is no more."""
        if not len(frames[-1]):
            frames = frames[:-1]
        try:
            self._socket.send_multipart([route, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    # ── losses ──

    def _watch(self) -> None:
        now = time.monotonic()
        if now - self._said > min(1.0, self._silence / 4):
            self._said = now
            for peer in self._peers:
                self._send(peer, Header(Kind.ALIVE))
            self._miss_the_left(now)
        for peer in self._peers:
            if peer.gone is not None and now - peer.gone > _GRACE:
                self._lose(peer.rank, "its connection is closed")
            elif now - peer.heard > self._silence:
                self._lose(peer.rank, f"it has been silent for {now - peer.heard:.1f} s")
        self._tell_progress()
        if self._missed is not None and now > self._missed:
            self._missed = None
            for rank in set(range(self._workers)) - self._peers.ranks - self._left - self._lost:
                self._lose(rank, "it has not come back since this server was started anew")

    def _miss_the_left(self, now: float) -> None:
        """Who has closed pushes no more: others cannot be in a round of which it owes some, unless they close, too."""
        closed, owing = self._left | self._done, None
        if self._parts is not None and closed and self._peers.ranks - closed:
            rounds = ((rank, self._parts.owed(rank)) for rank in sorted(closed))
            owing = next(((rank, step) for rank, step in rounds if step is not None), None)
        self._owing = None if owing is None else self._owing or now
        if owing is not None and self._owing is not None and now - self._owing > _GRACE:
            raise PeerLost(f"worker {owing[0]} closed its attachment before round {owing[1]}, which others are in")

    def _lose(self, rank: int, why: str) -> None:
        self._drop(rank)
        waits = self._parts.waits() if self._parts else []
        text = f"worker {rank} is lost: {why}" + "".join(f"\n  - {line}" for line in waits[:12])
        if not self._elastic:
            self._fail(PeerLost(text))
        elif self._parts is not None and self._said_again >= 0 and not self._parts.through(self._said_again):
            self._fail(PeerLost(f"{text}\nothers may have sums with it from before this server was started anew"))
        else:
            logger.warning("%s; %d go on", text, self._workers - len(self._lost | self._left))
            if self._said_again >= 0 and self._keeping is not None:
                logger.warning("what worker %d had pushed since the last snapshot is lost with it", rank)
            self._exclude(rank)

    def _drop(self, rank: int) -> None:
        self._lost.add(rank)
        self._peers.drop(rank)

    def _go_on_without(self, rank: int, since: int, step: int) -> None:
        """A worker in round ``step`` knows from a server before this one that ``rank`` was lost in round ``since``."""
        if rank in self._lost or not 0 <= rank < self._workers:
            return
        first = step - 1
        if self._keeping is not None:
            kept = self._keeping.kept
            first = since + 1 if rank not in kept.living else min(kept.done[other] for other in kept.living)
        if not self._elastic or first <= since:
            # Of the rounds that are made anew some may have sums with it that were given out, and would have none now.
            raise PeerLost(f"worker {rank} was lost in round {since}, and then this server, with sums of that round")
        self._drop(rank)
        self._exclude(rank)

    def _exclude(self, rank: int) -> None:
        for other in self._peers:
            self._send(other, Header(Kind.LOST, part=rank))
        if self._parts is not None:
            self._enqueue(self._parts.without(rank))
        if self._keeping is not None:
            self._keeping.want()
        for other in self._peers:
            self._send_values(other)
        self._end_together()

    def _fail(self, error: ForetrainError) -> None:
        """Tells everyone; the first failure is the one that is told."""
        if self.failure is not None:
            return
        self.failure = error
        flag = FAILURES.index(type(error)) if type(error) in FAILURES else 0
        text = str(error).encode()[:60_000]
        for peer in self._peers:
            self._send(peer, Header(Kind.FAIL, flag, size=len(text)), text)


def _everywhere(host: str) -> bool:
    """Whether ``host`` means all addresses of this host, however it is written: 0 does, too."""
    if host in ("", "*"):
        return True
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False  # what it is instead listening will tell
    return any(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified for *_, address in found)
