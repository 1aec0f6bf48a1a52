"""Waiting for what others do."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object]) -> None:
    """Wait until ``condition`` holds; fail where it does not come about, however busy the machine.

    One that takes long to find out is asked less often: what it waits for needs the cores.
    """
    deadline = time.monotonic() + 600
    while True:
        asked = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        assert now < deadline, "it does not come about"
        time.sleep(max(0.01, min(4 * (now - asked), 0.5)))
