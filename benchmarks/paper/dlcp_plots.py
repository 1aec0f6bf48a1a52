"""DLCP's figures: distributions of flow completion times, gains per model, sensitivity to p and K, grey failure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from eflops_plots import COLORS, Chart
from numpy.typing import NDArray

from foretrain.files import write_atomically
from foretrain.report.document import FONT, INK, LINE

LEAST, MOST = 0.001, 10_000
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 320, 60, 40, 60


def distributions(times: Mapping[str, NDArray[np.float64]]) -> Chart:
    """Of flow completion times, ms, at a hundred quantiles."""
    shares = np.linspace(0.01, 1, 100)
    lines = {
        name: list(zip(np.clip(np.quantile(found, shares), LEAST, MOST).tolist(), shares.tolist(), strict=True))
        for name, found in times.items()
    }
    marks = tuple(10.0**k for k in range(-3, 5))
    return Chart("dlcp-fct", "Flow completion times of pushes", "ms", "share of flows", lines, marks=marks, top=1.0)


def sensitivity(name: str, title: str, x: str, lines: Mapping[str, Sequence[tuple[float, float]]], log: bool) -> Chart:
    """Mean flow completion times, ms, over what is changed."""
    marks = sorted({x for points in lines.values() for x, _ in points})
    top = max(y for points in lines.values() for _, y in points) * 1.1
    return Chart(name, title, x, "mean, ms", lines, marks=marks, top=top, log=log)


@dataclass(frozen=True, slots=True)
class Bars:
    """How much lower completion times are, by model; groups of bars.

    Attributes:
        name: of its files.
        title: what is shown.
        groups: gains, 0.1 for a tenth, by model and then by what they are over; all models have the same.
    """

    name: str
    title: str
    groups: Mapping[str, Mapping[str, float]]

    def write(self, folder: Path) -> None:
        """Write NAME.svg."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{self.name}.svg", self.svg())

    def svg(self) -> str:
        bars, low, high = self._bars(), *self._range()
        wide = (WIDTH - LEFT - 20) / len(self.groups)
        thin = 0.8 * wide / len(bars)

        def height(value: float) -> float:
            return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="{FONT}" '
            f'font-size="12" fill="{INK}">',
            f"<title>{escape(self.title)}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
        ]
        for value in range(low, high + 1, 20):
            parts.append(f'<path d="M{LEFT} {height(value):.1f}H{WIDTH - 20}" stroke="{LINE}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{height(value) + 4:.1f}" text-anchor="end">{value} %</text>')
        for k, (model, group) in enumerate(self.groups.items()):
            left = LEFT + (k + 0.1) * wide
            for place, (name, color) in enumerate(zip(bars, COLORS, strict=False)):
                ends = sorted((height(0), height(100 * group[name])))
                parts.append(
                    f'<rect x="{left + place * thin:.1f}" y="{ends[0]:.1f}" width="{thin - 2:.1f}" '
                    f'height="{ends[1] - ends[0]:.1f}" fill="{color}"/>'
                )
            middle = left + 0.4 * wide
            parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{model}</text>')
        for place, (name, color) in enumerate(zip(bars, COLORS, strict=False)):
            at = LEFT + place * (WIDTH - LEFT) / len(bars)
            parts.append(f'<rect x="{at:.1f}" y="{HEIGHT - 24}" width="12" height="12" fill="{color}"/>')
            parts.append(f'<text x="{at + 18:.1f}" y="{HEIGHT - 13}">{escape(name)}</text>')
        return "\n".join([*parts, "</svg>", ""])

    def _bars(self) -> list[str]:
        return list(next(iter(self.groups.values())))

    def _range(self) -> tuple[int, int]:
        values = [100 * value for group in self.groups.values() for value in group.values()]
        return 20 * math.floor(min(0, *values) / 20), 20 * math.ceil(max(20, *values) / 20)
