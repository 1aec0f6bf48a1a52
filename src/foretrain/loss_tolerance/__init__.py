"""Accuracy under loss: what a collective delivers when packets are lost, and what a model makes of it.

    plan + losses → execution → replicas (real gradients) → training → tolerance, time to accuracy

Collectives with losses need numpy alone; what trains needs PyTorch and is imported from its own module.
"""

from foretrain.loss_tolerance.execution import Gap, Lossy, Tally
from foretrain.loss_tolerance.layout import Tensor, TensorLayout
from foretrain.loss_tolerance.losses import Bursty, LossPattern, OnLinks, Protected, Random, RecordedLosses, Tagged
from foretrain.loss_tolerance.survival import Way, budget, surviving
from foretrain.loss_tolerance.tagging import Criterion, Tagging

__all__ = [
    "Bursty",
    "Criterion",
    "Gap",
    "LossPattern",
    "Lossy",
    "OnLinks",
    "Protected",
    "Random",
    "RecordedLosses",
    "Tagged",
    "Tagging",
    "Tally",
    "Tensor",
    "TensorLayout",
    "Way",
    "budget",
    "surviving",
]
