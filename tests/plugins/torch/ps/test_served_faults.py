"""When a worker or a server is lost, every worker ends soon and names it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from foretrain.comm.coordinator.handshake import SECRET
from foretrain.comm.options import ParameterServer, Timeouts
from tests.plugins.torch.models import steps, train
from tests.plugins.torch.ps.serving import KEY, servers
from tests.plugins.torch.ranks import ROOT
from tests.plugins.torch.test_attach_faults import (
    FAR,
    MIDDLE,
    PATIENCE,
    SIZE,
    TIMEOUT,
    allowed,
    assert_a_pause_loses_nobody,
    attached_mlp,
    killed,
    last_line,
    raises_in_backward,
    stopped,
)
from tests.processes import started

SERVER = [sys.executable, "-m", "foretrain", "server", "--address", "127.0.0.1:0"]


def suffering(fault, victim, addresses):
    """Trains over servers; before step ``MIDDLE`` ``fault`` happens to rank ``victim``."""
    os.environ[SECRET] = KEY.hex()
    options = {"timeouts": Timeouts(peer=allowed(fault)), "transport": ParameterServer(addresses)}
    model, optimizer, _ = attached_mlp(**options)
    for step in steps(model, optimizer, FAR):
        if fault is not None and step == MIDDLE and dist.get_rank() == victim:
            fault(model)
        if step > MIDDLE:
            print("in the middle", flush=True)


@pytest.mark.parametrize("fault", [killed, stopped, raises_in_backward], ids=lambda fault: fault.__name__)
@pytest.mark.smoke_case("killed")
def test_every_worker_ends_and_says_whom_it_lost(job, fault):
    victim, ranks = 1, job(SIZE)
    without = {victim} if fault is stopped else set()
    with servers(2, SIZE, peer_timeout=allowed(fault)) as (addresses, made):
        outcomes = ranks.outcomes(
            suffering, fault, victim, addresses, timeout=3 * PATIENCE, grace=PATIENCE, without=without
        )
        ranks.exits(PATIENCE, without)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            line = last_line(outcome.error)
            assert re.match(r"foretrain\.errors\.PeerLost", line) or "PeerLost" in outcome.error, outcome.error
            assert re.search(rf"worker {victim}\b", outcome.error), outcome.error
    assert any(service.failure is not None for service in made)


def test_every_worker_ends_when_a_server_is_gone(job):
    command = [*SERVER, "--workers", str(SIZE)]
    environment = {**os.environ, SECRET: KEY.hex(), "PYTHONPATH": str(ROOT)}
    ranks = job(SIZE)
    with started(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        address = server.stdout.readline().split()[-1]

        def kill():
            deadline = time.monotonic() + 3 * PATIENCE
            while time.monotonic() < deadline:
                if any("in the middle" in ranks.wrote(rank) for rank in range(len(ranks.pids))):
                    break
                time.sleep(0.05)
            server.send_signal(signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        outcomes = ranks.outcomes(suffering, None, 0, address, timeout=3 * PATIENCE, grace=PATIENCE)
        thread.join()
        ranks.exits(PATIENCE, set())
    for outcome in outcomes:
        assert re.search(rf"PeerLost: server 0 at {re.escape(address)} has been silent", outcome.error), outcome.error


def test_nobody_is_lost_when_the_machines_are_paused(job):
    command = [*SERVER, "--timeout", f"{TIMEOUT}s"]
    secret = {SECRET: KEY.hex()}
    environment = os.environ | secret | {"PYTHONPATH": str(ROOT)}
    with started([*command, "--workers", str(SIZE)], stdout=subprocess.PIPE, text=True, env=environment) as server:
        options = {"transport": ParameterServer(server.stdout.readline().split()[-1])}
        assert_a_pause_loses_nobody(job(SIZE), MIDDLE, options, secret, [server.pid])
        server.terminate()


def secretless(addresses, key):
    if key:
        os.environ[SECRET] = key
    model, optimizer, attached = attached_mlp(transport=ParameterServer(addresses))
    with attached:
        train(model, optimizer, MIDDLE)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("", r"ConfigError: FORETRAIN_SECRET is not set, and servers refuse workers without it"),
        ("ab" * 32, r"PeerLost: .*server 0 at .* has another secret"),
    ],
)
def test_nobody_without_the_secret(job, key, said):
    ranks = job(2)
    with servers(1, 2) as (addresses, _):
        for outcome in ranks.outcomes(secretless, addresses, key, timeout=3 * PATIENCE, grace=PATIENCE):
            assert re.search(said, outcome.error), outcome.error
