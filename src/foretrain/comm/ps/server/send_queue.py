"""What a server has yet to send to one worker: the most urgent first, as far as the worker's credit goes.

The link from server to worker is another than that from worker to server, with an order and a window of its own. What
has been handed to the socket cannot be overtaken any more, so little is: the rest waits here.
"""

from __future__ import annotations

from heapq import heappop, heappush

from foretrain.comm.ps.batching import SMALL
from foretrain.comm.ps.server.shard import Value


class SendQueue:
    """Values for one worker.

    Args:
        credit: bytes under way at which nothing more is sent.
        slice_size: largest message, bytes.
    """

    def __init__(self, credit: int, slice_size: int) -> None:
        self._credit, self._slice = credit, slice_size
        self._heap: list[tuple[int, int, Value]] = []
        self._count = 0
        self.under_way = 0

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, urgency: int, value: Value) -> None:
        """``value`` is to be sent; a smaller ``urgency`` first, of equal ones the one that came first."""
        self._count += 1
        heappush(self._heap, (urgency, self._count, value))

    def take(self) -> list[Value]:
        """What to send now, in one message; nothing while the credit is used up, or there is nothing.

        Behind what is small goes what is small and the next in order, of the same round.
        """
        if not self._heap or self.under_way >= self._credit:
            return []
        values = [self._pop()]
        size = _length(values[0])
        small = size <= SMALL
        while small and self._heap and self._goes_with(values[0], self._slice - size):
            values.append(self._pop())
            size += _length(values[-1])
        self.under_way += size
        return values

    def _goes_with(self, first: Value, room: int) -> bool:
        following = self._heap[0][2]
        return following.step == first.step and _length(following) <= min(SMALL, room)

    def _pop(self) -> Value:
        urgency, count, value = heappop(self._heap)
        if value.data is None or len(value.data) <= self._slice:
            return value
        # Parameters may be wider than the gradients whose bytes are counted.
        wide = len(value.data) // (value.end - value.start)
        cut, size = value.start + self._slice // wide, self._slice // wide * wide
        heappush(self._heap, (urgency, count, value._replace(start=cut, data=value.data[size:])))
        return value._replace(end=cut, data=value.data[:size])

    def received(self, size: int) -> None:
        """The worker has ``size`` bytes more."""
        self.under_way = max(0, self.under_way - size)

    def clear(self) -> None:
        """The worker is another now, and has nothing of what was sent to the one before."""
        self._heap.clear()
        self.under_way = 0


def _length(value: Value) -> int:
    return 0 if value.data is None else len(value.data)
