"""Facts of a host and of the way between two hosts, as they were found; what follows from them is in `findings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretrain.units import Time, to_seconds


@dataclass(frozen=True, slots=True)
class NetworkInterface:
    """Network interface that is up.

    Attributes:
        name: e.g. eth0.
        addresses: IPv4 and IPv6.
        speed: of its link, bytes per second each way; None where the kernel does not know it.
    """

    name: str
    addresses: tuple[str, ...]
    speed: float | None = None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts of one host.

    Attributes:
        name: its own.
        versions: of Python, foretrain and packages; None is not installed.
        missing: packages that are not installed, by the extra of foretrain that needs them; none for a whole extra.
        torch_fault: why torch cannot be imported though it is installed.
        compiler: the C++ compiler that ``foretrain simulate`` would take.
        lab_lacks: what ``foretrain lab`` would lack here.
        cores: that this process may use.
        local_ranks: LOCAL_WORLD_SIZE.
        threads: OMP_NUM_THREADS.
        gpus: names of those that torch sees.
        interfaces: those that are up.
        resolved: the first address to which the host's name resolves and that can be bound, as gloo asks.
        gloo: GLOO_SOCKET_IFNAME.
        nccl: NCCL_SOCKET_IFNAME.
    """

    name: str
    versions: Mapping[str, str | None] = field(default_factory=dict)
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    torch_fault: str = ""
    compiler: str | None = None
    lab_lacks: tuple[str, ...] = ()
    cores: int = 1
    local_ranks: int | None = None
    threads: str = ""
    gpus: tuple[str, ...] = ()
    interfaces: tuple[NetworkInterface, ...] = ()
    resolved: str | None = None
    gloo: str = ""
    nccl: str = ""


@dataclass(frozen=True, slots=True)
class PairFacts:
    """Measurements between two hosts.

    Attributes:
        hosts: their ranks.
        interfaces: through which each reaches the other.
        round_trip: of a small message, the median, ps.
        skew: the second host's clock minus the first's, ps.
        skew_error: most that ``skew`` is off: half of the fastest round trip, ps.
        overhead: θ, time of one small message and its answer where many follow each other, ps.
        rates: of one TCP connection from the first host to the second and back, bytes per second.
    """

    hosts: tuple[int, int]
    interfaces: tuple[str, str]
    round_trip: Time
    skew: Time
    skew_error: Time
    overhead: Time
    rates: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Facts of hosts that answered, by rank, and of their pairs; ``failures`` are sentences on what did not work."""

    hosts: Mapping[int, HostFacts]
    pairs: tuple[PairFacts, ...] = ()
    failures: tuple[str, ...] = ()


def numbers(found: Diagnosis, findings: list[str]) -> dict[str, object]:
    """Return everything for JSON; times in seconds, rates in bytes per second."""
    pairs = [
        {
            "hosts": pair.hosts,
            "interfaces": pair.interfaces,
            "round_trip": to_seconds(pair.round_trip),
            "skew": to_seconds(pair.skew),
            "skew_error": to_seconds(pair.skew_error),
            "overhead": to_seconds(pair.overhead),
            "rates": pair.rates,
        }
        for pair in found.pairs
    ]
    return {"hosts": found.hosts, "pairs": pairs, "findings": findings}
