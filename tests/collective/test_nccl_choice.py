"""What NCCL would choose: closed forms, bounds and monotony of the time, and the order of its protocols."""

import csv
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.collective.nccl import GPUS, bus_bandwidth, bus_factor, choose
from foretrain.errors import ConfigError
from foretrain.units import MICROSECOND, SECOND

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
NETWORK = {"inter_rate": 25e9}
names = st.sampled_from(sorted(GPUS))
operations = st.sampled_from(OPERATIONS)
sizes = st.integers(1, 2**35)


@pytest.mark.parametrize(("operation", "factor"), [*zip(OPERATIONS, (1.75, 0.875, 0.875, 1.0, 0.875), strict=True)])
def test_bus_bandwidth_is_what_nccl_tests_print(operation, factor):
    assert bus_factor(operation, 8) == factor
    assert bus_bandwidth(operation, 2**30, 8, SECOND) == factor * 2**30


@given(operations, names, sizes, sizes, st.integers(2, 128))
def test_more_bytes_never_take_less_time(operation, gpu, one, other, ranks):
    small, large = (choose(operation, size, ranks, gpu, **NETWORK) for size in sorted((one, other)))
    assert small.time <= large.time
    # Steps of 4 % cross every change of algorithm and protocol.
    times = [choose(operation, int(256 * 1.04**i), min(ranks, 8), gpu).time for i in range(420)]
    assert times == sorted(times)


@given(operations, names, sizes, st.integers(2, 64))
def test_no_link_is_faster_than_its_datasheet(operation, gpu, size, ranks):
    """A rank must at least receive what it lacks; a reduction in the switch sends each byte once, not twice."""
    choice = choose(operation, size, ranks, gpu, **NETWORK)
    lacking = min(bus_factor(operation, ranks), 1.0) * (ranks - 1) / ranks * size
    assert 0 < choice.efficiency <= 1
    assert choice.time > lacking / GPUS[gpu].link * SECOND


@given(names, sizes, operations, st.integers(2, 8), st.floats(1e9, 25e9))
def test_a_server_cannot_receive_faster_than_its_nics(gpu, size, operation, servers, rate):
    choice = choose(operation, size, 4 * servers, gpu, ranks_per_server=4, inter_rate=rate)
    outside = {"broadcast": 1.0, "all_to_all": 4 * (servers - 1) / servers}
    assert choice.time > outside.get(operation, (servers - 1) / servers) * size / (4 * rate) * SECOND


@given(operations, names, sizes, st.integers(1, 7))
def test_more_servers_are_never_faster(operation, gpu, size, doubling):
    few, many = (
        choose(operation, size, 8 * servers, gpu, ranks_per_server=8, inter_rate=12.5e9)
        for servers in (2 ** (doubling - 1), 2**doubling)
    )
    assert few.time <= many.time


@given(sizes, st.integers(2, 64), st.floats(1e9, 1e11), st.floats(1e9, 1e11))
def test_faster_networks_are_never_slower(size, servers, one, other):
    slow, fast = (choose("all_reduce", size, 8 * servers, inter_rate=rate) for rate in sorted((one, other)))
    assert fast.time <= slow.time


@given(st.sampled_from(("all_reduce", "reduce_scatter", "all_gather")), names, sizes, st.integers(2, 8))
def test_a_ring_in_lock_step_takes_the_time(operation, gpu, size, ranks):
    """What a simulation of a ring on links of that efficiency does, as a closed form."""
    ring = choose(operation, size, ranks, gpu, algorithm="ring")
    block = size / ranks
    step = ring.step_latency + block / (ring.link * ring.efficiency) * SECOND
    assert ring.steps == (2 if operation == "all_reduce" else 1) * (ranks - 1)
    assert ring.launch + ring.steps * step == pytest.approx(ring.time, rel=1e-12)


def test_so_does_a_reduction_in_the_switch():
    nvls = choose("all_reduce", 2**28, 8, "H200")
    assert nvls.algorithm == "nvls"
    assert nvls.latency + 2**28 / (nvls.link * nvls.efficiency) * SECOND == pytest.approx(nvls.time, rel=1e-12)


def test_protocols_get_heavier_with_the_size():
    protocols = [choose("all_reduce", 2**power, 8, "A100").protocol for power in range(9, 31)]
    assert list(dict.fromkeys(protocols)) == ["LL", "LL128", "Simple"]


def test_channels_grow_with_the_size():
    channels = [choose("all_gather", 2**power, 4, "B200", protocol="LL").channels for power in range(9, 31)]
    assert channels == sorted(channels)
    assert (channels[0], channels[-1]) == (1, 32)


@pytest.mark.parametrize(("gpu", "least"), [("H100", 5), ("H200", 5), ("B200", 6)])
def test_the_switch_reduces_large_data_of_enough_ranks(gpu, least):
    """As measured in the Machine Learning Engineering Open Book: from 5 ranks on H200, from 6 on B200."""
    used = [choose("all_reduce", 2**33, ranks, gpu).algorithm for ranks in range(2, 9)]
    assert used == ["ring"] * (least - 2) + ["nvls"] * (9 - least)
    assert choose("all_reduce", 2**10, 8, gpu).algorithm == "ring"
    assert choose("all_gather", 2**33, 8, gpu).algorithm == "ring"


def test_an_algorithm_or_protocol_that_a_gpu_lacks_is_refused():
    assert choose("all_reduce", 2**33, 8, "A100").algorithm == "ring"
    with pytest.raises(ConfigError, match="nvls/None"):
        choose("all_reduce", 2**33, 8, "A100", algorithm="nvls")
    with pytest.raises(ConfigError, match="leave algorithm and protocol out"):
        choose("all_gather", 2**20, 2, "L40S", protocol="LL128")


def test_trees_for_little_data_on_many_servers():
    assert choose("all_reduce", 2**16, 1024, **NETWORK).algorithm == "tree"
    assert choose("all_reduce", 2**16, 1024, "A100", **NETWORK).algorithm == "tree"
    assert choose("all_gather", 2**16, 1024, **NETWORK).algorithm == "ring"


def test_the_network_is_the_narrowest_link():
    choice = choose("all_reduce", 2**33, 32, "A100", **NETWORK)
    assert choice.link == NETWORK["inter_rate"]
    # Eight NICs of 25 GB/s in each server.
    assert 0.9 * 200e9 < choice.bandwidth < 200e9


def test_says_what_is_fitted():
    assert choose("all_reduce", 2**20, 8, "A100").source.startswith("A100")
    assert choose("all_reduce", 2**20, 8, "B300").source.startswith("extrapolated to B300")
    assert choose("all_reduce", 2**20, 8, "V100").source.startswith("extrapolated to V100 (not fitted")
    assert choose("all_reduce", 2**20, 16, "A100", **NETWORK).source.startswith("extrapolated to 2 servers")


def test_half_the_links_half_the_rate():
    half, whole = (choose("all_gather", 2**34, 8, gpu) for gpu in ("H800", "H100"))
    assert half.bandwidth / whole.bandwidth == pytest.approx(200 / 450, rel=0.01)


def test_overhead_and_network_latency_add_up():
    plain = choose("all_gather", 2**20, 16, ranks_per_server=8, protocol="LL", **NETWORK)
    late = choose(
        "all_gather", 2**20, 16, ranks_per_server=8, protocol="LL", overhead=7, network_latency=15 * 10**6, **NETWORK
    )
    assert late.time - plain.time == pytest.approx(15 * MICROSECOND + 7, abs=late.steps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduce", 2**20, 8, "H10"), "gpu: 'H10' is unknown; did you mean"),
        (("allreduce", 2**20, 8, "H100"), "operation: 'allreduce' is unknown; did you mean 'all_reduce'"),
        (("all_reduce", 0, 8, "H100"), "size: 0 is too small"),
        (("all_reduce", 2**20, 1, "H100"), "ranks: 1 is too small"),
        (("all_reduce", 2**20, 16, "H100"), "inter_rate: None is not a rate; give the bytes/s that each GPU"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        choose(*arguments)


DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "collectives.csv"


def rows():
    lines = [line for line in DATA.read_text().splitlines() if not line.startswith("#")]
    return [row for row in csv.DictReader(lines) if row["inter_rate"] == "0" and "torch" not in row["library"]]


def error(row):
    """Relative; where the measurement had NVLS switched off the forecast has as well."""
    ring = "ring" if row["algorithm"] == "ring" else None
    ranks = int(row["ranks"])
    choice = choose(row["operation"], int(row["size"]), ranks, row["gpu"], algorithm=ring)
    return abs(choice.time / (float(row["seconds"]) * SECOND) - 1)


@pytest.mark.parametrize("gpu", ["A100", "H100", "H200", "B200", "GB200"])
@pytest.mark.parametrize(("large", "limit"), [(True, 0.05), (False, 0.08)])
def test_median_error(gpu, large, limit):
    errors = [error(row) for row in rows() if row["gpu"] == gpu and (int(row["size"]) >= 2**20) is large]
    assert len(errors) >= 80
    assert median(errors) < limit


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_operation_and_count(operation, ranks):
    errors = [error(row) for row in rows() if row["operation"] == operation and int(row["ranks"]) == ranks]
    assert median(errors) < 0.08


def test_nvls_on_and_off():
    """8 and 16 GiB, 4 to 8 ranks of H200 and B200: what the rates of the curves come down to."""
    errors = [error(row) for row in rows() if row["source"] in ("coll-h200", "coll-b200")]
    assert len(errors) == 21
    assert max(errors) < 0.08


def test_leaves_ll_where_nccl_does():
    """On A100 two ranks need 38 µs for 2 MiB, nearly twice as long as for 1 MiB; eight ranks do not."""
    two, eight = ([choose("all_gather", size, ranks, "A100") for size in (2**20, 2**21)] for ranks in (2, 8))
    assert [choice.protocol for choice in two] == ["LL", "Simple"]
    assert [choice.protocol for choice in eight] == ["LL", "LL"]
    assert two[1].time > 1.8 * two[0].time
    assert eight[1].time < 1.4 * eight[0].time
