"""Line chart as SVG: a logarithmic or linear x axis, a linear y axis, a legend in the upper right corner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from foretrain.report.document import BLUE, FONT, GREY, INK, LINE, ORANGE
from foretrain.report.release_plot import ticks

Point = tuple[float, float]
COLORS = (INK, BLUE, ORANGE, "#16a34a", "#7c3aed")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 70, 24, 24, 60


def svg(
    lines: Mapping[str, Sequence[Point]], *, x: str, y: str, xs: Point, ys: Point, rule: float | None = None
) -> str:
    """Draw ``lines`` within ``xs`` and ``ys``; ``rule`` is an x to mark. From 0 on the x axis is linear."""

    def place(point: Point) -> Point:
        across = math.log(point[0] / xs[0]) / math.log(xs[1] / xs[0]) if xs[0] else point[0] / xs[1]
        up = (point[1] - ys[0]) / (ys[1] - ys[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="{FONT}" '
        f'font-size="12" fill="{INK}">',
        f"<title>{escape(y)} over {escape(x)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    marks = (0.1, 0.2, 0.5, 1, 2, 5, 10) if xs[0] else ticks(xs[1])
    for tick in (tick for tick in marks if xs[0] <= tick <= xs[1]):
        left, _ = place((tick, ys[0]))
        parts.append(f'<path d="M{left:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{LINE}"/>')
        parts.append(_text(left, HEIGHT - BOTTOM + 18, f"{tick:g}", "middle"))
    for step in range(round((ys[1] - ys[0]) * 10) + 1):
        value = ys[0] + step / 10
        _, top = place((xs[0], value))
        parts.append(f'<path d="M{LEFT} {top:.1f}H{WIDTH - RIGHT}" stroke="{LINE}"/>')
        parts.append(_text(LEFT - 8, top + 4, f"{value:.1f}", "end"))
    if rule is not None:
        left, _ = place((rule, ys[0]))
        parts.append(f'<path d="M{left:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{GREY}" stroke-dasharray="5 4"/>')
        parts.append(_text(left - 6, TOP + 12, "2/3", "end", GREY))
    for row, ((name, points), color) in enumerate(zip(lines.items(), COLORS, strict=False)):
        inside = [place(p) for p in points if xs[0] <= p[0] <= xs[1] and ys[0] <= p[1] <= ys[1]]
        path = "L".join(f"{left:.1f} {top:.1f}" for left, top in inside)
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        left, top = WIDTH - RIGHT - 110, TOP + 20 + 20 * row
        parts.append(f'<path d="M{left - 30} {top - 4}H{left - 8}" stroke="{color}" stroke-width="2"/>')
        parts.append(_text(left, top, name, "start"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 18, x, "middle"))
    parts.append(_text(LEFT - 50, TOP - 8, y, "start"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str, color: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
