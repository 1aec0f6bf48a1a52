"""DataLoader's workers: processes of their own, whose work no rank's clock hears of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from foretrain.live.device.patching import put
from foretrain.live.device.script import script_frame


def install_data_loader(warn: Callable[[str], None]) -> None:
    """Warns, once in a process, where batches come from workers."""
    make, warned = DataLoader._get_iterator, False

    def get_iterator(loader: DataLoader[Any]) -> Any:
        nonlocal warned
        if loader.num_workers and not warned:
            warned = True
            frame = script_frame()
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}: " if frame else ""
            warn(f"{place}what DataLoader's workers do takes no virtual time: steps never wait for data")
        return make(loader)

    put(DataLoader, _get_iterator=get_iterator)
