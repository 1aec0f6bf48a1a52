"""Findings from facts: what to mend on the hosts of a job, one sentence each, with the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from statistics import median

from foretrain.doctor.facts import Diagnosis, HostFacts, NetworkInterface, PairFacts
from foretrain.torch_version import TESTED, was_tested
from foretrain.units import MILLISECOND, format_rate, format_time

MOST_SKEW = 5 * MILLISECOND
"""Difference of clocks that a time service stays far below, and that blurs the steps of a trace."""
_REACHED = 0.7
"""Share of its link's speed that one TCP connection should reach."""
_SLOWER = 0.5
"""Share of the median of all pairs below which a pair is slow."""
_MEASURABLE = 1.25e9
"""Bytes per second that one connection of this program reaches on any machine; of faster links no more is asked."""
_VIRTUAL = ("docker", "veth", "br-", "virbr", "cni", "flannel", "tun", "tap")


def findings(found: Diagnosis) -> list[str]:
    """Return what is to be mended, the most grave first; empty if nothing is."""
    texts = [*found.failures]
    by_text: dict[str, list[int]] = {}
    for rank, facts in sorted(found.hosts.items()):
        measured = {pair.interfaces[pair.hosts.index(rank)] for pair in found.pairs if rank in pair.hosts}
        for text in (*_network(facts), *_chosen(facts, measured), *_software(facts), *_cores(facts)):
            by_text.setdefault(text, []).append(rank)
    several = len(found.hosts) > 1
    texts += [f"{_hosts(ranks)}: {text}" if several else text for text, ranks in by_text.items()]
    return [*texts, *_differences(found.hosts), *_clocks(found.pairs), *_rates(found)]


def gloo_interface(facts: HostFacts) -> NetworkInterface | None:
    """Return the interface that gloo takes: the named one, or that of the host's name, or loopback; None is no such."""
    if facts.gloo:
        return _named(facts, facts.gloo.split(",")[0])
    if facts.resolved is None or _is_loopback(facts.resolved):
        return _named(facts, "lo")
    return next((one for one in facts.interfaces if facts.resolved in one.addresses), None)


def nccl_interface(facts: HostFacts) -> NetworkInterface | None:
    """Return the interface that NCCL takes first; None where NCCL_SOCKET_IFNAME fits none.

    The variable lists prefixes, or whole names behind "=", or what to leave out behind "^". Without it NCCL prefers
    "ib", then all but docker and loopback.
    """
    names = facts.nccl.lstrip("^=").split(",") if facts.nccl else []
    if facts.nccl.startswith("^"):
        exact = facts.nccl.startswith("^=")
        return next((one for one in _by_preference(facts) if not _matches(one, names, exact)), None)
    if names:
        return next((one for one in facts.interfaces if _matches(one, names, facts.nccl.startswith("="))), None)
    return next(iter(_by_preference(facts)), None)


def _matches(one: NetworkInterface, names: Sequence[str], exact: bool) -> bool:
    return any(one.name == name if exact else one.name.startswith(name) for name in names)


def _by_preference(facts: HostFacts) -> list[NetworkInterface]:
    def order(one: NetworkInterface) -> int:
        return 0 if one.name.startswith("ib") else 3 if one.name == "lo" else 2 if one.name.startswith("docker") else 1

    return sorted(facts.interfaces, key=order)


def _named(facts: HostFacts, name: str) -> NetworkInterface | None:
    return next((one for one in facts.interfaces if one.name == name), None)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _network(facts: HostFacts) -> Iterator[str]:
    outward = [one for one in facts.interfaces if one.name != "lo"]
    real = [one for one in outward if not one.name.startswith(_VIRTUAL)] or outward
    if not real:
        yield "no interface but loopback has an address, so no other host can be reached: set one up."
        return
    best = max(real, key=lambda one: one.speed or 0.0).name
    chosen = gloo_interface(facts)
    none = f"has an address here (there are {', '.join(one.name for one in facts.interfaces)}): set it to {best}."
    if facts.gloo and chosen is None:
        yield f"no interface of GLOO_SOCKET_IFNAME={facts.gloo} {none}"
    elif facts.gloo and chosen and chosen.name == "lo":
        yield f"GLOO_SOCKET_IFNAME=lo cannot reach other hosts: set it to {best}."
    elif facts.resolved is None:
        yield (
            f"gloo would use lo, which no other host reaches, because this host's name ({facts.name}) resolves to no "
            f"address of its own: set GLOO_SOCKET_IFNAME={best} or mend /etc/hosts."
        )
    elif chosen and chosen.name == "lo":
        yield (
            f"gloo would use lo ({facts.resolved}), which no other host reaches, because this host's name "
            f"({facts.name}) resolves to it: set GLOO_SOCKET_IFNAME={best} or mend /etc/hosts."
        )
    if facts.nccl and nccl_interface(facts) is None:
        yield f"no interface of NCCL_SOCKET_IFNAME={facts.nccl} {none}"


def _chosen(facts: HostFacts, measured: AbstractSet[str]) -> Iterator[str]:
    """Compare the interfaces over which other hosts were reached with those of gloo and NCCL, and with faster ones."""
    if not measured or "lo" in measured:  # hosts on one machine
        return
    name = max(measured, key=lambda one: _speed(facts, one) or 0.0)
    for library, chosen in (("gloo", gloo_interface(facts)), ("NCCL", nccl_interface(facts))):
        if chosen is not None and chosen.name != "lo" and chosen.name not in measured:
            yield (
                f"{library} would use {chosen.name}, but other hosts were reached over {name}: "
                f"set {library.upper()}_SOCKET_IFNAME={name}."
            )
    speed = _speed(facts, name)
    faster = [one for one in facts.interfaces if speed and (one.speed or 0.0) >= 2 * speed]
    if speed and faster:
        best = max(faster, key=lambda one: one.speed or 0.0)
        yield (
            f"other hosts were reached over {name} ({format_rate(speed)}), though {best.name} has "
            f"{format_rate(best.speed or 0.0)}: name its addresses in --hosts, and set GLOO_SOCKET_IFNAME and "
            f"NCCL_SOCKET_IFNAME to {best.name}."
        )


def _software(facts: HostFacts) -> Iterator[str]:
    torch = facts.versions.get("torch")
    if torch is None:
        yield "torch is not installed, and record, run and simulate need it: pip install 'foretrain[torch]'."
    elif facts.torch_fault:
        yield f"torch {torch} is installed but cannot be used ({facts.torch_fault}): install it again."
    elif not was_tested(torch):
        yield (
            f"torch {torch} is not among the tested releases ({TESTED[0].release} to {TESTED[-1].release}): check "
            f"results, or pip install 'torch=={TESTED[-1].release}.*'."
        )
    if facts.compiler is None and not facts.built:
        yield "no C++ compiler: simulate cannot compile its GPU; apt install g++, or name yours in CXX."
    if not facts.headers and not facts.built:
        package = ".".join((facts.versions.get("python") or "3").split(".")[:2])
        yield f"no headers of this Python: simulate cannot compile its GPU; apt install python{package}-dev."


def _cores(facts: HostFacts) -> Iterator[str]:
    ranks = facts.local_ranks
    if ranks is None or ranks == 1:
        return
    share = max(1, facts.cores // ranks)
    if ranks > facts.cores:
        yield f"{ranks} ranks share {facts.cores} cores, and those that wait for one delay all: start fewer ranks."
    threads = int(facts.threads) if facts.threads.isdigit() else facts.cores
    if threads > share:
        asked = f"OMP_NUM_THREADS={facts.threads}" if facts.threads else "OMP_NUM_THREADS is not set"
        yield f"{asked}, and {ranks} ranks of {threads} threads share {facts.cores} cores: set OMP_NUM_THREADS={share}."


def _differences(hosts: Mapping[int, HostFacts]) -> Iterator[str]:
    for package in ("foretrain", "torch", "python"):
        groups: dict[str, list[int]] = {}
        for rank, facts in sorted(hosts.items()):
            groups.setdefault(facts.versions.get(package) or "none", []).append(rank)
        if len(groups) > 1:
            shown = ", ".join(f"{number} ({_hosts(ranks)})" for number, ranks in groups.items())
            yield f"hosts differ in {package}: {shown}; install the same everywhere."


def _clocks(pairs: Sequence[PairFacts]) -> Iterator[str]:
    apart = [pair for pair in pairs if abs(pair.skew) > MOST_SKEW + pair.skew_error]
    if apart:
        worst = max(apart, key=lambda pair: abs(pair.skew))
        more = f" (the most of {len(apart)} such pairs)" if len(apart) > 1 else ""
        yield (
            f"clocks of {_hosts(worst.hosts)} differ by {format_time(abs(worst.skew))}{more}: traces of several hosts "
            "will not line up; run chrony."
        )


def _rates(found: Diagnosis) -> Iterator[str]:
    """Compare rates with the speed of the sending interface, and where that is unknown with the other pairs."""
    usual = median(rate for pair in found.pairs for rate in pair.rates) if found.pairs else 0.0
    slow: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for pair in found.pairs:
        for way, rate in enumerate(pair.rates):
            sender, name = pair.hosts[way], pair.interfaces[way]
            speed = _speed(found.hosts[sender], name)
            if rate < (_REACHED * min(speed, _MEASURABLE) if speed else _SLOWER * usual):
                slow.setdefault((sender, name), []).append((pair.hosts[1 - way], rate))
    for (sender, name), ways in sorted(slow.items()):
        worst = ("at worst " if len(ways) > 1 else "") + f"at {format_rate(min(rate for _, rate in ways))}"
        speed = _speed(found.hosts[sender], name)
        of = f"of {format_rate(speed)} on {name}" if speed else f"on {name}; the median of all is {format_rate(usual)}"
        yield (
            f"host {sender} reaches {_hosts([receiver for receiver, _ in ways])} {worst} {of}: look for other "
            "traffic, a slower switch port or cable, and errors (ethtool -S)."
        )


def _speed(facts: HostFacts, name: str) -> float | None:
    interface = _named(facts, name)
    return interface.speed if interface else None


def _hosts(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"host {ranks[0]}"
    return f"hosts {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
