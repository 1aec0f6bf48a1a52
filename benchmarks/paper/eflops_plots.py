"""Line charts of the figures: light SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from foretrain.files import write_atomically
from foretrain.report.document import BLUE, FONT, GREY, INK, LINE, ORANGE

Point = tuple[float, float]
COLORS = (BLUE, ORANGE, INK, "#16a34a", "#7c3aed", "#db2777", "#ca8a04")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 60, 230, 34, 56


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure.

    Attributes:
        name: of its files.
        title, x, y: what is shown over what.
        lines: points by the line's name.
        marks: on the x axis.
        top: of the y axis.
        rule: a published value to mark, and its name.
        log: whether the x axis is logarithmic.
    """

    name: str
    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[Point]]
    marks: Sequence[float]
    top: float
    rule: tuple[float, str] | None = None
    log: bool = True

    def write(self, folder: Path) -> None:
        """Write NAME.svg."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{self.name}.svg", self.svg())

    def svg(self) -> str:
        """As the documentation's own charts look, with a legend on the right."""
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="{FONT}" '
            f'font-size="12" fill="{INK}">',
            f"<title>{escape(self.title)}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
        ]
        for mark in self.marks:
            left, _ = self._place((mark, 0))
            parts.append(f'<path d="M{left:.1f} {TOP}V{bottom}" stroke="{LINE}"/>')
            parts.append(_text(left, bottom + 18, f"{mark:,g}", "middle"))
        step = next(step for step in (0.2, 1, 2, 5, 10) if self.top / step <= 8)
        for number in range(math.floor(self.top / step + 1e-9) + 1):
            _, height = self._place((self.marks[0], number * step))
            parts.append(f'<path d="M{LEFT} {height:.1f}H{right}" stroke="{LINE}"/>')
            parts.append(_text(LEFT - 8, height + 4, f"{number * step:g}", "end"))
        if self.rule:
            _, height = self._place((self.marks[0], self.rule[0]))
            parts.append(f'<path d="M{LEFT} {height:.1f}H{right}" stroke="{GREY}" stroke-dasharray="5 4"/>')
            parts.append(_text(LEFT + 6, height - 5, self.rule[1], "start", GREY))
        for row, ((name, points), color) in enumerate(zip(self.lines.items(), COLORS, strict=False)):
            path = "L".join(f"{left:.1f} {height:.1f}" for left, height in map(self._place, points))
            parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
            height = TOP + 12 + 22 * row
            parts.append(f'<path d="M{right + 14} {height - 4}h20" stroke="{color}" stroke-width="2"/>')
            parts.append(_text(right + 40, height, name, "start"))
        parts.append(_text((LEFT + right) / 2, HEIGHT - 16, self.x, "middle"))
        parts.append(_text(LEFT - 44, TOP - 14, self.y, "start"))
        return "\n".join([*parts, "</svg>", ""])

    def _place(self, point: Point) -> Point:
        low, value, high = (math.log(x) if self.log else x for x in (self.marks[0], point[0], self.marks[-1]))
        across = (value - low) / (high - low)
        return (
            LEFT + across * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - point[1] / self.top * (HEIGHT - TOP - BOTTOM),
        )


def _text(x: float, y: float, text: str, anchor: str, color: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
