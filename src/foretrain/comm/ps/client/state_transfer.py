"""Something that is asked of the servers for many parts, beside the rounds: to begin with them, or what they are."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from foretrain.comm.ps.frames import Header
from foretrain.comm.ps.placement import ShardPart

_WINDOW: Final = 8
"""Parts under way."""
Say: TypeAlias = Callable[[int, Header, bytes], None]
"""Says a message to a shard."""
Messages: TypeAlias = Callable[[ShardPart], Sequence[tuple[Header, bytes]]]
"""What to say for a part."""


class StateTransfer:
    """It belongs to the engine's thread once it has begun, but for `wait`.

    Args:
        parts: to ask for.
        messages: what to say for one.
    """

    def __init__(self, parts: Iterable[ShardPart], messages: Messages) -> None:
        self._waiting = deque(parts)
        self._messages = messages
        self._asked: dict[int, ShardPart] = {}
        self._answered: dict[int, list[ShardPart]] = {}
        """What is, by shard."""
        self._over = threading.Event()
        self.frames: dict[int, list[bytes]] = {}
        """What has been answered, by part."""

    def wait(self, check: Callable[[], None]) -> dict[int, list[bytes]]:
        """Returns what was answered when all of it was; ``check`` raises what keeps it from coming."""
        while not self._over.wait(0.1):
            check()
        return self.frames

    def begin(self, say: Say) -> None:
        """Asks for as much as may be under way."""
        while self._waiting and len(self._asked) < _WINDOW:
            self._ask(self._waiting.popleft(), say)
        if not self._asked:
            self._over.set()

    def say_again(self, shard: int, say: Say) -> None:
        """What ``shard`` has not answered it may not know of, nor of what it has where another is in its place."""
        for part in [part for part in self._asked.values() if part.shard == shard]:
            self._ask(part, say)
        if not self._over.is_set():
            self._waiting.extend(self._answered.pop(shard, ()))
            self.begin(say)

    def hear(self, header: Header, payload: memoryview, say: Say) -> None:
        """A STATE has come."""
        if header.part not in self._asked:
            return
        frames = self.frames[header.part]
        # Of an answer that is said twice, as after a connection broke, the first is gone.
        if header.step == 0:
            frames.clear()
        if header.offset:
            frames.append(bytes(payload))
        if len(frames) == header.offset:
            part = self._asked.pop(header.part)
            self._answered.setdefault(part.shard, []).append(part)
            self.begin(say)

    def _ask(self, part: ShardPart, say: Say) -> None:
        self._asked[part.number] = part
        self.frames[part.number] = []
        for header, payload in self._messages(part):
            say(part.shard, header, payload)
