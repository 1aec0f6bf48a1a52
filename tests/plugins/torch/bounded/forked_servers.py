"""Servers that sum under bounded loss, in processes that are forked with PyTorch imported. The rest is as for users.

One that updates parameters imports PyTorch first, which takes longer than all that most tests do with it. A process
that the nursery of `tests.plugins.torch.ranks` forks before all ranks forks the servers: ranks have threads of gloo's.
"""

from __future__ import annotations

import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from foretrain.comm.bounded import server
from tests.plugins.torch import ranks
from tests.plugins.torch.ranks import Outcome, Ranks


class ForkedServers:
    """A job whose functions start such servers."""

    def __init__(self, job: Ranks) -> None:
        self._job = job

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return self._job(_call, function, *args, **options)

    def outcomes(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Outcome]:
        return self._job.outcomes(_call, function, *args, **options)


def _call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    started = SimpleNamespace(Popen=_Forked, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "subprocess", started)
        return function(*args, **options)


class _Forked:
    """What `foretrain.comm.bounded.server` asks of the process of a server."""

    def __init__(self, command: Sequence[str], **_: Any) -> None:
        (source, stdin), (stdout, answers), (ended, told) = os.pipe(), os.pipe(), os.pipe()
        asked = json.dumps({"module": command[-1], "environment": dict(os.environ)}).encode()
        socket.send_fds(ranks.forker(), [asked], [source, answers, 2, told])
        for each in (source, answers, told):
            os.close(each)
        self.stdin, self.stdout, self._ended = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), os.fdopen(ended)
        self.pid, self.returncode = int(self._ended.readline()), None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as ready:
                ready.register(self._ended, selectors.EVENT_READ)
                if not ready.select(timeout):
                    raise subprocess.TimeoutExpired("server", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(int(self._ended.readline()))
            self._ended.close()
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def serve_forks(channel: socket.socket) -> None:
    """Fork a process for each server that a rank asks for, until the nursery ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps them
    while True:
        asked, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 4)
        if not asked:
            return
        if not os.fork():
            _keep(channel, json.loads(asked), descriptors)
        for each in descriptors:
            os.close(each)


def _keep(channel: socket.socket, asked: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Fork the server, and tell its process id and how it ended: it is no child of the rank, which cannot know."""
    ranks.die_with_parent()
    channel.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *files, told = descriptors
    pid = os.fork()
    if not pid:
        os.close(told)
        _serve(asked, files)
    for each in files:
        os.close(each)
    os.write(told, b"%d\n" % pid)
    os.write(told, b"%d\n" % os.waitpid(pid, 0)[1])
    os._exit(0)


def _serve(asked: dict[str, Any], files: Sequence[int]) -> None:
    status = 1
    try:
        ranks.die_with_parent()
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ.clear()
        os.environ.update(asked["environment"])
        runpy.run_module(asked["module"], run_name="__main__")
        status = 0
    except SystemExit as left:
        status = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
