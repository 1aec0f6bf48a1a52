"""What the explorer is asked and answers, and that its server answers nobody else."""

import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from urllib.parse import parse_qsl

import pytest

import foretrain as ft
from foretrain.cli import main
from foretrain.errors import ConfigError
from foretrain.explore import Explorer, Opened, Question, opened
from foretrain.explore.answers import RESULTS, answer, network, over_rates, results
from foretrain.live.simulate import Simulated
from foretrain.report.findings import SimulationFindings, numbers
from foretrain.workload import save
from tests.report.conftest import simulated

NOTHING = Opened()
SMALL = Question(model="alexnet", batch=16, hosts=4)


@pytest.fixture(scope="module")
def done() -> Simulated:
    return simulated()


def test_times_are_those_of_simulate():
    found = json.loads(answer(SMALL, NOTHING))
    workload = ft.workload.zoo("alexnet", batch=16)
    for name in ("ddp", "prophet"):
        run = ft.simulate(workload, "4x1xV100@7Gbps", name, trace=False)
        assert found["seconds"][name] == run.iteration_time / 1e12
    assert found["optimum"] == ft.bound(workload, "4x1xV100@7Gbps").time / 1e12
    assert set(found["figures"]) == {"bars", "lanes"}


def test_a_question_survives_its_url():
    question = Question(model="vgg16", rate=12.5, hosts=8, engine="ps_colocated", compression="fp16", fabric="torus")
    assert Question.of(dict(parse_qsl(question.query())), NOTHING) == question


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"model": "/etc/passwd"}, "model"),
        ({"model": "file"}, "model"),
        ({"rate": "nan"}, "link of a host: 'nan' is not a number"),
        ({"rate": "1e9"}, "from 0.001 to 100,000"),
        ({"hosts": "5000"}, "hosts: '5000' is not a whole number from 1 to 4,096"),
        ({"hosts": "2.5"}, "whole"),
        ({"gpu": "V1000"}, "did you mean"),
        ({"schedule": "prophets"}, "prophet"),
        ({"path": "x"}, "parameter"),
    ],
)
def test_what_is_no_question_is_refused(query, message):
    with pytest.raises(ConfigError, match=message):
        Question.of(query, NOTHING)


@pytest.mark.parametrize(
    ("tuned", "compression"),
    [(False, "none"), (True, "none"), (False, "fp16")],
    ids=["defaults", "tuned", "compressed"],
)
def test_command_and_python_compute_the_same(capsys, tmp_path, tuned: bool, compression: str):
    found = json.loads(answer(replace(SMALL, compression=compression), NOTHING, tuned=tuned))
    assert ("--compression fp16" in found["command"]) == (compression == "fp16")
    assert found["command"].startswith("foretrain compare alexnet --cluster 4x1xV100@7Gbps --batch 16")
    assert ("--no-tune" in found["command"]) == (not tuned)
    exec(found["python"], {})
    assert f"{found['seconds']['prophet'] * 1e3}"[:6] in capsys.readouterr().out
    main([*shlex.split(found["command"])[1:], "--json", str(tmp_path / "found.json")])
    runs = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert [run["iteration_time"] for run in runs] == list(found["seconds"].values())


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_command_and_python_of_a_recorded_workload_compute_the_same(capsys, tmp_path, compression: str):
    path = tmp_path / "my job's workload.toml"
    save(ft.workload.zoo("alexnet", batch=16), path)
    source, model = opened(str(path))
    question = Question(model=model, gpu="H100", batch=8, gpus=2, schedule="p3", compression=compression)
    found = json.loads(answer(question, source))
    exec(found["python"], {})
    assert f"{found['seconds']['p3'] * 1e3}"[:6] in capsys.readouterr().out
    main([*shlex.split(found["command"])[1:], "--json", str(tmp_path / "found.json")])
    runs = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert [run["iteration_time"] for run in runs] == list(found["seconds"].values())


def test_compression_halves_what_is_sent():
    plain, half = (json.loads(answer(Question(rate=1.0, compression=kind), NOTHING)) for kind in ("none", "fp16"))
    assert half["optimum"] < 0.8 * plain["optimum"]
    assert "51.1 MB" in half["workload"]
    assert "compressed(workload" in half["python"]


def test_curves_go_through_the_question():
    found = json.loads(over_rates(SMALL, NOTHING))
    (ddp,) = [t for t in found["figures"]["rates"]["data"] if t.get("name") == "ddp" and t["panel"] == 1]
    assert len(ddp["x"]) == 9
    assert ddp["x"][4] == pytest.approx(7)


def test_a_network_shows_its_loads():
    found = json.loads(network(SMALL, NOTHING))
    assert "100% used" in found["text"]
    assert any("used" in str(t.get("name")) for t in found["figures"]["fabric"]["data"])
    with pytest.raises(ConfigError, match="choose 2 to 64"):
        network(Question(hosts=128), NOTHING)


def test_a_finished_simulation_is_a_tab(done, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(numbers(SimulationFindings(done))))
    source, model = opened(str(path))
    assert model == "resnet50"
    shown = json.loads(results(source))["simulation"]
    assert "9.00 ms" in shown["title"]
    names = {"step account", "memory at its peak", "memory over the last step", "critical path"}
    assert set(shown["figures"]) == names
    (line,) = shown["figures"]["memory over the last step"]["data"]
    assert (line["x"], line["y"]) == ([0, 4, 9], [3, 20, 3])
    assert set(RESULTS) >= set(source.results)


def test_a_finished_search_is_a_tab(tmp_path):
    account = {"compute": 1.0, "exposed": 0.5, "waiting": 0.1, "idle": 0.0, "memory": 2**34, "tokens": 4096}
    recipes = [
        {"values": {"tp": 2}, "status": "simulated", "seconds": 1.6, "interval": [1.2, 2.1], **account},
        {"values": {"tp": 4}, "status": "simulated", "seconds": 1.4, "interval": [1.1, 1.8], **account},
        {"values": {"tp": 8}, "status": "out of memory", "reason": "needs more"},
    ]
    path = tmp_path / "search.json"
    path.write_text(json.dumps({"recipes": recipes, "winner": {"tp": 4}, "cluster": "dgx-h100:1"}))
    shown = json.loads(results(opened(str(path))[0]))["search"]
    assert shown["title"] == "tp=4 is the best of 2 recipes on dgx-h100:1: 1.40 s (95 %: 1.10 s to 1.80 s) a step"
    assert shown["figures"]["steps of the fastest"]["data"][0]["y"] == ["tp=4", "tp=2"]


@pytest.mark.parametrize(("text", "message"), [("resnet500", "resnet50"), ("no.json", "cannot be read")])
def test_what_cannot_be_opened_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        opened(text)


@pytest.mark.process
def test_the_server_answers_its_own_page_alone():
    with Explorer(NOTHING, SMALL) as explorer:
        base = f"http://127.0.0.1:{explorer.port}"

        def get(path: str, **headers: str) -> tuple[int, str]:
            try:
                with urllib.request.urlopen(urllib.request.Request(base + path, headers=headers), timeout=300) as found:
                    return found.status, found.read().decode()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read().decode()

        status, text = get("/answer?" + SMALL.query())
        assert (status, json.loads(text)["tuned"]) == (200, False)
        status, text = get("/tuned?" + SMALL.query())
        assert (status, json.loads(text)["tuned"]) == (200, True)
        for path, untuned in (("/page", True), ("/tuned/page", False)):
            status, text = get(f"{path}?{SMALL.query()}")
            assert (status, "--no-tune" in text) == (200, untuned)
        assert get("/", Host="evil.example")[0] == 403
        assert get("/../../etc/passwd")[0] == 404
        status, text = get("/answer?model=/etc/passwd")
        assert (status, "model" in json.loads(text)["error"]) == (200, True)
        assert get("/page?model=/etc/passwd")[0] == 400
        assert get("/answer?" + "x" * 3000)[0] == 414


SCRIPT = """
from foretrain.explore import Explorer, Opened, Question

with Explorer(Opened(), Question(model="alexnet")) as explorer:
    explorer.slowly("/tuned", Question(model="alexnet"))
"""


@pytest.mark.process
def test_a_worker_that_does_not_start_is_told_from_one_that_is_killed(tmp_path):
    (tmp_path / "made.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "made.py"], capture_output=True, text=True, check=False, cwd=tmp_path)
    told = done.stderr.splitlines()[-1]
    assert told.startswith("foretrain.errors.ForetrainError: the process that searches does not start;")
    assert "if __name__ == '__main__'" in told


@pytest.mark.process
def test_a_worker_that_is_killed_is_replaced_by_one_that_lasts():
    def pid(explorer: Explorer) -> int:
        (process,) = explorer._pool._processes
        return process

    with Explorer(NOTHING, SMALL) as explorer:
        url = f"http://127.0.0.1:{explorer.port}/tuned?{SMALL.query()}"
        for _ in range(2):
            killed = pid(explorer)
            os.kill(killed, signal.SIGKILL)
            with urllib.request.urlopen(url, timeout=300) as found:
                assert json.loads(found.read())["tuned"]
            assert pid(explorer) != killed
        # Threads of requests end; the worker that one of them asked for stays.
        lasting = pid(explorer)
        with urllib.request.urlopen(url, timeout=300) as found:
            assert json.loads(found.read())["tuned"]
        assert pid(explorer) == lasting
    with pytest.raises(ProcessLookupError):
        os.kill(lasting, 0)
