"""Self-contained HTML pages: plotly.js once, figures as JSON, and the colours and canvas of all pictures.

``base.html`` beside this module holds all style and the script; a document's own template extends it with its words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import foretrain
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
    """Return an empty figure in the house style. MissingExtra without plotly."""
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


@dataclass(frozen=True, slots=True)
class Card:
    """Key number: its label, the number, and a line that explains it."""

    label: str
    value: str
    note: str


def document(template: str, figures: Mapping[str, go.Figure], **values: object) -> str:
    """``template`` with ``values`` and, by the ids of their places, ``figures``; MissingExtra without plotly or Jinja2.

    Every template needs ``good``, ``verdict``, ``reasons`` and ``cards`` for its head.
    """
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise MissingExtra("jinja2", "report", "an HTML page") from error
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise MissingExtra("plotly", "report", "an HTML page") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("foretrain.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template(template).render(
        **values,
        figures={name: _json(figure) for name, figure in figures.items()},
        plotlyjs=get_plotlyjs(),
        version=foretrain.__version__,
    )


def _json(figure: go.Figure) -> str:
    """Return a figure as JSON that cannot end the script element around it."""
    text = figure.to_json()
    assert text is not None
    return text.replace("<", "\\u003c")
