"""What the planner found, in a narrow terminal too."""

import pytest
from rich.console import Console, RenderableType

from foretrain.experiments import compare
from foretrain.network import cluster
from foretrain.planner import choose, engines
from foretrain.planner.what_if import what_if
from foretrain.report.planning import candidates, precision, rows, what_ifs
from foretrain.schedule import spec
from foretrain.workload import zoo

PLACE = cluster("4x1xV100@7Gbps")


def written(what: RenderableType, width: int) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as shown:
        console.print(what)
    return shown.get()


@pytest.fixture(scope="module")
def choice():
    return choose(zoo("resnet50"), engines(PLACE))


def test_no_schedule_is_broken_in_the_middle_of_a_word(choice):
    words = written(candidates(choice), 80).split()
    for one in choice.candidates:
        for word in str(one.schedule).replace("(", " (").split() if one.time is not None else [one.schedule.name]:
            assert word in words or f"{word}," in words
    assert "chosen" in words
    assert "baseline" in words


def test_a_schedule_in_a_wide_terminal_reads_as_a_schedule(choice):
    (line,) = [line for line in written(candidates(choice), 200).splitlines() if "chosen" in line]
    assert spec(line.partition("  ")[0]) == choice.schedule


def test_a_choice_says_why_compare_gives_other_numbers(choice):
    said = precision([choice])
    assert "compare searches longer" in said
    assert "compare's ± counts only the forecasts'" in said
    found = compare(zoo("resnet50"), PLACE, ["prophet"], trace=False)
    assert found.best.iteration_time < choice.time <= 1.01 * found.bound.time
    assert found.advice.deviation < choice.uncertainty


def test_where_ddp_is_best_there_is_no_deviation_to_explain():
    kept = choose(zoo("vgg16"), cluster("4x1xV100@1Gbps"))
    assert kept.best is kept.baseline
    assert "±" not in precision([kept])


def test_what_ifs_fit_into_80_columns_and_tell_gpus_apart():
    found = what_if(zoo("alexnet"), PLACE, ["compression=fp16", "hosts=8"])
    shown = written(what_ifs(found), 80)
    for text in ("compression=fp16", "GPUs", "best schedule", *(case.choice.schedule.name for case in found.cases)):
        assert text in shown
    assert [row["GPUs"] for row in rows(found)] == ["4", "4", "8"]
    assert "GPUs" not in written(what_ifs(what_if(zoo("alexnet"), PLACE, ["batch=64"])), 80)
