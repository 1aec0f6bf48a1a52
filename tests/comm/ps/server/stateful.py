"""A shard that keeps parameters: what it sends for a sum is what they are after a step of SGD with it."""

from __future__ import annotations

import numpy as np

from tests.comm.ps.server.oracle import PythonSumShard, _Round

RATE = np.float32(0.1)


class Sgd(PythonSumShard):
    """Of float32; what no worker has a gradient for stays, and is sent as absent."""

    def __init__(self, parts, tasks, workers, **options):
        super().__init__(parts, tasks, workers, **options)
        self._done, self.left = dict.fromkeys(self._held, 0), set()
        self.parameters = {number: np.zeros(held.part.size // 4, np.float32) for number, held in self._held.items()}

    begun = True

    def worker_closed(self, worker):
        self.left.add(worker)
        return super().worker_closed(worker)

    @property
    def done(self):
        return [min(self._done.values(), default=0)] * self._workers

    @property
    def living(self):
        return range(self._workers)

    @property
    def between(self):
        """Whether no part is further than another: only then is there a state."""
        return min(self._done.values()) == max(self._done.values()) > 0

    def push(self, worker, part, step, *args, **options):
        told = super().push(worker, part, step, *args, **options)
        found = self._held[part].rounds[step & 1]
        if found is not None and found.step == step and not found.coverage.missing():
            self._done[part] = max(self._done[part], step + 1)
        return told

    def _sum(self, held, found, start, end):
        value = super()._sum(held, found, start, end)
        if value.data is not None:
            mine = self.parameters[held.part.number][start // 4 : end // 4]
            mine -= RATE * np.frombuffer(value.data, np.float32)
            value.data[:] = memoryview(mine.tobytes())
        return value

    def state(self):
        last = {number: held.rounds[self.done[0] - 1 & 1] for number, held in self._held.items()}
        rounds = {number: {"absent": each.absent, "again": each.again} for number, each in last.items()}
        return {"round": self.done[0], "parameters": self.parameters, "rounds": rounds, "left": sorted(self.left)}

    def restore(self, state):
        last, self.left = state["round"] - 1, set(state["left"])
        for number, held in self._held.items():
            self._done[number] = state["round"]
            self.parameters[number][:] = state["parameters"][number]
            held.buffers[last & 1][:] = memoryview(self.parameters[number].tobytes())
            was = state["rounds"][number]
            found = held.rounds[last & 1] = _Round(last, was["again"], held.part.size, self._group, self._workers)
            found.absent = [(start, end) for start, end in was["absent"]]
            for worker in range(self._workers):
                found.coverage.add(worker, 0, held.part.size)
