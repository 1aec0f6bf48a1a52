"""Lightning with a schedule of foretrain's; Lightning starts the processes itself:

python examples/trainers/lightning_strategy.py
"""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import foretrain as ft


class Rings(lightning.LightningModule):
    """Tells on which of two rings a point is."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.network(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.003)


def main(strategy: str) -> None:
    lightning.seed_everything(0, verbose=False)
    angle, ring = torch.rand(512) * 6.283, torch.randint(2, (512,))
    radius = 1 + ring + 0.2 * torch.randn(512)
    points = TensorDataset(torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), ring)
    trainer = lightning.Trainer(
        strategy="ddp" if strategy == "ddp" else ft.lightning.Scheduled(strategy),
        accelerator="cpu",
        devices=2,
        max_epochs=3,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Rings(), DataLoader(points, batch_size=32))
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.6f} over {trainer.global_step} steps")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "auto")
