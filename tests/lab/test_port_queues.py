"""Lines for tc of both forms of a port's queues, and what its counters say; no kernel is needed."""

import re
from typing import get_args

import pytest

from foretrain.comm.bounded import service_of
from foretrain.lab import Conditions
from foretrain.lab.conditions import spare_of
from foretrain.lab.port_queues import BandStatus, Form, bands_of, form_of, lines_of, lost_of

FORMS: tuple[Form, ...] = get_args(Form)
LIMIT = 10**6


def tree(conditions: Conditions, form: Form, host: int | None = 0) -> list[str]:
    return lines_of(conditions, "ftp0", 1.25e8, 125_000, LIMIT, host=host, form=form)


def qdiscs(lines: list[str]) -> dict[str, str]:
    """Return kind and options of each queueing discipline below the root, by handle."""
    found = re.findall(r"qdisc add dev ftp0 parent \S+ handle (\w+): (.*)", "\n".join(lines))
    assert len({handle for handle, _ in found}) == len(found)
    return dict(found)


def targets(lines: list[str], service: int, protocol: str, parent: str) -> list[str]:
    """Return the classes to which filters at ``parent`` send packets of that type of service."""
    match = {"ip": "ip tos", "ipv6": "ip6 priority"}[protocol]
    filters = rf"filter add dev ftp0 parent {parent}: protocol {protocol} prio \d u32"
    return re.findall(rf"{filters} match {match} {service:#x} 0xfc flowid (\S+)", "\n".join(lines))


def leaf_of(lines: list[str], service: int, protocol: str = "ip") -> str:
    """Return the handle of the leaf where a packet of that type of service waits."""
    (root,) = re.findall(r"root handle 9: (htb default \w+)", "\n".join(lines))
    built = qdiscs(lines) | {"9": root}
    children = dict(re.findall(r"qdisc add dev ftp0 parent (\S+) handle (\w+):", "\n".join(lines)))
    handle = "9"
    while (words := built[handle].split())[0] in ("htb", "ets"):
        # Without a filter it goes to the default of htb, or the last band of ets.
        (target,) = targets(lines, service, protocol, handle) or [f"{handle}:{words[2]}"]
        handle = children[target]
    return handle


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("protocol", ["ip", "ipv6"])
@pytest.mark.parametrize(
    ("bands", "of_urgency"), [(1, (0, 0, 0, 0)), (2, (0, 0, 0, 0)), (3, (0, 1, 1, 1))]
)  # the last of several bands is what has no mark
def test_a_packet_waits_in_the_queue_of_its_code(form, protocol, bands, of_urgency):
    for drop in ("tail", "selective"):
        lines = tree(Conditions(bands, drop), form)
        for urgency, band in enumerate(of_urgency):
            assert leaf_of(lines, service_of(urgency, 1), protocol) == f"1{band}"
            assert leaf_of(lines, service_of(urgency, 3), protocol) == ("2" if drop == "selective" else "1") + f"{band}"
        for other in (0, 0xB8):
            assert leaf_of(lines, other, protocol) == f"1{bands - 1}"


@pytest.mark.parametrize("form", FORMS)
def test_short_queues_are_only_at_ports_that_drop_selectively(form):
    leaves = {"10", "11", "12"}
    for conditions, host in ((Conditions(3), 0), (Conditions(3, "selective"), None)):
        found = {handle: what for handle, what in qdiscs(tree(conditions, form, host)).items() if handle in leaves}
        assert found == dict.fromkeys(leaves, f"bfifo limit {LIMIT}")
        assert not qdiscs(tree(conditions, form, host)).keys() & {"20", "21", "22"}
    selective = qdiscs(tree(Conditions(3, "selective"), form))
    assert selective.keys() >= leaves | {"20", "21", "22"}


def test_red_marks_behind_a_quarter_of_the_queue_and_drops_only_what_may_be_dropped():
    built = qdiscs(tree(Conditions(2, "selective"), "ets"))
    assert built["8"] == "ets bands 2 strict 2"
    assert built["30"] == built["31"] == "ets bands 2 quanta 18000 18000"
    quarter, spare = LIMIT // 4, spare_of(LIMIT)
    marking = f"min {quarter} max {quarter} avpkt 9000 burst 28 probability 1 bandwidth 1000000000bit ecn nodrop"
    assert built["11"] == f"red limit {LIMIT} {marking}"
    dropping = f"min {spare} max {spare} avpkt 9000 burst 17 probability 1 bandwidth 1000000000bit"
    assert built["21"] == f"red limit {2 * spare} {dropping}"


def test_htb_needs_neither_ets_nor_red():
    conditions = Conditions(3, "selective", 0.1)
    kinds = {what.split()[0] for what in qdiscs(tree(conditions, "htb")).values()}
    assert kinds == {"bfifo"}
    assert qdiscs(tree(conditions, "htb"))["21"] == f"bfifo limit {spare_of(LIMIT)}"


@pytest.mark.parametrize("form", FORMS)
def test_losses_go_to_a_queue_that_holds_nothing(form):
    single, bursts, elsewhere = (
        tree(conditions, form)
        for conditions in (Conditions(loss=0.25), Conditions(loss=0.25, burst=5), Conditions(loss=0.25, lossy_host=1))
    )
    assert qdiscs(single)["ff"] == qdiscs(bursts)["ff"] == "bfifo limit 1"
    programs = [line for line in single if " bpf " in line]
    assert [re.findall(r"53 1 0 (\d+)", line) for line in programs] == [[str(2**30)]] * 2
    assert all(line.endswith("flowid 9:ff") for line in programs)
    # A program of eBPF is attached there.
    assert not any(" bpf " in line for line in bursts)
    assert "ff" not in qdiscs(elsewhere)
    assert "ff" not in qdiscs(tree(Conditions(loss=0.25), form, host=None))


@pytest.mark.parametrize("form", FORMS)
def test_the_rate_is_that_of_the_root_and_a_tree_replaces_the_one_before(form):
    lines = tree(Conditions(3, "selective", 0.1), form)
    assert lines[0] == "qdisc replace dev ftp0 root handle 2: pfifo"
    assert lines[2].startswith("class add dev ftp0 parent 9: classid 9:1 htb rate 1000000000bit ceil 1000000000bit")


def test_counters_are_read_from_either_form():
    leaves = {
        "ff:": {"kind": "bfifo", "packets": 0, "drops": 7},
        "10:": {"kind": "red", "packets": 5, "drops": 1, "marked": 3},
        "20:": {"kind": "red", "packets": 4, "drops": 2, "marked": 0},
        "8:": {"kind": "ets", "packets": 9, "drops": 3},
        "30:": {"kind": "ets", "packets": 9, "drops": 3},
    }
    assert bands_of(leaves) == (BandStatus(0, False, 5, 1, 3), BandStatus(0, True, 4, 2, 0))
    assert (lost_of(leaves), form_of(leaves)) == (7, "ets")
    fifos = {"10:": {"kind": "bfifo", "packets": 5, "drops": 1}, "20:": {"kind": "bfifo", "packets": 4, "drops": 2}}
    assert bands_of(fifos) == (BandStatus(0, False, 5, 1), BandStatus(0, True, 4, 2))
    # By DSCP, as eBPF counts: AF41, AF43 and one that has no queue of its own.
    marks = {34: 2, 38: 1, 46: 1}
    assert bands_of(fifos, marks) == (BandStatus(0, False, 5, 1, 3), BandStatus(0, True, 4, 2, 1))
    assert (lost_of(fifos), form_of(fifos), form_of({})) == (0, "htb", None)
