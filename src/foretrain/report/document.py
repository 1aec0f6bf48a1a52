"""Self-contained HTML pages: style, script and figures in one file, and the colours of all pictures.

``base.html`` beside this module is the frame, ``style.css`` its style and ``chart.js`` its script; a document's own
template extends the frame with its words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import foretrain
from foretrain.errors import MissingExtra
from foretrain.report.figure import Figure, asset
from foretrain.trace import Kind

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
    """``template`` with ``values`` and, by the ids of their places, ``figures``; MissingExtra without Jinja2.

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
