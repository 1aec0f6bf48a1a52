"""Parser of command lines by tyro, whose errors are told as all others: what is wrong, the value, what to write."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from tyro import _errors  # pyright: ignore[reportPrivateUsage], the only way to errors as data

from foretrain.errors import ConfigError, nearest, unknown

if TYPE_CHECKING:
    from tyro._arguments import ArgumentDefinition

Result = TypeVar("Result")
Parse = Callable[[Sequence[str]], Result]
_EXAMPLES: dict[object, tuple[str, str]] = {
    int: ("a whole number", "8"),
    float: ("a number", "0.5"),
    "SHARE|auto": ("a share or auto", "0.01"),
}
"""By an argument's type or how help names it, what it takes, and an example."""


class _Refused(Exception):
    """Error that tyro finds in a command line; a constructor of an argument raises others."""

    def __init__(self, event: _errors.ParseErrorEvent) -> None:
        self.event = event


def parsed(parse: Parse[Result], arguments: Sequence[str], others: Callable[[], set[str]] = set[str]) -> Result:
    """Return ``parse(arguments)``; raise ConfigError for what tyro refuses.

    Args:
        parse: a call of tyro.
        arguments: words of the command line.
        others: returns the options that another program takes.
    """

    def refuse(event: _errors.ParseErrorEvent) -> None:
        raise _Refused(event)

    check_repeated(parse, arguments)
    try:
        with _errors.on_parse_error(refuse):
            return parse(arguments)
    except _Refused as refused:
        own = options_of(parse, arguments)
        # Of several faults a misspelt option is told first: it may be why something else is missing.
        check_options(arguments, own, others())
        raise _error(refused.event, arguments, own) from None


def check_options(arguments: Sequence[str], known: set[str], others: set[str]) -> None:
    """Raise ConfigError for the first option that is not ``known``, nor the beginning of one of ``others``."""
    for word in takewhile(lambda one: one != "--", arguments):
        if word.startswith("--"):
            name = word.partition("=")[0]
            plain = name.replace("_", "-")
            if plain not in known and not any(option.startswith(plain) for option in others):
                raise unknown("option", name, known | others)


def check_repeated(parse: Parse[Any], arguments: Sequence[str]) -> None:
    """Raise ConfigError where an option that takes several values is given twice: the first ones would be lost."""
    words = takewhile(lambda one: one != "--", arguments)
    counts = Counter(word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--"))
    for name in (name for name, count in counts.items() if count > 1):
        if any(name in option_names(head) and "[" in head for head in _heads(parse, arguments)):
            raise ConfigError("option", name, "is given twice", f"write all its values behind one: {name} … …")


def options_of(parse: Parse[Any], arguments: Sequence[str]) -> set[str]:
    """Return the options of the command."""
    return {name for head in _heads(parse, arguments) for name in option_names(head)}


def _heads(parse: Parse[Any], arguments: Sequence[str]) -> list[str]:
    """Return the `option_heads` of the command."""
    words = list(takewhile(lambda one: not one.startswith("-"), arguments))
    # A wrong word behind the command would be refused before help is given.
    for count in range(len(words), -1, -1):
        if text := help_text(lambda line=words[:count]: parse([*line, "--help"])):
            return option_heads(text)
    return []


def help_text(show: Callable[[], object]) -> str:
    """Return the help that ``show`` prints, without colours and with no name cut; empty if it is refused."""
    # In other encodings the frames of help are of ASCII.
    shown, told = (TextIOWrapper(BytesIO(), encoding="utf-8") for _ in range(2))
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "1000"
    try:
        with redirect_stdout(shown), redirect_stderr(told):
            show()
    except SystemExit as end:
        if end.code:
            return ""
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    shown.seek(0)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.read())


def option_heads(text: str) -> list[str]:
    """Return what help says before each option's description, e.g. "-s SCHEDULE, --schedule SCHEDULE".

    Descriptions, which may name options of other commands, stand behind two blanks or on lines of their own.
    """
    return re.findall(r"^│ (-.+?)(?:  | *│?$)", text, re.MULTILINE)


def option_names(head: str) -> list[str]:
    """Return an option's long names, of which it may have several, e.g. --tune and --no-tune."""
    return re.findall(r"--[a-z][a-z-]*", head)


def _error(event: _errors.ParseErrorEvent, arguments: Sequence[str], options: set[str]) -> ConfigError:
    """Return the error for what tyro refuses."""
    surplus: list[str] = getattr(event, "tokens", None) or getattr(event, "unrecognized_tokens", [])
    for word in surplus:
        if word.startswith("-"):
            return unknown("option", word, options)
        if near := nearest(word, sorted(options)):
            return _of_line(arguments, f"has {word!r}, which belongs to no option", f"did you mean {near[0]!r}?")
    if isinstance(event, _errors.InvalidChoice):
        return unknown(_name(event.argument), event.value, event.choices)
    if isinstance(event, _errors.BadValue):
        return ConfigError(_name(event.argument), "", "is missing", f"write {_usage(event.argument)}")
    if isinstance(event, _errors.InstantiationFailure) and event.argument is not None:
        name = str(event.argument.lowered.metavar)
        wanted, example = _EXAMPLES.get(name) or _EXAMPLES.get(_kind(event.argument), (name, name))
        remedy = f"write e.g. {_usage(event.argument, example)}"
        return ConfigError(_name(event.argument), event.message, f"is not {wanted}", remedy)
    if isinstance(event, _errors.MissingArgs):
        missing = [one.arg for one in event.missing_arguments]
        meanings = "; and ".join(f"{_usage(one)}: {_meaning(one)}" for one in missing)
        remedy = f"add it: {_meaning(missing[0])}" if len(missing) == 1 else f"add {meanings}"
        return _of_line(arguments, f"lacks {' and '.join(map(_usage, missing))}", remedy)
    if surplus:
        remedy = "leave it out, or write before it the option that it is for"
        return _of_line(arguments, f"has {surplus[0]!r}, which is one word too many", remedy)
    return _of_line(arguments, f"is wrong ({type(event).__name__})", f"{event.prog} --help says what may be written")


def _of_line(arguments: Sequence[str], problem: str, remedy: str) -> ConfigError:
    return ConfigError("command line", " ".join(arguments), problem, remedy)


def _name(argument: ArgumentDefinition) -> str:
    return argument.display_name().rpartition("/")[2].lstrip("-")


def _usage(argument: ArgumentDefinition, value: str = "") -> str:
    """Return how an argument is written with ``value``, or else with the name of what it takes."""
    value = value or str(argument.lowered.metavar)
    return value if argument.is_positional() else f"{argument.lowered.name_or_flags[-1]} {value}"


def _meaning(argument: ArgumentDefinition) -> str:
    text = argument.field.helptext
    return " ".join(((text() if callable(text) else text) or "").split()).rstrip(".")


def _kind(argument: ArgumentDefinition) -> Any:
    """Return the type of an argument's value; of those it may have the first."""
    kind = argument.field.type_stripped
    return (get_args(kind) or (kind,))[0]
