"""Lightning: Trainer with DDP or FSDP on a small GPT."""

import argparse
import os

import lightning
import torch
from gpt import GPT, SEQUENCE, VOCABULARY, loss_of
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = loss_of(self.model(batch[0]), batch[0])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


parser = argparse.ArgumentParser()
parser.add_argument("strategy", choices=("ddp", "fsdp"))
trainer = lightning.Trainer(
    accelerator="gpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    strategy=parser.parse_args().strategy,
    precision="bf16-mixed",
    max_steps=5,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Module(), DataLoader(TensorDataset(torch.randint(VOCABULARY, (512, SEQUENCE))), batch_size=4))
