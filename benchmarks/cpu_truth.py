"""How far off is the simulation? Unmodified scripts, simulated on this machine's CPU and run on it, in the lab.

The hosts are network namespaces on links of the given rate. A script (benchmarks/cpu_scripts) takes a GPU if there is
one, else the CPU, and does not know where it runs. For each number of hosts:

1. foretrain calibrate measures this CPU while as many processes compute as there will be hosts. With more hosts than
   cores an operator's time thus includes its share of waiting for a core.
2. foretrain simulate --record-operators tells which operators a script launches, and calibrate measures just these.
3. All-reduces of the lab are timed, and max(floor, theta + kappa * size) is fitted to them: the star's rate and the
   software of a step of its ring. So is how much longer computing takes while they are under way.
4. The script is simulated with that, and run. No number of its real run goes into its forecast.

All of this happens in each of two rounds, in which scripts and rates take turns, so that what disturbs the machine
disturbs measurements and runs alike; the error of a round is that of its forecast by the median step of its run, and a
cell's is the mean over rounds. The first steps of a run do not count. Needs root.

--quick: one script, 2 hosts, both rates. --full: 3 scripts, 2 and 4 hosts, both rates, about 15 minutes.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from measure import finish, options, spread

from foretrain.device import calibration
from foretrain.lab import Lab, launch
from foretrain.lab.calibration import Fit, fit, nominal
from foretrain.lab.messages import CalibrationSample
from foretrain.network import Cluster
from foretrain.units import parse_rate

SCRIPTS = Path(__file__).parent / "cpu_scripts"
WARMUP = 4
"""Steps that do not count: DDP rebuilds its buckets, and memory is allocated."""
STEPS = 12
"""Of a run, warm-up included."""
ROUNDS = 2
_STEP = re.compile(r"step (\d+): ([\d.]+) ms")


@dataclass(frozen=True)
class Cell:
    """A script on so many hosts with links of a rate.

    Attributes:
        real: seconds of the steps of its real runs, by round.
        told: what the simulation said, by round.
    """

    script: str
    hosts: int
    rate: str
    real: list[list[float]] = field(default_factory=list, compare=False)
    told: list[dict[str, Any]] = field(default_factory=list, compare=False)

    @property
    def path(self) -> str:
        return str(SCRIPTS / f"{self.script}.py")

    @property
    def errors(self) -> list[float]:
        """Relative, by round."""
        return [told["iteration_time"] / median(real) - 1 for told, real in zip(self.told, self.real, strict=True)]

    def __str__(self) -> str:
        return f"{self.script}, {self.hosts} hosts, {self.rate}"


@dataclass(frozen=True)
class Network:
    """What an all-reduce costs in the lab, and how much longer computing takes during one."""

    cost: Fit
    overlap: float
    samples: list[dict[str, Any]]

    def cluster(self, hosts: int) -> str:
        """The star whose ring costs that: the latency of one all-reduce is spread over its steps."""
        rate = 2 * (hosts - 1) / hosts / self.cost.per_byte * 1e12
        least = max(self.cost.overhead + self.cost.latency, self.cost.floor)
        step = least / (2 * (hosts - 1))
        return f"star:{hosts}@{rate:.0f}B/s,latency=0ns,collective=ring,step={step / 1e6:.3f}us"


def foretrain(*arguments: str) -> None:
    """A command; its output only where it fails."""
    done = subprocess.run([sys.executable, "-m", "foretrain", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"foretrain {' '.join(arguments)}:\n{done.stdout}{done.stderr}")


def lines(lab: Lab, *command: str) -> list[str]:
    """What rank 0 writes when ``command`` runs on all hosts."""
    found: list[str] = []
    launch(
        lab,
        [sys.executable, *command],
        timeout=300,
        on_line=lambda rank, line: found.append(line) if not rank else None,
    )
    return found


def described(folder: Path, hosts: int) -> Path:
    """The file that describes one of ``hosts``."""
    base = folder / "cpu.json"
    foretrain("calibrate", "--device", "cpu", "--processes", str(hosts), "--quick", "--out", str(base))
    return base


def calibrated(folder: Path, base: Path, cell: Cell) -> Path:
    """The same with the operators that the script launches, which are recorded where they are not known yet."""
    told, found = (folder / f"{cell.script}{name}.json" for name in ("-operators", ""))
    common = ("--device", "cpu", "--processes", str(cell.hosts))
    if not told.exists():
        recording = ("--steps", "2", "--record-operators", str(told))
        foretrain(
            "simulate", "--cluster", f"star:{cell.hosts}@1Gbps", "--device", str(base), *recording, "--", cell.path
        )
    foretrain("calibrate", *common, "--operators", str(told), "--merge", str(base), "--out", str(found))
    return found


def network(lab: Lab, hosts: int, rate: float) -> Network:
    """Measured now."""
    told = next(line for line in lines(lab, str(SCRIPTS / "network.py"), str(hosts), str(rate)) if line.startswith("{"))
    found = json.loads(told)
    samples = msgspec.convert(found["samples"], tuple[CalibrationSample, ...])
    overlap = max(1.0, median(one for one, _ in found["overlap_busy"]))
    return Network(fit(samples, nominal(Cluster(hosts, up=rate, down=rate))), overlap, found["samples"])


def forecast(cell: Cell, device: Path, net: Network, folder: Path) -> dict[str, Any]:
    """What the simulation says; ``iteration_time`` in seconds."""
    known = calibration.load(device)
    described = dataclasses.replace(known.described(), overlap=net.overlap)
    mine, out = folder / "device.json", folder / "forecast.json"
    calibration.dump(dataclasses.replace(known, description=described), mine)
    cluster = net.cluster(cell.hosts)
    foretrain(
        "simulate", "--cluster", cluster, "--device", str(mine), "--steps", "5", "--json", str(out), "--", cell.path
    )
    network = {"fit": dataclasses.asdict(net.cost), "overlap": net.overlap, "samples": net.samples}
    return json.loads(out.read_text()) | {"cluster": cluster, "network": network}


def run(cell: Cell, lab: Lab) -> list[float]:
    """Runs the script for real: seconds of its steps."""
    steps = map(_STEP.match, lines(lab, cell.path, "--steps", str(STEPS)))
    return [float(found[2]) / 1e3 for found in steps if found and int(found[1]) >= WARMUP]


def cells(quick: bool) -> Iterator[list[Cell]]:
    """What is compared, by the number of hosts."""
    for hosts in (2,) if quick else (2, 4):
        scripts = ("mlp",) if quick else ("mlp", "cnn", "gpt")
        yield [Cell(script, hosts, rate) for script in scripts for rate in ("100Mbps", "1Gbps")]


def turn(group: list[Cell], lab: Lab, folder: Path) -> None:
    """One round: measures the network and the CPU, forecasts and runs."""
    hosts, networks, devices = group[0].hosts, {}, {}
    base = described(folder, hosts)
    for cell in group:
        lab.rate(cell.rate)
        if cell.rate not in networks:
            networks[cell.rate] = network(lab, hosts, parse_rate(cell.rate))
        if cell.script not in devices:
            devices[cell.script] = calibrated(folder, base, cell)
        cell.real.append(run(cell, lab))
        cell.told.append(forecast(cell, devices[cell.script], networks[cell.rate], folder))


def show(cell: Cell) -> None:
    """One line."""
    expected = 1e3 * fmean(told["iteration_time"] for told in cell.told)
    compute, exposed = (1e3 * fmean(told["ranks"][0][name] for told in cell.told) for name in ("compute", "exposed"))
    steps = [1e3 * one for real in cell.real for one in real]
    print(
        f"{cell!s:28} real {spread(steps)} ms, {len(steps)} steps; forecast {expected:.4g} ms (computes {compute:.4g},"
        f" waits {exposed:.4g}); error {100 * fmean(cell.errors):+.1f} %",
        flush=True,
    )


def main() -> None:
    """Prints a line per cell, and the RESULT line."""
    arguments = options(__doc__ or "")
    found: list[Cell] = []
    for group in cells(arguments.quick):
        with TemporaryDirectory() as name, Lab.up("truth", group[0].hosts, group[0].rate) as lab:
            for _ in range(ROUNDS):
                turn(group, lab, Path(name))
        for cell in group:
            show(cell)
        found += group
    errors = [abs(fmean(cell.errors)) for cell in found]
    details = [dataclasses.asdict(cell) | {"errors": cell.errors} for cell in found]
    finish(arguments, "cpu_truth", {"error_median": median(errors), "error_max": max(errors)}, details, seed=0)


if __name__ == "__main__":
    main()
