"""What Keras', JAX's and MXNet's plug-ins share."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from foretrain.plugins.gradient_stream import recorded, warn_if_untested
from foretrain.workload.step import Gradient, Layer, Workload


@pytest.mark.parametrize(("until_first", "late", "warned"), [(9, 4, False), (5, 0, False), (2, 0, True)])
def test_a_forward_pass_that_was_computed_alone_is_taken_out_of_the_step(until_first, late, warned, caplog):
    alone = 5
    layers = tuple(Layer(name, forward=(until_first + alone) // 2, backward=1) for name in ("a", "b"))
    layers = (replace(layers[0], forward=until_first + alone - layers[1].forward), layers[1])
    gradients = (Gradient("b.w", 8, 1, 0), Gradient("a.w", 8, 0, 1))
    seen = SimpleNamespace(workload=Workload("seen", 1, layers, gradients, source=""))
    found = recorded(seen, "small", 1, "", alone)  # pyright: ignore[reportArgumentType]
    assert found.forward == pytest.approx(min(alone, until_first), abs=1)
    assert found.backward == 2 + late
    assert [each.release for each in found.gradients] == [late, late + 1]
    assert bool(caplog.records) == warned


def test_another_version_is_said_once_and_on_rank_0(caplog):
    warn_if_untested.cache_clear()
    for rank, version in ((0, "3.15.2"), (1, "9.0.0"), (0, "9.0.0"), (0, "9.0.0")):
        warn_if_untested(rank, "keras", version, "3.15")
    assert [record.message for record in caplog.records] == [
        "keras 9.0.0: foretrain is tested with 3.15.x; please report what fails"
    ]
    warn_if_untested.cache_clear()
