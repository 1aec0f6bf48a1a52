"""Distance to the optimum: every policy × model × rate × exchange, knobs at their best.

Gap = T/T* − 1, simulated and exact: no samples are needed. T* leaves out latency and the cost per operation, so part of
every gap is what the network itself costs.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from statistics import median

from measure import finish, options
from rich.console import Console
from rich.progress import track
from rich.table import Table

from foretrain.planner import tune
from foretrain.schedule import POLICIES
from foretrain.simulation import bound, simulate
from foretrain.workload import zoo

MODELS = ("resnet50", "vgg16", "inception_v3", "bert_large", "gpt2")
RATES = ("1Gbps", "3Gbps", "10Gbps", "25Gbps", "100Gbps")
EXCHANGES = {"all-reduce": "", "ps": ",ps=4"}
QUICK = ("ddp", "bytescheduler", "prophet")


def gaps(scenario: tuple[str, str, str, tuple[str, ...]]) -> dict[str, float]:
    """The gap of each policy in one scenario."""
    model, rate, exchange, names = scenario
    workload, place = zoo(model), f"4x1xV100@{rate}{EXCHANGES[exchange]}"
    return {name: simulate(workload, place, tune(workload, place, name), trace=False).gap for name in names}


def main() -> None:
    """Prints one row a scenario, the summary, and the RESULT line."""
    arguments = options(__doc__ or "")
    names = QUICK if arguments.quick else tuple(POLICIES)
    scenarios = [(m, r, e, names) for m in MODELS for r in RATES for e in EXCHANGES]
    with ProcessPoolExecutor() as pool:
        rows = list(track(pool.map(gaps, scenarios), total=len(scenarios), description="scenarios", transient=True))
    table = Table("model", "rate", "exchange", "binds", *names, title="gap to T* (4 hosts, 1 V100 each, fp32)")
    for (model, rate, exchange, _), row in zip(scenarios, rows, strict=True):
        kind = bound(zoo(model), f"4x1xV100@{rate}{EXCHANGES[exchange]}").kind
        table.add_row(model, rate, exchange, kind.removesuffix("-bound"), *(f"{row[name]:.2%}" for name in names))
    summary = {name: (median(row[name] for row in rows), max(row[name] for row in rows)) for name in names}
    table.add_section()
    table.add_row("median", "", "", "", *(f"{summary[name][0]:.2%}" for name in names))
    table.add_row("worst", "", "", "", *(f"{summary[name][1]:.2%}" for name in names))
    Console(width=60 + 12 * len(names)).print(table)
    values = {
        "bytescheduler_gap_median": summary["bytescheduler"][0],
        "bytescheduler_gap_worst": summary["bytescheduler"][1],
        "prophet_gap_median": summary["prophet"][0],
        "prophet_gap_worst": summary["prophet"][1],
        "prophet_vs_bytescheduler_worst": max((1 + r["prophet"]) / (1 + r["bytescheduler"]) - 1 for r in rows),
        "ddp_gap_median": summary["ddp"][0],
    }
    finish(arguments, "policies", values, [(*s[:3], row) for s, row in zip(scenarios, rows, strict=True)])


if __name__ == "__main__":
    main()
