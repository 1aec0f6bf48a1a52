"""The Llama script trains one and the same model however it is split; its models are as large as they are called."""

import sys

import pytest
import torch

from tests.examples.torchrun import ROOT, losses, torchrun

SCRIPT = "benchmarks/accuracy/llama.py"
EXACT = ("--model", "debug", "--sequence", 32, "--exact", "--batch")


@pytest.fixture(scope="module")
def whole():
    return losses(torchrun(SCRIPT, *EXACT, 4, ranks=1))


@pytest.mark.parametrize(
    ("ranks", "batch", "layout"),
    [
        (2, 2, "--recompute layers"),
        (4, 1, "--shard 2"),
        (2, 4, "--tp 2 --recompute selective"),
        (2, 4, "--cp 2 --recompute full"),
        (4, 4, "--tp 2 --pp 2"),
        (2, 4, "--pp 2 --schedule interleaved --microbatches 4"),
    ],
)
def test_layouts(whole, ranks, batch, layout):
    split = losses(torchrun(SCRIPT, *EXACT, batch, *layout.split(), ranks=ranks))

    assert len(split) == 3
    assert split == pytest.approx(whole, abs=2e-5)


@pytest.mark.parametrize(
    "options",
    [
        "--recompute selective",
        "--float8 tensorwise --recompute full",
        "--float8 tensorwise --tp 2",
        "--float8 rowwise --tp 2 --reduce bfloat16",
    ],
)
def test_low_precision_learns(options):
    first, second, third = losses(
        torchrun(SCRIPT, "--model", "debug", "--sequence", 32, "--batch", 2, *options.split())
    )

    assert first > second > third


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
def test_models_have_as_many_parameters_as_published(monkeypatch, name, parameters):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks" / "accuracy"), *sys.path])
    from llama_model import SHAPES, Llama

    with torch.device("meta"):
        model = Llama(SHAPES[name], range(SHAPES[name].layers))

    assert sum(p.numel() for p in model.parameters()) == parameters
