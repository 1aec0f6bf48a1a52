"""``foretrain doctor``: what a host lacks, and how fast and alike the hosts of a job are."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from foretrain.cli.arguments import JsonFile, TimeText, check_writable, named, write_outputs
from foretrain.errors import ConfigError
from foretrain.files import stdout_console, write_json
from foretrain.units import SECOND, format_rate, format_time, parse_time

if TYPE_CHECKING:
    from rich.table import Table

    from foretrain.doctor.facts import Diagnosis, HostFacts, PairFacts

_PORT = 29600
_RANK_VARIABLES = ("RANK", "SLURM_PROCID")


def doctor(
    *,
    rank: int | None = None,
    hosts: Annotated[str, named("HOST[:PORT],...")] | None = None,
    secret_file: Path | None = None,
    timeout: TimeText = "20s",
    json: JsonFile = None,
) -> None:
    """Examine the hosts of a job and their network: what to mend?

    For several hosts, start it on each with the same --hosts; each measures the way to every other, and rank 0 prints.
    The exit status is 1 where hosts or the way between them could not be examined.

    Args:
        rank: number of this host in --hosts, from 0; by default what RANK or SLURM_PROCID says.
        hosts: HOST[:PORT],HOST[:PORT],..., as other hosts reach them; each listens on its own address, port 29600.
        secret_file: a file with the job's secret, the same on each host; by default what FORETRAIN_SECRET says.
        timeout: how long to wait for other hosts to answer.
        json: write everything; times in seconds, rates in bytes per second. Rank 0 does.
    """
    from foretrain.doctor.facts import Diagnosis, host_facts, numbers
    from foretrain.doctor.findings import findings
    from foretrain.live.device.native_build import is_built

    check_writable(json=json)
    patience = parse_time(timeout, "timeout") / SECOND
    if patience <= 0:
        raise ConfigError("timeout", timeout, "is no time to wait", "write e.g. 20s")
    if hosts is None:
        if rank is not None:
            raise ConfigError("rank", rank, "is of no use alone", "add --hosts HOST,HOST,...")
        found = Diagnosis({0: host_facts(is_built())})
    else:
        addresses = _addresses(hosts)
        number = _rank(rank, len(addresses))
        addresses[number] = _own(addresses[number], number)
        secret = _secret(secret_file)
        from foretrain.doctor.session import diagnose

        sys.stderr.write(f"foretrain: host {number} waits for the others, at most {timeout}\n")
        answer = diagnose(number, addresses, secret, host_facts(is_built()), patience, _tell)
        if answer is None:
            sys.stdout.write(f"host {number} has been measured; host 0 prints what was found\n")
            return
        found = answer
    advice = findings(found)
    console = stdout_console(markup=False)
    for table in _host_tables(found.hosts) if hosts is None else (_hosts_table(found), _pairs_table(found.pairs)):
        if table.row_count:
            console.print(table, "", sep="\n")
    for text in advice or ["Nothing to mend."]:
        console.print(f"- {text}" if advice else text, soft_wrap=True)
    write_outputs(console, (json, lambda path: write_json(path, numbers(found, advice))))
    if found.failures:
        sys.exit(1)


def _addresses(text: str) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for part in text.split(","):
        host, _, port = part.strip().partition(":")
        if not host or (port and not (port.isdigit() and 0 < int(port) < 1 << 16)):
            raise ConfigError("hosts", part, "is no host and port", "write e.g. 10.0.0.1,10.0.0.2:29600")
        found.append((host, int(port or _PORT)))
    if twice := next((one for one in found if found.count(one) > 1), None):
        raise ConfigError("hosts", f"{twice[0]}:{twice[1]}", "is there twice", "name every host once")
    return found


def _rank(given: int | None, size: int) -> int:
    rank, field = given, "rank"
    if rank is None:
        field = next((name for name in _RANK_VARIABLES if os.environ.get(name, "").isdigit()), "")
        if not field:
            raise ConfigError("rank", "", "is missing", "add --rank R, the number of this host in --hosts, from 0")
        rank = int(os.environ[field])
        world = os.environ.get("WORLD_SIZE" if field == "RANK" else "SLURM_NTASKS", "")
        if world.isdigit() and int(world) != size:
            remedy = "start one process a host, and name each host once"
            raise ConfigError("hosts", f"{size} hosts", f"are not the {world} that were started", remedy)
    if not 0 <= rank < size:
        raise ConfigError(field, rank, f"is none of {size} hosts", f"write 0 to {size - 1}")
    return rank


def _own(address: tuple[str, int], rank: int) -> tuple[str, int]:
    """Return this host's address as numbers; another host's, or one that is loopback only by its name, is refused."""
    host, port = address
    try:
        number = socket.gethostbyname(host)
    except OSError as error:
        problem = f"cannot be resolved ({error})"
        raise ConfigError("hosts", host, problem, "write its address, see: ip -4 address") from None
    if number.startswith("127.") and number != host and host != "localhost":
        problem = f"is {number} here, where no other host can reach it"
        raise ConfigError("hosts", host, problem, "write its address, see: ip -4 address, or mend /etc/hosts")
    try:
        with socket.socket() as probe:
            probe.bind((number, 0))
    except OSError:
        problem = f"is host {rank} of --hosts, {host}, which is no address of this host"
        raise ConfigError("rank", rank, problem, "write the place of this host in --hosts, from 0") from None
    return number, port


def _secret(path: Path | None) -> bytes:
    from foretrain.comm.coordinator.handshake import SECRET
    from foretrain.launch.command import check_secret, read_secret

    text = read_secret(path) if path is not None else os.environ.get(SECRET, "")
    remedy = "make one with: openssl rand -hex 32 > FILE; chmod 600 FILE; and copy it to every host"
    if not text:
        raise ConfigError("secret-file", "", "is missing: hosts answer nobody without a secret", remedy)
    check_secret(text, SECRET, "(hidden)", remedy)
    return bytes.fromhex(text)


def _tell(done: int, every: int) -> None:
    if done < every:
        sys.stderr.write(f"foretrain: measuring pair {done + 1} of {every}\n")


def _table(*columns: str) -> Table:
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def _host_tables(hosts: Mapping[int, HostFacts]) -> Sequence[Table]:
    """Return what one host has and what each extra is for."""
    from foretrain.doctor.facts import EXTRAS
    from foretrain.torch_version import was_tested

    (facts,) = hosts.values()
    made, extras = _table("fact", facts.name), _table("extra", "packages", "what it is for")
    for package, number in facts.versions.items():
        tested = "" if package != "torch" or not number else ", tested" if was_tested(number) else ", not tested"
        made.add_row(package, f"{number or 'not installed'}{tested}")
    made.add_row("C++ compiler", facts.compiler or "none")
    made.add_row("headers of Python", "installed" if facts.headers else "not installed")
    torch = facts.versions.get("torch")
    built = "compiled" if facts.built else "to be compiled on first use"
    made.add_row("simulated GPU", built if torch else "needs torch")
    made.add_row("foretrain lab", f"lacks {', '.join(facts.lab_lacks)}" if facts.lab_lacks else "can be built")
    share = (
        f", {facts.cores / facts.local_ranks:.3g} for each of {facts.local_ranks} ranks" if facts.local_ranks else ""
    )
    made.add_row("cores", f"{facts.cores}{share}")
    made.add_row("OMP_NUM_THREADS", facts.threads or "not set")
    made.add_row("GPUs", ", ".join(facts.gpus) or ("none that torch sees" if torch else "not looked for without torch"))
    for one in facts.interfaces:
        speed = format_rate(one.speed) if one.speed else "speed unknown"
        made.add_row(one.name, f"{', '.join(one.addresses)}; {speed}")
    for library, name in zip(("gloo", "NCCL"), _taken(facts), strict=True):
        made.add_row(f"{library} takes", name)
    for extra, (_, purpose) in EXTRAS.items():
        lacking = facts.missing.get(extra)
        extras.add_row(extra, f"lacks {', '.join(lacking)}" if lacking else "installed", purpose)
    return made, extras


def _taken(facts: HostFacts) -> tuple[str, str]:
    from foretrain.doctor.findings import gloo_interface, nccl_interface

    gloo, nccl = gloo_interface(facts), nccl_interface(facts)
    return gloo.name if gloo else "none", nccl.name if nccl else "none"


def _hosts_table(found: Diagnosis) -> Table:
    made = _table("host", "name", "Python", "torch", "cores", "GPUs", "gloo takes", "NCCL takes")
    for rank, facts in sorted(found.hosts.items()):
        versions = (facts.versions.get(package) or "none" for package in ("python", "torch"))
        made.add_row(str(rank), facts.name, *versions, str(facts.cores), str(len(facts.gpus)), *_taken(facts))
    return made


def _pairs_table(pairs: Sequence[PairFacts]) -> Table:
    made = _table("hosts", "interfaces", "round trip", "clocks differ by", "there", "back", "small message θ")
    for pair in pairs:
        made.add_row(
            " – ".join(map(str, pair.hosts)),
            " – ".join(pair.interfaces),
            format_time(pair.round_trip),
            f"{format_time(pair.skew)} ± {format_time(pair.skew_error)}",
            *(format_rate(rate) for rate in pair.rates),
            format_time(pair.overhead),
        )
    return made
