"""Programs that start a process for each GPU, recognised by their command lines."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from foretrain.errors import ConfigError

_LAUNCHERS = frozenset({"torchrun", "deepspeed", "mpirun", "mpiexec", "horovodrun", "torchx"})
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher")


@dataclass(frozen=True, slots=True)
class LauncherCommand:
    """Command line of a launcher: its name, and the script with its arguments, empty where that is not seen."""

    name: str
    script: str

    def refusal(self, field: str) -> ConfigError:
        """Return the error for a launcher in a simulation, which is one itself."""
        remedy = f"simulate what it starts: foretrain simulate -- {self.script or 'train.py'}"
        return ConfigError(field, self.name, "starts processes of which the simulation does not know", remedy)


def launched(words: Sequence[str]) -> LauncherCommand | None:
    """Return the launcher that a command line runs; None for other commands."""
    for place, word in enumerate(words):
        name = os.path.basename(word)
        launcher = name in _LAUNCHERS or (name == "accelerate" and words[place + 1 : place + 2] == ["launch"])
        module = word == "-m" and words[place + 1 : place + 2] and words[place + 1].startswith(_MODULES)
        if launcher or module:
            script = next((k for k, text in enumerate(words) if k > place and text.endswith(".py")), len(words))
            return LauncherCommand(words[place + 1] if module else name, shlex.join(words[script:]))
        if "=" not in word and name not in ("env", "exec", "python") and not name.startswith("python"):
            return None  # the first word of a command is its program
    return None
