"""``nvidia-smi`` in a simulation answers as the real one does, for the simulated GPUs."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from foretrain.live.device.nvidia_smi import ServerGpu, install, main
from tests.live.command import on_gpus

GPUS = [ServerGpu(index, "NVIDIA H100 80GB HBM3", 81559, 1024, "9.0", "12.8") for index in range(2)]


@pytest.mark.parametrize(
    ("arguments", "status", "out"),
    [
        (
            "--query-gpu=index,name,memory.total,power.draw --format=csv",
            0,
            "index, name, memory.total [MiB], power.draw\n"
            "0, NVIDIA H100 80GB HBM3, 81559 MiB, [N/A]\n1, NVIDIA H100 80GB HBM3, 81559 MiB, [N/A]\n",
        ),
        ("--query-gpu memory.free,count -i 1 --format csv,noheader,nounits", 0, "80535, 1\n"),
        ("--query-gpu=utilization.gpu --format=csv,noheader --id=0", 0, "0 %\n"),
        (
            "-L",
            0,
            "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-000000000000)\n"
            "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-000000000001)\n",
        ),
        ("--query-compute-apps=pid,used_memory --format=csv", 0, "pid, used_memory\n"),
        ("--query-gpu=pci.bus,pci.device,serial -i 1 --format csv,noheader", 0, "0x02, 0x00, [N/A]\n"),
        ("-i 7", 6, "No devices were found\n"),
        ("--query-gpu=colour --format=csv", 2, 'Field "colour" is not a valid field to query.\n'),
        ("--query-gpu=name", 2, '"--format=" switch is missing. Write --format=csv, --format=csv,noheader or so\n'),
        (
            "topo -m",
            2,
            "topo -m: a simulated nvidia-smi answers a plain call, -L, -i, and --query-gpu=FIELDS"
            " --format=csv[,noheader][,nounits]\n",
        ),
    ],
)
def test_answer(arguments: str, status: int, out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(str(tmp_path), GPUS)
    assert main(str(tmp_path / "gpus.json"), arguments.split()) == status
    assert "".join(capsys.readouterr()) == out


def test_table_has_a_row_for_each_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(str(tmp_path), GPUS)
    assert main(str(tmp_path / "gpus.json"), []) == 0
    _, *table = capsys.readouterr().out.splitlines()
    assert {len(line) for line in table} == {91}
    assert sum("NVIDIA H100 80GB HBM3" in line for line in table) == 2
    assert "CUDA Version: 12.8" in table[1]


@on_gpus(cluster="dgx-h100:1,ranks=0-1")
def test_scripts_find_the_command_on_their_path() -> None:
    import subprocess

    line = "nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits"
    found = subprocess.run(line.split(), capture_output=True, text=True, check=True).stdout.splitlines()
    about = torch.cuda.get_device_properties(0)
    assert found == [f"{about.name}, {about.total_memory >> 20}"] * 2


@on_gpus(cluster="dgx-h100:1,ranks=0-3")
def test_pynvml_answers_for_the_gpus_of_the_server() -> None:
    import pynvml
    import pytest
    import torch
    from pynvml import nvmlDeviceGetHandleByIndex, nvmlInit

    nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == torch.cuda.device_count()
    torch.ones(1 << 28, device="cuda")
    handle = nvmlDeviceGetHandleByIndex(0)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    assert (memory.free, memory.total) == torch.cuda.mem_get_info(0)
    assert memory.used == torch.cuda.device_memory_used(0) > 1 << 30
    assert pynvml.nvmlDeviceGetName(handle) == torch.cuda.get_device_name(0)
    assert pynvml.nvmlDeviceGetHandleByUUID(pynvml.nvmlDeviceGetUUID(handle)) == handle
    assert torch.cuda.list_gpu_processes(0) == "GPU:0\nno processes are running"
    for ask in (nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetName, pynvml.nvmlDeviceGetMemoryInfo):
        with pytest.raises(pynvml.NVMLError_InvalidArgument, match="there is no GPU 99"):
            ask(99)
    core, memory = (
        pynvml.nvmlDeviceGetClockInfo(handle, kind) for kind in (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)
    )
    assert core < memory
    with pytest.raises(pynvml.NVMLError, match="a simulated GPU has no 'nvmlDeviceReset'; it has: "):
        pynvml.nvmlDeviceReset(handle)
