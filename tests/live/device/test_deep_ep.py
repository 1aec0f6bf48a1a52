"""DeepEP's stand-in: rows and bytes by closed form, and a layer of experts that uses it, forward and backward."""

import json
import math

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn

from foretrain.live.device.stand_ins.deep_ep import between_servers, rows
from tests.live.command import on_gpus, simulate

TOKENS = 1_000_000


@pytest.mark.parametrize(("experts", "here", "top"), [(8, 1, 8), (64, 8, 8), (256, 32, 8), (256, 64, 8), (16, 2, 1)])
def test_of_equal_loads_a_rank_gets_the_tokens_that_do_not_pass_by_all_its_experts(
    experts: int, here: int, top: int
) -> None:
    expected = TOKENS * (1 - math.comb(experts - here, top) / math.comb(experts, top))
    assert rows(TOKENS, [TOKENS * top // experts] * here, top) == pytest.approx(expected, rel=1e-5)


def test_eight_choices_on_eight_gpus_are_about_5_3_rows() -> None:
    assert 8 * rows(TOKENS, [TOKENS // 32] * 32, 8) / TOKENS == pytest.approx(5.3, abs=0.05)


@pytest.mark.parametrize("loads", [[0, 0], [7, 3], [10, 10], [10, 0], [1, 0, 0, 0]])
def test_no_rank_gets_a_token_twice_nor_fewer_than_its_busiest_expert(loads: list[int]) -> None:
    assert max(loads) <= rows(10, loads, 2) <= min(10, sum(loads))


def test_a_token_crosses_to_each_server_once_and_goes_on_to_its_ranks_there() -> None:
    servers = [[0, 1], [2, 3], [4, 5]]
    to_ranks, to_servers = [5, 6, 7, 8, 9, 10], [9, 10, 11]
    matrix = between_servers(to_ranks, to_servers, servers)
    home = {rank: number for number, server in enumerate(servers) for rank in server}
    for rank, row in enumerate(matrix):
        crossing = {other: count for other, count in enumerate(row) if count and home[other] != home[rank]}
        place = servers[home[rank]].index(rank)
        assert crossing == {one[place]: to_servers[n] for n, one in enumerate(servers) if n != home[rank]}
        # Each server passes on what came from all three, by the rank at the same place.
        assert [row[other] for other in servers[home[rank]]] == [3 * to_ranks[k] for k in servers[home[rank]]]


def layer() -> None:
    from deep_ep import Buffer, EventOverlap

    ranks, here, top, tokens, hidden = dist.get_world_size(), 4, 8, 2048, 512
    Buffer.set_num_sms(24)
    configs = Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)
    assert configs[0].num_sms == 24
    sizes = (max(c.get_nvl_buffer_size_hint(2 * hidden, ranks) for c in configs),)
    sizes += (max(c.get_rdma_buffer_size_hint(2 * hidden, ranks) for c in configs),)
    assert (sizes[1] > 0) == (ranks > 8)
    buffer = Buffer(dist.group.WORLD, *sizes)

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, chosen, weights):
            per_rank, per_server, per_expert, within, event = buffer.get_dispatch_layout(
                chosen, ranks * here, previous_event=Buffer.capture(), async_finish=True
            )
            assert isinstance(event, EventOverlap)
            x, chosen, weights, loads, ctx.handle, event = buffer.dispatch(
                x,
                topk_idx=chosen,
                topk_weights=weights,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_server,
                is_token_in_rank=within,
                num_tokens_per_expert=per_expert,
                previous_event=event,
                async_finish=True,
            )
            event.current_stream_wait()
            ctx.mark_non_differentiable(chosen)
            return x, chosen, weights, loads, ctx.handle

        @staticmethod
        def backward(ctx, x, chosen, weights, loads, handle):
            x, weights, _ = buffer.combine(x.contiguous(), ctx.handle, topk_weights=weights)
            return x, None, weights

    class Combine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, handle):
            ctx.handle = handle
            x, _, _ = buffer.combine(x, handle)
            return x

        @staticmethod
        def backward(ctx, x):
            x, chosen, weights, loads, handle, _ = buffer.dispatch(x.contiguous(), handle=ctx.handle)
            assert chosen is weights is loads is handle is None
            return x, None

    half = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(tokens, hidden, **half, requires_grad=True)
    router = nn.Linear(hidden, ranks * here, **half)
    experts = nn.Parameter(torch.randn(here, hidden, hidden, **half))
    weights, chosen = router(x).float().softmax(-1).topk(top)
    received, choices, shares, loads, handle = Dispatch.apply(x, chosen, weights)
    assert len(received) == len(choices) == len(shares)
    assert max(loads) <= len(received) <= min(sum(loads), ranks * tokens)
    # Megatron-LM's map of received tokens and experts, and its rows by expert.
    mask = choices != -1
    rows = torch.arange(len(choices), device="cuda").repeat_interleave(mask.sum(dim=1))
    assert len(choices[mask]) == len(rows) == sum(loads)
    routed = torch.zeros(len(choices), here, dtype=torch.long, device="cuda")
    routed[rows, choices[mask]] = 1
    each = torch.arange(len(choices), device="cuda").unsqueeze(0).expand(here, -1)
    assert len(each.masked_select(routed.bool().T.contiguous())) == sum(loads)
    total = torch.tensor([sum(loads), len(received)], device="cuda")
    dist.all_reduce(total)
    assert total[0].item() == ranks * tokens * top
    offsets = torch.tensor(loads, device="cuda").cumsum(0, dtype=torch.int32)
    by_expert = received.repeat_interleave(top, 0)[: sum(loads)]
    products = torch._grouped_mm(by_expert, experts, offs=offsets)
    made = Combine.apply(products[: len(received)] * shares[:, :1].to(products.dtype), handle)
    assert made.shape == x.shape
    made.sum().backward()
    assert x.grad.shape == x.shape
    assert experts.grad is not None
    assert router.weight.grad is not None
    if dist.get_rank() == 0:
        print(json.dumps({"received": len(received), "loads": loads, "rows": total[1].item()}))


@pytest.mark.parametrize("cluster", ["dgx-h100:1", "dgx-h100:2"])
def test_a_layer_of_experts_sends_each_token_once_to_a_rank(cluster: str) -> None:
    ended = simulate(cluster, layer)
    assert "deep_ep is not installed: a stand-in" in ended.err
    assert "deep_ep" in ended.numbers["stand_ins"]
    ranks, experts = {"dgx-h100:1": (8, 32), "dgx-h100:2": (16, 64)}[cluster]
    (found,) = ended.lines
    expected = ranks * 2048 * (1 - math.comb(experts - 4, 8) / math.comb(experts, 8))
    assert found["received"] == pytest.approx(expected, rel=1e-3)
    assert found["loads"] == [2048 * 8 * ranks // experts] * 4


def test_ranks_that_others_stand_for_send_what_they_would() -> None:
    folded = simulate("dgx-h100:2", layer)
    every = simulate("dgx-h100:2", layer, options=("--live", "all"))
    assert folded.numbers["live"] == [0]
    assert folded.numbers["iteration_time"] == pytest.approx(every.numbers["iteration_time"], rel=1e-3)


def test_loads_of_experts_change_what_is_sent() -> None:
    ended = simulate("dgx-h100:1", layer, options=("--experts", "lognormal(1)"))
    (found,) = ended.lines
    assert len(set(found["loads"])) > 1
    assert ended.numbers["live"] == list(range(8))


@on_gpus(cluster="dgx-h100:1")
def test_what_is_not_simulated_is_named() -> None:
    import pytest
    from deep_ep import Buffer

    buffer = Buffer(dist.group.WORLD, 1 << 20)
    with pytest.raises(NotImplementedError, match="low_latency_dispatch"):
        buffer.low_latency_dispatch(torch.empty(1, 128), None, 128, 8)
