"""Whom to tell how far a simulation is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from foretrain.errors import ForetrainError
from foretrain.live.executor import FoldingInvalid
from foretrain.live.forecast import warnings_of
from foretrain.live.rank_trace import SimulationTrace, StepBreakdown


@dataclass(frozen=True, slots=True)
class ProgressCallbacks:
    """Whom to tell how far the simulation is.

    Attributes:
        building: called with the files of the fake device that are compiled, and of how many.
        repeated: called before the script starts again from its beginning, with the number of live ranks.
        folded: called with who stands for whom, whenever ranks start.
        stepped: called with each step of each live rank.
        waiting: called about once a second while nothing comes from the ranks, with those that compute on their host,
            and for how many seconds they have.
        told: called with a line about what takes long to simulate.
        failed: called before an error is raised with what the ranks had warned of, and how often.
    """

    building: Callable[[int, int], None] = lambda done, every: None
    repeated: Callable[[int], None] = lambda live: None
    folded: Callable[[tuple[str, ...]], None] = lambda lines: None
    stepped: Callable[[int, StepBreakdown], None] = lambda rank, step: None
    waiting: Callable[[tuple[int, ...], float], None] = lambda ranks, seconds: None
    failed: Callable[[dict[str, int]], None] = lambda warnings: None
    told: Callable[[str], None] = lambda line: None


@contextmanager
def reporting_warnings(story: SimulationTrace, watch: ProgressCallbacks) -> Iterator[None]:
    """Has ``watch`` hear of the ranks' warnings if the block fails; they may be why."""
    try:
        yield
    except FoldingInvalid:  # It goes on, with more live ranks.
        raise
    except ForetrainError:
        if warnings := warnings_of(story.chapters):
            watch.failed(warnings)
        raise
