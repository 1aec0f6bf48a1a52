"""Collectives of MPI, between ranks that mpiexec starts: alone, under a session, and under PyTorch."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from foretrain.comm.rendezvous import free_port

pytest.importorskip("mpi4py", reason="needs mpi4py and an MPI: pip install 'foretrain[mpi]'")
JOB = Path(__file__).with_name("mpi_job.py")


@pytest.mark.process
def test_sums_of_ranks_that_mpiexec_starts(tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if (mpiexec := shutil.which("mpiexec", path=path)) is None:
        pytest.skip("needs mpiexec: pip install 'foretrain[mpi]'")
    environment = os.environ | {
        "FORETRAIN_ADDRESS": f"127.0.0.1:{free_port()}",
        "FORETRAIN_SECRET": secrets.token_hex(32),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [mpiexec, "-n", "2", sys.executable, str(JOB), f"file://{tmp_path}/store"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split("\n")) == ["", "rank 0 is done", "rank 1 is done"]
