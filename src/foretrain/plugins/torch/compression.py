"""Fewer bytes on the wire: gradients rounded to half precision, and what was lost remembered (error feedback).

Source of the feedback: Karimireddy et al., "Error Feedback Fixes SignSGD", ICML'19, algorithm 2, per element: what
rounding took away in one step is added before the next. DistributedDataParallel's own hooks round without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foretrain.errors import unknown
from foretrain.plugins.torch.gradient_buffer import BufferSlice

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def wire_dtype(name: str | None) -> torch.dtype | None:
    """The dtype that ``name`` stands for; None for None."""
    if name is None:
        return None
    if name not in _DTYPES:
        raise unknown("compression", name, _DTYPES)
    return _DTYPES[name]


class Rounding:
    """Rounds slices of flat float buffers to ``dtype``.

    Args:
        flat: the buffers; each gets a residual of its own size.
        dtype: what is sent.
    """

    def __init__(self, flat: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._residuals = [torch.zeros_like(buffer) for buffer in flat]

    def round(self, run: BufferSlice, values: torch.Tensor) -> torch.Tensor:
        """What to send for ``values``, the elements of ``run``; keeps what rounding loses."""
        residual = self._residuals[run.buffer][run.start : run.end]
        residual.add_(values)
        sent = residual.to(self._dtype)
        residual.sub_(sent)
        # An overflow is the receiver's to see (GradScaler looks for it), and not to be fed back for ever.
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return sent
