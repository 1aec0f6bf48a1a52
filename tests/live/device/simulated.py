"""Runs small scripts on simulated GPUs."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests import warm
from tests.live import forked


def simulated(
    folder: Path, script: str, *options: str, cluster: str = "dgx-h100:1"
) -> subprocess.CompletedProcess[str]:
    """``foretrain simulate`` of ``script``, which must end well; it has to step an optimizer, if only of one weight."""
    pytest.importorskip("torch")
    if not any(map(shutil.which, ("g++", "clang++"))):
        pytest.skip("the simulated GPU is C++, and there is no compiler: install g++")
    path = folder / "script.py"
    path.write_text(textwrap.dedent(_BEGIN) + textwrap.dedent(script) + textwrap.dedent(_END), encoding="utf-8")
    done = warm.run(forked.simulate, ["--cluster", cluster, *options, "--", str(path)])
    assert done.returncode == 0, done.stdout + done.stderr
    return done


_BEGIN = """
    import os
    import torch
    import torch.distributed as dist
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
"""
_END = """
    weight = torch.nn.Parameter(torch.ones(1, device="cuda"))
    weight.sum().backward()
    torch.optim.SGD([weight]).step()
"""
