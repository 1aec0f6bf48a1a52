import torch

from foretrain.device.calls import OperatorCall, contiguous
from foretrain.device.work import Attention, Gemm, HostCopy, MemoryWork
from foretrain.operator_benchmark import MeasuringSession, grid, host, measure
from foretrain.operator_benchmark.calibrating import described, product
from foretrain.operator_benchmark.session import settled

CPU = torch.device("cpu")


def test_every_call_is_measured_in_its_order_and_what_cannot_be_is_told():
    calls = [OperatorCall("aten::relu", (contiguous((size,), "float32"),)) for size in (16, 1 << 16, 1 << 20)]
    wrong = OperatorCall("aten::mm", (calls[0].arguments[0],) * 2)
    found = measure(CPU, [calls[0], wrong, *calls[1:]], rounds=5)
    assert [one.call for one in found.calls] == calls
    assert min(one.time for one in found.calls) > 0
    assert [call for call, _ in found.failed] == [wrong]


def test_a_small_budget_measures_one_after_the_other():
    told = []
    calls = [OperatorCall("aten::relu", (contiguous((1024 + size,), "float32"),)) for size in range(5)]
    session = MeasuringSession(CPU, rounds=2, budget=10_000, progress=lambda done, every: told.append((done, every)))
    assert len(session.calls(calls).calls) == 5
    assert told == [(2, 5), (4, 5), (5, 5)]


def test_shared_cores_make_all_operators_together_take_what_they_took_on_average():
    taken = [[1.0, 1.0, 4.0], [3.0, 3.0, 6.0]]
    scale, alone = settled(taken, shared=False)
    assert (scale, [one.seconds for one in alone]) == (1.0, [1.0, 3.0])
    scale, shared = settled(taken, shared=True)
    assert (scale, [one.seconds for one in shared]) == (1.5, [1.5, 4.5])
    assert sum(one.seconds for one in shared) == 2.0 + 4.0
    assert settled([], shared=True) == (1.0, [])


def test_the_grid_knows_what_each_operator_does():
    for device in (CPU, torch.device("cuda")):
        for quick in (True, False):
            found = grid.probes(device, quick)
            assert len({probe.work for probe in found}) == len(found)
            kinds = {type(probe.work) for probe in found}
            assert kinds == {Gemm, Attention, MemoryWork} | ({HostCopy} if device.type == "cuda" else set())


def test_probes_run():
    for probe in grid.probes(CPU, quick=True):
        if probe.size < 1 << 20:
            assert probe.make()() is not None


def test_a_description_follows_from_measurements():
    session = MeasuringSession(CPU, rounds=2)
    measured = session.probes([probe for probe in grid.probes(CPU, quick=True) if probe.size < 1 << 20])
    calls = session.calls(grid.calls(CPU, quick=True)).calls
    device = described(CPU, measured, calls, launch=7e-6)
    assert device.serial
    assert device.launch == 7_000_000
    assert device.product == product(CPU)
    rates = [found.work.flops / found.time * 1e12 for found in measured if isinstance(found.work, Gemm)]
    assert abs(device.fp32.peak / max(rates) - 1) < 1e-9
    assert 0 < device.fp32.gemm <= 1


def test_a_step_is_recorded_without_its_views_and_with_all_arguments():
    inputs, weight, bias = torch.ones(4, 8), torch.ones(16, 8), torch.ones(16)
    with host.Recorder() as recorder:
        torch.nn.functional.linear(inputs, weight, bias).reshape(16, 4).sum()
    assert [call.operator for call in recorder.calls] == ["aten::addmm", "aten::sum"]
    addmm = recorder.calls[0]
    assert addmm.arguments[3:] == (1, 1)
    assert measure(CPU, [addmm], rounds=2).failed == ()


def test_the_host_takes_some_time_of_each_operator():
    assert 0 <= host.dispatch(MeasuringSession(CPU, rounds=3)) < 1e-2
    assert host.usual(CPU)
