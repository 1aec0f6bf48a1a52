"""Calibration as a user does it, and what a simulation makes of it."""

import json
from pathlib import Path

import pytest
import torch

from foretrain.device import calibration, calls
from foretrain.device.calls import OperatorCall, contiguous
from tests import warm
from tests.live import forked

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.GELU())
model = nn.parallel.DistributedDataParallel(net.to(device))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    loss = nn.functional.cross_entropy(model(torch.randn(2, 3, 8, 8, device=device)), torch.arange(2, device=device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""


def foretrain(*arguments: object, status: int = 0) -> str:
    """Return what the command writes; its messages where it is to fail."""
    done = warm.run(forked.foretrain, [*map(str, arguments)], timeout=900)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


@pytest.fixture(scope="module")
def cpu(tmp_path_factory) -> Path:
    """A quick calibration of this machine's CPU."""
    path = tmp_path_factory.mktemp("calibrate") / "cpu.json"
    told = foretrain("calibrate", "--device", "cpu", "--quick", "--out", path)
    assert "could not be repeated" not in told
    return path


def test_a_quick_calibration_describes_the_cpu(cpu):
    found = calibration.load(cpu)
    device = found.described()
    assert (device.name, device.serial, device.product) == ("CPU", True, found.device)
    assert "1 thread, 1 of them at once" in found.stack
    assert found.measured
    assert found.calls


def announced(*arguments: object) -> str:
    done = warm.run(forked.foretrain, ["calibrate", "--device", "cpu", "--quick", *map(str, arguments)], timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[0]


def test_it_is_said_at_once_what_is_measured_written_and_replaced(tmp_path):
    told, out = tmp_path / "operators.json", tmp_path / "out.json"
    calls.dump([OperatorCall("aten::relu", (contiguous((16,), "float32"),))], told)
    first = announced("--operators", told, "--out", out)
    assert first.startswith("foretrain: measuring 1 operator and those that describe the device, of ")
    assert first.endswith(f" for {out}; takes some seconds")
    assert f"for {out}, which is replaced (--merge {out} would add to it); " in announced("--out", out)
    described = first.replace(" and those that describe the device,", "")
    assert announced("--operators", told, "--merge", out) == described  # the file describes the device already


def test_operators_are_added_to_a_file_and_measured_anew(cpu, tmp_path):
    one, other = (OperatorCall("aten::relu", (contiguous((size,), "float32"),)) for size in (16, 32))
    told, out = tmp_path / "operators.json", tmp_path / "out.json"
    calls.dump([one, other, OperatorCall("aten::no_such", ())], told)
    shown = foretrain("calibrate", "--device", "cpu", "--quick", "--operators", told, "--merge", cpu, "--out", out)
    assert "1 could not be repeated here, and will be modelled:\n  no_such(): " in shown
    before, after = calibration.load(cpu), calibration.load(out)
    assert [found.call for found in after.calls] == [*(found.call for found in before.calls), one, other]
    assert after.measured == before.measured
    assert after.description == before.description


def test_files_of_another_device_or_load_and_broken_ones_are_refused(cpu, tmp_path, refused):
    text = cpu.read_text()
    other = tmp_path / "other.json"
    found = calibration.load(cpu)
    other.write_text(text.replace(f'"device": "{found.device}"', '"device": "Another"', 1))
    common = ("calibrate", "--device", "cpu", "--quick", "--merge")
    assert "device: 'Another' differs from" in refused((*common, str(other)))
    assert "2 of them at once" in refused((*common, str(cpu), "--processes", "2"))
    other.write_text(text[: len(text) // 2])
    assert "is not JSON" in refused((*common, str(other)))
    assert "is not JSON" in refused(("simulate", "--device", str(other), "--", __file__))
    cluster = ("--cluster", "dgx-h100:1", "--device", str(cpu))
    assert "not of the cluster's H100" in refused(("simulate", *cluster, "--", __file__))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--operators", "none.json"), "operators: 'none.json' cannot be read"),
        (("--merge", "none.json"), "'none.json' cannot be read"),
        (("--threads", "0"), "threads: 0 is below 1"),
        (("--load", "no.such"), "load: 'no.such' cannot be imported"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(arguments, message, refused):
    assert message in refused(("calibrate", "--device", "cpu", *arguments))


def test_a_gpu_that_is_not_here_is_refused(refused):
    if torch.cuda.is_available():  # not asked where this module is imported: CUDA of forks of who asks is unusable
        pytest.skip("there is a GPU")
    assert "device: 'cuda' is not available; install" in refused(("calibrate", "--device", "cuda"))


OPERATORS = """
import torch

@torch.library.custom_op("operators_of_mine::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x
"""


def test_operators_of_a_module_are_measured_if_it_is_loaded_and_kernels_of_others_are_not(cpu, tmp_path, monkeypatch):
    (tmp_path / "operators_of_mine.py").write_text(OPERATORS)
    told, out = tmp_path / "operators.json", tmp_path / "out.json"
    square = contiguous((64, 64), "float32")
    calls.dump([OperatorCall(name, (square,)) for name in ("operators_of_mine::twice", "mylib.scan_kernel")], told)
    monkeypatch.chdir(tmp_path)
    options = ("--operators", told, "--merge", cpu, "--out", out, "--load", "operators_of_mine")
    shown = foretrain("calibrate", "--device", "cpu", "--quick", *options)
    assert "1 could not be repeated here" in shown
    assert "only its library knows how to call it" in shown
    assert [found.call.operator for found in calibration.load(out).calls][-1] == "operators_of_mine::twice"


def test_all_that_a_script_launches_is_measured_and_then_forecast(cpu, tmp_path):
    script, told, out, numbers = (tmp_path / name for name in ("train.py", "operators.json", "out.json", "n.json"))
    script.write_text(SCRIPT)
    place = ("--cluster", "star:2@1Gbps")
    foretrain("simulate", *place, "--device", cpu, "--record-operators", told, "--", script)
    recorded = [call for call in calls.load(told) if not call.operator.startswith("Memcpy")]
    names = {call.operator.removeprefix("aten::") for call in recorded}
    assert {"convolution", "convolution_backward", "addmm", "native_batch_norm", "gelu_backward"} <= names
    assert not any(name.startswith("_foreach") for name in names), "optimizers go through lists on GPUs only"
    shown = foretrain("calibrate", "--device", "cpu", "--quick", "--operators", told, "--merge", cpu, "--out", out)
    assert "could not be repeated" not in shown
    assert {call.key for call in recorded} <= {found.call.key for found in calibration.load(out).calls}
    shown = foretrain("simulate", *place, "--device", out, "--json", numbers, "--", script)
    assert "100% measured" in shown
    found = json.loads(numbers.read_text())
    assert found["device"] == "CPU"
    assert found["iteration_time"] > 0
