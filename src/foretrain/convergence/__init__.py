"""Accuracy under loss: what a collective delivers when packets are lost, and what a model makes of it.

    plan + losses → execution → replicas (real gradients) → training → tolerance, time to accuracy

Collectives with losses need numpy alone; what trains needs PyTorch and is imported from its own module.
"""

from foretrain.convergence.execution import Lossy, Tally
from foretrain.convergence.layout import Layout, Tensor
from foretrain.convergence.losses import Bursty, LossPattern, OnLinks, Protected, Random, Recorded, Tagged
from foretrain.convergence.script import Gap
from foretrain.convergence.survival import Way, budget, surviving
from foretrain.convergence.tagging import Criterion, Tagging

__all__ = [
    "Bursty",
    "Criterion",
    "Gap",
    "Layout",
    "LossPattern",
    "Lossy",
    "OnLinks",
    "Protected",
    "Random",
    "Recorded",
    "Tagged",
    "Tagging",
    "Tally",
    "Tensor",
    "Way",
    "budget",
    "surviving",
]
