"""attach(transport="ps") trains as DistributedDataParallel does: every schedule, shards, branches, compression."""

import os

import pytest

torch = pytest.importorskip("torch")

from foretrain.comm.options import ParameterServer  # noqa: E402
from foretrain.plugins.torch.rendezvous import SECRET  # noqa: E402
from tests.plugins.torch.models import assert_same, branching, plain  # noqa: E402
from tests.plugins.torch.ps.serving import KEY, servers  # noqa: E402
from tests.plugins.torch.test_attach_schedules import ODD, ROUNDING, SCHEDULES  # noqa: E402


def keyed(side, recipe, *args):
    """``recipe``, with the job's secret in the environment of the rank."""
    os.environ[SECRET] = KEY.hex()
    try:
        yield from recipe(side, *args)
    finally:
        del os.environ[SECRET]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.smoke_case("1")
def test_trains_the_same(ranks, shards):
    with servers(shards, 2) as (addresses, made):
        assert_same(ranks, keyed, plain, transport=ParameterServer(addresses))
        assert not any(service.rejected for service in made)
        assert not any(service.failure for service in made)


@pytest.mark.parametrize("schedule", SCHEDULES + ODD)
def test_every_schedule(ranks, schedule):
    with servers(2, 2) as (addresses, _):
        assert_same(ranks, keyed, plain, transport=ParameterServer(addresses), schedule=schedule)


@pytest.mark.parametrize("schedule", ["fifo", "p3(slice=1KiB)", "prophet(partition=1030B, credit=3001B)"])
def test_three_workers(three, schedule):
    with servers(2, 3) as (addresses, _):
        assert_same(three, keyed, plain, transport=ParameterServer(addresses), schedule=schedule, tolerance=ROUNDING)


@pytest.mark.parametrize("how", ["never the last", "another each step on each rank", "nobody's until late"])
def test_branches(ranks, how):
    with servers(2, 2) as (addresses, _):
        assert_same(ranks, keyed, branching, how, True, transport=ParameterServer(addresses))


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compression(ranks, compression):
    with servers(2, 2) as (addresses, _):
        assert_same(ranks, keyed, plain, transport=ParameterServer(addresses), compression=compression, tolerance=0.05)


@pytest.mark.parametrize("schedule", ["bytescheduler", "prophet"])
def test_knobs_left_open_are_set_by_simulation(ranks, schedule):
    with servers(1, 2) as (addresses, _):
        assert_same(ranks, keyed, plain, transport=ParameterServer(addresses), schedule=schedule)


def test_one_rank(alone):
    with servers(1, 1) as (addresses, _):
        assert_same(alone, keyed, plain, transport=ParameterServer(addresses))
