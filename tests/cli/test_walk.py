"""Every command: its help, a mistyped option, JSON alone on stdout, silence, no colours, completion."""

import json
import re

import pytest

from foretrain.cli import main
from tests.processes import foretrain

HERE = ("alexnet", "--cluster", "4 workers @ 1Gbps")


def commands(capsys) -> list[str]:
    main([])
    return re.findall(r"^  ([a-z-]+) ", capsys.readouterr().out, re.MULTILINE)


def test_every_command_has_help_and_answers_a_mistyped_option(capsys):
    names = commands(capsys)
    assert {"compare", "plan", "what-if", "explore", "completion"} <= set(names)
    for name in names:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        shown = capsys.readouterr().out
        assert f"foretrain {name}" in shown
        assert "--help" in shown
        if name in ("lab", "topology"):
            continue
        with pytest.raises(SystemExit, match="2"):
            main([name, "--no-such-option"])
        assert capsys.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("bound", *HERE), "optimum"),
        (("catalog",), "models"),
        (("compare", *HERE, "--schedules", "ddp", "--no-tune"), "runs"),
        (("what-if", *HERE, "--changes", "rate=2Gbps"), "cases"),
        (("topology", "show", "star:2@1Gbps"), "counts"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_json_stands_alone_on_stdout(arguments, key):
    assert key in json.loads(foretrain(*arguments, "--json", "-").stdout)


@pytest.mark.process
def test_quiet_prints_nothing_but_json():
    assert foretrain("bound", *HERE, "--quiet").stdout == ""
    assert "optimum" in json.loads(foretrain("bound", *HERE, "--quiet", "--json", "-").stdout)


@pytest.mark.process
def test_without_a_terminal_nothing_is_coloured():
    assert "\x1b" not in foretrain("catalog").stdout


def test_completion_knows_every_command_and_its_options(capsys):
    names = commands(capsys)
    for shell in ("bash", "zsh", "fish"):
        main(["completion", shell])
        text = capsys.readouterr().out
        assert all(re.search(rf"\b{name}\b", text) for name in names)
        assert "schedules" in text
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "tcsh"])


def test_a_dry_run_of_the_lab_says_how_long_it_takes(capsys):
    main(["lab", "compare", "alexnet", "--dry-run", "--ratio", "1", "--schedules", "prophet", "--rounds", "2"])
    told = capsys.readouterr().out
    assert re.fullmatch(r"\d+ cases, 15 iterations each in 2 rounds: about \d+\.\d min\n", told)
