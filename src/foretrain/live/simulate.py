"""Runs a training script on a cluster that is not there."""

from __future__ import annotations

import dataclasses
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foretrain.device import calls
from foretrain.device.stack import host_launch, overlap_slowdown, stack_factor
from foretrain.errors import ConfigError, ForetrainError, PeerLost, StallError
from foretrain.fakecuda.settings import Settings
from foretrain.live.conductor import RankLost, Unfolded, conduct
from foretrain.live.folding import Folding, Message
from foretrain.live.forecast import Forecast, forecast_of, warnings_of
from foretrain.live.out_of_memory import check_memory
from foretrain.live.ranks import Ranks
from foretrain.live.story import Step, Story
from foretrain.live.traffic import NetworkTraffic
from foretrain.network.deployment import Deployment
from foretrain.network.topology import Topology
from foretrain.schedule import Spec, spec
from foretrain.units import Time
from foretrain.virtual.world import VirtualWorld

Live = Literal["auto", "all"] | int
"""Which ranks run: as few as are needed, all, or this many."""


class ScriptFailed(PeerLost):
    """The script failed on a rank; ``status`` is that rank's exit status, 128 and more for a signal, as of a shell."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class Watch:
    """Whom to tell how far the simulation is.

    Attributes:
        building: called with the files of the fake device that are compiled, and of how many.
        repeated: called before the script starts again from its beginning, with the number of live ranks.
        folded: called with who stands for whom, whenever ranks start.
        stepped: called with each step of each live rank.
        waiting: called about once a second while nothing comes from the ranks, with those that compute on their host,
            and for how many seconds they have.
        failed: called before an error is raised with what the ranks had warned of, and how often.
    """

    building: Callable[[int, int], None] = lambda done, every: None
    repeated: Callable[[int], None] = lambda live: None
    folded: Callable[[tuple[str, ...]], None] = lambda lines: None
    stepped: Callable[[int, Step], None] = lambda rank, step: None
    waiting: Callable[[tuple[int, ...], float], None] = lambda ranks, seconds: None
    failed: Callable[[dict[str, int]], None] = lambda warnings: None


@dataclass(frozen=True, slots=True)
class Simulated:
    """A forecast and what it was made of.

    Attributes:
        forecast: the numbers.
        story: of every live rank, with its activities where they were kept.
        folding: which ranks were live.
        traffic: what the network carried.
        network: whose links `carried` is about.
        carried: bytes over each link in the last step of the first live rank, by all ranks, float64 (links,).
        usable: bytes of a GPU's memory that a script can have.
    """

    forecast: Forecast
    story: Story
    folding: Folding
    traffic: NetworkTraffic
    network: Topology
    carried: NDArray[np.float64]
    usable: int


def simulate(
    script: Sequence[str],
    where: Deployment,
    *,
    module: bool = False,
    live: Live = "auto",
    steps: int | None = None,
    kept: int | None = 0,
    factor: str | float = 1.0,
    host: Time | Literal["measured"] | None = None,
    calibration: Path | None = None,
    operators: Path | None = None,
    schedule: str | Spec | None = None,
    watch: Watch | None = None,
) -> Simulated:
    """Runs ``script`` on every rank of ``where``, as torchrun would, until it ends.

    Args:
        script: the script, or with ``module`` a module's name, and its arguments.
        where: the cluster; its device must be named.
        module: as ``python -m``.
        live: which ranks run as processes of their own; the others are represented.
        steps: after how many steps of the optimizer to end the script; None lets it run to its end.
        kept: of how many last steps to keep every kernel and communication; None keeps all.
        factor: of the framework's efficiency, or its name; see `foretrain.device.stack`.
        host: what launching an operator costs the host, ps, or the CPU time that the script takes on this machine, with
            which no two forecasts are alike; None is what it costs on servers with GPUs.
        calibration: a file of what was measured on the cluster's devices, preferred to what is known of them.
        operators: where to write the operators that were launched, for ``foretrain calibrate``.
        schedule: the policy that exchanges gradients in place of DistributedDataParallel's own; None leaves them to it.
        watch: told how far it is.

    Raises:
        ConfigError: there is no such policy, the script does not exist, or the cluster does not say what its GPUs are.
        ForetrainError: the device cannot be compiled, or there was no step to forecast.
        ScriptFailed: a rank failed; its traceback is on stderr.
        OutOfMemory: a rank failed as its GPU's memory was not enough.
        Disagreement: ranks call different collectives.
        StallError: all ranks wait; says who for whom.
    """
    watch = watch or Watch()
    begin = time.perf_counter()
    settings = dataclasses.replace(
        _settings(script, where, module),
        steps=steps,
        tracing=kept != 0,
        schedule=None if schedule is None else str(spec(schedule)),
        calibration=calibration and str(calibration.absolute()),
        measured_host=host == "measured",
    )
    device, measured = settings.measured()
    launch = host if isinstance(host, int) else (measured and measured.launch)
    settings = dataclasses.replace(
        settings,
        factor=stack_factor(device, factor),
        launch=host_launch(device, factor) if launch is None else launch,
    )

    def run(settings: Settings) -> _Done:
        return _Attempt(where, settings, live, kept, watch).run()

    done = _recorded(settings, operators, run) if operators else run(settings)
    members = Counter(done.folding.representative(rank) for rank in range(settings.world))
    with _warned(done.story, watch):
        forecast = forecast_of(
            done.story.chapters,
            members,
            cluster=str(where),
            device=device,
            world=settings.world,
            classes=done.folding.describe(),
            wall=time.perf_counter() - begin,
        )
    usable = device.memory - settings.reserve
    return Simulated(forecast, done.story, done.folding, done.traffic, where.network, done.carried, usable)


@contextmanager
def _warned(story: Story, watch: Watch) -> Iterator[None]:
    """Has ``watch`` hear of the ranks' warnings if the block fails; they may be why."""
    try:
        yield
    except Unfolded:  # It goes on, with more live ranks.
        raise
    except ForetrainError:
        if warnings := warnings_of(story.chapters):
            watch.failed(warnings)
        raise


@dataclass(frozen=True, slots=True)
class _Done:
    story: Story
    folding: Folding
    traffic: NetworkTraffic
    carried: NDArray[np.float64]


def _recorded(settings: Settings, operators: Path, run: Callable[[Settings], _Done]) -> _Done:
    """What ``run`` does, with every operator that was launched written to ``operators``."""
    with tempfile.TemporaryDirectory(prefix="foretrain-", ignore_cleanup_errors=True) as folder:
        done = run(dataclasses.replace(settings, operators=str(Path(folder) / "operators")))
        found = {call.key: call for path in sorted(Path(folder).glob("operators*")) for call in calls.load(path)}
    calls.dump(found.values(), operators)
    return done


class _Steps:
    """Hears of every step, and asks with each of the first live rank what links have carried since the one before."""

    def __init__(self, traffic: NetworkTraffic, first: int, stepped: Callable[[int, Step], None]) -> None:
        self._traffic, self._first, self._stepped = traffic, first, stepped
        self.carried = traffic.mark()

    def __call__(self, rank: int, step: Step) -> None:
        if rank == self._first:
            self.carried = self._traffic.mark()
        self._stepped(rank, step)


class _Attempt:
    """Starts the ranks with as few live as seems enough, and again with more where messages show that it is not.

    Only a run tells with whom a rank exchanges messages; see Note [Who is alike] in `foretrain.live.folding`.
    """

    def __init__(self, where: Deployment, settings: Settings, live: Live, kept: int | None, watch: Watch) -> None:
        self._where, self._settings, self._live = where, settings, live
        self._kept, self._watch = kept, watch
        self._groups: dict[tuple[tuple[int, ...], int], None] = {}
        self._messages: dict[Message, None] = {}
        self._heard: set[int] = set()

    def run(self) -> _Done:
        """Until all ranks have ended."""
        for before in range(self._settings.world):
            folding = self._folding()
            if before:
                self._watch.repeated(len(folding.live))
            self._watch.folded(folding.describe())
            try:
                # The zygote removes the folder as well, if nobody is left to.
                with tempfile.TemporaryDirectory(prefix="foretrain-", ignore_cleanup_errors=True) as folder:
                    folded = len(folding.live) < self._settings.world
                    settings = dataclasses.replace(self._settings, store=str(Path(folder, "store")), folded=folded)
                    return self._once(settings, folding)
            except Unfolded as found:
                self._messages.update(dict.fromkeys(found.messages))
                self._groups.update(dict.fromkeys(folding.groups))
                self._heard.update(folding.live)
            except ScriptFailed as failed:
                raise (_after(failed, before) if before else failed) from None
        raise AssertionError("every attempt has more live ranks than the one before")

    def _folding(self) -> Folding:
        world = self._settings.world
        if self._live == "all":
            return Folding.all_live(world)
        groups = [group for group, _ in self._groups]
        families = [family for _, family in self._groups]
        if self._live == "auto":
            return Folding.discover(world, groups, families, self._messages, heard=self._heard or (0,))
        return Folding.first(world, int(self._live), groups, families, self._messages, heard=self._heard or (0,))

    def _once(self, settings: Settings, folding: Folding) -> _Done:
        world = VirtualWorld()
        traffic = NetworkTraffic(world, self._where, folding)
        steps = _Steps(traffic, min(folding.live), self._watch.stepped)
        story = Story(folding.live, self._kept, steps)
        slowdown = overlap_slowdown(settings.measured()[0])
        with _warned(story, self._watch), Ranks(settings, self._watch.building) as ranks:
            ranks.fork(folding.live)
            try:
                conduct(
                    ranks.sockets,
                    world,
                    traffic,
                    folding,
                    slowdown=slowdown,
                    story=story,
                    steps=settings.steps,
                    waiting=self._watch.waiting,
                )
            except Unfolded:
                raise
            except ForetrainError as error:
                check_memory(story)
                cause = _cause(error, ranks, story)
                ranks.dismiss()
                raise cause from None
            check_memory(story)
            if failed := _failed(story):
                raise failed
        return _Done(story, folding, traffic, steps.carried)


def _settings(script: Sequence[str], where: Deployment, module: bool) -> Settings:
    if not module and not Path(script[0]).exists():
        raise ConfigError("script", script[0], "is no file", f"there is none at {Path(script[0]).absolute()}")
    if where.device is None:
        raise ConfigError("cluster", str(where), "does not say which GPUs it has", "add e.g. ',device=H100'")
    return Settings(
        script=tuple(script),
        module=module,
        device=where.device,
        world=len(where.members),
        gpus=_per_server(where),
        store="",
    )


def _per_server(where: Deployment) -> int:
    """GPUs of a server; 1 where every rank is a host."""
    nodes, ranks = where.topology.nodes, where.topology.ranks
    counts = [len(list(alike)) for _, alike in groupby(where.members, lambda rank: nodes[ranks[rank]].server)]
    if len({nodes[ranks[rank]].server for rank in where.members}) == 1:
        return len(where.members)
    if len(set(counts[:-1])) > 1 or counts[-1] > counts[0]:
        raise ConfigError(
            "cluster",
            str(where),
            f"has {', '.join(map(str, counts[:8]))} of the job's ranks on its servers, one after the other",
            "torchrun fills servers alike; only the last may have fewer",
        )
    return counts[0]


def _failed(story: Story, waits: Sequence[str] = ()) -> ScriptFailed | None:
    """The first rank whose script has failed, if one has; ``waits`` for it."""
    for rank, chapter in story.chapters.items():
        if chapter.status:
            text = f"the script failed on rank {rank} with exit status {chapter.status}"
            return ScriptFailed(chapter.status, "\n  - ".join([text + "; then" * bool(waits), *waits[:12]]))
    return None


def _after(failed: ScriptFailed, before: int) -> ScriptFailed:
    """``failed``, of a script that was started ``before``: it may have met what it left behind itself."""
    times = "once" if before == 1 else f"{before} times"
    return ScriptFailed(
        failed.status,
        f"{failed}\nthe script had been started {times} before, to find out which ranks must be live; if it failed by"
        f" what it had left behind, e.g. a folder that it makes, --live all starts it once",
    )


def _cause(error: ForetrainError, ranks: Ranks, story: Story) -> ForetrainError:
    """Why a rank ended early, where others only noticed that it did."""
    if isinstance(error, StallError):
        return _failed(story, error.waits) or error
    if isinstance(error, RankLost) and (status := ranks.status(error.rank)) is not None:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        how += " (os._exit?)" if status >= 0 else ""
        return ScriptFailed(128 - status if status < 0 else status or 1, f"rank {error.rank} {how}: {error}")
    return error
