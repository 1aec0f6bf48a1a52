"""Heartbeats over links that carry nothing else: before there is a schedule, and where its order is replayed.

Rank 0 listens to every rank and every rank to rank 0, as under the coordinator, which takes the links over and keeps
the same promise: a rank that is stopped, gone, or gives up is named on all ranks within the timeout.
"""

from __future__ import annotations

import contextlib
import selectors
import threading
import time
from collections.abc import Callable, Mapping

from foretrain.comm.coordinator.link import Link, LinkError
from foretrain.comm.coordinator.protocol import CoordinatorMessage, send_failure, unpack_failure
from foretrain.comm.event_loop import FAILURE_GRACE, Inbox, SilenceDetector
from foretrain.errors import PeerLost


class Heartbeat:
    """Owner of ``links`` and of a thread that listens on them, until `release` or `close`.

    Args:
        links: from rank 0 to every other, or from another to rank 0.
        peer_timeout: seconds of silence after which a rank counts as lost.
        failed: called once with the error that ended the job.
        doing: returns what this rank does meanwhile, for messages.
        begun: returns how many scheduled rounds this rank has begun.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        peer_timeout: float,
        failed: Callable[[BaseException], None],
        doing: Callable[[], str],
        begun: Callable[[], int],
    ) -> None:
        self._links, self._peer_timeout, self._failed, self._doing = dict(links), peer_timeout, failed, doing
        self._begun = begun
        self._silence_detector = SilenceDetector(peer_timeout)
        self._heard = dict.fromkeys(self._links, time.monotonic())
        self.left: dict[int, int] = {}
        """Rounds of each rank that has closed its attachment, which is an error only when another rank needs more."""
        self._heartbeat_sent = -peer_timeout
        self._stopping = False
        self._inbox = Inbox()
        self._thread = threading.Thread(target=self._run, name="foretrain-heartbeat", daemon=True)
        if links:
            self._thread.start()

    def release(self) -> dict[int, Link]:
        """End the thread and return the links; all ranks must have done so before any of them uses a link."""
        self._stop()
        return self._links

    def close(self, reason: str | None = None) -> None:
        """Send a goodbye, or ``reason`` if this rank gives up, and end the thread and links."""
        self._stop()
        if reason:
            # Other ranks repeat rank 0's reason as it is; rank 0 adds the name to another rank's.
            send_failure(self._links.values(), PeerLost(reason if 0 in self._links else f"rank 0 gave up: {reason}"))
        for link in self._links.values():
            if not reason:
                with contextlib.suppress(LinkError):
                    link.send(CoordinatorMessage.BYE, 0, self._begun())
            link.close()
        self._links.clear()

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._inbox.post()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        if not self._thread.is_alive():
            self._inbox.close()

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._inbox, selectors.EVENT_READ, None)
                for rank, link in self._links.items():
                    selector.register(link, selectors.EVENT_READ, rank)
                while not self._stopping:
                    self._send()
                    # Often enough to explain a failed collective within the grace it has.
                    for key, _ in selector.select(self._inbox.sleep(min(FAILURE_GRACE / 2, self._peer_timeout / 8))):
                        if key.data is not None and self._receive(key.data):
                            selector.unregister(key.fileobj)
                    self._check()
        except BaseException as error:
            if not self._stopping:
                send_failure(self._links.values(), error)
                self._failed(error)

    def _send(self) -> None:
        """Send heartbeats at an interval, never as answers: two peers that answer each other would not stop."""
        now = time.monotonic()
        if now - self._heartbeat_sent < self._peer_timeout / 4:
            return
        self._heartbeat_sent = now
        for rank, link in self._links.items():
            if rank not in self.left:
                try:
                    link.send(CoordinatorMessage.ALIVE)
                except LinkError as error:
                    # Its last message may hold the reason.
                    self._receive(rank)
                    raise self._lost(rank, f"is gone ({error})") from None

    def _receive(self, rank: int) -> bool:
        """Read messages of ``rank``; return whether it has said goodbye."""
        try:
            messages = self._links[rank].read()
        except LinkError as error:
            raise self._lost(rank, f"is gone ({error})") from None
        self._heard[rank] = time.monotonic()
        for message in messages:
            if message.kind == CoordinatorMessage.FAIL:
                error = unpack_failure(message.flag, message.body)
                raise error if rank == 0 else self._lost(rank, f"gave up: {error}")
            if message.kind == CoordinatorMessage.BYE:
                self.left[rank] = message.value
                return True
        return False

    def _check(self) -> None:
        """Raise PeerLost for a rank that is silent, or has left before a round that this rank has begun."""
        for rank, rounds in self.left.items():
            if rounds < self._begun():
                raise self._lost(rank, f"closed its attachment before round {rounds}, which others begin")
        self._silence_detector.tick()
        for rank, heard in self._heard.items():
            if rank not in self.left and (silent := self._silence_detector.exceeded(heard)):
                raise self._lost(rank, f"has been silent for {silent:.1f} s")

    def miss(self) -> None:
        """Raise PeerLost, on all ranks, if a rank has closed its attachment while this one goes on."""
        if self.left:
            error = self._lost(min(self.left), "closed its attachment while this rank goes on")
            send_failure(self._links.values(), error)
            self._failed(error)
            raise error

    def _lost(self, rank: int, what: str) -> PeerLost:
        return PeerLost(f"rank {rank} {what}; {self._doing()}")
