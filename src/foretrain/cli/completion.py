"""``foretrain completion``: completion of commands, options and choices for bash, zsh and fish, made from help."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

import tyro

from foretrain.cli.parsing import help_text, option_heads, option_names


@dataclass(frozen=True, slots=True)
class Word:
    """The names that a place in the command line takes; where it is ``free``, it takes any other word as well."""

    names: Sequence[str]
    free: bool = False


Words = Mapping[str, Word]
"""What a word may be by the words before it, e.g. "lab up" or "compare --network"; * stands for one and more words."""
_ZSH = """whence compdef > /dev/null || { autoload -U compinit && compinit -i; }
autoload -U +X bashcompinit && bashcompinit
"""
"""What zsh needs before a function of bash completes; a new ~/.zshrc has no completion at all."""


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]) -> None:
    """Print completion of commands, options and names for a shell.

    To be sourced. bash: foretrain completion bash >> ~/.bashrc; zsh: foretrain completion zsh >> ~/.zshrc; fish:
    mkdir -p ~/.config/fish/completions; foretrain completion fish > ~/.config/fish/completions/foretrain.fish.

    Args:
        shell: the shell.
    """
    commands = re.findall(r"^  ([a-z-]+) ", _help(), re.MULTILINE)
    found = {"": Word([*commands, "help"])}
    for command in commands:
        found |= _words(command)
    sys.stdout.write(_fish(found) if shell == "fish" else _bash(found, zsh=shell == "zsh"))


def _help(*command: str) -> str:
    from foretrain.cli.main import main

    return help_text(lambda: main([*command, "--help"]))


def _words(command: str) -> dict[str, Word]:
    """Return what may stand behind a command: its own commands, or its choices and options and theirs."""
    text = _help(*command.split())
    if inner := re.findall(r"• (\w+)", text):
        found = {command: Word(inner)}
        for each in inner:
            found |= _words(f"{command} {each}")
        return found
    own = re.search(r"^│ ([^-\s]\S*)", text, re.MULTILINE)
    options: dict[str, Word | None] = {}
    for head in option_heads(text):
        value = re.search(r"--[a-z-]+ ([^,].*)", head)
        options |= dict.fromkeys(option_names(head), _value(value[1]) if value else None)
    rest = Word(sorted(options), free=True)
    first = Word([*(_value(own[1]).names if own else ()), *rest.names], free=True)
    found = {command: first, f"{command} *": rest}
    return found | {f"{command} {name}": word for name, word in options.items() if word}


def _value(shown: str) -> Word:
    """Return what an argument may be that help shows so, e.g. "{cubic,bbr,reno}" or "[SCHEDULE [SCHEDULE ...]]"."""
    if choices := re.search(r"\{([\w,-]+)\}", shown):
        return Word(choices[1].split(","))
    known = (names for kind, names in _catalog().items() if kind in re.findall(r"\w+", shown))
    return Word(next(known, ()), free=True)


@cache
def _catalog() -> dict[str, Sequence[str]]:
    """Return the names that foretrain knows by what help calls their kind; a file may stand for each."""
    from foretrain.device import preset_names
    from foretrain.schedule import POLICIES
    from foretrain.workload import zoo_models

    models = tuple(zoo_models())
    return {"WORKLOAD": models, "MODEL": (*models, "transformer"), "SCHEDULE": tuple(POLICIES), "GPU": preset_names()}


def _cases(found: Words) -> list[tuple[list[str], Word]]:
    """Return patterns for the words before the last, each after a space, and what the last may be.

    Options' values stand before the commands that have the options, whose patterns fit, too; of a command those that
    may be the same stand together.
    """
    values: dict[tuple[str, str, bool], list[str]] = {}
    others: list[tuple[list[str], Word]] = []
    for before, word in found.items():
        command, _, option = before.rpartition(" ")
        if option.startswith("--"):
            patterns = values.setdefault((command, " ".join(word.names), word.free), [])
            patterns += [f" {before}", f" {command} * {option}"]
        elif before:
            others.append(([f" {before}"], word))
    return [(patterns, Word(names.split(), free)) for (_, names, free), patterns in values.items()] + others


def _bash(found: Words, *, zsh: bool) -> str:
    def quoted(pattern: str) -> str:
        return "'" + pattern.replace("*", "'*'") + "'"

    cases = "\n".join(
        f'    {"|".join(map(quoted, patterns))}) words="{" ".join(word.names)}" ;;' for patterns, word in _cases(found)
    )
    head = _ZSH if zsh else ""
    return f"""{head}_foretrain() {{
  local words="" before="" helping="" place=1 current="${{COMP_WORDS[COMP_CWORD]}}"
  while [ "$place" -lt "$COMP_CWORD" ]; do
    before="$before ${{COMP_WORDS[place]}}"
    place=$((place + 1))
  done
  case "$before" in ' help'*) helping=1 before="${{before# help}}" ;; esac
  case "$before" in
    '') words="{" ".join(found[""].names)}" ;;
    *' -- '*|*' --') words="" ;;
{cases}
  esac
  case "$helping$words" in 1*--help*) words="" ;; esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _foretrain foretrain
"""


def _fish(found: Words) -> str:
    cases = "\n".join(
        f"    case {' '.join(map(repr, patterns))}\n      set found {' '.join(word.names)}"
        + "\n      set free 1" * word.free
        for patterns, word in _cases(found)
    )
    return f"""function __foretrain_words
  set -l words (commandline -opc)
  set -l found
  set -l free 0
  set -l helping no
  set -e words[1]
  if test "$words[1]" = help
    set helping yes
    set -e words[1]
  end
  switch " $words"
    case ' '
      set found {" ".join(found[""].names)}
    case '* -- *' '* --'
      return 1
{cases}
  end
  if test $helping = yes; and contains -- --help $found
    return
  end
  string join \\n -- $found
  return $free
end
# The function's status says whether files may stand there, too.
complete -c foretrain -a '(__foretrain_words)'
complete -c foretrain -n '__foretrain_words > /dev/null' -f
"""
