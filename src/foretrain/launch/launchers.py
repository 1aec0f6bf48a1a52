"""Launchers' command lines, read rather than run: which script they start, and what they tell it."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from foretrain.errors import ConfigError
from foretrain.launch import launched

_FLAG = re.compile(r"-[uBbdEIOsSvx]+")
"""Options of the interpreter that have no argument."""
_SETTING = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
"""A variable before a command, as a shell takes it."""
_LOCAL_RANK = "${local_rank}"
"""What torchrun replaces in a script's arguments by the rank's number on its server; so does a simulation."""
_SIZES = {"LT_DEVICES": "LOCAL_WORLD_SIZE", "LT_NUM_NODES": "GROUP_WORLD_SIZE"}
"""What ``fabric run`` tells its script of the number of ranks, and the variables of torchrun that say so."""


@dataclass(frozen=True, slots=True)
class Started:
    """Script that a launcher starts on every rank.

    Attributes:
        name: the launcher; empty for the interpreter.
        script: or, with ``module``, a module's name; and its arguments.
        environment: variables that it sets, besides those of ranks.
    """

    name: str
    script: Sequence[str]
    module: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def started(words: Sequence[str]) -> Started | None:
    """Return what the command line of an interpreter or a launcher starts; None for other commands.

    Variables may stand before either, and before a script.

    Raises:
        ConfigError: the launcher is not installed.
    """
    settings = [*takewhile(_SETTING.fullmatch, words)]
    rest = words[len(settings) :]
    found = _started(rest) if rest else None
    if not settings or not rest or (found is None and launched(rest)):
        return found
    found = found or Started("", rest)
    given = dict(setting.split("=", 1) for setting in settings)
    return replace(found, environment=given | dict(found.environment))


def _started(words: Sequence[str]) -> Started | None:
    first, *rest = words
    name = os.path.basename(first)
    if re.fullmatch(r"python[0-9.]*", name):
        while rest and _FLAG.fullmatch(rest[0]):
            del rest[0]
        if rest[:1] == ["-m"]:
            return _started(rest) or Started("", rest[1:], module=True)
        return Started("", rest) if rest and not rest[0].startswith("-") else None
    if first == "-m" and rest:
        name, *rest = rest
    if name in ("torchrun", "torch.distributed.run", "torch.distributed.launch"):
        return _by_torchrun(name, rest)
    if name == "accelerate" and rest[:1] == ["launch"]:
        return _by_accelerate(rest[1:])
    if name in ("accelerate-launch", "accelerate.commands.launch"):
        return _by_accelerate(rest)
    if name in ("deepspeed", "deepspeed.launcher.runner"):
        return _by_deepspeed(rest)
    if name in ("fabric", "lightning") and rest[:1] == ["run"]:
        return _by_fabric(name, rest[1:])
    return None


def with_local_rank(arguments: Sequence[str], rank: str) -> list[str]:
    """Return a script's arguments as torchrun hands them to the rank with this number on its server."""
    return [one.replace(_LOCAL_RANK, rank) for one in arguments]


def told_sizes(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what ``fabric run`` tells of the number of ranks, if it was read into a rank's ``environment``."""
    return {name: environment[size] for name, size in _SIZES.items()} if "LT_CLI_USED" in environment else {}


def _by_torchrun(name: str, words: Sequence[str]) -> Started | None:
    from torch.distributed import launch, run

    asked: Any = launch.parse_args(words) if name.endswith("launch") else run.get_args_parser().parse_args(words)
    flag = [] if getattr(asked, "use_env", True) else [f"--local-rank={_LOCAL_RANK}"]
    return _read(name, asked, flag)


def _by_accelerate(words: Sequence[str]) -> Started | None:
    try:
        from accelerate.commands import launch
        from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
    except ImportError as error:
        remedy = "pip install accelerate, or simulate what it starts"
        raise ConfigError("script", "accelerate launch", f"cannot be read ({error})", remedy) from None
    asked = launch.launch_command_parser().parse_args(words)
    # The cluster says how many ranks there are. No port is taken; 0 is one that is free.
    asked.num_processes, asked.num_machines, asked.main_process_port, asked.gpu_ids = 2, 1, 0, "all"
    checked: Any = launch._validate_launch_command(asked)
    asked, defaults, precision = checked
    if asked.use_deepspeed:
        names = [*defaults.deepspeed_config] if defaults else []
        asked.deepspeed_fields_from_accelerate_config = ",".join([*names, *["mixed_precision"] * precision])
        environment = prepare_deepspeed_cmd_env(asked)[1]
    else:
        environment = prepare_multi_gpu_env(asked)
    new = {key: value for key, value in environment.items() if os.environ.get(key) != value}
    found = _read("accelerate launch", asked, [])
    return found and replace(found, environment=new)


def _by_deepspeed(words: Sequence[str]) -> Started | None:
    """Read it without DeepSpeed, which takes long to import: the script is the first word that is a file of Python."""
    module = "--module" in words
    names = words[words.index("--module") + 1 :] if module else words
    place = next((k for k, word in enumerate(names) if module or word.endswith(".py")), None)
    if place is None:
        return None
    script, *arguments = names[place:]
    flag = [] if "--no_local_rank" in words else [f"--local_rank={_LOCAL_RANK}"]
    return Started("deepspeed", [script, *flag, *arguments], module)


def _by_fabric(name: str, words: Sequence[str]) -> Started | None:
    """Read it without Lightning, which takes long to import. Its options may stand behind the script as well.

    Lightning 2.1 calls it ``lightning run model``.
    """
    told = ("accelerator", "strategy", "precision")
    unused = ("devices", "num-nodes", "node-rank", "main-address", "main-port")  # the cluster says it
    parser = argparse.ArgumentParser(f"{name} run", add_help=False, allow_abbrev=False)
    for option in (*told, *unused):
        parser.add_argument(f"--{option}", f"--{option.replace('-', '_')}")
    parser.add_argument("script", nargs="?")
    asked, arguments = parser.parse_known_args(words[words[:1] == ["model"] :])
    if asked.script is None:
        return None
    given = {f"LT_{option.upper()}": value for option in told if (value := getattr(asked, option)) is not None}
    return Started(f"{name} run", [asked.script, *arguments], environment={"LT_CLI_USED": "1"} | given)


def _read(name: str, asked: Any, flag: Sequence[str]) -> Started | None:
    """Return what a launcher that has torchrun's options starts, with ``flag`` as the first argument."""
    if asked.no_python:
        inner = _started([asked.training_script, *asked.training_script_args])
        return inner and replace(inner, name=name)
    return Started(name, [asked.training_script, *flag, *asked.training_script_args], bool(asked.module))
