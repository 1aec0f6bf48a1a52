"""Settings of one node that keep the ranks from connecting: all ranks are told the same, at once, and live on."""

import os
import re
import threading

import pytest
import torch.distributed as dist

from foretrain.comm import rendezvous
from foretrain.errors import ConfigError
from foretrain.plugins.torch import attach
from tests.plugins.torch.models import SMALL, STEPS, WARMUP, batch, mlp, objective, pair, sgd

SECRET, OTHER = "5a" * 32, "a5" * 32

WRONG = {
    "rank 0 alone has a secret": ({0: SECRET}, {}, "FORETRAIN_SECRET.* is set on rank 0 and not on rank 1;.*openssl"),
    "rank 1 alone has a secret": ({1: SECRET}, {}, "FORETRAIN_SECRET.* is set on rank 1 and not on rank 0;.*openssl"),
    "two secrets": ({0: SECRET, 1: OTHER}, {}, "FORETRAIN_SECRET.* is another on rank 1 than on rank 0;.*openssl"),
    "short": ({0: SECRET, 1: "5a"}, {}, r"FORETRAIN_SECRET.* has 1 bytes, fewer than 32 \(on rank 1\);.*--secret-file"),
    "no digits": ({0: "hush", 1: SECRET}, {}, r"FORETRAIN_SECRET.* is not hexadecimal \(on rank 0\);.*--secret-file"),
    "no such interface": ({}, {0: "nope0"}, r"interface: 'nope0' is no interface .*\(on rank 0\); this host has: lo"),
    "foreign address": ({}, {0: "192.0.2.1"}, r"interface: '192.0.2.1' cannot be listened on .*GLOO_SOCKET_IFNAME"),
}
"""By rank: FORETRAIN_SECRET; the interface, or the address that it seems to have; what is said."""


def refused(secrets, interfaces):
    rank, threads, groups = dist.get_rank(), threading.active_count(), len(dist.distributed_c10d._world.pg_map)
    interface, own_address = interfaces.get(rank), rendezvous.own_address
    if rank in secrets:
        os.environ[rendezvous.SECRET] = secrets[rank]
    if interface == "192.0.2.1":
        rendezvous.own_address = lambda *_: interface
    model, optimizer = pair()
    try:
        with pytest.raises(ConfigError) as caught:
            attach(model, optimizer, SMALL, interface=interface)
    finally:
        os.environ.pop(rendezvous.SECRET, None)
        rendezvous.own_address = own_address
    assert threading.active_count() == threads
    assert len(dist.distributed_c10d._world.pg_map) == groups
    with attach(model, optimizer, SMALL, warmup=WARMUP) as attached:
        for step in range(STEPS):
            objective(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return str(caught.value), attached.steps


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_on_one_rank_is_told_to_all(ranks, what):
    secrets, interfaces, said = WRONG[what]
    (first, begun), (second, _) = ranks(refused, secrets, interfaces)
    assert first == second
    assert begun == STEPS - WARMUP
    assert re.search(said, first), first
    assert "5a5a" not in first


def with_a_secret():
    os.environ[rendezvous.SECRET] = SECRET
    model = mlp()
    try:
        with attach(model, sgd(model), SMALL) as attached:
            return attached._heartbeat is not None
    finally:
        del os.environ[rendezvous.SECRET]


@pytest.mark.smoke
def test_a_secret_that_all_ranks_have(three):
    assert three(with_a_secret) == [True] * 3
