"""Commands and queries to the kernel for a lab: ``ip`` and ``tc`` of iproute2, and the counters of interfaces."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretrain.errors import ForetrainError


class LabError(ForetrainError):
    """Error of a lab that cannot be built, found or used; its message has the command that helps."""


def require() -> None:
    """Raise LabError where this process cannot make network namespaces."""
    if os.geteuid() != 0:
        raise LabError("a lab needs root, because it makes network namespaces; put sudo before the command")
    for name in ("ip", "tc"):
        tool(name)


def tool(name: str) -> str:
    """Return the path of a command of iproute2; raise LabError where there is none."""
    if (path := shutil.which(name)) is None:
        raise LabError(
            f"a lab needs the command {name!r}, which is not on the PATH; install iproute2: "
            "apt-get install iproute2, or dnf install iproute iproute-tc"
        )
    return path


def run(*command: str, lines: Sequence[str] = ()) -> str:
    """Return the output of ``ip`` or ``tc``; ``lines`` go to its ``-batch -``. Raise LabError when it fails."""
    done = subprocess.run(
        [*command, "-batch", "-"] if lines else command,
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
        process_group=0,  # Ctrl-C is for this process alone: it must not interrupt a batch
    )
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        remedy = ""
        if "not permitted" in said or "denied" in said:
            remedy = "; inside a container, start that with --privileged, or --cap-add SYS_ADMIN --cap-add NET_ADMIN"
        raise LabError(f"'{' '.join([Path(command[0]).name, *command[1:]])}' failed: {said}{remedy}")
    return done.stdout


def _ask(*command: str) -> list[dict[str, Any]]:
    return json.loads(run(*command) or "[]")


def namespaces() -> list[str]:
    """Return the names of all network namespaces."""
    return [entry["name"] for entry in _ask(tool("ip"), "-j", "netns", "list")]


def links(namespace: str) -> dict[str, dict[str, Any]]:
    """Return interfaces with addresses and counters, by name."""
    found = _ask(tool("ip"), "-j", "-s", "-n", namespace, "address", "show")
    return {link["ifname"]: link for link in found if "ifname" in link}


def alias(namespace: str, interface: str) -> str:
    """Return the note that the kernel keeps beside an interface, or an empty text."""
    (link,) = _ask(tool("ip"), "-j", "-n", namespace, "link", "show", "dev", interface)
    return link.get("ifalias", "")


def shapers(namespace: str) -> dict[str, dict[str, Any]]:
    """Return what shapes each interface: bytes/s, bytes of its longest queue, packets that found it full, its leaves.

    Raw (-r), as tc leaves out limits otherwise.
    """
    found = _ask(tool("tc"), "-j", "-r", "-s", "-n", namespace, "qdisc", "show")
    made: dict[str, dict[str, Any]] = {}
    for entry in found:
        if entry.get("kind") == "tbf" and entry.get("root"):
            options = entry["options"]
            made[entry["dev"]] = {"rate": float(options["rate"]), "limit": options["limit"], "leaves": {}}
            made[entry["dev"]]["drops"] = entry.get("drops", 0)
        elif entry.get("kind") == "htb" and entry.get("root"):
            classes = run(tool("tc"), "-n", namespace, "class", "show", "dev", entry["dev"])
            leaves = {each["handle"]: each for each in found if each["dev"] == entry["dev"] and "parent" in each}
            limits = [leaf["options"].get("limit", 0) for leaf in leaves.values()]
            drops = sum(leaf.get("drops", 0) for leaf in leaves.values() if leaf["options"].get("limit", 0) > 1)
            rate = tree_rate(classes)
            made[entry["dev"]] = {"rate": rate, "limit": max(limits, default=0), "leaves": leaves, "drops": drops}
    return made


def tree_rate(text: str) -> float | None:
    """Return the bytes/s of a tree, of what ``tc class show`` says; None if there is none."""
    found = re.search(r"class htb 9:1 root .*?rate (\d+)([KMGT]?)bit", text)
    return int(found[1]) * 1000 ** " KMGT".index(found[2] or " ") / 8 if found else None


def filters(namespace: str, interface: str) -> list[dict[str, Any]]:
    """Return the filters of what ``interface`` receives."""
    return _ask(tool("tc"), "-j", "-n", namespace, "filter", "show", "dev", interface, "ingress")


def routes(namespace: str, interface: str) -> list[dict[str, Any]]:
    """Return the routes of ``interface``."""
    return _ask(tool("ip"), "-j", "-n", namespace, "route", "show", "dev", interface)


class LinkTraffic:
    """Bytes with headers that hosts have sent and received.

    Args:
        pids: a process on each host; its ``/proc`` entry shows the interfaces of its own network namespace.
        rate: of every link, bytes/s.
    """

    def __init__(self, pids: Sequence[int], rate: float) -> None:
        self._files = [Path(f"/proc/{pid}/net/dev") for pid in pids]
        self._rate = rate
        self._before, self._began = self._read(), time.perf_counter()

    def shares(self) -> tuple[tuple[float, float], ...]:
        """Return the shares of its link's rate that each host has sent and received since the construction."""
        most = self._rate * (time.perf_counter() - self._began)
        return tuple(
            ((sent - before[0]) / most, (received - before[1]) / most)
            for (sent, received), before in zip(self._read(), self._before, strict=True)
        )

    def _read(self) -> list[tuple[int, int]]:
        return [_counted(file.read_text()) for file in self._files]


def _counted(text: str) -> tuple[int, int]:
    """Return bytes sent and received on all interfaces but the loopback."""
    sent = received = 0
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            fields = numbers.split()
            received, sent = received + int(fields[0]), sent + int(fields[8])
    return sent, received
