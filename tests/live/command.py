"""Run ``foretrain simulate`` as a user does, of files in `SCRIPTS` or of the bodies of functions."""

from __future__ import annotations

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.live import forked

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Ended:
    """How a command ended: ``numbers`` are what --json has written, empty where nothing was."""

    status: int
    out: str
    err: str
    numbers: dict[str, Any]

    @property
    def lines(self) -> list[Any]:
        """What ranks have printed as JSON, two perhaps in a line: Python without buffers writes its end by itself."""
        found, decoder = [], json.JSONDecoder()
        for line in self.out.splitlines():
            at = 0
            while line.startswith("{", at):
                value, at = decoder.raw_decode(line, at)
                found.append(value)
        return found


def command(cluster: str, script: object, *arguments: object, options: Sequence[object] = ()) -> list[str]:
    """The command line; a script of `SCRIPTS` is known by its name."""
    path = SCRIPTS / str(script) if (SCRIPTS / str(script)).exists() else script
    simulated = [sys.executable, "-m", "foretrain", "simulate", "--cluster", cluster]
    return [*simulated, *map(str, options), "--", *map(str, (path, *arguments))]


def simulate(
    cluster: str,
    script: object,
    *arguments: object,
    options: Sequence[object] = (),
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    status: int = 0,
) -> Ended:
    """Run it to its end, which must have ``status``, in a warm interpreter, or with ``environment`` in one of its own.

    Of a function, the body is the script: as ``__main__``, with the usual imports before it, in a process group unless
    it makes its own, and with an optimizer's step behind it unless it makes some.
    """
    _require_device()
    with tempfile.TemporaryDirectory() as scratch:
        numbers = Path(scratch, "numbers.json")
        if inspect.isfunction(script):
            text = script_of(script)
            script = Path(scratch, "script.py")
            script.write_text(text, encoding="utf-8")
        line = command(cluster, script, *arguments, options=[*options, "--json", numbers])
        if environment is None:
            ended = warm.run(forked.simulate, line[line.index("simulate") + 1 :], folder)
        else:
            own = os.environ | {"COLUMNS": "200"} | dict(environment)
            ended = subprocess.run(line, capture_output=True, text=True, check=False, env=own, cwd=folder)
        found = json.loads(numbers.read_text()) if numbers.exists() else {}
    assert ended.returncode == status, ended.stdout + ended.stderr
    return Ended(ended.returncode, ended.stdout, ended.stderr, found)


def on_gpus(*options: object, cluster: str = "dgx-h100:1", says: str = "") -> Callable[[Callable[[], None]], Any]:
    """Decorator of a test whose body is a script for simulated GPUs; the command's output must contain ``says``."""

    def decorate(body: Callable[[], None]) -> Callable[[], None]:
        def test() -> None:
            ended = simulate(cluster, body, options=options)
            assert says in ended.out + ended.err

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        return test

    return decorate


def script_of(body: Callable[..., None]) -> str:
    """The body of a function as a script."""
    source = textwrap.dedent(inspect.getsource(body))
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    text = textwrap.dedent("\n".join(source.splitlines()[function.body[0].lineno - 1 :]))
    begin = _IMPORTS + ("" if "init_process_group" in text else _GROUP)
    return begin + text + ("\n" if "optim" in text else _STEP)


_IMPORTS = """\
import json, os, sys, time
import torch
import torch.distributed as dist
from torch import nn
"""
_GROUP = """\
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
"""
_STEP = """
weight = nn.Parameter(torch.ones(1, device="cuda"))
weight.sum().backward()
torch.optim.SGD([weight]).step()
"""


@cache
def _require_device() -> None:
    """Have the simulated GPU compiled, or skip the test."""
    pytest.importorskip("torch")
    if not any(map(shutil.which, ("g++", "clang++"))):
        pytest.skip("the simulated GPU is C++, and there is no compiler: install g++")
    from foretrain.live.device.native_build import built

    built()
