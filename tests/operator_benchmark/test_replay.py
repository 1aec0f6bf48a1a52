import pytest
import torch

from foretrain.device.calls import Meta, OperatorCall, contiguous
from foretrain.operator_benchmark.grid import convolutions
from foretrain.operator_benchmark.replay import Unrepeatable, replay, substitute

CPU = torch.device("cpu")


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
        f"{efficient}_backward",
        (inputs[0], *inputs, None, inputs[0], padded, seed, seed, 0.0, mask, True, None),
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
