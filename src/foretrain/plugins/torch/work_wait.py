"""Waiting for collectives without being at their mercy, and giving them up.

gloo gives up on a stopped rank only after half an hour: whoever waits for it looks around meanwhile. For NCCL only the
device waits, and its kernels spin for ever when a peer is gone: they must be aborted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from foretrain.comm.event_loop import FAILURE_GRACE
from foretrain.errors import PeerLost
from foretrain.plugins.torch.streams import enqueues

logger = logging.getLogger("foretrain")

LOOK = 1.0
"""Seconds between two looks. A thread must not be inside of gloo for longer when Python ends, either."""


def finish(
    work: dist.Work | None, check: Callable[[], None], *, enqueues: bool, verdict: float = FAILURE_GRACE
) -> None:
    """Waits for ``work``; ``check`` is called now and then and may raise to give it up.

    Args:
        work: what an asynchronous collective returned.
        check: raises what has ended the job, if anything has.
        enqueues: whether waiting is the stream's, as with NCCL: it returns at once, and with a limit it would block
            and then give the communicator up.
        verdict: seconds for which ``check`` may still explain a failure.

    Raises:
        PeerLost: the collective failed, and nothing explained it.
    """
    if work is None:
        return
    if enqueues:
        work.wait()
        return
    while not _done(work):
        check()
        if work.is_completed() and (problem := _problem(work)):
            deadline = time.monotonic() + verdict
            while time.monotonic() < deadline:
                time.sleep(0.05)
                check()
            raise PeerLost(f"a collective failed: {problem}")


def abort(device: torch.device, *groups: dist.ProcessGroup) -> None:
    """Frees ``device`` from what NCCL's ``groups`` have enqueued there; lets gloo's be. Returns at once.

    Streams go on, and every thread that waits for an event or the device with them; what the operations were to write
    is anything. Each group is aborted by a thread of its own, which nobody waits for: a kernel of one may stand behind
    that of another, and NCCL itself may be stuck.
    """
    for group in groups:
        if enqueues(group, device):
            threading.Thread(target=_abort, args=(device, group), name="foretrain-abort", daemon=True).start()


def _abort(device: torch.device, group: dist.ProcessGroup) -> None:
    try:
        group._get_backend(device).abort()
    except RuntimeError as error:
        logger.debug("a communicator could not be aborted: %s", error)


def _done(work: dist.Work) -> bool:
    try:
        work.wait(timedelta(seconds=LOOK))
    except RuntimeError:
        return False
    return True


def _problem(work: dist.Work) -> str:
    """What a completed ``work`` failed of; nothing if it came through after all."""
    try:
        work.wait()
    except RuntimeError as error:
        return str(error)
    return ""
