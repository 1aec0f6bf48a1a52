"""``foretrain``: parses the command line, runs one command, and reports errors as one plain message."""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, get_type_hints

import tyro
from tyro.extras import SubcommandApp

from foretrain import __version__
from foretrain.cli import accuracy, lab, topology
from foretrain.cli.arguments import (
    ARGUMENT_TYPES,
    RUN_SCRIPTS,
    Quiet,
    leave_out_empty_defaults,
    name_script_in_usage,
    widen_piped_output,
)
from foretrain.cli.calibrate import calibrate
from foretrain.cli.compare import bound, catalog, compare, explore, schedule
from foretrain.cli.completion import completion
from foretrain.cli.doctor import doctor
from foretrain.cli.parsing import parsed
from foretrain.cli.plan import plan, what_if
from foretrain.cli.progress import StdoutClosed, Terminated, complain, end_interrupted
from foretrain.cli.record import record
from foretrain.cli.run import run, run_command, server
from foretrain.cli.search import run_command as search_command
from foretrain.cli.search import search
from foretrain.cli.simulate import run_command as simulate_command
from foretrain.cli.simulate import simulate
from foretrain.cli.sweep import grid, sweep
from foretrain.cli.tolerance import tolerance
from foretrain.cli.topology import collective, share
from foretrain.errors import ConfigError, ForetrainError, MissingExtra, RecordError, ScheduleError, unknown
from foretrain.files import NO_ROOM, json_alone_on_stdout

_GROUPS: Mapping[str, tuple[Callable[..., None] | tuple[str, ModuleType], ...]] = {
    "Forecast": (compare, plan, what_if, grid, sweep, search, schedule, bound),
    "Simulate": (simulate, calibrate, ("accuracy", accuracy)),
    "Train": (record, run, server, doctor),
    "Network": (("topology", topology), collective, share, tolerance),
    "More": (explore, ("lab", lab), catalog, completion),
}
"""Commands as the overview shows them; one with commands of its own is a name and a module."""
_OF_INPUT = (ConfigError, ScheduleError, RecordError, MissingExtra)
"""Errors that the user mends in what was given or installed; after others the same command may succeed."""
_HELP_WIDTH = "100"
"""Columns of help where stdout is no terminal."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command.

    Exits with 0; 1 when what was asked for did not work out, e.g. where the disk is full; 2 for a wrong input or a
    missing package; 130 when interrupted; 143 when terminated; and with a script's own status where one is run.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    try:
        try:
            _run(arguments)
        except SystemExit:
            sys.stdout.flush()  # of help; where it cannot be written, that is told as of all else
            raise
    except ForetrainError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_ROOM:
            _end_for_want_of_room(error.__cause__)
        complain(str(error))
        sys.exit(2 if isinstance(error, _OF_INPUT) else 1)
    except KeyboardInterrupt:
        end_interrupted()
    except AssertionError as error:
        frames = traceback.extract_tb(error.__traceback__)
        if Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1]):  # not one of the user's own
            error.add_note(
                "foretrain: this is a fault of foretrain, not of your script or input; please send its developers "
                "all of the above, the command, what `foretrain doctor` prints, and the smallest script that shows it"
            )
        raise
    except (BrokenPipeError, StdoutClosed):
        # The reader of stdout, e.g. head, has ended.
        sys.stderr.close()
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _end_for_want_of_room(error)


def _end_for_want_of_room(error: OSError) -> NoReturn:
    """Say in one line that the disk is full, and exit with 1."""
    where = f" to {error.filename}" if error.filename else ""
    complain(f"nothing more can be written{where}: {error.strerror}")
    # What is left in the buffer would be written, and fail, once more.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    sys.exit(1)


def _run(arguments: list[str]) -> None:
    """Run the command and let its errors through."""
    if arguments in (["--version"], ["-V"]):
        sys.stdout.write(f"foretrain {__version__}\n")
        sys.stdout.flush()
        return
    if arguments in ([], ["-h"], ["--help"], ["help", "--help"], ["--quiet"]):
        sys.stdout.write(_overview())
        sys.stdout.flush()
        return
    if os.environ.get("NO_COLOR"):
        tyro._experimental_options["ansi_codes"] = False  # pyright: ignore[reportPrivateUsage], rich knows itself
    if _wants_help(arguments) and not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", _HELP_WIDTH)
    elif arguments[0] not in RUN_SCRIPTS:
        widen_piped_output()
    if _wants_help(arguments):
        leave_out_empty_defaults()
        name_script_in_usage()
    if arguments[:1] == ["run"]:  # --quiet is its own, and leaves what the script prints alone
        with json_alone_on_stdout() if _wants_json_alone(arguments) else nullcontext():
            run_command(arguments[1:])
        return
    arguments, quiet = _without_quiet(arguments)
    alone = json_alone_on_stdout(quiet=quiet) if quiet or _wants_json_alone(arguments) else nullcontext()
    with _terminable(), alone:
        if arguments[:1] == ["simulate"]:
            simulate_command(arguments[1:])
            return
        if arguments[:1] == ["search"]:
            search_command(arguments[1:])
            return
        options = {"prog": "foretrain", "config": (tyro.conf.OmitArgPrefixes,), "registry": ARGUMENT_TYPES}
        parse = partial(_parser(arguments).cli, **options)
        parsed(lambda words: parse(args=words), arguments)()


def _commands() -> Iterator[tuple[str, str, str, Callable[..., None] | ModuleType]]:
    """Yield group, name, one line of help and function of each command."""
    for group, members in _GROUPS.items():
        for member in members:
            name, there = member if isinstance(member, tuple) else (member.__name__.replace("_", "-"), member)
            text = there.HELP if isinstance(there, ModuleType) else inspect.getdoc(there) or ""
            yield group, name, " ".join(text.partition("\n\n")[0].split()), there


def _overview() -> str:
    lines, before = ["Forecast and speed up distributed DNN training.", "", "usage: foretrain COMMAND ..."], ""
    for group, name, text, _ in _commands():
        if group != before:
            lines += ["", group]
            before = group
        lines.append(f"  {name:<11} {text}")
    lines += ["", "foretrain help COMMAND says more; foretrain --version says the version."]
    lines += ["--quiet after a command leaves standard output to what --json - asks for."]
    return "\n".join(lines) + "\n"


def _parser(words: Sequence[str]) -> SubcommandApp:
    """Return the parser of all commands; refuse ``words`` that begin with none of them."""
    app, names = SubcommandApp(), []
    for _, name, _, there in _commands():
        names.append(name)
        if isinstance(there, ModuleType):
            subcommands = SubcommandApp()
            for each, command in there.COMMANDS.items():
                subcommands.command(_deferred(command), name=each)
            app.command(subcommands, name=name, help=there.HELP)
            if words[0] == name and not _wants_help(words[:2]):
                if len(words) == 1:
                    raise ConfigError(
                        "command", name, "is a group of commands", f"add one: {', '.join(there.COMMANDS)}"
                    )
                if words[1] not in there.COMMANDS:
                    raise unknown(f"{name} command", words[1], there.COMMANDS)
        else:
            app.command(_deferred(there))
    if words[0].startswith("-"):
        raise unknown("option", words[0], ("--help", "--quiet", "--version"))
    if words[0] not in names:
        raise unknown("command", words[0], names)
    return app


def _deferred(command: Callable[..., None]) -> Any:
    """Return a function with the command's arguments that returns the call: what is parsed runs later."""

    @wraps(command)
    def call(*arguments: Any, **options: Any) -> Callable[[], None]:
        options.pop("quiet", None)
        return partial(command, *arguments, **options)

    # Lines of an argument's description are joined, because tyro would break help where the source does.
    call.__doc__ = re.sub(r"\n {8}(?=\S)", " ", inspect.getdoc(command) or "")
    # tyro would take the description, with its breaks, from the wrapped function.
    call.__annotations__ = get_type_hints(command, include_extras=True)
    made: Any = call
    made.__signature__ = signature = inspect.signature(command)
    if "json" in signature.parameters:
        quiet = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)
        made.__signature__ = signature.replace(parameters=[*signature.parameters.values(), quiet])
        call.__annotations__["quiet"] = Quiet
    del made.__wrapped__
    return made


def _wants_help(arguments: Sequence[str]) -> bool:
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return not {"-h", "--help"}.isdisjoint(own)


def _wants_json_alone(arguments: Sequence[str]) -> bool:
    """Return whether ``--json -`` asks for JSON on stdout, and so for nothing else there."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json=-" in own or ("--json", "-") in pairwise(own)


def _without_quiet(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments without ``--quiet``, and whether it was there; a script's own are left alone."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    own = [one for one in arguments[:cut] if one != "--quiet"]
    return [*own, *arguments[cut:]], len(own) < cut


@contextmanager
def _terminable() -> Iterator[None]:
    """End the block on SIGTERM as on Ctrl-C, so that a command removes what it has built."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminated(number: int, frame: object) -> None:
        raise Terminated(128 + number)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
