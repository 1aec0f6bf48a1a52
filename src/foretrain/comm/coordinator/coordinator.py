"""Coordinator on rank 0: one engine, fed with the tasks that are ready on every rank.

Its thread reads the other ranks' messages and this rank's own events, posts them to the engine, and sends every
decision to all ranks before it issues it itself.

Note [Who turns the engine]. A completion comes on the executor's thread, which would only wake the coordinator's to
have the next operation started. It turns the engine itself, under a lock. Whoever finds the lock taken leaves its item
in the inbox: the owner looks there again after it has released the lock, so that no item is left.

Note [Enough in flight]. While a few operations are under way, nothing is lost if a task that becomes ready is looked at
when the next of them completes. Then messages and ready tasks wake nobody, which matters where the model computes on
the cores that would wake: the coordinator's thread sleeps with its inbox alone, and who completes an operation reads
the links.
"""

from __future__ import annotations

import contextlib
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from foretrain.comm.coordinator.link import Link, LinkError, framed
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
_ENOUGH = 3
"""Operations in flight that keep links busy until the next one is started: two may end at the same moment."""
_DEAF = 0.1
"""Seconds for which the links are not looked at, at most; see Note [Enough in flight]."""
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
        small: bytes of this rank's ready tasks below which no thread is woken; see Note [Batched small tasks] in
            `foretrain.comm.coordinator.protocol`.
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
        small: int = 0,
        gauge: Gauge | None = None,
    ) -> None:
        self._gauge, self._small = gauge, small
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
        self._turning = threading.Lock()
        """Of the thread that turns the engine; see Note [Who turns the engine]."""
        self._error: BaseException | None = None
        """What another thread met when it turned the engine; this object's own thread raises it."""
        self._reported: list[int] = []
        self._reported_bytes = 0
        self._unsent = bytearray()
        """Orders of this turn, for all other ranks."""
        self._unissued: list[tuple[CollectiveCommand, Callable[[Chunk], None]]] = []
        self._flying = 0
        self._deaf = False
        """Whether the coordinator's thread sleeps without the links, or is about to."""
        self._closing = self._over = False
        self._silence_detector = SilenceDetector(peer_timeout)
        self._heard = dict.fromkeys(self._links, time.monotonic())
        self._moved = self._heartbeat_sent = time.monotonic()
        self._selector, self._inbox_selector = selectors.DefaultSelector(), selectors.DefaultSelector()
        for selector in (self._selector, self._inbox_selector):
            selector.register(self._inbox, selectors.EVENT_READ, None)
        for rank, link in self._links.items():
            self._selector.register(link, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name="foretrain-coordinator", daemon=True)
        self._thread.start()

    # ── the training thread ──

    def open(self, step: int, again: bool) -> None:
        """Announce that the first gradient of round ``step`` exists on this rank."""
        self._inbox.post(CoordinatorMessage.OPEN, step, again)

    def ready(self, task: int, used: bool) -> None:
        """Report that ``task`` is ready on this rank; wake the coordinator's thread once enough bytes are."""
        self._inbox.append(_OWN_READY, task, used)
        self._reported.append(task)
        self._reported_bytes += self._job.tasks[task].size
        if self._reported_bytes >= self._small:
            self.flush()

    def flush(self) -> None:
        """Wake the coordinator's thread if no other rank is missing for a task that was reported since the last call.

        It changes masks before it empties its inbox, and the inbox was filled before this method reads the masks, so
        that one of the two sees the other.
        """
        everyone, reported = self._everyone, self._reported
        if any(masks[task] | 1 == everyone for task in reported for masks in self._masks):
            self._wake()
        reported.clear()
        self._reported_bytes = 0

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
        """Run ``call`` on the coordinator's thread at ``when``."""
        self._timers.call_at(when, call)
        if threading.current_thread() is not self._thread:
            self._inbox.wake()

    def start(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        """Have the command for ``chunk`` sent to all other ranks, and issued here, at the end of this turn."""
        used = self._used[self._step & 1]
        unused = frozenset(piece.task for piece in chunk.pieces if not used[piece.task])
        command = CollectiveCommand(self._executor.sequence + len(self._unissued), chunk, unused)
        flag, body = packed = pack(command)
        if self._links:
            self._unsent += framed(CoordinatorMessage.ORDER, flag, command.sequence, body)
        self._unissued.append((command._replace(packed=packed), done))

    def _issue(self) -> None:
        """Send this turn's orders in one message to each rank, then issue them: messages take longer than calls."""
        if self._unsent:
            self._send_all(bytes(self._unsent))
            self._unsent.clear()
        unissued, self._unissued = self._unissued, []
        self._flying += len(unissued)
        for command, done in unissued:
            self._executor.start(command, partial(self._completed, done))

    def _completed(self, done: Callable[[Chunk], None], command: CollectiveCommand) -> None:
        self._inbox.append(_COMPLETE, command, done)
        self._turn_here()

    def _send_all(self, messages: bytes) -> None:
        for rank, link in list(self._links.items()):
            try:
                link.send_framed(messages)
            except LinkError as error:
                self._hear_last(rank, link)
                self._lose(rank, str(error))

    # ── the loop; see Note [Who turns the engine] ──

    def _wake(self) -> None:
        """Have the inbox emptied: by the thread that turns the engine, or will, or by the coordinator's."""
        if self._flying < _ENOUGH and not self._turning.locked():
            self._inbox.wake()

    def _turn_here(self) -> None:
        """Empty the inbox on the caller's thread, unless another one turns the engine."""
        while self._inbox.filled and self._turning.acquire(blocking=False):
            try:
                if self._over or self._error is not None:
                    return
                if self._deaf:
                    self._hear_all(self._selector.select(0))
                self._empty_inbox()
            except BaseException as error:
                self._error = error
                self._inbox.wake()
            finally:
                self._turning.release()
        if self._deaf and self._flying < _ENOUGH:
            self._inbox.wake()

    def _empty_inbox(self) -> None:
        for kind, value, extra in self._inbox.drain():
            self._take(0, kind, value, extra)
        self._issue()

    def _run(self) -> None:
        try:
            while not self._over:
                self._turn()
        except BaseException as error:
            self._over = True
            send_failure(self._links.values(), error)
            self._failed(error)
        finally:
            self._selector.close()
            self._inbox_selector.close()
            for link in self._links.values():
                link.close()
            self._inbox.close()

    def _turn(self) -> None:
        # Timers are read after the sleep is announced: another thread that sets one then wakes this one.
        most = self._inbox.sleep(_BYE_TIMEOUT / 8 if self._closing else self._peer_timeout / 8)
        # Set before it is decided: whoever completes an operation meanwhile then wakes this thread.
        self._deaf = True
        if self._flying < _ENOUGH:
            self._deaf = False
            found = self._selector.select(self._timers.seconds_left(most))
        else:
            found = self._inbox_selector.select(self._timers.seconds_left(min(most, _DEAF)))
        self._inbox.awake()
        # By this thread only: another one that did it would let it sleep on.
        if any(key.data is None for key, _ in found):
            self._inbox.clear_wakeups()
        with self._turning:
            if self._error is not None:
                raise self._error
            self._hear_all(self._selector.select(0) if self._deaf else found)
            self._deaf = False
            self._empty_inbox()
            self._timers.run_due()
            self._issue()
            self._watch()

    def _hear_all(self, found: Iterable[tuple[selectors.SelectorKey, int]]) -> None:
        for key, _ in found:
            if key.data is not None:
                self._hear(key.data)

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
            self._flying -= 1
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
            self._unsent += framed(CoordinatorMessage.KNOBS, 0, step, pack_spec(self.spec))
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
            self._send_all(framed(CoordinatorMessage.ALIVE))
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
        self._issue()  # a goodbye comes behind all orders
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
