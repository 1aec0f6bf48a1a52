"""attach(transport="ps") trains as DistributedDataParallel does: schedules, shards, branches, compression."""

import pytest

from foretrain.comm.options import ParameterServer
from tests.plugins.torch.models import EACH, assert_same, branching, plain
from tests.plugins.torch.ps.serving import keyed, servers
from tests.plugins.torch.test_attach_schedules import KINDS, ODD, ROUNDING, retuned


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.smoke_case("1")
def test_it_trains_the_same_over_any_number_of_shards(ranks, shards):
    with servers(shards, 2) as (addresses, made):
        assert_same(ranks, keyed, plain, transport=ParameterServer(addresses), schedule="bytescheduler")
        assert not any(service.rejected for service in made)
        assert not any(service.failure for service in made)


@pytest.mark.parametrize("schedule", [*KINDS[::3], ODD])
def test_every_kind_of_schedule(ranks, schedule):
    with servers(2, 2) as (addresses, _):
        assert_same(ranks, keyed, branching, EACH, True, transport=ParameterServer(addresses), schedule=schedule)


def test_three_workers(three):
    with servers(2, 3) as (addresses, _):
        schedule = "prophet(partition=1030B, credit=3001B)"
        assert_same(three, keyed, plain, transport=ParameterServer(addresses), schedule=schedule, tolerance=ROUNDING)


def test_parts_without_a_gradient_on_any_worker(ranks):
    with servers(2, 2) as (addresses, _):
        assert_same(ranks, keyed, branching, "nobody's until late", True, transport=ParameterServer(addresses))


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compression(ranks, compression):
    with servers(2, 2) as (addresses, _):
        assert_same(ranks, keyed, plain, transport=ParameterServer(addresses), compression=compression, tolerance=0.05)


def test_one_rank(alone):
    with servers(1, 1) as (addresses, _):
        assert_same(alone, keyed, plain, transport=ParameterServer(addresses))


def test_a_knob_changes_what_is_pushed(ranks):
    with servers(1, 2) as (addresses, _):
        options = {"transport": ParameterServer(addresses), "schedule": "p3(slice=1KiB)"}
        for seen in assert_same(ranks, keyed, retuned, (0, 1), "slice", "2KiB", **options):
            assert set(seen.sizes[0]) == {128, 1024, 2048}
            assert seen.schedules == ("p3(slice=2KiB)",)
