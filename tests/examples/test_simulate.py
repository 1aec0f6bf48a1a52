"""The scripts that are simulated are correct training scripts: they run on CPU, and learn alike however they are split.

Layouts compute in bfloat16 where the script does, so they agree to the three digits that it has.
"""

import pytest

from tests.examples.torchrun import ROOT, losses, torchrun

EXAMPLES = sorted((ROOT / "examples" / "simulate").glob("*.py"))
CNN = ("--batch", 2, "--width", 4, "--size", 32, "--steps", 3)
GPT = ("--sequence", 16, "--dim", 32, "--layers", 4, "--vocabulary", 64, "--steps", 3)


def learns(values: list[float]) -> bool:
    return len(values) == 3 and values[0] > values[1] > values[2]


@pytest.mark.smoke
def test_cnn_ddp():
    printed = torchrun("examples/simulate/cnn_ddp.py", *CNN)

    assert learns(losses(printed))
    assert "images/s" in printed


def test_gpt_fsdp2_recomputes_what_it_had():
    run = ("examples/simulate/gpt_fsdp2.py", *GPT, "--heads", 2, "--batch", 2)

    kept, recomputed = losses(torchrun(*run)), losses(torchrun(*run, "--checkpoint"))

    assert learns(kept)
    assert recomputed == kept


def test_tensor_parallel_is_the_same_model():
    run = ("examples/simulate/tensor_parallel.py", *GPT, "--head", 8, "--batch", 2, "--tp")

    whole, split = losses(torchrun(*run, 1, ranks=1)), losses(torchrun(*run, 2, ranks=2))

    assert learns(whole)
    assert split == pytest.approx(whole, rel=2e-3)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_pipeline_is_the_same_model(schedule):
    run = ("examples/simulate/pipeline_1f1b.py", *GPT, "--heads", 2, "--batch", 8, "--microbatches", 4, "--schedule")

    whole, split = losses(torchrun(*run, "gpipe", ranks=1)), losses(torchrun(*run, schedule))

    assert learns(whole)
    assert split == pytest.approx(whole, abs=2e-4)


def test_experts_learn():
    shape = ("--sequence", 16, "--dim", 32, "--hidden", 64, "--experts", 4, "--layers", 2, "--vocabulary", 64)

    assert learns(losses(torchrun("examples/simulate/moe_all_to_all.py", *shape, "--batch", 2, "--steps", 3)))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_what_a_user_would_write(path):
    text = path.read_text(encoding="utf-8")

    assert 'default="cuda"' in text
    assert "import foretrain" not in text
    assert len(text.splitlines()) < 120
