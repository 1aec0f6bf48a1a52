"""What ``torch.UntypedStorage`` refuses to do on CUDA in a build without it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from foretrain.live.device.patching import put


def install_storages(device: ModuleType) -> None:
    """Lets storages be made, resized and copied on ``device``, the loaded extension."""
    plain_new, plain_resize, plain_copy = (
        getattr(torch.UntypedStorage, name) for name in ("__new__", "resize_", "copy_")
    )

    def new(cls: type, *args: Any, device: Any = None, **given: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return plain_new(cls, *args, **given if device is None else given | {"device": device})
        data = args[0] if args else given.get("size", 0)
        if isinstance(data, int):
            return torch.empty(data, dtype=torch.uint8, device=device).untyped_storage()
        return torch.tensor(data, dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        """Sharded training frees parameters with it."""
        if self.device.type != "cuda":
            return plain_resize(self, size)
        device.resize_storage(self, size)
        return self

    def copy_(self: torch.UntypedStorage, source: Any, non_blocking: bool | None = None) -> torch.UntypedStorage:
        """As numbers where it can: large ones have no values here, while bytes are kept for the objects they may be."""
        if "cuda" not in (self.device.type, source.device.type) or self.nbytes() != source.nbytes():
            return plain_copy(self, source, bool(non_blocking))
        _numbers(self).copy_(_numbers(source), non_blocking=bool(non_blocking))
        return self

    put(torch.UntypedStorage, __new__=new, resize_=resize_, copy_=copy_)


def _numbers(storage: torch.UntypedStorage) -> torch.Tensor:
    # Floats, as made-up ones are what scripts store, and storing decides nothing: nobody need be warned.
    kind = torch.bfloat16 if storage.nbytes() % 2 == 0 else torch.uint8
    return torch.empty(0, dtype=kind, device=storage.device).set_(storage)
