"""The release-time staircase: when each gradient of a backward pass becomes available, and in which blocks.

Gradients leave a backward pass in steps, several at nearly the same instant (Prophet, ICPP'21, Fig. 3): flat stretches
are time in which a network has nothing new to send. Blocks, shaded, are those of `foretrain.schedule.monitor`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from foretrain.report.document import BLUE, FONT, GREY, INK, LINE, Figure
from foretrain.schedule.monitor import blocks
from foretrain.units import MILLISECOND, format_size, format_time
from foretrain.workload.step import Workload

CAPTION = "shaded: blocks of gradients released together, cut where a gap is more than twice the mean gap"


@dataclass(frozen=True, slots=True)
class Staircase:
    """Staircase as data. The first point is the start of the backward pass, with nothing released.

    Attributes:
        times: ms since backward begins, ascending; of the start, and of each gradient in release order.
        sizes: MB released up to and including each point.
        names: what is released at each point.
        bands: (from, to) in ms of each block.
        labels: of each band, how many gradients and bytes are in it.
        end: ms of the whole backward pass.
        title: one line.
    """

    times: tuple[float, ...]
    sizes: tuple[float, ...]
    names: tuple[str, ...]
    bands: tuple[tuple[float, float], ...]
    labels: tuple[str, ...]
    end: float
    title: str


def steps(workload: Workload) -> Staircase:
    """Return the staircase of one workload."""
    gradients = workload.gradients
    groups = blocks([gradient.release for gradient in gradients])
    order = [gradients[index] for group in groups for index in group]
    total, sizes = 0, [0.0]
    for gradient in order:
        total += gradient.size
        sizes.append(total / 1e6)
    return Staircase(
        times=(0.0, *(gradient.release / MILLISECOND for gradient in order)),
        sizes=tuple(sizes),
        names=("backward begins", *(f"{gradient.name}, {format_size(gradient.size)}" for gradient in order)),
        bands=tuple((gradients[g[0]].release / MILLISECOND, gradients[g[-1]].release / MILLISECOND) for g in groups),
        labels=tuple(f"{_count(len(g), 'gradient')}, {format_size(sum(gradients[i].size for i in g))}" for g in groups),
        end=workload.backward / MILLISECOND,
        title=f"{workload.name}: {_count(len(order), 'gradient')} ({format_size(workload.size)}) "
        f"in {_count(len(groups), 'block')}, backward {format_time(workload.backward)}",
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def staircase(workload: Workload) -> Figure:
    """An interactive figure: bytes above, number of gradients below, over the same time; hover names the parameter."""
    data = steps(workload)
    figure = Figure(560, rows=2, parts=[0.6, 0.4], shared=True, showlegend=False, title=data.title)
    hover = "%{customdata}<br>at %{x:.4g} ms: %{y:.4g} "
    for row, values, color, unit in (
        (1, data.sizes, BLUE, "MB released"),
        (2, tuple(range(len(data.times))), GREY, "gradients released"),
    ):
        figure.add_scatter(
            x=(*data.times, data.end),
            y=(*values, values[-1]),
            customdata=(*data.names, "backward ends"),
            hovertemplate=f"{hover}{unit}",
            mode="lines+markers",
            line={"shape": "hv", "color": color, "width": 2},
            marker={"size": 5, "color": color},
            panel=row,
        )
    _add_blocks(figure, data)
    figure.update_xaxes(2, title="time since backward begins (ms)")
    figure.update_yaxes(1, title="released (MB)", rangemode="tozero")
    figure.update_yaxes(2, title="gradients", rangemode="tozero")
    return figure


def _add_blocks(figure: Figure, data: Staircase) -> None:
    """A shaded strip for each block through both panels, its number above it."""
    least = data.end / 400  # so that a block of one instant can be seen
    for panel in (1, 2):
        for begin, end in data.bands:
            figure.add_strip(begin - least, end + least, LINE, panel=panel)
    figure.add_scatter(
        x=[(begin + end) / 2 for begin, end in data.bands],
        y=[data.sizes[-1] * 1.06] * len(data.bands),
        mode="text",
        text=_numbers(data, data.end / 40),
        hovertext=[f"block {number + 1}: {label}" for number, label in enumerate(data.labels)],
        hovertemplate="%{hovertext}",
        panel=1,
    )


def _numbers(data: Staircase, apart: float) -> list[str]:
    """Return the number of each block, or nothing where it would be written over the one before."""
    numbers, last = [], -apart
    for number, (begin, end) in enumerate(data.bands, 1):
        middle = (begin + end) / 2
        numbers.append(str(number) if middle - last >= apart else "")
        last = middle if numbers[-1] else last
    return numbers


@dataclass(frozen=True, slots=True)
class _Panel:
    """Pair of axes in the SVG: ``top`` and ``height`` in px, values from 0 to ``most``."""

    top: float
    height: float
    most: float
    color: str
    label: str

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - value / self.most)


_WIDTH, _HEIGHT, _LEFT, _RIGHT = 960, 560, 78, 24


def staircase_svg(workload: Workload) -> str:
    """Draw the staircase as a stand-alone SVG of 960 x 560 px, without dependencies; a tooltip names each parameter."""
    data = steps(workload)
    most = max(data.end, data.times[-1]) or 1.0
    upper = _Panel(84, 252, data.sizes[-1] * 1.05, BLUE, "released (MB)")
    lower = _Panel(360, 140, (len(data.times) - 1) * 1.05, GREY, "released (gradients)")
    counts = tuple(float(count) for count in range(len(data.times)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'font-family="{FONT}" font-size="12" fill="{INK}">',
        f"<title>{escape(data.title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="32" font-size="17" font-weight="600">{escape(data.title)}</text>',
        _text(_LEFT, 51, CAPTION, f'fill="{GREY}"'),
        *_bands(data, most, (upper, lower)),
        *_panel(data, data.sizes, most, upper),
        *_panel(data, counts, most, lower),
        *_time_axis(most, lower.top + lower.height),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(time: float, most: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * time / most


def _bands(data: Staircase, most: float, panels: tuple[_Panel, ...]) -> list[str]:
    """A shaded strip for each block, its number above it where there is room."""
    parts: list[str] = []
    free = 0.0
    for index, ((begin, end), label) in enumerate(zip(data.bands, data.labels, strict=True)):
        left, right = _x(begin, most) - 2.5, _x(end, most) + 2.5
        hint = f"<title>block {index + 1}: {escape(label)}</title>"
        for panel in panels:
            shape = f'x="{left:.1f}" y="{panel.top}" width="{right - left:.1f}" height="{panel.height}"'
            parts.append(f'<rect {shape} fill="{LINE}">{hint}</rect>')
        middle = (left + right) / 2
        if middle - 9 >= free:
            parts.append(_text(middle, panels[0].top - 7, str(index + 1), f'text-anchor="middle" fill="{GREY}"'))
            free = middle + 9
    return parts


def _panel(data: Staircase, values: tuple[float, ...], most: float, panel: _Panel) -> list[str]:
    """Axis, staircase and one dot per gradient."""
    parts: list[str] = []
    for tick in ticks(panel.most):
        y = panel.y(tick)
        grid = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
        parts.append(f'<line {grid} stroke="{GREY}" stroke-opacity="0.18"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{tick:g}", f'text-anchor="end" fill="{GREY}"'))
    middle = panel.top + panel.height / 2
    turned = f'transform="rotate(-90 20 {middle:.1f})" text-anchor="middle"'
    parts.append(_text(20, middle, panel.label, turned))
    path = f"M{_LEFT} {panel.y(0):.1f}"
    for time, value in zip(data.times, values, strict=True):
        path += f"H{_x(time, most):.1f}V{panel.y(value):.1f}"
    parts.append(f'<path d="{path}H{_x(data.end, most):.1f}" fill="none" stroke="{panel.color}" stroke-width="2"/>')
    for time, value, name in list(zip(data.times, values, data.names, strict=True))[1:]:
        dot = f'cx="{_x(time, most):.1f}" cy="{panel.y(value):.1f}" r="2.6" fill="{panel.color}"'
        parts.append(f"<circle {dot}><title>{escape(name)}, at {time:.4g} ms</title></circle>")
    return parts


def _time_axis(most: float, y: float) -> list[str]:
    parts = [f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GREY}"/>']
    parts += [_text(_x(tick, most), y + 18, f"{tick:g}", f'text-anchor="middle" fill="{GREY}"') for tick in ticks(most)]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return [*parts, _text(middle, y + 42, "time since backward begins (ms)", 'text-anchor="middle"')]


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def ticks(most: float, wanted: int = 6) -> list[float]:
    """Round numbers from 0 to ``most``: multiples of 1, 2 or 5 times a power of ten, about ``wanted`` of them."""
    power = 10.0 ** math.floor(math.log10(most / wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * wanted >= most)
    return [round(step * index, 12) for index in range(int(most / step + 1e-9) + 1)]
