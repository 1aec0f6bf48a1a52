"""What launchers would start, read from their command lines."""

import shlex
from pathlib import Path

import pytest

pytest.importorskip("torch")

from foretrain.launch.launchers import Started, started, with_local_rank
from tests.live.command import simulate

RANK = "${local_rank}"


@pytest.mark.parametrize(
    ("line", "script", "module"),
    [
        ("python3 -u train.py --lr 1", "train.py --lr 1", False),
        ("/usr/bin/python -m pkg.train --lr 1", "pkg.train --lr 1", True),
        ("torchrun --nproc_per_node 8 --nnodes=2 train.py --lr 1", "train.py --lr 1", False),
        ("torchrun --nproc-per-node=8 -m pkg.train --lr 1", "pkg.train --lr 1", True),
        ("torchrun --no-python python train.py", "train.py", False),
        ("python -m torch.distributed.run --standalone train.py -m 3", "train.py -m 3", False),
        ("python -m torch.distributed.launch train.py x", f"train.py '--local-rank={RANK}' x", False),
        ("python -m torch.distributed.launch --use_env train.py x", "train.py x", False),
        ("deepspeed --num_gpus 8 train.py --deepspeed", f"train.py '--local_rank={RANK}' --deepspeed", False),
        ("deepspeed --no_local_rank --module pkg.train x", "pkg.train x", True),
        ("fabric run train.py --accelerator=gpu --devices=4 --lr 1", "train.py --lr 1", False),
        ("lightning run model --node-rank=0 --main-address=10.0.0.5 train.py --lr 1", "train.py --lr 1", False),
    ],
)
def test_script_of_a_launcher(line: str, script: str, module: bool) -> None:
    found = started(shlex.split(line))
    assert found is not None
    assert (found.script, found.module) == (shlex.split(script), module)
    assert with_local_rank([f"--local_rank={RANK}", "x"], "3") == ["--local_rank=3", "x"]


@pytest.mark.parametrize(
    "line", ["train.py", "mpirun -n 8 train.py", "python -c pass", "deepspeed --help", "fabric run --help", "python"]
)
def test_other_commands_start_nothing_that_is_known(line: str) -> None:
    assert started(shlex.split(line)) is None


def test_variables_before_a_command_are_set() -> None:
    for line in ("A=1 B='x y' python train.py C=2", "A=1 B='x y' train.py C=2"):
        found = started(shlex.split(line))
        assert found is not None
        assert (found.script, found.environment) == (["train.py", "C=2"], {"A": "1", "B": "x y"})
    assert started(["A=1", "mpirun", "-n", "8", "train.py"]) is started(["A=1"]) is None


CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
mixed_precision: bf16
num_machines: 4
num_processes: 32
"""


def test_accelerate_tells_its_script_what_its_configuration_says(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "fsdp.yaml").write_text(CONFIG, encoding="utf-8")
    found = started(["accelerate", "launch", "--config_file", str(tmp_path / "fsdp.yaml"), "train.py", "--lr", "1"])
    assert isinstance(found, Started)
    assert (found.name, found.script, found.module) == ("accelerate launch", ["train.py", "--lr", "1"], False)
    told = found.environment
    assert (told["ACCELERATE_USE_FSDP"], told["FSDP_VERSION"]) == ("true", "2")
    assert told["ACCELERATE_MIXED_PRECISION"] == "bf16"
    zero = started(["accelerate", "launch", "--use_deepspeed", "--zero_stage", "3", "-m", "pkg.train"])
    assert zero is not None
    assert (zero.script, zero.module) == (["pkg.train"], True)
    assert zero.environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"


def test_fabric_tells_its_script_what_its_options_say(tmp_path: Path) -> None:
    found = started(["fabric", "run", "--precision", "bf16-mixed", "train.py", "--strategy=fsdp", "--num_nodes", "4"])
    assert found is not None
    assert found.environment == {"LT_CLI_USED": "1", "LT_PRECISION": "bf16-mixed", "LT_STRATEGY": "fsdp"}
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch\nprint(os.environ['LT_DEVICES'], os.environ['LT_NUM_NODES'])\n"
        "weight = torch.nn.Parameter(torch.ones(4, device='cuda'))\n"
        "weight.sum().backward()\ntorch.optim.SGD([weight]).step()\n"
    )
    ended = simulate("dgx-h100:2", "fabric", "run", script, "--devices=4", options=("--live", "1"))
    assert ended.out.splitlines()[0] == "8 2"
    assert "fabric run is read, not run: the cluster says which ranks there are" in ended.err


def test_simulated_script_gets_what_its_launcher_would_add(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch\nprint(os.environ['RANK'], *sys.argv[1:])\n"
        "weight = torch.nn.Parameter(torch.ones(4, device='cuda'))\n"
        "weight.sum().backward()\ntorch.optim.SGD([weight]).step()\n"
    )
    line = ("-m", "torch.distributed.launch", "--nproc_per_node=4", script, "--lr", "1")
    ended = simulate("dgx-h100:1", "python", *line, options=("--live", "2"))
    assert sorted(ended.out.splitlines()[:2]) == ["0 --local-rank=0 --lr 1", "1 --local-rank=1 --lr 1"]
    assert "torch.distributed.launch is read, not run: the cluster says which ranks there are" in ended.err
