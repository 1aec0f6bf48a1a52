"""What torch.compile's kernels cost: one for each run of fusible operators, by the bytes that cross its boundary."""

import time

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from foretrain.live.device.compiler import boundary
from tests.live.command import on_gpus


def test_a_fused_kernel_reads_its_inputs_and_writes_what_is_used_outside() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def chain(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inside = (x * y + 1).t()
        return inside.relu(), torch.mm(inside.sigmoid(), w)

    x, y, w = torch.randn(100, 200), torch.randn(200), torch.randn(100, 3)
    nodes = make_fx(chain, tracing_mode="fake")(x, y, w).graph.nodes
    run = [node for node in nodes if node.op == "call_function" and "mm" not in node.name]
    assert boundary(run) == 4 * (100 * 200 + 200 + 2 * 200 * 100)


@on_gpus()
def test_compiled_chains_are_one_kernel_and_products_their_own() -> None:
    def chain(x):
        for _ in range(10):
            x = (x * 2).sin()
        return x

    def products(x, w):
        for _ in range(20):
            x = (x @ w).relu() + 1
        return x

    def taken(call, *inputs):
        call(*inputs)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        host = time.perf_counter()
        call(*inputs)
        host = time.perf_counter() - host
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end), host

    x = torch.empty(1 << 26, device="cuda")
    assert 18 < taken(chain, x)[0] / taken(torch.compile(chain), x)[0] < 22
    norm = torch.compile(nn.LayerNorm(1 << 12, device="cuda"))
    assert 0.99 < taken(norm, x.view(-1, 1 << 12))[0] / taken(torch.clone, x)[0] < 1.05
    a = torch.empty(64, 64, device="cuda")
    eager, compiled = taken(products, a, a)[1], taken(torch.compile(products), a, a)[1]
    replayed = taken(torch.compile(products, mode="reduce-overhead"), a, a)[1]
    assert 1.4 < eager / compiled < 1.6
    assert replayed < compiled / 10
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))).cuda()
    for mode in (None, "max-autotune"):
        model = torch.compile(layers, mode=mode)
        layers.zero_grad()
        model(torch.randn(64, 256, device="cuda")).square().mean().backward()
        assert all(p.grad.shape == p.shape for p in layers.parameters())


@on_gpus()
def test_updates_in_place_are_written_once_and_copied_nowhere() -> None:
    def taken(call, *inputs):
        call(*inputs)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call(*inputs)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def update(parameter, gradient, count):
        count.add_(1)
        parameter.mul_(0.9).add_(gradient * gradient, alpha=-0.1)

    @torch.library.custom_op("mylib::fill_", mutates_args=["out"])
    def fill_(out: torch.Tensor, x: torch.Tensor) -> None:
        torch.add(x, 1, out=out)

    def filled(x):
        out = torch.empty_like(x)
        fill_(out, x)
        return out

    a, b = torch.empty(2, 1 << 26, device="cuda")
    count = torch.zeros((), device="cuda")
    assert 0.99 < taken(torch.compile(update), a, b, count) / taken(torch.add, a, b) < 1.05
    assert count.item() == 2
    assert taken(torch.compile(filled), a) == taken(filled, a)
    ones = torch.ones(8, device="cuda")
    assert torch.compile(filled)(ones).tolist() == [2] * 8
    fill_kept = torch.compile(lambda x: (fill_(x, x), x * 2)[1])
    assert fill_kept(ones).tolist() == [4] * 8
    assert ones.tolist() == [2] * 8


@on_gpus()
def test_compiled_graphs_move_no_more_than_they_must() -> None:
    x, y = torch.empty(2, 1 << 14, 1 << 12, device="cuda")
    rows = torch.arange(8, device="cuda")

    def passes(call, *inputs):
        """Return how often as much was moved as ``x`` has, and memory that it took, in sizes of ``x``."""
        compiled = torch.compile(call)
        compiled(*inputs)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        begin.record()
        compiled(*inputs)
        end.record()
        torch.cuda.synchronize()
        most = (torch.cuda.max_memory_allocated() - before) / x.nbytes
        return round(4 * begin.elapsed_time(end) / once) / 4, round(4 * most) / 4

    once = x.nbytes / 3.35e12 / 0.8 * 1e3  # ms

    def assigned(call):
        return lambda *given: call(*given) is None

    assert passes(assigned(lambda x, y: x.copy_(y)), x, y) == (2, 0)
    assert passes(assigned(lambda x, y: x.copy_(y * 2 + 1)), x, y) == (2, 0)
    assert passes(lambda x: x.add_(1), x) == (2, 0)  # which returns it, too
    assert passes(assigned(lambda x, y: x[:, 4:8].copy_(y * 2)), x, y[:, :4].contiguous()) == (0, 0)
    assert passes(assigned(lambda x, y: x.index_put_((y,), x.new_ones(()))), x, rows) == (0, 0)
    assert passes(lambda x, rows: x[rows] * 2, x, rows) == (0, 0)
    assert passes(lambda x: x.flip(0) * 2, x) == (2, 1)
    assert [one.shape for one in torch.compile(torch.var_mean)(x)] == [(), ()]
    table = nn.Embedding(1 << 14, 1 << 12, device="cuda")
    looked_up = torch.compile(lambda rows: (table(rows) * 2).sum())
    looked_up(rows).backward()
    assert table.weight.grad.shape == table.weight.shape


@on_gpus()
def test_a_value_that_is_used_inside_a_fused_kernel_only_takes_no_memory() -> None:
    def loss(logits, targets):
        return nn.functional.cross_entropy(logits.float(), targets)

    def peak(call):
        logits = torch.empty(8192, 128256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(8192, dtype=torch.long, device="cuda")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        value = call(logits, targets)
        kept = torch.cuda.memory_allocated() - before
        value.backward()
        return kept / logits.nbytes, (torch.cuda.max_memory_allocated() - before) / logits.nbytes

    # Eager keeps the logits' logarithms in float32, and in the end has two more of them and the gradient.
    kept, most = peak(loss)
    assert (round(kept, 2), round(most, 2)) == (2, 6)
    kept, most = peak(torch.compile(loss))
    assert kept < 0.01
    assert 1 <= most < 1.01


@on_gpus()
def test_a_kernel_whose_operators_are_skipped_leaves_what_they_would() -> None:
    from foretrain.live.device import compiler

    def layer(x, residual, matrix, weight, bias, scale, picked):
        y = nn.functional.gelu((x.t() + bias).float(), approximate="tanh").to(torch.bfloat16)
        y = nn.functional.dropout(y, 0.1) + residual.t()
        means, halves = y.float().mean(-1), y.chunk(2, -1)
        y = nn.functional.layer_norm(y, y.shape[-1:], weight, bias) * scale
        return y @ matrix, means, halves[0].t(), picked * 2 + 1, (scale * 3).exp(), (y > 0).sum(), y.relu() > 0

    def step(call):
        torch._dynamo.reset()
        full = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
        x, residual = torch.empty(2048, 4096, **full), torch.empty(2048, 4096, **full)
        matrix, weight, bias = (torch.empty(*shape, **full) for shape in ((2048, 2048), (2048,), (2048,)))
        given = x, residual, matrix, weight, bias, torch.tensor(2.0, device="cuda"), torch.arange(5, device="cuda")
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        call(*given)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        begin.record()
        made = call(*given)
        kept = torch.cuda.memory_allocated() - before
        (made[0].sum() + made[1].sum() + made[2].float().sum()).backward()
        end.record()
        torch.cuda.synchronize()
        tensors = [*made, *(one.grad for one in (x, residual, weight, bias))]
        shapes = [(one.shape, one.stride(), one.dtype, one.untyped_storage().nbytes()) for one in tensors]
        values = made[3].tolist(), made[4].item(), made[5].item()
        return shapes, values, kept, torch.cuda.max_memory_allocated() - before, begin.elapsed_time(end)

    skipped, skip = [], compiler._skip
    compiler._skip = lambda run: skipped.append(len(run)) or skip(run)
    quick = step(torch.compile(layer))
    assert len(skipped) == 3
    assert min(skipped) > 10
    compiler._only_shapes_matter = lambda run: False
    assert quick == step(torch.compile(layer))
    assert quick[1][0] == [1, 3, 5, 7, 9]
    assert abs(quick[1][1] - 403.4) < 0.1


@on_gpus()
def test_graphs_of_sizes_that_are_unknown_are_fused_as_others_are() -> None:
    def halves(x):
        blocks = x.float().unflatten(-1, (-1, 16))
        y = (blocks / blocks.abs().amax(-1, keepdim=True)).flatten(-2)
        return torch.cat((y[..., ::2] + y[..., 1::2], y[..., ::2]), -1).to(x.dtype)

    def times(call):
        found = []
        for columns in (4096, 6144, 8192):
            x = torch.empty(2048, columns, device="cuda", dtype=torch.bfloat16)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call(x)
            torch.cuda.synchronize()
            begin.record()
            call(x)
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end))
        return found

    assert times(torch.compile(halves, dynamic=True)) == times(torch.compile(halves, dynamic=False))


@on_gpus()
def test_a_block_mask_costs_what_it_does_traced_and_is_as_good() -> None:
    import pytest
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = 8192
    documents = torch.arange(length, device="cuda") // 3000

    def within(b, h, i, j):
        return (i >= j) & (documents[i] == documents[j])

    def taken(create):
        create(within, 1, None, length, length, device="cuda")
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        begin.record()
        mask = create(within, 1, None, length, length, device="cuda")
        end.record()
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated() - before
        kept = torch.cuda.memory_allocated() - before
        q = torch.empty(1, 8, length, 64, device="cuda")
        assert flex_attention(q, q, q, block_mask=mask).shape == q.shape
        return begin.elapsed_time(end), most / length**2, kept, [one.shape for one in mask.as_tuple()[2:10]]

    ours = taken(torch.compile(create_block_mask))
    traced = taken(torch.compile(lambda *args, **kwargs: create_block_mask(*args, **kwargs)))
    eager = taken(create_block_mask)
    assert 0.9 < ours[0] / traced[0] < 1.1
    assert ours[0] < eager[0] / 4
    assert max(ours[1], traced[1]) < 0.01 < 2 < eager[1]  # the mask of all pairs, a byte each, is not written
    replayed = taken(torch.compile(create_block_mask, mode="reduce-overhead"))
    assert 0.9 < replayed[0] / traced[0] < 1.1
    assert replayed[0] != ours[0]  # Dynamo traces what is replayed as a CUDA graph
    assert ours[2:] == traced[2:] == replayed[2:] == eager[2:]

    def wrong(b, h, i, j):
        raise ValueError("no mask")

    with pytest.raises(ValueError, match="no mask"):
        torch.compile(create_block_mask)(wrong, 1, 1, 128, 128, device="cuda")
    assert taken(torch.compile(create_block_mask)) == ours


@on_gpus()
def test_questions_to_the_gpu_are_answered_while_tracing() -> None:
    def scaled(x):
        if not torch.cuda.is_available():
            return x
        processors = torch.cuda.get_device_properties("cuda").multi_processor_count
        return x * processors * torch.cuda.get_device_capability()[0]

    assert torch.compile(scaled, fullgraph=True)(torch.ones(2, device="cuda")).tolist() == [132 * 9, 132 * 9]
