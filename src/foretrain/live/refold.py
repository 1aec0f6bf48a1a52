"""Run the ranks of a script, and run them again with more live ranks where messages show that more are needed."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foretrain.device.gpu import overlap_slowdown
from foretrain.errors import ConfigError, ForetrainError, StallError
from foretrain.live.device.settings import RankSettings
from foretrain.live.executor import FoldingInvalid, execute
from foretrain.live.folding import Folding, Message
from foretrain.live.forecast import warnings_of
from foretrain.live.network_traffic import NetworkTraffic
from foretrain.live.rank_processes import (
    Ranks,
    ScriptFailed,
    WarmForkServers,
    after_restarts,
    cause_of,
    check_memory,
    script_failure,
    stalled_while_folded,
    while_folded,
)
from foretrain.live.rank_trace import SimulationTrace, StepBreakdown
from foretrain.live.routed_loads import RoutedLoads, routed_loads
from foretrain.network.deployment import Deployment
from foretrain.simulation.world import VirtualWorld

_MOST_LIVE = 32
"""Ranks of a world all of which are run if the script failed, perhaps by what it had gathered of represented ones."""

_MESSAGES = "messages between them were seen"

Live = Literal["auto", "all"] | int
"""Number of live ranks: as few as are needed, all, or this many."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Outcome of a run; attributes as in `foretrain.live.simulate.Simulated`."""

    trace: SimulationTrace
    folding: Folding
    traffic: NetworkTraffic
    carried: NDArray[np.float64]
    loads: RoutedLoads | None
    more_live: tuple[str, ...]


class _Steps:
    """Callback of every step; records the bytes that links carried in the last step of the first live rank."""

    def __init__(self, traffic: NetworkTraffic, first: int, stepped: Callable[[int, StepBreakdown], None]) -> None:
        self._traffic, self._first, self._stepped = traffic, first, stepped
        self.carried = traffic.mark()

    def __call__(self, rank: int, step: StepBreakdown) -> None:
        if rank == self._first:
            self.carried = self._traffic.mark()
        self._stepped(rank, step)


class _OtherRank(ForetrainError):
    """The one live rank of a fake world says that it is another.

    Attributes:
        rank: which.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__(f"the script says that it is rank {rank}")


class Refold:
    """Runs with as few live ranks as possible, repeated with more where messages show that more are needed.

    Only a run shows with whom a rank exchanges messages; see Note [Symmetric ranks] in `foretrain.live.folding`.
    """

    def __init__(
        self,
        where: Deployment,
        settings: RankSettings,
        live: Live,
        kept: int | None,
        watch: ProgressCallbacks,
        warm: WarmForkServers | None = None,
    ) -> None:
        self._where, self._settings, self._live = where, settings, live
        self._kept, self._watch, self._warm = kept, watch, warm
        self._groups: dict[tuple[tuple[int, ...], int], None] = {}
        self._messages: dict[Message, None] = {}
        self._heard: set[int] = set()
        self._named: int | None = None  # the rank that the script of a fake world says it is
        self._singled_out: dict[int, str] = {}
        self._slow = [rank for rank, _ in settings.slow]
        slow = self._slow if live == "auto" else []
        self._more_live = dict.fromkeys(f"rank {rank} is slower than others" for rank in slow)
        self._routers_before: tuple[int, ...] = ()

    def run(self) -> RunOutcome:
        """Run the ranks until all have ended; raise as `foretrain.live.simulate.simulate` does."""
        why = ""
        for before in range(2 * self._settings.world):  # each may be repeated to number routers
            folding = self._folding()
            if before and (self._messages or why):
                self._watch.repeated(len(folding.live), why)
            self._watch.folded(folding.describe())
            folded = len(folding.live) < folding.world
            try:
                # The fork server removes the folder as well, if nobody is left to.
                with tempfile.TemporaryDirectory(prefix="foretrain-", ignore_cleanup_errors=True) as folder:
                    settings = dataclasses.replace(
                        self._settings,
                        store=str(Path(folder, "store")),
                        folded=folded,
                        live=len(folding.live),
                        movable=len(folding.live) == 1 and self._named is None,
                        routers_before=self._routers_before,
                    )
                    return self._once(settings, folding)
            except _OtherRank as found:
                self._named = found.rank
                self._watch.told(f"starting again as rank {found.rank}, which the script says that it is")
            except FoldingInvalid as found:
                self._messages.update(dict.fromkeys(found.messages))
                self._groups.update(dict.fromkeys(folding.groups))
                self._heard.update(folding.live)
                self._singled_out |= found.singled_out
                self._routers_before = found.routers_before
                places = [f"{place} asks for rank {rank}" for rank, place in found.singled_out.items()]
                self._more_live.update(dict.fromkeys([*places, *([_MESSAGES] if found.messages else [])]))
                numbered = "routers are numbered from the pipeline's first stage to its last"
                why = " and ".join(places) or (numbered if found.routers_before else _MESSAGES)
            except StallError as error:
                raise (stalled_while_folded(error, len(folding.live), folding.world) if folded else error) from None
            except ScriptFailed as error:
                if gathered := self._gathered(folding):
                    self._live = "all"
                    why = f"{gathered[0]} gathers objects of ranks that were not, and the script failed"
                    self._more_live[why] = None
                    continue
                failed = while_folded(error, len(folding.live), folding.world, self._trace) if folded else error
                raise (after_restarts(failed, before) if before else failed) from None
        raise AssertionError("every attempt has more live ranks than the one before")

    def _folding(self) -> Folding:
        world = self._settings.world
        if self._live == "all":
            return Folding.all_live(world)
        groups = [group for group, _ in self._groups]
        families = [family for _, family in self._groups]
        if self._named is not None and not self._messages:
            return Folding(world, (self._named,), [self._named] * world)
        number = None if self._live == "auto" else int(self._live)
        return Folding.discover(
            world,
            groups,
            families,
            self._messages,
            heard=self._heard or (0,),
            also={*self._slow, *self._singled_out},
            n=number,
        )

    def _gathered(self, folding: Folding) -> list[str]:
        """Return the lines that gathered objects of represented ranks, where few enough ranks are to be live."""
        if self._live != "auto" or folding.world > _MOST_LIVE:
            return []
        return [place for place, copied in _gathered(self._trace, folding).items() if copied]

    def _once(self, settings: RankSettings, folding: Folding) -> RunOutcome:
        world = VirtualWorld()
        traffic = NetworkTraffic(world, self._where, folding, self._watch.told)
        steps = _Steps(traffic, min(folding.live), self._watch.stepped)
        trace = self._trace = SimulationTrace(folding.live, self._kept, steps)
        slowdown = overlap_slowdown(settings.measured()[0])
        with reporting_warnings(trace, self._watch), Ranks(settings, self._watch.building, self._warm) as ranks:
            ranks.fork(folding.live)
            try:
                execute(
                    ranks.sockets,
                    world,
                    traffic,
                    folding,
                    slowdown=slowdown,
                    trace=trace,
                    steps=settings.steps,
                    uneven_experts=settings.experts is not None,
                    routers_before=settings.routers_before,
                    waiting=self._watch.waiting,
                )
            except FoldingInvalid:
                raise
            except ForetrainError as error:
                if (said := next((one.said_rank for one in trace.rank_traces.values()), None)) is not None:
                    raise _OtherRank(said) from None
                _check_experts(trace)
                check_memory(trace)
                cause = cause_of(error, ranks, trace)
                ranks.dismiss()
                raise cause from None
            _check_experts(trace)
            check_memory(trace)
            if failed := script_failure(trace):
                raise failed
            _warn_of_copies(trace, folding)
        loads = routed_loads(settings.experts, settings.routers_before, trace)
        return RunOutcome(trace, folding, traffic, steps.carried, loads, tuple(self._more_live))


def _check_experts(trace: SimulationTrace) -> None:
    """Raise ConfigError if the loads of experts do not fit the script's routers."""
    wrong = next((one.wrong_experts for one in trace.rank_traces.values() if one.wrong_experts), None)
    if wrong is not None:
        field, value, problem, remedy = wrong
        raise ConfigError(field, value, problem, remedy)


def _gathered(trace: SimulationTrace, folding: Folding) -> dict[str, int]:
    """Return for each line that gathers objects how many of them are copies of those of live ranks."""
    places: dict[str, int] = {}
    for rank_trace in trace.rank_traces.values():
        for place, ranks in rank_trace.gathered.items():
            places[place] = max(places.get(place, 0), len(ranks.difference(folding.live)))
    return places


def _warn_of_copies(trace: SimulationTrace, folding: Folding) -> None:
    warnings = trace.rank_traces[min(folding.live)].warnings
    for place, copies in _gathered(trace, folding).items():
        if copies:
            warnings[
                f"{place} gathers objects, {copies} of them copies of those of live ranks; if they differ from rank to"
                " rank, run all with --live all"
            ] = 1


@dataclass(frozen=True, slots=True)
class ProgressCallbacks:
    """Callbacks that report a simulation's progress.

    Attributes:
        building: called with the seconds that the simulated device has been compiled for, and will be, by estimate.
        repeated: called before the script starts again from its beginning, with the number of live ranks, and why.
        folded: called with who stands for whom, whenever ranks start.
        stepped: called with each step of each live rank.
        waiting: called about once a second while nothing comes from the ranks, with those that compute on their host,
            and for how many seconds they have.
        told: called with a line about what takes long to simulate.
        failed: called before an error is raised with what the ranks had warned of, and how often.
    """

    building: Callable[[int, int], None] = lambda done, every: None
    repeated: Callable[[int, str], None] = lambda live, why: None
    folded: Callable[[tuple[str, ...]], None] = lambda lines: None
    stepped: Callable[[int, StepBreakdown], None] = lambda rank, step: None
    waiting: Callable[[tuple[int, ...], float], None] = lambda ranks, seconds: None
    failed: Callable[[dict[str, int]], None] = lambda warnings: None
    told: Callable[[str], None] = lambda line: None


@contextmanager
def reporting_warnings(trace: SimulationTrace, watch: ProgressCallbacks) -> Iterator[None]:
    """Report the ranks' warnings to ``watch`` if the block fails; they may be why."""
    try:
        yield
    except (FoldingInvalid, _OtherRank):  # It goes on, with other live ranks.
        raise
    except ForetrainError:
        if warnings := warnings_of(trace.rank_traces):
            watch.failed(warnings)
        raise
