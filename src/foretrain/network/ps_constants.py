"""How a parameter server and its workers send, in both worlds: what they must agree on for a forecast to be one."""

from __future__ import annotations

from typing import Final

WINDOW: Final = 2 << 20
"""Bytes of sums handed to a socket and not acknowledged at which a server hands over no more.

What is handed over cannot be overtaken by what is more urgent. Two mebibytes are a few percent of a model, and more
than any round trip of a local network needs.
"""
MESSAGE: Final = 512 << 10
"""Bytes of a message with gradients or sums, at most. They are summed, and answered, message by message."""
