"""Servers that are killed while a job trains are started again, and the parameters are those of a job that had luck.

Seeds draw when: at which step, how far into it, and which server. FORETRAIN_KILLS says how many seeds to try.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from foretrain.launch.servers import Servers, Wanted  # noqa: E402
from foretrain.runtime import attach  # noqa: E402
from foretrain.runtime.setup import SECRET  # noqa: E402
from tests.runtime.models import SMALL, WARMUP, batch, mlp, objective, sgd  # noqa: E402
from tests.runtime.served.serving import KEY, servers  # noqa: E402

STEPS = 12
SEEDS = range(int(os.environ.get("FORETRAIN_KILLS", "3")))
SCHEDULES = [SMALL, "tictac", "dear", "fifo"]
"""Those that push and pull apart, too."""


def trained(run, addresses, schedule):
    """A hash of all parameters after `STEPS`; says, for ``run``, how far it has come."""
    os.environ[SECRET] = KEY.hex()
    model = mlp()
    optimizer = sgd(model)
    with attach(model, optimizer, schedule, warmup=WARMUP, timeout=30, engine="ps", servers=addresses):
        for step in range(STEPS):
            print(f"{run}: step {step}.", flush=True)
            objective(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"{run}: step {STEPS}.", flush=True)
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


@pytest.fixture(scope="module")
def expected(ranks):
    with servers(1, 2) as (addresses, _):
        one, other = ranks(trained, "no loss", addresses, SMALL)
    assert one == other
    return one


class Killer:
    """Kills servers of ``beside`` when ``said()`` has ``run`` at the steps that ``chance`` draws."""

    def __init__(self, run, beside, said, chance):
        # A third while what pushing costs is measured, before the first scheduled step, which takes longer than others.
        steps = sorted(
            chance.choice([WARMUP, *[chance.randrange(STEPS + 1)] * 2]) for _ in range(chance.choice([1, 2]))
        )
        lengths = [0.5 if step == WARMUP else 0.02 for step in steps]
        self.moments = [
            (step, length * chance.random(), chance.randrange(len(beside.addresses)))
            for step, length in zip(steps, lengths, strict=True)
        ]
        self._run, self._beside, self._said = run, beside, said
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._kill)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _kill(self):
        for step, later, shard in self.moments:
            while f"{self._run}: step {step}." not in self._said():
                if self._over.wait(0.002):
                    return
            time.sleep(later)
            process = self._beside._processes[shard]
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_update_is_lost_or_applied_twice(ranks, expected, seed, monkeypatch):
    chance, run = random.Random(seed), f"seed {seed}"
    monkeypatch.setenv(SECRET, KEY.hex())
    schedule = SCHEDULES[seed % len(SCHEDULES)]
    gone = threading.Event()
    with (
        Servers(Wanted(1 + seed % 2, 2, 30.0, restarts=2), gone.set) as beside,
        Killer(run, beside, lambda: ranks.wrote(0), chance) as killer,
    ):
        found = ranks(trained, run, ",".join(beside.addresses), schedule)
    assert found == [expected] * 2, killer.moments
    assert not gone.is_set()
