"""The Megatron-like script trains one and the same model however it is split: losses agree to five digits."""

import pytest

from tests.examples.torchrun import losses, torchrun

SCRIPT = "benchmarks/accuracy/megatron.py"
SMALL = ("--words", 512, "--sequence", 16, "--micro-batch", 2, "--reproducible")
EXACT = (*SMALL, "--dtype", "fp32", "--dropout", 0)
GPT = ("--layers", 6, "--hidden", 32, "--heads", 4)
LLAMA = ("--model", "llama3-8b", "--layers", 2, "--hidden", 64, "--heads", 8, "--attention", "flash")


@pytest.fixture(scope="module")
def whole():
    """Losses of one process, by model and sequences of a step."""
    return {
        (model, batch): losses(torchrun(SCRIPT, *EXACT, *model, "--global-batch", batch, ranks=1))
        for model, batch in ((GPT, 8), (GPT, 12), (LLAMA, 8))
    }


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "--tp 2"),
        (2, "--tp 2 --sequence-parallel --overlap-tensor --attention flash"),
        (2, "--tp 2 --sequence-parallel --pieces 2"),
        (2, "--pp 2 --recompute full"),
        (2, "--distributed-optimizer --overlap-data"),
        (2, "--distributed-optimizer --overlap-data --overlap-gather"),
        (4, "--tp 2 --pp 2"),
        (4, "--tp 2 --pp 2 --sequence-parallel --recompute selective"),
    ],
)
def test_layouts_of_a_gpt(whole, ranks, layout):
    split = losses(torchrun(SCRIPT, *EXACT, *GPT, "--global-batch", 8, *layout.split(), ranks=ranks))

    assert len(split) == 3
    assert split == pytest.approx(whole[GPT, 8], abs=2e-5)


@pytest.mark.smoke
def test_interleaved_stages(whole):
    """Three ranks of two stages each, with steps before, in and after the steady state."""
    layout = ("--global-batch", 12, "--pp", 3, "--vp", 2)

    assert losses(torchrun(SCRIPT, *EXACT, *GPT, *layout, ranks=3)) == pytest.approx(whole[GPT, 12], abs=2e-5)


@pytest.mark.parametrize("layout", ["--tp 2", "--cp 2"])
def test_layouts_of_a_llama(whole, layout):
    split = losses(torchrun(SCRIPT, *EXACT, *LLAMA, "--global-batch", 8, *layout.split()))

    assert split == pytest.approx(whole[LLAMA, 8], abs=2e-5)


@pytest.mark.parametrize(
    "precision",
    [
        "--dtype fp16 --recompute full",
        "--dtype bf16 --gradients fp32 --dropout 0 --float8 delayed",
        "--dtype bf16 --gradients fp32 --dropout 0 --float8 current --sequence-parallel --pieces 2",
    ],
)
def test_low_precision_learns(precision):
    model = ("--layers", 2, "--hidden", 32, "--heads", 4, "--global-batch", 4)

    first, second, third = losses(torchrun(SCRIPT, *SMALL, *model, *precision.split(), "--tp", 2))

    assert first > second > third
