"""Job of one shard: admits workers, handles their messages, and finds lost ones.

It knows the shard and its snapshots, peers and clocks, but no socket: a function sends messages. Where there is a wire,
it serves the workers of a `SumShard` itself, and only other messages come here.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from foretrain.comm.event_loop import SilenceDetector
from foretrain.comm.ps import EVERY
from foretrain.comm.ps.frames import (
    ACCUMULATES,
    BUSY,
    CLOSED,
    FAILURES,
    PULL_ONLY,
    RETURNS,
    STATEFUL,
    FrameKind,
    Header,
    Item,
    Malformed,
    bundle,
    unbundle,
)
from foretrain.comm.ps.placement import Declaration, Placement
from foretrain.comm.ps.server.peers import AuthenticatedPeer, Peer, Peers, SendQueue
from foretrain.comm.ps.server.shard import Delivery, Mode, OptimizerShardFactory, SumShard, mode
from foretrain.comm.ps.server.snapshots import SnapshotPolicy, Snapshots, Stateful, WorkerProgress
from foretrain.comm.ps.wire import SERVED, Payload, Wire
from foretrain.errors import ConfigError, Disagreement, ForetrainError, PeerLost
from foretrain.network.switch_cluster import MESSAGE, WINDOW

logger = logging.getLogger("foretrain.comm.ps")

_GRACE: Final = 3.0
"""Seconds that a worker has to reconnect, or to close after another one has."""

_WARMUP: Final = 10
"""Timeouts that a worker which announced its return may be away before it counts as lost: it trains meanwhile."""

_STATE_MESSAGES: Final = frozenset((FrameKind.RULE, FrameKind.INIT, FrameKind.GET_STATE))
_OF_A_DECLARATION: Final = _STATE_MESSAGES | {FrameKind.PUSH, FrameKind.PULL, FrameKind.DONE, FrameKind.LOST}
"""Messages that belong to one declaration, and mean nothing after another."""

HandOver = Callable[[int, Header, Payload], bool]
"""Function that sends a message on a connection; it returns False where that is closed."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings that a server is started with.

    Attributes:
        workers: N.
        shard: this server's number.
        shards: how many there are.
        peer_timeout: seconds of silence after which a worker counts as lost.
        elastic: whether the others go on without a lost worker.
        credit: bytes in flight to a worker from which on nothing more is sent to it.
        snapshots: folder for the state of shards that keep more than sums.
        every: rounds between two snapshots.
        optimizer_shard: makes a shard that updates parameters; None where this server only sums.

    Raises:
        ConfigError: the number of workers is none.
    """

    workers: int
    shard: int = 0
    shards: int = 1
    peer_timeout: float = 60.0
    elastic: bool = False
    credit: int = WINDOW
    snapshots: Path | None = None
    every: int = EVERY
    optimizer_shard: OptimizerShardFactory | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError("workers", self.workers, "is no number of workers", "write at least 1")


class WorkerRefused(Malformed):
    """Error about a worker that knows the secret but is not admitted; ``flag`` as in REFUSED."""

    def __init__(self, flag: int, text: str) -> None:
        self.flag = flag
        super().__init__("refused", text)


def refused(error: ForetrainError) -> WorkerRefused:
    """Return the refusal of a worker because of ``error``."""
    return WorkerRefused(_flag(error), str(error))


def _flag(error: ForetrainError) -> int:
    return FAILURES.index(type(error)) if type(error) in FAILURES else 0


class ShardJob:
    """Job on this shard, from the first worker that joins to the last that leaves.

    Attributes:
        name: the job's; None before the first worker.
        peers: present workers.
        parts: the shard; None before the first declaration.
        failure: the error that ended it; None while it lives, and after a good end.
        left: workers that have closed.
        done: workers that have all their sums, and stay while others may need their pushes.
        lost: workers without which the others go on.
    """

    def __init__(self, terms: ServerConfig, hand_over: HandOver, wire: Wire | None = None) -> None:
        self._terms, self._hand_over, self._wire = terms, hand_over, wire
        self.peers = Peers()
        self.name: str | None = None
        self.failure: ForetrainError | None = None
        self.left: set[int] = set()
        self.done: set[int] = set()
        self.lost: set[int] = set()
        self._why_dropped: dict[int, str] = {}
        """Message for each of them, sent now or when it comes back."""
        self._saved_as_left: set[int] = set()
        """Workers that had closed by the snapshot that this server was restarted with, and may not know: the job is not
        over before they have come and gone, or the time to rejoin is."""
        self._returning: dict[int, float] = {}
        """Workers that have closed and announced their return, with the deadline of it."""
        self._deserted: float | None = None
        """Time since which no worker is present, though not all have closed."""
        self._owing: float | None = None
        """Time since which others have been in a round that a worker has closed without pushing."""
        self._number = secrets.randbits(64)
        """Identity of this server, by which workers notice a restart."""
        self._resent_round = -1
        """Latest round of which the server before this one may have sent sums."""
        self._rejoin_deadline: float | None = None
        """Time at which workers that have not reconnected to a restarted server count as lost."""
        self._declared: Declaration | None = None
        self._epoch = -1
        self._urgency: list[int] = []
        self.parts: Mode | None = None
        self._keeping: SnapshotPolicy | None = None
        self._silence_detector = SilenceDetector(terms.peer_timeout)
        self._absence_detector = SilenceDetector(min(_GRACE, terms.peer_timeout))
        self._heartbeat_sent = time.monotonic()

    @property
    def over(self) -> bool:
        """Return whether all workers have closed or are lost."""
        return len(self.left | self.lost) == self._terms.workers

    def admit(self, candidate: AuthenticatedPeer, route: int) -> None:
        """Admit ``candidate``, which has proved its identity on ``route``.

        Raises:
            WorkerRefused: it is of another job, or has no place in this one, or the others go on without it.
        """
        rank, shard = candidate.rank, self._terms.shard
        if self.name not in (None, candidate.job):
            why = f"server {shard} serves job {self.name}, which has not ended, and this is {candidate.job}"
            raise WorkerRefused(BUSY, why)
        if rank >= self._terms.workers:
            why = f"server {shard} was started for {self._terms.workers} workers, and has no place for worker {rank}"
            raise refused(Disagreement(f"{why}: start it with --workers {rank + 1} or more"))
        if rank in self.lost:
            raise refused(PeerLost(self._why_dropped[rank]))
        self.name = candidate.job
        send_queue = SendQueue(self._terms.credit, MESSAGE)
        if self.peers.add(Peer(rank, route, candidate.known.nonces, send_queue, time.monotonic())):
            logger.info("worker %d has come back", rank)
        self.left.discard(rank)
        self._saved_as_left.discard(rank)
        self.done.discard(rank)
        self._returning.pop(rank, None)

    def flush(self) -> None:
        """Send acknowledgements and as many values as credit allows."""
        for peer in self.peers:
            self._acknowledge(peer)
            self._send_values(peer)

    def close(self) -> None:
        """Wait until the last snapshot is written; remove those of a job that has failed or ended."""
        if self._keeping is not None:
            if self.over or self.failure is not None:
                self._keeping.end()
            self._keeping.close()

    # ── messages of workers ──

    def take(self, peer: Peer, header: Header, payload: memoryview) -> None:
        """Handle a message of ``peer``.

        Raises:
            Malformed: it contradicts the declaration or itself.
            ForetrainError: the job is over.
        """
        kind = header.kind
        if kind in _OF_A_DECLARATION and peer.epoch not in (None, self._epoch):
            return  # it belongs to an earlier declaration, and its sender will declare again
        # What is not regular goes on below, where it is found what is wrong with it.
        if kind in SERVED and self._wire and peer.served and self._wire.take_back(peer.route, header, payload):
            return
        if kind is FrameKind.PUSH:
            self._push(peer, header, payload)
        elif kind is FrameKind.PULL:
            pull = header.part, header.step, header.offset, header.size
            self._enqueue(self._declared_parts(peer).pull(peer.rank, *pull))
        elif kind in _STATE_MESSAGES:
            answers = [*self._declared_parts(peer).answer_message(peer.rank, header, payload)]
            if answers and kind is FrameKind.INIT and self._keeping is not None:
                self._keeping.begin()
            for answer, data in answers:
                self._send(peer, answer, data)
        elif kind is FrameKind.RECEIVED:
            peer.send_queue.received(header.size)
        elif kind is FrameKind.DECLARE:
            self._declare(peer, header, Declaration.decode(bytes(payload)))
            self._serve(peer)
            self._answer(peer)
            for rank in self.lost:
                self._send(peer, Header(FrameKind.LOST, part=rank))
        elif kind is FrameKind.WANTED:
            self._answer(peer)
        elif kind is FrameKind.LOST:
            self._go_on_without(header.part, header.step, header.offset)
        elif kind is FrameKind.DONE:
            if self._keeping is not None and peer.rank not in self.done:
                self._keeping.want()
            self.done.add(peer.rank)
            self._enqueue(self.parts.worker_closed(peer.rank) if self.parts else ())
            self._end_together()
        elif kind is FrameKind.BYE:
            if header.flag & RETURNS:
                self._returning[peer.rank] = time.monotonic() + _WARMUP * self._terms.peer_timeout
            else:
                self.left.add(peer.rank)
            self._let_go(peer.rank)
            self._enqueue(self.parts.worker_closed(peer.rank) if self.parts else ())
            self._end_together()
            if self._keeping is not None:
                self._keeping.want()
            self._end_if_over()
        elif kind is FrameKind.FAIL:
            text = bytes(payload[:60_000]).decode(errors="replace")
            failure = FAILURES[min(header.flag, len(FAILURES) - 1)]
            if not self._terms.elastic or failure is not PeerLost:
                raise failure(f"worker {peer.rank} gave up: {text}")
            self._lose(peer.rank, f"it gave up: {text}")

    def _push(self, peer: Peer, header: Header, payload: memoryview) -> None:
        peer.pushes += 1
        parts = self._declared_parts(peer)
        again, held = bool(header.flag & ACCUMULATES), bool(header.flag & PULL_ONLY)
        for part, offset, size, data in unbundle(header, payload):
            given = memoryview(data) if len(data) else None
            self._enqueue(parts.push(peer.rank, part, header.step, offset, size, given, again=again, held=held))
        self._tell_progress()

    def _acknowledge(self, peer: Peer) -> None:
        if peer.acknowledged < peer.pushes:
            peer.acknowledged = peer.pushes
            self._send(peer, Header(FrameKind.RECEIVED, step=peer.epoch or 0, offset=peer.pushes))

    def _answer(self, peer: Peer) -> None:
        if self._keeping is None:
            self._send(peer, Header(FrameKind.WANTED, offset=self._number))
            return
        progress = self._keeping.of(peer.rank)
        self._commit(peer, progress)
        self._send(peer, Header(FrameKind.WANTED, STATEFUL, step=progress.done, offset=self._number))

    def _commit(self, peer: Peer, to: WorkerProgress) -> None:
        self._send(peer, Header(FrameKind.COMMITTED, CLOSED if to.closed else 0, step=to.saved, offset=to.done))

    def _tell_progress(self) -> None:
        for rank, progress in self._keeping.news().items() if self._keeping is not None else ():
            if (peer := self.peers.of_rank(rank)) is not None:
                self._commit(peer, progress)

    def _declared_parts(self, peer: Peer) -> Mode:
        if self.parts is None or peer.epoch is None:
            raise Malformed("push", f"worker {peer.rank} pushes before it has declared anything")
        return self.parts

    def _end_together(self) -> None:
        """Tell the workers that wait for the end once no worker needs anything any more."""
        if len(self.left | self.lost | self.done | self._saved_as_left) == self._terms.workers:
            for peer in self.peers:
                if peer.rank in self.done:
                    self._send(peer, Header(FrameKind.DONE))

    def _declare(self, peer: Peer, header: Header, declaration: Declaration) -> None:
        epoch, begun = header.step, header.offset
        peer.declares(epoch)
        if self._rejoin_deadline is not None:
            self._resent_round = max(self._resent_round, begun - 1)
        if declaration.workers != self._terms.workers:
            raise Disagreement(
                f"worker {peer.rank} is one of {declaration.workers}; server {self._terms.shard} was started for "
                f"{self._terms.workers}: start it with --workers {declaration.workers}"
            )
        if declaration.job != self.name:
            raise Malformed("declaration", f"worker {peer.rank} of job {self.name} declares what is another's")
        if epoch > self._epoch or self._declared is None:
            for other in self.peers:
                self._stop_serving(other)
            self._declared, self._epoch = declaration, epoch
            placement = Placement(declaration, self._terms.shards)
            mine = [part for part in placement.parts if part.shard == self._terms.shard]
            self.parts = mode(declaration, mine, self._terms.workers, self.lost, begun > 0, self._terms.optimizer_shard)
            self._remember(declaration if mine else None, under_way=begun > 0)
            self._resent_round = begun - 1
            if begun:
                logger.warning("worker %d is in round %d: started anew, all push again", peer.rank, begun - 1)
                self._rejoin_deadline = time.monotonic() + self._terms.peer_timeout
            self._urgency = [declaration.tasks[part.task].urgency for part in placement.parts]
            return
        if epoch == self._epoch and (found := self._declared.difference(declaration)) is not None:
            raise Disagreement(f"worker {peer.rank} trains something else than the first to declare: {found}")

    def _end_if_over(self) -> None:
        if self.over and self._keeping is not None:
            self._keeping.end()

    def _remember(self, declaration: Declaration | None, *, under_way: bool) -> None:
        """Restore a stateful shard from its job's last snapshot; it must exist if the job is ``under_way``.

        ``declaration`` is None where no part lives here.
        """
        if self._keeping is not None:
            self._keeping.end()  # the state of an earlier declaration is of no use
        self._keeping = None
        if declaration is not None and isinstance(self.parts, Stateful):
            whose = (declaration, self._epoch, self._terms.shard, self._terms.shards)
            made = Snapshots(self._terms.snapshots, self._terms.every, *whose) if self._terms.snapshots else None
            self._keeping = SnapshotPolicy(self.parts, made)
            self._saved_as_left = set(self.parts.left) - self.peers.ranks
            if under_way and not self.parts.begun:
                raise PeerLost(
                    f"server {self._terms.shard} was started anew, and what it had updated is lost, for want of a "
                    "snapshot: start servers with --snapshot-dir; this job can go on from a checkpoint"
                )

    def _serve(self, peer: Peer) -> None:
        """Let the wire serve a worker that has declared the present tasks, if there are only sums."""
        if self._wire is None or peer.aside is None or not isinstance(self.parts, SumShard):
            return
        if peer.epoch == self._epoch:
            given = peer.rank, self._epoch, self._terms.shard, self._terms.credit
            self._wire.serve((peer.route, peer.aside), self.parts.native, *given)
            peer.served = True

    def _stop_serving(self, peer: Peer) -> None:
        if self._wire is not None and peer.served and peer.aside is not None:
            self._wire.serve((peer.route, peer.aside), None, peer.rank, 0, 0, 0)
            peer.served = False

    def _enqueue(self, deliveries: Iterable[Delivery]) -> None:
        for worker, value in deliveries:
            peer = self.peers.of_rank(worker)
            if peer is None:
                continue
            place, absent = value[:4], value.data is None
            if not (self._wire and peer.served and self._wire.put(peer.route, *place, absent=absent)):
                peer.send_queue.put(self._urgency[value.part], value)

    # ── messages to workers ──

    def _send_values(self, peer: Peer) -> None:
        while values := peer.send_queue.take():
            items = [Item(part, start, end - start, data or b"") for part, _, start, end, data in values]
            self._send(peer, *bundle(Header(FrameKind.VALUE, step=values[0].step), items))

    def _send(self, peer: Peer, header: Header, payload: Payload = b"") -> None:
        if peer.gone is None and not self._hand_over(peer.route_of(header.kind), header, payload):
            peer.gone = time.monotonic()

    # ── losses ──

    def watch(self) -> None:
        """Send heartbeats and find workers that are silent. Call often.

        Raises:
            PeerLost: a worker closed in a round that others are in.
        """
        now = self._silence_detector.tick()
        self._absence_detector.tick()
        if now - self._heartbeat_sent > min(1.0, self._terms.peer_timeout / 4):
            self._heartbeat_sent = now
            for peer in self.peers:
                self._send(peer, Header(FrameKind.ALIVE))
            self._miss_the_left(now)
            if self._resent_round >= 0 and self.parts is not None and self.parts.round_complete(self._resent_round):
                self._resent_round = -1
        for peer in self.peers:
            if self._wire is not None and peer.served:
                peer.heard = max(peer.heard, self._wire.heard(peer.route))
            # Where cores are short, it cannot reconnect while this thread does not run, nor be heard when it does.
            if peer.gone is not None and (
                self._absence_detector.exceeded(peer.gone) or now - peer.gone > self._terms.peer_timeout
            ):
                self._lose(peer.rank, "its connection is closed")
            elif silent := self._silence_detector.exceeded(peer.heard):
                self._lose(peer.rank, f"it was silent for {silent:.1f} s")
        self._tell_progress()
        for rank in [rank for rank, deadline in self._returning.items() if now > deadline]:
            del self._returning[rank]
            self._lose(rank, "it has not come back, as it meant to")
        if self._rejoin_deadline is not None and now > self._rejoin_deadline:
            self._rejoin_deadline = None
            self.left |= self._saved_as_left
            self._end_if_over()
            for rank in self._absent:
                self._lose(rank, "it has not come back since this server was started anew")
        self._watch_for_deserters(now)

    @property
    def _absent(self) -> set[int]:
        gone = self.left | self._saved_as_left | self.lost
        return set(range(self._terms.workers)) - self.peers.ranks - gone - self._returning.keys()

    def _watch_for_deserters(self, now: float) -> None:
        """End a job whose workers are all gone without closing: it must not block other jobs for ever."""
        if self.name is None or self.peers.ranks or self._returning or self.over:
            self._deserted = None
            return
        self._deserted = self._deserted or now
        if now - self._deserted > self._terms.peer_timeout:
            for rank in self._absent:
                self._lose(rank, f"nobody of job {self.name} has been here for {self._terms.peer_timeout:g} s")

    def _miss_the_left(self, now: float) -> None:
        """Fail the job if others are in a round that needs pushes of a worker that has closed."""
        closed, owing = self.left | self._saved_as_left | self.done, None
        if self.parts is not None and closed and self.peers.ranks - closed:
            rounds = ((rank, self.parts.blocking_round(rank)) for rank in sorted(closed))
            owing = next(((rank, step) for rank, step in rounds if step is not None), None)
        self._owing = None if owing is None else self._owing or now
        if owing is not None and self._owing is not None and now - self._owing > _GRACE:
            why = f"closed its attachment before round {owing[1]}, which others are in"
            if not self._terms.elastic:
                raise PeerLost(f"worker {owing[0]} {why}")
            if (peer := self.peers.of_rank(owing[0])) is not None:
                self._send(peer, Header(FrameKind.DONE))
            self._owing = None
            self._lose(owing[0], f"it {why}")

    def _lose(self, rank: int, why: str) -> None:
        sent = self.parts is not None and self._resent_round >= 0 and not self.parts.round_complete(self._resent_round)
        self._drop(rank, why, goes_on=self._terms.elastic and not sent)
        waits = self.parts.waiting() if self.parts else []
        text = f"worker {rank} is lost: {why}" + "".join(f"\n  - {line}" for line in waits[:12])
        if not self._terms.elastic:
            self.fail(PeerLost(text))
        elif sent:
            self.fail(PeerLost(f"{text}\nothers may have sums with it from before this server was started anew"))
        else:
            logger.warning("%s; %d go on", text, self._terms.workers - len(self.lost | self.left))
            if self._rejoin_deadline is not None and self._keeping is not None:
                logger.warning("what worker %d had pushed since the last snapshot is lost with it", rank)
            self._exclude(rank)

    def _drop(self, rank: int, why: str, *, goes_on: bool = True) -> None:
        """Count worker ``rank`` as lost; tell it why and end both of its connections, as it may only be stopped."""
        self.lost.add(rank)
        end = "the others go on without it" if goes_on else "the job has ended"
        remedy = "start again from a checkpoint, with a longer --timeout if this worker was only stopped or slow"
        text = f"server {self._terms.shard} dropped this worker because {why}; {end}: {remedy}"
        self._why_dropped[rank] = text
        peer = self._let_go(rank)
        if peer is None or rank in self.done:
            return
        told = text.encode()[:60_000]
        for route in peer.routes:  # on each before its end, whichever of them the worker reads first
            self._hand_over(route, Header(FrameKind.FAIL, _flag(PeerLost(text)), size=len(told)), told)
            if self._wire is not None:
                self._wire.end(route, orderly=True)

    def _let_go(self, rank: int) -> Peer | None:
        peer = self.peers.drop(rank)
        if peer is not None:
            self._stop_serving(peer)
        return peer

    def _go_on_without(self, rank: int, since: int, step: int) -> None:
        """Exclude ``rank``, which the server before this one lost in round ``since``; its sender is in ``step``."""
        if rank in self.lost or not 0 <= rank < self._terms.workers:
            return
        first = step - 1
        if self._keeping is not None:
            kept = self._keeping.kept
            first = since + 1 if rank not in kept.living else min(kept.done[other] for other in kept.living)
        if not self._terms.elastic or first <= since:
            # Sums of repeated rounds may have been sent with its gradients, and would now be without.
            raise PeerLost(f"worker {rank} was lost in round {since}, and then this server, with sums of that round")
        self._drop(rank, "it was lost before this server was started anew")
        self._exclude(rank)

    def _exclude(self, rank: int) -> None:
        for other in self.peers:
            self._send(other, Header(FrameKind.LOST, part=rank))
        if self.parts is not None:
            self._enqueue(self.parts.remove_worker(rank))
        if self._keeping is not None:
            self._keeping.want()
        for other in self.peers:
            self._send_values(other)
        self._end_together()
        self._end_if_over()

    def fail(self, error: ForetrainError) -> None:
        """Send ``error`` to all workers, unless the job has failed already."""
        if self.failure is not None:
            return
        self.failure = error
        text = str(error).encode()[:60_000]
        for peer in self.peers:
            self._send(peer, Header(FrameKind.FAIL, _flag(error), size=len(text)), text)
