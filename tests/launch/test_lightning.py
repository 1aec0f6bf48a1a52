"""The strategy for Lightning leaves PyTorch as it was, and refuses what cannot be scheduled before anything starts."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import foretrain as ft
from foretrain.errors import ConfigError
from tests.processes import need

need("lightning", "trainers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.ranks]


def fitted(strategy, fails=None, optimizer=torch.optim.SGD):
    """A line through points, fitted; it may fail in a step, and may be trained by LBFGS."""
    import lightning  # takes seconds, which who only collects tests need not wait

    class Line(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.line, self.wrapped = nn.Linear(4, 1), None

        def training_step(self, batch, index):
            self.wrapped = type(self.trainer.strategy.model)
            if index == fails:
                raise ZeroDivisionError
            return (self.line(batch) - batch.sum(1, keepdim=True)).square().mean()

        def configure_optimizers(self):
            return optimizer(self.parameters(), lr=0.1)

    module = Line()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **quiet)
    generator = torch.Generator().manual_seed(1)
    try:
        trainer.fit(module, DataLoader(torch.randn(64, 4, generator=generator), batch_size=4))
    finally:
        torch.distributed.destroy_process_group()
    return module


@pytest.mark.smoke_case("SGD")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.LBFGS], ids=lambda kind: kind.__name__)
def test_a_fit_is_that_of_ddp_and_leaves_nothing_behind(optimizer):
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
