"""Waiting for what others do."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object]) -> None:
    """Wait until ``condition`` holds; fail where it does not come about, however busy the machine."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.01)
