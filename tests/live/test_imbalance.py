"""Curve of step time against the imbalance of experts, with a closed form in place of simulations."""

from types import SimpleNamespace
from typing import Any

import pytest

from foretrain.errors import ForetrainError
from foretrain.live.device.settings import ExpertLoads
from foretrain.live.imbalance import COUNT, imbalance_points
from foretrain.live.routed_loads import RoutedLoads


def run(text: str) -> Any:
    loads = ExpertLoads.parse(text)
    assert loads is not None
    if (loads.sigma, loads.seed) == (0.8, 1):
        raise ForetrainError("a GPU is full\nof tensors")
    routed = RoutedLoads(text, loads.seed, 1, 1 + loads.sigma, None)
    return SimpleNamespace(loads=routed, forecast=SimpleNamespace(iteration_time=round(100 * (1 + loads.sigma))))


def test_every_spread_is_drawn_with_several_seeds_and_failures_are_points() -> None:
    points = list(imbalance_points(run))
    assert len(points) == COUNT == 10
    assert [point.sigma for point in points] == sorted(point.sigma for point in points)
    assert [point.seed for point in points if point.sigma == 0.4] == [0, 1, 2]
    (failed,) = (point for point in points if point.failure)
    assert (failed.sigma, failed.seed, failed.time, failed.failure) == (0.8, 1, None, "a GPU is full")
    assert points[0].time == 100
    assert points[-1].busiest_expert == pytest.approx(1.8)


def test_a_script_without_routers_has_no_curve() -> None:
    def routerless(text: str) -> Any:
        return SimpleNamespace(loads=None)

    assert list(imbalance_points(routerless)) == []
