"""Client of the coordinator on every other rank: reports ready tasks and issues the commands that it receives."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from foretrain.comm.coordinator.link import Link, LinkError
from foretrain.comm.coordinator.protocol import (
    CommandExecutor,
    CoordinatorMessage,
    pack_ready,
    ready_word,
    unpack,
    unpack_failure,
    unpack_spec,
)
from foretrain.comm.event_loop import SilenceDetector
from foretrain.engine import Decision
from foretrain.errors import PeerLost
from foretrain.schedule import Spec
from foretrain.tasks import Task


class CoordinatorClient:
    """Link of one rank to the coordinator, and the thread that listens on it.

    Args:
        small: bytes of ready tasks below which no message is sent; see Note [Batched small tasks].
        spec: the policy that the coordinator begins with.
        peer_timeout: seconds of silence after which the coordinator counts as lost.
        check_every: steps between two hashes; 0 never.
        failed: called once with the error that ended the job.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        small: int,
        spec: Spec,
        executor: CommandExecutor,
        link: Link,
        *,
        peer_timeout: float,
        check_every: int,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._tasks, self._executor, self._link, self._failed = tasks, executor, link, failed
        self._peer_timeout, self._check_every = peer_timeout, check_every
        self._small = small
        self._ready: list[int] = []
        self._ready_bytes = 0
        self.spec = spec
        self._closing = self._left = False
        self._total = sum(task.size for task in tasks)
        self._ordered = 0
        self._step = -1
        self._thread = threading.Thread(target=self._run, name="foretrain-client", daemon=True)
        self._thread.start()

    def open(self, step: int, again: bool) -> None:
        """Report that ``step`` has begun; every ``check_every`` steps also send the hash of issued commands."""
        self._step = step
        if self._left:
            self._failed(PeerLost(self._about("closed its attachment while this rank goes on")))
        if self._check_every and step % self._check_every == 0:
            stamp = self._executor.sequence.to_bytes(8, "little") + self._executor.digest
            self._send(CoordinatorMessage.CHECK, 0, step, stamp)
        self._send(CoordinatorMessage.OPEN, again, step)

    def ready(self, task: int, used: bool) -> None:
        """Report ``task`` as ready, once enough bytes are ready; see Note [Batched small tasks]."""
        self._ready.append(ready_word(task, used))
        self._ready_bytes += self._tasks[task].size
        if self._ready_bytes >= self._small:
            self.flush()

    def flush(self) -> None:
        """Report all ready tasks."""
        if self._ready:
            self._send(CoordinatorMessage.READY, body=pack_ready(self._ready))
            self._ready.clear()
            self._ready_bytes = 0

    @property
    def log(self) -> tuple[Decision, ...]:
        """Return no decisions: the coordinator makes them."""
        return ()

    def retune(self, spec: Spec) -> None:
        """Ignore the call: only rank 0 changes the policy."""

    def close(self, reason: str | None = None) -> None:
        """Send a goodbye, or ``reason`` if this rank gives up, and end the thread."""
        if not self._closing:
            self._closing = True
            kind = CoordinatorMessage.FAIL if reason else CoordinatorMessage.BYE
            self._send(kind, body=(reason or "").encode()[:60_000])
            self._link.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _send(self, kind: int, flag: int = 0, value: int = 0, body: bytes = b"") -> None:
        # The listening thread notices a link that has ended, after it has read what the coordinator sent before.
        with contextlib.suppress(LinkError):
            self._link.send(kind, flag, value, body)

    def _run(self) -> None:
        try:
            self._listen()
        except LinkError as error:
            if not self._closing:
                self._failed(PeerLost(self._about(f"is gone ({error})")))
        except BaseException as error:
            self._send(CoordinatorMessage.FAIL, body=str(error).encode()[:60_000])
            self._failed(error)

    def _listen(self) -> None:
        detector = SilenceDetector(self._peer_timeout)
        heard = sent = time.monotonic()
        while not self._closing:
            messages = self._link.receive(self._peer_timeout / 8)
            now = detector.tick()
            if messages:
                heard = now
            elif silent := detector.exceeded(heard):
                raise PeerLost(self._about(f"has been silent for {silent:.1f} s"))
            if now - sent > self._peer_timeout / 4:
                sent = now
                self._send(CoordinatorMessage.ALIVE)
            for message in messages:
                if message.kind == CoordinatorMessage.ORDER:
                    command = unpack(message.value, message.flag, message.body, self._tasks)
                    if command.chunk.op != "reduce_scatter":
                        self._ordered += command.chunk.size
                    # The coordinator counts credit, so that a completion here means nothing.
                    try:
                        self._executor.start(command, lambda command: None)
                    except LinkError as error:  # of the collectives, which have links of their own
                        raise PeerLost(str(error)) from None
                elif message.kind == CoordinatorMessage.KNOBS:
                    self.spec = unpack_spec(message.body)
                elif message.kind == CoordinatorMessage.FAIL:
                    raise unpack_failure(message.flag, message.body)
                elif message.kind == CoordinatorMessage.BYE:
                    # Chunks in flight complete without it, but nothing more will be ordered.
                    self._left = True
                    if self._ordered < (self._step + 1) * self._total:
                        raise PeerLost(self._about("closed its attachment before all of this step was ordered"))
                    return

    def _about(self, what: str) -> str:
        return f"rank 0, the coordinator, {what}; {self._executor.last()}; step {self._step} is in hand"
