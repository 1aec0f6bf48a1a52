import pytest
import torch

from foretrain.device.calls import Meta, OperatorCall, contiguous
from foretrain.device.work import Attention, Gemm, HostCopy, MemoryWork
from foretrain.operator_benchmark import MeasuringSession, grid, host, measure
from foretrain.operator_benchmark.calibrating import described, product
from foretrain.operator_benchmark.grid import convolutions
from foretrain.operator_benchmark.replay import Unrepeatable, replay, substitute
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
    assert told == [(0, 5), (2, 5), (4, 5), (5, 5)]


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
    assert host.dispatch(MeasuringSession(CPU, rounds=3)) >= 0
    assert host.usual(CPU)


def call(operator: str, *arguments: object) -> OperatorCall:
    return OperatorCall.from_json(f"aten::{operator}", list(arguments))


@pytest.mark.parametrize(
    ("one", "shape"),
    [
        (call("addmm", "float32[8]", "float32[4, 16]", "float32[16, 8]:1,16", 1, 1), (4, 8)),
        (call("add", "float32[4, 8]", "float32[8]", 1), (4, 8)),
        (call("add", "float32[4, 8]", 2, 1), (4, 8)),
        (call("mul", "float32[8]", "host float64[]", "float32[8]"), (8,)),
        (call("sum", "float32[4, 8]", [0], True, None), (1, 8)),
        (call("_log_softmax_backward_data", "float32[4, 8]", "float32[4, 8]", 1, 6), (4, 8)),
        (call("embedding", "float32[100, 8]", "int64[4]", -1, False, False), (4, 8)),
        (call("embedding_dense_backward", "float32[4, 8]", "int64[4]", 100, -1, False), (100, 8)),
        (call("nll_loss_backward", "float32[]", "float32[4, 8]", "int64[4]", None, 1, -100, "float32[]"), (4, 8)),
        (call("gelu", "float32[4, 8]", "tanh"), (4, 8)),
        (call("masked_fill", "float32[4, 8]", "bool[4, 8]", {"float": "-inf"}), (4, 8)),
        (call("cat", ["float32[4, 8]", "float32[4, 8]"], 0), (8, 8)),
        (call("div", "float32[4, 8, 2]:8,1,0", "host int64[]"), (4, 8, 2)),
        (call("index", "float32[9, 8]", [None, "int64[4]"]), (9, 4)),
        (call("normal_", "float32[4, 8]", 0.0, 1.0, None), (4, 8)),
    ],
)
def test_a_call_is_made_with_such_tensors(one, shape):
    result = replay(one, CPU).run()
    assert isinstance(result, torch.Tensor)
    assert result.shape == shape


def test_convolutions_and_lists_of_tensors():
    for one in convolutions(2, 3, 8, 4, 3, "float32"):
        assert replay(one, CPU).run() is not None
    lists = OperatorCall("aten::_foreach_addcdiv_", ((contiguous((8,), "float32"),) * 2,) * 3 + ((-0.1, -0.1),))
    assert replay(lists, CPU).size == 6 * 32


def test_it_goes_round_in_copies_that_no_cache_holds():
    one = call("relu_", "float32[256]")
    assert replay(one, CPU).size == 1024
    assert replay(one, CPU, beyond=4096).size == 5 * 1024
    assert replay(one, CPU, beyond=4096, most=2048).size == 2 * 1024
    few = replay(one, CPU, beyond=2048)
    assert len({few.run().data_ptr() for _ in range(9)}) == 3


def test_what_a_cpu_has_not_got_is_called_by_its_own_name():
    inputs = [contiguous((2, 4, 16, 8), "float32")] * 3
    efficient = "aten::_scaled_dot_product_efficient_attention"
    forward = OperatorCall(efficient, (*inputs, None, True, 0.0, True, None))
    out, *_ = replay(forward, CPU).run()
    assert out.shape == (2, 4, 16, 8)
    padded, seed = contiguous((2, 4, 32), "float32"), contiguous((), "int64")
    mask = (True, True, True, False)
    backward = OperatorCall(
        f"{efficient}_backward", (inputs[0], *inputs, None, inputs[0], padded, seed, seed, 0.0, mask, True, None)
    )
    assert [gradient.shape for gradient in replay(backward, CPU).run()] == [(2, 4, 16, 8)] * 3
    assert substitute(call("relu", "float32[4]")) == call("relu", "float32[4]")


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (call("no_such_operator", "float32[8]"), "no_such_operator"),
        (OperatorCall("nobody::knows", ()), "knows"),
        (call("relu"), "no such operator"),
        (call("mm", "float32[4, 8]", "float32[4, 8]"), "shapes cannot be multiplied|must match|size"),
        (call("relu", "float33[4]"), "unknown type float33"),
        (OperatorCall("Memcpy HtoD (Pageable -> Device)", (contiguous((4,)),) * 2), "no memory of its own"),
    ],
)
def test_a_call_that_cannot_be_made_says_why(one, reason):
    with pytest.raises(Unrepeatable, match=reason):
        replay(one, CPU)


def test_a_call_larger_than_the_budget_is_refused():
    with pytest.raises(Unrepeatable, match=r"needs 4\.0 GB"):
        replay(OperatorCall("aten::relu", (Meta((10**9,), (1,), "float32"),)), CPU)
