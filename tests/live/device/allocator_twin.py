"""A slow twin of the caching allocator, written from its description: lists, linear searches, no cleverness.

It knows streams, splitting, merging, max_split_size and running out of memory; not expandable segments nor garbage
collection, for which there are records of PyTorch's own allocator.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 2**20


class Full(Exception):
    """The request cannot be met."""


@dataclass(eq=False)
class Piece:
    """A block: bytes ``[offset, offset + size)`` of its segment."""

    offset: int
    size: int
    requested: int = 0
    owned: bool = False
    users: set[int] = field(default_factory=set)
    waiting: int = 0

    @property
    def free(self) -> bool:
        return not (self.owned or self.users or self.waiting)


@dataclass(eq=False)
class Segment:
    """What was reserved at once."""

    number: int
    address: int
    size: int
    stream: int
    small: bool
    pieces: list[Piece] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return len(self.pieces) == 1 and self.pieces[0].free


class Twin:
    """The allocator of one device with ``capacity`` bytes."""

    def __init__(
        self, capacity: int, overhead: int = 0, max_split: int | None = None, poll_always: bool = False
    ) -> None:
        self.capacity, self.overhead, self.poll_always = capacity, overhead, poll_always
        self.max_split = max_split or 2**64
        self.segments: list[Segment] = []
        self.reserved_ever = self.retries = 0
        self.queues: dict[int, list[tuple[int, Segment, Piece]]] = {}
        self.recorded: dict[int, int] = {}
        self.finished: dict[int, int] = {}

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def allocated(self) -> int:
        return sum(piece.size for segment in self.segments for piece in segment.pieces if piece.owned)

    def allocate(self, request: int, stream: int) -> tuple[Segment, Piece]:
        size = max(512, -(-request // 512) * 512)
        small = size <= MIB
        if self.poll_always:
            self.poll()
        found = self.fit(size, stream, small)
        if found is None and not self.poll_always and self.poll():
            found = self.fit(size, stream, small)
        if found is None:
            found = self.reserve(size, stream, small)
        segment, piece = found
        rest = piece.size - size
        if rest >= 512 if small else size < self.max_split and rest > MIB:
            piece.size = size
            segment.pieces.insert(segment.pieces.index(piece) + 1, Piece(piece.offset + size, rest))
        piece.owned, piece.requested = True, request
        return segment, piece

    def fit(self, size: int, stream: int, small: bool) -> tuple[Segment, Piece] | None:
        fitting = [
            (piece.size, segment.number, piece.offset, segment, piece)
            for segment in self.segments
            if segment.stream == stream and segment.small == small
            for piece in segment.pieces
            if piece.free and piece.size >= size
        ]
        if not fitting:
            return None
        best, *_, segment, piece = min(fitting, key=lambda entry: entry[:3])
        oversize = size >= self.max_split
        if best >= size + 20 * MIB if oversize else best >= self.max_split:
            return None
        return segment, piece

    def reserve(self, size: int, stream: int, small: bool) -> tuple[Segment, Piece]:
        want = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if not self.has(want):
            self.release_oversize(size, stream, small)
        if not self.has(want):
            self.empty()
            self.retries += 1
        if not self.has(want):
            raise Full
        self.reserved_ever += 1
        segment = Segment(self.reserved_ever, self.lowest_gap(want), want, stream, small, [Piece(0, want)])
        self.segments.append(segment)
        return segment, segment.pieces[0]

    def has(self, size: int) -> bool:
        return self.reserved + self.overhead + size <= self.capacity

    def lowest_gap(self, size: int) -> int:
        address = 0
        for segment in sorted(self.segments, key=lambda segment: segment.address):
            if segment.address - address >= size:
                break
            address = segment.address + segment.size
        return address

    def release_oversize(self, size: int, stream: int, small: bool) -> None:
        wanted = max(size, self.max_split)
        cached = [s for s in self.segments if s.whole and s.stream == stream and s.small == small]
        cached = sorted((s for s in cached if s.size >= self.max_split), key=lambda s: (s.size, s.number))
        enough = [segment for segment in cached if segment.size >= wanted]
        if enough:
            self.segments.remove(enough[0])
            return
        released = 0
        while cached and released < wanted:
            released += cached[-1].size
            self.segments.remove(cached.pop())

    def release(self, segment: Segment, piece: Piece) -> None:
        piece.owned = False
        for stream in piece.users:
            self.recorded[stream] = self.recorded.get(stream, 0) + 1
            self.queues.setdefault(stream, []).append((self.recorded[stream], segment, piece))
            piece.waiting += 1
        piece.users = set()
        self.merge(segment)

    def use(self, segment: Segment, piece: Piece, stream: int) -> None:
        if stream != segment.stream:
            piece.users.add(stream)

    def finish(self, stream: int) -> None:
        self.finished[stream] = self.recorded.get(stream, 0)

    def poll(self) -> bool:
        freed = False
        for stream, queue in self.queues.items():
            while queue and queue[0][0] <= self.finished.get(stream, 0):
                freed = self.over(queue) or freed
        return freed

    def over(self, queue: list[tuple[int, Segment, Piece]]) -> bool:
        _, segment, piece = queue.pop(0)
        piece.waiting -= 1
        self.merge(segment)
        return not piece.waiting

    def empty(self) -> None:
        for stream, queue in self.queues.items():
            while queue:
                self.finished[stream] = max(self.finished.get(stream, 0), queue[0][0])
                self.over(queue)
        self.segments = [segment for segment in self.segments if not segment.whole]

    @staticmethod
    def merge(segment: Segment) -> None:
        merged: list[Piece] = []
        for piece in segment.pieces:
            if merged and merged[-1].free and piece.free:
                merged[-1].size += piece.size
            else:
                merged.append(piece)
        segment.pieces = merged
