"""Ray Train with a schedule of foretrain's:

python examples/trainers/ray_train.py
"""

import sys
import tempfile
from typing import Any

import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer
from torch import nn

import foretrain as ft


def loop(config: dict[str, Any]) -> None:
    """One worker."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    if config["schedule"] == "ddp":
        model = train.torch.prepare_model(network)
    else:
        model = ft.ray.prepare_model(network, config["schedule"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    angle, ring = torch.rand(64) * 6.283, torch.randint(2, (64,))
    points = torch.stack(((1 + ring) * angle.cos(), (1 + ring) * angle.sin()), dim=1)
    mine = slice(train.get_context().get_world_rank(), None, train.get_context().get_world_size())
    for _ in range(config["steps"]):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(points[mine]), ring[mine])
        loss.backward()
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(network.state_dict(), f"{folder}/network.pt")
        train.report({"loss": loss.item()}, checkpoint=train.Checkpoint.from_directory(folder))


def main(schedule: str) -> None:
    ray.init(num_cpus=3, include_dashboard=False, logging_level="warning", log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            loop,
            train_loop_config={"schedule": schedule, "steps": 20},
            scaling_config=train.ScalingConfig(num_workers=2),
            run_config=train.RunConfig(storage_path=folder),
        )
        print(f"loss {trainer.fit().metrics['loss']:.6f} over 20 steps")
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "auto")
