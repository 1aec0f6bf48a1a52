"""Collectives over a ring of sockets, with recursive doubling for small sums; and the links that they need.

One thread runs the operations, each a call of ring.cpp that holds no interpreter lock. That the peer at the other end
of a link has ended shows at once; that it is stopped, or its host unreachable, does not: whoever finds that out (the
job's heartbeat) closes the collectives, which ends the wait.

Note [Whom to blame]. A rank whose operation fails shuts its links down, so that all others fail as well and do not wait
for it. Before, it sends each of them the number of the rank that it lost as one byte of urgent data, which TCP delivers
beside the stream. A rank whose peer hangs up looks for that byte: with it, the peer is a witness, without, the culprit.
It shuts down its sending only: one that receives no more would answer what comes by a reset, which discards the byte.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrain.comm.bounded import Hint
from foretrain.comm.collectives import runners
from foretrain.comm.collectives.plan import KINDS, Operation, legs, peers
from foretrain.comm.coordinator.handshake import Listener, connect
from foretrain.comm.coordinator.link import Link, LinkError, set_service
from foretrain.errors import ConfigError

TELLING = 5.0
"""Seconds for which a rank that fails waits, at most, for room to tell its peers why."""
_PLANS_KEPT = 1024
_LONGEST = threading.TIMEOUT_MAX
_open: weakref.WeakSet[RingCollectives] = weakref.WeakSet()
"""All collectives of this process with sockets; see Note [Forked children] in `foretrain.comm.coordinator.link`."""


class RingWork:
    """Operation of `RingCollectives`; a `foretrain.comm.collectives.Work`."""

    def __init__(self, operation: Operation, values: NDArray[Any], kind: str, plan: NDArray[np.int64]) -> None:
        self.operation: Operation = operation
        self.kind, self.plan = kind, plan
        self.values: NDArray[np.uint8] = values.view(np.uint8)
        self.ahead = 0
        self._error: BaseException | None = None
        self._done = False
        # A lock that is held until then: threading.Event takes four times as long.
        self._pending = threading.Lock()
        self._pending.acquire()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the operation is done; return False if ``timeout`` seconds have passed before.

        Raises:
            LinkError: it failed; ``peer`` is the rank that was lost, None where these collectives were closed.
        """
        # Looked at first, because Ctrl-C between the next two lines would leave the lock held.
        if not self._done:
            if not self._pending.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), _LONGEST)):
                return False
            self._pending.release()
        if isinstance(self._error, LinkError):  # a copy for each: a traceback belongs to who raised it
            raise LinkError(str(self._error), self._error.peer)
        if self._error is not None:
            raise LinkError(f"{self.operation} failed: {self._error!r}") from self._error
        return True

    def finish(self, error: BaseException | None) -> None:
        """End the operation, once."""
        self._error, self._done = error, True
        self._pending.release()


class RingCollectives:
    """A `foretrain.comm.collectives.Collectives` over ``links``, whose sockets it owns from now on.

    Args:
        links: to all `plan.peers` of this rank, as `connect_peers` makes them; links to others are closed.
        rank: of this process.
        ranks: number of all.
        compiled: False runs the same in Python, slowly; None does so where C++ cannot be compiled, with a warning.

    Raises:
        ConfigError: a link is missing.
        LinkError: a link has ended.
    """

    def __init__(self, links: Mapping[int, Link], rank: int, ranks: int, *, compiled: bool | None = None) -> None:
        self.rank, self.ranks = rank, ranks
        self._sockets: dict[int, socket.socket] = {}
        self._closed = False
        self._changing = threading.Lock()
        self._queue: SimpleQueue[RingWork | None] = SimpleQueue()
        self._unfinished: deque[RingWork] = deque()
        self._plans: dict[tuple[Operation, int, int], NDArray[np.int64]] = {}
        _open.add(self)
        try:
            self._take(links)
            self._runner = runners.runner(compiled)
            self._thread = threading.Thread(target=self._work, name="foretrain-ring", daemon=True)
            self._thread.start()
        except BaseException:
            _close(self._sockets.values())
            for link in links.values():
                link.close()
            raise

    def all_reduce(self, values: NDArray[Any], *, bfloat16: bool = False, hint: Hint | None = None) -> RingWork:
        """Replace ``values`` by their sum over all ranks."""
        return self._submit("all_reduce", values, bfloat16)

    def reduce_scatter(self, values: NDArray[Any], *, bfloat16: bool = False, hint: Hint | None = None) -> RingWork:
        """Replace block ``rank`` of ``values`` by its sum over all ranks; the other blocks are undefined afterwards."""
        return self._submit("reduce_scatter", values, bfloat16)

    def all_gather(self, values: NDArray[Any], *, bfloat16: bool = False, hint: Hint | None = None) -> RingWork:
        """Replace each block r of ``values`` by that of rank r."""
        return self._submit("all_gather", values, bfloat16)

    def close(self) -> None:
        """End the thread and the sockets; operations under way fail. From any thread, any number of times."""
        with self._changing:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._shut_down(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            _close(self._sockets.values())  # Only now: the thread's poll must not see a descriptor that is used again.

    def _take(self, links: Mapping[int, Link]) -> None:
        for peer in peers(self.rank, self.ranks):
            if peer not in links:
                remedy = "make the links with connect_peers"
                raise ConfigError("links", sorted(links), f"has none to rank {peer} of {self.ranks}", remedy)
            self._sockets[peer] = links[peer].detach()
            set_service(self._sockets[peer], 0)
        for peer in links.keys() - self._sockets.keys():
            links[peer].close()

    def _submit(self, operation: Operation, values: NDArray[Any], bfloat16: bool) -> RingWork:
        kind = kind_of(values, bfloat16)
        if operation != "all_reduce" and len(values) % self.ranks:
            problem = f"are not divisible by the number of ranks, {self.ranks}"
            raise ConfigError("values", f"{len(values)} elements", problem, f"pad them for {operation}")
        with self._changing:
            if self._closed:
                raise self._closed_error()
            work = RingWork(operation, values, kind, self._plan((operation, len(values), values.itemsize)))
            self._unfinished.append(work)
            if len(self._unfinished) == 1 and work.plan[0]:
                work.ahead = self._runner.start(work.values, work.plan)  # before the thread has woken up
            elif len(self._unfinished) == 2:
                self._offer()
            self._queue.put(work)
        return work

    def _plan(self, key: tuple[Operation, int, int]) -> NDArray[np.int64]:
        if key not in self._plans:
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            operation, count, item = key
            descriptors = {peer: each.fileno() for peer, each in self._sockets.items()}
            self._plans[key] = runners.encode(legs(operation, self.rank, self.ranks, count, item), descriptors)
        return self._plans[key]

    def _work(self) -> None:
        fault: BaseException | None = None
        while (work := self._queue.get()) is not None:
            if fault is None:
                try:
                    self._execute(work)
                except BaseException as error:
                    fault = error
                    self._shut_down(socket.SHUT_WR)
            self._advance()
            work.finish(fault)
            del work  # or the last array would live until the next operation

    def _execute(self, work: RingWork) -> None:
        if work.plan[0]:
            lost = self._runner.run(work.values, work.kind, work.plan, work.ahead)
            if lost is not None:
                raise self._lost(work.operation, *lost)

    def _advance(self) -> None:
        """Forget the operation that has ended, and offer the one behind the one that is next."""
        with self._changing:
            self._unfinished.popleft()
            if self._unfinished:
                self._unfinished[0].ahead = self._runner.claim() or self._unfinished[0].ahead
            if len(self._unfinished) > 1:
                self._offer()

    def _offer(self) -> None:
        """Let the beginning of the second operation be sent during the first, unless it depends on the first's."""
        first, second = list(islice(self._unfinished, 2))
        if second.plan[0] and not np.may_share_memory(first.values, second.values):
            self._runner.offer(second.values, second.plan)

    def _lost(self, operation: Operation, descriptor: int, error: int) -> LinkError:
        """Return the error of a lost link, after telling the others; see Note [Whom to blame]."""
        if self._closed:
            return self._closed_error()
        peer, ended = next((peer, each) for peer, each in self._sockets.items() if each.fileno() == descriptor)
        culprit, what = peer, os.strerror(error) if error else "it hung up"
        with contextlib.suppress(OSError):
            if told := ended.recv(1, socket.MSG_OOB | socket.MSG_DONTWAIT):
                culprit, what = told[0], f"rank {peer} lost it"
        if self.ranks <= 256:
            self._tell(culprit)
        text = f"rank {culprit} was lost during {operation}: {what}; that rank's own output says more"
        return LinkError(text, culprit)

    def _tell(self, culprit: int) -> None:
        """Send ``culprit`` to all peers; one that has neither read what came before nor failed has some seconds."""
        deadline = time.monotonic() + TELLING
        for each in self._sockets.values():
            room = select.poll()
            with contextlib.suppress(OSError, ValueError):  # it has ended, or was closed meanwhile
                room.register(each, select.POLLOUT | select.POLLRDHUP)
                room.poll(max(0.0, 1000 * (deadline - time.monotonic())))
                each.send(bytes([culprit]), socket.MSG_OOB | socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _closed_error(self) -> LinkError:
        return LinkError(f"the collectives of rank {self.rank} were closed on this side")

    def _shut_down(self, how: int) -> None:
        for each in self._sockets.values():
            with contextlib.suppress(OSError):  # ENOTCONN, EBADF: it has ended already
                each.shutdown(how)

    def _leave(self) -> None:
        """Give up the copies of the sockets in a forked child; the collectives stay the parent's."""
        self._closed, self._changing = True, threading.Lock()
        _close(self._sockets.values())
        self._sockets = {}  # its close() must not shut down the parent's connections


def connect_peers(
    host: str,
    exchange: Callable[[tuple[str, int]], Sequence[tuple[str, int]]],
    secret: bytes,
    rank: int,
    ranks: int,
    timeout: float,
    wanted: Sequence[int] | None = None,
) -> dict[int, Link]:
    """Link this rank to its peers; all ranks call this at the same time.

    Every rank first connects to lower ones and then accepts higher ones: rank 0 accepts at once, so that rank 1 can go
    on to accept, and so on; nobody waits in a circle.

    Args:
        host: address of this host to listen on.
        exchange: gathers everyone's (host, port), by rank; called once by each rank.
        secret: of the job.
        rank: of this process.
        ranks: number of all.
        timeout: seconds until all links must be made, not counting ``exchange``.
        wanted: ranks, ascending, of which each wants this one, too; None are `plan.peers`.

    Raises:
        LinkError: a rank is not there in time, or does not know the secret.
        ConfigError: the secret is short, or the host is none to listen on.
    """
    wanted = peers(rank, ranks) if wanted is None else [peer for peer in wanted if peer != rank]
    found: dict[int, Link] = {}
    try:
        with Listener(host, secret, expected=[peer for peer in wanted if peer > rank]) as listener:
            addresses = exchange(listener.address)
            deadline = time.monotonic() + timeout
            for peer in wanted:
                if peer < rank:
                    left = deadline - time.monotonic()
                    found[peer] = connect(addresses[peer], secret, rank, left, peer=peer)
            found |= listener.accept(max(0.0, deadline - time.monotonic()))
        if missing := [peer for peer in wanted if peer not in found]:
            shown = ", ".join(map(str, missing))
            what = f"rank {rank} was not reached by rank {shown} within {timeout:g} s"
            raise LinkError(f"{what}; is it running, and is its secret the same?", missing[0])
    except BaseException:
        for link in found.values():
            link.close()
        raise
    return found


def kind_of(values: NDArray[Any], bfloat16: bool) -> str:
    """Return the kind of the elements of ``values``; raise ConfigError for an array that cannot be summed."""
    if not isinstance(values, np.ndarray):
        raise ConfigError("values", type(values).__name__, "is no NumPy array", "pass one, e.g. tensor.numpy()")
    flags = values.flags
    if values.ndim != 1 or not (flags.c_contiguous and flags.writeable and flags.aligned):
        problem = "is not a contiguous, aligned, writable array of one dimension"
        raise ConfigError("values", f"shape {values.shape}", problem, "pass e.g. np.ravel(values).copy()")
    kind, wanted = values.dtype.name, "bfloat16" if bfloat16 else None
    if bfloat16 and kind == "uint16":
        return "bfloat16"
    if kind not in KINDS or kind != (wanted or kind) or not values.dtype.isnative:
        remedy = "pass its bits: values.view(np.uint16)" if bfloat16 else f"use {', '.join(KINDS)} (see its flag)"
        raise ConfigError("values", str(values.dtype), "is no type of elements that can be summed here", remedy)
    return kind


def _close(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _leave_all() -> None:
    for each in _open:
        each._leave()


os.register_at_fork(after_in_child=_leave_all)
