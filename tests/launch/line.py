"""A line that Lightning fits, in a module of its own: Lightning takes long to import, and tests are collected often."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader


class Line(lightning.LightningModule):
    """A line through points; may fail in a step, and may be trained by LBFGS."""

    def __init__(self, fails=None, optimizer=torch.optim.SGD):
        super().__init__()
        torch.manual_seed(0)
        self.line, self.fails, self.made, self.wrapped = nn.Linear(4, 1), fails, optimizer, None

    def training_step(self, batch, index):
        self.wrapped = type(self.trainer.strategy.model)
        if index == self.fails:
            raise ZeroDivisionError
        return (self.line(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return self.made(self.parameters(), lr=0.1)


def fitted(strategy, **options):
    module = Line(**options)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **quiet)
    generator = torch.Generator().manual_seed(1)
    try:
        trainer.fit(module, DataLoader(torch.randn(64, 4, generator=generator), batch_size=4))
    finally:
        torch.distributed.destroy_process_group()
    return module
