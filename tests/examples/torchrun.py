"""What torchrun does, for tests: real processes, their environment, the script as ``__main__``; all are forked."""

from __future__ import annotations

import atexit
import importlib
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from foretrain.comm.rendezvous import free_port
from tests import warm

ROOT = Path(__file__).parent.parent.parent


def torchrun(script: str, *args: object, ranks: int = 2, timeout: float = 600) -> str:
    """What ``ranks`` processes print that run ``script`` of this repository on CPU; fails as they fail."""
    return forked(ROOT / script, *args, "--device", "cpu", ranks=ranks, timeout=timeout).stdout


def forked(
    script: Path | str,
    *args: object,
    ranks: int = 2,
    folder: Path | None = None,
    imported: Sequence[str] = (),
    timeout: float = 600,
) -> subprocess.CompletedProcess[str]:
    """How ``ranks`` processes ended that run ``script`` in ``folder``; fails as they fail.

    ``imported`` are modules that take the script long to import: one process does, and forks the ranks.
    """
    told = [str(ranks), ",".join(imported), str(script), *map(str, args)]
    ran = warm.run(_launch, told, folder, timeout)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran


def ended(
    script: Path | str, *args: object, folder: Path | None = None, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """How two ranks ended that, unlike those of `forked`, go through the shutdown of the interpreter."""
    ran = warm.run(_end, [str(script), *map(str, args)], folder, timeout, shutdown=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran


def losses(printed: str) -> list[float]:
    """The losses in what a script printed, step by step."""
    return [float(line.split("loss ")[1].split(",")[0]) for line in printed.splitlines() if "loss " in line]


def _keep(initialise: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    import torch.distributed as dist

    from foretrain.plugins.torch.process_groups import prevent_destruction

    initialise(*args, **kwargs)
    assert dist.group.WORLD is not None
    prevent_destruction(dist.group.WORLD)


def keep_groups() -> None:
    """Let no process group of scripts be destroyed, after which a process may hang; see prevent_destruction's note."""
    import torch.distributed as dist

    dist.init_process_group = partial(_keep, dist.init_process_group)


def _rank(script: str, args: list[str], rank: int) -> int:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    keep_groups()
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).absolute().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _end(told: Sequence[str]) -> None:
    """Runs rank 0 of two in this process, and rank 1 in a fork of it."""
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    other = os.fork()
    if other:
        atexit.register(_end_with, other)  # after all that the script registers
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if other else "1"
    sys.argv = list(told)
    runpy.run_path(told[0], run_name="__main__")


def _end_with(other: int) -> None:
    if os.waitpid(other, 0)[1]:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _launch(told: Sequence[str]) -> None:
    """Forks the ranks, waits for all, and ends as the first that failed does."""
    ranks, script, args = int(told[0]), told[2], list(told[3:])
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    import torch

    torch.set_num_threads(1)
    for name in filter(None, told[1].split(",")):
        importlib.import_module(name)
    children = []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            os._exit(_rank(script, args, rank))
        children.append(child)
    failed = False
    while children:
        child, status = os.wait()
        children.remove(child)
        if status and not failed:
            failed = True
            for other in children:
                os.kill(other, 9)
    sys.exit(failed)
