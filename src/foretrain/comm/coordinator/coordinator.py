"""Coordinator on rank 0: one engine, fed with the tasks that are ready on every rank.

One thread runs everything here: it reads the other ranks' messages, this rank's own events and the completions of its
executor, posts them to the engine, and sends every decision to all ranks before it issues it itself.
"""

from __future__ import annotations

import contextlib
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from foretrain.comm.coordinator.link import Link, LinkError
from foretrain.comm.coordinator.protocol import (
    CollectiveCommand,
    CommandExecutor,
    CoordinatorMessage,
    accumulated_differently,
    pack,
    pack_spec,
    send_failure,
    unpack_ready,
)
from foretrain.comm.event_loop import Inbox, SilenceDetector, Timers
from foretrain.engine import Decision, Engine
from foretrain.errors import Disagreement, PeerLost, StallError
from foretrain.schedule import Job, Spec
from foretrain.schedule.monitor import Gauge
from foretrain.tasks import Chunk, Ready, StepBegin
from foretrain.units import Time

_COMPLETE, _OWN_READY = -1, -2
"""Kinds of inbox items of this rank, beside messages: a chunk has completed, a task is ready."""
_LOGGED_DECISIONS = 4096
_BYE_TIMEOUT = 2.0
"""Seconds to wait for the other ranks' goodbye."""


class Coordinator:
    """Coordinator of an all-reduce job.

    Args:
        job: tasks and the cost of sending.
        links: to every other rank.
        peer_timeout: seconds of silence after which a rank counts as lost.
        stall_timeout: seconds after which work without progress counts as stuck.
        check_every: steps between two comparisons of the hashes of all commands; 0 never.
        failed: called once with the error that ended the job.
        origin: ns of the monotonic clock that count as 0.
        gauge: observes the policy, to detect that the link has changed.
    """

    def __init__(
        self,
        job: Job,
        spec: Spec,
        executor: CommandExecutor,
        links: Mapping[int, Link],
        *,
        peer_timeout: float,
        stall_timeout: float,
        check_every: int,
        failed: Callable[[BaseException], None],
        origin: int,
        gauge: Gauge | None = None,
    ) -> None:
        self._gauge = gauge
        self._job, self._executor, self._links, self._failed = job, executor, dict(links), failed
        self._peer_timeout, self._stall_timeout, self._check_every = peer_timeout, stall_timeout, check_every
        self.spec = spec
        self._wanted: Spec | None = None
        self._everyone = (1 << (len(links) + 1)) - 1
        count = len(job.tasks)
        # At most two steps are in flight: a rank may be one ahead of this rank's completions.
        self._masks = ([0] * count, [0] * count)
        self._used = ([False] * count, [False] * count)
        self._early: list[int] = []
        self._opened: dict[int, int] = {}
        self._again: dict[int, bool] = {}
        self._left = 0
        self._step_of = dict.fromkeys(range(len(links) + 1), -1)
        self._step = -1
        self._to_land = 0
        self._checks: dict[int, dict[int, tuple[int, bytes]]] = {}
        self._log: deque[Decision] = deque(maxlen=_LOGGED_DECISIONS)
        self._engine = self._make_engine()
        self._timers = Timers(origin)
        self._inbox = Inbox()
        self._closing = self._over = False
        self._silence_detector = SilenceDetector(peer_timeout)
        self._heard = dict.fromkeys(self._links, time.monotonic())
        self._moved = self._heartbeat_sent = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._inbox, selectors.EVENT_READ, None)
        for rank, link in self._links.items():
            self._selector.register(link, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name="foretrain-coordinator", daemon=True)
        self._thread.start()

    # ── the training thread ──

    def open(self, step: int, again: bool) -> None:
        """Announce that the first gradient of round ``step`` exists on this rank."""
        self._inbox.post(CoordinatorMessage.OPEN, step, again)

    def ready(self, task: int, used: bool) -> None:
        """Report that ``task`` is ready on this rank.

        The coordinator's thread is woken only if no other rank is missing. It changes masks before it empties its
        inbox, and this method fills the inbox before it reads the masks, so that one of the two sees the other.
        """
        self._inbox.append(_OWN_READY, task, used)
        if any(masks[task] | 1 == self._everyone for masks in self._masks):
            self._inbox.wake()

    def flush(self) -> None:
        """Do nothing: on this rank ready tasks cost no message."""

    def retune(self, spec: Spec) -> None:
        """Run ``spec`` from the next step on; as only this rank decides, all ranks change at the same step."""
        self._wanted = spec

    @property
    def log(self) -> tuple[Decision, ...]:
        """Return the latest decisions."""
        return tuple(self._log)

    def close(self, reason: str | None = None) -> None:
        """Send a goodbye, or ``reason`` if this rank gives up, wait briefly for the other ranks' goodbyes, and end."""
        if not self._closing:
            self._closing = True
            self._inbox.post(CoordinatorMessage.BYE, 0, reason)
        if threading.current_thread() is not self._thread:
            self._thread.join(_BYE_TIMEOUT + 1)

    # ── the engine's world ──

    def now(self) -> Time:
        """Return the picoseconds since the origin."""
        return self._timers.now()

    def call_at(self, when: Time, call: Callable[[], None]) -> None:
        """Run ``call`` on this thread at ``when``."""
        self._timers.call_at(when, call)

    def start(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        """Send the command for ``chunk`` to all other ranks, then issue it here: messages take longer than a call."""
        used = self._used[self._step & 1]
        unused = frozenset(piece.task for piece in chunk.pieces if not used[piece.task])
        command = CollectiveCommand(self._executor.sequence, chunk, unused)
        flag, body = pack(command)
        self._send_all(CoordinatorMessage.ORDER, flag, command.sequence, body)
        self._executor.start(command, lambda command: self._inbox.post(_COMPLETE, command, done))

    def _send_all(self, kind: int, flag: int = 0, value: int = 0, body: bytes = b"") -> None:
        for rank, link in list(self._links.items()):
            try:
                link.send(kind, flag, value, body)
            except LinkError as error:
                self._hear_last(rank, link)
                self._lose(rank, str(error))

    # ── the loop ──

    def _run(self) -> None:
        try:
            while not self._over:
                self._turn()
        except BaseException as error:
            send_failure(self._links.values(), error)
            self._failed(error)
        finally:
            self._selector.close()
            for link in self._links.values():
                link.close()
            self._inbox.close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._inbox.sleep(self._timers.seconds_left(self._peer_timeout / 8))):
            if key.data is None:
                self._inbox.clear_wakeups()
            else:
                self._hear(key.data)
        self._inbox.awake()
        for kind, value, extra in self._inbox.drain():
            self._take(0, kind, value, extra)
        self._timers.run_due()
        self._watch()

    def _hear(self, rank: int) -> None:
        link = self._links.get(rank)
        if link is None:
            return
        try:
            messages = link.read()
        except LinkError as error:
            self._lose(rank, str(error))
            return
        self._heard[rank] = time.monotonic()
        # A rank that gives up takes nothing any more: what it said before would find its link broken.
        messages.sort(key=lambda message: message.kind != CoordinatorMessage.FAIL)
        for message in messages:
            self._take(rank, message.kind, message.value, message.body if message.body else message.flag)

    def _hear_last(self, rank: int, link: Link) -> None:
        """Take what a rank that takes nothing any more has said at its end."""
        with contextlib.suppress(LinkError):
            for message in link.read():
                if message.kind in (CoordinatorMessage.BYE, CoordinatorMessage.FAIL):
                    self._take(rank, message.kind, message.value, message.body if message.body else message.flag)

    def _take(self, rank: int, kind: int, value: Any, extra: Any) -> None:
        if kind == CoordinatorMessage.READY:
            for task, used in unpack_ready(extra):
                self._ready_at(rank, task, used)
        elif kind == _OWN_READY:
            self._ready_at(rank, value, extra)
        elif kind == _COMPLETE:
            self._moved = time.monotonic()
            extra(value.chunk)
        elif kind == CoordinatorMessage.OPEN:
            self._open_at(rank, value, bool(extra))
        elif kind == CoordinatorMessage.CHECK:
            self._compare(rank, value, extra)
        elif kind == CoordinatorMessage.BYE:
            self._leave(rank, extra)
        elif kind == CoordinatorMessage.FAIL:
            raise PeerLost(self._about(rank, f"gave up: {extra.decode(errors='replace') if extra else 'no reason'}"))

    def _open_at(self, rank: int, step: int, again: bool) -> None:
        if self._again.setdefault(step, again) != again:
            raise accumulated_differently(step, f"rank {rank} {'did' if again else 'did not'}")
        self._step_of[rank] = step
        self._opened[step] = self._opened.get(step, 0) | 1 << rank
        self._moved = time.monotonic()
        if self._left:
            self._miss_the_left()
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        """Begin the next step once all ranks have opened it and every task of the last one is complete."""
        step = self._step + 1
        if self._to_land or self._opened.get(step) != self._everyone:
            return
        del self._opened[step], self._again[step]
        self._step = step
        self._to_land = len(self._job.tasks)
        if self._check_every and step % self._check_every == 0:
            self._compare(0, step, self._executor.sequence.to_bytes(8, "little") + self._executor.digest)
        if self._wanted is not None:
            self.spec, self._wanted = self._wanted, None
            self._send_all(CoordinatorMessage.KNOBS, 0, step, pack_spec(self.spec))
            self._engine = self._make_engine()
        other = step + 1 & 1
        self._masks[other][:] = [0] * len(self._job.tasks)
        self._used[other][:] = [False] * len(self._job.tasks)
        self._engine.post(StepBegin(step))
        early, self._early = self._early, []
        for task in early:
            self._engine.post(Ready(task))

    def _make_engine(self) -> Engine:
        policy = self.spec.build(self._job)
        watched = policy if self._gauge is None else self._gauge.watch(policy)
        return Engine(watched, self, self._job.tasks, self._landed, self._log)

    def _ready_at(self, rank: int, task: int, used: bool) -> None:
        step = self._step_of[rank]
        if not 0 <= task < len(self._job.tasks):
            raise Disagreement(f"rank {rank} says that task {task} is ready; there are {len(self._job.tasks)}")
        masks = self._masks[step & 1]
        if masks[task] >> rank & 1:
            raise Disagreement(f"task {self._job.tasks[task].name!r} is ready twice on rank {rank} in step {step}")
        masks[task] |= 1 << rank
        if used:
            self._used[step & 1][task] = True
        if masks[task] == self._everyone:
            if step == self._step:
                self._engine.post(Ready(task))
            else:
                self._early.append(task)

    def _landed(self, task: int) -> None:
        self._to_land -= 1
        if not self._to_land:
            self._begin_if_due()

    def _compare(self, rank: int, step: int, stamp: bytes) -> None:
        """Compare the hash of all commands before ``step`` with the other ranks'; raise Disagreement if one differs."""
        found = self._checks.setdefault(step, {})
        found[rank] = (int.from_bytes(stamp[:8], "little"), stamp[8:])
        own = found.get(0)
        if own is None:
            return
        for other, theirs in found.items():
            if theirs != own:
                raise Disagreement(
                    f"rank {other} has issued other collectives than rank 0 before step {step}: "
                    f"{theirs[0]} orders with hash {theirs[1].hex()[:12]} against {own[0]} with {own[1].hex()[:12]}; "
                    f"{self._executor.last()}"
                )
        if len(found) == len(self._links) + 1:
            del self._checks[step]

    # ── losses ──

    def _watch(self) -> None:
        now = self._silence_detector.tick()
        if now - self._heartbeat_sent > self._peer_timeout / 4:
            self._heartbeat_sent = now
            self._send_all(CoordinatorMessage.ALIVE)
            for rank in self._links:
                if silent := self._silence_detector.exceeded(self._heard[rank]):
                    raise PeerLost(self._about(rank, f"has been silent for {silent:.1f} s"))
        if (self._to_land or self._opened) and now - self._moved > self._stall_timeout:
            raise StallError(f"nothing has moved for {self._stall_timeout:g} s; {self._executor.last()}", self._waits())
        if self._closing and (not self._links or now - self._moved > _BYE_TIMEOUT):
            self._over = True

    def _leave(self, rank: int, reason: str | None) -> None:
        if rank:
            self._selector.unregister(self._links[rank])
            self._links.pop(rank).close()
            self._left |= 1 << rank
            self._miss_the_left()
            return
        self._moved = time.monotonic()
        if reason:
            send_failure(self._links.values(), PeerLost(self._about(0, f"gave up: {reason}")))
            self._over = True
            return
        for link in self._links.values():
            with contextlib.suppress(LinkError):
                link.send(CoordinatorMessage.BYE)

    def _miss_the_left(self) -> None:
        """Raise PeerLost if a round waits for a rank that closed before the round began."""
        for step, opened in self._opened.items():
            for rank in range(1, self._everyone.bit_length()):
                if self._left >> rank & 1 and not opened >> rank & 1:
                    raise PeerLost(self._about(rank, f"closed its attachment before round {step}, which others begin"))

    def _lose(self, rank: int, why: str) -> None:
        link = self._links.pop(rank, None)
        if link is None:
            return
        self._selector.unregister(link)
        link.close()
        if not self._closing:
            raise PeerLost(self._about(rank, f"is gone ({why})"))

    def _about(self, rank: int, what: str) -> str:
        waits = self._waits()
        doing = waits[0] if waits else f"no task was under way after step {self._step}"
        return f"rank {rank} {what}; {self._executor.last()}; {doing}"

    def _waits(self) -> list[str]:
        """Return what blocks the step: tasks that are not ready on all ranks, then the engine's list."""
        step = max([self._step, *self._opened])
        masks = self._masks[step & 1]
        lines = []
        for task in self._job.tasks:
            mask = masks[task.index]
            if mask != self._everyone:
                missing = [str(r) for r in range(self._everyone.bit_length()) if not mask >> r & 1]
                lines.append(f"step {step}: task {task.name!r} is not ready on rank {', '.join(missing)}")
        return [*lines, *self._engine.waiting()] if self._to_land or self._opened else []
