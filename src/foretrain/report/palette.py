"""Colours and the empty canvas that every picture of a report starts from.

Blue is computation, orange communication, grey what is neither; two near shades of each tell neighbours apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foretrain.errors import MissingExtra
from foretrain.trace import Kind

if TYPE_CHECKING:
    import plotly.graph_objects as go

BLUE, ORANGE, GREY, INK, LINE = "#2563eb", "#ea580c", "#64748b", "#0f172a", "#e2e8f0"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"

KINDS: Mapping[Kind, tuple[str, str]] = {
    "backward": ("#2563eb", "#4377ee"),
    "forward": ("#7cb3f8", "#94c1fa"),
    "update": ("#64748b", "#7c8a9e"),
    "wait": ("#e2e8f0", "#e2e8f0"),
    "communication": ("#ea580c", "#f27d3e"),
}
"""Of each kind of span the two shades that alternate, in the order of the legend."""

SERIES = (
    "#0891b2",
    "#7c3aed",
    "#16a34a",
    "#db2777",
    "#ca8a04",
    "#0d9488",
    "#9333ea",
    "#65a30d",
    "#be123c",
    "#a16207",
    "#4f46e5",
)
"""One colour a schedule, for those that are neither the best nor the baseline."""


def canvas(height: int, columns: int = 1, **layout: Any) -> go.Figure:
    """An empty figure in the house style. MissingExtra without plotly."""
    try:
        from plotly.subplots import make_subplots
    except ModuleNotFoundError as error:
        raise MissingExtra("plotly", "report", "an interactive figure") from error
    figure = make_subplots(rows=1, cols=columns, horizontal_spacing=0.09)
    figure.update_layout(
        template="plotly_white",
        font={"family": FONT, "color": INK, "size": 13},
        hoverlabel={"font": {"family": FONT, "size": 12}, "align": "left"},
        height=height,
        margin={"l": 80, "r": 30, "t": 40, "b": 60},
    )
    figure.update_xaxes(title_font={"size": 13})
    figure.update_yaxes(title_font={"size": 13})
    return figure.update_layout(**layout)
