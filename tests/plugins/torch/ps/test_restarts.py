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
import torch
import torch.distributed as dist
from torch import nn

from foretrain.comm.coordinator.handshake import SECRET
from foretrain.comm.options import ParameterServer, Timeouts
from foretrain.launch.child_processes import Servers, ServerSpec
from foretrain.plugins.torch import attach
from tests.plugins.torch.models import SMALL, WARMUP, pair, steps
from tests.plugins.torch.ps.serving import KEY, servers

STEPS = 12
PATIENT = 120.0
"""Seconds in which a server starts again, on a busy machine."""
SEEDS = range(int(os.environ.get("FORETRAIN_KILLS", "2")))
SCHEDULES = [SMALL, "tictac", "dear", "fifo"]
"""Those that push and pull apart, too."""


def trained(run, addresses, schedule, updates="workers"):
    """A hash of all parameters after `STEPS`; says, for ``run``, how far it has come."""
    os.environ[SECRET] = KEY.hex()
    model, optimizer = pair()
    transport = ParameterServer(addresses, updates)
    with attach(model, optimizer, schedule, warmup=WARMUP, timeouts=Timeouts(peer=PATIENT), transport=transport):
        for step in steps(model, optimizer, STEPS):
            print(f"{run}: step {step}.", flush=True)
        print(f"{run}: step {STEPS}.", flush=True)
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


@pytest.fixture(scope="module")
def expected(ranks):
    with servers(1, 2) as (addresses, _):
        one, other = ranks(trained, "no loss", addresses, SMALL)
    assert one == other
    return one


def counted(run, addresses, consistency):
    """What gradients sum up to that depend on no parameter, in whole numbers: nothing is rounded, in whatever order.

    Who closes last has everybody's updates.
    """
    os.environ[SECRET] = KEY.hex()
    model = nn.Linear(64, 32, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"transport": ParameterServer(addresses, consistency=consistency)}
    with attach(model, optimizer, SMALL, warmup=WARMUP, timeouts=Timeouts(peer=PATIENT), **options):
        for step in range(STEPS):
            print(f"{run}: step {step}.", flush=True)
            chance = torch.Generator().manual_seed(100 * step + dist.get_rank())
            even = 2 * torch.randint(-8, 8, (64, 32), generator=chance).float()
            (model(torch.eye(64)) * even).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"{run}: step {STEPS}.", flush=True)
    return model.weight.detach().tolist()


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
@pytest.mark.smoke_case("0")
def test_no_update_is_lost_or_applied_twice(ranks, expected, seed, monkeypatch, tmp_path):
    updates = ("workers", "servers")[(seed + seed // 2) % 2]  # four seeds have each with one server and with two
    chance, run = random.Random(seed), f"seed {seed}, updates on {updates}"
    monkeypatch.setenv(SECRET, KEY.hex())
    kept = {"updates": True, "snapshots": tmp_path, "every": chance.choice([1, 3, 5])} if updates == "servers" else {}
    schedule = SCHEDULES[seed % len(SCHEDULES)]
    gone = threading.Event()
    with (
        Servers(ServerSpec(2 - seed % 2, 2, PATIENT, restarts=2, **kept), gone.set) as beside,
        Killer(run, beside, lambda: ranks.wrote(0), chance) as killer,
    ):
        found = ranks(trained, run, ",".join(beside.addresses), schedule, updates)
    assert found == [expected] * 2, killer.moments
    assert not gone.is_set()


def test_each_update_counts_once_where_workers_go_apart(ranks, monkeypatch, tmp_path):
    consistency = "ssp(2)"  # asynchronous, and waits besides
    monkeypatch.setenv(SECRET, KEY.hex())
    with servers(2, 2) as (addresses, _):
        everything = ranks(counted, "no loss", addresses, consistency)
    gone, chance, run = threading.Event(), random.Random(consistency), f"killed, {consistency}"
    wanted = ServerSpec(1, 2, PATIENT, restarts=2, updates=True, snapshots=tmp_path, every=3)
    with Servers(wanted, gone.set) as beside, Killer(run, beside, lambda: ranks.wrote(0), chance) as killer:
        found = ranks(counted, run, ",".join(beside.addresses), consistency)
    assert any(each in everything for each in found), killer.moments
    assert not gone.is_set()


def test_without_snapshots_the_loss_is_told(job, monkeypatch):
    monkeypatch.setenv(SECRET, KEY.hex())
    wanted, run, ranks = ServerSpec(1, 2, PATIENT, restarts=1, updates=True), "without snapshots", job(2)
    with Servers(wanted, threading.Event().set) as beside:
        killer = Killer(run, beside, lambda: ranks.wrote(0), random.Random(0))
        ranks(dist.is_initialized)  # which has a log from now on
        killer.moments = [(STEPS // 2, 0.0, 0)]
        with killer:
            outcomes = ranks.outcomes(trained, run, ",".join(beside.addresses), SMALL, "servers")
    assert all("server 0 was started anew" in outcome.error for outcome in outcomes), outcomes
    assert all("--snapshot-dir" in outcome.error for outcome in outcomes)
