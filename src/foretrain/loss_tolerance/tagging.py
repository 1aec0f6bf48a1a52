"""Tagging of droppable packets: all, those of front layers, or those of small values (arXiv 2008.08445).

A packet's queue is ⌊layer · Q / L⌋: front layers, which the next forward pass needs first, go first. DLCP drops packets
of front layers and protects those of back layers; and drops small magnitudes and protects large ones. How many are
droppable is ours to choose: half, by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import unknown
from foretrain.loss_tolerance.layout import Cut, TensorLayout
from foretrain.loss_tolerance.losses import Tagged, check_chance

Criterion: TypeAlias = Literal["packet", "layer", "magnitude"]
"""Packets that may be dropped: any; those of front layers; those whose values are small on average."""

QUEUES = 8


@dataclass(frozen=True, slots=True)
class Tagging:
    """Settings of the tagging of packets.

    Attributes:
        by: of `Criterion`.
        share: of packets that may be dropped, by layer (of the queues) and by magnitude (of last round's packets);
            packets of tensors that are reliable are not counted, and never dropped.
        queues: Q.
    """

    by: Criterion = "packet"
    share: float = 0.5
    queues: int = QUEUES

    def __post_init__(self) -> None:
        if self.by not in get_args(Criterion):
            raise unknown("losses", self.by, get_args(Criterion))
        check_chance("share", self.share)


class Tagger:
    """Tags the packets of one collective, round of training after round of training.

    By magnitude, a packet is important if its mean |value| is at or above a quantile of those that all ranks sent one
    round of training before, in the same round of the collective: partial sums grow on their way, so only like is
    compared with like, and hosts need to share one number. Nothing is droppable in the first round of all.
    """

    def __init__(self, tagging: Tagging, layout: TensorLayout) -> None:
        self.tagging = tagging
        layers = np.array([tensor.layer for tensor in layout.tensors])
        self._queue = (layers * tagging.queues // layout.layers).astype(np.int8)
        self._lossy = ~layout.reliable
        self._front = self._lossy & (self._queue < tagging.share * tagging.queues)
        self._thresholds: dict[int, float] = {}
        self._seen: dict[int, list[NDArray[np.float64]]] = {}

    def tag(self, number: int, cut: Cut, data: NDArray[np.float32], *, note: bool = True) -> Tagged:
        """Return the packets of one step in round ``number`` of the collective, which carry ``data`` (count, width).

        They are what the next round of training compares with, unless ``note`` is false.
        """
        by = self.tagging.by
        lossy = self._lossy[cut.message]
        if by == "packet":
            droppable = lossy
        elif by == "layer":
            droppable = self._front[cut.message]
        else:
            mean = magnitude(cut, data)
            if note:
                self._seen.setdefault(number, []).append(mean[lossy])
            droppable = lossy & (mean < self._thresholds.get(number, -np.inf))
        return Tagged(cut.message, cut.size, self._queue[cut.message], droppable)

    def turn(self) -> None:
        """End a round of training: its magnitudes become the thresholds of the next."""
        share = self.tagging.share
        self._thresholds = {
            number: float(np.quantile(np.concatenate(seen), share)) for number, seen in self._seen.items()
        }
        self._seen = {}

    def droppable(self, layout: TensorLayout) -> float:
        """The droppable share of the bytes that may be lost: exact by layer, nominal by magnitude."""
        if self.tagging.by == "packet":
            return 1.0
        if self.tagging.by == "magnitude":
            return self.tagging.share
        padded = layout.padded()
        return float(padded[self._front].sum() / padded[self._lossy].sum())


def magnitude(cut: Cut, data: NDArray[np.float32]) -> NDArray[np.float64]:
    """The mean |value| of each packet, padding included: (packets,)."""
    total = np.bincount(cut.packet.reshape(-1), np.abs(data).reshape(-1), len(cut.message))
    return total / np.bincount(cut.packet.reshape(-1), minlength=len(cut.message))


def concentrated(p: float, share: float) -> tuple[float, float]:
    """The loss of droppable packets and of all others, where ``share`` is droppable and ``p`` of everything is lost.

    Important packets are lost only when droppable ones are not enough.

    >>> concentrated(0.1, 0.5), concentrated(0.6, 0.5)
    ((0.2, 0.0), (1.0, 0.2))
    """
    check_chance("p", p)
    if p <= share:
        return (p / share if share else 0.0), 0.0
    return 1.0, round((p - share) / (1 - share), 15)
