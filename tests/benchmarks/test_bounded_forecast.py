"""The forecast of the lab's steps is what wires and computation take, where nothing else happens."""

import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from foretrain.comm.options import AllReduce, BoundedLoss
from foretrain.network.packet.port_config import UNLIMITED
from tests.examples.torchrun import ROOT

RATE, SIZE = 1.25e8, 2_000_000
TRANSPORTS = {"tcp": (AllReduce(), 8948 / 9014), "bounded": (BoundedLoss(0.01), 8192 / 8274)}
"""With the share of data in a full packet, as the lab's queues count it."""


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    # Not by its name, which a package of tests may have in the same process.
    described = spec_from_file_location("benchmark_of_bounded", ROOT / "benchmarks" / "bounded.py")
    made = module_from_spec(described)
    monkeypatch.setitem(sys.modules, "benchmark_of_bounded", made)
    described.loader.exec_module(made)
    return made


@pytest.fixture
def bounded(benchmark):
    import bounded_forecast

    return benchmark.Place, bounded_forecast


@pytest.mark.parametrize("hosts", [2, 3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_layer_takes_what_the_wire_takes(bounded, hosts, transport):
    (place_of, bench), (how, share) = bounded, TRANSPORTS[transport]

    found = bench.forecast(place_of("lossy", hosts, "1Gbps", compute=1e-6), [SIZE], "fifo", how)

    assert found == pytest.approx(2 * (hosts - 1) / hosts * SIZE / share / RATE, rel=0.04)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sums_that_are_hidden_cost_nothing_but_the_computation(bounded, transport):
    place_of, bench = bounded
    added = bench.Overheads(sleep=1e-3, call=1e-4, ready=1e-9, copy=2e-9)

    found = bench.forecast(
        place_of("lossy", 2, "1Gbps", compute=0.3), [8] * 12, "fifo", TRANSPORTS[transport][0], added
    )

    assert found == pytest.approx(0.3 + 24 * 1e-3 + 12 * 1e-4 + 12 * 8 * 3e-9, rel=0.005)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bursts_of_others_leave_what_is_not_theirs_of_a_link(bounded, transport):
    (place_of, bench), (how, share) = bounded, TRANSPORTS[transport]
    place = place_of("lossy", 2, "1Gbps", compute=1e-6, background=0.4)

    found = bench.forecast(place, [5 * SIZE], "fifo", how)

    assert found == pytest.approx(5 * SIZE / share / RATE / 0.6, rel=0.06)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("bands", [1, 3])
def test_the_switch_drops_selectively_what_the_labs_does(bounded, transport, bands):
    (place_of, bench), (how, _) = bounded, TRANSPORTS[transport]

    found = bench.switch_queues(place_of("lossy", 2, "300Mbps", bands=bands), how)

    marked = transport == "bounded" and bands > 1
    assert (found.limit, found.spare) == (2**19, 16 * 9014 if marked else UNLIMITED)


@pytest.mark.parametrize("rate", [0.1 * RATE, 0.3 * RATE, 10 * RATE])
def test_an_operation_begins_with_what_is_under_way_until_packets_are_marked(bounded, rate):
    carried = bounded[1]._simulated(BoundedLoss(0.01), 0.02, rate)
    packet = carried.payload + carried.header
    assert carried.first_window * packet == pytest.approx(min(1e-3 * rate + 2 * packet, 16 * packet), abs=packet)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_losses_take_time_and_are_the_same_every_time(bounded, transport):
    (place_of, bench), (how, _) = bounded, TRANSPORTS[transport]
    clean, lossy = (place_of("lossy", 2, "1Gbps", loss) for loss in (0.0, 0.02))

    first, again, without = (bench.forecast(p, [400_000] * 4, "bytescheduler", how) for p in (lossy, lossy, clean))

    assert first == again > without


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_overheads_are_what_the_wire_does_not_explain(bounded, transport):
    (place_of, bench), (how, _) = bounded, TRANSPORTS[transport]
    place = place_of("alone", 2, "1Gbps")
    measured = {
        str(size): {
            "operation": bench.alone(place, size, how) + 1e-4 + 2e-9 * size,
            "ready": 1e-9 * size + 1e-4,
            "copy": 0.0,
        }
        for size in (4096, 1 << 20)
    }

    found = bench.overheads(place, how, measured, 5e-5)

    assert found.of(1 << 20) == pytest.approx(1e12 * (1e-4 + 2e-9 * (1 << 20)), rel=1e-3)
    assert (found.sleep, found.ready, found.copy) == (5e-5, pytest.approx(1e-9), 0.0)
    assert found.call == pytest.approx(1e-4, rel=0.1)
