"""Elastic jobs: a worker is killed at a moment that a seed draws, or only stopped, and the others finish alike.

FORETRAIN_KILLS says how many seeds to try.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import threading
import time

import pytest
import torch.distributed as dist
from torch import nn

from foretrain.comm.coordinator.handshake import SECRET
from foretrain.comm.options import ParameterServer, Timeouts
from foretrain.plugins.torch import attach
from tests.plugins.torch.models import SMALL, WARMUP, mlp, sgd, steps
from tests.plugins.torch.ps.serving import KEY, servers
from tests.waiting import until

STEPS = 24
SIZE = 3
SEEDS = range(int(os.environ.get("FORETRAIN_KILLS", "2")))


def trained(addresses, updates="workers", schedule=SMALL, stopped=None):
    """A hash of all parameters; BatchNorm has buffers, which nobody shares. Rank ``stopped`` stops in a step."""
    os.environ[SECRET] = KEY.hex()
    model = nn.Sequential(mlp(2), nn.BatchNorm1d(32), mlp(2))
    optimizer = sgd(model)
    options = {"transport": ParameterServer(addresses, updates, elastic=True)}
    with attach(model, optimizer, schedule, warmup=WARMUP, timeouts=Timeouts(peer=20), **options) as attached:
        for step in steps(model, optimizer, STEPS):
            print(f"after {step - 1}.", flush=True)
            if step == WARMUP + 3 and dist.get_rank() == stopped:
                os.kill(os.getpid(), signal.SIGSTOP)
        attached.share_buffers()
    dist.destroy_process_group()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.smoke_case("0")
def test_the_others_finish_alike(job, seed):
    updates = ("workers", "servers")[seed % 2]
    chance, ranks = random.Random(seed), job(SIZE)
    victim, when, later = seed % SIZE, chance.randrange(WARMUP + 1, STEPS - 8), chance.random() * 0.02
    over = threading.Event()
    ranks(dist.is_initialized)  # all have begun

    def kill():
        while f"after {when}." not in ranks.wrote(victim):
            if over.wait(0.002):
                return
        time.sleep(later)
        os.kill(ranks.pids[victim], signal.SIGKILL)

    with servers(2, SIZE, elastic=True) as (addresses, made):
        thread = threading.Thread(target=kill)
        thread.start()
        outcomes = ranks.outcomes(trained, addresses, updates)
        over.set()
        thread.join()
        codes = ranks.exits(20, without=set(range(SIZE)) - {victim})
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert not any(outcome.error for outcome in others), [outcome.error for outcome in others]
    assert len({outcome.value for outcome in others}) == 1, (victim, when, later)
    assert not any(service.failure for service in made)
    assert codes[victim] == -signal.SIGKILL


def test_a_worker_that_was_only_stopped_is_told_that_the_others_went_on(job):
    ranks, victim = job(SIZE), SIZE - 1
    ranks(dist.is_initialized)  # all have begun
    with servers(2, SIZE, elastic=True, peer_timeout=10.0) as (addresses, made):

        def wake():
            until(lambda: all(victim in service._job.lost for service in made))
            os.kill(ranks.pids[victim], signal.SIGCONT)

        thread = threading.Thread(target=wake)
        thread.start()
        outcomes = ranks.outcomes(trained, addresses, stopped=victim)
        thread.join()
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert not any(outcome.error for outcome in others), [outcome.error for outcome in others]
    assert len({outcome.value for outcome in others}) == 1
    assert re.search(r"server \d dropped this worker because it was silent for \d+\.\d s", outcomes[victim].error)
    assert not any(service.failure for service in made)
