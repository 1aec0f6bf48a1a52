"""Stores, where ranks leave each other notes when they meet.

# Note [Stores]
Under folding most ranks of the world do not exist, so nobody may wait for all of them: the ranks that do share one
`FileStore` in a folder of the run's own, which also spares a listening socket. A note that only a represented rank
would leave never comes. That is told after `STORE_TIMEOUT`, whatever timeout the script has chosen: live ranks are
sooner.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore

from foretrain.live.device.patching import put

STORE_TIMEOUT: Final = timedelta(seconds=30)
"""How long a rank waits for a note where some ranks are only represented."""
_REMEDY: Final = (
    "foretrain: some ranks are not live but represented by others (the lines on folding above say which), and leave no "
    "notes in a store; if this one is theirs, run all with --live all"
)


def shared_store(path: str, folded: bool) -> FileStore:
    """The store that all live ranks of a run share."""
    return _ImpatientFileStore(path, -1) if folded else FileStore(path, -1)


def install_stores() -> None:
    """Has stores that a script makes itself not wait for ranks that are only represented."""
    put(dist, TCPStore=_ImpatientTCPStore)


class _ImpatientFileStore(FileStore):
    def __init__(self, path: str, ranks: int) -> None:
        super().__init__(path, ranks)
        super().set_timeout(STORE_TIMEOUT)

    def set_timeout(self, timeout: timedelta) -> None:
        """Process groups set theirs, of many minutes."""


class _ImpatientTCPStore(TCPStore):
    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = STORE_TIMEOUT,
        wait_for_workers: bool = True,
        **named: Any,
    ) -> None:
        super().__init__(host_name, port, world_size, is_master, min(timeout, STORE_TIMEOUT), False, **named)


def explain_store_timeout(error: BaseException) -> None:
    """Adds to an error of a folded run what may be behind it, if a store is."""
    text = str(error)
    if isinstance(error, RuntimeError) and ("Timeout waiting for key" in text or "ait timeout" in text):
        error.add_note(_REMEDY)
