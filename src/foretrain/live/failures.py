"""Why a simulated script failed: the rank that did, rather than those that only noticed."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from foretrain.errors import ForetrainError, PeerLost, StallError
from foretrain.live.executor import RankLost
from foretrain.live.rank_processes import Ranks
from foretrain.live.rank_trace import SimulationTrace


class ScriptFailed(PeerLost):
    """The script failed on a rank; ``status`` is that rank's exit status, 128 and more for a signal, as of a shell."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


def script_failure(story: SimulationTrace, waits: Sequence[str] = ()) -> ScriptFailed | None:
    """The first rank whose script has failed, if one has; ``waits`` for it."""
    for rank, chapter in story.chapters.items():
        if chapter.status:
            text = f"the script failed on rank {rank} with exit status {chapter.status}"
            return ScriptFailed(chapter.status, "\n  - ".join([text + "; then" * bool(waits), *waits[:12]]))
    return None


def after_restarts(failed: ScriptFailed, before: int) -> ScriptFailed:
    """``failed``, of a script that was started ``before``: it may have met what it left behind itself."""
    times = "once" if before == 1 else f"{before} times"
    return ScriptFailed(
        failed.status,
        f"{failed}\nthe script had been started {times} before, to find out which ranks must be live; if it failed by"
        f" what it had left behind, e.g. a folder that it makes, --live all starts it once",
    )


def cause_of(error: ForetrainError, ranks: Ranks, story: SimulationTrace) -> ForetrainError:
    """Why a rank ended early, where others only noticed that it did."""
    if isinstance(error, StallError):
        return script_failure(story, error.waits) or error
    if isinstance(error, RankLost) and (status := ranks.status(error.rank)) is not None:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        how += " (os._exit?)" if status >= 0 else ""
        return ScriptFailed(128 - status if status < 0 else status or 1, f"rank {error.rank} {how}: {error}")
    return error
