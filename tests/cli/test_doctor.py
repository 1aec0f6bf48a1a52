"""``foretrain doctor``, as a user types it."""

import json
import os
import sys

import pytest

from foretrain.cli import main
from foretrain.doctor.facts import HostFacts
from tests.doctor.test_session import addresses
from tests.processes import foretrain, started


@pytest.mark.smoke
def test_two_hosts_as_a_launcher_starts_them(tmp_path):
    key = tmp_path / "key"
    key.write_text("5a" * 32)
    key.chmod(0o600)
    hosts = ",".join(f"{host}:{port}" for host, port in addresses(2))
    arguments = ["doctor", "--hosts", hosts, "--secret-file", str(key), "--timeout", "300s"]
    environment = os.environ | {"RANK": "1", "WORLD_SIZE": "2"}
    with started([sys.executable, "-m", "foretrain", *arguments], env=environment) as other:
        done = foretrain(*arguments, "--rank", "0", "--json", tmp_path / "out.json")
        assert other.wait(300) == 0
    assert done.returncode == 0, done.stderr
    assert "0 – 1" in done.stdout
    assert "lo – lo" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["hosts"].keys() == {"0", "1"}
    assert found["pairs"][0]["round_trip"] < 1
    assert all(f"- {text}" in done.stdout for text in found["findings"])


def test_one_host(capsys):
    main(["doctor"])
    shown = capsys.readouterr().out
    for word in ("C++ compiler", "OMP_NUM_THREADS", "127.0.0.1", "gloo takes", "NCCL takes", "what it is for"):
        assert word in shown


def test_without_torch_nothing_is_said_of_what_only_torch_knows(monkeypatch, capsys):
    facts = HostFacts("host", {"torch": None}, built=True)
    monkeypatch.setattr("foretrain.doctor.facts.host_facts", lambda built: facts)
    main(["doctor"])
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["simulated", "GPU", "needs torch"] in [[word.strip() for word in row] for row in rows]
    assert ["GPUs", "not", "looked for without torch"] in [[word.strip() for word in row] for row in rows]


def test_a_host_that_does_not_answer_makes_the_status_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORETRAIN_SECRET", "5a" * 32)
    (host, port), silent = addresses(2)
    hosts = f"{host}:{port},{silent[0]}:{silent[1]}"
    with pytest.raises(SystemExit, match="1"):
        main(["doctor", "--hosts", hosts, "--rank", "0", "--timeout", "0.2s", "--json", str(tmp_path / "out.json")])
    shown = capsys.readouterr().out
    assert f"{silent[0]}:{silent[1]} did not answer within 0.2 s" in shown
    assert json.loads((tmp_path / "out.json").read_text())["findings"]


HOSTS = ("--hosts", "127.0.0.1:5001,127.0.0.1:5002")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rank", "1"), ("rank", "add --hosts")),
        (HOSTS, ("rank", "is missing", "add --rank R")),
        ((*HOSTS, "--rank", "2"), ("is none of 2 hosts", "write 0 to 1")),
        ((*HOSTS, "--rank", "0"), ("secret-file", "is missing", "openssl rand")),
        ((*HOSTS, "--rank", "0", "--timeout", "0s"), ("timeout", "is no time to wait")),
        (("--hosts", "127.0.0.1,192.0.2.77", "--rank", "1"), ("rank", "192.0.2.77, which is no address of this host")),
        (("--hosts", "a:b", "--rank", "0"), ("hosts", "is no host and port")),
        (("--hosts", "a,a:29600", "--rank", "0"), ("hosts", "is there twice")),
        (("--hosts", "no.such.host.invalid,b", "--rank", "0"), ("cannot be resolved", "write its address")),
    ],
)
def test_wrong_input_is_named_with_its_remedy(arguments, words, monkeypatch, refused):
    for name in ("RANK", "SLURM_PROCID", "FORETRAIN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    error = refused(("doctor", *arguments))
    assert all(word in error for word in words), error


def test_more_processes_than_hosts_are_named(monkeypatch, refused):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert "are not the 8 that were started; start one process a host" in refused(("doctor", *HOSTS))
