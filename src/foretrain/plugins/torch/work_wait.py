"""Waiting for collectives with a check for failures, and aborting them.

gloo gives up on a stopped rank only after half an hour, so a waiting thread checks for failures meanwhile. With NCCL
only the device waits, and its kernels spin for ever when a peer is gone: they must be aborted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from foretrain.comm.event_loop import FAILURE_GRACE, POLL_INTERVAL
from foretrain.errors import PeerLost
from foretrain.plugins.torch.streams import enqueues

logger = logging.getLogger("foretrain")


def finish(work: dist.Work | None, check: Callable[[], None], *, enqueues: bool, grace: float = FAILURE_GRACE) -> None:
    """Wait for ``work``, and call ``check`` every `POLL_INTERVAL`.

    Args:
        work: of an asynchronous collective.
        check: raises the error that has ended the job, if any.
        enqueues: whether the stream waits, as with NCCL: then ``work.wait()`` returns at once; with a timeout it would
            block, and abort the communicator at the end.
        grace: seconds after a failure in which ``check`` may still raise a better explanation.

    Raises:
        PeerLost: the collective failed, and ``check`` raised nothing.
    """
    if work is None:
        return
    if enqueues:
        work.wait()
        return
    while _error(work, timedelta(seconds=POLL_INTERVAL)) is not None:
        check()
        if work.is_completed() and (problem := _error(work)) is not None:
            deadline = time.monotonic() + grace
            while time.monotonic() < deadline:
                time.sleep(0.05)
                check()
            raise PeerLost(f"a collective failed: {problem}")


def abort(device: torch.device, *groups: dist.ProcessGroup) -> None:
    """Abort the collectives that NCCL's ``groups`` have enqueued on ``device``. Returns at once; gloo's go on.

    Streams and the threads that wait for them go on; the results of the collectives are undefined. Each group is
    aborted by a thread of its own, without waiting: its kernel may be queued behind another group's, or NCCL be stuck.
    """
    for group in groups:
        if enqueues(group, device):
            threading.Thread(target=_abort, args=(device, group), name="foretrain-abort", daemon=True).start()


def _abort(device: torch.device, group: dist.ProcessGroup) -> None:
    try:
        group._get_backend(device).abort()
    except RuntimeError as error:
        logger.debug("a communicator could not be aborted: %s", error)


def _error(work: dist.Work, *timeout: timedelta) -> str | None:
    """Return the error of waiting for ``work``, such as that ``timeout`` has passed; None if it succeeded."""
    try:
        work.wait(*timeout)
    except RuntimeError as error:
        return str(error)
    return None
