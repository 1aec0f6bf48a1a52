"""Putting other things in the place of PyTorch's."""

from __future__ import annotations

from typing import Any


def put(owner: Any, /, **values: Any) -> None:
    """Gives ``owner``, a module or class, attributes of these names, whether it has them or not."""
    for name, value in values.items():
        setattr(owner, name, value)
