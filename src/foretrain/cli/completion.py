"""``foretrain completion``: completion of commands and options for bash, zsh and fish, made from the commands' help."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from typing import Annotated, Literal

import tyro


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]) -> None:
    """Print completion of commands and options for a shell, to be sourced.

    bash: foretrain completion bash >> ~/.bashrc; zsh: foretrain completion zsh >> ~/.zshrc; fish: foretrain completion
    fish > ~/.config/fish/completions/foretrain.fish.

    Args:
        shell: the shell.
    """
    found = {name: _words(name) for name in _commands(_help())}
    sys.stdout.write(_fish(found) if shell == "fish" else _bash(found, zsh=shell == "zsh"))


def _help(*command: str) -> str:
    from foretrain.cli.main import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue())


def _commands(overview: str) -> list[str]:
    return re.findall(r"^  ([a-z-]+) ", overview, re.MULTILINE)


def _words(command: str) -> list[str]:
    """Return options and subcommands of a command."""
    text = _help(command)
    inner = re.findall(r"• (\w+)", text)
    return [*inner, *sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)))]


def _bash(found: dict[str, list[str]], *, zsh: bool) -> str:
    cases = "\n".join(f'    {name}) words="{" ".join(words)}" ;;' for name, words in found.items())
    head = "autoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    return f"""{head}_foretrain() {{
  local words current="${{COMP_WORDS[COMP_CWORD]}}"
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="" ;;
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(found)} help"; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _foretrain foretrain
"""


def _fish(found: dict[str, list[str]]) -> str:
    lines = [f"complete -c foretrain -n __fish_use_subcommand -f -a '{' '.join(found)} help'"]
    for name, words in found.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        flags = (f"-l {word[2:]}" if word[:2] == "--" else f"-f -a {word}" for word in words)
        lines += [f"complete -c foretrain {seen} {flag}" for flag in flags]
    return "\n".join(lines) + "\n"
