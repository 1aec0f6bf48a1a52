"""Server that sums under bounded loss (``over="ps"``): a process beside rank 0, which the last of all engines is.

Where a framework's plugin starts it, with an `Updater`, it also updates parameters by the sums, and sends these.

    rank 0 ──▶ stdin     who takes part; all rows of each gathering; then every operation, as it begins
    rank 0 ◀── stdout    the server's own row of each gathering; then what each operation that may lose some has lost

Packets go between the server and all ranks, as among ranks. It ends with an empty line, with stdin, or with rank 0's
process, whose forked children may hold copies of stdin: not with the thread that started it, which the system would
take for its parent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from foretrain.comm.bounded import Hint, Loss
from foretrain.comm.bounded.collectives import BoundedCollectives, BoundedWork, connect_engine
from foretrain.comm.bounded.engine import BoundedEngine, EngineOptions
from foretrain.comm.bounded.plans import BoundedOperation
from foretrain.comm.bounded.server_state import Updater, answer, tell_failure
from foretrain.comm.collectives.ring import connect_peers
from foretrain.comm.coordinator.addresses import decoded, encoded
from foretrain.comm.coordinator.link import Link, LinkError
from foretrain.comm.options import Droppable, Ending
from foretrain.comm.ps.consistency import Group

logger = logging.getLogger(__name__)
_LIMIT = 10.0
"""Seconds until a server that is told to end is killed."""
_STAYS = f"it did not end within {_LIMIT:g} s"
_STARTS = 60.0
"""Seconds that a server has to start, at least: it may load PyTorch first, on a busy host."""
_DRAIN = 5.0
"""Seconds that a server that is told to end gives operations under way: a rank may be slower than rank 0."""
_GRACE = 1.0
"""Seconds from rank 0's end to the server's own: by then all ranks have found whose link broke first."""


class Opening(msgspec.Struct, frozen=True):
    """First line.

    Attributes:
        host: address to listen on.
        ranks: number of those that train.
        secret: of these engines, in hex.
        rescale: whether sums that miss contributions are rescaled.
        ending: when an array is over that may lose some.
        droppable: which packets of parameters switches may drop rather than mark.
        timeout: seconds until all are connected, and after which a silent one is lost.
        parent: number of rank 0's process.
    """

    host: str
    ranks: int
    secret: str
    rescale: bool
    ending: Ending
    droppable: Droppable
    timeout: float
    parent: int


class Beginning(msgspec.Struct, frozen=True):
    """Operation that begins; fields as `BoundedCollectives` has them.

    Attributes:
        operation: what it does.
        dtype: NumPy's name of the elements' type.
        bfloat16: whether the elements are that, in uint16.
        count: elements.
        tolerance, slot, urgency, vital, important, tensors: of the hint.
        groups: hyperparameters from this operation on, where they have changed.
    """

    operation: BoundedOperation
    dtype: str
    bfloat16: bool
    count: int
    tolerance: float
    slot: int
    urgency: float
    vital: list[tuple[int, int]]
    important: list[tuple[int, int]]
    tensors: list[tuple[int, int, int]] = []
    groups: list[Group] | None = None


class SummingServer:
    """Process of a server that sums, or that also updates parameters, as rank 0 sees it. `close` it.

    Args:
        opening: what it is told first.
        module: to run: this one only sums, a plugin's may also update and send parameters back in place of sums.
    """

    def __init__(self, opening: Opening, module: str = __name__) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the ranks; it ends with them
        )
        self._patience, self._why_killed = max(opening.timeout, _STARTS), ""
        self.tell(opening)

    def row(self) -> list[int]:
        """Return the server's own row of the next gathering; nothing where it has ended.

        One that does not answer in the opening's timeout, or `_STARTS`, is killed.
        """
        limit = threading.Timer(self._patience, self._kill, [f"it did not answer within {self._patience:g} s"])
        limit.start()
        try:
            return self._answer(list[int])
        finally:
            limit.cancel()

    def how_it_ended(self) -> str:
        """Return how the process ended, after its output did; wait for its end, and kill it if it does not come."""
        try:
            status = self._process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            self._kill(_STAYS)
            status = self._process.wait()
        if self._why_killed:
            return f"{self._why_killed}, and was killed"
        if status < 0:
            return f"it was killed by signal {-status} ({signal.strsignal(-status)})"
        return f"it ended with status {status}" + ", and its own output says why" * (status > 0)

    def losses(self) -> list[Loss]:
        """Return what the next operation that may lose some has lost; nothing where the server has ended."""
        return self._answer(list[Loss])

    def _answer(self, kind: Any) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return msgspec.json.decode(line if line.endswith(b"\n") else b"[]", type=kind)

    def tell(self, message: Opening | Beginning | Sequence[Sequence[int]]) -> None:
        """Send a message; a server that has ended is found by the engines."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            _write(self._process.stdin, message)

    def _kill(self, why: str) -> None:
        self._why_killed = why
        self._process.kill()

    def end(self) -> int:
        """End the process, any number of times; what it has said can still be read. Return its status."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(b"\n")  # forked children may hold copies, whose end would have to come first
            self._process.stdin.close()
        try:
            return self._process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            self._kill(_STAYS)
            return self._process.wait()

    def close(self) -> None:
        """End the process, and read nothing more of it; any number of times."""
        self.end()
        assert self._process.stdout is not None
        self._process.stdout.close()


class ServedCollectives(BoundedCollectives):
    """Collectives of rank 0 over a server, whose process these own.

    Args:
        server: that process.
        arguments, options: of `BoundedCollectives`.
    """

    def __init__(self, server: SummingServer, *arguments: Any, **options: Any) -> None:
        self._server, self._reported = server, False
        self._groups: list[Group] | None = None
        self._untold: SimpleQueue[BoundedWork | None] = SimpleQueue()
        """Operations of whose losses the server has not told yet, in its order."""
        self._telling = threading.Thread(target=self._tell_all, name="foretrain-server-losses", daemon=True)
        self._telling.start()
        super().__init__(*arguments, **options)

    def announce(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Let the server update with the hyperparameters ``groups`` from the next operation on."""
        with self._lock:  # `_begin` takes them
            self._groups = [dict(group) for group in groups]

    def close(self) -> None:
        """End all threads, sockets and the server; operations under way fail. From any thread, any number of times."""
        super().close()
        if self._server.end() and not self._reported:
            self._reported = True
            logger.error("the server that sums, a process of rank 0: %s", self._server.how_it_ended())
        self._untold.put(None)
        self._telling.join()
        self._server.close()

    def _begin(self, work: BoundedWork, values: NDArray[Any], bfloat16: bool, hint: Hint) -> None:
        extents = hint.vital.tolist(), hint.important.tolist()
        tensors = [] if hint.tensors is None else hint.tensors.tolist()
        known = (work.operation, values.dtype.name, bfloat16, len(values), hint.tolerance or 0.0)
        groups, self._groups = self._groups, None
        self._server.tell(Beginning(*known, hint.slot, hint.urgency, *extents, tensors, groups))
        if work.tolerant:
            work.told = threading.Event()
            self._untold.put(work)

    def _tell_all(self) -> None:
        """Tell operations what the server has lost: it ends them later than rank 0 does, if another rank is slow."""
        while (work := self._untold.get()) is not None:
            work.tell(self._server.losses())
            del work  # or the last array would live until the next operation


class ServerUpdate(NamedTuple):
    """Arguments of `Updater.update`."""

    gradients: NDArray[Any]
    parameters: NDArray[Any]
    tensors: list[tuple[int, int, int]]
    groups: list[Group]


class UpdateThreads:
    """Threads of a server that update parameters, and answer the ranks.

    Args:
        updater: of the parameters.
        engine: of the server.
        links: to all ranks.

    Attributes:
        failed: whether one of them has ended with an error.
    """

    def __init__(self, updater: Updater, engine: BoundedEngine, links: Sequence[Link]) -> None:
        self._updater, self._engine, self._links = updater, engine, links
        self._lock = threading.Lock()
        self.failed = False
        self._expected: dict[int, ServerUpdate] = {}
        """By number of the operation."""
        self._threads = [threading.Thread(target=self._guarded, args=(self._run,))]
        answers = [lambda link=link: answer(link, updater, self._lock) for link in links]
        self._threads += [threading.Thread(target=self._guarded, args=(each,)) for each in answers]
        for thread in self._threads:
            thread.start()

    def expect(self, number: int, update: ServerUpdate) -> None:
        """Do ``update`` when operation ``number``, which has not begun, has summed the gradients."""
        self._expected[number] = update

    def close(self) -> None:
        """End all threads and links; the engine is closed."""
        for link in self._links:
            link.close()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (number := self._engine.next_held()) is not None:
            with self._lock:
                self._updater.update(*self._expected.pop(number))
            self._engine.resume(number)

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            traceback.print_exc()
            self.failed = True
            tell_failure(self._links, error)
            self._engine.close()  # the ranks find that, and say that the server was lost
            for link in self._links:
                link.close()


def main(updater: Updater | None = None) -> int:
    """Sum whatever rank 0 begins, until it says that this was all; update parameters by ``updater``.

    Returns:
        The exit status of the process.
    """
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    opening = msgspec.json.decode(source.readline(), type=Opening)
    threading.Thread(target=_end_after, args=(opening.parent,), daemon=True).start()
    return serve(opening, source, answers, updater)


def serve(opening: Opening, source: IO[bytes], answers: IO[bytes], updater: Updater | None = None) -> int:
    """Do what `main` does, with what ``source`` says after the ``opening``."""
    rank, secret = opening.ranks, bytes.fromhex(opening.secret)

    def gather(values: Sequence[int]) -> list[list[int]]:
        _write(answers, [int(value) for value in values])
        return msgspec.json.decode(source.readline() or b"[]", type=list[list[int]])

    def meet(address: tuple[str, int]) -> list[tuple[str, int]]:
        return [decoded(row) for row in gather(encoded(*address))]

    settings = EngineOptions(ending=opening.ending, timeout=opening.timeout)
    engine = connect_engine(opening.host, gather, secret, rank, rank + 1, settings)
    updates: UpdateThreads | None = None
    if updater is not None:
        links = connect_peers(opening.host, meet, secret, rank, rank + 1, opening.timeout, range(rank))
        updates = UpdateThreads(updater, engine, list(links.values()))
    options: dict[str, Any] = {"rescale": opening.rescale, "droppable": opening.droppable}
    collectives = BoundedCollectives(engine, rank, rank, over="ps", **options)
    lossy: SimpleQueue[BoundedWork | None] = SimpleQueue()
    telling = threading.Thread(target=_tell_losses, args=(lossy, answers))
    telling.start()
    try:
        _work(source, collectives, updates, lossy)
    except LinkError:
        pass  # no error of this process: the engine of each rank has found the loss, too, and its error names the rank
    finally:
        engine.close()
        if updates is not None:
            updates.close()
        collectives.close()
        lossy.put(None)
        telling.join()
    return int(updates is not None and updates.failed)


def _work(
    source: IO[bytes],
    collectives: BoundedCollectives,
    updates: UpdateThreads | None,
    lossy: SimpleQueue[BoundedWork | None],
) -> None:
    """Begin what ``source`` says, and see it through; put what may lose some into ``lossy``."""
    number, groups, work = 0, list[Group](), None
    while (line := source.readline()).strip():
        each = msgspec.json.decode(line, type=Beginning)
        vital, important = (np.array(extents, np.int64).reshape(-1, 2) for extents in (each.vital, each.important))
        hint = Hint(each.slot, each.urgency, each.tolerance, vital, important)
        values, pulled = np.zeros(each.count, each.dtype), None
        groups = each.groups or groups
        if updates is not None and each.operation == "update":
            pulled = np.zeros(each.count, each.dtype)
            updates.expect(number, ServerUpdate(values, pulled, each.tensors, groups))
        work = collectives.submit(each.operation, values, bfloat16=each.bfloat16, hint=hint, pulled=pulled)
        if each.tolerance:
            lossy.put(work)
        number += 1
    if work is not None:
        work.wait(_DRAIN)


def _end_after(parent: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(parent)
        select.select([descriptor], [], [])
    time.sleep(_GRACE)
    os.kill(os.getpid(), signal.SIGTERM)


def _tell_losses(works: SimpleQueue[BoundedWork | None], to: IO[bytes]) -> None:
    with contextlib.suppress(LinkError, OSError), to:  # nobody waits for more
        while (work := works.get()) is not None:
            work.wait()
            _write(to, work.losses)


def _write(to: IO[bytes], message: Any) -> None:
    to.write(msgspec.json.encode(message) + b"\n")
    to.flush()


if __name__ == "__main__":
    sys.exit(main())
