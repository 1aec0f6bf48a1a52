"""Prophet's promise on real links: few less urgent bytes delay a gradient.

Judged only by the times of gradients and chunks and the rate of the links. fifo, which promises nothing, must fail.
"""

import dataclasses
import json
import sys
from itertools import pairwise
from pathlib import Path

from foretrain.lab import Lab
from foretrain.lab.compare import on, plan_of
from tests.lab.forked import launching

SCRIPT = Path(__file__).with_name("traced.py")
RATE = 25_000_000
"""Bytes a second of each link."""
PARTITION, CREDIT = 16_384, 65_536
FACTOR = 2.0
PROPHET = f"prophet(partition={PARTITION}B, credit={CREDIT}B, profile=3, factor={FACTOR}, planned=0)"
"""As in the paper: each worker corrects itself. In a planned order it follows what all have planned."""
STEPS, PROFILED = 8, 4
MODELS = {"resnet50": 0.01, "vgg16": 0.002, "alexnet": 0.005}
"""And the share of their bytes: communication takes about as long as computation."""
CONTROL = {"resnet50": 0.04}
"""Four times the bytes: fifo is to have too many in the way even where a busy host computes for much longer."""
COMMON = {"compute": 80_000_000_000, "jitter": 0.05, "steps": STEPS}


def traced(lab, plan, runs):
    """What rank 0 has told of each run: of all of it, and of each step."""
    lines = []
    on(lab, plan)(
        [sys.executable, str(SCRIPT), json.dumps(runs)],
        environment={},
        timeout=600,
        on_line=lambda rank, line: lines.append(json.loads(line)) if line.startswith("{") else None,
    )
    begins = [place for place, line in enumerate(lines) if "urgency" in line]
    return [(lines[begin], lines[begin + 1 : end]) for begin, end in pairwise([*begins, len(lines)])]


def longest(steps):
    """ns: the longest block, or the longest wait for the next one, of any step: what one promise can be for."""
    found = 0
    for step in steps:
        times = sorted(when for _, when in step["gradients"])
        gaps = [after - before for before, after in pairwise(times)]
        began, limit = times[0], FACTOR * sum(gaps) / len(gaps)
        for before, after in pairwise(times):
            if after - before > limit:
                found, began = max(found, before - began, after - before), after
        found = max(found, times[-1] - began)
    return found


def in_the_way(step, urgency):
    """The most bytes, of any gradient of ``step``, that had been issued before it came, were under way, and could all
    have waited for it."""
    return max(
        sum(
            sum(size for _, _, size in pieces)
            for issued, completed, pieces in step["chunks"]
            if issued < when < completed and min(urgency[other] for other, *_ in pieces) > urgency[task]
        )
        for task, when in step["gradients"]
    )


def share_of_budget(told, judged, measured):
    """The most that was in the way in ``judged`` steps, over what may be: what the link drains in the longest interval
    of those ``measured``, and a partition."""
    ahead = (2 * told["startup"] + told["latency"]) / 1000
    budget = RATE * 1e-9 * (longest(measured) + ahead) + PARTITION
    return max(in_the_way(step, told["urgency"]) for step in judged) / budget


def test_less_urgent_bytes_in_flight_fit_the_longest_interval(name):
    rate = f"{8 * RATE}bps"
    plan = dataclasses.replace(plan_of(hosts=2, rate=rate, servers=1), calibration=0.2)
    runs = [
        {"model": model, "size": size, "seed": seed, "schedule": how} | COMMON
        for how, models in ((PROPHET, MODELS), ("fifo", CONTROL))
        for seed, (model, size) in enumerate(models.items())
    ]
    with Lab.up(name, 2 + plan.dedicated, rate) as lab:
        found = launching(lambda: traced(lab, plan, runs))
    assert len(found) == len(runs)
    for run, (told, steps) in zip(runs, found, strict=True):
        assert len(steps) >= STEPS
        sent = [sum(size for *_, pieces in step["chunks"] for *_, size in pieces) for step in steps[PROFILED:]]
        assert len(set(sent)) == 1  # nothing of what came is left out of the judgement
        if run["schedule"] == PROPHET:
            assert share_of_budget(told, steps[PROFILED:], steps) <= 1, run
        else:  # by each step's own interval: one in which the host was held up excuses no other
            assert max(share_of_budget(told, [step], [step]) for step in steps[PROFILED:]) > 1, run
