"""Layout of a model's tensors in the blocks of a plan and in packets.

Every tensor is a message of its own, as in DLCP. It is padded with zeros to equal blocks of whole values, so that
step s of transfer t moves ``plan.size(padded bytes)[t]`` bytes of it, exactly: what a simulated network is to be given.
A packet holds whole values of one tensor.

    packed (blocks, width):   block b of tensor 0 | block b of tensor 1 | …       width = Σ values a block has of each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import ConfigError

PAYLOAD = 1460
"""Bytes of a packet's payload: an Ethernet frame of 1,500 without the headers of IP and TCP."""
VALUE = 4
"""Bytes of a value, float32."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Tensor, sent as one message.

    Attributes:
        name: of the parameter.
        values: how many it has, at least 1.
        layer: which it is of, from 0 at the input.
        reliable: whether nothing of it may be lost.
    """

    name: str
    values: int
    layer: int
    reliable: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Packets of ``count`` consecutive blocks.

    Attributes:
        packet: int64 (count, width), the packet that each value is in.
        message, size: int32 (packets,), see `foretrain.loss_tolerance.losses.Tagged`.
    """

    packet: NDArray[np.int64]
    message: NDArray[np.int32]
    size: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class TensorLayout:
    """Tensors in ``blocks`` blocks.

    Attributes:
        tensors: in the order of the flat vector.
        blocks: of the plan.
        payload: bytes; a packet has as many whole values as fit.

    Raises:
        ConfigError: there is nothing to send, or no value fits a packet.
    """

    tensors: tuple[Tensor, ...]
    blocks: int
    payload: int = PAYLOAD
    _cuts: dict[int, Cut] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.tensors or min(tensor.values for tensor in self.tensors) < 1:
            raise ConfigError("tensors", len(self.tensors), "have nothing to send", "give tensors with values")
        if self.payload < VALUE:
            raise ConfigError("payload", self.payload, f"holds no value of {VALUE} bytes", "write e.g. 1460")

    @cached_property
    def each(self) -> NDArray[np.int64]:
        """Values of a block, by tensor: (tensors,)."""
        return np.array([-(-tensor.values // self.blocks) for tensor in self.tensors], np.int64)

    @property
    def width(self) -> int:
        """Values of a block, of all tensors."""
        return int(self.each.sum())

    @property
    def values(self) -> int:
        """Values of the flat vector."""
        return sum(tensor.values for tensor in self.tensors)

    @property
    def reliable(self) -> NDArray[np.bool_]:
        """Return whether nothing of a tensor may be lost: (tensors,)."""
        return np.array([tensor.reliable for tensor in self.tensors])

    @property
    def layers(self) -> int:
        """Return the number of layers of the tensors."""
        return max(tensor.layer for tensor in self.tensors) + 1

    def padded(self) -> NDArray[np.int64]:
        """Bytes of each message as a collective moves it: what to give `Plan.size`, (tensors,)."""
        return self.each * self.blocks * VALUE

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        """Return the place in the packed array of each value of the flat vector, (values,)."""
        left = np.concatenate([[0], np.cumsum(self.each)[:-1]])
        return np.concatenate(
            [
                (one // each) * self.width + start + one % each
                for tensor, each, start in zip(self.tensors, self.each.tolist(), left.tolist(), strict=True)
                for one in [np.arange(tensor.values)]
            ]
        )

    def pack(self, flat: NDArray[np.float32]) -> NDArray[np.float32]:
        """Flat vectors (…, values) as (…, blocks, width), zeros where nothing is."""
        packed = np.zeros((*flat.shape[:-1], self.blocks * self.width), np.float32)
        packed[..., self._places] = flat
        return packed.reshape(*flat.shape[:-1], self.blocks, self.width)

    def unpack(self, packed: NDArray[np.float32]) -> NDArray[np.float32]:
        """The reverse of `pack`."""
        return packed.reshape(*packed.shape[:-2], -1)[..., self._places]

    def cut(self, count: int) -> Cut:
        """The packets of ``count`` blocks; which blocks does not matter."""
        if count not in self._cuts:
            self._cuts[count] = self._cut(count)
        return self._cuts[count]

    def _cut(self, count: int) -> Cut:
        per = self.payload // VALUE
        packet, message, size, first = [], [], [], 0
        for index, each in enumerate(self.each.tolist()):
            total = count * each
            packet.append(first + np.arange(total).reshape(count, each) // per)
            packets = -(-total // per)
            message += [index] * packets
            size += [per * VALUE] * (packets - 1) + [(total - per * (packets - 1)) * VALUE]
            first += packets
        return Cut(np.concatenate(packet, axis=1), np.array(message, np.int32), np.array(size, np.int32))


def layout(sizes: Sequence[int], blocks: int, *, payload: int = PAYLOAD) -> TensorLayout:
    """Tensors of so many values each, every one a layer."""
    return TensorLayout(tuple(Tensor(str(i), size, i) for i, size in enumerate(sizes)), blocks, payload)
