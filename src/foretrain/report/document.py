"""Self-contained HTML pages: style, script and figures in one file, and the colours of all pictures.

``base.html`` beside this module is the frame, ``style.css`` its style and ``chart.js`` its script; a document's own
template extends the frame with its words.

Figures are plain data: traces and axes, named as in Plotly where it has them. A figure is JSON
of a few kB instead of a library of 4.8 MB: what pages draw are bars, lines, points, cells and parallel axes, which 500
lines on a canvas do, with zoom, hover, keyboard, dark mode and any width. Libraries that were weighed: uPlot has no
horizontal bars over time and no networks, Observable Plot (with d3) has no zoom.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import foretrain
from foretrain.errors import MissingExtra
from foretrain.trace import Kind

_PACKED = 20_000
"""Characters of JSON above which a page holds it compressed."""


class Figure:
    """Figure of one or more panels, each with an x and a y axis.

    Attributes:
        data: traces; each has ``type`` (bar, scatter, heatmap or parcoords), ``panel``, from 1, and what that type
            needs. Bars are horizontal. A hover template names fields as ``%{x:.3g}``; ``<b>`` and ``<br>`` are markup.
        layout: ``height`` in px, ``grid`` of panels, ``xaxis`` and ``yaxis`` of each panel by number, ``marks``: lines
            across a panel and strips behind it.
    """

    def __init__(self, height: int, *, rows: int = 1, columns: int = 1, **layout: Any) -> None:
        panels = [str(panel) for panel in range(1, rows * columns + 1)]
        self.data: list[dict[str, Any]] = []
        self.layout: dict[str, Any] = {
            "height": height,
            "grid": {"rows": rows, "columns": columns},
            "xaxis": {panel: {} for panel in panels},
            "yaxis": {panel: {} for panel in panels},
            "marks": [],
            **layout,
        }

    def add_bar(self, **trace: Any) -> None:
        """Add horizontal bars: ``y`` rows or names, ``x`` lengths, optionally ``base`` where they begin."""
        self.data.append({"type": "bar", "panel": 1, **trace})

    def add_scatter(self, **trace: Any) -> None:
        """Add lines, markers or text, by ``mode``; None in ``x`` or ``y`` interrupts a line."""
        self.data.append({"type": "scatter", "panel": 1, **trace})

    def add_heatmap(self, **trace: Any) -> None:
        """Add cells ``z`` of shape (y, x) with ``text``."""
        self.data.append({"type": "heatmap", "panel": 1, **trace})

    def add_parcoords(self, **trace: Any) -> None:
        """Add parallel axes, ``dimensions``; nothing else fits into such a figure."""
        self.data.append({"type": "parcoords", "panel": 1, **trace})

    def update_xaxes(self, panel: int | None = None, **options: Any) -> Figure:
        """Set options of the x axis of one panel, or of all."""
        return self._update("xaxis", panel, options)

    def update_yaxes(self, panel: int | None = None, **options: Any) -> Figure:
        """Set options of the y axis of one panel, or of all."""
        return self._update("yaxis", panel, options)

    def _update(self, axis: str, panel: int | None, options: dict[str, Any]) -> Figure:
        for number, known in self.layout[axis].items():
            if panel is None or number == str(panel):
                known.update(options)
        return self

    def add_line(self, *, x: float | None = None, y: float | None = None, **style: Any) -> None:
        """Add a line across a panel, vertical at ``x`` or horizontal at ``y``.

        Styles: ``color``, ``width``, ``dash``, ``label``, ``side`` of the label, and ``below``: behind the traces.
        """
        place = {"x": x} if y is None else {"y": y}
        self.layout["marks"].append({"panel": 1, **place, **style})

    def add_strip(self, x0: float, x1: float, color: str, *, panel: int = 1, opacity: float = 0.6) -> None:
        """Add a strip from ``x0`` to ``x1`` behind the traces."""
        self.layout["marks"].append({"panel": panel, "x0": x0, "x1": x1, "color": color, "opacity": opacity})

    def to_json(self) -> str:
        """Return the figure as JSON that cannot end a script element; numbers that are not finite are null."""
        text = json.dumps(_plain({"data": self.data, "layout": self.layout}), separators=(",", ":"), allow_nan=False)
        return text.replace("<", "\\u003c")

    def element(self, name: str) -> str:
        """Return the script element that holds the figure ``name`` of a page, compressed where it is large."""
        text = self.to_json()
        if len(text) < _PACKED:
            return f'<script type="application/json" id="{name}-data">{text}</script>'
        # Without a time of day: the same figure gives the same bytes.
        packed = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
        return f'<script type="application/gzip" id="{name}-data">{packed}</script>'

    def to_html(self) -> str:
        """Return the figure as a page of its own, for a file or a notebook's IFrame."""
        title = self.layout.get("title", "figure")
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{_escaped(title)}</title>'
            f"<style>{asset('style.css')}</style></head><body><main><h1>{_escaped(title)}</h1><section>"
            f'<div class="figure" id="figure"></div></section></main>{self.element("figure")}'
            f"<script>{asset('chart.js')}</script></body></html>\n"
        )


def asset(name: str) -> str:
    """Return the text of a file beside this module: ``chart.js`` or ``style.css``."""
    return (resources.files("foretrain.report") / name).read_text("utf-8")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


_AS_IS = frozenset((str, int, bool, type(None)))


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON takes it: finite floats to nine digits, NumPy's numbers as Python's."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, (list, tuple)) and _AS_IS.issuperset(map(type, value)):
        return value  # most of a timeline
    if isinstance(value, Iterable):
        return [_number(one) if type(one) is float else _plain(one) for one in value]
    return _number(float(value))


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return float(f"{value:.9g}") if value % 1 else int(value)


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


@dataclass(frozen=True, slots=True)
class Card:
    """Key number: its label, the number, and a line that explains it."""

    label: str
    value: str
    note: str


def document(template: str, figures: Mapping[str, Figure], *, command: str = "", **values: object) -> str:
    """Fill ``template`` with ``values`` and, by the ids of their places, ``figures``; MissingExtra without Jinja2.

    Every template needs ``good``, ``verdict``, ``reasons`` and ``cards`` for its head, which shows ``command`` to copy.
    """
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise MissingExtra("jinja2", "report", "an HTML page") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("foretrain.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template(template).render(
        **values,
        command=command,
        figures=list(figures),
        elements=[figure.element(name) for name, figure in figures.items()],
        style=asset("style.css"),
        script=asset("chart.js"),
        version=foretrain.__version__,
    )
