"""Who waits for what, when a simulation can go no further."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from foretrain.errors import StallError
from foretrain.network.fluid import state as c
from foretrain.network.fluid.state import ACTIVE, IDLE, FluidState

_SHOWN = 12
"""Lines of each kind: a reader needs the first ones, and a million flows may wait."""


def stalled(
    state: FluidState, ranges: Sequence[tuple[int, int]], name: Callable[[int], str] = "link {}".format
) -> StallError:
    """The error for flows in ``ranges`` that can never go on: starved of rate, or waiting for each other.

    Args:
        state: the network's.
        ranges: (first, last) flows of each program that has not completed.
        name: names a link.
    """
    flows = np.concatenate([np.arange(first, last) for first, last in ranges])
    starved = flows[state.flow[flows, c.PHASE] == ACTIVE]
    idle = flows[state.flow[flows, c.PHASE] == IDLE]
    waits = [line for _, line in zip(range(_SHOWN), _starved(state, starved, name), strict=False)]
    waits += [line for _, line in zip(range(_SHOWN), _waiting(state, idle), strict=False)]
    left = len(starved) + len(idle)
    time = state.time[c.CLOCK] / 1e9
    return StallError(f"nothing more can happen at {time:.6g} ms and {left} flows are not over:", waits)


def _starved(state: FluidState, flows: NDArray[np.int64], name: Callable[[int], str]) -> Iterator[str]:
    for f in flows.tolist():
        link, step, klass = state.flow[f, [c.BOTTLENECK, c.DONE, c.PRIORITY]].tolist()
        down = state.share[link, c.CAPACITY] <= 0
        why = "which is down" if down else f"which classes before its class {klass} keep busy"
        yield f"flow {f}: {state.fluid[f, c.LEFT]:.6g} bytes of its step {step} wait for {name(link)}, {why}"


def _waiting(state: FluidState, flows: NDArray[np.int64]) -> Iterator[str]:
    for f in flows.tolist():
        step = int(state.flow[f, c.DONE])
        for d in range(*state.flow[f, [c.GATE_FIRST, c.GATE_LAST]]):
            other, lag = state.gate[d].tolist()
            made, steps = state.flow[other, [c.DONE, c.STEPS]].tolist()
            if made < (need := min(steps, step + lag)):
                yield f"flow {f}: its step {step} waits for {need} steps of flow {other}, which has made {made}"
        if not state.flow[f, c.MISSING]:
            continue
        # Whoever has the heir in their range is waited for.
        for heir in np.flatnonzero(state.heir == -1 - f).tolist():
            mine = (state.flow[:, c.HEIR_FIRST] <= heir) & (heir < state.flow[:, c.HEIR_LAST])
            other = int(np.flatnonzero(mine)[0])
            made, steps = state.flow[other, [c.DONE, c.STEPS]].tolist()
            if made < steps:
                yield f"flow {f}: waits for all {steps} steps of flow {other}, which has made {made}"
