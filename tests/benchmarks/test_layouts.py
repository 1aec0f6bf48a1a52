"""Scripts of the accuracy benchmarks train one and the same model however it is split: losses agree to five digits."""

import csv
import sys
from functools import cache

import pytest
import torch

from tests.examples.torchrun import ROOT, losses, torchrun

ACCURACY = ROOT / "benchmarks" / "accuracy"
SMALL = "--words 512 --sequence 16 --micro-batch 2 --reproducible"
MEGATRON = f"megatron.py {SMALL} --dtype fp32 --dropout 0"
GPT = f"{MEGATRON} --layers 6 --hidden 32 --heads 4 --global-batch"
LLAMA3 = f"{MEGATRON} --model llama3-8b --layers 2 --hidden 64 --heads 8 --attention flash --global-batch 8"
EXPERTS = f"{MEGATRON} --layers 2 --hidden 64 --heads 8 --experts 8 --feed 32 --attention flash --distributed-optimizer"
QWEN3 = f"{EXPERTS} --global-batch 8 --model qwen3-30b-a3b"
GROK = f"{EXPERTS} --global-batch 8 --model grok1 --drop"
GPT_OSS = f"{EXPERTS} --global-batch 8 --model gpt-oss-120b"
DEEPSEEK = f"{EXPERTS} --global-batch 8 --model deepseek-v2"
AHEAD = f"{DEEPSEEK} --predict 1 --layers 3"
HYBRID = f"{EXPERTS} --global-batch 8 --model nemotron-3-super --experts 32 --layers 8 --predict 2"
LLAMA = "llama.py --model debug --sequence 32"
MPT = "mpt.py --model debug --sequence 32 --global-batch 8"
WHOLE = {GPT: f"{GPT} 8", LLAMA: f"{LLAMA} --exact --batch 4", MPT: f"{MPT} --exact --micro-batch 8"}
"""What one process runs, where that needs other options than its ranks do."""


@cache
def run(command: str, ranks: int) -> list[float]:
    script, *options = command.split()
    found = losses(torchrun(f"benchmarks/accuracy/{script}", *options, ranks=ranks))
    assert len(found) == 3
    return found


@pytest.mark.parametrize(
    ("model", "ranks", "layout"),
    [
        (GPT, 2, "8 --tp 2 --sequence-parallel --overlap-tensor --attention flash"),
        (GPT, 2, "8 --tp 2 --sequence-parallel --pieces 2"),
        (GPT, 2, "8 --pp 2 --recompute full"),
        (GPT, 2, "8 --tp 2 --load"),
        (GPT, 4, "8 --tp 4"),  # two heads at once on each rank: too few for Megatron's softmax
        (GPT, 2, "8 --distributed-optimizer --overlap-data"),
        (GPT, 2, "8 --distributed-optimizer --overlap-data --overlap-gather"),
        (GPT, 4, "8 --tp 2 --pp 2 --sequence-parallel --recompute selective"),
        (f"{GPT} 12", 3, "--pp 3 --vp 2"),  # two stages a rank, with steps before, in and after the steady state
        (f"{GPT} 8", 2, "--pp 2 --vp 3"),  # both neighbours are one
        (f"{GPT} 8", 4, "--pp 2 --distributed-optimizer"),
        (LLAMA3, 2, "--tp 2 --fused-loss --stand-ins"),
        (LLAMA3, 2, "--cp 2"),
        (QWEN3, 2, "--ep 2 --overlap-data --overlap-gather"),
        (QWEN3, 4, "--ep 2"),  # two ranks have the same experts
        (QWEN3, 4, "--ep 4 --servers 2 --room 9"),  # room for all tokens of each rank
        (f"{QWEN3} --global-batch 16", 2, "--ep 2 --overlap-experts --overlap-data"),
        (f"{QWEN3} --global-batch 16 --layers 4", 4, "--ep 2 --pp 2 --vp 2 --overlap-experts"),
        (GROK, 2, "--ep 2"),
        (GPT_OSS, 2, "--ep 2 --recompute activations"),
        (DEEPSEEK, 4, "--ep 2 --pp 2 --recompute latents"),
        (AHEAD, 4, "--ep 2 --pp 2 --overlap-data"),  # two layers, one
        (AHEAD, 2, "--pp 2 --vp 3 --ends-count"),  # of six places: embedding, three layers, the one ahead, loss
        (HYBRID, 2, "--tp 2 --ep 2 --sequence-parallel --overlap-data"),
        (HYBRID, 2, "--pp 2 --recompute experts"),
        (LLAMA, 2, "--exact --batch 2 --recompute layers"),
        (LLAMA, 4, "--exact --batch 1 --shard 2"),
        (LLAMA, 2, "--exact --batch 4 --tp 2 --recompute selective"),
        (LLAMA, 2, "--exact --batch 4 --cp 2 --recompute full"),
        (LLAMA, 4, "--exact --batch 4 --tp 2 --pp 2"),
        (LLAMA, 2, "--exact --batch 4 --pp 2 --schedule interleaved --microbatches 4"),
        (MPT, 2, "--exact --micro-batch 4"),
        (MPT, 2, "--exact --micro-batch 2 --recompute full --strategy SHARD_GRAD_OP"),
    ],
    ids=lambda value: value.partition(" --")[0] if isinstance(value, str) and ".py" in value else None,
)
def test_layouts_train_the_same_model(model, ranks, layout):
    assert run(f"{model} {layout}", ranks) == pytest.approx(run(WHOLE.get(model, model), 1), abs=2e-5)


def test_ranks_that_split_experts_gather_their_tokens():
    """The tokens that experts drop depend on who has which: the sequence is on two ranks in both runs."""
    whole = f"{GROK} --tp 2 --sequence-parallel"
    assert run(f"{whole} --ep 2 --etp 2", 4) == pytest.approx(run(whole, 2), abs=2e-5)


TINY = f"megatron.py {SMALL} --layers 2 --hidden 32 --heads 4 --global-batch 4 --tp 2"


@pytest.mark.parametrize(
    "command",
    [
        f"{TINY} --dtype fp16 --recompute full",
        f"{TINY} --dtype bf16 --gradients fp32 --dropout 0 --float8 delayed",
        f"{TINY} --dtype bf16 --gradients fp32 --dropout 0 --float8 current --sequence-parallel --pieces 2",
        f"{QWEN3.replace('fp32', 'bf16')} --gradients fp32 --float8 current --ep 2",
        f"{TINY} --dtype bf16 --gradients fp32 --dropout 0 --float8 nvfp4",
        f"{TINY} --dtype bf16 --gradients fp32 --dropout 0 --float8 nvfp4 --sequence-parallel --pieces 2 --sequence 32",
        f"{LLAMA} --batch 2 --recompute selective",
        f"{LLAMA} --batch 2 --float8 tensorwise --recompute full",
        f"{LLAMA} --batch 2 --float8 tensorwise --tp 2",
        f"{LLAMA} --batch 2 --float8 tensorwise --tp 2 --async-tp --recompute full",
        f"{LLAMA} --batch 2 --float8 rowwise --tp 2 --reduce bfloat16",
        f"{MPT} --micro-batch 4 --recompute full",
        f"{MPT} --micro-batch 4 --float8",
    ],
)
def test_low_precision_learns(command):
    first, second, third = run(command, 2)
    assert first > second > third


def test_weights_that_layers_keep_in_float8_alone_are_the_same():
    plain = f"{TINY} --dtype bf16 --dropout 0 --float8 delayed --distributed-optimizer --overlap-data --overlap-gather"
    assert run(f"{plain} --float8-weights", 4) == run(plain, 4)


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ACCURACY), *sys.path])


@pytest.mark.usefixtures("scripts")
def test_ranks_join_what_each_has_packed_and_turned():
    import float4

    whole = torch.randn(4 * 32, 48)  # the sequence in two pieces, of each of which either rank has 32 rows
    largest = whole.abs().amax()
    of_ranks = [torch.cat([whole[32 * rank :][:32], whole[64 + 32 * rank :][:32]]) for rank in range(2)]
    parts = torch.stack([float4.pack_and_turn(part, largest)[2] for part in of_ranks])

    assert float4.join(parts, 2).equal(float4.pack_and_turn(whole, largest)[2])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-34b", 33_743_970_304),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
@pytest.mark.usefixtures("scripts")
def test_llamas_have_as_many_parameters_as_published(name, parameters):
    from llama_model import SHAPES, Llama

    with torch.device("meta"):
        model = Llama(SHAPES[name], range(SHAPES[name].layers))

    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.usefixtures("scripts")
def test_mpts_have_as_many_parameters_as_published():
    from mpt_model import MPT, SHAPES

    with (ACCURACY / "groundtruth-train.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["family"] == "llmfoundry"]
    published = {(row["model"].removeprefix("MPT-"), int(row["seq_len"]), int(row["params"])) for row in rows}
    models: dict[str, torch.nn.Module] = {}
    for name, length, parameters in published:
        if name not in models:
            with torch.device("meta"):
                models[name] = MPT(SHAPES[name], length)
        positions = models[name].positions.weight
        others = sum(p.numel() for p in models[name].parameters()) - positions.numel()
        assert others + length * positions.shape[1] == parameters, (name, length)
    assert len(published) > 50
