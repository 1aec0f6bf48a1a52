"""Launchers are recognised by their command lines, and other programs are not."""

import pytest

from foretrain.errors import ConfigError
from foretrain.launch import check_no_interpreter, launched


@pytest.mark.parametrize(
    ("line", "name", "script"),
    [
        ("torchrun --nproc-per-node 8 train.py --lr 1", "torchrun", "train.py --lr 1"),
        ("OMP_NUM_THREADS=1 /usr/bin/torchrun train.py", "torchrun", "train.py"),
        ("python3.11 -m torch.distributed.run --nnodes 2 a/train.py x", "torch.distributed.run", "a/train.py x"),
        ("accelerate launch --multi_gpu train.py", "accelerate", "train.py"),
        ("deepspeed --num_gpus 8 train.py --deepspeed", "deepspeed", "train.py --deepspeed"),
        ("torchrun -m torchtitan.train", "torchrun", ""),
        ("cd jobs && OMP_NUM_THREADS=1 torchrun train.py", "torchrun", "train.py"),
        ("echo now; timeout 20 torchrun train.py", "torchrun", "train.py"),
        ("python -u -m torch.distributed.run train.py", "torch.distributed.run", "train.py"),
    ],
)
def test_launcher_and_its_script_are_recognised(line: str, name: str, script: str) -> None:
    found = launched(line.split())
    assert found is not None
    assert (found.name, found.script) == (name, script)
    assert f"foretrain search -- {script or 'train.py'}" in str(found.refusal("script", "search"))


@pytest.mark.parametrize(
    "line", ["", "git log torchrun", "python train.py torchrun", "accelerate config", "ls", "echo a && ls torchrun"]
)
def test_other_commands_are_none(line: str) -> None:
    assert launched(line.split()) is None


@pytest.mark.parametrize("name", ["python", "python3.11", "/usr/bin/python3"])
def test_an_interpreter_in_place_of_a_script_is_to_be_left_out(name: str) -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        check_no_interpreter(name)


def test_a_script_may_be_named_like_an_interpreter() -> None:
    check_no_interpreter("pythonic.py")
