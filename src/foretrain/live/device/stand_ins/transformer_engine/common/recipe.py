"""Recipes: when numbers are scaled for FP8, and in which blocks. Each costs the same here, but for blocks."""

from __future__ import annotations

from enum import Enum
from typing import Any


class Format(Enum):
    """Formats of FP8 forward and backward."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


class Recipe:
    """How to scale; the options matter for values alone."""

    blocks = False

    def __init__(self, **options: Any) -> None:
        self.options = options


class DelayedScaling(Recipe):
    """A scale for each tensor, of the steps before."""


class Float8CurrentScaling(Recipe):
    """A scale for each tensor, of this step."""


class Float8BlockScaling(Recipe):
    """A scale for each 128 numbers."""

    blocks = True


class MXFP8BlockScaling(Recipe):
    """A scale for each 32 numbers."""

    blocks = True
