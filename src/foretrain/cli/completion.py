"""``foretrain completion``: completion of commands, options and choices for bash, zsh and fish, made from help."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import tyro

from foretrain.cli.parsing import help_text, option_heads, option_names

Words = Mapping[str, Sequence[str]]
"""By the words before it, e.g. "lab up" or "compare --network", what a word may be."""
_ZSH = """whence compdef > /dev/null || { autoload -U compinit && compinit -i; }
autoload -U +X bashcompinit && bashcompinit
"""
"""What zsh needs before a function of bash completes; a new ~/.zshrc has no completion at all."""


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]) -> None:
    """Print completion of commands and options for a shell.

    To be sourced. bash: foretrain completion bash >> ~/.bashrc; zsh: foretrain completion zsh >> ~/.zshrc; fish:
    mkdir -p ~/.config/fish/completions; foretrain completion fish > ~/.config/fish/completions/foretrain.fish.

    Args:
        shell: the shell.
    """
    commands = re.findall(r"^  ([a-z-]+) ", _help(), re.MULTILINE)
    found = {"": [*commands, "help"]}
    for command in commands:
        found |= _words(command)
    sys.stdout.write(_fish(found) if shell == "fish" else _bash(found, zsh=shell == "zsh"))


def _help(*command: str) -> str:
    from foretrain.cli.main import main

    return help_text(lambda: main([*command, "--help"]))


def _words(command: str) -> dict[str, list[str]]:
    """Return what may stand behind a command: its own commands, or its choices and options and theirs."""
    text = _help(*command.split())
    if inner := re.findall(r"• (\w+)", text):
        found = {command: inner}
        for each in inner:
            found |= _words(f"{command} {each}")
        return found
    own = re.search(r"^│ \{([\w,-]+)\}", text, re.MULTILINE)
    options: dict[str, list[str]] = {}
    for head in option_heads(text):
        choices = re.search(r"\{([\w,-]+)\}", head)
        for name in option_names(head):
            options[name] = choices[1].split(",") if choices else []
    found = {command: [*(own[1].split(",") if own else ()), *sorted(options)]}
    return found | {f"{command} {name}": choices for name, choices in options.items() if choices}


def _cases(found: Words) -> list[tuple[list[str], str]]:
    """Return patterns for the words before the last, each after a space, and what the last may be.

    Choices of options stand before the commands that have them, whose patterns fit, too.
    """
    chosen: list[tuple[list[str], str]] = []
    others: list[tuple[list[str], str]] = []
    for before, words in found.items():
        command, _, option = before.rpartition(" ")
        if option.startswith("--"):
            chosen.append(([f" {before}", f" {command} * {option}"], " ".join(words)))
        elif before:
            leaf = "--help" in words
            others.append(([f" {before}", *[f" {before} *"] * leaf], " ".join(words)))
    return chosen + others


def _bash(found: Words, *, zsh: bool) -> str:
    def quoted(pattern: str) -> str:
        return "'" + pattern.replace("*", "'*'") + "'"

    cases = "\n".join(f'    {"|".join(map(quoted, patterns))}) words="{words}" ;;' for patterns, words in _cases(found))
    head = _ZSH if zsh else ""
    return f"""{head}_foretrain() {{
  local words="" before="" helping="" place=1 current="${{COMP_WORDS[COMP_CWORD]}}"
  while [ "$place" -lt "$COMP_CWORD" ]; do
    before="$before ${{COMP_WORDS[place]}}"
    place=$((place + 1))
  done
  case "$before" in ' help'*) helping=1 before="${{before# help}}" ;; esac
  case "$before" in
    '') words="{" ".join(found[""])}" ;;
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
        f"    case {' '.join(map(repr, patterns))}\n      set found {words}" for patterns, words in _cases(found)
    )
    return f"""function __foretrain_words
  set -l words (commandline -opc)
  set -l found
  set -l helping no
  set -e words[1]
  if test "$words[1]" = help
    set helping yes
    set -e words[1]
  end
  switch " $words"
    case ' '
      set found {" ".join(found[""])}
    case '* -- *' '* --'
      return
{cases}
  end
  if test $helping = yes; and contains -- --help $found
    return
  end
  string join \\n -- $found
end
complete -c foretrain -a '(__foretrain_words)'
complete -c foretrain -n 'set -l found (__foretrain_words); test -n "$found"; and not contains -- --help $found' -f
"""
