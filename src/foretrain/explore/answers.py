"""Questions of the explorer, as the query of a URL, and its answers: verdict, numbers and figures as JSON."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from foretrain.device.presets import preset_names
from foretrain.errors import ConfigError, unknown
from foretrain.experiments import Comparison, ParameterSweep, sweep
from foretrain.experiments.comparison import advise
from foretrain.network import Cluster, cluster
from foretrain.planner.candidate_search import COMPRESSIONS, compressed, streaming
from foretrain.planner.search import tune
from foretrain.report.document import BLUE, ORANGE, Figure
from foretrain.report.page import bars, cards, curves, parts
from foretrain.report.page import render as report_page
from foretrain.report.simulation_page import MEMORY, memory_timeline
from foretrain.report.table import rows
from foretrain.report.timeline_plot import lanes
from foretrain.report.trace import trace_json
from foretrain.schedule import POLICIES
from foretrain.simulation import simulate
from foretrain.units import SECOND, format_size, format_time, to_seconds
from foretrain.workload import Workload, load, zoo, zoo_models

if TYPE_CHECKING:
    from foretrain.network.deployment import Deployment

ENGINES: Mapping[str, str] = {
    "all_reduce": "all-reduce",
    "ps_colocated": "parameter servers beside the workers",
    "ps": "as many parameter servers as hosts",
}
"""Engines that exchange gradients, and what the page calls them."""
FABRICS: Mapping[str, str] = {
    "star": "one switch",
    "leaf_spine": "leaf and spine, 4 hosts a leaf, 4:1 oversubscribed",
    "torus": "torus",
}
FILE = "file"
"""Name of the workload that came from a file."""
_LIMITS = {"hosts": 4096, "gpus": 64, "batch": 65536}
_LABELS = {"rate": "link of a host", "gpus": "GPUs a host"}
"""Labels of the page's controls, where they are not the parameters' names."""
_SPANS = 400
"""Spans of a lane: what a window of usual width can show."""
_DRAWN_HOSTS = 64


@dataclass(frozen=True, slots=True)
class Opened:
    """Workload or result that the command line opened; the browser cannot name another.

    Attributes:
        workload: recorded workload, or None.
        source: how the command line names it.
        results: documents of finished runs by kind: "simulation", and whatever has a figure in `RESULTS`.
    """

    workload: Workload | None = None
    source: str = ""
    results: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, compare=False)


def opened(text: str) -> tuple[Opened, str]:
    """Return what ``text`` names, and the model to begin with: a zoo model, a .toml workload or a result's .json."""
    path = Path(text)
    if path.suffix == ".toml":
        return Opened(load(path), text), FILE
    if path.suffix != ".json":
        if text.replace("-", "_").lower() not in zoo_models():
            raise unknown("workload", text, zoo_models())
        return Opened(), text.replace("-", "_").lower()
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError("workload", text, f"cannot be read ({error.strerror})", "give an existing file") from None
    except ValueError as error:
        raise ConfigError("workload", text, f"is not JSON ({error})", "give what a command wrote with --json") from None
    for kind, (belongs, _) in RESULTS.items():
        if isinstance(found, dict) and belongs(found):
            return Opened(source=text, results={kind: found}), "resnet50"
    raise ConfigError("workload", text, "is no result that can be shown", "give what simulate or search --json wrote")


@dataclass(frozen=True, slots=True)
class Question:
    """Scenario as the page's controls hold it.

    Attributes:
        model: of the zoo, or `FILE`.
        gpu: name of a GPU.
        rate: of a host's link, Gb/s.
        hosts: that train.
        gpus: of each host.
        batch: samples per GPU; 0 is the model's usual one.
        engine: one of `ENGINES`.
        schedule: policy, with knobs if wanted.
        compression: "none", "fp16" or "bf16".
        fabric: topology of the tab "network", one of `FABRICS`.
    """

    model: str = "resnet50"
    gpu: str = "V100"
    rate: float = 7.0
    hosts: int = 4
    gpus: int = 1
    batch: int = 0
    engine: str = "all_reduce"
    schedule: str = "prophet"
    compression: str = "none"
    fabric: str = "star"

    @classmethod
    def of(cls, query: Mapping[str, str], source: Opened) -> Question:
        """Return the question in a URL's query, with defaults for what it leaves out. Raises ConfigError."""
        known = {field.name: field.default for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, text in query.items():
            if name not in known:
                raise unknown("parameter", name, list(known))
            default = known[name]
            values[name] = text if isinstance(default, str) else _number(name, text, whole=isinstance(default, int))
        question = cls(**values)
        choices = {
            "model": [*zoo_models(), *([FILE] if source.workload else [])],
            "gpu": preset_names(),
            "engine": list(ENGINES),
            "compression": ["none", *COMPRESSIONS],
            "fabric": list(FABRICS),
        }
        for name, allowed in choices.items():
            if getattr(question, name) not in allowed:
                raise unknown(name, getattr(question, name), allowed)
        if question.schedule.partition("(")[0].strip() not in POLICIES:
            raise unknown("schedule", question.schedule, list(POLICIES))
        return question

    @property
    def cluster(self) -> str:
        """Return the cluster in foretrain's notation, without a GPU for a recorded workload: its times are its own."""
        exchange = {"all_reduce": "", "ps_colocated": ",ps=colocated", "ps": f",ps={self.hosts}"}[self.engine]
        gpu = "" if self.model == FILE else f"x{self.gpu}"
        return f"{self.hosts}x{self.gpus}{gpu}@{self.rate:.6g}Gbps{exchange}"

    def query(self) -> str:
        """Return the question as a URL's query."""
        return urlencode(dataclasses.asdict(self))

    def scenario(self, source: Opened) -> tuple[Workload, Cluster]:
        """Return workload and cluster."""
        place = cluster(self.cluster)
        assert isinstance(place, Cluster)
        if self.model == FILE:
            assert source.workload is not None
            work = source.workload
        else:
            work = _built(self.model, self.gpu, self.batch)
        kind = None if self.compression == "none" else self.compression
        return compressed(work, kind, streaming(place)), place

    def command(self, source: Opened, *, tuned: bool) -> str:
        """Return the command line that computes the same, with the schedules' knobs searched or not."""
        name = shlex.quote(source.source) if self.model == FILE else self.model
        batch = f" --batch {self.batch}" if self.batch and self.model != FILE else ""
        sent = "" if self.compression == "none" else f" --compression {self.compression}"
        schedules = "ddp" if self.schedule == "ddp" else f'ddp "{self.schedule}"'
        untuned = "" if tuned else " --no-tune"
        return f"foretrain compare {name} --cluster {self.cluster}{batch} --schedules {schedules}{sent}{untuned}"

    def python(self, source: Opened, schedule: str) -> str:
        """Return Python that computes the same under ``schedule``, which has the knobs that were found."""
        batch = f", batch={self.batch}" if self.batch else ""
        made = f'zoo("{self.model}", device="{self.gpu}"{batch})'
        lines = ["import foretrain as ft", ""]
        lines.append(f"workload = ft.workload.{f'load({source.source!r})' if self.model == FILE else made}")
        lines.append(f'place = ft.cluster.cluster("{self.cluster}")')
        if self.compression != "none":
            lines.insert(1, "from foretrain.planner.candidate_search import compressed, streaming")
            lines.append(f'workload = compressed(workload, "{self.compression}", streaming(place))')
        lines.append(f'run = ft.simulate(workload, place, "{schedule}")')
        lines.append("print(run.iteration_time / 1e9, 'ms;', run.gap, 'above T*')")
        return "\n".join(lines) + "\n"


def _number(name: str, text: str, *, whole: bool) -> float | int:
    most = _LIMITS.get(name, 100_000.0)
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = -1
    least = 0 if name == "batch" else 1 if whole else 0.001
    if not least <= value <= most:
        what = "a whole number" if whole else "a number"
        problem = f"is not {what} from {least:g} to {most:,g}"
        raise ConfigError(_LABELS.get(name, name), text, problem, "enter e.g. 8")
    return value


@lru_cache(maxsize=64)
def _built(model: str, gpu: str, batch: int) -> Workload:
    return zoo(model, device=gpu, batch=batch or None)


@lru_cache(maxsize=1)
def compared(question: Question, source: Opened, *, tuned: bool = False) -> Comparison:
    """Return DDP and the chosen schedule, with their defaults or with their knobs searched.

    The latest is kept: a page or a trace of what is shown needs no second search.
    """
    work, place = question.scenario(source)
    names = dict.fromkeys(("ddp", question.schedule))
    runs = [simulate(work, place, tune(work, place, name) if tuned else name) for name in names]
    advice = advise(runs[0], runs)
    return Comparison(work, place, tuple(runs), runs[0], runs[0].bound, advice)


def answer(question: Question, source: Opened, *, tuned: bool = False) -> str:
    """Return the JSON of the first tab: verdict, cards, rows, bars and lanes."""
    found = compared(question, source, tuned=tuned)
    work = found.workload
    document = {
        "tuned": tuned,
        "verdict": found.advice.verdict,
        "reasons": found.advice.reasons[:1].upper() + found.advice.reasons[1:] + ".",
        "good": found.advice.worth_it,
        "cards": [dataclasses.asdict(card) for card in cards(found)],
        "parts": [dataclasses.asdict(part) for part in parts(found.bound)],
        "rows": [dataclasses.asdict(row) for row in rows(found)],
        "seconds": {run.schedule.name: to_seconds(run.iteration_time) for run in found.runs},
        "optimum": to_seconds(found.bound.time),
        "schedules": [str(run.schedule) for run in found.runs],
        "workload": f"{work.name}, {work.batch} {work.unit} a GPU, {format_size(work.size)} of gradients, "
        f"{format_time(work.compute)} of computation",
        "query": question.query(),
        "command": question.command(source, tuned=tuned),
        "python": question.python(source, str(found.runs[-1].schedule)),
    }
    return _joined(document, {"bars": bars(found), "lanes": lanes(found.runs, most=_SPANS)})


def over_rates(question: Question, source: Opened) -> str:
    """Return the JSON of the tab "what if": both schedules from an eighth to eight times the rate, and over hosts."""
    work, place = question.scenario(source)
    names = list(dict.fromkeys(("ddp", question.schedule)))
    along = f"rate={question.rate / 8:.6g}Gbps:{question.rate * 8:.6g}Gbps"
    rates = sweep(work, place, names, along, points=9, tuned=False)
    hosts = _over_hosts(work, place, names)
    shown = {"rates": curves(rates, question.schedule), "hosts": curves(hosts, question.schedule)}
    text = "Left the iteration time, right the same as a multiple of T*. Untuned."
    return _joined({"query": question.query(), "text": text}, shown)


def _over_hosts(work: Workload, place: Cluster, names: list[str]) -> ParameterSweep:
    return sweep(work, place, names, f"workers=2:{max(16, 2 * place.workers)}", points=6, tuned=False)


def network(question: Question, source: Opened) -> str:
    """Return the JSON of the tab "network": how much an all-reduce of all gradients uses each link of a fabric."""
    from foretrain.network.collective_benchmark import exchange
    from foretrain.network.deployment_notation import deployment
    from foretrain.report.collective_table import NOT_MEASURED
    from foretrain.report.fabric_plot import fabric
    from foretrain.report.topology_layout import DrawnLinks

    if not 2 <= question.hosts <= _DRAWN_HOSTS:
        raise ConfigError("hosts", question.hosts, "cannot be drawn as a network", f"choose 2 to {_DRAWN_HOSTS}")
    work, _ = question.scenario(source)
    place: Deployment = deployment(f"{_shape(question)}@{question.rate:.6g}Gbps")
    found = exchange(place, "all_reduce", work.size)
    from_, to, used = found.busiest
    engine = "a ring" if question.engine == "all_reduce" else "parameter servers"
    document = {
        "query": question.query(),
        "text": f"All-reduce of {format_size(work.size)} among {found.ranks} ranks of {found.topology.name} by the "
        f"fastest algorithm, {found.name}; the tab Schedule counts {engine}. "
        f"{format_time(found.time)}, bus bandwidth {found.bandwidth / 1e9:.3g} GB/s; "
        f"the busiest link, {from_} to {to}, is {used:.0%} used. {NOT_MEASURED[0].upper()}{NOT_MEASURED[1:]}.",
        "command": f"foretrain collective {_shape(question)}@{question.rate:.6g}Gbps --size {work.size}B",
    }
    return _joined(document, {"fabric": fabric(DrawnLinks.of(found.topology, found.utilisation))})


def _shape(question: Question) -> str:
    hosts = question.hosts
    if question.fabric == "leaf_spine":
        if hosts % 4 or hosts < 8:
            raise ConfigError("hosts", hosts, "do not fill leaves of 4 hosts", "choose 8, 12, 16, …")
        return f"leaf_spine:{hosts // 4}x4,oversubscription=4"
    if question.fabric == "torus":
        side = max(one for one in range(1, math.isqrt(hosts) + 1) if hosts % one == 0)
        if side < 2:
            raise ConfigError("hosts", hosts, "are no rectangle of at least 2 x 2", "choose e.g. 4, 6, 8 or 9")
        return f"torus:{side}x{hosts // side}"
    return f"star:{hosts}"


def saved_page(question: Question, source: Opened, *, tuned: bool = False) -> str:
    """Return the report of the question, as ``foretrain compare --html`` writes it."""
    return report_page(compared(question, source, tuned=tuned), question.command(source, tuned=tuned))


def trace(question: Question, source: Opened, *, tuned: bool = False) -> str:
    """Return both schedules' timelines in Chrome's format, which Perfetto reads."""
    return trace_json(compared(question, source, tuned=tuned).runs).decode()


def results(source: Opened) -> str:
    """Return the JSON of the tabs of finished runs: title, lines and figures of each."""
    made = {kind: RESULTS[kind][1](found) for kind, found in source.results.items()}
    return "{" + ",".join(f"{json.dumps(kind)}:{text}" for kind, text in made.items()) + "}"


def result_trace(source: Opened) -> bytes:
    """Return the trace of the finished simulation's first live rank, where ``foretrain simulate --trace`` wrote it."""
    named = source.results.get("simulation", {}).get("traces") or [""]
    remedy = "simulate again with --json and --trace, and leave the files where they are"
    try:
        found = Path(named[0]).read_bytes()
        text = gzip.decompress(found) if named[0].endswith(".gz") else found
    except (OSError, EOFError) as error:
        raise ConfigError("trace", named[0], f"cannot be read ({error})", remedy) from None
    # Another's result might name any file.
    if b'"traceEvents"' not in text:
        raise ConfigError("trace", named[0], "is no trace", remedy)
    return text


def _joined(document: Mapping[str, Any], figures: Mapping[str, Figure]) -> str:
    drawn = ",".join(f"{json.dumps(name)}:{figure.to_json()}" for name, figure in figures.items())
    return json.dumps(document)[:-1] + f', "figures":{{{drawn}}}}}'


# Results of finished runs.

_ACCOUNTS = {"compute": BLUE, "exposed": ORANGE, "waiting": "#fdba74", "idle": "#cbd5e1"}


def _simulation(found: Mapping[str, Any]) -> str:
    """Step account, memory and critical path of what ``foretrain simulate --json`` wrote."""
    ranks = found["ranks"][:32]
    names = [f"rank {rank['rank']}" for rank in ranks]
    account, memory = (Figure(34 * len(ranks) + 70, barmode="stack") for _ in range(2))
    for name, colour in _ACCOUNTS.items():
        widths = [100 * rank["shares"][name] for rank in ranks]
        told = f"%{{y}}: {name} %{{x:.1f}} %"
        account.add_bar(x=widths, y=names, name=name, marker={"color": colour}, hovertemplate=told)
    for kind, colour in MEMORY.items():
        sizes = [rank["memory"]["breakdown"].get(kind, 0) / 2**30 for rank in ranks]
        if not any(sizes):
            continue
        told = f"%{{y}}: {kind} %{{x:.2f}} GiB"
        memory.add_bar(x=sizes, y=names, name=kind, marker={"color": colour}, hovertemplate=told)
    account.update_xaxes(title="part of a step (%)", range=[0, 100.5])
    memory.update_xaxes(title="GiB at the peak")
    for figure in (account, memory):
        figure.update_yaxes(autorange="reversed", fixedrange=True)
    shares = list((found["critical_path"] or {"shares": {}})["shares"].items())[:12]
    path = Figure(26 * max(len(shares), 1) + 60, showlegend=False)
    lengths = [100 * share for _, share in shares]
    path.add_bar(x=lengths, y=[name for name, _ in shares], marker={"color": BLUE}, hovertemplate="%{y}: %{x:.1f} %")
    path.update_xaxes(title="part of the critical path (%)", rangemode="tozero")
    path.update_yaxes(autorange="reversed")
    time, low, high = (format_time(time * SECOND) for time in (found["iteration_time"], *found["iteration_interval"]))
    document = {
        "title": f"{time} (95 %: {low} to {high}) an iteration on {found['cluster']}",
        "trace": bool(found.get("traces")),
        "steps": {"rank": ranks[0]["rank"], "seconds": ranks[0]["steps"]},
    }
    drawn = {"step account": account, "memory at its peak": memory}
    lines = [
        (name, [(time * SECOND, size) for time, size in rank["memory"].get("timeline", ())])
        for name, rank in zip(names, ranks, strict=True)
    ]
    if over_time := memory_timeline(lines):
        drawn["memory over the last step"] = over_time
    return _joined(document, drawn | ({"critical path": path} if shares else {}))


def _search(found: Mapping[str, Any]) -> str:
    """Steps of the fastest recipes, and time against memory, of what ``foretrain search --json`` wrote."""
    recipes = [one for one in found["recipes"] if "seconds" in one]
    best = sorted(recipes, key=lambda one: one["seconds"] / (one["tokens"] or 1))
    names = [", ".join(f"{flag}={value}" for flag, value in one["values"].items()) for one in best]
    steps = Figure(30 * min(len(best), 24) + 90, barmode="stack")
    for name, colour in _ACCOUNTS.items():
        widths = [one[name] for one in best[:24]]
        told = f"<b>%{{y}}</b><br>{name}: %{{x:.4g}} s"
        steps.add_bar(x=widths, y=names[:24], name=name, marker={"color": colour}, hovertemplate=told)
    steps.update_xaxes(title="step (s)")
    steps.update_yaxes(autorange="reversed")
    memory = Figure(420, showlegend=False)
    memory.add_scatter(
        x=[one["memory"] / 2**30 for one in best],
        y=[one["seconds"] for one in best],
        customdata=names,
        mode="markers",
        marker={"color": BLUE, "size": 7},
        hovertemplate="<b>%{customdata}</b><br>%{x:.1f} GiB, %{y:.4g} s",
    )
    memory.update_xaxes(title="memory of a GPU at its peak (GiB)")
    memory.update_yaxes(title="step (s)")
    winner = ", ".join(f"{flag}={value}" for flag, value in found["winner"].items())
    won = next((one for one in best if one["values"] == found["winner"]), best[0])
    time, low, high = (format_time(time * SECOND) for time in (won["seconds"], *won["interval"]))
    title = (
        f"{winner} is the best of {len(recipes)} recipes on {found['cluster']}: {time} (95 %: {low} to {high}) a step"
    )
    return _joined({"title": title}, {"steps of the fastest": steps, "time and memory": memory})


RESULTS: Mapping[str, tuple[Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any]], str]]] = {
    "simulation": (lambda found: "iteration_sigma" in found and "ranks" in found, _simulation),
    "search": (lambda found: "recipes" in found and "winner" in found, _search),
}
"""Of each kind of result how its document is recognised, and what shows it; each kind is a tab of the page."""
