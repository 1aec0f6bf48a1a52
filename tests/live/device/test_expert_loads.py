"""Loads of experts in live simulation: drawn or from a file; all-to-alls and products follow."""

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from foretrain.errors import ConfigError
from foretrain.live.device.expert_loads import apportion
from foretrain.live.device.settings import ExpertLoads, RankSettings
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
