"""What a simulated GPU cannot do: it is named, with what to do instead."""

import os
import re
import sys

import pytest

pytest.importorskip("torch")

import torch

from foretrain.cli import main
from tests.live.command import on_gpus


@pytest.mark.smoke
@on_gpus(cluster="H100")
def test_what_is_not_simulated_is_named_with_a_remedy() -> None:
    import subprocess

    import pytest
    from torch.distributed import _symmetric_memory, rpc, run
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    from triton.runtime import driver

    large = torch.ones(1 << 20, dtype=torch.int64, device="cuda")
    runtime = torch.cuda.cudart()
    torch.library.define("mylib::shapeless", "(Tensor x) -> Tensor")
    per_channel = (large.view(8, -1).float(), *torch.ones(2, 8, device="cuda"), 0, torch.qint8)
    for words, call in (
        ("no property 'cluster_size'; it has: name, major", lambda: torch.cuda.get_device_properties(0).cluster_size),
        (r"cudart\(\): a simulated GPU has no 'cudaMalloc'; it has: cudaError, ", lambda: runtime.cudaMalloc(8)),
        ("active.utils: a simulated GPU has no 'load_binary'; it has: ", lambda: driver.active.utils.load_binary()),
        # In no build; what torch.cuda.tunable.enable() calls is in those with CUDA.
        ("'_cuda_absent': a simulated GPU does not have this", lambda: torch._C._cuda_absent()),
        ("needs the values .* give it its size where it takes one", lambda: torch.repeat_interleave(large)),
        ("has no sparse tensors, .* use dense tensors", lambda: large.to_sparse()),
        ("no shape function .* compute it on the host", lambda: torch.quantize_per_channel(*per_channel)),
        ("register one with torch.library.register_fake", lambda: torch.ops.mylib.shapeless(large)),
        ("_symmetric_memory: .* alone; use collectives", lambda: _symmetric_memory.empty(8)),
        ("init_rpc: calls from rank to rank .* are not simulated", lambda: rpc.init_rpc("worker", rank=0)),
        (
            "simulate what it starts: .* -- train.py --lr 1",
            lambda: subprocess.run(["torchrun", "train.py", "--lr", "1"]),
        ),
        ("launcher: 'torch.distributed.run'", lambda: os.system(f"{sys.executable} -m torch.distributed.run a.py")),
        ("launcher: 'accelerate'", lambda: subprocess.run("accelerate launch a.py", shell=True)),
        ("launcher: 'torchrun' .* -- a.py --lr 1", lambda: run.main(["--nproc-per-node=2", "a.py", "--lr", "1"])),
        ("'print' is to run in processes .* call it directly", lambda: elastic_launch(LaunchConfig(1, 1, 2), print)()),
    ):
        with pytest.raises((AttributeError, NotImplementedError, RuntimeError, ValueError), match=words):
            call()
    assert not hasattr(torch.cuda.get_device_properties(0), "cluster_size")
    assert not hasattr(runtime, "cudaMalloc")
    assert driver.active.utils.get_device_properties(0)["warpSize"] == 32
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_name(99)
    assert torch.cuda.get_device_name() == torch.cuda.get_device_name("cuda") == torch.cuda.get_device_name(0)
    assert torch.cuda.get_device_capability() == (9, 0)
    torch.repeat_interleave(large, output_size=1 << 20)  # as the message says
    child = os.fork()
    if child == 0:
        with pytest.raises(RuntimeError, match="a simulated rank is one process, and those that it forks have no GPU"):
            large + 1
        os._exit(7)
    assert os.waitpid(child, 0) == (child, 7 << 8)
    torch.cuda.synchronize()  # the rank itself goes on
    if os.fork() == 0:
        sys.exit(9)  # no rank leaves with it
    assert os.wait()[1] == 9 << 8


@on_gpus(cluster="dgx-h100:1,ranks=0-1", says="one process computes on cuda:0 and cuda:1, and a simulated rank has one")
def test_a_model_on_several_gpus_of_one_process_is_warned_of() -> None:
    first, second = (torch.nn.Linear(4096, 4096).to(f"cuda:{k}") for k in range(2))
    second(first(torch.ones(8, 4096, device="cuda:0")).to("cuda:1")).sum().backward()


@on_gpus(cluster="H100", says="starts a Python of its own")
def test_a_python_that_a_script_starts_is_told_to_have_no_gpu() -> None:
    import subprocess

    asked = [sys.executable, "-c", "import torch; print(torch.cuda.is_available())"]
    assert subprocess.run(asked, capture_output=True, check=True).stdout == b"False\n"


@on_gpus(cluster="H100", says="a process that the script started was refused")
def test_a_launcher_in_a_shell_script_is_refused() -> None:
    import subprocess
    from pathlib import Path

    script = Path(__file__).with_name("start.sh")
    script.write_text("set +e\n$*\nexit $?\n")
    for line, script_and_arguments in (
        ("torchrun --nproc-per-node 2 train.py --lr 1", "train.py --lr 1"),
        ("accelerate launch train.py", "train.py"),
        ("accelerate-launch train.py", "train.py"),
        ("fabric run train.py", "train.py"),
        ("deepspeed --num_gpus 2 train.py", "train.py"),
        ("python3 -u -m torch.distributed.run --nproc-per-node 2 train.py", "train.py"),
    ):
        ended = subprocess.run(["bash", script, *line.split()], capture_output=True, text=True, check=False)
        assert ended.returncode == 2
        (message,) = ended.stderr.splitlines()
        name = line.split()[0].replace("python3", "torch.distributed.run")
        assert message.startswith(f"foretrain: launcher: '{name}' starts processes")
        assert message.endswith(f"simulate what it starts: foretrain simulate -- {script_and_arguments}")
    command = "bash start.sh python3 -c print(7)"
    assert subprocess.run(command.split(), cwd=script.parent, capture_output=True, check=True).stdout == b"7\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "-- mpirun -n 8 train.py --lr 1",
            "'mpirun' starts processes .* simulate -- train.py --lr 1",
        ),
        ("-- timeout 60 torchrun train.py", "'torchrun' starts processes"),
        ("-- python -c pass", "'python' is the interpreter"),
        ("--stand-ins flash -- train.py", "stand_ins: 'flash' is unknown; did you mean 'flash_attn'"),
        ("--costs none.toml -- train.py", "costs: 'none.toml' cannot be read"),
    ],
)
def test_wrong_command_lines_are_refused(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", *arguments.split()])
    assert re.search(words, capsys.readouterr().err)
