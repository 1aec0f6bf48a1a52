"""A real job that lets the planner choose, or follows a plan file."""

import logging

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from foretrain.planner import load, save  # noqa: E402
from foretrain.plugins.torch import attach  # noqa: E402
from tests.planner.plans import plan_of  # noqa: E402
from tests.plugins.torch.models import STEPS, assert_same, batch, mlp, objective, plain, sgd  # noqa: E402


@pytest.mark.smoke
def test_what_the_planner_chooses_trains_the_same(ranks):
    seen = assert_same(ranks, plain, schedule="auto")
    assert len({schedule for rank in seen for schedule in rank.schedules}) == 1


def test_one_rank_alone_has_plain_ddp(alone):
    seen = assert_same(alone, plain, schedule="auto")
    assert {schedule.partition("(")[0] for rank in seen for schedule in rank.schedules} == {"ddp"}


def told(schedule):
    """What rank 0 logs, and what runs."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("foretrain.auto")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model = mlp()
    optimizer = sgd(model)
    with attach(model, optimizer, schedule) as attached:
        for step in range(STEPS):
            objective(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        logger.removeHandler(handler)
        return dist.get_rank(), lines, str(attached.schedule)


def test_rank_0_says_in_two_lines_what_was_chosen_and_why(ranks):
    first, second = sorted(ranks(told, "auto"))
    assert [level for level, _ in first[1]] == ["INFO", "INFO"]
    assert all(line.startswith("auto: ") for _, line in first[1])
    assert first[2].partition("(")[0] in first[1][0][1]
    assert not second[1]
    assert first[2] == second[2]


def test_a_plan_file_is_followed_and_what_differs_is_told(ranks, tmp_path):
    path = tmp_path / "plan.toml"
    save(plan_of("bytescheduler(partition=1KiB, credit=4KiB, fuse=0)"), path)
    first, second = sorted(ranks(told, path))
    assert first[2] == second[2] == str(load(path).schedule)
    ((level, line),) = first[1]
    assert level == "WARNING"
    assert "8 gradients, planned for 161" in line
    assert "foretrain plan" in line
    assert not second[1]
