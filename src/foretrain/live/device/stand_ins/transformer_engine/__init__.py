"""Transformer Engine: modules of PyTorch whose products are in FP8 where a recipe says so.

Norms and activations are kernels of their own, before the products whose operands they cast. Parallel over tensors or
sequences there is nothing: ``tp_group`` and its like are refused.
"""

from . import common, pytorch

__version__ = "2.9.0"
__all__ = ["common", "pytorch"]
