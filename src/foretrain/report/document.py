"""An HTML file that needs neither network nor server: plotly.js is in it once, and figures are JSON that it draws.

``base.html`` beside this module holds all style and the script; a document's own template extends it with its words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import foretrain
from foretrain.errors import MissingExtra

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True, slots=True)
class Card:
    """One key number: its label, the number, and a line that explains it."""

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
    """A figure that cannot end the script element it is written into."""
    text = figure.to_json()
    assert text is not None
    return text.replace("<", "\\u003c")
