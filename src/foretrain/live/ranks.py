"""The processes of a live simulation: a zygote, and the ranks that it forks. See `foretrain.fakecuda.zygote`."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from foretrain.errors import ForetrainError
from foretrain.fakecuda.settings import Settings

_LINE = 1 << 16
_END_WITHIN = 5.0
"""Seconds that a zygote has to end after its socket was closed."""

Building = Callable[[int, int], None]
"""Called with the number of files compiled and the number of all."""


class Ranks:
    """A zygote and its ranks, ended with this object. A context manager.

    Args:
        settings: what all ranks are told.
        building: told how far the fake device's compilation is, where it has to be compiled.

    Raises:
        ForetrainError: from `start`, if the device cannot be compiled or PyTorch is another release.
    """

    def __init__(self, settings: Settings, building: Building | None = None) -> None:
        self._settings = settings
        self._building = building or (lambda done, every: None)
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.sockets: dict[int, socket.socket] = {}
        self.pids: dict[int, int] = {}
        self.ended: dict[int, int] = {}

    def __enter__(self) -> Ranks:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fork(self, ranks: Iterable[int]) -> None:
        """Starts ``ranks``; the conductor's ends of their sockets are in ``sockets``."""
        assert self._control is not None
        for rank in ranks:
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._control, [json.dumps({"fork": rank}).encode()], [theirs.fileno()])
            self.sockets[rank] = ours
        while len(self.pids) < len(self.sockets):
            self._take(self._hear())

    def status(self, rank: int, patience: float = _END_WITHIN) -> int | None:
        """The exit status of ``rank``, negative for a signal; None if it does not end within ``patience`` s."""
        assert self._control is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._control, selectors.EVENT_READ)
            while rank not in self.ended and ready.select(patience):
                self._take(self._hear())
        return self.ended.get(rank)

    def close(self) -> None:
        """Ends all ranks and the zygote; waits until they are gone."""
        for end in self.sockets.values():
            end.close()
        if self._control is not None:
            self._control.close()
        if self._process is None:
            return
        try:
            self._process.wait(_END_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            for pid in self.pids.values():
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "foretrain.fakecuda.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONHASHSEED": "0"},  # the order of sets must not change from run to run
            )
        ours.sendall(json.dumps({"settings": self._settings.to_json()}).encode())
        while not (message := self._hear()).get("ready"):
            if "failed" in message:
                raise ForetrainError(message["failed"])
            if "building" in message:
                self._building(*message["building"])

    def _hear(self) -> dict[str, Any]:
        assert self._control is not None
        data = self._control.recv(_LINE)
        if not data:
            raise ForetrainError("the process that starts the simulated ranks has ended; what it wrote says why")
        return json.loads(data)

    def _take(self, message: dict[str, Any]) -> None:
        if "forked" in message:
            self.pids[message["forked"]] = message["pid"]
        elif "ended" in message:
            self.ended[message["ended"]] = message["status"]
