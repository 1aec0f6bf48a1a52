"""Declaration of what a job exchanges, and placement of its bytes on shards.

Tasks are split into parts, and parts go to shards, by `foretrain.network.shards`. Every worker and every shard computes
the same placement from the same declaration, without a message.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from foretrain.comm.ps.consistency import consistency
from foretrain.comm.ps.frames import Malformed
from foretrain.errors import ConfigError, unknown
from foretrain.network.shards import ALIGN, balance, split
from foretrain.network.switch_cluster import MESSAGE
from foretrain.tasks import Piece

LIMIT: Final = 4 << 20
"""Bytes of a part, and of a message's payload, at most."""
Dtype: TypeAlias = Literal["float32", "float16", "bfloat16", "float64"]
WIDTHS: Final[dict[Dtype, int]] = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


class Declared(msgspec.Struct, frozen=True):
    """A task as a worker declares it.

    Attributes:
        name: for people.
        size: bytes on the wire.
        dtype: of the wire.
        urgency: rank by first use; 0 is the most urgent.
    """

    name: str
    size: int
    dtype: Dtype
    urgency: int


ELEMENTWISE: Final = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
"""Optimizers of torch.optim that update each element independently, so that they run on any part of a tensor."""


class Optimized(msgspec.Struct, frozen=True):
    """Declaration of the parameters that servers update, and of their optimizers.

    Attributes:
        classes: of each parameter group, in torch.optim.
        group_of: of each task; −1 where no optimizer has it.
        dtypes: of each task's parameter, as servers keep and send it, whatever gradients are sent as.
        consistency: see `foretrain.comm.ps.consistency`.
    """

    classes: tuple[str, ...]
    group_of: tuple[int, ...]
    dtypes: tuple[Dtype, ...]
    consistency: str = "bsp"

    def check(self, tasks: int) -> None:
        """Raise `Malformed` if the declaration contradicts itself."""
        strange = [name for name in self.classes if name not in ELEMENTWISE]
        if strange:
            raise Malformed("optimizer", f"an optimizer {strange[0]!r}, which is none that servers run")
        if len(self.group_of) != tasks or len(self.dtypes) != tasks:
            raise Malformed("declaration", f"optimizers for {len(self.group_of)} of {tasks} tasks")
        if any(not -1 <= group < len(self.classes) for group in self.group_of):
            raise Malformed("declaration", f"a parameter group that is none of {len(self.classes)}")
        try:
            consistency(self.consistency)
        except ConfigError as error:
            raise Malformed("declaration", str(error)) from None


class Declaration(msgspec.Struct, frozen=True):
    """Declaration of all tensors that a job exchanges; the same from all workers.

    Attributes:
        tasks: exchanged in every round.
        workers: N.
        job: a name that no other job has: letters, digits and underscores.
        limit: most bytes of a part.
        optimized: the parameters that servers update; None where they return sums.
    """

    tasks: tuple[Declared, ...]
    workers: int
    job: str = ""
    limit: int = MESSAGE
    optimized: Optimized | None = None

    def encode(self) -> bytes:
        """Return the declaration as a payload."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, payload: bytes) -> Declaration:
        """Return the declaration in a payload; `Malformed` if it cannot be parsed or contradicts itself."""
        try:
            found = msgspec.json.decode(payload, type=cls)
        except msgspec.MsgspecError as error:
            raise Malformed("declaration", f"a declaration that does not read: {error}") from None
        if not re.fullmatch(r"\w{0,64}", found.job):
            raise Malformed("declaration", f"a job {found.job[:64]!r}: at most 64 letters and digits make a name")
        for task in found.tasks:
            if task.size <= 0 or task.size % WIDTHS[task.dtype] or task.urgency < 0:
                raise Malformed("declaration", f"task {task.name!r} of {task.size} bytes of {task.dtype}")
        if not ALIGN <= found.limit <= LIMIT:
            raise Malformed("declaration", f"parts of at most {found.limit} bytes")
        if found.optimized is not None:
            found.optimized.check(len(found.tasks))
        return found

    def difference(self, other: Declaration) -> str | None:
        """Return how ``other`` differs, for people; None if it does not."""
        if len(self.tasks) != len(other.tasks):
            return f"{len(self.tasks)} tasks against {len(other.tasks)}"
        for mine, theirs in zip(self.tasks, other.tasks, strict=True):
            if mine != theirs:
                return f"{mine} against {theirs}"
        if self.job != other.job:
            return f"job {self.job!r} against {other.job!r}"
        if self.workers != other.workers:
            return f"{self.workers} workers against {other.workers}"
        if self.optimized != other.optimized:
            return f"updates by {self.optimized} against {other.optimized}"
        return None if self.limit == other.limit else f"parts of {self.limit} against {other.limit} bytes"


class ShardPart(NamedTuple):
    """Bytes ``[offset, offset + size)`` of ``task``, on ``shard``; ``number`` counts parts over the whole job."""

    number: int
    task: int
    offset: int
    size: int
    shard: int


class Placement:
    """Assignment of every byte to a part on a shard.

    Attributes:
        parts: by number; those of a task are neighbours, in order.
    """

    def __init__(self, declaration: Declaration, shards: int) -> None:
        if shards < 1:
            raise ConfigError("servers", shards, "is no number of servers", "write at least 1")
        whole = [
            ShardPart(0, task, offset, size, 0)
            for task, declared in enumerate(declaration.tasks)
            for offset, size in split(declared.size, declaration.limit)
        ]
        urgencies = [declaration.tasks[part.task].urgency for part in whole]
        homes = balance([part.size for part in whole], urgencies, shards)
        self.parts = tuple(
            part._replace(number=number, shard=home)
            for number, (part, home) in enumerate(zip(whole, homes, strict=True))
        )
        self._of_task: list[list[ShardPart]] = [[] for _ in declaration.tasks]
        for part in self.parts:
            self._of_task[part.task].append(part)
        self._starts = [[part.offset for part in parts] for parts in self._of_task]

    def of(self, piece: Piece) -> list[tuple[ShardPart, int, int]]:
        """Return the parts that hold the bytes of ``piece``, with the first byte in each and the number of bytes."""
        parts, starts = self._of_task[piece.task], self._starts[piece.task]
        end = piece.offset + piece.size
        place = bisect_right(starts, piece.offset) - 1
        found = []
        while place < len(parts) and parts[place].offset < end:
            part = parts[place]
            low, high = max(piece.offset, part.offset), min(end, part.offset + part.size)
            if low < high:
                found.append((part, low - part.offset, high - low))
            place += 1
        return found


def dtype_name(dtype: object) -> Dtype:
    """Return the name of a torch dtype that can be exchanged; raise ConfigError for another."""
    name = str(dtype).removeprefix("torch.")
    if name not in WIDTHS:
        raise unknown("dtype", name, tuple(WIDTHS))
    return name  # pyright: ignore[reportReturnType] one of the keys
