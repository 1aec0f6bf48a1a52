"""The strategy for Lightning leaves PyTorch as it was, and refuses what cannot be scheduled before anything starts."""

import threading

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import foretrain as ft
from foretrain.errors import ConfigError
from tests.processes import need

need("lightning", "trainers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.ranks]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.LBFGS], ids=lambda kind: kind.__name__)
def test_a_fit_is_that_of_ddp_and_leaves_nothing_behind(optimizer):
    from tests.launch.line import fitted

    threads = set(threading.enumerate())
    plain = fitted("ddp", optimizer=optimizer)
    left = set(threading.enumerate()) - threads
    scheduled = fitted(ft.lightning.Scheduled("p3"), optimizer=optimizer)
    assert all(map(torch.equal, plain.parameters(), scheduled.parameters()))
    assert plain.wrapped is DistributedDataParallel
    assert issubclass(scheduled.wrapped, DistributedDataParallel)
    assert scheduled.wrapped is not DistributedDataParallel
    assert torch.nn.parallel.DistributedDataParallel is DistributedDataParallel
    assert len(set(threading.enumerate()) - threads) <= len(left)


def test_an_exception_restores_pytorch():
    from tests.launch.line import fitted

    with pytest.raises(ZeroDivisionError):
        fitted(ft.lightning.Scheduled("p3"), fails=6)
    assert torch.nn.parallel.DistributedDataParallel is DistributedDataParallel
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("foretrain")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "bytescheduller"}, "bytescheduler"),
        ({"transport": "tcp"}, "all_reduce"),
        ({"compression": "fp8"}, "fp16"),
        ({"timeouts": 60}, "Timeouts"),
        ({"tune": 1}, "tune"),
    ],
)
def test_wrong_arguments_are_refused_when_the_strategy_is_made(options, message):
    with pytest.raises(ConfigError, match=message):
        ft.lightning.Scheduled(**options)
