"""Exchange over a parameter server: one worker's engine and its connections to the shards.

One thread reads messages of servers and of the training thread, posts events to the engine, and pushes the chunks that
the policy starts. A chunk is done, and its credit returned, when servers have all of it; they schedule the way back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

from foretrain.comm.collectives.executor import describe
from foretrain.comm.event_loop import Inbox, SilenceDetector, Timers
from foretrain.comm.ps.client.connection import Connection, Links, failure
from foretrain.comm.ps.client.inflight import InFlight, InFlightChunk, StateTransfer
from foretrain.comm.ps.client.push_log import Copies, PushedRange, PushLog
from foretrain.comm.ps.frames import FAILURES, RETURNS, FrameKind, Header, unbundle
from foretrain.comm.ps.placement import Placement
from foretrain.comm.run_trace import CommRecord
from foretrain.engine import Decision, Engine
from foretrain.errors import PeerLost, StallError
from foretrain.schedule import Job, Spec
from foretrain.schedule.monitor import Gauge
from foretrain.tasks import Chunk, Piece, Ready, StepBegin
from foretrain.units import Time

logger = logging.getLogger("foretrain")

_KEEP: Final = 4096
"""Decisions in the log: some steps."""
_TAKEN: Final = (FrameKind.VALUE, FrameKind.RECEIVED)
_CLOSE_TIMEOUT: Final = 2.0
"""Seconds for the last messages to leave."""


class StagedGradients(Copies, Protocol):
    """Gradients as bytes, on the host."""

    def aligned(self, piece: Piece) -> tuple[int, int]:
        """Return the first byte of ``piece`` and the one behind its last; an element belongs where its last byte is."""
        ...

    def store(self, task: int, start: int, data: memoryview) -> None:
        """Write arrived bytes to the gradient's place from ``start`` on."""

    def places(self) -> Sequence[int] | None:
        """Return the address of each task's sum; None where `store` must write it."""
        ...

    def sending(self, tasks: Sequence[int]) -> AbstractContextManager[object]:
        """Return a context in which the gradients of ``tasks`` can be copied."""
        ...

    def arriving(self, task: int) -> AbstractContextManager[object]:
        """Return a context in which bytes of ``task`` are stored."""
        ...


class ServedExchange:
    """`TunableExchange` over a parameter server. It owns one thread, and ``links``.

    Args:
        job: tasks and cost of the network.
        spec: the policy to run.
        staging: the gradients as bytes.
        links: to every shard.
        epoch: declarations of this worker before this one.
        landed: called with a task, when its sum has arrived, and whether any worker had a gradient.
        failed: called once with the error that ends the job.
        peer_timeout: seconds of silence after which a server counts as lost.
        stall_timeout: seconds without progress after which the exchange counts as stuck.
        origin: ns of the monotonic clock that count as 0.
        keep: whether to keep a `CommRecord` of every chunk.
        hyperparameters: returns the encoded hyperparameters of the round that begins, if servers run optimizers.
        gauge: listens to the policy to detect changes of the link.
    """

    def __init__(
        self,
        job: Job,
        spec: Spec,
        staging: StagedGradients,
        links: Links,
        *,
        epoch: int,
        landed: Callable[[int, bool], None],
        failed: Callable[[BaseException], None],
        peer_timeout: float,
        stall_timeout: float,
        origin: int,
        keep: bool = False,
        hyperparameters: Callable[[], bytes] = bytes,
        gauge: Gauge | None = None,
    ) -> None:
        self._gauge = gauge
        self._job, self._staging = job, staging
        self._links, self._connections = links, links.connections
        self._updated = staging.declaration.optimized is not None
        self._landed, self._failed = landed, failed
        self._peer_timeout, self._stall_timeout, self._keep = peer_timeout, stall_timeout, keep
        self.spec = spec
        self._inflight = InFlight([task.size for task in job.tasks])
        self._pushes = PushLog(staging, self._connections, self._inflight, epoch)
        if (places := staging.places()) is not None:
            self._inflight.place(places)
        self._absent: set[int] = set()
        self._used = [False] * len(job.tasks)
        self._opened: deque[tuple[bool, bytes]] = deque()
        self._hyperparameters = hyperparameters
        self._transfer: StateTransfer | None = None
        self._behind: set[int] = set()
        """Servers that lack pushes, and get the requests of the transfer after them."""
        self._early: list[tuple[int, bool]] = []
        """Tasks that were ready before their round could begin."""
        self._missing_tasks = 0
        """Tasks of the round whose sums have not arrived."""
        self._log: deque[Decision] = deque(maxlen=_KEEP)
        self.records: list[CommRecord] = []
        self._engine = self._make_engine()
        self._timers = Timers(origin)
        self._stale = False
        """True while the engine runs another policy than `spec`."""
        self._inbox = Inbox()
        """Methods to call on the exchange's thread, with their arguments."""
        self._silence_detector = SilenceDetector(peer_timeout)
        self._last_progress = self._heartbeat_sent = time.monotonic()
        self._closing = self._over = False
        self._close_deadline: float | None = None
        """Monotonic time until which this worker, at its close, stays for servers that may need its pushes again."""
        self._needing_servers: set[int] = set()
        """Servers that may still need its pushes."""
        links.watch(self._inbox)
        self._thread = threading.Thread(target=self._run, name="foretrain-engine", daemon=True)
        self._thread.start()

    # ── calls of the training thread ──

    def open(self, step: int, again: bool) -> None:
        """Announce that the first gradient of a round exists here."""
        self._inbox.post(self._open, again, self._hyperparameters())

    def ready(self, task: int, used: bool) -> None:
        """Allow ``task`` to be pushed."""
        self._inbox.post(self._ready, task, used)

    def flush(self) -> None:
        """Do nothing: no task is held back here."""

    def retune(self, spec: Spec) -> None:
        """Run ``spec`` from this worker's next round on; the others may run another."""
        self._inbox.post(self._retune, spec)

    def ask(self, transfer: StateTransfer) -> None:
        """Begin ``transfer``; one at a time."""
        self._inbox.post(self._ask, transfer)

    @property
    def placement(self) -> Placement:
        """Return the shards of all parts."""
        return self._pushes.placement

    @property
    def log(self) -> tuple[Decision, ...]:
        """Return the latest decisions."""
        return tuple(self._log)

    def last(self) -> str:
        """Return a description of the chunk that has been in flight longest, for messages."""
        oldest = self._inflight.oldest()
        if oldest is None:
            return f"nothing is under way after round {self._pushes.step}"
        return f"round {self._pushes.step}: {describe(oldest.chunk, self._job.tasks)} is under way"

    def close(self, reason: str | None = None) -> None:
        """Send a goodbye, or ``reason`` if this worker gives up, and end thread and connections. Idempotent.

        Without a reason it waits for the other workers, for ``peer_timeout`` seconds: if a server is lost now, it needs
        this worker's pushes to repeat the last round. If servers update, it waits for their snapshots instead.
        """
        if not self._closing:
            self._closing = True
            self._inbox.post(self._begin_close, reason)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_TIMEOUT + 1 + (0 if reason else self._peer_timeout))

    # ── calls of the engine ──

    def now(self) -> Time:
        """Return the picoseconds since the origin."""
        return self._timers.now()

    def call_at(self, when: Time, call: Callable[[], None]) -> None:
        """Run ``call`` on this thread at ``when``."""
        self._timers.call_at(when, call)

    def start(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        """Push or pull ``chunk``, each byte at its shard."""
        spans = [PushedRange(piece.task, *self._staging.aligned(piece)) for piece in chunk.pieces]
        # A piece that is less than an element is sent with the piece in which its element ends.
        spans = [span for span in spans if span.start < span.end]
        flight = InFlightChunk(chunk, done, sum(span.end - span.start for span in spans), time.perf_counter_ns())
        # All is noted before any is sent: the chunk is done when all that is noted is answered.
        if not spans:
            self.call_at(0, lambda: done(chunk))
        elif chunk.op == "all_gather":
            for span in spans:
                self._inflight.pull(flight, *span)
            for span in spans:
                self._pushes.pull(*span)
        else:
            for span in spans:
                self._inflight.push(flight, *span)
            with self._staging.sending([span.task for span in spans if self._used[span.task]]):
                self._pushes.push(spans, self._used.__getitem__, held=chunk.op == "reduce_scatter")

    # ── the loop ──

    def _run(self) -> None:
        try:
            while not self._over:
                self._iterate()
        except BaseException as error:
            if self._close_deadline is None:
                self._send_failure(error)
            if not self._closing:
                self._failed(error)
        finally:
            self._links.close(_CLOSE_TIMEOUT)
            self._inbox.close()

    def _iterate(self) -> None:
        seconds = self._inbox.sleep(self._timers.seconds_left(self._peer_timeout / 8))
        self._links.poll(seconds)
        self._inbox.awake()
        for chunk, task, used in self._links.progress():
            self._last_progress = time.monotonic()
            if chunk is None:
                self._land(task, used)
            else:
                self._finish([self._inflight.finished(chunk)])
        for connection in self._connections:
            self._receive(connection)
        for call, *arguments in self._inbox.drain():
            call(*arguments)
        self._timers.run_due()
        self._check_timeouts()

    def _receive(self, connection: Connection) -> None:
        frames = connection.read()
        if self._pushes.hear(connection) and self._transfer is not None:
            self._behind.add(connection.shard)
        # What arrived behind something that is not the wire's to take.
        frames = [each for each in frames if each[0].kind not in _TAKEN or not connection.take_back(*each)]
        values = [unbundle(*each) if each[0].kind is FrameKind.VALUE else () for each in frames]
        if received := sum(len(item.data) for items in values for item in items):
            connection.send(Header(FrameKind.RECEIVED, size=received))
        for (header, payload), items in zip(frames, values, strict=True):
            for item in items:
                self._value(header.step, *item)
            if header.kind is FrameKind.WANTED:
                self._pushes.together |= self._inflight.together
                self._pushes.wanted(connection, header)
                self._follow_up(connection)
            elif header.kind is FrameKind.COMMITTED:
                self._pushes.committed(connection, header)
                self._follow_up(connection)
            elif header.kind is FrameKind.LOST:
                if self._pushes.lose(connection, header.part):
                    logger.warning("worker %d is lost, and the others go on without it", header.part)
            elif header.kind is FrameKind.DONE:
                self._needing_servers.discard(connection.shard)
            elif header.kind is FrameKind.STATE and self._transfer is not None:
                self._transfer.hear(header, payload, self._send_state)
            elif header.kind is FrameKind.FAIL:
                raise failure(header, payload)

    def _send_state(self, shard: int, header: Header, payload: bytes) -> None:
        if shard not in self._behind:
            self._connections[shard].send(header, payload)

    def _follow_up(self, connection: Connection) -> None:
        """Send the messages that must follow the pushes, once a server has all of them again."""
        self._send_done(connection)
        if self._transfer is not None and connection.shard in self._behind and self._pushes.complete(connection.shard):
            self._behind.discard(connection.shard)
            self._transfer.resend(connection.shard, self._send_state)

    def _acknowledge(self, task: int, start: int, end: int) -> None:
        self._last_progress = time.monotonic()
        self._finish(self._inflight.acknowledge(task, start, end))

    def _finish(self, flights: Sequence[InFlightChunk]) -> None:
        for flight in flights:
            if self._keep:
                self.records.append(CommRecord(flight.chunk, flight.issued, time.perf_counter_ns()))
            flight.done(flight.chunk)
        self._begin_if_due()

    def _value(self, step: int, number: int, offset: int, size: int, payload: bytes | memoryview) -> None:
        if step != self._pushes.step:
            return
        part = self._pushes.placement.parts[number]
        start = part.offset + offset
        self._pushes.together = True
        # A sum acknowledges the push, too, if the acknowledgement was lost with a connection.
        self._acknowledge(part.task, start, start + size)
        arrived = self._inflight.arrive(part.task, start, start + size)
        if not len(payload):
            self._absent.add(part.task)
        elif arrived.new:
            wide, data = len(payload) // size, memoryview(payload)
            with self._staging.arriving(part.task):
                for low, high in arrived.new:
                    self._staging.store(part.task, low, data[(low - start) * wide : (high - start) * wide])
        self._finish(arrived.pulled)
        if arrived.landed:
            self._land(part.task, part.task not in self._absent)

    def _land(self, task: int, used: bool) -> None:
        self._landed(task, used)
        self._missing_tasks -= 1
        self._begin_if_due()

    def _open(self, again: bool, hyperparameters: bytes) -> None:
        self._last_progress = time.monotonic()
        self._opened.append((again, hyperparameters))
        self._begin_if_due()

    def _retune(self, spec: Spec) -> None:
        self.spec = spec
        self._stale = True

    def _ask(self, transfer: StateTransfer) -> None:
        self._transfer = transfer
        self._behind = {shard for shard in range(len(self._connections)) if not self._pushes.complete(shard)}
        transfer.begin(self._send_state)

    def _ready(self, task: int, used: bool) -> None:
        if self._opened or self._missing_tasks == 0:
            self._early.append((task, used))
        else:
            self._release(task, used)

    def _release(self, task: int, used: bool) -> None:
        self._used[task] = used
        self._engine.post(Ready(task))

    def _begin_if_due(self) -> None:
        """Begin the next round if it was opened and the last one has landed, and its chunks are done."""
        if self._missing_tasks or not self._opened or not self._inflight.idle:
            return
        again, hyperparameters = self._opened.popleft()
        self._pushes.begin(again, hyperparameters)
        self._inflight.begin(self._pushes.step)
        self._missing_tasks = len(self._job.tasks)
        self._absent.clear()
        if self._stale:
            self._stale, self._engine = False, self._make_engine()
        self._engine.post(StepBegin(self._pushes.step))
        early, self._early = self._early, []
        for task, used in early:
            self._release(task, used)

    def _make_engine(self) -> Engine:
        policy = self.spec.build(self._job)
        watched = policy if self._gauge is None else self._gauge.watch(policy)
        return Engine(watched, self, self._job.tasks, None, self._log)

    # ── lost servers and close ──

    def _check_timeouts(self) -> None:
        now = self._silence_detector.tick()
        if now - self._heartbeat_sent > min(1.0, self._peer_timeout / 4):
            self._heartbeat_sent = now
            for connection in self._connections:
                connection.send(Header(FrameKind.ALIVE))
        for connection in self._connections:
            if silent := self._silence_detector.exceeded(connection.last_heard()):
                host, port = connection.address
                why = connection.busy or f"server {connection.shard} at {host}:{port} has been silent"
                raise PeerLost(f"{why} for {silent:.1f} s; {self.last()}")
        if now - self._last_progress > self._stall_timeout:
            self._last_progress = max(self._last_progress, self._inflight.moved)
        if (self._missing_tasks or self._opened) and now - self._last_progress > self._stall_timeout:
            raise StallError(f"nothing has moved for {self._stall_timeout:g} s; {self.last()}", self._engine.waiting())

        if self._close_deadline is not None and (not self._needing_servers or now > self._close_deadline):
            self._send_bye()

    def _begin_close(self, reason: str | None) -> None:
        if reason:
            self._over = True
            self._send_failure(PeerLost(reason))
        elif self._missing_tasks or self._opened:
            self._send_bye()
        else:
            self._close_deadline = time.monotonic() + self._peer_timeout
            self._needing_servers.update(part.shard for part in self.placement.parts)
            for connection in self._connections:
                if self._pushes.ready(connection.shard):
                    connection.send(Header(FrameKind.DONE))
                self._send_done(connection)

    def _send_done(self, connection: Connection) -> None:
        """Tell a server, after all pushes, that this worker is done. Repeat it to a restarted server, which may have
        told this worker, and not the others, that no one needs pushes again.
        """
        if self._close_deadline is None or not self._pushes.ready(connection.shard):
            return
        if self._updated and self._pushes.saved(connection.shard):
            self._needing_servers.discard(connection.shard)
        else:
            connection.send(Header(FrameKind.DONE))

    def _send_bye(self) -> None:
        self._over = True
        for connection in self._connections:
            connection.send(Header(FrameKind.BYE, RETURNS if self._links.returns else 0))

    def _send_failure(self, error: BaseException) -> None:
        flag = FAILURES.index(type(error)) if type(error) in FAILURES else 0
        text = str(error).encode()[:60_000]
        for connection in self._connections:
            connection.send(Header(FrameKind.FAIL, flag, size=len(text)), text)
