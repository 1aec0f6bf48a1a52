"""What does not belong to one framework."""

from . import recipe

__all__ = ["recipe"]
