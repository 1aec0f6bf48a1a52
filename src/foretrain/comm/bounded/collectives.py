"""Collectives with bounded loss; a `foretrain.comm.collectives.Collectives`.

# Note [Feedback]
Who sums knows what did not come of whose contribution, and its STOP says so to that rank, which keeps a copy of what it
has sent: the sum takes its place. It adds what was lost to its next contribution of the same slot. A STOP that is
itself lost while its receiver ends the operation leaves the loss unknown; then it is zero, as without feedback.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretrain.comm.bounded import CLASSES, NO_EXTENTS, Hint, Loss
from foretrain.comm.bounded.engine import (
    HEADER,
    BoundedEngine,
    EngineFailed,
    EngineOptions,
    Path,
    open_socket,
    own_path,
)
from foretrain.comm.bounded.optireduce import transform
from foretrain.comm.bounded.plans import Algorithm, BoundedOperation, encode, scratch, stages
from foretrain.comm.bounded.server_state import ServerState
from foretrain.comm.buffers import narrow, widen
from foretrain.comm.collectives.plan import KINDS
from foretrain.comm.collectives.ring import connect_peers, kind_of
from foretrain.comm.coordinator.addresses import decoded, encoded
from foretrain.comm.coordinator.link import Link, LinkError
from foretrain.comm.options import Droppable
from foretrain.errors import ConfigError

logger = logging.getLogger("foretrain")

_PLANS_KEPT = 1024
_SMALL = 500
"""Thousandths of an array's packets that are small, of those that are compared by magnitude."""


class _Sent(NamedTuple):
    """Contribution as it went out.

    Attributes:
        key: of its array: slot, operation and elements.
        transformed: whether it was.
        bfloat16: whether its elements are that, in uint16.
        kept: a copy of it, where what is lost goes again.
        vital: bytes that are not transformed, as of `Hint`.
    """

    key: tuple[int, BoundedOperation, int]
    transformed: bool
    bfloat16: bool
    kept: NDArray[Any] | None
    vital: NDArray[np.int64]


class BoundedWork:
    """Operation of `BoundedCollectives`; a `foretrain.comm.collectives.Work`.

    Attributes:
        tolerant: whether some may be lost.
        losses: what did not come here, when it is done; what a server has lost comes later, see `losses_elsewhere`.
        told: set when the server has said that; None where nobody will.
        sent: this rank's contribution, where that is not ``values`` as they were.
        pulled: what a server sends back, where that is no sum.
    """

    def __init__(
        self,
        operation: BoundedOperation,
        values: NDArray[Any],
        result: slice = slice(None),
        *,
        tolerant: bool = False,
        pulled: NDArray[Any] | None = None,
    ) -> None:
        self.tolerant, self.pulled = tolerant, pulled
        self.operation: BoundedOperation = operation
        self.values: NDArray[np.uint8] = values.view(np.uint8)
        self.dtype = values.dtype
        self.losses: list[Loss] = []
        self.told: threading.Event | None = None
        self._losses_elsewhere: list[Loss] = []
        self.sent: _Sent | None = None
        self._result = values[result]
        self._error: BaseException | None = None
        self._done = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the operation is done; return False if ``timeout`` seconds have passed before.

        Raises:
            LinkError: it failed; ``peer`` is the rank that was lost, None where these collectives were closed.
        """
        if not self._done.wait(timeout):
            return False
        if isinstance(self._error, LinkError):  # a copy for each: a traceback belongs to who raised it
            raise LinkError(str(self._error), self._error.peer)
        return True

    def finish(self, losses: list[Loss], error: LinkError | None) -> None:
        """End the operation, once."""
        self.losses, self._error = losses, error
        self._done.set()

    def tell(self, losses: list[Loss]) -> None:
        """Set what a server has lost of this operation, once."""
        assert self.told is not None
        self._losses_elsewhere = losses
        self.told.set()

    def losses_elsewhere(self, timeout: float = 0.0) -> list[Loss] | None:
        """Return what a server has lost of this operation; None where it has not said so within ``timeout`` seconds."""
        if self.told is not None and not self.told.wait(timeout):
            return None
        return self._losses_elsewhere

    def overlaps(self, other: BoundedWork) -> bool:
        """Return whether this operation and ``other`` may share memory."""
        pairs = product((self.values, self.pulled), (other.values, other.pulled))
        return any(np.may_share_memory(one, two) for one, two in pairs if one is not None and two is not None)

    def energy(self) -> float:
        """Return the sum of squares of the result, in floats of 64 bits but for float32."""
        values = self._result
        if values.dtype == np.uint16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(all="ignore"):
            whole = np.dot(values, values) if values.dtype == np.float32 else np.square(values, dtype=np.float64).sum()
        return float(whole)


class BoundedCollectives:
    """Collectives over UDP that are over when enough has come.

    Args:
        engine: of this rank, which these own from now on.
        rank: of this process.
        ranks: number of those that have values.
        over: who sums what, see `foretrain.comm.bounded.plans`.
        tolerance: p, the share of each rank's contribution to a sum that may be lost, where no hint says it.
        droppable: which packets switches may drop rather than mark: "packet": all; "layer": all but what a hint has as
            important, back layers; "magnitude": those of them whose values are small on average, compared with the
            array before.
        rescale: whether a sum that misses contributions is multiplied by N over how many came.
        feedback: whether what is lost of a contribution is added to the next one of the same slot; see Note [Feedback].
        hadamard: whether contributions are transformed, also where nothing may be lost, since tolerances may differ
            between ranks; see `foretrain.comm.bounded.optireduce`.

    Attributes:
        rank, ranks: as above.
        engine: as above.
        state: of a server that updates, if there is one.
    """

    def __init__(
        self,
        engine: BoundedEngine,
        rank: int,
        ranks: int,
        *,
        over: Algorithm = "transpose",
        tolerance: float = 0.0,
        droppable: Droppable = "packet",
        rescale: bool = False,
        feedback: bool = False,
        hadamard: bool = False,
    ) -> None:
        self.engine, self.rank, self.ranks, self._tolerance = engine, rank, ranks, tolerance
        self.state: ServerState | None = None
        self._over: Algorithm = over
        self._droppable = droppable
        self._rescales = ranks if rescale else 0
        self._feedback, self._hadamard = feedback, hadamard
        self._unsent: dict[tuple[int, BoundedOperation, int], list[tuple[slice, NDArray[Any]]]] = {}
        """Lost parts of contributions, by their key."""
        self._plans: dict[tuple[BoundedOperation, int, int, float], tuple[int, int, list[int]]] = {}
        self._lock = threading.Lock()
        self._error: LinkError | None = None
        """Why nothing more can begin."""
        self._unfinished: deque[BoundedWork] = deque()
        self._said_over_tcp = frozenset[int]()
        self._thread = threading.Thread(target=self._finish_all, name="foretrain-bounded", daemon=True)
        self._thread.start()

    def all_reduce(self, values: NDArray[Any], *, bfloat16: bool = False, hint: Hint | None = None) -> BoundedWork:
        """Replace ``values`` by their sum over all ranks, or as much of that as came in time."""
        return self.submit("all_reduce", values, bfloat16=bfloat16, hint=hint)

    def reduce_scatter(self, values: NDArray[Any], *, bfloat16: bool = False, hint: Hint | None = None) -> BoundedWork:
        """Replace block ``rank`` of ``values`` by its sum over all ranks; the other blocks are undefined afterwards."""
        return self.submit("reduce_scatter", values, bfloat16=bfloat16, hint=hint)

    def all_gather(self, values: NDArray[Any], *, bfloat16: bool = False, hint: Hint | None = None) -> BoundedWork:
        """Replace each block r of ``values`` by that of rank r; nothing is lost."""
        return self.submit("all_gather", values, bfloat16=bfloat16, hint=hint)

    def update(
        self, values: NDArray[Any], pulled: NDArray[Any], *, bfloat16: bool = False, hint: Hint | None = None
    ) -> BoundedWork:
        """Push ``values`` to a server, and replace ``pulled``, of the same type and size, by what it has made of them.

        What is lost of that on its way stays in ``pulled`` what it was.
        """
        return self.submit("update", values, bfloat16=bfloat16, hint=hint, pulled=pulled)

    def announce(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Let a server update with the hyperparameters ``groups`` from the next operation on; only rank 0's count."""

    def close(self) -> None:
        """End all threads and sockets; operations under way fail. From any thread, any number of times."""
        with self._lock:
            self._error = self._error or self._closed_error()
        if self.state is not None:
            self.state.close()
        self.engine.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self.engine.release()

    def submit(
        self,
        operation: BoundedOperation,
        values: NDArray[Any],
        *,
        bfloat16: bool = False,
        hint: Hint | None = None,
        pulled: NDArray[Any] | None = None,
    ) -> BoundedWork:
        """Begin an operation on ``values``; a server gives an empty array of the same size."""
        kind = kind_of(values, bfloat16)
        if operation in ("reduce_scatter", "all_gather") and len(values) % self.ranks:
            problem = f"are not divisible by the number of ranks, {self.ranks}"
            raise ConfigError("values", f"{len(values)} elements", problem, f"pad them for {operation}")
        hint = hint or Hint()
        share = len(values) // self.ranks
        own = slice(self.rank * share, (self.rank + 1) * share) if operation == "reduce_scatter" else slice(None)
        tolerance = self._tolerance if hint.tolerance is None else hint.tolerance
        work = BoundedWork(operation, values, own, tolerant=tolerance > 0, pulled=pulled)
        if self._feedback or self._hadamard:
            self._prepare(work, bfloat16, hint)
        with self._lock:
            if self._error is not None:
                raise LinkError(str(self._error), self._error.peer)
            # In order: also where it could begin, one that waits holds back all that follow.
            waits = any(work.overlaps(other) for other in self._unfinished)
            plan = self._encoded(operation, len(values), values.itemsize, tolerance, kind, hint, waits)
            self._unfinished.append(work)
            self._begin(work, values, bfloat16, replace(hint, tolerance=tolerance))
            important = NO_EXTENTS if self._droppable == "packet" else hint.important
            self.engine.submit(
                plan, work.values, hint.vital, important, None if pulled is None else pulled.view(np.uint8)
            )
        return work

    def _prepare(self, work: BoundedWork, bfloat16: bool, hint: Hint) -> None:
        """Turn the values into what is sent of them."""
        with self._lock:
            before = [other for other in self._unfinished if np.may_share_memory(work.values, other.values)]
        for other in before:  # its result may have to be transformed back first
            other.wait()
        if work.operation == "all_gather":
            return
        values = work.values.view(work.dtype)
        transformed = self._hadamard and (bfloat16 or values.dtype.kind == "f")
        key = hint.slot, work.operation, len(values)
        work.sent = _Sent(key, transformed, bfloat16, None, hint.vital)
        if transformed:
            self._transform(work, work.sent, back=False)
        for place, lost in self._unsent.pop(key, ()):
            values[place] = _rounded(_floats(values[place], bfloat16) + lost, values.dtype, bfloat16)
        if self._feedback and work.tolerant:
            work.sent = work.sent._replace(kept=values.copy())

    def _land(self, work: BoundedWork, losses: list[Loss]) -> list[Loss]:
        """Return what this rank's sums have lost, of all ``losses``; keep what was lost of its own contribution."""
        if work.sent is not None:
            if work.sent.kept is not None:
                item = work.dtype.itemsize
                places = [slice(at // item, (at + size) // item) for at, size, source in losses if source == self.rank]
                kept, bfloat16 = work.sent.kept, work.sent.bfloat16
                self._unsent[work.sent.key] = [(place, _floats(kept[place], bfloat16)) for place in places]
            if work.sent.transformed:
                self._transform(work, work.sent, back=True)
            work.sent = None
        return [each for each in losses if each.source != self.rank]

    def _transform(self, work: BoundedWork, sent: _Sent, back: bool) -> None:
        """Transform each part of the values that is summed apart, but for what is vital."""
        values, item = work.values.view(work.dtype), work.dtype.itemsize
        chosen = np.ones(len(values), bool)
        for first, behind in sent.vital:
            chosen[first // item : -(-behind // item)] = False
        parts = self.ranks if work.operation == "reduce_scatter" else 1
        for part in range(parts):
            if back and parts > 1 and part != self.rank:
                continue
            span = slice(part * len(values) // parts, (part + 1) * len(values) // parts)
            own, floats = values[span], _floats(values[span][chosen[span]], sent.bfloat16)
            if len(floats):
                transform(floats, sent.key[0], back)
            own[chosen[span]] = _rounded(floats, values.dtype, sent.bfloat16)

    def _begin(self, work: BoundedWork, values: NDArray[Any], bfloat16: bool, hint: Hint) -> None:
        """Tell others than the ranks that an operation begins."""

    def _encoded(
        self, operation: BoundedOperation, count: int, item: int, tolerance: float, kind: str, hint: Hint, waits: bool
    ) -> NDArray[np.int64]:
        key = operation, count, item, tolerance
        if key not in self._plans:
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            plan = stages(operation, self._over, self.rank, self.ranks, count, item, tolerance)
            self._plans[key] = len(plan), scratch(plan), encode(plan)
        length, memory, numbers = self._plans[key]
        urgency = min(int(hint.urgency * CLASSES), CLASSES - 1)
        small = _SMALL if self._droppable == "magnitude" else 0
        code = list(KINDS).index(kind)
        serves, updates = self.rank == self.ranks, operation == "update"
        rescales = self._rescales if serves or not updates else 0
        update_stage = 1 if serves and updates else -1
        header = [length, code, count * item, memory, hint.slot, urgency, small, int(waits), rescales, update_stage]
        return np.array(header + numbers, np.int64)

    def _finish_all(self) -> None:
        try:
            while (losses := self.engine.next(self._warn)) is not None:
                with self._lock:
                    work = self._unfinished[0]
                losses = self._land(work, losses)
                with self._lock:
                    self._unfinished.popleft()
                work.finish(losses, None)
                del work  # or the last array would live until the next operation
            error = self._closed_error()
        except EngineFailed as failed:
            error = self._lost(failed)
            self.engine.close(lost=failed.rank)
        with self._lock:
            self._error = error
            left, self._unfinished = self._unfinished, deque()
        for work in left:
            work.finish([], error)

    def _warn(self) -> None:
        """Say which peers are served over TCP, and which went back, where that has not been said."""
        served, said = self.engine.over_tcp(), self._said_over_tcp
        for peer in sorted(served - said):
            logger.warning(
                "%s: %s takes no packets of %d bytes over UDP: they go over TCP until UDP works, and nothing is lost "
                "meanwhile; is UDP open between the hosts, and is their MTU the network's?",
                *(self._name(self.rank), self._name(peer), self.engine.path.payload + HEADER),
            )
        for peer in sorted(said - served):
            logger.info("%s: UDP works again to %s", self._name(self.rank), self._name(peer))
        self._said_over_tcp = served

    def _name(self, peer: int) -> str:
        return "the server that sums" if peer == self.ranks else f"rank {peer}"

    def _lost(self, failed: EngineFailed) -> LinkError:
        what = {0: "it hung up", -1: "another rank lost it"}.get(failed.why) or os.strerror(failed.why)
        if failed.rank == self.ranks:
            said = self.state.failure() if self.state is not None else ""
            who = f"{self._name(failed.rank)}, a process of rank 0,"
            return LinkError(f"{who} was lost: {said or what}; the output of rank 0 says more")
        text = f"{self._name(failed.rank)} was lost: {what}; that rank's own output says more"
        return LinkError(text, failed.rank)

    def _closed_error(self) -> LinkError:
        return LinkError(f"the collectives of rank {self.rank} were closed on this side")


def _floats(values: NDArray[Any], bfloat16: bool) -> NDArray[Any]:
    """Return a copy, of 16-bit floats as float32."""
    if bfloat16:
        return widen(values)
    return values.astype(np.float32 if values.dtype == np.float16 else values.dtype)


def _rounded(floats: NDArray[Any], dtype: np.dtype[Any], bfloat16: bool) -> NDArray[Any]:
    """Undo `_floats`, to the nearest."""
    values = np.empty(len(floats), dtype)
    if bfloat16:
        narrow(floats, values)
    else:
        values[:] = floats
    return values


def connect_engine(
    host: str,
    gather: Callable[[Sequence[int]], list[list[int]]],
    secret: bytes,
    rank: int,
    ranks: int,
    options: EngineOptions,
) -> BoundedEngine:
    """Connect this rank to all others; all call this at the same time.

    Args:
        host: address of this host to listen on.
        gather: returns everyone's values, by rank; called three times by each rank.
        secret: of the job, and of nothing else before.
        rank: of this process.
        ranks: number of all.
        options: of the engine, the same on all ranks; its timeout also holds for connecting.

    Raises:
        LinkError: a rank is not there in time, or does not know the secret.
        ConfigError: the secret is short, or the host is none to listen on.
    """

    def meet(address: tuple[str, int]) -> list[tuple[str, int]]:
        return [decoded(row) for row in gather(encoded(*address))]

    links: Mapping[int, Link] = {}
    if ranks > 1:
        links = connect_peers(host, meet, secret, rank, ranks, options.timeout, wanted=range(ranks))
    made: socket.socket | None = None
    try:
        made = open_socket(host)
        addresses = meet(made.getsockname()[:2])
        own = own_path(made, addresses, rank)
        rows = gather((own.payload, own.segments, own.window))
        path = Path(*(min(row[k] for row in rows) for k in range(3)))
        return BoundedEngine(rank, made, addresses, links, secret, path, options)
    except BaseException:
        if made is not None:
            made.close()
        for link in links.values():
            link.close()
        raise
