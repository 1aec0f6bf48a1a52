"""Tables of what ``benchmarks/bounded.py --full --json FILE`` has measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

BASELINES = {
    "gloo ddp": "gloo, DistributedDataParallel's order",
    "tcp fifo": "ring, fifo",
    "tcp bytescheduler": "ring, bytescheduler",
    "tcp prophet": "ring, prophet",
    "tcp-server p3": "server, p3",
    "tcp-server bytescheduler": "server, bytescheduler",
    "tcp-server prophet": "server, prophet",
    "bounded fifo": "**bounded loss**, fifo",
    "bounded bytescheduler": "**bounded loss**, bytescheduler",
    "bounded prophet": "**bounded loss**, prophet",
    "bounded-server p3": "**bounded loss**, server, p3",
    "ltp prophet": "`early_close` (LTP), prophet",
    "optireduce prophet": "`adaptive_timeout`, `hadamard` (OptiReduce), prophet",
    "feedback prophet": "`feedback`, prophet",
}
"""Cases of steps, and how a table names them."""
TRAINED = {
    "tcp gloo": "gloo",
    "tcp ring": "ring",
    "bounded": "bounded",
    "any drop": "any drop",
    "server": "server that updates, p3",
    "ltp": "`early_close`",
    "optireduce": "`adaptive_timeout`, `hadamard`",
    "feedback": "`feedback`",
}
"""The same of trainings."""


def tables(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the content of each table."""
    kinds: dict[str, list[Mapping[str, Any]]] = {"clean": [], "lossy": [], "training": [], "drops": [], "alone": []}
    for one in record["details"]:
        kinds[one["place"]["what"]].append(one)
    machine = record["machine"]
    where = f"Measured on {machine['date']}, {machine['cores']} cores, {machine['cpu']}"
    yield "bounded.md", steps(kinds["lossy"], where)
    of_all = [one for one in kinds["lossy"] if one["place"]["papers"]]
    more = {"baselines": (baselines, of_all), "clean": (clean, kinds["clean"])}
    more |= {"training": (trainings, kinds["training"]), "drops": (drops, kinds["drops"])}
    for name, (table, places) in more.items():
        if places:
            yield f"bounded-{name}.md", table(places)


def steps(places: Sequence[Mapping[str, Any]], where: str) -> str:
    """Return steps over TCP and with bounded loss, place by place, and how far off their forecasts were."""
    rows = [
        "| 300 Mb/s | TCP: median, slowest of 60 | | bounded: median, slowest of 60 | "
        "| speedup, TCP's time ÷ ours: median, slowest |",
        "|---|---|---|---|---|---|",
    ]
    errors: dict[bool, list[float]] = {True: [], False: []}
    for one in places:
        place, shown = one["place"], _middles(one["found"])
        for first in (("tcp", "tcp-server", "gloo"), *[("marked-tcp",)] * place["marked"]):
            (tcp, tcp_name), (ours, our_name) = (
                min((shown[name], name) for name in shown if name.split()[0] in kinds)
                for kinds in (first, ("bounded", "bounded-server"))
            )
            ratios = [
                f"**{ratio:.2f}**" if ratio >= least else f"{ratio:.2f}"
                for ratio, least in zip((tcp[0] / ours[0], tcp[1] / ours[1]), (1.1, 1.5), strict=True)
            ]
            names = [_of_case(name) for name in (tcp_name, our_name)]
            said = _place(place) + ", TCP marked, too" * ("marked-tcp" in first)
            rows.append(f"| {said} | {_both(tcp)} | {names[0]} | {_both(ours)} | {names[1]} | {', '.join(ratios)} |")
        quiet = not place["loss"] and not place["background"]
        forecast = one["found"]["forecast"]
        errors[quiet] += [1e3 * seconds / shown[name][0] - 1 for name, seconds in forecast.items()]
    every = errors[True] + errors[False]
    rows += [
        "",
        f"{where}; times in ms. The packet simulation of the same lab forecasts these steps within "
        f"{_percent(median(map(abs, every)))} in the median ({len(every)} forecasts): from "
        f"{_percent(min(errors[True]))} to {_percent(max(errors[True]))} where nothing is lost and nobody else sends, "
        f"elsewhere from {_percent(min(errors[False]))} to {_percent(max(errors[False]))}.",
    ]
    return "\n".join(rows) + "\n"


def baselines(places: Sequence[Mapping[str, Any]]) -> str:
    """Return steps of every baseline, a row each, and a column for each place."""
    found = [_middles(one["found"]) for one in places]
    rows = [
        f"| median, slowest of 60 | {' | '.join(_place(one['place']) for one in places)} |",
        f"|---|{'---|' * len(places)}",
    ]
    for name, said in BASELINES.items():
        rows.append(f"| {said} | {' | '.join(_both(each[name]) if name in each else '–' for each in found)} |")
    return "\n".join(rows) + "\n"


def clean(places: Sequence[Mapping[str, Any]]) -> str:
    """Return goodput and CPU time of all-reduces without losses."""
    rows = ["| all-reduces of 4 MiB | TCP, ring | UDP, ring | UDP, transpose |", "|---|---|---|---|"]
    for one in places:
        place, cells = one["place"], []
        moved = 4 * 2**20 * 2 * (place["hosts"] - 1) / place["hosts"]
        for name in ("tcp", "udp ring", "udp transpose"):
            times = one["found"][name]
            goodput = 8 * moved / median(times["seconds"]) / 1e9
            cells.append(f"{goodput:.3g} Gb/s, {median(times['cpu']) / (moved * place['hosts'] / 1e9):.2f} s")
        rate = "unpaced" if place["rate"] == "none" else place["rate"].replace("Gbps", " Gb/s")
        rows.append(f"| {place['hosts']} hosts, {rate} | {' | '.join(cells)} |")
    return "\n".join([*rows, "", "Goodput each way, and CPU time of all hosts for a GB.", ""])


def trainings(places: Sequence[Mapping[str, Any]]) -> str:
    """Return the seconds of each training to its accuracy."""
    heads = [
        "2 hosts, 300 Mb/s",
        *TRAINED.values(),
        "lost",
        "speedup, TCP's time ÷ ours",
        "accuracy less TCP's, points",
    ]
    rows = [f"| {' | '.join(heads)} |", f"|---|{'--:|' * (len(heads) - 1)}"]
    for one in places:
        place, summary = one["place"], one["found"]["summary"]
        target, cases = summary["target"], summary["cases"]
        cells = [_reached(cases[name]) if name in cases else "–" for name in TRAINED]
        lost = _percent(cases["bounded"]["lost"], 2) if "lost" in cases["bounded"] else "–"
        ratio = f"**{summary['ratio']:.2f}**" if summary["ratio"] >= 1.1 else f"{summary['ratio']:.2f}"
        cost = f"{_signed(summary['delta'])}, at least {_signed(summary['least'])}"
        said = f"{place['model']} to {100 * target:.0f} %, {_conditions(place)}"
        rows.append(f"| {' | '.join([said, *cells, lost, ratio, cost])} |")
    return "\n".join(rows) + "\n"


def drops(places: Sequence[Mapping[str, Any]]) -> str:
    """Return the rounds to accuracy of random and of selective drop."""
    rows = [
        "| lost of all bytes | any packet: rounds, accuracy | small ones first: rounds, accuracy | ratio of rounds |",
        "|--:|--:|--:|--:|",
    ]
    for one in places:
        summary = one["found"]["summary"]
        cells = [f"{each['rounds']:g}, {_percent(each['accuracy'])}" for each in summary["cases"].values()]
        rows.append(f"| {100 * one['place']['loss']:g} % | {' | '.join(cells)} | {summary['ratio']:.2f} |")
    return "\n".join(rows) + "\n"


def _middles(found: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the median and the slowest step of each case, ms."""
    return {name: (1e3 * median(times), 1e3 * max(times)) for name, times in found.items() if isinstance(times, list)}


def _place(place: Mapping[str, Any]) -> str:
    return f"{place['hosts']} hosts, {_conditions(place)}"


def _conditions(place: Mapping[str, Any]) -> str:
    said = []
    if place["background"]:
        said.append(f"incast of {100 * place['background']:.0f} %")
        said.append("one queue" if place["bands"] == 1 else "three bands")
    loss = f"{100 * place['loss']:g} %"
    if place["grey"]:
        said.append(f"one grey link of {loss}")
    elif place["loss"] or not place["background"]:
        said.append(f"{loss} loss" if place["loss"] else "clean")
    tolerance = place.get("tolerance", 0.05)
    if tolerance != 0.05:
        said.append('p by `"auto"`' if tolerance == "auto" else f"p = {100 * tolerance:g} %")
    if timeout := place.get("least_timeout"):
        said.append(f"TCP's least timeout {timeout} ms")
    return ", ".join(said + ["BBR"] * (place["congestion"] == "bbr"))


def _of_case(name: str) -> str:
    kind, policy = name.split()
    if kind.endswith("server"):
        return f"{policy}, server"
    return f"{policy}, gloo" if kind == "gloo" else policy


def _reached(case: Mapping[str, Any]) -> str:
    if case["seconds"] is None:
        return "never"
    part = f" ({case['reached']} of {case['seeds']} seeds)" * (case["reached"] < case["seeds"])
    return f"{case['seconds']:.2f} s{part}"


def _both(times: tuple[float, float]) -> str:
    return ", ".join(f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in times)


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %".replace("-", "−")


def _signed(share: float) -> str:
    return f"{100 * share:+.2f}".replace("-", "−")
