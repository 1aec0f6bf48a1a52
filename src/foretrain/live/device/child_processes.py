"""Processes that a script starts itself: ``torch.multiprocessing.spawn``, DataLoader's workers, and others.

A simulation has started one process for each rank already, and each of them runs the script from its beginning. So
where the script would ``spawn`` a process for each GPU of its server, a rank becomes the one of its own GPU. Where it
calls DeepSpeed's launcher, a rank runs the script that would be launched.

All other processes that the script starts are interpreters without a simulated GPU (or, forked, with one whose log
nobody reads). Those that prepare data need none, and no rank's clock counts their work. They are forked unless the
script chooses another way, also since Python 3.14, whose own choice imports the script anew, without a GPU. One that is
to train on a GPU gets an error that says what to do instead.
"""

from __future__ import annotations

import multiprocessing.context
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, NoReturn

import torch.multiprocessing
from torch.utils.data import DataLoader

from foretrain.errors import ConfigError
from foretrain.launch import launched
from foretrain.launch.launchers import started, with_local_rank
from foretrain.launch.worker import run_as_main
from foretrain.live.device import change_after_import, put
from foretrain.live.device.refused_launchers import note_refusal
from foretrain.live.device.script import first_to_say, script_line
from foretrain.live.device.settings import RankSettings

_LIBRARIES = ("torch.", "multiprocessing.", "concurrent.")
"""Libraries whose processes serve the script, e.g. as workers of a DataLoader or a pool."""


class WithoutGpu:
    """Target of a child process, picklable: calls the script's target, and refuses the use of a GPU.

    Args:
        target: the script's own.
        place: file and line that start the process.
        folder: of the simulation's commands, where a refusal is noted.
    """

    def __init__(self, target: Callable[..., object], place: str, folder: str) -> None:
        self._target, self._place, self._folder = target, place, folder

    def __call__(self, *args: Any, **named: Any) -> None:
        """Call the target, which cannot have a GPU."""
        import torch
        import torch.distributed as dist

        meet = dist.init_process_group

        def refuse(*_: Any, **__: Any) -> NoReturn:
            note_refusal(self._folder)
            problem = "starts a process that uses a GPU, of which the simulation does not know"
            remedy = "start none and use torchrun's RANK and LOCAL_RANK, or start them by torch.multiprocessing.spawn"
            raise ConfigError("multiprocessing.Process", self._place, problem, remedy)

        def init_process_group(backend: str | None = None, *rest: Any, **options: Any) -> None:
            if backend is None or "nccl" in backend:
                refuse()
            meet(backend, *rest, **options)

        put(torch.cuda, _lazy_init=refuse, set_device=refuse)
        for module in (dist, dist.distributed_c10d):
            put(module, init_process_group=init_process_group)
        self._target(*args, **named)


def install_child_guard(folder: str) -> None:
    """Make processes that the script starts refuse to use a GPU, and fork them where it does not choose how.

    Args:
        folder: of the simulation's commands, where a refusal is noted.
    """
    start, owner = BaseProcess.start, os.getpid()
    ways: Any = multiprocessing.context
    put(ways._default_context, _default_context=ways._concrete_contexts["fork"])

    def guarded(self: Any) -> None:
        target = self._target
        if os.getpid() == owner and target is not None and not _serves(target):
            file, line = script_line()
            self._target = WithoutGpu(target, f"{file}:{line}", folder)
        start(self)

    put(BaseProcess, start=guarded)


def install_launcher_guard(warn: Callable[[str], None]) -> None:
    """Refuse programs that start training processes of their own, e.g. torchrun, by whatever call they are run.

    Warns of other interpreters of Python, which have no simulated GPU. Shell scripts find `refused_launchers`.
    """
    change_after_import(dict.fromkeys(_LAUNCHERS, lambda module: put(module, launch_agent=_refuse_agent)))
    owner, warned = os.getpid(), set[str]()

    def audit(event: str, given: tuple[Any, ...]) -> None:
        if event in _STARTS and os.getpid() == owner:
            words = _words(event, given)
            found = launched(words)
            if found is not None:
                raise found.refusal("launcher", "simulate")
            place = "{}:{}".format(*script_line())
            if words and _PYTHON.fullmatch(os.path.basename(words[0])) and place not in warned:
                warned.add(place)
                warn(
                    f"{place} starts a Python of its own, which has no simulated GPU, and whose work takes no time;"
                    " simulate it by itself, or do its work in this process"
                )

    sys.addaudithook(audit)


_LAUNCHERS = ("torch.distributed.launcher.api", "torch.distributed.launcher")
"""Modules with the function by which torchrun starts its workers, also where a script calls ``main`` of torchrun's."""


def _refuse_agent(
    config: object, entrypoint: Callable[..., object] | str, args: Sequence[Any], *_: object, **__: object
) -> NoReturn:
    """Refuse to start workers of ``entrypoint``, a function or a program, with ``args``."""
    if isinstance(entrypoint, str):
        found = launched(["torchrun", entrypoint, *args])
        assert found is not None
        raise found.refusal("launcher", "simulate")
    problem = "is to run in processes of which the simulation does not know"
    remedy = "call it directly: the simulation runs the script on every rank"
    raise ConfigError("elastic_launch entrypoint", getattr(entrypoint, "__name__", entrypoint), problem, remedy)


_PYTHON = re.compile(r"python[0-9.]*")
_STARTS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"})


def _words(event: str, given: tuple[Any, ...]) -> list[str]:
    """Return the command line of an audit event."""
    if event == "os.system":
        return _split(given[0])
    command = given[1]
    words = [command] if isinstance(command, str | bytes) else list(command or ())
    texts = [os.fsdecode(word) for word in words]
    shell = texts[1:2] == ["-c"] and os.path.basename(texts[0]) in ("sh", "bash", "dash")
    return _split(texts[2]) if shell and texts[2:] else texts


def _split(command: str | bytes) -> list[str]:
    try:
        return shlex.split(os.fsdecode(command))
    except ValueError:  # a quote without its end, of which the shell will complain
        return []


def _serves(target: Any) -> bool:
    return f"{getattr(target, '__module__', '')}.".startswith(_LIBRARIES)


class JoinedProcesses:
    """Stands for ``torch.multiprocessing.ProcessContext`` of processes that have ended."""

    processes: tuple[Any, ...] = ()

    def pids(self) -> list[int]:
        """Return no process ids: none was started."""
        return []

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Return True: all have ended."""
        return True


def install_spawn(settings: RankSettings, rank: int) -> None:
    """Make ``spawn`` and ``start_processes`` call the function for the GPU of ``rank``, in this process."""
    local, here = rank % settings.gpus, int(settings.environment(rank)["LOCAL_WORLD_SIZE"])
    owner = os.getpid()

    def start_processes(
        fn: Callable[..., object],
        args: Sequence[Any] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> JoinedProcesses | None:
        if os.getpid() != owner:
            raise RuntimeError("torch.multiprocessing.spawn: a child of a simulated rank has no GPU to start it for")
        if nprocs != here:
            remedy = "start one for each of torch.cuda.device_count(), or name a cluster with so many GPUs"
            problem = f"is not one process for each of the server's {here} simulated GPUs"
            raise ConfigError("torch.multiprocessing.spawn nprocs", nprocs, problem, remedy)
        fn(local, *args)
        return None if join else JoinedProcesses()

    # `torch.multiprocessing.spawn` is the function, which hides the module of the same name.
    for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        put(module, spawn=start_processes, start_processes=start_processes)


def install_deepspeed_launcher(settings: RankSettings) -> None:
    """Make DeepSpeed's launcher, where the script calls it, run the script that it would start, in this process."""

    def change(module: ModuleType) -> None:
        launch = module.main

        def main(args: Sequence[str] | None = None) -> None:
            words = sys.argv[1:] if args is None else args
            # The autotuner starts many jobs, one after the other.
            found = None if "--autotuning" in words else started(["deepspeed", *words])
            if found is None:
                launch(args)
                return
            text = f"foretrain: {found.script[0]} runs in place of DeepSpeed's launcher, on the cluster's ranks\n"
            if first_to_say(text, settings):
                sys.stderr.write(text)
            script, *arguments = found.script
            run_as_main(script, with_local_rank(arguments, os.environ["LOCAL_RANK"]), module=found.module)

        put(module, main=main)

    change_after_import({"deepspeed.launcher.runner": change})


def install_data_loader(warn: Callable[[str], None]) -> None:
    """Warn, once in a process, where batches come from workers."""
    make, warned = DataLoader._get_iterator, False

    def get_iterator(loader: DataLoader[Any]) -> Any:
        nonlocal warned
        if loader.num_workers and not warned:
            warned = True
            file, line = script_line()
            warn(f"{file}:{line}: work of DataLoader's workers takes no virtual time: steps never wait for data")
        return make(loader)

    put(DataLoader, _get_iterator=get_iterator)
