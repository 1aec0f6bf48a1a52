"""Fits of costs, experiments, and results from the reports of workers."""

import dataclasses
import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from foretrain.errors import ConfigError, ForetrainError
from foretrain.lab.calibration import fit, nominal
from foretrain.lab.compare import OnLine, attached, conduct, experiment
from foretrain.lab.messages import (
    CalibrationReport,
    CalibrationSample,
    CaseRefused,
    CaseTrace,
    Experiment,
    LabCase,
    LabPlan,
    LabProgress,
    RoundTimes,
    WorkloadReport,
)
from foretrain.lab.result import LabResult, gap_breakdown
from foretrain.lab.training import batches, transformer
from foretrain.network import Cluster
from foretrain.network.host_cpu import CpuCost, HostCpu
from foretrain.report.lab import lab_summary, lab_trace, render
from foretrain.simulation import bound, simulate
from foretrain.trace import Span
from foretrain.units import MILLISECOND, SECOND
from foretrain.workload import zoo

RATE = 125e6


def samples(overhead: int, per_byte: float, noise: float = 0.0, seed: int = 0) -> list[CalibrationSample]:
    rng = random.Random(seed)
    return [
        CalibrationSample(
            1 << power, depth, round((overhead * (3 - depth) + per_byte * (1 << power)) * (1 + noise * rng.random()))
        )
        for power in range(14, 25, 2)
        for depth in (1, 2)
    ]


def test_a_fit_finds_the_line_whatever_one_sample_says():
    found = samples(300_000_000, 8000)
    found[5] = CalibrationSample(found[5].size, 2, found[5].time * 3)
    line = fit(found)
    assert line.overhead == pytest.approx(300_000_000, rel=1e-3)
    assert line.per_byte == pytest.approx(8000, rel=1e-3)
    assert line.latency == pytest.approx(300_000_000, rel=1e-3)
    place = line.on(Cluster(4, up=RATE, down=RATE))
    assert place.cost.time(1 << 20) == pytest.approx(300_000_000 + 8000 * (1 << 20), rel=1e-3)
    assert place.cost.latency == pytest.approx(300_000_000, rel=1e-3)


def test_small_operations_that_cost_alike_are_a_floor_and_no_overhead():
    sizes = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
    line = fit(CalibrationSample(size, 2, max(700_000_000, 1000 + 8000 * size)) for size in sizes)
    assert (line.floor, line.per_byte) == (700_000_000, 8000)
    assert line.overhead == pytest.approx(1000)
    assert line.on(Cluster(2)).cost.time(4) == 700_000_000


def test_no_sample_makes_a_link_faster_than_it_is():
    limit = nominal(Cluster(2, up=RATE, down=RATE))
    line = fit(
        [
            CalibrationSample(1 << 20, 2, round(0.9 * limit * (1 << 20))),
            CalibrationSample(1 << 22, 2, round(limit * (1 << 22))),
        ],
        limit,
    )
    assert line.per_byte == limit
    assert line.overhead >= 0
    with pytest.raises(ConfigError, match="too few"):
        fit([CalibrationSample(1 << 20, 1, 5)])


@pytest.mark.parametrize("seed", range(3))
def test_a_fit_of_noisy_samples_is_near(seed: int):
    line = fit(samples(200_000_000, 8000, noise=0.1, seed=seed))
    assert line.per_byte == pytest.approx(8400, rel=0.08)


def test_a_ratio_sets_the_time_to_compute():
    for hosts, ratio in ((2, 1.0), (4, 0.5)):
        one = experiment("resnet50", hosts=hosts, rate="1Gbps", ratio=ratio)
        assert one.workload is not None
        wanted = 2 * (hosts - 1) / hosts * one.workload.size / RATE / ratio * SECOND
        assert one.workload.compute == pytest.approx(wanted)
    assert experiment("vgg16", hosts=2, rate="1Gbps", step_time=SECOND).workload.compute == pytest.approx(SECOND)
    assert experiment("transformer", hosts=2, rate="1Gbps").step_time is None


def test_cases_are_named_and_planned():
    one = experiment("resnet50", hosts=2, rate="1Gbps", schedules=("bytescheduler(partition=1MB)+fp16", "prophet"))
    names = [case.name for case in one.cases]
    assert names[0] == "DDP"
    assert "DDP 100MiB" in names
    assert "DDP fp16 hook" in names
    assert names[-2:] == ["bytescheduler(partition=1MB)+fp16", "prophet"]
    assert str(LabCase("ddp", 5 << 20).plan) == "ddp(bucket=5MiB, first=5MiB)"
    assert str(LabCase("ddp").plan) == "ddp"
    assert attached("p3+bf16").compression == "bf16"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ratio": 1.0, "step_time": SECOND}, "contradict"),
        ({"ratio": -1.0}, "no ratio"),
        ({"hosts": 1}, "nobody"),
        ({"straggler": 1.5}, "not a share"),
        ({"iterations": 1}, "too few"),
        ({"compute": "real"}, "does not go with"),
        ({"schedules": ("propet",)}, "prophet"),
        ({"schedules": ("prophet+fp8",)}, "fp16"),
        ({"model": "transformer", "jitter": 0.3}, "paced"),
        ({"model": "resnet5"}, "resnet50"),
    ],
)
def test_wrong_experiments_are_refused(wrong: Mapping[str, object], words: str):
    with pytest.raises(ConfigError, match=words):
        experiment(**({"model": "resnet50", "hosts": 2, "rate": "1Gbps"} | wrong))


# From what workers say to a result.


def answers(one: Experiment) -> list[object]:
    """As if every case had taken 100 ms, 90 ms and so on, but for the last one, which is refused."""
    assert one.workload is not None
    span = Span("wire", "communication", "fc.weight", 2, 205 * MILLISECOND, 208 * MILLISECOND, 1000)
    gpu = Span("gpu", "backward", "fc", 2, 200 * MILLISECOND, 205 * MILLISECOND)
    last = len(one.cases) - 1
    said: list[object] = [CalibrationReport(tuple(samples(200_000_000, 8000))), WorkloadReport(0, one.workload)]
    for index, case in enumerate(one.cases[:-1]):
        place = Cluster(2, up=RATE, down=RATE, overhead=100_000_000) if case.kind == "attach" else None
        schedule = f"{case.schedule}" if case.kind == "attach" else ""
        for turn in range(2):
            times = tuple((100 - 10 * index + turn + k) * MILLISECOND for k in range(3))
            threads = {"foretrain-completer": 21 * MILLISECOND} if case.kind == "attach" else {}
            said.append(RoundTimes(0, index, times, schedule, place, threads=threads))
        said.append(CaseTrace(0, index, tuple(k * 100 * MILLISECOND for k in range(4)), (gpu, span)))
    return [*said, CaseRefused(0, last, "prophet needs a steadier job")]


@pytest.fixture(scope="module")
def result() -> LabResult:
    return measured()


def measured() -> LabResult:
    """Return a comparison of ranks that say what was written for them."""
    cases = ("bytescheduler(partition=1MB, credit=2MB)", "bytescheduler+fp16", "prophet")
    one = experiment("alexnet", hosts=2, rate="1Gbps", schedules=cases, buckets=(None, 1 << 20), half_hook=False)
    seen: list[LabProgress] = []

    def launch(command: Sequence[str], *, environment: Mapping[str, str], timeout: float, on_line: OnLine) -> int:
        plan = msgspec.json.decode(Path(command[-1]).read_bytes(), type=LabPlan)
        assert plan == LabPlan(2, RATE, (one,))
        assert timeout > 60
        assert environment["OMP_NUM_THREADS"] == "1"
        on_line(0, "a warning of somebody")
        on_line(0, msgspec.json.encode(LabProgress(0, "round 1/3, DDP", 3, 9)).decode())
        on_line(1, "no progress")
        lines = b"".join(msgspec.json.encode(message) + b"\n" for message in answers(one))
        Path(command[-1]).with_suffix(".jsonl").write_bytes(lines)
        return 0

    (found,) = conduct(LabPlan(2, RATE, (one,)), launch, seen.append)
    assert seen == [LabProgress(0, "round 1/3, DDP", 3, 9)]
    return found


def test_a_result_holds_what_was_measured(result: LabResult):
    assert result.baseline is not None
    assert result.best is not None
    assert result.baseline.case.name == "DDP 1MiB"
    assert result.best.case.name == "bytescheduler(partition=1MB, credit=2MB)"
    assert result.best.time == 81_500_000_000
    assert result.speedup(result.best) == pytest.approx(91.5 / 81.5)
    assert result.ratio == pytest.approx(1.0)
    assert result.find("prophet") is None
    assert result.measurements[-1].problem == "prophet needs a steadier job"


def test_forecasts_are_the_virtual_worlds_with_measured_costs(result: LabResult):
    workload = result.workload
    ddp, ours, half = result.measured[0], result.measured[2], result.measured[3]
    assert ddp.forecast is not None
    assert ours.forecast is not None
    assert half.forecast is not None
    assert ddp.forecast.iteration_time == simulate(workload, result.cluster, "ddp", trace=False).iteration_time
    assert ours.cluster.overhead == 100_000_000
    assert ddp.cluster.overhead == pytest.approx(200_000_000, rel=1e-3)
    assert ours.error == ours.forecast.iteration_time / ours.time - 1
    assert ours.bound == bound(workload, dataclasses.replace(ours.cluster, overhead=0, latency=0))
    assert half.bound.link == pytest.approx(ours.bound.link / 2, rel=1e-6)
    assert half.forecast.iteration_time < ours.forecast.iteration_time
    for one in result.measured:
        assert one.losses is not None
        assert sum(dataclasses.astuple(one.losses)) == pytest.approx(one.gap, abs=1e-9)


@pytest.mark.parametrize("change", ["link", "policy", "operations", "cores", "unforeseen"])
def test_each_loss_has_its_own_cause(change: str):
    workload = zoo("resnet50", batch=32)
    called = Cluster(4, up=RATE, down=RATE, latency=0, overhead=0)
    where = called
    if change == "link":
        where = dataclasses.replace(where, up=0.9 * RATE, down=0.9 * RATE)
    if change == "operations":
        where = dataclasses.replace(where, overhead=MILLISECOND)
    schedule = "ddp" if change == "policy" else "largest_tail_first"
    forecast = simulate(workload, where, schedule, trace=False).iteration_time
    found = gap_breakdown(
        workload, where, schedule,
        optimum=bound(workload, called).time, forecast=forecast,
        measured=forecast + (change in ("cores", "unforeseen")) * SECOND, waited=(change == "cores") * 2 * SECOND,
    )  # fmt: skip
    lost = dataclasses.asdict(found)
    assert lost.pop(change) > 0.01
    assert lost == pytest.approx(dict.fromkeys(lost, 0.0), abs=1e-6)


def test_cores_that_messages_queue_for_are_a_loss_to_cores():
    workload = zoo("resnet50", batch=32)
    called = Cluster(4, up=RATE, down=RATE, latency=0, overhead=0, exchange="ps", servers=1)
    cost = CpuCost(20 * MILLISECOND)
    where = dataclasses.replace(called, cpu=HostCpu(1, cost, cost))
    optimum = bound(workload, called).time
    without, forecast = (simulate(workload, one, "fifo", trace=False).iteration_time for one in (called, where))
    assert forecast > 1.01 * without
    found = gap_breakdown(workload, where, "fifo", optimum=optimum, forecast=forecast, measured=forecast)
    assert found.cores == pytest.approx((forecast - without) / optimum)
    assert found.policy == pytest.approx(without / optimum - 1)
    assert (found.link, found.operations, found.unforeseen) == (0, 0, 0)


def test_a_result_is_plain_numbers(result: LabResult):
    numbers = json.loads(json.dumps(result.to_dict()))
    assert numbers["baseline"] == "DDP 1MiB"
    assert numbers["cases"][-1] == {"case": "prophet", "problem": "prophet needs a steadier job"}
    assert numbers["cases"][0]["median"] == pytest.approx(0.1015)
    assert numbers["cases"][0]["threads"] == {}
    assert numbers["cases"][2]["threads"] == {"foretrain-completer": pytest.approx(0.007)}  # of an iteration
    assert len(numbers["cases"][0]["rounds"]) == 2


def test_the_table_the_page_and_the_trace_show_it(result: LabResult, tmp_path: Path):
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(lab_summary(result))
    console.file.close()
    text = console.export_text()
    for word in ("DDP 1MiB (baseline)", "(best)", "1.12×", "refused", "T/T*", "forecast"):
        assert word in text
    html = render(result)
    assert html.count("const Charts =") == 1
    assert "bytescheduler(partition=1MB, credit=2MB), measured" in html
    assert "function arrange(" in html
    assert ".card .value" in html
    assert html == render(result)
    lab_trace(result, tmp_path / "lab.json")
    events = json.loads((tmp_path / "lab.json").read_text())["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.partition(":")[0] for name in processes[:2]] == ["DDP, measured", "DDP, forecast"]


@pytest.mark.parametrize("width", [80, 88])
def test_a_narrow_terminal_cuts_no_number_of_the_table(result: LabResult, width: int):
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(lab_summary(result))
    console.file.close()
    text = console.export_text()
    assert "…" not in text
    assert "cores" in text


def test_workers_that_fail_are_quoted():
    def launch(command: Sequence[str], *, environment: Mapping[str, str], timeout: float, on_line: OnLine) -> int:
        on_line(1, "RuntimeError: out of cheese\n")
        return 3

    one = experiment("alexnet", hosts=2, rate="1Gbps")
    with pytest.raises(ForetrainError, match=r"status 3.*\n.*rank 1: RuntimeError: out of cheese"):
        conduct(LabPlan(2, RATE, (one,)), launch)


def test_the_transformer_learns_the_same_from_the_same_seed():
    import torch

    torch.set_num_threads(1)

    def losses() -> list[float]:
        model, data = transformer(3, width=32, depth=1), batches(4, rank=1, seed=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found = []
        for _ in range(60):
            loss = model(*next(data))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    first = losses()
    assert first == losses()
    assert first[-1] < first[0]
    assert sum(parameter.numel() for parameter in transformer().parameters()) == pytest.approx(26e6, rel=0.05)
