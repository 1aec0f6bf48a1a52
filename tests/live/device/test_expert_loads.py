"""Loads of experts in live simulation: drawn or from a file; all-to-alls and products follow."""

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn

from foretrain.errors import ConfigError
from foretrain.live.device.expert_loads import apportion
from foretrain.live.device.settings import ExpertLoads, RankSettings
from foretrain.live.routed_loads import routers_before
from tests.live.command import on_gpus, simulate

SCRIPT = Path(__file__).parents[3] / "examples/simulate/moe_all_to_all.py"
SHAPE = ("--layers", 2, "--experts", 16, "--steps", 3, "--batch", 2)


def step_time(experts: str, *options: str) -> float:
    given = ("--experts", experts, *options)
    return simulate("dgx-h100:1,ranks=0-3", SCRIPT, *SHAPE, options=given).numbers["iteration_time"]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 4.0], [0.0, 0.0, 9.0, 1.0], [1e-9, 1.0, 1.0, 1.0]])
@pytest.mark.parametrize("tokens", [0, 1, 7, 1000])
def test_loads_sum_to_all_choices_and_no_expert_has_a_token_twice(weights: list[float], tokens: int) -> None:
    for top in range(1, len(weights) + 1):
        counts = apportion(weights, tokens * top, tokens)
        assert sum(counts) == tokens * top
        assert min(counts) >= 0
        assert max(counts) <= tokens


def test_equal_weights_give_balanced_loads() -> None:
    loads = ExpertLoads("lognormal(0)")
    assert apportion(loads.weights(3, 4, 8), 1003, 1003) == [126] * 3 + [125] * 5


def test_loads_hang_on_seed_router_and_step_alone() -> None:
    loads = ExpertLoads.parse("lognormal(0.5, 7)")
    assert loads is not None
    assert (loads.sigma, loads.seed) == (0.5, 7)
    assert loads.weights(1, 2, 64) == loads.weights(1, 2, 64)
    draws = [loads.weights(1, 2, 64), loads.weights(2, 2, 64), loads.weights(1, 3, 64)]
    assert len({tuple(draw) for draw in [*draws, ExpertLoads("", 0.5, 8).weights(1, 2, 64)]}) == 4
    logarithms = [math.log(load) for draw in range(100) for load in loads.weights(draw, 0, 64)]
    assert math.fsum(value**2 for value in logarithms) / len(logarithms) == pytest.approx(0.25, rel=0.1)


def test_loads_are_read_from_files(tmp_path: Path) -> None:
    texts = {"a.csv": "3,1\n1,1\n", "a.json": "[[3, 1], [1, 1]]", "a.toml": "loads = [[3, 1], [1, 1]]"}
    for name, text in texts.items():
        path = tmp_path / name
        path.write_text(text)
        loads = ExpertLoads.parse(str(path))
        assert loads is not None
        assert loads.rows == ((3.0, 1.0), (1.0, 1.0))
        settings = RankSettings(("train.py",), "H100", 2, 2, "", experts=loads)
        assert RankSettings.from_json(settings.to_json()) == settings
        with pytest.raises(ConfigError, match="loads of 2 experts, and a router of the script has 4"):
            loads.weights(0, 0, 4)
        with pytest.raises(ConfigError, match="loads of 2 routers"):
            loads.weights(2, 0, 2)


@pytest.mark.parametrize("text", ["even", "lognormal", "lognormal(-1)", "lognormal(nan)", "lognormal(1,x)"])
def test_loads_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"experts: .*write balanced, lognormal"):
        ExpertLoads.parse(text)


@pytest.mark.parametrize("text", ["", "1,-1\n", "0,0\n", "a,b\n"])
def test_files_without_loads_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "loads.csv").write_text(text)
    with pytest.raises(ConfigError, match="experts"):
        ExpertLoads.parse(str(tmp_path / "loads.csv"))


@on_gpus("--experts", "lognormal(1)")
def test_all_that_counts_a_routers_choice_agrees() -> None:
    from torch.nn.functional import one_hot

    tokens, experts, top = 1000, 8, 2
    scores = torch.randn(tokens, experts, device="cuda")
    chosen = scores.topk(top).indices
    loads = chosen.flatten().bincount(minlength=experts).tolist()
    assert sum(loads) == tokens * top
    assert len(set(loads)) > 1
    assert max(loads) <= tokens
    assert torch.histc(chosen.float(), bins=experts, min=0, max=experts).int().tolist() == loads
    routed = torch.zeros_like(scores).int().scatter(1, chosen, 1).bool()  # as Megatron-LM does it
    assert routed.sum(dim=0).tolist() == routed.T.contiguous().sum(dim=1).tolist() == loads
    assert routed.long().sum(dim=1).tolist() == [top] * tokens
    assert routed[:, 2:4].sum(dim=0).tolist() == loads[2:4]
    assert [int(routed[:, k].nonzero().numel()) for k in range(experts)] == loads
    by_expert = one_hot(chosen, experts).permute(2, 1, 0)  # as transformers' experts
    assert [len(torch.where(each)[1]) for each in by_expert] == loads
    assert [len(torch.where(chosen == k)[0]) for k in range(experts)] == loads
    assert set(torch.randint(8, (4096,), device="cuda").bincount(minlength=8).tolist()) == {512}


@on_gpus("--experts", "lognormal(1)", "--live", "all")
def test_ranks_send_each_other_what_they_expect() -> None:
    chosen = torch.randn(4096, 32, device="cuda").topk(2).indices
    counts = chosen.flatten().bincount(minlength=32)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    assert arriving.view(8, 4).tolist() == [counts[dist.get_rank() * 4 :][:4].tolist()] * 8


def test_no_spread_is_balanced_and_imbalance_costs_time() -> None:
    balanced = step_time("balanced", "--live", "all")
    assert step_time("lognormal(0)") == balanced
    uneven = step_time("lognormal(0.8,1)")
    assert uneven > balanced
    assert step_time("lognormal(0.8,1)") == uneven


def test_members_of_groups_that_exchange_uneven_parts_are_live() -> None:
    ended = simulate("dgx-h100:1,ranks=0-3", SCRIPT, *SHAPE, options=("--experts", "lognormal(0.5)"))
    assert ended.numbers["live"] == [0, 1, 2, 3]


def test_a_file_for_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    path.write_text(json.dumps([1] * 8))
    ended = simulate("dgx-h100:1,ranks=0-3", SCRIPT, *SHAPE, options=("--experts", path), status=2)
    assert "has loads of 8 experts, and a router of the script has 16; give one load for each expert" in ended.err


@on_gpus("--experts", "lognormal(1)")
def test_torchtitans_map_and_grouped_products_have_the_loads() -> None:
    tokens, experts, top = 2048, 8, 2
    scores = torch.randn(4, tokens // 4, experts, device="cuda")
    chosen = torch.topk(scores, k=top, dim=-1, sorted=False).indices
    routed = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
    loads = routed.sum(dim=(0, 1))
    assert loads.tolist() == torch.histc(chosen.view(-1), bins=experts, min=0, max=experts).tolist()
    assert len(set(loads.tolist())) > 1
    rows = torch.randn(tokens * top, 64, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(experts, 64, 128, device="cuda", dtype=torch.bfloat16)
    made = torch._grouped_mm(rows, weights, offs=torch.cumsum(loads, 0, dtype=torch.int32))
    assert made.shape == (tokens * top, 128)


@on_gpus("--experts", "lognormal(1)")
def test_megatrons_map_gives_permuted_rows_their_number() -> None:
    tokens, experts, top = 2048, 8, 2
    logits = torch.randn(tokens, experts, device="cuda")
    shares, chosen = torch.topk(logits.softmax(-1), k=top, dim=1)
    probabilities = torch.zeros_like(logits).scatter(1, chosen, shares)
    routed = torch.zeros_like(logits).int().scatter(1, chosen, 1).bool()
    per_expert = routed.sum(dim=0).long()
    split = per_expert.reshape(4, 2).sum(1).cpu().numpy()
    assert split.sum() == tokens * top
    assert len(set(split)) > 1
    by_expert = routed.T.contiguous()
    rows = torch.arange(tokens, device="cuda").unsqueeze(0).expand(experts, -1).masked_select(by_expert)
    kept = probabilities.T.contiguous().masked_select(by_expert)
    assert len(rows) == len(kept) == per_expert.sum().item() == tokens * top


@pytest.mark.parametrize("experts", ["balanced", "lognormal(1)"])
def test_choices_that_were_gathered_from_all_ranks_have_the_loads_of_all(experts: str) -> None:
    def gathered() -> None:
        scores = torch.randn(4096, 8, device="cuda")
        chosen = scores.topk(2).indices
        routed = torch.zeros_like(scores).int().scatter(1, chosen, 1).bool()  # as Megatron-LM's all-gather dispatcher
        loads = [2 * load for load in routed.sum(dim=0).tolist()]
        maps = torch.empty(2 * 4096, 8, dtype=torch.bool, device="cuda")
        dist.all_gather_into_tensor(maps, routed)
        first = 4 * dist.get_rank()
        assert maps[:, first : first + 4].sum(dim=0).tolist() == loads[first : first + 4]
        choices = torch.empty(2 * 4096, 2, dtype=torch.int64, device="cuda")
        dist.all_gather_into_tensor(choices, chosen)
        assert choices.flatten().bincount(minlength=8).tolist() == loads

    simulate("dgx-h100:1,ranks=0-1", gathered, options=("--experts", experts, "--live", "all"))


@on_gpus("--experts", "lognormal(1)", "--steps", 2)
def test_a_recomputed_layer_draws_the_same_loads() -> None:
    from torch.utils.checkpoint import checkpoint

    drawn: list[list[int]] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, chosen = self.router(x).topk(2)
            drawn.append(chosen.flatten().bincount(minlength=8).tolist())
            return x * weights.sum(1, keepdim=True)

    layers = nn.ModuleList(Layer() for _ in range(2)).cuda()
    optimizer = torch.optim.SGD(layers.parameters())
    for step in range(3):
        x = torch.randn(2048, 64, device="cuda", requires_grad=True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()
        first, second, again, first_again = drawn[-4:]
        assert (first_again, again) == (first, second)
        assert first != second
        assert step == 0 or drawn[-8] != first
        optimizer.step()


def test_a_loop_over_experts_selects_all_of_balanced_choices_and_the_loads_of_given_ones() -> None:
    def loop() -> None:
        tokens, experts, top = 2048, 8, 2
        chosen = torch.randn(tokens, experts, device="cuda").topk(top).indices
        print(json.dumps([len(torch.where(chosen == k)[0]) for k in range(experts)]), flush=True)

    def rows(experts: str) -> list[int]:
        ended = simulate("H100", loop, options=("--experts", experts))
        return next(json.loads(line) for line in ended.out.splitlines() if line.startswith("["))

    assert rows("balanced") == [2048 * 2] * 8
    assert rows("lognormal(0)") == [512] * 8
    uneven = rows("lognormal(1)")
    assert sum(uneven) == 2048 * 2
    assert len(set(uneven)) > 1


def pipeline() -> None:
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    stage, group = rank // half, None
    for first in (0, half):
        made = dist.new_group(range(first, first + half))
        group = made if first == stage * half else group
    router = nn.Linear(64, 8, device="cuda")
    optimizer = torch.optim.SGD(router.parameters())
    for step in range(2):
        x = torch.randn(2048, 64, device="cuda")
        if stage:
            dist.recv(x, rank - half)
        counts = router(x).topk(2).indices.flatten().bincount(minlength=8)
        sent = counts.view(half, -1).sum(1).tolist()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        received = arriving.view(half, -1).sum(1).tolist()
        rows = torch.empty(sum(received), 64, device="cuda")
        dist.all_to_all_single(rows, x.repeat(2, 1), received, sent, group=group)
        if not stage:
            dist.send(x, rank + half)
        router(x).sum().backward()
        optimizer.step()
        print(json.dumps({"rank": rank, "step": step, "loads": counts.tolist()}), flush=True)


@pytest.mark.parametrize("live", ["auto", "all"])
def test_routers_of_a_pipelines_stages_are_numbered_one_after_the_other(tmp_path: Path, live: str) -> None:
    file = tmp_path / "loads.csv"
    file.write_text("1,1,1,1,1,1,1,1\n0,0,1,1,1,1,2,2\n")
    for given in ("lognormal(1)", file):
        ended = simulate("dgx-h100:1,ranks=0-3", pipeline, options=("--experts", given, "--live", live))
        loads = {(line["rank"], line["step"]): line["loads"] for line in ended.lines}  # the last start's
        for step in (0, 1):
            assert loads[0, step] == loads[1, step] != loads[2, step] == loads[3, step]
        assert ended.numbers["experts"]["routers"] == 2
    assert loads[2, 0] == [0, 0, 512, 512, 512, 512, 1024, 1024]


def interleaved() -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    drawn: list[tuple[int, ...]] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, chosen = self.router(x).topk(2)
            drawn.append(tuple(chosen.flatten().bincount(minlength=8).tolist()))
            return x * weights.sum(-1, keepdim=True)

    rank, world = dist.get_rank(), dist.get_world_size()
    layers = [Layer().cuda() for _ in range(2)]
    device = torch.device("cuda")
    stages = [PipelineStage(layer, rank + world * k, 2 * world, device) for k, layer in enumerate(layers)]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=lambda output, target: output.sum())
    optimizer = torch.optim.SGD([weight for layer in layers for weight in layer.parameters()])
    for _ in range(2):
        drawn.clear()
        x = torch.randn(4096, 64, device="cuda")
        if rank:
            schedule.step(target=x)
        else:
            schedule.step(x)
        optimizer.step()
    print(json.dumps({"rank": rank, "loads": sorted(set(drawn))}), flush=True)


def test_interleaved_stages_draw_loads_of_their_own_for_all_micro_batches() -> None:
    ended = simulate("dgx-h100:1,ranks=0-1", interleaved, options=("--experts", "lognormal(1)"))
    assert ended.numbers["experts"]["routers"] == 4
    loads = {line["rank"]: line["loads"] for line in ended.lines}  # the last start's
    assert len({tuple(load) for rank in (0, 1) for load in loads[rank]}) == 4


@pytest.mark.parametrize(
    ("exchanging", "messages", "before"),
    [
        ([], [], [0, 0, 0, 0]),
        ([], [(0, 1), (1, 0), (1, 2), (2, 3)], [0, 2, 4, 6]),
        ([(0, 1), (2, 3)], [(0, 2), (1, 3)], [0, 0, 2, 2]),
        ([(0, 2), (1, 3)], [(0, 1), (2, 3)], [0, 2, 0, 2]),
        ([(0, 1), (2, 3)], [], [0, 0, 0, 0]),
        ([(0, 1, 2, 3)], [(0, 1), (1, 2)], [0, 0, 0, 0]),
    ],
)
def test_stages_are_groups_of_ranks_that_exchange_tokens(exchanging, messages, before) -> None:
    assert list(routers_before(dict.fromkeys(range(4), 2), exchanging, messages).values()) == before


def test_the_loads_and_a_curve_of_other_loads_are_in_all_results(tmp_path: Path) -> None:
    options = ("--experts", "lognormal(0.4,2)", "--experts-curve", "--html", tmp_path / "page.html")
    shape = ("--layers", 1, "--experts", 4, "--steps", 2)
    ended = simulate("dgx-h100:1,ranks=0-1", SCRIPT, *shape, options=options)
    loads = ended.numbers["experts"]
    assert (loads["loads"], loads["seed"], loads["routers"]) == ("lognormal(0.4,2)", 2, 1)
    assert 1 < loads["busiest_rank"] <= loads["busiest_expert"]
    assert "lognormal(0.4,2), seed 2: busiest expert" in ended.out
    points = {(point["sigma"], point["seed"]): point for point in ended.numbers["experts_curve"]}
    assert len(points) == 10
    assert points[0, 0]["busiest_expert"] == 1
    assert points[0.4, 2]["seconds"] == ended.numbers["iteration_time"]
    assert points[0.4, 2]["busiest_rank"] == loads["busiest_rank"]
    assert points[0.8, 2]["seconds"] > points[0, 0]["seconds"]
    assert 'id="imbalance"' in (tmp_path / "page.html").read_text()
