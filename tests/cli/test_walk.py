"""Every command: its help, a mistyped option, no arguments, JSON alone on stdout, silence, no colours, a full disk."""

import json
import os
import pty
import re
import subprocess
import sys

import pytest

from foretrain.cli import accuracy, lab, main, topology
from foretrain.cli.arguments import RUN_SCRIPTS
from tests import warm
from tests.lab import forked as lab_forked
from tests.launch.forked import foretrain_run
from tests.live import forked as live_forked
from tests.processes import foretrain

HERE = ("alexnet", "--cluster", "4 workers @ 1Gbps")
GROUPS = {"lab": lab, "topology": topology, "accuracy": accuracy}
COMPLETE = {"catalog", "doctor", "explore", "completion", "calibrate"}
"""Commands that need no argument."""


def commands(capsys) -> list[str]:
    main([])
    return re.findall(r"^  ([a-z-]+) ", capsys.readouterr().out, re.MULTILINE)


def leaves(capsys) -> list[list[str]]:
    """Return the words of every command, those of groups included."""
    return [
        [name, *rest]
        for name in commands(capsys)
        for rest in ([[one] for one in GROUPS[name].COMMANDS] if name in GROUPS else [[]])
    ]


def own_options(shown: str) -> set[str]:
    """Return the options that stand at the beginning of a line of help."""
    heads = re.findall(r"^[│ ] (-.*?)(?:  |$)", shown, re.MULTILINE)
    return {name for head in heads for name in re.findall(r"--[a-z-]+", head)}


def refused(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    return capsys.readouterr().err


def test_every_command_has_help_and_answers_what_is_mistyped_or_missing(capsys):
    names = commands(capsys)
    assert {"compare", "plan", "what-if", "explore", "completion"} <= set(names)
    runnable = leaves(capsys)
    for words in [*([name] for name in GROUPS), *runnable]:
        with pytest.raises(SystemExit, match="0"):
            main([*words, "--help"])
        shown = capsys.readouterr().out
        assert f"foretrain {' '.join(words)}" in shown
        for ugly in (
            "{None}",
            "PATH",
            " STR",
            "TEXT",
            "(default: None)",
            "(default: )",
            "(default: none)",
            "(default: False)",
        ):
            assert ugly not in shown, words
        if words in runnable:
            told = refused([*words, "--no-such-option"], capsys)
            assert told.startswith("foretrain: "), words
            assert "no-such-option" in told, words
            if words[0] not in RUN_SCRIPTS:  # these want "--" and a script first
                known = set(re.findall(r"--[a-z-]+", told.partition("known: ")[2]))
                assert "--help" in known, words
                assert not known - own_options(shown), words
    for name in set(names) - COMPLETE:
        assert refused([name], capsys).strip(), name
    assert "did you mean 'compare'" in refused(["comparee"], capsys)
    assert "lab command: 'compar' is unknown; did you mean 'compare'" in refused(["lab", "compar"], capsys)
    assert "command: 'topology' is a group of commands; add one: show, list" in refused(["topology"], capsys)
    assert "option: '--clustr' is unknown; did you mean '--cluster'" in refused(
        ["bound", "vgg16", "--clustr=a"], capsys
    )


OF_SEARCH = "foretrain search --space space.toml -- train.py --tp {tp}"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("bound vgg16 --cluster 2xV100@1Gbps --batch abc", "batch: 'abc' is not a whole number; write e.g. --batch 8"),
        ("lab compare alexnet --ratio much", "ratio: 'much' is not a number; write e.g. --ratio 0.5"),
        ("lab exec one -- ls", "host: 'one' is not a whole number; write e.g. 8"),
        ("run --tolerance some -- x.py", "tolerance: 'some' is not a share or auto; write e.g. --tolerance 0.01"),
        ("run --max-restarts 2 --snapshot-every x -- x.py", "snapshot-every: 'x' is not a whole number; write e.g. "),
        ("compare vgg16 --network fliud", "network: 'fliud' is unknown; did you mean 'fluid'? known: auto, fluid, "),
        ("completion tcsh", "shell: 'tcsh' is unknown; known: bash, fish, zsh"),
        ("comapre vgg16", "command: 'comapre' is unknown; did you mean 'compare'? known: "),
        ("collective star:4@1Gbps --cluster a", "option: '--cluster' is unknown; known: --"),
        ("plan vgg16 --cluster 2xV100@1Gbps --allow fp15", "allow: 'fp15' is unknown; did you mean 'fp16'"),
        ("compare vgg16 --cluster", "cluster is missing; write --cluster CLUSTER"),
        ("compare vgg16", "command line: 'compare vgg16' lacks --cluster CLUSTER; add it: e.g. 4x8xV100@100Gbps"),
        ("bound", "command line: 'bound' lacks WORKLOAD and --cluster CLUSTER; add WORKLOAD: a model of the zoo ("),
        ("simulate", "foretrain: script is missing; write e.g. foretrain simulate --cluster "),
        ("search", f"foretrain: script is missing; write e.g. {OF_SEARCH}"),
        ("lab rate", "command line: 'lab rate' lacks RATE; add it: rate in each direction, e.g. 500Mbps"),
        (
            "simulate --cluster H100 extra -- x.py",
            "command line: '--cluster H100 extra' has 'extra', which is one word too many; leave it out, or write",
        ),
        (
            "bound vgg16 cluster a",
            "'bound vgg16 cluster a' has 'cluster', which belongs to no option; did you mean '--",
        ),
        ("bound vgg16 -batch 3 --cluster a", "option: '-batch' is unknown; did you mean '--batch'"),
        ("bound vgg16 --no_tun --batch x", "option: '--no_tun' is unknown; "),
        ("--hepl", "option: '--hepl' is unknown; did you mean '--help'? known: --help, --quiet, --version"),
        ("run --scheduel p3 -- x.py", "option: '--scheduel' is unknown; did you mean '--schedule'"),
        ("run --max_restarts 2 --nproc 2 -- x.py", "script: 'x.py' is no file"),
    ],
)
def test_a_wrong_command_line_names_the_option_the_value_and_the_remedy(capsys, line: str, told: str):
    (said,) = refused(line.split(), capsys).splitlines()
    assert said.startswith("foretrain: ")
    assert told in said


def test_help_of_search_has_a_whole_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["search", "--help"])
    assert f": {OF_SEARCH}\n" in capsys.readouterr().out


TRAIN = """
import torch

model = torch.nn.Linear(2, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
"""
RECORD = """
import torch

def setup():
    model = torch.nn.Linear(2, 2)
    return model, (lambda: model(torch.ones(1, 2)).sum().backward()), 1
"""


ADVISED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(12):
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
print("the script's own")
"""
BUILD = """
import torch

class Made:
    def __init__(self):
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.batches = [torch.ones(4, 2)]

    def loss(self, model, batch):
        return model(batch).square().mean()

    def evaluate(self, model):
        return -self.loss(model, self.batches[0])

def build(seed):
    return Made()
"""
RUN = """
command = "train.py"
cluster = "dgx-h100:1,device=H100"
step_time = "2.84 s"
contributor = "Ada"
source = "a log"
software = "torch 2.6"
date = 2025-11-25
"""
SWEEP = """
workloads = ["alexnet"]
clusters = ["2x1xV100@1Gbps"]
schedules = ["ddp"]
"""
SPACE = "[values]\nbatch = [1, 2]\n"
FILES = {"step.py": RECORD, "train.py": TRAIN, "advised.py": ADVISED, "build.py": BUILD, "run.toml": RUN}
FILES |= {"sweep.toml": SWEEP, "space.toml": SPACE, "operators.json": '{"calls": []}'}
TOLERATED = "--small lossy --seeds 2 --rounds 4 --evaluations 2 --grid 0 1"
JSON = {
    "compare": ("alexnet --cluster 4xV100@1Gbps --schedules ddp --no-tune", "runs"),
    "plan": ("alexnet --cluster 4xV100@1Gbps", "schedule"),
    "what-if": ("alexnet --cluster 4xV100@1Gbps --changes rate=2Gbps", "cases"),
    "grid": ("alexnet star:4@1Gbps --schedules ddp", "cells"),
    "sweep": ("sweep.toml --jobs 1", "rows"),
    "schedule": ("alexnet --cluster 4xV100@1Gbps", "script"),
    "bound": ("alexnet --cluster 4xV100@1Gbps", "optimum"),
    "simulate": ("--cluster H100 -- train.py", "ranks"),
    "search": ("--cluster H100 --jobs 1 --space space.toml -- train.py --batch {batch}", "recipes"),
    "calibrate": ("--device cpu --quick", "device"),
    "accuracy add": ("run.toml --into table.toml", "runs"),
    "record": ("step.py:setup --iterations 2", "layers"),
    "run": ("--advise -- advised.py", "models"),
    "doctor": ("", "findings"),
    "topology show": ("star:2@1Gbps", "counts"),
    "topology list": ("", "fabrics"),
    "collective": ("star:4@1Gbps", "collective"),
    "share": ("star:4@1Gbps alexnet@0-1 alexnet@2-3", "job"),
    "tolerance": (f"build.py:build {TOLERATED}", "tolerable"),
    "catalog": ("", "models"),
}
"""Of each command that prints results its arguments, and a key of what it writes as JSON."""
JSON_OF_LABS = {
    "lab up": ("--hosts 2", "hosts"),
    "lab rate": ("1Gbps", "hosts"),
    "lab status": ("", "hosts"),
    "lab down": ("", "removed"),
    "lab compare": (
        "inception_v3 --servers 1 --rate 10Gbps --step-time 30ms --iterations 2 --rounds 1 --schedules fifo",
        "cases",
    ),
}
WITHOUT_JSON = {"server", "explore", "completion", "lab exec"}
"""Commands that print no results of their own."""


def test_every_command_that_prints_results_takes_json_and_quiet(capsys):
    found = set()
    for words in leaves(capsys):
        with pytest.raises(SystemExit, match="0"):
            main([*words, "--help"])
        shown = capsys.readouterr().out
        assert ("--json" in shown) == ("--quiet" in shown)
        if "--json" in shown:
            found.add(" ".join(words))
    assert found == JSON.keys() | JSON_OF_LABS.keys()
    assert {" ".join(words) for words in leaves(capsys)} - found == WITHOUT_JSON


def words_of(arguments: str, *options: object) -> list[str]:
    own, separator, script = arguments.partition(" -- ")
    return [*own.split(), *map(str, options), "--json", "-", *(["--", *script.split()] if separator else [])]


def json_in(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found[0] if isinstance(found, list) else found


@pytest.mark.parametrize("command", JSON)
def test_json_stands_alone_on_stdout(command, tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    arguments, key = JSON[command]
    if command == "run":
        done = foretrain_run(*words_of(arguments), folder=tmp_path)
    else:
        done = warm.run(live_forked.foretrain, [*command.split(), *words_of(arguments)], tmp_path)
    assert key in json_in(done)


def test_json_of_run_says_how_each_model_went(tmp_path):
    (tmp_path / "train.py").write_text(ADVISED)
    done = foretrain_run(*words_of("--schedule fifo -- train.py"), folder=tmp_path)
    (model,) = json_in(done)["models"]
    assert (model["model"], model["schedule"], model["reason"], model["steps"]) == ("Linear", "fifo", None, 12)
    assert model["iteration_time"] == pytest.approx(model["optimum"] * (1 + model["gap"]))
    assert model["forecast"] >= model["optimum"]


def test_json_of_a_lab_stands_alone_on_stdout(name):
    for command, (arguments, key) in JSON_OF_LABS.items():
        done = warm.run(lab_forked.foretrain, [*command.split(), *words_of(arguments, "--name", name)])
        assert key in json_in(done), command


@pytest.mark.process
def test_quiet_prints_nothing_but_json():
    assert foretrain("bound", *HERE, "--quiet").stdout == ""
    assert "optimum" in json.loads(foretrain("bound", *HERE, "--quiet", "--json", "-").stdout)


@pytest.mark.process
def test_without_a_terminal_no_line_is_cut_or_padded_and_nothing_is_coloured():
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    command = [sys.executable, "-m", "foretrain", "compare", *HERE, "--schedules", "ddp,p3", "--no-tune"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) > 120
    assert any(line.startswith("speed-up: over") and line.endswith("of the GPU") for line in shown.splitlines())
    assert all(line == line.rstrip() for line in shown.splitlines())
    (advice,) = (line for line in shown.splitlines() if "orth it" in line)
    assert shown.splitlines()[-1] == advice or "if you keep DDP" in shown


@pytest.mark.process
@pytest.mark.parametrize("wish", ["", "1"])
def test_no_color_is_honoured_in_a_terminal(wish):
    """Colours are codes 30 to 37, 90 to 97 and 38; bold is none."""
    leader, follower = pty.openpty()
    environment = os.environ | {"NO_COLOR": wish, "TERM": "xterm-256color", "COLUMNS": "100"}
    command = [sys.executable, "-m", "foretrain", "help", "compare"]
    with subprocess.Popen(command, env=environment, stdin=follower, stdout=follower, stderr=follower) as process:
        os.close(follower)
        shown = b""
        try:
            while piece := os.read(leader, 1 << 16):
                shown += piece
        except OSError:
            pass  # Linux ends the last read of a terminal so
        finally:
            os.close(leader)
    assert process.returncode == 0
    assert b"WORKLOAD" in shown
    assert bool(re.search(rb"\x1b\[(?:\d+;)*(?:3\d|9[0-7])[;m]", shown)) == (not wish)


@pytest.mark.process
@pytest.mark.parametrize("arguments", [(), ("-V",), ("catalog",), ("catalog", "--json", "-"), ("help", "run")])
def test_a_full_disk_gives_one_line_and_status_1(arguments):
    command = [sys.executable, "-m", "foretrain", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "foretrain: nothing more can be written: No space left on device"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("bound", *HERE, "--json", "/dev/full"),
        ("compare", *HERE, "--schedules", "ddp", "--no-tune", "--html", "/dev/full"),
        ("schedule", *HERE, "--out", "/dev/full"),
        ("record", "step.py:setup", "--iterations", "2", "--out", "/dev/full"),
        ("simulate", "--cluster", "H100", "--json", "/dev/full", "--", "train.py"),
    ],
    ids=lambda value: value[0],
)
def test_a_file_on_a_full_disk_gives_one_line_and_status_1(arguments, tmp_path):
    (tmp_path / "step.py").write_text(RECORD)
    (tmp_path / "train.py").write_text(TRAIN)
    done = warm.run(live_forked.foretrain, arguments, tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "foretrain: nothing more can be written to /dev/full: No space left on device"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_notices_of_a_simulation_are_whole_lines_in_a_log(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    told = foretrain("simulate", "--cluster", "H100", "--", "train.py", cwd=tmp_path).stderr
    assert any(line.startswith("foretrain: Simulated GPUs: ") and line.endswith(".") for line in told.splitlines())


def test_the_overview_fits_a_terminal_of_78_columns(capsys):
    main([])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 78


@pytest.mark.parametrize("command", ["run", "simulate", "search"])
def test_the_usage_of_a_command_that_runs_a_script_names_it(capsys, command: str):
    with pytest.raises(SystemExit, match="0"):
        main(["help", command])
    usage = capsys.readouterr().out.splitlines()[0]
    assert usage.startswith(f"usage: foretrain {command} [-h] ")
    assert usage.endswith(" -- SCRIPT [ARGUMENT ...]")


def test_completion_knows_every_command_and_its_options(capsys):
    options: set[str] = set()
    for words in leaves(capsys):
        with pytest.raises(SystemExit, match="0"):
            main([*words, "--help"])
        heads = re.findall(r"^\W (-.*?)(?:  | \W$)", capsys.readouterr().out, re.MULTILINE)
        options |= {name for head in heads for name in re.findall(r"--[a-z][a-z-]*", head)}
    assert options >= {"--schedule", "--no-tune", "--no-browser"}
    for shell in ("bash", "zsh", "fish"):
        main(["completion", shell])
        text = capsys.readouterr().out
        assert all(f"' {' '.join(words)}'" in text for words in leaves(capsys))
        offered = set(re.findall(r"--[a-z][a-z-]*", text))
        assert offered >= options


def test_a_dry_run_of_the_lab_says_how_long_it_takes(capsys):
    main(["lab", "compare", "alexnet", "--dry-run", "--ratio", "1", "--schedules", "prophet", "--rounds", "2"])
    told = capsys.readouterr().out
    assert re.fullmatch(r"\d+ cases, 15 iterations each in 2 rounds: about \d+\.\d min\n", told)


def test_dry_runs_write_the_numbers_that_they_say(capsys, tmp_path):
    numbers = tmp_path / "numbers.json"
    main(["lab", "compare", "alexnet", "--dry-run", "--schedules", "prophet", "--json", str(numbers)])
    told, found = capsys.readouterr().out, json.loads(numbers.read_text())
    assert told.startswith(f"{found['cases']} cases, ")
    assert f"about {found['seconds'] / 60:.1f} min\n" in told

    (tmp_path / "sweep.toml").write_text(SWEEP)
    arguments = ["sweep", str(tmp_path / "sweep.toml"), "--dry-run", "--json"]
    main([*arguments, str(numbers)])
    assert json.loads(numbers.read_text()) == {"scenarios": 1, "excluded": 0, "repeated": 0, "done": 0}
    alone = warm.run(live_forked.foretrain, [*arguments, "-", "--quiet"], tmp_path)
    assert json_in(alone) == json.loads(numbers.read_text())
