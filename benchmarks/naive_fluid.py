"""The baseline of the benchmark of the fluid simulator: the same programs, simulated as the textbook says.

After every batch of simultaneous events all rates are computed anew by progressive filling (Bertsekas and Gallager,
Data Networks, §6.5.2): raise the level of all flows until links are full, found by a scan over all links; freeze the
flows on them; go on with the others. The next event is found by a scan over all flows. Compiled like ours; it lists the
flows of each link once per batch, so that only what the textbook leaves open is well done. One priority class.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from foretrain.collective import WHOLE
from foretrain.network.program import Program
from foretrain.units import SECOND

IDLE, LATENT, ACTIVE, OVER = range(4)
OPTIONS: dict[str, Any] = {"cache": True, "error_model": "numpy"}


class Outcome(NamedTuple):
    """What came of it.

    Attributes:
        time: of the last batch of events, ps.
        batches: how many there were.
        finish: when each flow ended, ps; infinity for those that have not.
    """

    time: float
    batches: int
    finish: NDArray[np.float64]


def simulate(
    program: Program, capacity: NDArray[np.float64], batches: int = 2**62, *, together: bool = False
) -> Outcome:
    """Runs ``program`` to its end, or for at most so many ``batches``; ``capacity`` in bytes/s.

    Each scan over the links finds one that is full, or with ``together`` all that are full at the same level.
    """
    assert not program.priority.any(), "the baseline knows one class"
    waiter = np.repeat(np.arange(len(program)), np.diff(program.first))
    heirs = waiter[np.argsort(program.after, kind="stable")]
    first_heir = np.concatenate([[0], np.cumsum(np.bincount(program.after, minlength=len(program)))])
    lag = np.where(program.lag >= WHOLE, WHOLE, program.lag).astype(np.int64)
    columns = (program.size, program.steps, program.latency, program.release, program.weight)
    waits = (program.first, program.after, lag, first_heir, heirs)
    return Outcome(
        *run(program.paths.first, program.paths.links, *columns, *waits, capacity / SECOND, batches, together)
    )


@njit(**OPTIONS)
def run(
    path, links, size, steps, latency, release, weight, first, after, lag, first_heir, heirs, capacity, batches,
    together,
):  # fmt: skip
    """The loop over batches of events; columns are those of `Program`."""
    n = len(size)
    phase, done = np.zeros(n, np.int64), np.zeros(n, np.int64)
    left, rate, since = np.zeros(n), np.zeros(n), np.zeros(n)
    due, finish = np.full(n, np.inf), np.full(n, np.inf)
    time, made = 0.0, 0
    for f in range(n):
        if may_start(f, done, steps, first, after, lag):
            phase[f], due[f] = LATENT, release[f] + latency[f]
    while made < batches:
        next_ = due.min()
        if next_ == np.inf:
            break
        time = next_
        made += 1
        again = True
        while again:
            again = False
            for f in range(n):
                if due[f] > time * (1.0 + 1e-14):
                    continue
                again = True
                due[f] = np.inf
                if phase[f] == LATENT and size[f] > 0.0 and path[f] < path[f + 1]:
                    phase[f], left[f], rate[f], since[f] = ACTIVE, size[f], 0.0, time
                    continue
                done[f] += 1
                phase[f] = IDLE
                if done[f] == steps[f]:
                    phase[f], finish[f] = OVER, time
                elif may_start(f, done, steps, first, after, lag):
                    phase[f], due[f] = LATENT, max(time, release[f]) + latency[f]
                for h in range(first_heir[f], first_heir[f + 1]):
                    g = heirs[h]
                    if phase[g] == IDLE and may_start(g, done, steps, first, after, lag):
                        phase[g], due[g] = LATENT, max(time, release[g]) + latency[g]
        new = fair(phase, path, links, weight, capacity, together)
        for f in range(n):
            # A flow whose rate stays keeps its end as well, so that rounding does not part what is simultaneous.
            if phase[f] == ACTIVE and not (rate[f] > 0.0 and abs(new[f] - rate[f]) <= 1e-14 * rate[f]):
                left[f] -= rate[f] * (time - since[f])
                rate[f], since[f] = new[f], time
                due[f] = time + max(left[f], 0.0) / rate[f] if rate[f] > 0.0 else np.inf
    return time, made, finish


@njit(**OPTIONS)
def may_start(f, done, steps, first, after, lag):
    """Whether the next step of flow ``f`` waits for nobody."""
    for d in range(first[f], first[f + 1]):  # noqa: SIM110 (numba compiles no generators)
        if done[after[d]] < min(steps[after[d]], done[f] + lag[d]):
            return False
    return True


@njit(**OPTIONS)
def fair(phase, path, links, weight, capacity, together):
    """Max-min fair rates of the active flows, by progressive filling."""
    many = len(capacity)
    rate, begin = np.full(len(phase), -1.0), np.zeros(many + 1, np.int64)
    room, weights = capacity.copy(), np.zeros(many)
    left = 0
    for f in range(len(phase)):
        if phase[f] == ACTIVE:
            left += 1
            for h in range(path[f], path[f + 1]):
                begin[links[h] + 1] += 1
                weights[links[h]] += weight[f]
    for link in range(many):
        begin[link + 1] += begin[link]
    flows, at = np.empty(begin[many], np.int64), begin[:many].copy()
    for f in range(len(phase)):
        if phase[f] == ACTIVE:
            for h in range(path[f], path[f + 1]):
                flows[at[links[h]]] = f
                at[links[h]] += 1
    open_ = np.diff(begin)
    while left > 0:
        level, fullest = np.inf, -1
        for link in range(many):
            if open_[link] > 0 and max(room[link], 0.0) / weights[link] < level:
                level, fullest = max(room[link], 0.0) / weights[link], link
        for link in range(0 if together else fullest, many if together else fullest + 1):
            if open_[link] == 0 or max(room[link], 0.0) / weights[link] > level * (1.0 + 1e-13):
                continue
            for where in range(begin[link], begin[link + 1]):
                f = flows[where]
                if rate[f] >= 0.0:
                    continue
                rate[f] = level * weight[f]
                left -= 1
                for h in range(path[f], path[f + 1]):
                    room[links[h]] -= rate[f]
                    weights[links[h]] -= weight[f]
                    open_[links[h]] -= 1
    return rate
