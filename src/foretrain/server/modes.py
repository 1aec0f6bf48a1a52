"""What a server does with what is pushed: give back sums, or update parameters. One protocol; each mode has a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from foretrain.server.frames import Header
from foretrain.server.placement import Declaration, Part
from foretrain.server.shard import Delivery, Shard


class Mode(Protocol):
    """A shard: a state machine that knows no socket, clock or thread. What is to be sent now is returned."""

    def push(
        self,
        worker: int,
        part: int,
        step: int,
        offset: int,
        size: int,
        data: memoryview | None,
        again: bool = False,
        held: bool = False,
    ) -> list[Delivery]:
        """``worker`` has pushed these bytes of a round; see `foretrain.server.shard.Shard.push`."""
        ...

    def pull(self, worker: int, part: int, step: int, offset: int, size: int) -> list[Delivery]:
        """``worker`` wants these bytes now."""
        ...

    def without(self, worker: int) -> list[Delivery]:
        """``worker`` is lost."""
        ...

    def leaves(self, worker: int) -> list[Delivery]:
        """``worker`` closes, and means to."""
        ...

    def tell(self, worker: int, header: Header, payload: memoryview) -> Iterable[tuple[Header, bytes]]:
        """``worker`` says something else than gradients; what is answered to it alone."""
        ...

    def owed(self, worker: int) -> int | None:
        """The round that others are in, and that cannot end without pushes of ``worker``; None where there is none."""
        ...

    def through(self, step: int) -> bool:
        """Whether all rounds up to ``step`` are complete in all parts."""
        ...

    def waits(self) -> Sequence[str]:
        """Who is waited for, one line each."""
        ...


def prepare() -> None:
    """Loads what updates need. PyTorch takes some seconds, in which a server is not heard."""
    import torch

    from foretrain.server import updating

    assert updating.Updating
    torch.optim.SGD([torch.nn.Parameter(torch.empty(0))])


def mode(
    declaration: Declaration, parts: Iterable[Part], workers: int, lost: Iterable[int], anew: bool = False
) -> Mode:
    """A shard with ``parts`` for a job that is ``declared``; ``lost`` workers push no more.

    ``anew`` says that the job is under way, and another shard had its pushes before.
    """
    if declaration.optimized is None:
        return Shard(parts, declaration.tasks, workers, lost, anew)
    # Only here is PyTorch needed, which takes seconds to import.
    from foretrain.server.updating import Updating

    return Updating(parts, declaration.tasks, declaration.optimized, workers, lost)
