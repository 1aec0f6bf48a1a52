"""Tables for a terminal, however narrow it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def plain_table() -> Table:
    """Without lines, its heads dim."""
    from rich.table import Table

    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")


def foldable(schedule: str) -> str:
    """A schedule's notation with a space before its knobs, where a narrow column breaks it; it reads as before."""
    return schedule.replace("(", " (", 1)
