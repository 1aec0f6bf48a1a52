"""``foretrain lab``, as a user types it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from foretrain.cli import main
from foretrain.lab import labs
from tests.processes import foretrain, started
from tests.waiting import until


def lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    return foretrain("lab", *arguments)


@pytest.mark.smoke
def test_from_up_to_down(name, capsys):
    built = lab("up", "--hosts", "3", "--rate", "500Mbps", "--name", name)
    assert built.returncode == 0, built.stderr
    assert "hosts 0 to 2" in built.stdout
    assert f"foretrain lab exec --name {name} 0 -- COMMAND" in built.stdout

    main(["lab", "rate", "100Mbps", "--host", "2", "--name", name])
    found = json.loads(lab("status", "--json", "-", "--name", name).stdout)
    assert found["name"] == name
    assert [host["rate"] for host in found["hosts"]] == [62.5e6, 62.5e6, 12.5e6]
    assert found["background"] is None
    assert found["conditions"] == {
        "bands": 1, "drop": "tail", "loss": 0.0, "lossy_host": None, "background": 0.0, "burst": 1.0
    }  # fmt: skip
    assert found["hosts"][0]["queue"] == 0.008388608
    assert found["hosts"][1].keys() == {
        "index", "namespace", "interface", "address", "rate", "receive_rate", "queue", "congestion", "sent",
        "received", "dropped", "lost", "bands", "processes", "faults",
    }  # fmt: skip

    shown = lab("status", "--name", name).stdout
    for word in ("host", "received", f"ft-{name}-h2", "500 Mbps", "100 Mbps", found["hosts"][1]["address"]):
        assert word in shown

    down = lab("down", "--name", name)
    assert down.stdout == f"lab '{name}' is removed\n"
    assert name not in labs()
    assert "nothing to remove" in lab("down", "--name", name).stdout


def test_status_shows_conditions_and_the_queues_that_were_used(name):
    lab("up", "--hosts", "2", "--bands", "3", "--drop", "selective", "--loss", "2.5%", "--background", "40%",
        "--burst", "3", "--lossy-host", "0", "--name", name)  # fmt: skip
    lab("rate", "10Mbps", "--name", name)
    until(lambda: json.loads(lab("status", "--json", "-", "--name", name).stdout)["hosts"][0]["bands"][4]["sent"] > 9)
    shown = lab("status", "--name", name).stdout.splitlines()
    said = "3 bands, selective drop, 2.5% of packets lost to host 0 in bursts of 3, background of 40%"
    made = {"ets": "ets and red", "htb": "htb"}[
        json.loads(lab("status", "--json", "-", "--name", name).stdout)["queues"]
    ]
    assert shown[0] == f"lab '{name}': {said}, queues of {made}"
    first = next(place for place, line in enumerate(shown) if line.startswith("to host"))
    assert shown[first].split() == ["to", "host", "queue", "packets", "sent", "dropped", "share", "dropped", "marked"]
    # Background flows have no marks, and so the last band.
    assert shown[first + 1].split()[:3] == ["0", "band", "2"]
    assert shown[first + 2].startswith("background flows: 4 of 4 senders, 4.00 Mbps to host 0")


def test_exec_is_the_command(name):
    lab("up", "--hosts", "2", "--rate", "none", "--name", name)
    where = lab("exec", "--name", name, "1", "--", "sh", "-c", "echo $GLOO_SOCKET_IFNAME; ip -br address; exit 7")
    assert where.returncode == 7
    assert where.stdout.startswith("fth1\n")
    assert "10.77." in where.stdout
    wrong = lab("exec", "--name", name, "2", "--", "true")
    assert wrong.returncode == 2
    assert "host: 2 is not in lab" in wrong.stderr


def test_status_shows_who_lives_inside_and_what_is_amiss(name, capsys):
    main(["lab", "up", "--hosts", "2", "--name", name])
    subprocess.run(["ip", "-n", f"ft-{name}-h1", "link", "set", "dev", "fth1", "mtu", "1500"], check=True)
    with started(["ip", "netns", "exec", f"ft-{name}-h0", "sh", "-c", "echo in; read x"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        shown = lab("status", "--name", name).stdout
        assert f"{process.pid} sh -c echo in" in shown
        assert "host 1: its MTU is 1500" in shown
        assert f"foretrain lab up --name {name}" in shown
        capsys.readouterr()
        main(["lab", "down", "--name", name])
        assert f"still alive, without a network: {process.pid} sh -c" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("up", "--rate", "1Gb"), ("rate", "'1Gb'", "is not a rate")),
        (("up", "--hosts", "0"), ("hosts", "1 to 64")),
        (("up", "--name", "My Lab"), ("name", "'My Lab'")),
        (("up", "--queue", "8"), ("queue", "'8'")),
        (("up", "--burst", "5"), ("burst", "add a loss")),
        (("up", "--lossy-host", "1"), ("lossy_host", "add a loss, e.g. 1%, or a background")),
        (("exec", "0"), ("command", "-- ip address")),
        (("exec", "0", "--", "nosuchprogram"), ("command", "'nosuchprogram'")),
    ],
)
def test_wrong_input_is_named_with_its_remedy(arguments, words, refused):
    error = refused(("lab", *arguments))
    assert all(word in error for word in words)


@pytest.mark.parametrize("command", [("up",), ("rate", "1Gbps"), ("exec", "0", "--", "true"), ("status",), ("down",)])
def test_every_command_needs_root_and_iproute2(command, monkeypatch, refused):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "a lab needs root" in refused(("lab", *command), status=1)
    if command[0] in ("up", "status", "down"):
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setenv("PATH", "")
        assert "apt-get install iproute2" in refused(("lab", *command), status=1)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_compare_takes_its_lab_down_when_it_is_told_to_end(name, number, status):
    command = [sys.executable, "-m", "foretrain", "lab", "compare", "resnet50", "--name", name]
    with started(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 300
        while name not in labs():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(timeout=300) == status
    assert name not in labs()
