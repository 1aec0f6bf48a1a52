"""A policy of your own: the smallest gradient first, one whole gradient at a time, measured against the optimum T*."""

from collections.abc import Sequence
from heapq import heappop, heappush

import foretrain as ft
from foretrain.network import cluster
from foretrain.schedule import Job
from foretrain.schedule.window import whole
from foretrain.simulation import VirtualWorld
from foretrain.simulation.links import Pipes
from foretrain.simulation.replay import TrainingLoop
from foretrain.simulation.simulation import job_on
from foretrain.tasks import Action, Done, Event, Ready, Start
from foretrain.units import Time


class SmallestFirst:
    """Shortest processing time first: good for the mean completion time, which is not what an iteration waits for."""

    knobs = ()
    barrier = False  # a layer's forward waits for its own gradients alone
    warmup = 0

    def __init__(self, job: Job) -> None:
        self._tasks = job.tasks
        self._queue: list[tuple[int, int]] = []
        self._busy = False

    def handle(self, event: Event, now: Time) -> Sequence[Action]:
        if type(event) is Ready:
            heappush(self._queue, (self._tasks[event.task].size, event.task))
        elif type(event) is Done:
            self._busy = False
        if self._busy or not self._queue:
            return ()
        self._busy = True
        return (Start(whole("all_reduce", self._tasks, [heappop(self._queue)[1]])),)


def main() -> None:
    workload, place = ft.workload.zoo("gpt2"), cluster("4x1xV100@10Gbps")
    job = job_on(workload, place)
    world = VirtualWorld(Pipes(place.routes()))
    replay = TrainingLoop(workload, job, SmallestFirst(job), world, steps=3)
    replay.begin()
    world.run()
    replay.raise_if_stalled()
    mine, optimum = replay.begins[-1] - replay.begins[-2], ft.bound(workload, place).time
    p3 = ft.simulate(workload, place, "p3", trace=False).iteration_time
    print(f"smallest first {mine / 1e9:.1f} ms, {mine / optimum - 1:.1%} above T*; p3 {p3 / optimum - 1:.1%} above")


if __name__ == "__main__":
    main()
