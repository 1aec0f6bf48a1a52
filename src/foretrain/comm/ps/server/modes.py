"""What a server does with what is pushed: give back sums, or update parameters. One protocol; each mode has a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from foretrain.comm.ps.frames import Header
from foretrain.comm.ps.placement import Declaration, Declared, Optimized, ShardPart
from foretrain.comm.ps.server.shard import Delivery, SumShard
from foretrain.errors import ConfigError


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
        """``worker`` has pushed these bytes of a round; see `foretrain.comm.ps.server.shard.SumShard.push`."""
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


OptimizerShardFactory = Callable[[Iterable[ShardPart], Sequence[Declared], Optimized, int, Iterable[int]], Mode]
"""Makes a shard that updates parameters, of its parts, all tasks, their optimizers, the workers and those that are
lost. A framework's plugin provides one, since the optimizers are the framework's own."""


def mode(
    declaration: Declaration,
    parts: Iterable[ShardPart],
    workers: int,
    lost: Iterable[int],
    anew: bool = False,
    optimizer_shard: OptimizerShardFactory | None = None,
) -> Mode:
    """Return the shard that serves ``parts`` of a job as it is declared; ``lost`` workers push no more.

    Args:
        declaration: of the job.
        parts: those of this shard.
        workers: of the job.
        lost: ranks.
        anew: the job is under way, and another shard had its pushes before.
        optimizer_shard: needed where ``declaration`` has optimizers.

    Raises:
        ConfigError: optimizers are declared and this server cannot run any.
    """
    if declaration.optimized is None:
        return SumShard(parts, declaration.tasks, workers, lost, anew)
    if optimizer_shard is None:
        remedy = "start it with foretrain server where PyTorch is installed, or write updates='workers'"
        raise ConfigError("updates", "servers", "is declared, and this server runs no optimizers", remedy)
    return optimizer_shard(parts, declaration.tasks, declaration.optimized, workers, lost)
