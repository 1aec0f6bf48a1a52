"""A backward pass beside the next forward pass: each computes while the other one's tokens travel to their experts.

As Megatron-Core's ``overlap_moe_expert_parallel_comm`` does, in the same order: a layer's attention and experts forward
beside another one's experts and attention backward. Departs in that each pass runs in a thread of its own, and hands
over at each exchange of tokens, where Megatron-Core cuts layers into parts and launches these in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import TypeVar

Made = TypeVar("Made")
BACK, AHEAD = 0, 1


class Turns:
    """Whose turn it is to launch, of a backward and a forward pass; always that of a pass which is alone."""

    def __init__(self) -> None:
        self._turn, self._ended = AHEAD, [True, True]
        self._changed = Condition()
        self._threads = ThreadPoolExecutor(1)

    def hand_over(self) -> None:
        """Let the other pass launch until it hands over as well, or ends."""
        with self._changed:
            mine, other = self._turn, 1 - self._turn
            if not self._ended[other]:
                self._turn = other
                self._changed.notify_all()
                self._wait(mine)

    def beside(self, back: Callable[[], Made], ahead: Callable[[], Made]) -> tuple[Made, Made]:
        """Run both passes, the backward one first."""
        self._turn, self._ended = BACK, [False, False]
        gradient = self._threads.submit(self._run, BACK, back)
        output = self._run(AHEAD, ahead)
        return gradient.result(), output

    def _run(self, which: int, launch: Callable[[], Made]) -> Made:
        with self._changed:
            self._wait(which)
        try:
            return launch()
        finally:
            with self._changed:
                self._ended[which], self._turn = True, 1 - which
                self._changed.notify_all()

    def _wait(self, which: int) -> None:
        self._changed.wait_for(lambda: self._turn == which or self._ended[1 - which])
