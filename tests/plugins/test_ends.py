"""Ranks under each framework that are killed, interrupted, stop early, or train another model: the others say who."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from foretrain.comm.rendezvous import free_port
from tests.processes import need, own_environment, python_of_mxnet, started

pytestmark = pytest.mark.process
JOBS = Path(__file__).parent


@pytest.mark.parametrize(
    ("framework", "how", "said"),
    [
        ("keras", "killed", r"\w+: .*rank 1"),
        ("keras", "stops", r"\w+: .*rank 1"),
        ("keras", "interrupted", r"\w+: .*rank 1.*KeyboardInterrupt"),
        ("jax", "killed", r"\w+: .*rank 1"),
        ("jax", "interrupted", r"\w+: .*rank 1.*KeyboardInterrupt"),
        ("jax", "another", r"Disagreement: .*rank 1"),
        ("mxnet", "killed", r"\w+: .*rank 1"),
        ("mxnet", "stops", r"\w+: .*rank 1"),
        ("mxnet", "interrupted", r"\w+: .*rank 1.*KeyboardInterrupt"),
        ("mxnet", "another", r"Disagreement: .*rank 1"),
    ],
)
def test_ranks_that_are_left_alone_name_the_one_that_is_gone(framework, how, said):
    if framework == "mxnet":
        python, environment = python_of_mxnet(), own_environment()
    else:
        need({"keras": "tensorflow"}.get(framework, framework), framework)
        python, environment = sys.executable, dict(os.environ)
    address = f"127.0.0.1:{free_port()}"
    common = environment | {
        "WORLD_SIZE": "2",
        "FORETRAIN_ADDRESS": address,
        "FORETRAIN_SECRET": secrets.token_hex(32),
    }
    with ExitStack() as stack:
        command = [python, str(JOBS / "ending_job.py"), framework, how]
        ranks = [
            stack.enter_context(
                started(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=common | {"RANK": str(rank)}
                )
            )
            for rank in range(2)
        ]
        ends = [rank.communicate(timeout=300) for rank in ranks]
    assert re.search(f"rank 0: {said}", ends[0][0], re.DOTALL), ends
