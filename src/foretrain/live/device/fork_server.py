"""Fork server of all simulated ranks: PyTorch imported and the device activated once.

Modules of PyTorch that the script will import are imported before the fork, so that ranks share them: FSDP and
pipelining take half a second each. So are installed libraries where several ranks will import them
(`foretrain.live.device.preload`).

# Note [Protocol of the fork server]
``python -m foretrain.live.device.fork_server FD`` serves the process that started it over the socket FD, in lines of
JSON. It is told ``{"settings": …}`` once and then ``{"fork": rank}`` with a socket for that rank beside it; it tells
``{"building": [seconds, all]}``, ``{"ready": true}``, ``{"forked": rank, "pid": …}``, ``{"ended": rank, "status": …}``
with a negative signal number for a rank that was killed, or ``{"failed": "why"}``. It leads a process group of its own,
which holds its ranks, their workers, and compilers. When its socket closes, or who started it dies, it removes the
folder of the run and ends the group; and the kernel ends a rank when the fork server dies.

With ``--warm`` before FD it forks fork servers instead, one for each message ``{"settings": …}``, with two descriptors
beside it: the socket that the fork server serves, and what its ranks write to. It tells ``{"forked": pid, "cpu":
seconds}``, the CPU time that preparing it took. Simulations that differ in their arguments alone share more than
PyTorch's import: a *template*, a process in which the device is activated, and all is imported that the script will
import of PyTorch and of installed libraries. It forks their fork servers.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from foretrain.errors import ForetrainError
from foretrain.live.device import native_build, preload
from foretrain.live.device.settings import RankSettings

_SET_DEATH_SIGNAL = 1
"""Linux's PR_SET_PDEATHSIG."""
_LINE = 1 << 16
_STACK = 64 << 20


def main(descriptor: int, activated: ModuleType | None = None) -> None:
    """Serve until the socket closes; ``activated`` is the device where this process was forked from a template."""
    signal.signal(signal.SIGTERM, lambda *_: _end_group())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process decides what ends
    _die_with_parent(signal.SIGTERM)
    _deepen_stack()
    with socket.socket(fileno=descriptor) as control:
        try:
            told, _ = _receive(control)
            if not told:
                return
            settings = RankSettings.from_json(json.loads(told)["settings"])
            signal.signal(signal.SIGTERM, lambda *_: _end_group(settings))
            device = activated or native_build.load(lambda done, every: _send(control, building=[done, every]))
            if activated is None:
                _activate(device, settings)
            _prepare_run(settings)
        except (ForetrainError, ImportError, OSError) as error:
            _send(control, failed=str(error))
            return
        _send(control, ready=True)
        forker = _RankForker(control, device, settings)
        # A template has imported them already, and one rank alone would gain nothing.
        without = activated is not None or settings.live == 1
        if without or not _serve_with_libraries(device, settings, lambda _: forker.serve()):
            forker.serve()
    _end_group(settings)


def serve_warm(descriptor: int) -> None:
    """Import what every fork server needs, and fork one for each message until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps them
    _die_with_parent(signal.SIGKILL)
    with socket.socket(fileno=descriptor) as control:
        preload.import_all([*preload.ALWAYS, *preload.OFTEN])
        gc.freeze()
        templates: dict[RankSettings, socket.socket] = {}
        while True:
            told, descriptors = _receive(control)
            if not told:
                return
            settings = RankSettings.from_json(json.loads(told)["settings"]).of_device()
            if settings not in templates:
                templates[settings] = _fork_template(settings, descriptors, [control, *templates.values()])
            socket.send_fds(templates[settings], [b"{}"], descriptors)
            for each in descriptors:
                os.close(each)
            control.sendall(templates[settings].recv(_LINE))


def _fork_template(
    settings: RankSettings, descriptors: Sequence[int], inherited: Iterable[socket.socket]
) -> socket.socket:
    """Fork a process that activates the device, and forks a fork server for each message over the returned socket.

    It writes where the first of these writes to, and keeps neither that one's ``descriptors`` nor ``inherited`` open.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return ours
    try:
        _die_with_parent(signal.SIGKILL)
        for each in (ours, *inherited):
            each.close()
        _write_to(descriptors[1])
        for each in descriptors:
            os.close(each)
        _serve_template(theirs, settings)
    finally:
        os._exit(1)


def _serve_template(control: socket.socket, settings: RankSettings) -> None:
    """Serve with the script's libraries imported, where processes forked then may share them; else without."""
    _deepen_stack()
    device = None
    with suppress(Exception):  # the fork server meets it again, and tells
        loaded = native_build.load()
        _activate(loaded, settings)
        device = loaded
        if _serve_with_libraries(loaded, settings, lambda prepared: _serve_forks(control, loaded, prepared)):
            return
    _serve_forks(control, device)


def _serve_with_libraries(device: ModuleType, settings: RankSettings, serve: Callable[[float], None]) -> bool:
    """Import the script's libraries in a process of its own, and serve there; return when it has ended.

    Return False if ranks may not be forked from such a process: see Note [Shared libraries] in
    `foretrain.live.device.preload`. ``serve`` is given the CPU seconds that its parent has computed.
    """
    preload.preload_compiler(settings)
    libraries = preload.libraries_of(settings)
    if not libraries:
        return False
    prepared = time.process_time()
    heard, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _die_with_parent(signal.SIGKILL)
            os.close(heard)
            if preload.import_libraries(libraries, settings, lambda: (device.counts(), device.memory_needed(0))):
                os.write(told, b"+")
                os.close(told)
                gc.collect()
                gc.freeze()  # else the first collection in a rank would touch, and so copy, every object
                serve(prepared)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)  # also where a library ends the process
    os.close(told)
    serves = os.read(heard, 1)
    os.close(heard)
    with suppress(ChildProcessError):  # the system reaps it
        os.waitpid(pid, 0)
    return bool(serves)


def _serve_forks(control: socket.socket, device: ModuleType | None, prepared: float = 0.0) -> None:
    """Fork a fork server for each message; ``prepared`` are the seconds that this process's parent has computed."""
    computed = -prepared
    while True:
        told, descriptors = _receive(control)
        if not told:
            return
        served, output = descriptors
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_fork_server(served, output, device)
        os.close(served)
        os.close(output)
        before, computed = computed, time.process_time()
        _send(control, forked=pid, cpu=computed - before)


def _become_fork_server(served: int, output: int, activated: ModuleType | None) -> None:
    """Serve as a fork server does, in a process that was forked for it; never returns."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        _write_to(output)
        os.close(output)
        main(served, activated)
        status = 0
    except BaseException as error:
        sys.stderr.write(f"foretrain: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(status)


def _write_to(output: int) -> None:
    for stream in (1, 2):
        os.dup2(output, stream)


def _activate(device: ModuleType, settings: RankSettings) -> None:
    """Activate the device, and import what the script will import, so that ranks share it."""
    from foretrain.live.device import rank

    rank.activate(device, settings)
    preload.preload(settings)
    if settings.schedule is not None:
        importlib.import_module("torch._dynamo.trace_rules")  # what follows needs it, and it takes long

        importlib.import_module("foretrain.live.device.simulated_ddp")
    gc.collect()
    gc.freeze()  # else the first collection in a rank would touch, and so copy, every object


def _prepare_run(settings: RankSettings) -> None:
    from foretrain.live.device import rank

    rank.prepare_run(settings)


class _RankForker:
    """Fork ranks, and report their exits over the control socket."""

    def __init__(self, control: socket.socket, device: ModuleType, settings: RankSettings) -> None:
        self._control, self._device, self._settings = control, device, settings
        self._ranks: dict[int, int] = {}

    def serve(self) -> None:
        """Serve until the other end of the control socket is closed."""
        wakeup, notify = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(notify, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as ready:
            ready.register(self._control, selectors.EVENT_READ)
            ready.register(wakeup, selectors.EVENT_READ)
            while self._handle({key.fileobj for key, _ in ready.select()}, wakeup):
                pass

    def _handle(self, ready: set[Any], wakeup: int) -> bool:
        if wakeup in ready:
            with suppress(BlockingIOError):
                os.read(wakeup, 1024)
            self._reap()
        if self._control in ready:
            text, descriptors = _receive(self._control)
            if not text:
                return False
            self._fork(json.loads(text)["fork"], descriptors[0])
        return True

    def _fork(self, rank: int, descriptor: int) -> None:
        pid = os.fork()
        if pid == 0:
            self._run_rank(rank, descriptor)
        os.close(descriptor)
        self._ranks[pid] = rank
        _send(self._control, forked=rank, pid=pid)

    def _run_rank(self, rank: int, descriptor: int) -> None:
        """Run the rank from begin to end; never returns."""
        from foretrain.live.device.rank import run
        from foretrain.live.device.script import SimulationEnded

        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _die_with_parent(signal.SIGKILL)
            self._control.close()
            status = run(self._device, self._settings, rank, descriptor)
        except SimulationEnded:
            pass  # the executor has ended the simulation, and its command says why
        except BaseException as error:
            sys.stderr.write(f"foretrain: rank {rank}: {error}\n")
            sys.stderr.flush()
        finally:
            os._exit(status & 0xFF)

    def _reap(self) -> None:
        while self._ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if pid in self._ranks:
                _send(self._control, ended=self._ranks.pop(pid), status=os.waitstatus_to_exitcode(status))


def _end_group(settings: RankSettings | None = None) -> None:
    """End everything that was started here, this process included."""
    if settings is not None:
        for path in (settings.store, settings.operators):
            if path:
                shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(143)


def _deepen_stack() -> None:
    """Raise the stack's limit, which ranks inherit: Dynamo's tracing recurses further than the usual 8 MiB."""
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = _STACK if most == resource.RLIM_INFINITY else min(most, _STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, most))


def _receive(control: socket.socket) -> tuple[str, list[int]]:
    """Return one message and the sockets beside it; empty when the other end is closed."""
    try:
        data, descriptors, _, _ = socket.recv_fds(control, _LINE, 2)
    except ConnectionResetError:  # closed before it had read all that we told
        return "", []
    return data.decode(), descriptors


def _send(control: socket.socket, **message: Any) -> None:
    with suppress(BrokenPipeError):
        control.sendall(json.dumps(message).encode())


def _die_with_parent(number: int) -> None:
    """Ask the system, where it can, for signal ``number`` when the parent dies."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, number)


if __name__ == "__main__":
    serve_warm(int(sys.argv[2])) if sys.argv[1] == "--warm" else main(int(sys.argv[1]))
