"""Examples of trainers end with the loss that they have without a schedule; recipes of clusters are well-formed."""

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import yaml
from torch import nn

from foretrain.cli.arguments import split_script
from foretrain.comm.coordinator.handshake import SECRET
from tests.examples.torchrun import ROOT, forked
from tests.launch.forked import foretrain_run
from tests.processes import finished

TRAINERS = ROOT / "examples" / "trainers"
SCHEDULE = "bytescheduler(partition=32KiB,credit=64KiB)"


RAY = {
    "RAY_AUTH_MODE": "disabled",
    # Processes that nothing here needs, some of which import PyTorch.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def python(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an example in a folder where its trainer may leave files."""
    command = [sys.executable, *map(str, arguments)]
    with TemporaryDirectory() as ray:  # the paths of its sockets must be short
        environment = os.environ | RAY | {"RAY_TMPDIR": ray}
        done = finished(command, timeout=600, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def loss(text: str) -> str:
    [found] = re.findall(r"^loss .* steps$", text, re.MULTILINE)
    return found


def test_hugging_face_trains_alike_under_a_schedule(tmp_path):
    script = TRAINERS / "hugging_face.py"
    imported = ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2")
    plain = forked(script, folder=tmp_path, imported=imported)
    scheduled = foretrain_run("--schedule", SCHEDULE, "--", script, folder=tmp_path, imported=imported)
    assert scheduled.returncode == 0, scheduled.stderr
    assert f"GPT2LMHeadModel under {SCHEDULE.split('(')[0]}" in scheduled.stderr
    assert loss(scheduled.stdout) == loss(plain.stdout)


def test_lightning_trains_alike_under_a_schedule(tmp_path):
    script = TRAINERS / "lightning_strategy.py"
    scheduled = python(script, SCHEDULE, folder=tmp_path)
    assert scheduled.stderr.count("foretrain: Rings under bytescheduler") == 1
    # Lightning starts no processes where LOCAL_RANK is set.
    assert loss(scheduled.stdout) == loss(forked(script, "ddp", folder=tmp_path, imported=("lightning",)).stdout)


def two_halves() -> float:
    """The loss of rank 0 in the last step of Ray's example, with both ranks' gradients from one process."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.003)
    angle, ring = torch.rand(64) * 6.283, torch.randint(2, (64,))
    points = torch.stack(((1 + ring) * angle.cos(), (1 + ring) * angle.sin()), dim=1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses = [
            nn.functional.cross_entropy(network(points[half]), ring[half])
            for half in (slice(0, None, 2), slice(1, None, 2))
        ]
        (sum(losses) / 2).backward()
        optimizer.step()
    return losses[0].item()


def test_ray_sums_the_gradients_of_its_workers(tmp_path):
    told = loss(python(TRAINERS / "ray_train.py", SCHEDULE, folder=tmp_path).stdout)
    assert float(told.split()[1]) == pytest.approx(two_halves(), rel=1e-3)


def test_slurm_starts_one_torchrun_a_node(tmp_path):
    for name, text in (("scontrol", "echo first; echo second"), ("srun", 'echo "$FORETRAIN_SECRET"; echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "[first,second]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    environment = os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", TRAINERS / "slurm.sh", "train.py", "--lr", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    secret, started = done.stdout.splitlines()
    assert len(bytes.fromhex(secret)) == 32
    assert started.startswith("foretrain run --nnodes 2 --nproc 8 --rdzv-backend c10d --rdzv-endpoint first:29500")
    assert started.endswith("--schedule auto -- train.py --lr 1")


@pytest.mark.process  # two seconds to import
def test_the_manifest_has_no_field_that_its_schemas_do_not():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for schema, manifest in zip(
        (models.IoK8sApiCoreV1Secret, models.TrainerV1alpha1TrainJob),
        yaml.safe_load_all((TRAINERS / "kubernetes.yaml").read_text()),
        strict=True,
    ):
        assert (
            schema.from_dict(manifest).to_dict() == manifest
        )  # values of wrong types raise, unknown fields are left out


def test_the_manifest_gives_the_job_its_secret():
    secret, job = yaml.safe_load_all((TRAINERS / "kubernetes.yaml").read_text())
    trainer = job["spec"]["trainer"]
    (given,) = trainer["env"]
    source = given["valueFrom"]["secretKeyRef"]
    assert given["name"] == SECRET
    assert source["name"] == secret["metadata"]["name"]
    assert source["key"] in secret["stringData"]
    assert int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]) == trainer["numProcPerNode"]
    command, run, *arguments = trainer["command"]
    assert (command, run) == ("foretrain", "run")
    assert split_script(arguments, "")[1] == ["train.py"]
