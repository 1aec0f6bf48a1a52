"""Facts of a host and of the way between two hosts, and how those of this host are collected.

What follows from facts is in `foretrain.doctor.findings`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import socket
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from foretrain.comm.coordinator.addresses import addresses_of
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
        headers: whether those of this Python are installed, which ``foretrain simulate`` compiles with.
        built: whether ``foretrain simulate`` has nothing left to compile.
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
    headers: bool = True
    built: bool = False
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


EXTRAS = {
    "torch": (("torch",), "record, run, calibrate, simulate: PyTorch"),
    "keras": (("keras",), "ft.keras: Keras on TensorFlow"),
    "jax": (("jax", "optax"), "ft.jax: JAX with optax"),
    "mxnet": (("mxnet",), "ft.mxnet: MXNet, in an environment of its own"),
    "mpi": (("mpi4py",), "AllReduce(backend='mpi')"),
    "trainers": (("transformers", "accelerate", "lightning", "ray"), "ft.lightning, ft.ray, Hugging Face's Trainer"),
    "report": (("jinja2", "perfetto"), "--html, --trace: pages and traces"),
    "sweep": (("joblib", "pyarrow"), "sweep, search: many scenarios"),
    "dask": (("dask", "distributed"), "sweep, search --backend dask"),
    "ray": (("ray",), "sweep, search --backend ray"),
    "tune": (("optuna", "scipy", "greenlet"), "benchmarks of the published tuner"),
}
"""Extras that commands use: the packages of each and what it is for."""
_INTERFACES = Path("/sys/class/net")
_MEGABIT = 125_000.0
"""Bytes per second."""


def host_facts(built: bool = False) -> HostFacts:
    """Return the facts of this host, and whether the simulated GPU is ``built``; imports torch, which takes seconds."""
    gpus, fault = _gpus()
    cores = len(os.sched_getaffinity(0))
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return HostFacts(
        name=socket.gethostname(),
        versions={"python": platform.python_version()}
        | {package: _version(package) for package in ("foretrain", "torch", "numba", "numpy")},
        missing={
            extra: lacking
            for extra, (packages, _) in EXTRAS.items()
            if (lacking := tuple(package for package in packages if _version(package) is None))
        },
        torch_fault=fault,
        compiler=_compiler(),
        headers=Path(sysconfig.get_paths()["include"], "Python.h").exists(),
        built=built,
        lab_lacks=(("root",) if os.geteuid() else ()) + tuple(name for name in ("ip", "tc") if not shutil.which(name)),
        cores=cores,
        local_ranks=int(ranks) if ranks.isdigit() and int(ranks) else None,
        threads=os.environ.get("OMP_NUM_THREADS", ""),
        gpus=gpus,
        interfaces=interfaces(),
        resolved=_resolved(socket.gethostname()),
        gloo=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        nccl=os.environ.get("NCCL_SOCKET_IFNAME", ""),
    )


def interfaces() -> tuple[NetworkInterface, ...]:
    """Return the interfaces that have an address, in the kernel's order."""
    found = []
    for _, name in socket.if_nameindex():
        if addresses := addresses_of(name, link_local=True):
            found.append(NetworkInterface(name, tuple(addresses), _speed(name)))
    return tuple(found)


def _speed(name: str) -> float | None:
    """Return the speed of an interface's link; the kernel refuses to say, or says −1, where it does not know.

    What a virtual interface says, e.g. 10 Gb/s of a container's, is no speed. Bonds and VLANs say that of a device.
    """
    try:
        stated = (_INTERFACES / name / "uevent").read_text(encoding="utf-8")
        if not (_INTERFACES / name / "device").exists() and not {"DEVTYPE=bond", "DEVTYPE=vlan"} & {*stated.split()}:
            return None
        speed = int((_INTERFACES / name / "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return speed * _MEGABIT if 0 < speed < 1 << 31 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _compiler() -> str | None:
    """Return the compiler that the simulated GPU is built with: ``$CXX``, or g++, c++, or clang++."""
    asked = shlex.split(os.environ.get("CXX", ""))[:1]
    return next((path for name in asked or ("g++", "c++", "clang++") if (path := shutil.which(name))), None)


def _gpus() -> tuple[tuple[str, ...], str]:
    """Return the GPUs that torch sees, and why it cannot be imported."""
    if _version("torch") is None:
        return (), ""
    try:
        import torch

        if not torch.cuda.is_available():
            return (), ""
        return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())), ""
    except (ImportError, OSError, RuntimeError) as error:  # e.g. a library of CUDA that is missing, a driver too old
        return (), str(error).partition("\n")[0]


def _resolved(name: str) -> str | None:
    """Return the first address of ``name`` that can be bound: gloo's choice where no interface is named."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0])
    return None
