"""The command that a measured tolerance is for: what it loses is what the measurement lost."""

import shlex

import pytest

pytest.importorskip("torch")

from foretrain.comm.options import BoundedLoss, as_transport
from foretrain.loss_tolerance.replicas import LossyExchange
from foretrain.loss_tolerance.tolerance import Interval, Level, Profile, ToleranceSettings
from foretrain.report.tolerance import usage


def found(tolerates=True, **exchange):
    """Return a profile of 3.5 %."""
    settings = ToleranceSettings(LossyExchange(**{"small": "reliable", **exchange}), (0.0, 0.035), seeds=2)
    nothing = Interval(0.0, 0.0, 0.0)
    levels = [Level(p, (), (1.0, 1.0), nothing, (1, 1), 1.0, tolerates or p == 0) for p in settings.grid]
    return Profile(settings, tuple(levels))


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("transpose", ""),
        ("ring", " --over ring"),
        ("halving_doubling", " --over halving_doubling"),
        ("parameter_server", " --over ps"),
    ],
)
def test_gradients_that_are_lost(way, options):
    assert usage(found(way=way, back="reliable")) == f"foretrain run --tolerance 3.5%{options} -- train.py"


def test_parameters_that_are_lost_come_from_a_server_that_updates():
    transport = shlex.split(usage(found(way="parameter_server", back="lossy")))[3]
    assert as_transport(transport) == BoundedLoss(0.035, "ps", updates="servers")


@pytest.mark.parametrize(
    "options", [{"way": "ring"}, {"way": "transpose"}, {"small": "lossy", "back": "reliable"}, {"tolerates": False}]
)
def test_what_no_transport_loses_has_no_command(options):
    assert usage(found(**options)) == ""
