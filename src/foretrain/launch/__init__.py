"""Unmodified scripts: ``foretrain run`` starts them through torchrun and schedules their DistributedDataParallel.

`command` starts torchrun and, where asked, servers (`child_processes`); `worker` runs in each process. When the script
imports PyTorch, `ddp_patch` puts `scheduled_ddp` in the place of DistributedDataParallel and decides which models are
scheduled. `lightning` and `ray` do so within a trainer that starts its processes itself.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from foretrain.comm.options import (
    AllReduce,
    BoundedLoss,
    Compression,
    ParameterServer,
    Timeouts,
    Transport,
    TransportKind,
    as_transport,
    check_flag,
)
from foretrain.errors import ConfigError, unknown

__all__ = ["NOT_ADVISED", "LaunchSettings", "session_used"]

NOT_ADVISED = "no advice: --advise observes DistributedDataParallel, and this script trains by a foretrain.Session"
"""Line that ``foretrain run --advise`` prints instead of advice for a script that uses a session."""


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """Settings of ``foretrain run`` that every process needs.

    Attributes:
        schedule: a policy with its knobs, ``"auto"``, or a plan file's path, as `foretrain.planner.plan`
            reads it.
        compression: type as which gradients are sent; None leaves it to the script.
        transport: how gradients become sums; addresses of servers are in the environment.
        timeouts: how long ranks wait for each other.
        tune: whether knobs are searched as the job runs.
        advise: whether DistributedDataParallel stays as it is and is only observed, for advice.
        quiet: whether choices of schedules and the summary at the end are left out.
        numbers: file to which rank 0 writes how each model went, or the adviser's numbers, as JSON, if any.
    """

    schedule: str = "bytescheduler"
    compression: Compression | None = None
    transport: Transport = field(default_factory=AllReduce)
    timeouts: Timeouts = field(default_factory=Timeouts)
    tune: bool = False
    advise: bool = False
    quiet: bool = False
    numbers: Path | None = None

    @classmethod
    def of(
        cls,
        schedule: str,
        transport: Transport | TransportKind = "all_reduce",
        compression: Compression | None = None,
        timeouts: Timeouts | None = None,
        tune: bool = False,
    ) -> LaunchSettings:
        """Return settings from what a script gives; raise ConfigError for a value that is wrong."""
        from foretrain.planner import requested_schedule  # it loads the simulator, which --help does not need

        requested_schedule(schedule)
        if compression not in (None, *get_args(Compression)):
            raise unknown("compression", compression, get_args(Compression))
        if not isinstance(timeouts, Timeouts | None):
            raise ConfigError("timeouts", timeouts, "is no Timeouts", "write e.g. Timeouts(peer='30s')")
        check_flag("tune", tune)
        return cls(schedule, compression, as_transport(transport), timeouts or Timeouts(), tune)

    def arguments(self) -> list[str]:
        """Return the options of `foretrain.launch.worker` from which it makes these settings again."""
        flags = ["--compression", self.compression] if self.compression else []
        flags += ["--timeout", repr(self.timeouts.peer), "--patience", repr(self.timeouts.stall)]
        if isinstance(self.transport, ParameterServer):
            flags += ["--served", "--updates", str(self.transport.updates)]
            flags += ["--consistency", self.transport.consistency, *["--elastic"] * self.transport.elastic]
        elif isinstance(self.transport, BoundedLoss):
            flags += ["--transport", str(self.transport)]
        elif self.transport.backend is not None:
            flags += ["--backend", self.transport.backend]
        if self.numbers is not None:
            flags += ["--numbers", str(self.numbers)]
        switches = ["--tune"] * self.tune + ["--advise"] * self.advise + ["--quiet"] * self.quiet
        return ["--schedule", self.schedule, *flags, *switches]


def session_used() -> bool:
    """Return whether this process has made a `foretrain.Session`, whose gradients go without a patch."""
    module = sys.modules.get("foretrain.comm.session")
    return module is not None and module.Session.used


_LAUNCHERS = frozenset({"torchrun", "accelerate-launch", "deepspeed", "mpirun", "mpiexec", "horovodrun", "torchx"})
_SUBCOMMANDS = {"accelerate": "launch", "fabric": "run", "lightning": "run"}
"""Commands that launch by their first argument."""
_BEFORE = frozenset({"env", "exec", "timeout", "nohup", "nice", "time", "stdbuf", "command", "sudo"})
"""Commands that run the one behind them."""
_SEPARATORS = frozenset({"&&", "||", ";", "|", "&", "(", "{", "then", "do"})
"""Words of a shell behind which a command begins."""
LAUNCHER_MODULES = (
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher",
)  # fmt: skip
"""Beginnings of the names of modules that launch, behind ``python -m``."""


@dataclass(frozen=True, slots=True)
class LauncherCommand:
    """Command line of a launcher: its name, and the script with its arguments, empty where that is not seen."""

    name: str
    script: str

    def refusal(self, field: str, command: str) -> ConfigError:
        """Return the error for a launcher in a simulation, which is one itself, by foretrain's ``command``."""
        remedy = f"simulate what it starts: foretrain {command} -- {self.script or 'train.py'}"
        return ConfigError(field, self.name, "starts processes of which the simulation does not know", remedy)


def check_no_interpreter(name: str) -> None:
    """Raise ConfigError where ``name``, in the place of a script, is Python's."""
    if re.fullmatch(r"python[0-9.]*", os.path.basename(name)):
        raise ConfigError("script", name, "is the interpreter, not the script", "leave it out: write -- train.py")


def launched(words: Sequence[str]) -> LauncherCommand | None:
    """Return the launcher that a command line runs, also behind others in a shell's; None for other commands."""
    program = True  # whether a word may be a program
    for place, word in enumerate(words):
        name = os.path.basename(word)
        if word in _SEPARATORS or not program:
            program = word in _SEPARATORS or word.endswith(";")
            continue
        launcher = name in _LAUNCHERS or words[place + 1 : place + 2] == [_SUBCOMMANDS.get(name)]
        module = word == "-m" and words[place + 1 : place + 2] and words[place + 1].startswith(LAUNCHER_MODULES)
        if launcher or module:
            script = next((k for k, text in enumerate(words) if k > place and text.endswith(".py")), len(words))
            return LauncherCommand(words[place + 1] if module else name, shlex.join(words[script:]))
        before = word.startswith("-") or word[:1].isdigit()  # an option of what stands before a program, or a time
        program = "=" in word or before or name in _BEFORE or name.startswith("python") or word.endswith(";")
    return None
