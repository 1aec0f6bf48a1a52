"""Server that runs PyTorch's optimizers on what ranks push over UDP; see `foretrain.comm.bounded.server`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foretrain.comm.bounded.server import main
from foretrain.comm.ps.consistency import Group
from foretrain.comm.ps.placement import Declaration, ShardPart
from foretrain.plugins.torch.ps.server import prepare
from foretrain.plugins.torch.ps.server.parameter_store import ParameterStore, decode, encode


class TensorUpdater:
    """Parameters of whole tensors, each updated piece by piece; a `foretrain.comm.bounded.server_state.Updater`."""

    def __init__(self) -> None:
        self._store: ParameterStore | None = None

    def declare(self, payload: bytes) -> None:
        """Make the optimizers that ``payload``, a `Declaration`, describes; `Malformed` if it contradicts itself."""
        declared = Declaration.decode(payload)
        assert declared.optimized is not None
        parts = [ShardPart(task, task, 0, each.size, 0) for task, each in enumerate(declared.tasks)]
        self._store = ParameterStore(parts, declared.tasks, declared.optimized)

    def load(self, tensor: int, frames: Sequence[bytes]) -> None:
        """Set the parameters and optimizer state of ``tensor``."""
        self._declared.load(tensor, decode(frames))

    def state(self, tensor: int) -> list[bytes]:
        """Return the parameters and optimizer state of ``tensor``."""
        return encode(self._declared.contents(tensor))

    def update(
        self,
        gradients: NDArray[Any],
        parameters: NDArray[Any],
        tensors: Sequence[tuple[int, int, int]],
        groups: Sequence[Group],
    ) -> None:
        """Step with ``gradients``; tensors without an optimizer are left out."""
        store, at = self._declared, 0
        for tensor, first, behind in tensors:
            here = slice(at, at + behind - first)
            at = here.stop
            if store.group_of(tensor) < 0:
                continue
            kind = store.dtype(tensor)
            updated = store.update_slice(tensor, slice(first, behind), _typed(gradients[here], kind), groups)
            _typed(parameters[here], kind).copy_(updated)

    @property
    def _declared(self) -> ParameterStore:
        assert self._store is not None  # rank 0 declares before anybody pushes
        return self._store


def _typed(values: NDArray[Any], kind: torch.dtype) -> torch.Tensor:
    """Return ``values``, of bfloat16 the bits, as a tensor of their type on the same memory."""
    return torch.from_numpy(values.view(np.uint8)).view(kind)


if __name__ == "__main__":
    prepare()
    os._exit(main(TensorUpdater()))  # to take PyTorch down in order takes seconds, for which rank 0 would wait
