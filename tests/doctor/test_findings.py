"""Each finding comes from the facts that it is about, names its hosts, and says what to do."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from foretrain.doctor.facts import EXTRAS, Diagnosis, HostFacts, NetworkInterface, PairFacts, host_facts, interfaces
from foretrain.doctor.findings import findings, gloo_interface, nccl_interface
from foretrain.units import MICROSECOND, SECOND

ETHERNET = NetworkInterface("eth0", ("10.0.0.1",), 1.25e9)
INTERFACES = (NetworkInterface("lo", ("127.0.0.1",)), NetworkInterface("docker0", ("172.17.0.1",)), ETHERNET)
SOUND = HostFacts(
    name="node0",
    versions={"python": "3.11.7", "foretrain": "0.1.0", "torch": "2.15.0+cu132"},
    compiler="/usr/bin/g++",
    cores=16,
    interfaces=INTERFACES,
    resolved="10.0.0.1",
)
PAIR = PairFacts((0, 1), ("eth0", "eth0"), 50 * MICROSECOND, 0, 20 * MICROSECOND, 10 * MICROSECOND, (1.1e9, 1.1e9))


def test_a_sound_host_has_no_findings():
    assert findings(Diagnosis({0: SOUND})) == []
    assert findings(Diagnosis({0: SOUND, 1: SOUND}, (PAIR,))) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"resolved": "127.0.1.1"}, ("gloo would use lo (127.0.1.1)", "set GLOO_SOCKET_IFNAME=eth0", "/etc/hosts")),
        ({"resolved": None}, ("resolves to no address", "set GLOO_SOCKET_IFNAME=eth0")),
        ({"gloo": "eth7"}, ("GLOO_SOCKET_IFNAME=eth7", "there are lo, docker0, eth0", "set it to eth0")),
        ({"gloo": "lo"}, ("cannot reach other hosts", "set it to eth0")),
        ({"nccl": "ib"}, ("no interface of NCCL_SOCKET_IFNAME=ib has", "set it to eth0")),
        ({"interfaces": INTERFACES[:1]}, ("no interface but loopback",)),
        ({"compiler": None}, ("no C++ compiler", "apt install g++")),
        ({"headers": False}, ("no headers of this Python", "apt install python3.11-dev")),
        ({"versions": {}}, ("torch is not installed", "pip install 'foretrain[torch]'")),
        ({"versions": {"torch": "2.9.1"}}, ("torch 2.9.1 is not among the tested releases", "pip install 'torch==")),
        ({"torch_fault": "libcudart.so: no such file"}, ("cannot be used (libcudart.so", "install it again")),
        ({"local_ranks": 4}, ("OMP_NUM_THREADS is not set", "4 ranks of 16 threads", "set OMP_NUM_THREADS=4")),
        ({"local_ranks": 4, "threads": "8"}, ("OMP_NUM_THREADS=8", "set OMP_NUM_THREADS=4")),
        ({"local_ranks": 32, "threads": "1"}, ("32 ranks share 16 cores", "start fewer")),
    ],
)
def test_what_one_host_lacks_is_found_with_its_remedy(change, words):
    (text,) = findings(Diagnosis({0: replace(SOUND, **change)}))
    assert all(word in text for word in words), text


def test_neither_compiler_nor_headers_are_missed_where_nothing_is_left_to_compile():
    assert findings(Diagnosis({0: replace(SOUND, compiler=None, headers=False, built=True)})) == []


def test_hosts_with_the_same_finding_share_a_sentence():
    lacking = replace(SOUND, compiler=None)
    (text,) = findings(Diagnosis({0: lacking, 1: SOUND, 2: lacking}))
    assert text.startswith("hosts 0 and 2: no C++ compiler")


def test_versions_that_differ_are_named_with_their_hosts():
    older = replace(SOUND, versions={**SOUND.versions, "torch": "2.13.0"})
    (text,) = findings(Diagnosis({0: SOUND, 1: older}))
    assert "2.15.0+cu132 (host 0), 2.13.0 (host 1)" in text


def test_only_clocks_that_surely_differ_are_found():
    hosts = {0: SOUND, 1: SOUND}
    late = replace(PAIR, skew=-12 * SECOND // 10)
    (text,) = findings(Diagnosis(hosts, (late,)))
    assert "clocks of hosts 0 and 1 differ by 1.20 s" in text
    assert "run chrony" in text
    assert findings(Diagnosis(hosts, (replace(late, skew_error=2 * SECOND),))) == []


def test_a_slow_way_is_found_by_its_links_speed():
    slow = replace(PAIR, rates=(1.1e9, 0.94e9 / 8))
    (text,) = findings(Diagnosis({0: SOUND, 1: SOUND}, (slow,)))
    assert "host 1 reaches host 0 at 940 Mbps of 10.0 Gbps on eth0" in text


def test_all_slow_ways_of_a_host_are_one_finding():
    pairs = tuple(replace(PAIR, hosts=(0, other), rates=(1e8 / other, 1.1e9)) for other in (1, 2))
    (text,) = findings(Diagnosis(dict.fromkeys(range(3), SOUND), pairs))
    assert "host 0 reaches hosts 1 and 2 at worst at 400 Mbps of 10.0 Gbps on eth0" in text


def test_a_slow_way_of_unknown_speed_is_found_beside_the_others():
    unknown = replace(SOUND, interfaces=(*INTERFACES[:2], replace(ETHERNET, speed=None)))
    pairs = [replace(PAIR, hosts=hosts) for hosts in ((0, 1), (0, 2), (1, 2))]
    pairs[1] = replace(pairs[1], rates=(1.1e9, 1e8))
    (text,) = findings(Diagnosis(dict.fromkeys(range(3), unknown), tuple(pairs)))
    assert "host 2 reaches host 0 at 800 Mbps on eth0; the median of all is 8.80 Gbps" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gloo": "docker0"}, ("gloo would use docker0, but", "over eth0: set GLOO_SOCKET_IFNAME=eth0")),
        ({"nccl": "docker"}, ("NCCL would use docker0, but", "over eth0: set NCCL_SOCKET_IFNAME=eth0")),
        (
            {"interfaces": (*INTERFACES, NetworkInterface("eth1", ("10.1.0.1",), 1.25e10))},
            ("over eth0 (10.0 Gbps), though eth1 has 100 Gbps", "NCCL_SOCKET_IFNAME to eth1"),
        ),
    ],
)
def test_another_interface_than_the_measured_one_is_found(change, words):
    (text,) = findings(Diagnosis({0: replace(SOUND, **change), 1: SOUND}, (PAIR,)))
    assert text.startswith("host 0: ")
    assert all(word in text for word in words), text


def test_interfaces_are_chosen_as_gloo_and_nccl_choose():
    assert gloo_interface(SOUND) == ETHERNET
    assert gloo_interface(replace(SOUND, gloo="docker0")) == INTERFACES[1]
    chosen = {"": "eth0", "eth": "eth0", "=docker0": "docker0", "^eth,lo": "docker0", "ib,do": "docker0", "=eth": None}
    for asked, name in chosen.items():
        found = nccl_interface(replace(SOUND, nccl=asked))
        assert (found.name if found else None) == name, asked


def test_the_facts_of_this_host(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    facts = host_facts()
    assert facts.versions["numba"]
    assert facts.local_ranks == 2
    assert "127.0.0.1" in {address for one in interfaces() for address in one.addresses}


@pytest.mark.parametrize(("kind", "speed"), [("device", 1.25e9), ("bond", 1.25e9), ("vlan", 1.25e9), ("veth", None)])
def test_a_virtual_interface_has_no_speed(kind, speed, monkeypatch, tmp_path):
    monkeypatch.setattr("foretrain.doctor.facts._INTERFACES", tmp_path)
    folder = tmp_path / "lo"
    (folder / "device").mkdir(parents=True) if kind == "device" else folder.mkdir()
    (folder / "speed").write_text("10000\n")
    (folder / "uevent").write_text(f"DEVTYPE={kind}\nINTERFACE=lo\n" if kind in {"bond", "vlan"} else "INTERFACE=lo\n")
    assert [one.speed for one in interfaces() if one.name == "lo"] == [speed]


def test_extras_are_those_of_the_project():
    text = (Path(__file__).parent.parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    for extra, (packages, _) in EXTRAS.items():
        asked = " ".join(extras[extra])
        assert all(package in asked for package in packages), extra
    assert extras.keys() - EXTRAS.keys() == {"examples", "docs", "test", "dev"}
