"""Causes of a failed simulation: the rank whose script failed first, or a GPU with too little memory."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from foretrain.errors import ForetrainError, PeerLost, StallError
from foretrain.live.collectives import who
from foretrain.live.executor import RankLost
from foretrain.live.rank_processes import Ranks
from foretrain.live.rank_trace import RankTrace, SimulationTrace


class ScriptFailed(PeerLost):
    """The script failed on a rank; ``status`` is that rank's exit status, 128 and more for a signal, as of a shell."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


def script_failure(trace: SimulationTrace, waits: Sequence[str] = ()) -> ScriptFailed | None:
    """Return the error of the first rank whose script failed, with the ``waits`` for it; None if none did."""
    for rank, rank_trace in trace.rank_traces.items():
        if rank_trace.status:
            text = f"the script failed on rank {rank} with exit status {rank_trace.status}"
            return ScriptFailed(rank_trace.status, "\n  - ".join([text + "; then" * bool(waits), *waits[:12]]))
    return None


def while_folded(failed: ScriptFailed, live: int, world: int) -> ScriptFailed:
    """Return ``failed`` with the hint that only ``live`` of ``world`` ranks ran."""
    return ScriptFailed(
        failed.status,
        f"{failed}\n{live} of {world} ranks were live and stood for the others, whose objects are copies of theirs; if"
        " the script failed by what another rank would have gathered or saved, run all with --live all",
    )


def after_restarts(failed: ScriptFailed, before: int) -> ScriptFailed:
    """Return ``failed`` with the hint that an earlier start of the script may have caused it."""
    times = "once" if before == 1 else f"{before} times"
    return ScriptFailed(
        failed.status,
        f"{failed}\nthe script had been started {times} before, to find out which ranks must be live; if it failed by"
        f" what it had left behind, e.g. a folder that it makes, --live all starts it once",
    )


def cause_of(error: ForetrainError, ranks: Ranks, trace: SimulationTrace) -> ForetrainError:
    """Return the cause of ``error``: the exit of a rank that others only noticed."""
    if isinstance(error, StallError):
        return script_failure(trace, error.waits) or error
    if isinstance(error, RankLost) and (status := ranks.status(error.rank)) is not None:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        how += " (os._exit?)" if status >= 0 else ""
        return ScriptFailed(128 - status if status < 0 else status or 1, f"rank {error.rank} {how}: {error}")
    return error


_TRIED = re.compile(r"Tried to allocate (.+?)\. ")


class OutOfMemory(ForetrainError):
    """A rank needs more memory than its GPU has.

    Attributes:
        ranks: the live ranks that failed so.
        tried: the size that the first of them requested, as PyTorch writes it.
        status: the exit status of a script that does not handle it.
    """

    status = 1

    def __init__(self, rank_traces: tuple[RankTrace, ...]) -> None:
        first = rank_traces[0]
        self.ranks = tuple(rank_trace.rank for rank_trace in rank_traces)
        found = _TRIED.search(first.memory["out_of_memory"])
        self.tried = found[1] if found else "more than there is"
        others = f", as did {who(self.ranks[1:])}" if len(self.ranks) > 1 else ""
        super().__init__(
            f"rank {first.rank} ran out of memory in step {len(first.steps) + 1}{others}: it tried to allocate "
            f"{self.tried} when {gibibytes(first.memory['reserved'])} were reserved. Of them were allocated "
            f"{_breakdown(first)}. Try a smaller batch, activation checkpointing, or sharding over more GPUs"
        )


def check_memory(trace: SimulationTrace) -> None:
    """Raise OutOfMemory if any rank ran out of memory."""
    failed = tuple(rank_trace for rank_trace in trace.rank_traces.values() if rank_trace.memory.get("out_of_memory"))
    if failed:
        raise OutOfMemory(failed)


def gibibytes(size: float) -> str:
    """Format a size of memory as PyTorch does: ``"45.08 GiB"``."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _breakdown(rank_trace: RankTrace) -> str:
    parts = {name: size for name, size in rank_trace.memory["breakdown"].items() if size}
    shown = (f"{gibibytes(size)} for {name}" for name, size in sorted(parts.items(), key=lambda part: -part[1]))
    return ", ".join(shown) or "none"
